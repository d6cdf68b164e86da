"""GLAM, the global-local alignment module: a local loss that holds a network's answers near those of two others."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.learning.fit import Forward


@dataclass(frozen=True)
class GLAM:
    """ℓ + ρ·L_ag + τ·L_ap, an `Objective` with two extra passes, of networks in evaluation mode."""

    reference: Callable[[Tensor], Tensor]  # w_g, the global model
    previous: Callable[[Tensor], Tensor]  # w_p
    tau: float
    rho: float

    def __call__(self, forward: Forward, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        with torch.no_grad():
            reference, previous = self.reference(x).float(), self.previous(x).float()
        return aligned(forward(x).float(), reference, previous, y, self.tau, self.rho)


def aligned(logits: Tensor, reference: Tensor, previous: Tensor, y: Tensor, tau: float, rho: float) -> Tensor:
    """The loss of logits (b, K): cross-entropy with the labels, with the global model's answers, and distance from w_p.

    L_ap is the symmetric divergence ½ Σ (p - q)(log p - log q), positive as the text of the paper wants it.
    """
    log_p, log_q = F.log_softmax(logits, dim=1), F.log_softmax(previous, dim=1)
    towards_reference = -(F.softmax(reference, dim=1) * log_p).sum(1).mean()
    from_previous = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(1).mean() / 2
    return F.nll_loss(log_p, y) + rho * towards_reference + tau * from_previous
