"""A method of your own, next to FedSeq: `python run.py`; `ekiden check run.py:HalfSeq` checks it."""

from collections.abc import Iterator
from dataclasses import dataclass

import ekiden
from ekiden.authoring import Client, Count, Fed, Fraction, Method, State, Weights, mean, on_client


@dataclass(frozen=True)
class HalfSeq(Method):
    """Each client hands on the average of the model it received and the model it trained."""

    epochs: Count = 10
    """E, epochs at each client"""
    keep: Fraction = 0.5
    """κ, weight of the received model"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Visit every client once."""
        while s.step < len(fed.clients):
            s = s.next(model=fed.call(self.train, fed.clients[s.step], s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        """Train at a client; what this returns leaves it."""
        return mean([model, client.fit(model, epochs=self.epochs)], [self.keep, 1 - self.keep])

    def steps(self, clients: int) -> int:
        """Return the number of steps."""
        return clients

    def cost(self, clients: int, model: int) -> int:
        """Return the bytes that move."""
        return (clients - 1) * model


if __name__ == "__main__":
    silos = ekiden.split(ekiden.load("digits"), "dirichlet:0.5", 4)
    methods = [ekiden.FedSeq(epochs=5), HalfSeq(epochs=5, keep=0.3)]
    print(ekiden.study(methods, silos, seeds=range(2), folder="runs/own_method").table())
