"""Distillation from a received model, on a client's own samples and on invented ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.data.augment import Augment
from ekiden.data.tasks import Classification, Task
from ekiden.training.objective import Forward, Objective, Work

Form = Literal["both", "kl"]
Invent = Callable[[Tensor, Tensor], Tensor]
"""Inputs (b, ...) made from the client's own inputs (b, ...) and their labels (b,)."""


@dataclass(frozen=True)
class Distillation(Objective):
    """The objective ℓ + λ τ² D of a mini-batch; the teacher sees the same inputs, in evaluation mode.

    The last parts of the batch are invented inputs, each as large a share of it as is said and made in its own way:
    they have no label, so they count in D alone, and whole.
    """

    teacher: nn.Module
    factor: float  # λ
    form: Form
    temperature: float = 1.0  # τ
    invented: tuple[tuple[float, Invent], ...] = ()
    task: Task = field(default_factory=Classification)

    @property
    def teachers(self) -> tuple[Forward]:
        """The received model."""
        return (self.teacher,)

    def asks(self, batch: int) -> int:
        """Nothing about the samples that give way to invented ones."""
        return batch - sum(int(share * batch) for share, _ in self.invented)

    def further(self, batch: int) -> Work:
        """The teacher's answers to what is invented."""
        return Work(forward=batch - self.asks(batch))

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        """The loss of inputs x (b, ...) with labels y (b,); the teacher answers (n, K) to the first n >= asks(b)."""
        (answers,) = given
        own = self.asks(len(x))
        if own < len(x):
            x, start = x.clone(), own  # unlike concatenation, keeps the memory layout
            for share, invent in self.invented:
                end = start + int(share * len(x))
                if end > start:
                    x[start:end] = invent(x[start:end], y[start:end])
                start = end
            with torch.no_grad():
                answers = torch.cat([answers[:own], self.teacher(x[own:]).float()])
            y = y[:own]
        if self.task.kind != "classification":
            return self._of_task(forward(x).float(), y, answers)
        logits, target = forward(x).float(), answers / self.temperature
        soft = logits / self.temperature
        d = own * divergence(soft[:own], target[:own], y, self.form)
        if own < len(x):
            d = d + (len(x) - own) * kl(soft[own:], target[own:])
        return F.cross_entropy(logits[:own], y) + self.factor * self.temperature**2 * d / len(x)

    def _of_task(self, outputs: Tensor, y: Tensor, answers: Tensor) -> Tensor:
        """The same loss of another task, D being its distance; the first outputs have labels y."""
        own, rest = len(y), len(outputs) - len(y)
        d = own * self.task.distance(outputs[:own], answers[:own], self.temperature)
        if rest:
            d = d + rest * self.task.distance(outputs[own:], answers[own:], self.temperature)
        return self.task.mean_loss(outputs[:own], y) + self.factor * d / len(outputs)


def divergence(logits: Tensor, target: Tensor, y: Tensor, form: Form) -> Tensor:
    """D, the mean over the batch, of the student's logits (b, K) from the teacher's."""
    whole = kl(logits, target)
    return whole if form == "kl" else (whole + kl(without(logits, y), without(target, y))) / 2


def kl(logits: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) of q, the teacher's answers, from p, the student's."""
    return F.kl_div(logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True)


def without(logits: Tensor, y: Tensor) -> Tensor:
    """Logits that give the true class no probability; finite, so that 0·log 0 is 0."""
    return logits.scatter(1, y[:, None], -1e9)


def scrambled(x: Tensor) -> Tensor:
    """Inputs (b, ...) far from any client's data, made of these.

    Images (b, C, H, W) are turned by any angle, mirrored and moved by up to a quarter of their height; then a rectangle
    in a corner of each stays, all around it comes from another one. In other samples each number comes from one of two.
    """
    other = torch.randperm(len(x))
    if x.ndim != 4:
        return torch.where((torch.rand(x.shape) < 0.5).to(x.device), x, x[other])
    x = Augment(crop=x.shape[2] // 4, flip=True, rotation=180)(x)
    corner = torch.ones(len(x), 1, 1, 1, dtype=torch.bool)
    for axis in (2, 3):
        line = torch.arange(x.shape[axis]).view((-1, 1) if axis == 2 else (1, -1))
        start = torch.randint(x.shape[axis], (len(x), 1, 1, 1))
        corner = corner & ((line < start) ^ (torch.rand(len(x), 1, 1, 1) < 0.5))
    return torch.where(corner.to(x.device), x, x[other])
