"""Local: every client for itself, the lower yardstick."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ekiden.authoring import Client, Count, Fed, Fraction, State, Weights, on_client
from ekiden.methods.blocks.rounds import PersonalMethod, every_round, own_models, training_of


@dataclass(frozen=True)
class Local(PersonalMethod):
    """No communication: each client trains on its own data from the common initial model, and keeps
    its model.

    The baseline "Local" of most papers on personalised federated learning, among them Zhu, Fan,
    Xie: UA-PDFL. Neurocomputing (preprint 2024). https://arxiv.org/abs/2412.11674. No algorithm of
    its own.

    Departures from the paper: none. The optimiser restarts each round, as in the methods that it is
    compared with. Local training ends with the epoch that --select names, by default the best on
    validation data.
    """

    fits = every_round
    traits = replace(PersonalMethod.traits, averages=False)

    rounds: Count = 1
    """R, how often every client trains; this only divides the run into steps"""
    epochs: Count = 200
    """E, epochs per round"""
    lr_decay: Fraction = 1.0
    """factor of the learning rate η after each round"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            s = s.next(personal=fed.call_each(self.train, own_models(fed, s), s.step))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """Train the client's own model on the plain loss."""
        training = training_of(client, self.lr_decay, round)
        return client.fit(model, epochs=self.epochs, training=training)

    def cost(self, clients: int, model: int) -> int:
        """Nothing moves."""
        return 0
