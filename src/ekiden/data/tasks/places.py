"""Tasks with a class at each place of a sample: each pixel, or the next token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.base.checks import CountOrZero
from ekiden.base.errors import UserError
from ekiden.data.tasks import measures
from ekiden.data.tasks.base import IGNORED, Metric, Need, PlacesTask


@dataclass(frozen=True)
class Segmentation(PlacesTask):
    """One of K classes for each pixel: y (n, H, W) int64, outputs (b, K, H, W) logits, cross-entropy of pixels.

    Pixels with label -100 do not count. Answers are the classes of the pixels (n, H, W).
    """

    kind: ClassVar[str] = "segmentation"
    offers: ClassVar[frozenset[Need]] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_PIXELS

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """See `Task`."""
        if y.ndim != 3 or len(y) != n or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            kind = str(y.dtype).removeprefix("torch.")
            raise UserError(
                f"{what} has {kind} y of shape {tuple(y.shape)}: segmentation needs a class (an integer) for each "
                f"pixel of each of {n} images, shape (n, H, W)"
            )
        y = y.long()
        if bad := [int(v) for v in y[(y < 0) & (y != IGNORED)][:1]]:
            raise UserError(f"{what} has label {bad[0]}: give classes from 0 on, or {IGNORED} for pixels to ignore")
        return y

    def outputs(self, names: Sequence[str]) -> int:
        """See `Task`."""
        return len(names)

    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        """See `Task`."""
        return (len(y), outputs, *y.shape[1:])

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        total = F.cross_entropy(outputs, y, reduction="sum", ignore_index=IGNORED)
        return total / (y != IGNORED).sum().clamp(min=1)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        each = F.cross_entropy(outputs, y, reduction="none", ignore_index=IGNORED)
        return each.flatten(1).sum(1) / (y != IGNORED).flatten(1).sum(1).clamp(min=1)

    def units(self, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return (y != IGNORED).flatten(1).sum(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """See `Task`."""
        return outputs.argmax(1)

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return measures.share_right(answers, y)

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the mean over pixels of the Kullback-Leibler divergence of softened classes; see `Task`."""
        student, taught = (each.movedim(1, -1).flatten(0, -2) for each in (outputs, teacher))
        return measures.divergence(student, taught, temperature)

    def strata(self, y: Tensor) -> Tensor:
        """Return the most frequent class."""
        pixels = y.flatten(1)
        most = max(int(y.max()), 0) + 1
        counts = torch.zeros(len(y), most, dtype=torch.int64, device=y.device)
        counts.scatter_add_(1, pixels.clamp(min=0), (pixels >= 0).long())
        return counts.argmax(1)


@dataclass(frozen=True)
class LanguageModelling(PlacesTask):
    """The next token at each place: y (n, L) int64 are the tokens, outputs (b, L, K) are logits; cross-entropy.

    The outputs at place t are compared with the token at t + 1. Tokens with label -100 (padding) do not count. A batch
    may be shorter than y; the tokens cut off do not count. Answers are the tokens predicted for the places 1 to L - 1,
    (n, L - 1).

    Attributes:
        vocabulary: K, the number of tokens; 0 means the number of names in `Dataset.classes`.
    """

    kind: ClassVar[str] = "language-modelling"
    offers: ClassVar[frozenset[Need]] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_TOKENS

    vocabulary: CountOrZero = 0

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """See `Task`."""
        if y.ndim != 2 or len(y) != n or y.shape[1] < 2 or y.is_floating_point() or y.is_complex():
            kind = str(y.dtype).removeprefix("torch.")
            raise UserError(
                f"{what} has {kind} y of shape {tuple(y.shape)}: a language model needs the tokens (integers) of each "
                f"of {n} texts, at least two each, shape (n, L)"
            )
        y = y.long()
        if self.vocabulary and int(y.max()) >= self.vocabulary:
            raise UserError(f"{what} has token {int(y.max())}: the vocabulary has {self.vocabulary} tokens, from 0 on")
        if bad := [int(v) for v in y[(y < 0) & (y != IGNORED)][:1]]:
            raise UserError(f"{what} has token {bad[0]}: give tokens from 0 on, or {IGNORED} for padding")
        return y

    def outputs(self, names: Sequence[str]) -> int:
        """See `Task`."""
        return self.vocabulary or len(names)

    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        """See `Task`."""
        return (len(y), x.shape[1], outputs)

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        wanted = _next(outputs, y)
        total = F.cross_entropy(outputs[:, :-1].flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=IGNORED)
        return total / (wanted != IGNORED).sum().clamp(min=1)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        wanted = _next(outputs, y)
        each = F.cross_entropy(outputs[:, :-1].movedim(-1, 1), wanted, reduction="none", ignore_index=IGNORED)
        return each.sum(1) / (wanted != IGNORED).sum(1).clamp(min=1)

    def units(self, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return (y[:, 1:] != IGNORED).sum(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """See `Task`."""
        return outputs[:, :-1].argmax(-1)

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return measures.share_right(answers, y[:, 1:])

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the mean over places of the Kullback-Leibler divergence of softened tokens; see `Task`."""
        return measures.divergence(outputs.flatten(0, 1), teacher.flatten(0, 1), temperature)

    def strata(self, y: Tensor) -> Tensor:
        """Return one group for all texts."""
        return torch.zeros(len(y), dtype=torch.int64, device=y.device)


def _next(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the tokens that follow, as far as there are outputs."""
    return y[:, 1 : outputs.shape[1]]
