"""FedAvg: federated averaging."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ekiden.authoring import (
    BelowOne,
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
class ServerOptimizer(State):
    """The memory of the server's optimiser: v, or m and v of Adam."""

    momentum: Tensor | None = None
    second: Tensor | None = None


# τ of Adam at the server, its degree of adaptivity: the value that its authors use most often
_TAU = 1e-3


@dataclass(frozen=True)
class FedAvg(AveragingMethod):
    """Federated averaging: clients train the global model side by side, the server averages what
    they send back.

    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017.
    https://arxiv.org/abs/1602.05629

    With `server_momentum` it is FedAvgM; with `server_optimizer = "adam"` FedAdam of Sashank Reddi
    et al.: Adaptive Federated Optimization. ICLR 2021. https://arxiv.org/abs/2003.00295

    Departures from the paper: the weights n_i are normalised over the clients that took part and
    answered, not over all. Running statistics are averaged with the same weights and are not part
    of the server's optimiser.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round"""
    participation: Fraction = 1.0
    """c (C in the paper), share of the clients drawn for each round; at least one client"""
    weighting: shared.Weighting = "samples"
    """p_i, weights of the average: numbers of samples, or uniform"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    """the server's optimiser on the mean change; sgd at rate 1 is plain averaging"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    server_momentum: BelowOne = 0.0
    """β, momentum of the server; β_1 of Adam"""
    server_beta2: BelowOne = 0.99
    """β_2 of Adam at the server"""
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

    def run(self, fed: Fed, s: ServerOptimizer) -> Iterator[State]:
        while s.step < self.rounds:
            model = shared.at_server(fed, s.model)
            s = self.update(s, model, self.averaged(fed, model, s.step))
            yield s

    @on_client(gives=shared.alone)
    def train(self, client: Client, model: Weights, round: int) -> shared.Reply:
        """Train for E epochs from the global model."""
        trained = client.fit(model, epochs=self.epochs, training=self.training(client, round))
        return shared.Reply.of(client, trained, self.weighting)

    def update(self, s: ServerOptimizer, model: Weights, target: Weights) -> ServerOptimizer:
        """Compute the server's step from `model` towards the average."""
        if self.server_optimizer == "sgd":
            new, buffer = shared.momentum_step(
                model, target, self.server_lr, self.server_momentum, s.momentum
            )
            return s.next(model=new, momentum=buffer)
        # as in FedAdam: no correction of the bias of the first steps; v begins with τ²
        beta = self.server_momentum
        beta2 = self.server_beta2
        change = target.params - model.params
        first = (1 - beta) * change + (beta * s.momentum if s.momentum is not None else 0)
        second = (1 - beta2) * change**2 + beta2 * (s.second if s.second is not None else _TAU**2)
        params = model.params + self.server_lr * first / (second.sqrt() + _TAU)
        return s.next(model=target.with_params(params), momentum=first, second=second)
