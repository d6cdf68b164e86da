"""FedSeq: plain sequential federated learning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ekiden.core.federation import Fed, in_order
from ekiden.core.method import Method, State, on_client
from ekiden.core.worker import Client
from ekiden.learning.training import require
from ekiden.learning.weights import Weights


@dataclass(frozen=True)
class FedSeq(Method):
    """Sequential federated learning (cyclic weight transfer): each client trains the model it receives, hands it on.

    Yipeng Li, Xinchen Lyu: Convergence Analysis of Sequential Federated Learning on Heterogeneous Data.
    NeurIPS 2023. https://arxiv.org/abs/2311.03154 (Algorithm 1). As cyclic weight transfer: Ken Chang et al.:
    Distributed deep learning networks among institutions for medical imaging. JAMIA 25(8), 2018.

    Departures from the paper: all clients take part in every round; local training is counted in epochs and selects
    the best validation epoch, as where FedELMY's authors compare with it; statistics of normalisation layers travel
    with the parameters, and the optimiser starts anew at each client.
    """

    rounds: int = 1
    """T, passes over all clients (shots); 1: one-shot"""
    epochs: int = 200
    """E_local, epochs at each client"""
    order: str = "given"
    """order of the clients: given, reversed, random (drawn anew each round), or names separated by commas"""

    skips: ClassVar[bool] = True  # a hop is left out

    def __post_init__(self) -> None:
        require(self.rounds > 0, "rounds", self.rounds, "1 or more")
        require(self.epochs > 0, "epochs", self.epochs, "1 or more")

    def check(self, clients: Sequence[str]) -> None:
        """The order must name them."""
        in_order(self.order, clients)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """One hop a step."""
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            s = s.next(model=fed.call(self.train, client, s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        """Plain training from the received model."""
        return client.fit(model, epochs=self.epochs)

    def steps(self, clients: int) -> int:
        """T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """(T·N - 1)·M: nothing is sent to the first client or from the last."""
        return (self.rounds * clients - 1) * model
