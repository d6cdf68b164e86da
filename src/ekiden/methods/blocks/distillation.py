"""Distillation from a received model, on a client's own samples and on invented ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import Forward, Objective, Task, Work
from ekiden.core.data.augment import Augment
from ekiden.core.tasks import Classification

Form = Literal["both", "kl"]
Invent = Callable[[Tensor, Tensor], Tensor]
"""Makes inputs (b, ...) from the client's own inputs (b, ...) and their labels (b,)."""


@dataclass(frozen=True)
class Distillation(Objective):
    """The objective ℓ + λ τ² D of a mini-batch; the teacher sees the same inputs, in evaluation
    mode.

    The last parts of the batch are invented inputs. Each part has its own share of the batch and
    its own way of making inputs. They have no label, so they count only in D, and with its complete
    form.
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

    @property
    def fixed(self) -> bool:
        """Whether nothing is invented, which draws numbers."""
        return not self.invented

    def asks(self, batch: int) -> int:
        """Return for how many samples the teacher is asked: those that invented inputs do not
        replace.
        """
        return batch - sum(int(share * batch) for share, _ in self.invented)

    def further(self, batch: int) -> Work:
        """Count the teacher's passes over invented inputs."""
        return Work(forward=batch - self.asks(batch))

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        """Return the loss of inputs x (b, ...) with labels y (b,). The teacher answers the first n
        >= asks(b).
        """
        (answers,) = given
        own = self.asks(len(x))
        if own < len(x):
            # written in place: concatenation would lose the memory layout of images
            x = x.clone()
            start = own
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
        logits = forward(x).float()
        target = answers / self.temperature
        soft = logits / self.temperature
        d = own * divergence(soft[:own], target[:own], y, self.form)
        if own < len(x):
            d = d + (len(x) - own) * kl(soft[own:], target[own:])
        loss = self.task.mean_loss(logits[:own], y)
        return loss + self.factor * self.temperature**2 * d / len(x)

    def _of_task(self, outputs: Tensor, y: Tensor, answers: Tensor) -> Tensor:
        """Return the same loss for another task, D being its distance; the first outputs have
        labels y.
        """
        own = len(y)
        rest = len(outputs) - len(y)
        d = own * self.task.distance(outputs[:own], answers[:own], self.temperature)
        if rest:
            d = d + rest * self.task.distance(outputs[own:], answers[own:], self.temperature)
        return self.task.mean_loss(outputs[:own], y) + self.factor * d / len(outputs)


def divergence(logits: Tensor, target: Tensor, y: Tensor, form: Form) -> Tensor:
    """Return D, the mean over the batch, between the student's logits (b, K) and the teacher's."""
    whole = kl(logits, target)
    if form == "kl":
        return whole
    return (whole + other_classes(logits, target, y)) / 2


def kl(logits: Tensor, target: Tensor) -> Tensor:
    """Return KL(q || p) between the teacher's answers q and the student's p."""
    return F.kl_div(
        logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True
    )


def other_classes(logits: Tensor, target: Tensor, y: Tensor) -> Tensor:
    """Return KL of the teacher's probabilities without the true class, renormalised, from the
    student's.
    """
    return kl(without(logits, y), without(target, y))


def without(logits: Tensor, y: Tensor) -> Tensor:
    """Return logits that give the true class no probability; they are finite, so that 0·log 0 is
    0.
    """
    return logits.scatter(1, y[:, None], -1e9)


def scrambled(x: Tensor) -> Tensor:
    """Make inputs (b, ...) from these that are far from any client's data.

    Images (b, C, H, W) are rotated by any angle, mirrored and shifted by up to a quarter of their
    height. Then each keeps a rectangle in a corner and takes the rest from another image. In other
    samples each number comes from one of two samples.
    """
    other = torch.randperm(len(x))
    if x.ndim != 4:
        return torch.where((torch.rand(x.shape) < 0.5).to(x.device), x, x[other])
    x = Augment(crop=x.shape[2] // 4, flip=True, rotation=180)(x)
    corner = torch.ones(len(x), 1, 1, 1, dtype=torch.bool)
    for axis in (2, 3):
        line = torch.arange(x.shape[axis])
        if axis == 2:
            line = line[:, None]
        start = torch.randint(x.shape[axis], (len(x), 1, 1, 1))
        other_side = torch.rand(len(x), 1, 1, 1) < 0.5
        corner = corner & ((line < start) ^ other_side)
    return torch.where(corner.to(x.device), x, x[other])
