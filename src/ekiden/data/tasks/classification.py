"""One class for each sample."""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.tasks import measures
from ekiden.data.tasks.base import Metric, Need, VectorTask


@dataclass(frozen=True)
class Classification(VectorTask):
    """One of K classes for each sample: y (n,) int64, outputs (b, K) logits, cross-entropy.

    Answers are the classes (n,), or with `full` their probabilities (n, K).
    """

    kind: ClassVar[str] = "classification"
    offers: ClassVar[frozenset[Need]] = frozenset({"classes", "vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_CLASSES

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """See `Task`."""
        if y.shape != (n,) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            kind = str(y.dtype).removeprefix("torch.")
            raise UserError(
                f"{what} has {kind} y of shape {tuple(y.shape)}: it must hold {n} integers, one class a sample"
                f"{_hint(y, n)}."
            )
        if int(y.min()) < 0:
            raise UserError(f"{what} has label {int(y.min())}: labels must be integers from 0 to classes - 1.")
        return y.long()

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        return F.cross_entropy(outputs, y)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        return F.cross_entropy(outputs, y, reduction="none")

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """See `Task`."""
        return outputs.softmax(1) if full else outputs.argmax(1)

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return measures.classes(answers) == y

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the Kullback-Leibler divergence of the softened classes; see `Task`."""
        return measures.divergence(outputs, teacher, temperature)

    def targets(self, y: Tensor, outputs: int) -> Tensor:
        """One-hot."""
        return F.one_hot(y, outputs).float()

    def drawn(self, n: int, outputs: int, generator: torch.Generator) -> Tensor:
        """Draw classes, in ascending order."""
        return torch.randint(outputs, (n,), generator=generator).sort().values

    def guess(self, outputs: int) -> float:
        """Return ln K."""
        return log(outputs)

    def counts(self, y: Tensor, outputs: int) -> Tensor:
        """See `Task`."""
        return torch.bincount(y, minlength=outputs)

    def strata(self, y: Tensor) -> Tensor:
        """Return the classes."""
        return y


def _hint(y: Tensor, n: int) -> str:
    """Return a hint about what else the labels may be."""
    if y.shape == (n,) and y.is_floating_point():
        return '; numbers to predict need --task regression, task="regression" in Python'
    if y.ndim == 2 and len(y) == n and bool((y.sum(1) == 1).all()):
        return " (of one-hot rows, y.argmax(1)); labels of which several may be there need --task multi-label"
    return ""
