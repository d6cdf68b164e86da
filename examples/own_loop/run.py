"""An own training loop at each client of a chain: `python run.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import ekiden
from ekiden.authoring import Client, Count, Fed, Method, State, Weights, on_client


@dataclass(frozen=True)
class Mixup(Method):
    """A chain whose clients mix each batch with itself in another order before they learn from it."""

    epochs: Count = 5
    """E, epochs at each client"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Visit every client once."""
        while s.step < len(fed.clients):
            s = s.next(model=fed.call(self.train, fed.clients[s.step], s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        """Train with a loss of your own; batches, optimiser and counting stay Ekiden's."""

        def mixed(forward, x, y):  # type: ignore[no-untyped-def]
            other = x.flip(0)
            outputs = forward(0.7 * x + 0.3 * other).float()
            loss = torch.nn.functional.cross_entropy
            return 0.7 * loss(outputs, y) + 0.3 * loss(outputs, y.flip(0))

        return client.fit(model, epochs=self.epochs, objective=mixed)

    def steps(self, clients: int) -> int:
        """Return the number of steps."""
        return clients

    def cost(self, clients: int, model: int) -> int:
        """Return the bytes that move."""
        return (clients - 1) * model


if __name__ == "__main__":
    silos = ekiden.split(ekiden.load("digits"), "iid", 4)
    for result in ekiden.steps(Mixup(), silos):
        print(f"after client {result.state.step}: accuracy {result.accuracy:.3f}")
