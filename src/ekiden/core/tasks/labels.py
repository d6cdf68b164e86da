"""The tasks: a class, several labels, numbers or a time for each sample; a class for each pixel;
the next token.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.core.base.checks import CountOrZero, Positive
from ekiden.core.base.constants import constant
from ekiden.core.base.errors import UserError, row_text
from ekiden.core.tasks import measures
from ekiden.core.tasks.base import IGNORED, Metric, Need, Task, VectorTask, chosen
from ekiden.core.tasks.counts import (
    ClassCounts,
    LabelCounts,
    NumberSums,
    PairCounts,
    PlaceCounts,
)


@dataclass(frozen=True)
class Classification(VectorTask):
    """One of K classes for each sample: y (n,) int64, outputs (b, K) logits, cross-entropy.

    Answers are the classes (n,), or with `full` their probabilities (n, K).
    """

    kind: ClassVar[str] = "classification"
    offers: ClassVar[frozenset[Need]] = frozenset({"classes", "vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_CLASSES
    counter = ClassCounts

    # factor of the loss of each class (K,) in training; empty if all count alike. Measured losses
    # have no weights.
    weights: tuple[Positive, ...] = ()

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        if y.shape != (n,) or not _are_integers(y):
            raise _misshapen(
                what, y, f"it must hold {n} integers, one class a sample{_hint(y, n)}."
            )
        if int(y.min()) < 0:
            raise UserError(
                f"{what} has label {int(y.min())}: labels must be integers from 0 to classes - 1."
            )
        return y.long()

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if not self.weights:
            return F.cross_entropy(outputs, y)
        # A sum over the batch's weights instead of b would let a sample's weight depend on the
        # others in its batch.
        weights = constant(self.weights, outputs.dtype, outputs.device)
        return F.cross_entropy(outputs, y, weights, reduction="sum") / len(y)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        if full:
            return outputs.softmax(1)
        return outputs.argmax(1)

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        return chosen(answers, y) == y

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
        return torch.bincount(y, minlength=outputs)

    def strata(self, y: Tensor) -> Tensor:
        """Return the classes."""
        return y


def _hint(y: Tensor, n: int) -> str:
    """Return a hint about what else the labels may be."""
    if y.shape == (n,) and y.is_floating_point():
        return "; numbers to predict need --task=regression"
    if y.shape == (n, 1):
        return ": give y[:, 0]"
    if y.ndim > 2 and len(y) == n:
        return "; masks of images need whole numbers of shape (n, H, W), with no colours"
    if y.ndim == 2 and len(y) == n and bool((y.sum(1) == 1).all()):
        return " (of one-hot rows, y.argmax(1)); labels of which several may be there need --task=multi-label"
    return ""


@dataclass(frozen=True)
class MultiLabel(VectorTask):
    """Each of K labels is present or absent: y (n, K) float32 of 0 and 1, outputs (b, K) logits,
    binary cross-entropy.

    Answers are the probabilities of the labels (n, K). The loss is the mean over the labels.
    """

    kind: ClassVar[str] = "multi-label"
    offers: ClassVar[frozenset[Need]] = frozenset({"vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_LABELS
    counter = LabelCounts

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        if y.ndim != 2 or len(y) != n or y.is_complex() or not ((y == 0) | (y == 1)).all():
            needs = (
                f"multi-label needs a row of 0 and 1 for each of {n} samples, one column a label"
            )
            raise _misshapen(what, y, needs)
        return y.float()

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        return outputs.sigmoid()

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        return ((answers >= 0.5) == (y > 0.5)).float().mean(1)

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the mean over labels of the binary Kullback-Leibler divergence, softened
        by T; see `Task`.
        """
        wanted = (teacher / temperature).sigmoid()
        logits = outputs / temperature
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
        return (y > 0.5).sum(0)

    def strata(self, y: Tensor) -> Tensor:
        """Return the first label that is present; K if there is none."""
        none = torch.ones(len(y), 1, device=y.device)
        return torch.cat([y, none], dim=1).argmax(1)


_DECILES = (-1.2816, -0.8416, -0.5244, -0.2533, 0.0, 0.2533, 0.5244, 0.8416, 1.2816)
"""boundaries of the normal distribution's deciles"""


@dataclass(frozen=True)
class ScaledTask(VectorTask):
    """A task whose labels hold numbers with a unit, so that training needs their scale."""

    mean: tuple[float, ...] = (0.0,)  # mean of each of these numbers, or one for all
    std: tuple[Positive, ...] = (1.0,)  # standard deviation of each, or one for all

    @abstractmethod
    def measured(self, y: Tensor) -> Tensor:
        """Return the numbers (n, C) float64 that have a unit, one for each name in
        `Dataset.classes`.
        """

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        return None

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the mean squared difference; the temperature is not used. See `Task`."""
        return (outputs - teacher).square().mean()

    def guess(self, outputs: int) -> float:
        """Return 1, about the loss of a network that gives 0."""
        return 1.0

    def counts(self, y: Tensor, outputs: int) -> Tensor:
        return torch.full((outputs,), len(y))


@dataclass(frozen=True)
class Regression(ScaledTask):
    """K numbers for each sample: y (n,) or (n, K) float64 in their own unit; squared error.

    The network's outputs (b, K) are standardised: (y - mean) / std. Answers are in the unit of y,
    (n, K) float64. The loss is the squared error of standardised numbers, so guessing the mean has
    a loss of about 1.
    """

    kind: ClassVar[str] = "regression"
    offers: ClassVar[frozenset[Need]] = frozenset({"vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_NUMBERS
    counter = NumberSums
    unit: ClassVar[int] = 4096

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        if y.ndim not in (1, 2) or len(y) != n or y.is_complex():
            needs = f"regression needs a number, or a row of numbers, for each of {n} samples"
            raise _misshapen(what, y, needs)
        y = y.double()
        if not torch.isfinite(y).all():
            row = int((~torch.isfinite(y)).nonzero()[0, 0])
            raise UserError(
                f"{what} has NaN or infinity in the target of {row_text(row)}: remove or replace "
                "such values."
            )
        return y

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - self.standardised(y)).square().mean()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - self.standardised(y)).square().mean(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        mean, std = self._scale(outputs)
        return outputs.double() * std + mean

    def targets(self, y: Tensor, outputs: int) -> Tensor:
        """Return the standardised numbers."""
        return self.standardised(y)

    def drawn(self, n: int, outputs: int, generator: torch.Generator) -> Tensor:
        """Draw normal numbers with the mean and the standard deviation of the targets."""
        values = torch.randn(n, outputs, generator=generator)
        mean, std = self._scale(values)
        return values.double() * std + mean

    def measured(self, y: Tensor) -> Tensor:
        """Return the targets."""
        return _as_rows(y).double()

    def strata(self, y: Tensor) -> Tensor:
        """Return the decile of the first target, as if it were normal."""
        first = self.standardised(y)[:, 0].contiguous()
        return torch.bucketize(first, torch.tensor(_DECILES, device=y.device))

    def standardised(self, y: Tensor) -> Tensor:
        """Return targets as the network gives them, (b, K) float32.

        They are centred in float64: float32 has 256 between the two numbers nearest to 3e9.
        """
        y = _as_rows(y)
        mean, std = self._scale(y)
        return ((y.double() - mean) / std).float()

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean = constant(self.mean, torch.float64, like.device)
        return mean, constant(self.std, torch.float64, like.device)


@dataclass(frozen=True)
class Survival(ScaledTask):
    """The time until an event, or until a sample was last seen: y (n, 2) float64 are time and event
    (1, or 0: not yet).

    The network's output (b, 1) is the logarithm of the hazard, relative to one event per mean time.
    The answers are the same numbers, (n, 1) float64: the higher, the earlier the event is expected.
    With s = time / mean time and e the event, the loss is half the deviance of a constant hazard, s
    exp(output) - e output - e (1 + ln s), which is 0 or more. `mean` is that of the time.
    """

    kind: ClassVar[str] = "survival"
    offers: ClassVar[frozenset[Need]] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_TIMES
    counter = PairCounts

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        if y.shape != (n, 2) or y.is_complex():
            needs = f"survival needs a time and an event for each of {n} samples"
            raise _misshapen(what, y, f"{needs}: --label-column TIME EVENT")
        y = y.double()
        time, event = y.unbind(1)

        def refuse(values: Tensor, wrong: Tensor, must: str) -> None:
            if wrong.any():
                row = int(wrong.nonzero()[0, 0])
                raise UserError(f"{what} has {values[row]:g} in {row_text(row)}: {must}")

        refuse(
            time,
            ~(torch.isfinite(time) & (time > 0)),
            "a time, the first label, must be positive and finite",
        )
        refuse(
            event,
            (event != 0) & (event != 1),
            "an event, the second label, must be 0 or 1 (no or yes)",
        )
        return y

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.loss(outputs, y).mean()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        s = (y[:, 0] / self.mean[0]).to(outputs)
        event = y[:, 1].to(outputs)
        return s * outputs[:, 0].exp() - event * (outputs[:, 0] + 1 + s.log())

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        return outputs.double()

    def measured(self, y: Tensor) -> Tensor:
        """Return the times."""
        return y[:, :1].double()

    def strata(self, y: Tensor) -> Tensor:
        """Return the events."""
        return y[:, 1].long()


@dataclass(frozen=True)
class PlacesTask(Task):
    """A task with one of K classes at each place of a sample; places with the label `IGNORED` do
    not count.
    """

    offers: ClassVar[frozenset[Need]] = frozenset()
    counter = PlaceCounts

    @abstractmethod
    def wanted(self, y: Tensor) -> Tensor:
        """Return the labels with which answers are compared, (b, places)."""

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Return the outputs for the places that are `wanted`, (b, K, places)."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(outputs)
        # a batch of texts may be shorter
        wanted = self.wanted(y)[..., : logits.shape[-1]]
        each = F.cross_entropy(logits, wanted, reduction="none", ignore_index=IGNORED)
        return each.flatten(1).sum(1) / (wanted != IGNORED).flatten(1).sum(1).clamp(min=1)

    def units(self, y: Tensor) -> Tensor | None:
        return (self.wanted(y) != IGNORED).flatten(1).sum(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        return self.logits(outputs).argmax(1)

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        return measures.share_right(answers, self.wanted(y))

    def guess(self, outputs: int) -> float:
        """Return ln K."""
        return log(outputs)

    def counts(self, y: Tensor, outputs: int) -> Tensor:
        return torch.bincount(y[y != IGNORED], minlength=outputs)


@dataclass(frozen=True)
class Segmentation(PlacesTask):
    """One of K classes for each pixel: y (n, H, W) int64, outputs (b, K, H, W) logits,
    cross-entropy of pixels.

    Pixels with label -100 do not count. Answers are the classes of the pixels (n, H, W).
    """

    kind: ClassVar[str] = "segmentation"
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_PIXELS

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        if y.ndim != 3 or len(y) != n or not _are_integers(y):
            needs = f"segmentation needs a class (an integer) for each pixel of each of {n} images"
            raise _misshapen(what, y, f"{needs}, shape (n, H, W)")
        return _not_negative(y.long(), f"{what} has label", "classes", "pixels to ignore")

    def outputs(self, names: Sequence[str]) -> int:
        return len(names)

    def check_samples(self, x: Tensor, y: Tensor, what: str) -> None:
        if x.ndim == 4 and x.shape[2:] != y.shape[1:]:
            images, masks = (f"{width} x {height}" for height, width in (x.shape[2:], y.shape[1:]))
            raise UserError(
                f"images of {what} have {images} pixels, their masks {masks}: give both one size"
            )

    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        return (len(y), outputs, *y.shape[1:])

    def wanted(self, y: Tensor) -> Tensor:
        """Return the classes of all pixels."""
        return y

    def logits(self, outputs: Tensor) -> Tensor:
        """Return all outputs."""
        return outputs

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _mean_over_places(outputs, y)

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the mean over pixels of the Kullback-Leibler divergence of softened
        classes; see `Task`.
        """
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
    """The next token at each place: y (n, L) int64 are the tokens, outputs (b, L, K) are logits;
    cross-entropy.

    The outputs at place t are compared with the token at t + 1. Tokens with label -100 (padding) do
    not count. A batch may be shorter than y; the tokens cut off do not count. Answers are the
    tokens predicted for the places 1 to L - 1, (n, L - 1).
    """

    kind: ClassVar[str] = "language-modelling"
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_TOKENS

    # K, the number of tokens; 0 means the number of names in `Dataset.classes`
    vocabulary: CountOrZero = 0

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        if y.ndim != 2 or len(y) != n or y.shape[1] < 2 or not _are_integers(y):
            needs = f"a language model needs the tokens (integers) of each of {n} texts"
            raise _misshapen(what, y, f"{needs}, at least two each, shape (n, L)")
        y = y.long()
        if self.vocabulary and int(y.max()) >= self.vocabulary:
            raise UserError(
                f"{what} has token {int(y.max())}: the vocabulary has {self.vocabulary} tokens, "
                "from 0 on"
            )
        return _not_negative(y, f"{what} has token", "tokens", "padding")

    def outputs(self, names: Sequence[str]) -> int:
        return self.vocabulary or len(names)

    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        return (len(y), x.shape[1], outputs)

    def wanted(self, y: Tensor) -> Tensor:
        """Return all tokens but the first."""
        return y[:, 1:]

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the outputs at all places but the last."""
        return outputs[:, :-1].movedim(-1, 1)

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        wanted = y[:, 1 : outputs.shape[1]]
        # row by row it is faster than over the `logits`, and the bits are others
        return _mean_over_places(outputs[:, :-1].flatten(0, 1), wanted.flatten())

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return T² times the mean over places of the Kullback-Leibler divergence of softened
        tokens; see `Task`.
        """
        return measures.divergence(outputs.flatten(0, 1), teacher.flatten(0, 1), temperature)

    def strata(self, y: Tensor) -> Tensor:
        """Return one group for all texts."""
        return torch.zeros(len(y), dtype=torch.int64, device=y.device)


def _mean_over_places(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross-entropy () over the places that count."""
    total = F.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORED)
    return total / (wanted != IGNORED).sum().clamp(min=1)


def _as_rows(y: Tensor) -> Tensor:
    """Return (n, K) of labels (n,) or (n, K); n may be 0."""
    if y.ndim == 1:
        return y[:, None]
    return y


def _are_integers(y: Tensor) -> bool:
    return not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)


def _misshapen(what: str, y: Tensor, needs: str) -> UserError:
    """Return the error about labels `y` of a wrong type or shape; `what` names the samples."""
    kind = str(y.dtype).removeprefix("torch.")
    return UserError(f"{what} has {kind} y of shape {tuple(y.shape)}: {needs}")


def _not_negative(y: Tensor, found: str, names: str, ignored: str) -> Tensor:
    """Return labels of places, each of which must be 0 or more, or `IGNORED`."""
    wrong = y[(y < 0) & (y != IGNORED)]
    if len(wrong):
        raise UserError(
            f"{found} {int(wrong[0])}: give {names} from 0 on, or {IGNORED} for {ignored}"
        )
    return y
