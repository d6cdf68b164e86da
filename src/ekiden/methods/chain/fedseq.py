"""FedSeq: plain sequential federated learning."""

from collections.abc import Iterator
from dataclasses import dataclass

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    State,
    Traits,
    Weights,
    on_client,
)
from ekiden.methods.blocks.rounds import OrderedMethod, every_round


@dataclass(frozen=True)
class FedSeq(OrderedMethod):
    """Sequential federated learning (cyclic weight transfer): each client trains the received model
    and hands it on.

    Yipeng Li, Xinchen Lyu: Convergence Analysis of Sequential Federated Learning on Heterogeneous
    Data. NeurIPS 2023. https://arxiv.org/abs/2311.03154 (Algorithm 1). As cyclic weight transfer:
    Ken Chang et al.: Distributed deep learning networks among institutions for medical imaging.
    JAMIA 25(8), 2018.

    Departures from the paper: all clients take part in every round. Local training is counted in
    epochs and selects the best validation epoch, as in the comparisons of FedELMY's authors.
    Statistics of normalisation layers travel with the parameters, and the optimiser restarts at
    each client.
    """

    rounds: Count = 1
    """T, passes over all clients (shots); 1: one-shot"""
    epochs: Count = 200
    """E_local, epochs at each client"""
    order: str = "given"
    """order of the clients: given, reversed, random (redrawn each round), or names separated by
    commas"""

    traits = Traits(skips=True, averages=False)  # a hop is left out
    fits = every_round

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            s = s.next(model=fed.call(self.train, client, s.model))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Weights:
        """Train from the received model."""
        return client.fit(model, epochs=self.epochs)

    def steps(self, clients: int) -> int:
        """Return T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """(T·N - 1)·M: nothing is sent to the first client or from the last.

        Less where a client is the last of a pass and the first of the next.
        """
        return (self.rounds * clients - 1) * model
