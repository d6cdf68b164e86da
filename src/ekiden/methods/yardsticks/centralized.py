"""Centralized: all data in one place, the upper yardstick."""

from collections.abc import Iterator
from dataclasses import dataclass

from ekiden.authoring import Client, Count, Fed, Method, State, Traits, Weights, on_client


@dataclass(frozen=True)
class Centralized(Method):
    """Plain training on the union of all clients' data: what one could reach if the data were
    allowed to leave.

    The yardstick "centralized" of Brendan McMahan et al.: Communication-Efficient Learning of Deep
    Networks from Decentralized Data. AISTATS 2017. https://arxiv.org/abs/1602.05629. No algorithm
    of its own.

    Departures from the paper: none. Possible in simulation only. One epoch over the union costs
    what one epoch at every client does.
    """

    epochs: Count = 200
    """E, epochs over the union"""

    traits = Traits(pools_data=True, averages=False)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield one state: train at the one client that has all data."""
        if s.step == 0:
            s = s.next(model=fed.call(self.train, fed.clients[0], s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        """Train on the plain loss."""
        return client.fit(model, epochs=self.epochs)

    def fits(self) -> tuple[int, ...]:
        """Return the epochs of the training."""
        return (self.epochs,)

    def steps(self, clients: int) -> int:
        return 1

    def cost(self, clients: int, model: int) -> int:
        """No model moves: the data did, before."""
        return 0
