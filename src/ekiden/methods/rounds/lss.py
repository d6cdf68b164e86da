"""LSS: local superior soups, averages of models that clients train between one another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from ekiden.authoring import (
    Client,
    Count,
    CountOrZero,
    Fed,
    Forward,
    Fraction,
    NonNegative,
    Objective,
    State,
    Weights,
    mean,
    on_client,
)
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.combining import Rule
from ekiden.methods.blocks.rounds import RobustMethod


@dataclass(frozen=True)
class LSS(RobustMethod):
    """Few rounds of averaging, in which each client trains a pool of models whose mixtures all do
    well, and sends their mean.

    Minghui Chen, Meirui Jiang, Xin Zhang, Qi Dou, Zehua Wang, Xiaoxiao Li: Local Superior Soups: A
    Catalyst for Model Merging in Cross-Silo Federated Learning. NeurIPS 2024.
    https://arxiv.org/abs/2410.23660 (Algorithm 1; loss L(f_s) + λ_a dist(f_i, f_p) - λ_d dist(f_i,
    M)).

    The pool M starts with the received model f_p. Each further model f_i starts from the mean of M
    and joins it. In each step it gets the gradient at f_s, a random mixture of all models in M, of
    which only f_i is trained.

    Departures from the paper: written after its abstract, the algorithm that the authors print with
    their code, and that code; the rest of the text was not available. dist(f, g) is the Euclidean
    distance and dist(f, M) its mean over the other models of M; the code takes the square of the
    former, and the volume of the simplex of M for the latter. As in the code, the shares of a
    mixture are uniform on the simplex. The code first trains one model without mixtures, and lets
    it take the place of f_p in M. The paper starts from a pretrained network. λ_a, λ_d, n and E are
    proposals.
    """

    rounds: Count = 1
    """R, rounds"""
    models: Count = 3
    """n, models that a client trains in a round"""
    epochs: Count = 5
    """epochs of each model: τ steps"""
    affinity: NonNegative = 0.01
    """λ_a, weight of the distance from the received model"""
    diversity: NonNegative = 0.01
    """λ_d, weight of the distance from the pool"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    weighting: shared.Weighting = "samples"
    """p_i, weights of the average: numbers of samples, or uniform"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    combine: Rule = "mean"
    """how the server combines models: their mean, or a rule that tolerates some arbitrary models"""
    faulty: CountOrZero = 1
    """f, number of clients that may send arbitrary models: trimmed-mean drops f values at each end,
    and krum assumes f such clients"""
    clip_update: NonNegative = 0.0
    """C, longest step that a client may take from the model that it was sent; the server shortens
    longer steps. 0: no limit"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            model = shared.at_server(fed, s.model)
            s = s.next(model=self.averaged(fed, model, s.step))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> shared.Reply:
        """Train n models, each from the mean of the pool so far (Algorithm 1)."""
        training = self.training(client, round)
        pool = [model]
        for _ in range(self.models):
            others = [one.params for one in pool]
            trained = client.fit(
                mean(pool),
                epochs=self.epochs,
                objective=Mixture(client, others),
                penalty=Spread(others, self.affinity, self.diversity),
                training=training,
            )
            pool.append(trained)
        return shared.Reply.of(client, mean(pool), self.weighting)


@dataclass(frozen=True)
class Mixture(Objective):
    """ℓ at a random mixture f_s of the model in training and the others of the pool."""

    client: Client
    others: Sequence[Tensor]  # (P,) each

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a batch."""
        *fixed, own = shares(len(self.others) + 1).tolist()
        rest = torch.zeros_like(self.others[0])
        for share, other in zip(fixed, self.others, strict=True):
            rest.add_(other, alpha=share)
        module = self.client.module
        values = {}
        for part in self.client.layout.params:
            values[part.name] = part.of(rest) + own * module.get_parameter(part.name)
        return self.client.loss(partial(functional_call, module, values), x, y)


def shares(models: int) -> Tensor:
    """Return the shares of a mixture, uniform on the simplex."""
    parts = -torch.rand(models).log()
    return parts / parts.sum()


@dataclass(frozen=True)
class Spread:
    """λ_a ‖θ - θ_p‖ - (λ_d/n) Σ ‖θ - θ_t‖ over the n models of the pool, θ_p among them."""

    pool: Sequence[Tensor]  # θ_p first
    affinity: float  # λ_a
    diversity: float  # λ_d

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add the gradient; a distance of 0 has none."""
        weight = self.affinity - self.diversity / len(self.pool)
        for member in self.pool:
            apart = params - member
            if length := float(apart.norm()):
                grad.add_(apart, alpha=weight / length)
            weight = -self.diversity / len(self.pool)
