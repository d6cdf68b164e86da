"""Co-Boosting: synthetic samples and the weights of the ensemble that teaches on them improve each
other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ekiden.authoring import (
    CLASSES,
    NUMBERS,
    Count,
    CountOrZero,
    Fed,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Traits,
    Work,
)
from ekiden.core.engine import wire
from ekiden.core.training.fit import kept
from ekiden.core.training.network import Network
from ekiden.methods.one_shot.blocks.ensemble import (
    Distilled,
    DistillingMethod,
    as_made,
    batches,
    softened,
    synthesise,
)

# largest norm of a gradient, of generator and student, as in the released code
_CLIP = 10.0


@dataclass(frozen=True)
class CoBoosting(DistillingMethod):
    """Clients send trained models once; hard synthetic samples and the models' weights improve each
    other.

    Rong Dai, Yonggang Zhang, Ang Li, Tongliang Liu, Xun Yang, Bo Han: Enhancing One-Shot Federated
    Learning Through Data and Ensemble Co-Boosting. ICLR 2024. https://arxiv.org/abs/2402.15070

    Each epoch a new generator makes a batch of samples that are hard for the weighted ensemble of
    the clients' models and on which the student disagrees with it. The weights take steps by the
    sign of the gradient of the ensemble's loss on the samples so far. Then the student learns the
    ensemble's answers, on samples that are moved in a random direction of its answers.

    Departures from the paper: written after the released code, with the defaults of its scripts and
    arguments; only the abstract and the objective of the text were available. As in the code,
    weights first change in the second epoch, on the samples of earlier epochs, which are not moved
    for this, and the loss on BatchNorm statistics has weight 0: it is left out. A step that would
    set all weights to 0 is skipped; the code would divide by 0. The student starts from the common
    initial model, as the clients do, and is in evaluation mode while samples are made. Samples of
    the pool are augmented as the clients' training data are. The result is the last epoch, not the
    best on the test set. For samples that are not images the generator is a perceptron. Local
    training ends with the epoch that --select names, by default the best on validation data.
    """

    epochs: Count = 100
    """E, epochs at each client"""
    distill_epochs: Count = 200
    """T, number of synthesised batches; after each, the student trains once on all batches so
    far"""
    steps_per_batch: Count = 30
    """T_G, steps of the generator for a batch"""
    distill_batch_size: Annotated[int, Range(least=2)] = 128
    """b, samples synthesised per epoch; also the batch size of the student and of the weights"""
    hardness: NonNegative = 1.0
    """exponent of 1 - p, the weight of a sample whose class has probability p under the ensemble;
    0: equal weights"""
    adv: NonNegative = 1.0
    """β, weight of the disagreement of student and ensemble"""
    adv_temperature: Positive = 3.0
    """temperature of the answers that should disagree"""
    generator_lr: Positive = 1e-3
    """η_G, learning rate of the generator (Adam)"""
    weight_steps: CountOrZero = 1
    """passes over the samples per epoch in which the models' weights are adapted; 0: all weights
    stay 1/N"""
    weight_lr: Positive = 0.01
    """μ, step of a weight per mini-batch"""
    weight_lr_decay: Fraction = 0.99
    """factor of μ after each epoch"""
    perturbation: NonNegative = 8 / 255
    """ε, how far each number of a scaled input is moved in the student's samples"""
    distill_lr: Positive = 0.01
    """η_S, learning rate of the student (SGD, momentum 0.9), at the start; it falls by a cosine"""
    distill_weight_decay: NonNegative = 1e-4
    """weight decay of the student"""
    temperature: Positive = 4.0
    """temperature of the answers that the student learns, and of those in whose direction samples
    are moved"""
    noise: Count = 256
    """length of the generator's input z"""
    generator_width: Count = 64
    """channels of the generator"""

    traits = Traits(needs=CLASSES | NUMBERS)

    def epoch(
        self,
        fed: Fed,
        s: Distilled,
        members: Sequence[nn.Module],
        student: Network,
        momentum: Tensor,
    ) -> Distilled:
        """Make samples, move the weights, train the student."""
        epoch = s.step - 1
        weights = s.weights
        if weights is None:
            weights = torch.full((len(members),), 1 / len(members))
        teacher = WeightedEnsemble(members, weights.to(momentum.device))
        pool, labels = self.synthesise(fed, teacher, student.module)
        if s.pool is not None and s.labels is not None:
            teacher.weights = self.reweighed(
                fed, teacher, s.pool, s.labels, self.weight_lr * self.weight_lr_decay**epoch
            )
            pool = torch.cat([s.pool, pool])
            labels = torch.cat([s.labels, labels])

        def loss_of(x: Tensor, draw: Generator) -> Tensor:
            x = self.diversified(fed, teacher, x, draw)
            with fed.autocast():
                with torch.no_grad():
                    answers = teacher(x)
                own = student.module(x).float()
            return softened(answers, own, self.temperature)

        lr = self.distill_lr * (1 + math.cos(math.pi * epoch / self.distill_epochs)) / 2
        self.distil(fed, student, momentum, pool, lr, loss_of)
        n = len(members)
        fed.work.add(Work((2 * n + 1) * len(pool), (n + 1) * len(pool)))
        weights = wire.placed(teacher.weights, torch.device("cpu"))
        return replace(s, weights=weights, pool=pool, labels=labels)

    def limit(self, student: Network) -> None:
        """Limit the gradient's norm, and add the weight decay."""
        student.grad.mul_(kept(student.grad, _CLIP)).add_(
            student.params, alpha=self.distill_weight_decay
        )

    def synthesise(
        self, fed: Fed, teacher: "WeightedEnsemble", student: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Return a new generator's samples with the smallest loss, and the classes that they were
        made for.
        """
        draw, generator, z = self.drawn(fed, student)
        labels = torch.randint(fed.layout.classes, (self.distill_batch_size,), generator=draw)
        wanted = labels.to(z.device)

        def loss_of(raw: Tensor) -> Tensor:
            with fed.autocast():
                x = fed.feed(raw)
                answers = teacher(x)
                own = student(x).float()
            return hard(answers, wanted, self.hardness) - self.adv * softened(
                answers, own, self.adv_temperature
            )

        made = synthesise(
            fed, generator, z, self.steps_per_batch, self.generator_lr, loss_of, _CLIP
        )
        return made, labels

    def reweighed(
        self, fed: Fed, teacher: "WeightedEnsemble", pool: Tensor, labels: Tensor, step: float
    ) -> Tensor:
        """Return the models' weights after passes over the pool in mini-batches."""
        draw = fed.generator("weights")
        weights = teacher.weights
        for _ in range(self.weight_steps):
            for rows in batches(len(pool), self.distill_batch_size, draw):
                x = fed.feed(as_made(pool, rows), draw)
                with torch.no_grad(), fed.autocast():
                    answers = teacher.answers(x)
                weights = moved(weights, answers, labels[rows].to(weights.device), step)
        fed.work.add(Work(self.weight_steps * len(teacher.members) * len(pool), 0))
        return weights

    def diversified(self, fed: Fed, teacher: nn.Module, x: Tensor, draw: Generator) -> Tensor:
        """Return x + ε·sign(∇_x uᵀ softmax(A(x) / T)), with u uniform in [-1, 1]^K for each
        sample.
        """
        u = 2 * torch.rand(len(x), fed.layout.classes, generator=draw) - 1
        x = x.detach().requires_grad_()
        with fed.autocast():
            answers = teacher(x)
        (slope,) = torch.autograd.grad(
            (u.to(x.device) * (answers / self.temperature).softmax(1)).sum(), x
        )
        return x.detach() + self.perturbation * slope.sign()


class WeightedEnsemble(nn.Module):
    """A(x) = Σ w_k f_k(x) / Σ w_k."""

    weights: Tensor  # (N,) w, at least one of them above 0

    def __init__(self, members: Sequence[nn.Module], weights: Tensor) -> None:
        super().__init__()
        self.members = nn.ModuleList(members).eval()  # the networks f_k
        self.register_buffer("weights", weights)

    def answers(self, x: Tensor) -> Tensor:
        """Return (N, b, K) logits of each member."""
        return torch.stack([member(x).float() for member in self.members])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K)."""
        return weighted(self.answers(x), self.weights)


def weighted(answers: Tensor, weights: Tensor) -> Tensor:
    """Σ w_k z_k / Σ w_k (b, K) of logits z (N, b, K)."""
    total: Tensor = torch.tensordot(weights, answers, 1)
    return total / weights.sum()


def hard(answers: Tensor, wanted: Tensor, exponent: float) -> Tensor:
    """Return L_H, the mean of (1 - p)^exponent · (-ln p), p being the wanted class's probability; 1
    - p is constant.
    """
    loss = F.cross_entropy(answers, wanted, reduction="none")
    return ((1 - (-loss.detach()).exp()) ** exponent * loss).mean()


def moved(weights: Tensor, answers: Tensor, y: Tensor, step: float) -> Tensor:
    """Return clip(w - μ·sign(∇_w ℓ), 0, 1), ℓ being the cross-entropy of A; w itself if nothing
    would be left of it.

    Args:
        weights: (N,) w.
        answers: (N, b, K) logits of the models.
        y: (b,) labels.
        step: μ.
    """
    at = weights.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(weighted(answers, at), y), at)
    new = (weights - step * slope.sign()).clamp(0, 1)
    return new if new.any() else weights
