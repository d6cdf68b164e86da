"""What silos count of a model's answers: whole numbers by name that add up over silos, from which
all figures follow.

Numbers that are not counts are in fixed point, so that sums of silos are exact and masks can hide
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import asinh, isnan, nan, prod

import numpy as np
import torch
from torch import Tensor

from ekiden.clinic.figures import CountedAnswers
from ekiden.core.base.errors import UserError
from ekiden.core.tasks.base import Scores, Task, confusion
from ekiden.core.tasks.counts import (
    GROUPS,
    MOST_TABLE,
    NONE,
    ClassCounts,
    Counts,
    LabelCounts,
    NumberSums,
    PairCounts,
    PlaceCounts,
    by_class,
    by_confidence,
    pairs,
    products,
)
from ekiden.core.tasks.labels import (
    Classification,
    MultiLabel,
    Regression,
    ScaledTask,
    Segmentation,
    Survival,
)
from ekiden.core.tasks.ranked import Floats, Ranked

# the whole number that stands for 1 in sums
FIXED = 1 << 20
# parts of a number's second half, see `fixed`
_FINE = 2.0**50
# binary digits of a small sum
_DIGITS = 26
# loss of a sample in a sum; larger ones count as this
_LARGEST = 1e6
# a sum below it has room in a whole number, also with those of other silos
_ROOM = 2.0**61
# of the logit of a score: those of float32 end there
_REACH = 104.0
# of the logit of a score: above, it is 1 in float64
_ONE = 36.0
# bins of scores are about even in the logit up to here, and in its logarithm from here on
_DENSE = 0.1
# up to so many classes with scores, so many bins
_FINENESS = ((2, 4096), (16, 1024), (128, 256))
_MOST_BINNED = _FINENESS[-1][0]
# in the order of `by_class`
BY_CLASS = ("hits", "labels", "answers")
# sums of errors and targets, and their powers
POWERS = {"absolute": 1, "squared": 2, "target": 1, "target_squared": 2}
_OF_SCORES = frozenset(("auroc", "average_precision", "calibration_error", "brier"))
# classes whose training labels are counted
_MOST_TRAIN = 1000


@dataclass(frozen=True)
class Counted:
    """Numbers that are counted together; `name` says what they are."""

    name: str
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many there are."""
        return prod(self.shape)


@dataclass(frozen=True)
class Care:
    """How many samples a silo wants behind what it tells without noise."""

    samples: int = 1  # with fewer samples nothing is told
    # samples of classes, and labels, with fewer samples are left out of what is told by class
    positives: int = 1


EXACT = Care()


@dataclass(eq=False)
class Counting(ABC):
    """Counts what a model answers to samples of one task."""

    task: Task  # what the labels mean
    outputs: int  # K
    full: bool  # whether scores are counted in bins, too, where the task has scores

    @abstractmethod
    def parts(self) -> Sequence[Counted]:
        """Return what is counted by this kind of task, in addition to what all count."""

    @abstractmethod
    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        """Return the numbers of `parts` by name."""

    @abstractmethod
    def counts(self, n: Mapping[str, Floats], samples: int, loss: float) -> Counts:
        """Return what was counted, from sums over silos by name."""

    @cached_property
    def layout(self) -> tuple[Counted, ...]:
        """All numbers, in order.

        reports: silos with enough samples; samples; broken: silos where a loss is not a number;
        loss: sum of the losses; far: silos where the model has diverged; trained and train:
        training samples, and their labels.
        """
        first = map(Counted, ("reports", "samples", "broken", "far", "trained"))
        return (*first, Counted("loss", (2,)), Counted("train", (self._labels,)), *self.parts())

    @property
    def _labels(self) -> int:
        """Number of labels of training samples that are counted."""
        if self.outputs > _MOST_TRAIN or isinstance(self.task, ScaledTask):
            return 0
        return self.outputs

    @property
    def scored(self) -> int:
        """Number of classes or labels whose scores are counted, where the task has scores."""
        if self.full and self.outputs <= _MOST_BINNED:
            return self.outputs
        return 0

    @cached_property
    def edges(self) -> Tensor:
        """Inner boundaries of the bins of scores, as logits."""
        return edges(self.scored)

    @property
    def size(self) -> int:
        """The length of the vector of all numbers."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """How many numbers each part has."""
        return [part.size for part in self.layout]

    def count(self, s: Scores, care: Care = EXACT, train: Tensor | None = None) -> Tensor:
        """Return all numbers of some samples, (size,) int64; zeros if there are too few samples.

        Args:
            s: the answers, with probabilities if `full`.
            care: what is left out.
            train: labels of the training samples; None if they are not counted.
        """
        units = None
        if len(s):
            units = self.task.units(s.y)
        if units is not None:
            # samples without a place say nothing
            there = (units > 0).nonzero().flatten()
            s = s.at(there)
            units = units[there]
        if len(s) < max(care.samples, 1):
            return torch.zeros(self.size, dtype=torch.int64)
        loss = s.loss.double()
        each = loss.nan_to_num(_LARGEST).clamp(-_LARGEST, _LARGEST)
        if units is not None:
            each = each * units
        mean = s.mean_loss()
        guess = self.task.guess(self.outputs)
        found = {
            "reports": torch.tensor(1),
            "samples": torch.tensor(len(s)),
            "broken": loss.isnan().any(),
            "loss": fixed(each.sum()),
            "far": torch.tensor(isnan(mean) or mean > max(30.0, 10 * guess)),
            **self._trained(care, train),
            **self.measure(s, care),
        }
        return self.joined(found)

    def joined(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """Return numbers by name as a vector."""
        return torch.cat([numbers[part.name].reshape(part.size).long() for part in self.layout])

    def lacks(self, metric: str) -> bool:
        """Return whether this metric needs scores, and there are too many classes to count any."""
        return metric in _OF_SCORES and not self.has("scores")

    def has(self, name: str) -> bool:
        """Return whether numbers of this name are counted."""
        return any(part.name == name for part in self.layout)

    def split(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return a vector of numbers by name."""
        if numbers.dtype != torch.int64 or numbers.shape != (self.size,):
            raise UserError(
                f"counts of {tuple(numbers.shape)} do not fit {self.task.kind}: refused"
            )
        found = {}
        for part, piece in zip(self.layout, torch.split(numbers, self._sizes), strict=True):
            found[part.name] = piece.reshape(part.shape)
        return found

    def told(self, numbers: Tensor) -> CountedAnswers:
        """Return what the sum of the numbers of all silos says."""
        n = {name: values.double().numpy() for name, values in self.split(numbers).items()}
        samples = int(n["samples"])
        train = None
        total: float = samples
        # with noise there are no squares, and the loss is a mean over samples
        if "places" in n and n["squares"].any():
            total = float(n["places"])
        loss = nan
        if total and not n["broken"]:
            loss = float(real(n["loss"])) / total
        counts = Counts(0, nan)
        if samples:
            counts = self.counts(n, samples, loss)
        if n["trained"]:
            train = n["train"]
        return CountedAnswers(
            counts, int(n["reports"]), exact=False, train=train, trained=int(n["trained"])
        )

    def _trained(self, care: Care, train: Tensor | None) -> dict[str, Tensor]:
        samples = 0
        told = torch.zeros(self._labels)
        if self._labels and train is not None:
            counts = self.task.counts(train, self.outputs).cpu()
            samples = len(train)
            told = torch.where(counts < care.positives, 0, counts)
        return {"trained": torch.tensor(samples), "train": told}


class Scored(Counting):
    """Classes or labels with scores.

    scores: samples of each class, or with each label, and of the others by bins of its probability;
    of two classes only of the second. brier: Σ (p - y)². groups: samples and right answers by
    groups of the largest probability, confidence: sums of these probabilities; see `by_confidence`.
    """

    def of_scores(self) -> Sequence[Counted]:
        """Return what is counted of scores."""
        if not self.scored:
            return []
        return [
            Counted("scores", (self.scored, 2, len(self.edges) + 1)),
            Counted("brier", (2,)),
            Counted("groups", (2, GROUPS)),
            Counted("confidence", (GROUPS, 2)),
        ]

    def measured(self, p: Tensor, there: Tensor, most: Tensor, right: Tensor) -> dict[str, Tensor]:
        """Return the numbers of scores.

        Args:
            p: (n, C) probabilities.
            there: (n, C) whether samples have this class or label.
            most: (m,) confidence of each answer.
            right: (m,) whether it is right.
        """
        groups = torch.from_numpy(by_confidence(most.numpy(), right.numpy()))
        return {
            "scores": in_bins(p, there, self.edges),
            "brier": fixed((p - there.double()).square().sum()),
            "groups": groups[:2],
            "confidence": fixed(groups[2]),
        }

    def ranked(self, n: Mapping[str, Floats]) -> tuple[Ranked, ...]:
        """Return the bins of each class or label, from sums over silos by name."""
        if "scores" not in n:
            return ()
        inside = middles(self.edges)
        bounds = np.concatenate([[0.0], torch.sigmoid(self.edges).numpy(), [1.0]])
        return tuple(Ranked(low, high, inside, bounds) for low, high in n["scores"])

    def of_probabilities(
        self, n: Mapping[str, Floats], ranked: Sequence[Ranked]
    ) -> tuple[Floats, float]:
        """Return samples, right answers and confidences by group (3, 15), and Σ (p - y)²."""
        if "scores" not in n:
            return np.zeros((3, 0)), nan
        groups = np.concatenate([n["groups"], real(n["confidence"])[None]])
        if n["brier"].any():
            return groups, float(real(n["brier"]))
        # with noise, bins alone are told
        return groups, sum(one.brier()[0] for one in ranked)


class OfClasses(Scored):
    """One class for each sample.

    right: right answers. table: samples by label and answer (the last column is for other outputs);
    of many classes only `hits`, `labels` and `answers`.
    """

    @property
    def scored(self) -> int:
        """Number of classes whose scores are counted: of two, only the second."""
        if self.outputs == 2:
            return min(super().scored, 1)
        return super().scored

    def parts(self) -> Sequence[Counted]:
        k = self.outputs
        table = [Counted("table", (k, k + 1))]
        if k > MOST_TABLE:
            table = [Counted(name, (k,)) for name in BY_CLASS]
        return [Counted("right"), *table, *self.of_scores()]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        labels = torch.bincount(s.y, minlength=self.outputs)
        found = {"right": s.right.sum()}
        s = s.at((labels[s.y] >= care.positives).nonzero().flatten())
        if self.outputs <= MOST_TABLE:
            found["table"] = confusion(s)
        else:  # no table, which would be large
            found |= zip(BY_CLASS, map(torch.from_numpy, by_class(s)), strict=True)
        if not self.scored:
            return found
        p, there = probabilities(s)
        most, answer = p.max(1)
        # of all classes, or the second of two
        shown = slice(self.outputs - self.scored, None)
        return found | self.measured(p[:, shown], there[:, shown], most, answer == s.y)

    def counts(self, n: Mapping[str, Floats], samples: int, loss: float) -> ClassCounts:
        of_classes = _of_classes(n)
        ranked = self.ranked(n)
        groups, squares = self.of_probabilities(n, ranked)
        if len(ranked) == 1:
            ranked = (ranked[0].mirrored(), ranked[0])
        total = float(of_classes[1].sum())
        brier = nan
        if total:
            brier = squares / total
        accuracy = float(n["right"]) / samples
        return ClassCounts(samples, loss, accuracy, *of_classes, ranked, groups, brier)


class OfLabels(Scored):
    """Several labels for each sample: for each of them samples without and with it (rows), and
    answers (columns).

    A label that fewer samples have, or lack, than `Care.positives` is left out.
    """

    def parts(self) -> Sequence[Counted]:
        return [Counted("tables", (self.outputs, 2, 2)), *self.of_scores()]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        p, there = probabilities(s)
        answer = p >= 0.5
        # four cells for each label
        cells = 4 * torch.arange(self.outputs) + 2 * there + answer
        tables = torch.bincount(cells.flatten(), minlength=4 * self.outputs).view(-1, 2, 2)
        shown = tables.sum(2).amin(1) >= care.positives
        # without a least number, labels of no sample are counted, too
        if care.positives == 1:
            shown[:] = True
        found = {"tables": tables * shown[:, None, None]}
        if not self.scored:
            return found
        most = torch.where(answer, p, 1 - p)[:, shown].flatten()
        right = (answer == there)[:, shown].flatten()
        told = self.measured(p[:, shown], there[:, shown], most, right)
        scores = torch.zeros(self.outputs, *told["scores"].shape[1:], dtype=torch.int64)
        scores[shown] = told["scores"]
        return found | told | {"scores": scores}

    def counts(self, n: Mapping[str, Floats], samples: int, loss: float) -> LabelCounts:
        tables = n["tables"]
        hits = tables[:, 1, 1]
        labels = tables[:, 1].sum(1)
        answers = tables[:, :, 1].sum(1)
        without = np.stack([tables[:, 0].sum(1), tables[:, 0, 0]])
        total = float(tables.sum())
        ranked = self.ranked(n)
        groups, squares = self.of_probabilities(n, ranked)
        accuracy = nan
        brier = nan
        if total:
            accuracy = float((hits + without[1]).sum()) / total
            brier = squares / total
        return LabelCounts(
            samples, loss, accuracy, hits, labels, answers, None, ranked, groups, brier, without
        )


class OfNumbers(Counting):
    """Numbers for each sample, standardised as in training: sums of errors e and targets y, and of
    their squares.

    moments: for intervals, Σ e⁴, Σ e²y, Σ e²y², Σ y³, Σ y⁴. lost: silos whose sums, and whose
    moments, have no room, as a number is not finite or very far away.
    """

    @property
    def regression(self) -> Regression:
        """The task, which says how numbers are standardised."""
        assert isinstance(self.task, Regression)
        return self.task

    def parts(self) -> Sequence[Counted]:
        sums = [Counted(name, (self.outputs, 2)) for name in POWERS]
        return [Counted("lost", (2,)), *sums, Counted("moments", (self.outputs, 5, 2))]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        errors, y = standardised(s, self.regression)
        e2 = errors.square()
        y2 = y.square()
        powers = [errors.abs(), e2, y, y2]
        moments = [e2.square(), e2 * y, e2 * y2, y2 * y, y2.square()]
        # (K, 9)
        totals = torch.stack([one.sum(0) for one in powers + moments], 1)
        room = totals.abs() < _ROOM
        sums = fixed(torch.where(room, totals, 0.0))
        found = dict(zip(POWERS, sums.unbind(1), strict=False))
        found["moments"] = sums[:, 4:]
        found["lost"] = torch.stack([~room[:, :4].all(), ~room[:, 4:].all()])
        return found

    def counts(self, n: Mapping[str, Floats], samples: int, loss: float) -> NumberSums:
        std = np.array(self.regression.std)
        absolute, squared, target, squares = (real(n[name]) / samples for name in POWERS)
        # differences of rounded sums can be below
        absolute = absolute.clip(0)
        squared = squared.clip(0)
        e4, e2y, e2y2, y3, y4 = real(n["moments"]).T / samples
        if n["lost"][0]:
            absolute = absolute + nan
            squared = squared + nan
        # of targets that hardly vary, rounding decides what is left of the difference
        spread = squares - target**2
        spread = np.where(spread > (1 + target**2) / FIXED, spread, 0.0)
        # mean of e²(y - mean)²
        both = e2y2 - 2 * target * e2y + target**2 * squared
        fourth = y4 - 4 * target * y3 + 6 * target**2 * squares - 3 * target**4
        moments = np.stack([e4, both, fourth]) * std**4
        if n["lost"][1]:
            moments = moments + nan
        return NumberSums(samples, loss, absolute * std, squared * std**2, spread * std**2, moments)


class OfTimes(Counting):
    """Times and events: pairs of samples of one silo, as `pairs` counts them; see there.

    ordered: twice the pairs in order, ties once. comparable: pairs. squares: of what samples are
    in, Σ ordered², Σ ordered * comparable, Σ comparable², for intervals. With fewer events than
    `Care.positives` no pairs are told.
    """

    def parts(self) -> Sequence[Counted]:
        return [Counted("ordered"), Counted("comparable"), Counted("squares", (3,))]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        ordered, comparable = pairs(s)
        if int(s.y[:, 1].sum()) < care.positives:
            ordered = torch.zeros_like(ordered)
            comparable = torch.zeros_like(comparable)
        return {
            "ordered": ordered.sum() // 2,
            "comparable": comparable.sum() // 2,
            "squares": torch.from_numpy(products(ordered.numpy(), comparable.numpy())),
        }

    def counts(self, n: Mapping[str, Floats], samples: int, loss: float) -> PairCounts:
        comparable = float(n["comparable"])
        # with noise they are near, not equal
        ordered = min(float(n["ordered"]) / 2, comparable)
        return PairCounts(samples, loss, ordered, comparable, n["squares"])


class OfPlaces(Counting):
    """A class for each of several places of a sample (pixels, tokens): places, and right answers
    among them.

    table: places by label and answer, of up to 100 classes. squares and overlaps: see
    `PlaceCounts`.
    """

    @property
    def tabled(self) -> bool:
        """Whether there is a table."""
        return isinstance(self.task, Segmentation) and self.outputs <= MOST_TABLE

    def parts(self) -> Sequence[Counted]:
        k = self.outputs
        found = [Counted("places"), Counted("right"), Counted("squares", (3,))]
        if self.tabled:
            found += [Counted("table", (k, k + 1)), Counted("overlaps", (3, k))]
        return found

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        weights = self.task.units(s.y)
        assert weights is not None
        units = weights.double()
        found = {"places": units.sum(), "right": (s.right.double() * units).round().sum()}
        if self.tabled:
            found["table"] = confusion(s)
        c = PlaceCounts.of(s, spread=True)
        found["squares"] = torch.from_numpy(c.squares)
        found["overlaps"] = torch.from_numpy(c.overlaps)
        return found

    def counts(self, n: Mapping[str, Floats], samples: int, loss: float) -> PlaceCounts:
        places = float(n["places"])
        accuracy = nan
        squares = n["squares"]
        if places:
            accuracy = float(n["right"]) / places
        # with noise there are none
        if not squares.any():
            squares = NONE
        overlaps = n.get("overlaps", NONE)
        return PlaceCounts(
            samples,
            loss,
            accuracy,
            *_of_classes(n),
            places=places,
            squares=squares,
            overlaps=overlaps,
        )


def _of_classes(n: Mapping[str, Floats]) -> tuple[Floats, Floats, Floats, Floats | None]:
    """Return right answers, labels and answers of each class, and the table that they follow from;
    None without.
    """
    table = n.get("table")
    if table is None:
        return n.get("hits", NONE), n.get("labels", NONE), n.get("answers", NONE), None
    return table.diagonal(), table.sum(1), table[:, :-1].sum(0), table


def counting_of(task: Task, outputs: int, *, full: bool) -> Counting:
    """Return what counts answers to samples of a task; see `Counting`."""
    kind: type[Counting] = OfPlaces
    match task:
        case Classification():
            kind = OfClasses
        case MultiLabel():
            kind = OfLabels
        case Regression():
            kind = OfNumbers
        case Survival():
            kind = OfTimes
    return kind(task, outputs, full)


def edges(scored: int) -> Tensor:
    """Return the inner boundaries of the bins of scores as logits, ascending, float64; 0 is one of
    them.

    They are about even in the logit near 0, and in its logarithm far from it: so scores next to 1/2
    and those of rare classes are told about as well. They are finer if few classes have scores.
    """
    bins = next((bins for most, bins in _FINENESS if scored <= most), _FINENESS[-1][1])
    even = torch.arange(-bins // 2, bins // 2 + 1, dtype=torch.float64) / (bins // 2)
    found = _DENSE * torch.sinh(even * asinh(_REACH / _DENSE))
    return found[found < _ONE]


def middles(inner: Tensor) -> Floats:
    """Return a probability within each bin."""
    ends = torch.cat([inner[:1] - 1, inner, inner[-1:] + 1])
    return np.asarray(torch.sigmoid((ends[1:] + ends[:-1]) / 2).numpy())


def binned(p: Tensor, inner: Tensor) -> Tensor:
    """Return the bin of each probability."""
    return torch.bucketize(torch.logit(p.double()).contiguous(), inner, right=True)


def in_bins(p: Tensor, there: Tensor, inner: Tensor) -> Tensor:
    """Count samples without and with each class or label by the bin of its probability, (C, 2,
    bins), from probabilities (n, C) and whether samples have it (n, C).
    """
    classes = p.shape[1]
    bins = len(inner) + 1
    rows = 2 * torch.arange(classes) + there
    places = rows * bins + binned(p, inner)
    return torch.bincount(places.flatten(), minlength=2 * classes * bins).view(classes, 2, bins)


def probabilities(s: Scores) -> tuple[Tensor, Tensor]:
    """Return the probability (n, K) of each class or label, and whether samples have it."""
    there = s.y > 0.5
    # one class each, not labels
    if s.y.ndim == 1:
        there = torch.nn.functional.one_hot(s.y, s.outputs) > 0
    return s.answers.double().nan_to_num(0), there


def standardised(s: Scores, task: Regression) -> tuple[Tensor, Tensor]:
    """Return errors and targets (n, K) in the standard deviations of training."""
    mean, std = torch.tensor([task.mean, task.std], dtype=torch.float64)
    y = (s.y.double().view(s.answers.shape) - mean) / std
    return (s.answers.double() - mean) / std - y, y


def fixed(totals: Tensor) -> Tensor:
    """Return numbers as pairs of whole numbers (..., 2): n and m stand for n + m / 2^50.

    Numbers are rounded to 2^-20; smaller ones to 26 binary digits, so that they tell no more than
    large ones.
    """
    finest = (torch.frexp(totals.double()).exponent.double() - _DIGITS).clamp(-50, -20)
    step = torch.exp2(finest)
    rounded = (totals.double() / step).round() * step
    whole = rounded.floor()
    return torch.stack([whole, (rounded - whole) * _FINE], -1).long()


def real(numbers: Floats) -> Floats:
    """Return the numbers (...) that pairs (..., 2), or sums of them, stand for."""
    return np.asarray(numbers[..., 0] + numbers[..., 1] / _FINE)
