"""FedProx: federated averaging with a proximal term in the local loss."""

from collections.abc import Iterator
from dataclasses import dataclass

from ekiden.authoring import (
    Client,
    Count,
    CountOrZero,
    Fed,
    Fraction,
    NonNegative,
    Positive,
    State,
    Weights,
    on_client,
)
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.combining import Rule
from ekiden.methods.blocks.rounds import AveragingMethod


@dataclass(frozen=True)
class FedProx(AveragingMethod):
    """Federated averaging in which each client stays near the global model of the round.

    Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith:
    Federated Optimization in Heterogeneous Networks. MLSys 2020. https://arxiv.org/abs/1812.06127
    (local loss F_i(w) + μ/2 ‖w - w^r‖²).

    Departures from the paper: clients are drawn uniformly and weighted by their numbers of samples,
    as in most code; the paper draws them by their numbers of samples and averages uniformly. All
    clients do the same number of epochs. μ is fixed; the paper's heuristic that adapts μ to the
    loss is not offered.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round"""
    mu: NonNegative = 0.01
    """μ, weight of the proximal term; 0 is FedAvg"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    weighting: shared.Weighting = "samples"
    """p_i, weights of the average: numbers of samples, or uniform"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    combine: Rule = "mean"
    """how the server combines models: their mean, or a rule that tolerates some arbitrary models"""
    faulty: CountOrZero = 1
    """f, number of clients that may send arbitrary models: trimmed-mean drops f values at each end,
    and krum assumes f such clients"""
    clip_update: NonNegative = 0.0
    """C, longest step that a client may take from the model that it was sent; the server shortens
    longer steps. 0: no limit"""
    secure: bool = False
    """add up models in fixed point, so that between machines masks hide all but their sum"""

    fits = shared.every_round

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            model = shared.at_server(fed, s.model)
            target = self.averaged(fed, model, s.step)
            s = s.next(model=shared.server_step(model, target, self.server_lr))
            yield s

    @on_client(gives=shared.alone)
    def train(self, client: Client, model: Weights, round: int) -> shared.Reply:
        """Train for E epochs on F_i(w) + (μ/2)‖w - w^r‖²."""
        training = self.training(client, round)
        penalty = shared.Proximal(self.mu, model.params) if self.mu else None
        trained = client.fit(model, epochs=self.epochs, penalty=penalty, training=training)
        return shared.Reply.of(client, trained, self.weighting)
