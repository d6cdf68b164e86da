"""What is counted of a model's answers: whole numbers that add up over silos, from which all
figures follow.

Numbers that are not counts are in fixed point, so that sums of silos are exact and masks can hide
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log2, log10, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.tasks.base import Scores, Task, confusion
from ekiden.core.tasks.labels import (
    Classification,
    MultiLabel,
    Regression,
    ScaledTask,
    Segmentation,
    Survival,
)
from ekiden.core.tasks.measures import classes, pairs

FIXED = 1 << 20  # the whole number that stands for 1 in sums
MOST_LOSS = 10.0  # largest loss of a sample in a coarse sum
_LARGEST = 1000.0  # of a number in an exact sum
_STEPS = 16  # by which one sample moves a coarse sum at most
_REACH = 16  # bins of scores: logits from -16 to 16
_FINENESS = (
    (2, 128),
    (16, 32),
    (128, 8),
)  # up to so many classes with scores, so many bins in a unit of the logit
_MOST_BINNED = _FINENESS[-1][0]
_OF_SCORES = frozenset(("auroc", "average_precision", "calibration_error", "brier"))
_MOST_TABLE = 100  # classes of a confusion matrix
_MOST_TRAIN = 1000  # classes whose training labels are counted
GROUPS = 15  # groups of equal width of the calibration error, as is usual
SHARES = 10  # groups of equal width of the predicted survival
# of a silo's samples would be followed up to a time without events; with fewer it tells nothing
# then
_FOLLOWED = 0.05


class Counted(NamedTuple):
    """Numbers that are counted together; `name` says what they are."""

    name: str
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many there are."""
        return prod(self.shape)


@dataclass(frozen=True)
class Care:
    """How carefully a silo tells about its samples."""

    samples: int = (
        1  # with fewer samples nothing is told. If `coarse`, bins of scores with fewer are joined.
    )
    # samples of classes, and labels, with fewer samples are left out of what is told by class
    positives: int = 1
    # whether another party could have made the model, so that it answers to one sample. Then scores
    # in sparse bins are
    # moved to their neighbours, and one sample moves a sum by a few steps only.
    coarse: bool = False
    # between and after which enough samples end, so that survival is told there; None: of all times
    times: tuple[float, ...] | None = None


EXACT = Care()


class Counting(ABC):
    """Counts what a model answers to samples of one task."""

    def __init__(self, task: Task, outputs: int, *, full: bool) -> None:
        self.task = task  # what the labels mean
        self.outputs = outputs  # K
        self.full = full  # whether scores are counted in bins, too, where the task has scores

    @abstractmethod
    def parts(self) -> Sequence[Counted]:
        """Return what is counted by this kind of task, in addition to what all count."""

    @abstractmethod
    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        """Return the numbers of `parts` by name."""

    @cached_property
    def layout(self) -> tuple[Counted, ...]:
        """All numbers, in order.

        reports: silos with enough samples; samples; broken: silos where a loss is not a number;
        exact: samples of silos that were not coarse; loss: sum of the losses; far: silos where the
        model has diverged; train: labels of the training samples.
        """
        train = (
            self.outputs
            if self.outputs <= _MOST_TRAIN and not isinstance(self.task, ScaledTask)
            else 0
        )
        first = [
            Counted(name)
            for name in ("reports", "samples", "broken", "exact", "loss", "far", "trained")
        ]
        return (*first, Counted("train", (train,)), *self.parts())

    @property
    def scored(self) -> int:
        """Number of classes or labels whose scores are counted, where the task has scores."""
        return self.outputs if self.outputs <= _MOST_BINNED else 0

    @cached_property
    def edges(self) -> Tensor:
        """Inner boundaries of the bins of scores, as logits."""
        return edges(self.scored)

    @property
    def size(self) -> int:
        """The length of the vector of all numbers."""
        return sum(part.size for part in self.layout)

    def count(self, s: Scores, care: Care = EXACT, train: Tensor | None = None) -> Tensor:
        """Return all numbers of some samples, (size,) int64; zeros if there are too few samples.

        Args:
            s: the answers, with probabilities if `full`.
            care: what is left out, or coarse.
            train: labels of the training samples; None if they are not counted.
        """
        units = self.task.units(s.y) if len(s) else None
        if units is not None:
            s = s.at((units > 0).nonzero().flatten())
        if len(s) < max(care.samples, 1):
            return torch.zeros(self.size, dtype=torch.int64)
        loss, mean, guess = s.loss.double(), s.mean_loss(), self.task.guess(self.outputs)
        weights = torch.ones(len(s), dtype=torch.float64) if care.coarse else self._weights(s)
        found = {
            "reports": torch.tensor(1),
            "samples": torch.tensor(len(s)),
            "broken": loss.isnan().any().long(),
            "exact": torch.tensor(0 if care.coarse else len(s)),
            "loss": _coarse_loss(loss) if care.coarse else fixed(loss * weights),
            "far": torch.tensor(int(mean != mean or mean > max(30.0, 10 * guess))),  # noqa: PLR0124  (NaN)
            **self._trained(care, train),
            **self.measure(s, care),
        }
        return torch.cat([found[part.name].reshape(part.size).long() for part in self.layout])

    def lacks(self, metric: str) -> bool:
        """Return whether this metric needs scores, and there are too many classes to count any."""
        return metric in _OF_SCORES and all(part.name != "scores" for part in self.layout)

    def split(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return a vector of numbers by name."""
        if numbers.dtype != torch.int64 or numbers.shape != (self.size,):
            raise UserError(
                f"counts of {tuple(numbers.shape)} do not fit {self.task.kind}: refused"
            )
        pieces = torch.split(numbers, [part.size for part in self.layout])
        return {
            part.name: piece.reshape(part.shape)
            for part, piece in zip(self.layout, pieces, strict=True)
        }

    def _weights(self, s: Scores) -> Tensor:
        """Return the weights of the samples in the mean loss."""
        units = self.task.units(s.y)
        return torch.ones(len(s), dtype=torch.float64) if units is None else units.double()

    def _trained(self, care: Care, train: Tensor | None) -> dict[str, Tensor]:
        size = next(part.size for part in self.layout if part.name == "train")
        if not size or train is None:
            return {"trained": torch.tensor(0), "train": torch.zeros(size)}
        counts = self.task.counts(train, self.outputs).cpu()[:size]
        return {
            "trained": torch.tensor(len(train)),
            "train": torch.where(counts < care.positives, 0, counts),
        }


class OfClasses(Counting):
    """One class for each sample.

    table: samples by label and answer (the last column is for other outputs); of many classes only
    `hits`, `labels` and `answers`. scores: samples of each class and of the others by bins of its
    probability; of two classes only of the second. top: wrong and right answers by bins of the
    largest probability, of three or more classes. brier and confidence: sums.
    """

    @property
    def scored(self) -> int:
        """Number of classes whose scores are counted: of two, only the second."""
        return 1 if self.outputs == 2 else super().scored

    def parts(self) -> Sequence[Counted]:
        k = self.outputs
        table = (
            [Counted("table", (k, k + 1))]
            if k <= _MOST_TABLE
            else [Counted(name, (k,)) for name in ("hits", "labels", "answers")]
        )
        if not self.full or not self.scored:
            return [Counted("right"), *table]
        bins = len(self.edges) + 1
        scores = [Counted("scores", (self.scored, 2, bins))]
        if self.outputs > 2:
            scores.append(Counted("top", (2, bins)))
        return [
            Counted("right"),
            *table,
            *scores,
            Counted("brier"),
            Counted("confidence", (GROUPS,)),
        ]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        right = s.right.sum()
        labels = torch.bincount(s.y, minlength=self.outputs)
        s = s.at((labels[s.y] >= care.positives).nonzero().flatten())
        found = {"right": right}
        if self.outputs <= _MOST_TABLE:
            found["table"] = confusion(s)
        else:  # no table, which would be large
            answer = classes(s.answers)
            found["labels"] = torch.bincount(s.y, minlength=self.outputs)
            found["answers"] = torch.bincount(answer, minlength=self.outputs)[: self.outputs]
            found["hits"] = torch.bincount(s.y[answer == s.y], minlength=self.outputs)
        if not self.full or not self.scored:
            return found
        p, y = s.answers.double().nan_to_num(0), torch.nn.functional.one_hot(s.y, self.outputs)
        places = torch.stack([binned(p[:, k], self.edges) for k in self._classes])
        scores = torch.stack(
            [
                _by(row, y[:, k], len(self.edges) + 1)
                for row, k in zip(places, self._classes, strict=True)
            ]
        )
        most, answer = p.max(1)
        top = _by(binned(most, self.edges), (answer == s.y).long(), len(self.edges) + 1)
        errors = (p[:, : self.outputs] - y).square()
        brier = errors[:, 1] if self.outputs == 2 else errors.sum(1)
        group = group_of(most)
        sums = torch.stack([fixed(most[group == g]) for g in range(GROUPS)])
        if care.coarse:
            return found | {
                "scores": torch.stack([joined(rows, care.samples) for rows in scores]),
                "top": joined(top, care.samples),
                "brier": torch.tensor(0),
                "confidence": torch.zeros(GROUPS),
            }
        return found | {"scores": scores, "top": top, "brier": fixed(brier), "confidence": sums}

    @property
    def _classes(self) -> range:
        return range(1, 2) if self.outputs == 2 else range(self.outputs)


class OfLabels(Counting):
    """Several labels for each sample: for each of them samples without and with it (rows), and
    answers (columns).

    A label that fewer samples have, or lack, than `Care.positives` is left out.
    """

    def parts(self) -> Sequence[Counted]:
        tables = Counted("tables", (self.outputs, 2, 2))
        if not self.full or not self.scored:
            return [tables]
        bins = len(self.edges) + 1
        return [
            tables,
            Counted("scores", (self.scored, 2, bins)),
            Counted("brier"),
            Counted("confidence", (GROUPS,)),
        ]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        there = (s.y > 0.5).long()
        p = s.answers.double().nan_to_num(0)
        answer = (p >= 0.5).long()
        pairs = zip(there.T, answer.T, strict=True)
        tables = torch.stack([torch.bincount(2 * a + b, minlength=4).view(2, 2) for a, b in pairs])
        shown = tables.sum(2).amin(1) >= (care.positives if care.positives > 1 else 0)
        found = {"tables": tables * shown[:, None, None]}
        if not self.full or not self.scored:
            return found
        size = len(self.edges) + 1
        scores = torch.stack(
            [_by(binned(a, self.edges), b, size) for a, b in zip(p.T, there.T, strict=True)]
        )
        scores = scores * shown[:, None, None]
        most = torch.where(answer > 0, p, 1 - p)[:, shown]
        sums = torch.stack([fixed(most[group_of(most) == g]) for g in range(GROUPS)])
        if care.coarse:
            scores = torch.stack([joined(rows, care.samples) for rows in scores])
            return found | {
                "scores": scores,
                "brier": torch.tensor(0),
                "confidence": torch.zeros(GROUPS),
            }
        return found | {
            "scores": scores,
            "brier": fixed((p - there).square()[:, shown]),
            "confidence": sums,
        }


class OfNumbers(Counting):
    """Numbers for each sample, standardised as in training: sums of errors e and targets y, and of
    their squares.

    moments: for intervals, Σ e⁴, Σ e²y, Σ e²y², Σ y³, Σ y⁴.
    """

    @property
    def regression(self) -> Regression:
        """The task, which says how numbers are standardised."""
        assert isinstance(self.task, Regression)
        return self.task

    def parts(self) -> Sequence[Counted]:
        sums = [
            Counted(name, (self.outputs,))
            for name in ("absolute", "squared", "target", "target_squared")
        ]
        return [*sums, Counted("moments", (self.outputs, 5))]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        mean, std = torch.tensor([self.regression.mean, self.regression.std], dtype=torch.float64)
        y = (s.y.double().view(s.answers.shape) - mean) / std
        errors = ((s.answers.double() - mean) / std - y).nan_to_num(_LARGEST)
        if care.coarse:
            root = MOST_LOSS**0.5
            errors, y = errors.clamp(-root, root), y.clamp(-root, root)
        e2, y2 = errors.square(), y.square()
        values = [errors.abs(), e2, y, y2, e2.square(), e2 * y, e2 * y2, y2 * y, y2.square()]
        if care.coarse:
            powers = (1, 2, 1, 2, 4, 3, 4, 3, 4)
            sums = [
                _stepped(one.sum(0), root**power) for one, power in zip(values, powers, strict=True)
            ]
        else:
            sums = [fixed(one, 0) for one in values]
        found = dict(
            zip(("absolute", "squared", "target", "target_squared"), sums[:4], strict=True)
        )
        return found | {"moments": torch.stack(sums[4:], 1)}


class OfTimes(Counting):
    """Times and events: pairs of samples of one silo, as `measures.pairs` counts them; see there.

    ordered: twice the pairs in order, ties once. comparable: pairs. squares: of what samples are
    in, Σ ordered², Σ ordered * comparable, Σ comparable², for intervals. With fewer events than
    `Care.positives` no pairs are told. grouped: for each of the task's times, by groups of equal
    width of the predicted survival S: samples, Σ S, sums of the weights w of those without and with
    the event by then, and of w². errors: for each time Σ w(S - o)², with o = 1 without the event
    and 0 with it, and Σ w²(S - o)⁴.
    """

    def parts(self) -> Sequence[Counted]:
        pairs = [Counted("ordered"), Counted("comparable"), Counted("squares", (3,))]
        times = len(self.survival.times)
        return (
            [*pairs, Counted("grouped", (times, 6, SHARES)), Counted("errors", (times, 2))]
            if times
            else pairs
        )

    @property
    def survival(self) -> Survival:
        """The task, which has the times."""
        assert isinstance(self.task, Survival)
        return self.task

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        told = self._at_times(s, care) if self.survival.times else {}
        ordered, comparable = pairs(s)
        if int(s.y[:, 1].sum()) < care.positives:
            ordered, comparable = torch.zeros_like(ordered), torch.zeros_like(comparable)
        squares = torch.stack(
            [(a * b).sum() for a, b in ((ordered,) * 2, (ordered, comparable), (comparable,) * 2)]
        )
        found = {"ordered": ordered.sum() // 2, "comparable": comparable.sum() // 2}
        if care.coarse:  # a sample is in fewer than n pairs
            step = ceil(2 * len(s) / _STEPS)
            rounded = {name: (total / step).round().long() * step for name, total in found.items()}
            steps = torch.tensor([12, 6, 3]) * ceil(
                len(s) ** 2 / _STEPS
            )  # its pairs are also in those of others
            return rounded | {"squares": (squares / steps).round().long() * steps} | told
        return found | {"squares": squares} | told

    def _at_times(self, s: Scores, care: Care) -> dict[str, Tensor]:
        """Return what is counted at the task's times; 0 at those that the silo does not tell.

        A sample counts as if it stood for those that were last seen earlier: its weight is 1 / G,
        with G the share that would be followed so long without events, by Kaplan and Meier of the
        silo's own samples. So the weights of all samples without the event are n times their
        Kaplan-Meier estimate.

        Erika Graf et al.: Assessment and comparison of prognostic classification schemes for
        survival data. Statistics in Medicine 18, 1999.
        """
        times = self.survival.times
        grouped, errors = (
            torch.zeros(len(times), 6, SHARES).long(),
            torch.zeros(len(times), 2).long(),
        )
        ends, event = s.y[:, 0].double(), s.y[:, 1] > 0
        for k, (time, hazard) in enumerate(zip(times, self.survival.hazard, strict=True)):
            if care.times is not None and time not in care.times:
                continue
            had = event & (ends <= time)
            without = ~had & (ends >= time)
            followed = _followed(ends, event, ends.clamp(max=time))
            least = float(followed[had | without].min()) if bool((had | without).any()) else 0.0
            if least < _FOLLOWED:
                continue
            w = torch.where(had | without, 1 / followed, 0.0)
            predicted = torch.exp(-hazard * s.answers[:, 0].double().exp()).nan_to_num(0)
            group = (predicted * SHARES).long().clamp(0, SHARES - 1)
            wrong = (predicted - without.double()).square() * w
            values = [
                torch.ones_like(w),
                predicted,
                w * without,
                w * had,
                w.square() * without,
                w.square() * had,
            ]
            sums = torch.stack(
                [torch.zeros(SHARES).double().index_add(0, group, one) for one in values]
            )
            found = torch.stack([wrong.sum(), wrong.square().sum()])
            if care.coarse:
                sums, most = (
                    joined(sums, care.samples, sums[0]),
                    2.0 ** ceil(-log2(least)),
                )  # tells little of `least`
                bounds = (1.0, most, most, most**2, most**2)
                sums = torch.stack([sums[0] * FIXED, *map(_stepped, sums[1:], bounds)])
                found = torch.stack([_stepped(found[0], most), _stepped(found[1], most**2)])
                grouped[k], errors[k] = sums.round().long(), found
            else:
                grouped[k], errors[k] = (
                    (sums * FIXED).round().long(),
                    (found * FIXED).round().long(),
                )
        return {"grouped": grouped, "errors": errors}


def _followed(ends: Tensor, event: Tensor, times: Tensor) -> Tensor:
    """Return the share (m,) that would be followed up to the times, if only ends without an event
    counted.

    Of samples that end at the same time, those with an event end first.
    """
    known, place = torch.unique(ends, return_inverse=True)
    gone = torch.bincount(place, (~event).double(), len(known))
    deaths = torch.bincount(place, event.double(), len(known))
    at_risk = (gone + deaths).flip(0).cumsum(0).flip(0) - deaths
    left = torch.cat(
        [torch.ones(1).double(), torch.where(gone > 0, 1 - gone / at_risk, 1.0).cumprod(0)]
    )
    return left[torch.searchsorted(known, times)]


class OfPlaces(Counting):
    """A class for each of several places of a sample (pixels, tokens): places, and right answers
    among them.

    table: places by label and answer, of up to 100 classes. For intervals, sums over samples of
    products: squares: of right answers r and places p, Σ r², Σ rp, Σ p². overlaps: of each class,
    of its right answers h and of its labels and answers t, Σ h², Σ ht, Σ t². Both are 0 in coarse
    counts.
    """

    def parts(self) -> Sequence[Counted]:
        with_table = isinstance(self.task, Segmentation) and self.outputs <= _MOST_TABLE
        k = self.outputs
        table = [Counted("table", (k, k + 1)), Counted("overlaps", (k, 3))] if with_table else []
        return [Counted("places"), Counted("right"), Counted("squares", (3,)), *table]

    def measure(self, s: Scores, care: Care) -> dict[str, Tensor]:
        units = self._weights(s)
        right = (s.right.double() * units).round()
        found = {"places": units.sum(), "right": right.sum()}
        with_table = any(part.name == "table" for part in self.parts())
        found |= {"table": confusion(s)} if with_table else {}
        if care.coarse:  # a small change of one sample would show in some of many products
            step = max(float(units.max()) / _STEPS, 1.0)
            found = {name: (numbers / step).round() * step for name, numbers in found.items()}
            return found | {"squares": torch.zeros(3), "overlaps": torch.zeros(self.outputs, 3)}
        if with_table:
            tables = torch.stack([confusion(s.at(torch.tensor([i]))) for i in range(len(s))])
            hits = tables.diagonal(dim1=1, dim2=2)
            found["overlaps"] = _products(hits, tables.sum(2) + tables[:, :, :-1].sum(1))
        return found | {"squares": _products(right, units)}


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ a², Σ ab, Σ b² over samples, (..., 3), of two counts (n, ...)."""
    a, b = a.double(), b.double()
    return torch.stack([(a * a).sum(0), (a * b).sum(0), (b * b).sum(0)], -1)


def counting_of(task: Task, outputs: int, *, full: bool) -> Counting:
    """Return what counts answers to samples of a task; see `Counting`."""
    match task:
        case Classification():
            return OfClasses(task, outputs, full=full)
        case MultiLabel():
            return OfLabels(task, outputs, full=full)
        case Regression():
            return OfNumbers(task, outputs, full=full)
        case Survival():
            return OfTimes(task, outputs, full=full)
        case _:
            return OfPlaces(task, outputs, full=full)


def edges(scored: int) -> Tensor:
    """Return the inner boundaries of the bins of scores as logits, ascending, float64.

    They are even in the logit, and finer if few classes have scores. The boundaries of the groups
    of the calibration error are among them.
    """
    unit = next((bins for most, bins in _FINENESS if scored <= most), 1)
    even = torch.arange(-_REACH * unit, _REACH * unit + 1, dtype=torch.float64) / unit
    groups = torch.logit(torch.arange(1, GROUPS, dtype=torch.float64) / GROUPS)
    return torch.cat([even, groups]).sort().values


def binned(p: Tensor, inner: Tensor) -> Tensor:
    """Return the bin (n,) of each probability."""
    return torch.bucketize(torch.logit(p.double()), inner, right=True)


def group_of(p: Tensor) -> Tensor:
    """Return the group of the calibration error to which a probability belongs."""
    return (p.double() * GROUPS).ceil().long().clamp(1, GROUPS) - 1


def joined(rows: Tensor, least: int, totals: Tensor | None = None) -> Tensor:
    """Return counts (R, bins) in which bins with fewer than `least` samples are joined with their
    neighbours.

    The samples of the joined bins are counted in the bin between the first and the last of them
    whose number is divisible by the largest power of two. It says little about where a single
    sample is; their median would be the bin of one of them. `totals` (bins,) are the samples; by
    default the sums of the rows.
    """
    found = torch.zeros_like(rows)
    totals = rows.sum(0) if totals is None else totals
    inside: list[int] = []
    cells: list[list[int]] = []
    for place in totals.nonzero().flatten().tolist():
        inside.append(place)
        if int(totals[inside].sum()) >= least:
            cells.append(inside)
            inside = []
    if inside and cells:
        cells[-1] += inside
    for cell in cells:
        low, high = cell[0], cell[-1]
        place = high
        while (rounder := place & (place - 1)) >= low and place:  # without its last bit
            place = rounder
        found[:, place] = rows[:, cell].sum(1)
    return found


def fixed(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of numbers in fixed point, each rounded first and bounded by 1000; along
    `dim`, or of all.
    """
    if dim is None:
        values, dim = values.flatten(), 0
    bounded = values.double().nan_to_num(_LARGEST).clamp(-(_LARGEST**2), _LARGEST**2)
    return (bounded * FIXED).round().long().sum(dim)


def _by(places: Tensor, rows: Tensor, bins: int) -> Tensor:
    """Count samples by row (0 or 1) and bin, (2, bins)."""
    return torch.bincount(rows * bins + places, minlength=2 * bins).view(2, bins)


def _stepped(total: Tensor, most: float) -> Tensor:
    """Return a sum in fixed point, in steps of which a sample adds at most 16."""
    step = most / _STEPS
    return ((total / step).round() * step * FIXED).round().long()


def _coarse_loss(loss: Tensor) -> Tensor:
    """Return the sum of the losses, from a mean of two significant digits, or in steps of 10/n if
    these are larger.

    One sample moves the mean by one step at most.
    """
    samples, mean = len(loss), float(loss.nan_to_num(MOST_LOSS).clamp(max=MOST_LOSS).mean())
    share = MOST_LOSS / samples
    digit = 10.0 ** floor(log10(share))
    step = max(ceil(share / digit) * digit, 10.0 ** (floor(log10(mean)) - 1) if mean > 0 else 0.0)
    return torch.tensor(round(round(mean / step) * step * samples * FIXED))
