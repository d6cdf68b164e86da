"""GLAM, the global-local alignment module: a local loss that holds a network's answers near those
of two others.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ekiden.authoring import Client, Forward, Objective, Task, Weights
from ekiden.core.tasks import Classification


@dataclass(frozen=True)
class GLAM(Objective):
    """ℓ + ρ·L_ag + τ·L_ap, an `Objective`. Its teachers are in evaluation mode."""

    reference: Forward | None  # w_g, the global model; None with ρ = 0
    previous: Forward | None  # w_p; None with τ = 0
    tau: float
    rho: float
    task: Task
    fixed = True

    @property
    def teachers(self) -> tuple[Forward, ...]:
        """The two networks, or the one that is used."""
        return tuple(f for f in (self.reference, self.previous) if f is not None)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a batch, given the teachers' answers."""
        said = iter(answers)
        reference, previous = (
            None if f is None else next(said) for f in (self.reference, self.previous)
        )
        outputs = forward(x).float()
        if isinstance(self.task, Classification) and not self.task.weights:
            return aligned(outputs, reference, previous, y, self.tau, self.rho)
        # For classes the task's distances are L_ag and L_ap up to a constant: cross-entropy with a
        # teacher's answers is their divergence plus their entropy, and L_ap is the mean of the
        # divergences in both directions.
        distance = self.task.distance
        loss = self.task.mean_loss(outputs, y)
        if reference is not None:
            loss = loss + self.rho * distance(outputs, reference, 1.0)
        if previous is not None:
            both = distance(outputs, previous, 1.0) + distance(previous, outputs, 1.0)
            loss = loss + self.tau * both / 2
        return loss


def aligned(
    logits: Tensor,
    reference: Tensor | None,
    previous: Tensor | None,
    y: Tensor,
    tau: float,
    rho: float,
) -> Tensor:
    """Return the loss of logits (b, K): cross-entropy with labels and with the global model, and
    distance from w_p.

    L_ap is the symmetric divergence ½ Σ (p - q)(log p - log q), positive as the text of the paper
    wants it.
    """
    log_p = F.log_softmax(logits, dim=1)
    loss = F.nll_loss(log_p, y)
    if reference is not None:
        # L_ag = -Σ p_g log p.
        loss = loss - rho * (F.softmax(reference, dim=1) * log_p).sum(1).mean()
    if previous is not None:
        log_q = F.log_softmax(previous, dim=1)
        apart = (log_p.exp() - log_q.exp()) * (log_p - log_q)
        loss = loss + tau * apart.sum(1).mean() / 2
    return loss


def alignment(
    client: Client, reference: Weights | None, previous: Weights | None, tau: float, rho: float
) -> Objective:
    """Return the loss ℓ + ρ·L_ag + τ·L_ap of a task; a term without its model is left out."""
    w_g = client.network(reference) if reference is not None and rho else None
    w_p = client.network(previous) if previous is not None and tau else None
    if w_g is None and w_p is None:
        return client.loss
    return GLAM(w_g, w_p, tau, rho, client.task)
