"""Several labels for each sample, each present or absent."""

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
class MultiLabel(VectorTask):
    """Each of K labels is present or absent: y (n, K) float32 of 0 and 1, outputs (b, K) logits, binary cross-entropy.

    Answers are the probabilities of the labels (n, K). The loss is the mean over the labels.
    """

    kind: ClassVar[str] = "multi-label"
    offers: ClassVar[frozenset[Need]] = frozenset({"vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_LABELS

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """See `Task`."""
        if y.ndim != 2 or len(y) != n or y.is_complex() or not ((y == 0) | (y == 1)).all():
            raise UserError(
                f"{what} has labels of shape {tuple(y.shape)}: multi-label needs a row of 0 and 1 for each of {n} "
                "samples, one column a label"
            )
        return y.float()

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        return F.binary_cross_entropy_with_logits(outputs, y)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """See `Task`."""
        return outputs.sigmoid()

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return ((answers >= 0.5) == (y > 0.5)).float().mean(1)

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the mean over labels of the binary Kullback-Leibler divergence, softened by T; see `Task`."""
        wanted, logits = (teacher / temperature).sigmoid(), outputs / temperature
        cross = F.binary_cross_entropy_with_logits(logits, wanted)
        own = F.binary_cross_entropy_with_logits(teacher / temperature, wanted)
        return temperature**2 * (cross - own)

    def targets(self, y: Tensor, outputs: int) -> Tensor:
        """Return 1 and -1: the sign of the output decides."""
        return 2 * y - 1

    def drawn(self, n: int, outputs: int, generator: torch.Generator) -> Tensor:
        """Draw each label with probability 1/2."""
        return torch.randint(2, (n, outputs), generator=generator).float()

    def guess(self, outputs: int) -> float:
        """Return ln 2."""
        return log(2)

    def counts(self, y: Tensor, outputs: int) -> Tensor:
        """See `Task`."""
        return (y > 0.5).sum(0)

    def strata(self, y: Tensor) -> Tensor:
        """Return the first label that is present; K if there is none."""
        none = torch.ones(len(y), 1, device=y.device)
        return torch.cat([y, none], dim=1).argmax(1)
