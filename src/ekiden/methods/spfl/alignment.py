"""GLAM for methods that hand a model from client to client."""

from dataclasses import dataclass, replace
from typing import Self

from ekiden.engine.method import INITIAL, Model, State
from ekiden.engine.worker import Client
from ekiden.methods.spfl.glam import GLAM
from ekiden.training.objective import Objective
from ekiden.training.weights import Weights


@dataclass(frozen=True)
class Passing(State):
    """The state with w_g, the model with which a pass over the clients began, and the number of that pass."""

    origin: Model | None = INITIAL
    begun: int = -1

    def in_pass(self, number: int) -> Self:
        """Return the state with this pass's w_g: the model at its first hop that is not left out."""
        return self if self.begun == number else replace(self, origin=self.model, begun=number)


def alignment(client: Client, reference: Weights | None, previous: Weights | None, tau: float, rho: float) -> Objective:
    """Return the loss ℓ + ρ·L_ag + τ·L_ap of a task; a term without its model is left out."""
    w_g = client.network(reference) if reference is not None and rho else None
    w_p = client.network(previous) if previous is not None and tau else None
    if w_g is None and w_p is None:
        return client.loss
    return GLAM(w_g, w_p, tau, rho, client.task)


def transfers(clients: int, rounds: int, align_global: float) -> int:
    """Return how many models move: T·N - 1 hand-overs, and from the second pass on w_g to clients that lack it."""
    return rounds * clients - 1 + ((rounds - 1) * max(clients - 2, 0) if align_global else 0)
