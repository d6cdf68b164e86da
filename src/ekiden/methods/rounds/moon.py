"""MOON: model-contrastive federated learning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.authoring import (
    Client,
    Count,
    CountOrZero,
    Fed,
    Forward,
    Fraction,
    NonNegative,
    Objective,
    Positive,
    State,
    Weights,
    on_client,
)
from ekiden.core.models.split import Split, as_split
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.combining import Rule


@dataclass(frozen=True)
class MOON(shared.RobustMethod):
    """Federated averaging that keeps representations near the global model's and away from the
    client's last model's.

    Qinbin Li, Bingsheng He, Dawn Song: Model-Contrastive Federated Learning. CVPR 2021.
    https://arxiv.org/abs/2103.16257
    (local loss ℓ + μ ℓ_con).

    Departures from the paper: representations are the inputs of the network's last layer. A
    projection head before that layer is part of the network; the library's networks have none. A
    client that takes part for the first time has no last model, and so no contrast.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 10
    """E, local epochs per round"""
    mu: NonNegative = 5.0
    """μ, weight of the contrast; 0 is FedAvg"""
    temperature: Positive = 0.5
    """τ, temperature of the contrast"""
    earlier_models: Count = 1
    """J, number of its own earlier models that a client keeps and is pushed away from"""
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

    traits = replace(shared.RobustMethod.traits, private=list[Weights])

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            model = shared.at_server(fed, s.model)
            target = self.averaged(fed, model, s.step)
            s = s.next(model=shared.server_step(model, target, self.server_lr))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> shared.Reply:
        """Train for E epochs on ℓ + μ ℓ_con; the result is also used in the next rounds'
        contrast.
        """
        previous = client.state or []
        objective = self.contrast(client, model, previous, client.loss)
        training = self.training(client, round)
        trained = client.fit(model, epochs=self.epochs, objective=objective, training=training)
        # without a contrast nobody would read the models
        if self.mu:
            client.state = [*previous, trained][-self.earlier_models :]
        return shared.Reply.of(client, trained, self.weighting)

    def contrast(
        self, client: Client, received: Weights | None, previous: Sequence[Weights], base: Objective
    ) -> Objective:
        """Return ℓ + μ ℓ_con: near the representations of w^r, away from those of the kept models,
        if there are any.
        """
        if not (self.mu and previous and received is not None):
            return base
        positive, *negatives = (as_split(client.network(model)) for model in (received, *previous))
        return ContrastiveLoss(positive, negatives, self.mu, self.temperature, base)


@dataclass(frozen=True)
class ContrastiveLoss(Objective):
    """ℓ + μ ℓ_con, the representation and the answer from one pass; ℓ is `base`."""

    received: Split
    previous: Sequence[Split]
    mu: float
    temperature: float
    base: Objective

    @property
    def fixed(self) -> bool:
        """Whether the base loss is."""
        return self.base.fixed

    @property
    def teachers(self) -> tuple[Forward, ...]:
        """The networks of the positive and the negatives, and the base loss's teachers."""
        own = (frozen.features for frozen in (self.received, *self.previous))
        return (*own, *self.base.teachers)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a batch, given the representations of the frozen networks."""
        positive, *others = answers
        network = as_split(forward)
        z = network.features(x)
        negatives = others[: len(self.previous)]
        said = others[len(self.previous) :]
        contrast = contrastive(z.float(), positive, negatives, self.temperature)
        return self.base(lambda _: network.head(z), x, y, *said) + self.mu * contrast


def contrastive(
    z: Tensor, positive: Tensor, negatives: Sequence[Tensor], temperature: float
) -> Tensor:
    """Return ℓ_con, the mean over a batch of -log of the softmax share of the positive; all are (b,
    d).
    """
    similarities = [F.cosine_similarity(z, other, dim=1) for other in (positive, *negatives)]
    scores = torch.stack(similarities, dim=1) / temperature
    return -F.log_softmax(scores, dim=1)[:, 0].mean()
