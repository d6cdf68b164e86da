"""FedSeq: plain sequential federated learning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    Method,
    NonNegative,
    State,
    Traits,
    Weights,
    on_client,
)
from ekiden.core.engine.federation import in_order
from ekiden.methods.blocks.glam import Passing, alignment, transfers


@dataclass(frozen=True)
class FedSeq(Method):
    """Sequential federated learning (cyclic weight transfer): each client trains the received model
    and hands it on.

    Yipeng Li, Xinchen Lyu: Convergence Analysis of Sequential Federated Learning on Heterogeneous
    Data. NeurIPS 2023. https://arxiv.org/abs/2311.03154 (Algorithm 1). As cyclic weight transfer:
    Ken Chang et al.: Distributed deep learning networks among institutions for medical imaging.
    JAMIA 25(8), 2018.

    Departures from the paper: all clients take part in every round. Local training is counted in
    epochs and selects the best validation epoch, as in the comparisons of FedELMY's authors.
    Statistics of normalisation layers travel with the parameters, and the optimiser restarts at
    each client. Beyond the paper: GLAM, the loss of SPFL.
    """

    rounds: Count = 1
    """T, passes over all clients (shots); 1: one-shot"""
    epochs: Count = 200
    """E_local, epochs at each client"""
    order: str = "given"
    """order of the clients: given, reversed, random (redrawn each round), or names separated by
    commas"""
    align_previous: NonNegative = 0.0
    """τ, weight of GLAM's alignment with the received model (see SPFL)"""
    align_global: NonNegative = 0.0
    """ρ, weight of GLAM's alignment with the model that the round began with"""

    traits = Traits(skips=True, averages=False)  # a hop is left out

    def start(self) -> Passing:
        """Start before the first pass."""
        return Passing()

    def check(self, clients: Sequence[str]) -> None:
        """Refuse an order that does not name the clients."""
        in_order(self.order, clients)

    def run(self, fed: Fed, s: Passing) -> Iterator[State]:
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            if self.align_global:
                s = s.in_pass(round)
            origin = s.origin if self.align_global and s.origin != s.model else None
            s = s.next(model=fed.call(self.train, client, s.model, origin))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, origin: Weights | None = None) -> Weights:
        """Train from the received model. τ and ρ keep the outputs close to its own and to the
        round's first model's.
        """
        origin = model if origin is None else origin  # the first client of a round receives it
        objective = alignment(client, origin, model, self.align_previous, self.align_global)
        return client.fit(model, epochs=self.epochs, objective=objective)

    def fits(self) -> tuple[int, ...] | None:
        """Return the epochs of each visit; alignment would compare outputs for samples."""
        return None if self.align_previous or self.align_global else (self.epochs,) * self.rounds

    def steps(self, clients: int) -> int:
        """Return T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """(T·N - 1)·M: nothing is sent to the first client or from the last; with ρ (T - 1)(N -
        2)·M more.

        Less where a client is the last of a pass and the first of the next.
        """
        return transfers(clients, self.rounds, self.align_global) * model
