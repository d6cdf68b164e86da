"""What was counted of a model's answers, from which all metrics follow: of available samples, or as
silos told it.
"""

from dataclasses import dataclass, field, replace
from math import nan, prod
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.tasks.base import IGNORED, Scores, confusion, mean_right
from ekiden.core.tasks.ranked import Floats, Ranked

# classes of a confusion matrix
MOST_TABLE = 100
GROUPS = 15  # of equal width of the calibration error, as is usual
# samples that are compared with all at once
_ROWS = 1024
NONE = np.zeros(0)


def none() -> Floats:
    """Return no numbers."""
    return NONE


@dataclass(frozen=True)
class Counts:
    """What all tasks count."""

    samples: int
    loss: float  # mean


@dataclass(frozen=True)
class ClassCounts(Counts):
    """One class for each sample, or for each place of a sample; or several labels for each
    sample.
    """

    accuracy: float  # share of right answers
    hits: Floats  # (K,) right answers of each class; empty if classes are not counted
    labels: Floats  # (K,) samples (places) of each class
    answers: Floats  # (K,) how often it was the answer
    table: Floats | None = (
        None  # (K, K + 1) by label and answer, the last for no class; None with many classes
    )
    ranked: tuple[Ranked, ...] = ()  # of each class; empty without probabilities
    confidence: Floats = field(default_factory=none)  # (3, 15), see `by_confidence`
    brier: float = nan  # mean of (p - y)²

    @property
    def second(self) -> Ranked | None:
        """The samples by the probability of the second of two classes."""
        if len(self.ranked) == 2 and self.ranked[1].both:
            return self.ranked[1]
        return None

    @classmethod
    def of(cls, s: Scores) -> Self:
        """Count the answers to samples."""
        about = len(s), s.mean_loss(), mean_right(s)
        if s.answers.ndim != 2:
            return cls(*about, *by_class(s), _table(s))
        p = _probabilities(s)
        y = s.y.numpy()
        if s.outputs == 2:
            second = Ranked.of(p[:, 1], y == 1)
            ranked = [second.mirrored(), second]
            squares = second.brier()[0]
        else:
            ranked = [Ranked.of(p[:, k], y == k) for k in range(s.outputs)]
            squares = sum(one.brier()[0] for one in ranked)
        groups = by_confidence(p.max(1), p.argmax(1) == y)
        return cls(*about, *by_class(s), _table(s), tuple(ranked), groups, squares / len(s))


@dataclass(frozen=True)
class LabelCounts(ClassCounts):
    """Several labels for each sample; `labels` are the samples with each of them."""

    # (2, K) samples without the label, and right answers among them
    without: Floats = field(default_factory=none)

    @property
    def second(self) -> None:
        """Labels are not two classes."""

    @classmethod
    def of(cls, s: Scores) -> Self:
        """Count the answers to samples."""
        p = _probabilities(s)
        there = s.y.numpy() > 0.5
        yes = p >= 0.5
        ranked = tuple(map(Ranked.of, p.T, there.T))
        hits = (yes & there).sum(0).astype(float)
        labels = there.sum(0).astype(float)
        answers = yes.sum(0).astype(float)
        squares = sum(one.brier()[0] for one in ranked)
        groups = by_confidence(np.maximum(p, 1 - p).ravel(), (yes == there).ravel())
        without = np.stack([(~there).sum(0), (~yes & ~there).sum(0)]).astype(float)
        about = len(s), s.mean_loss(), mean_right(s)
        brier = squares / there.size
        return cls(*about, hits, labels, answers, None, ranked, groups, brier, without)


@dataclass(frozen=True)
class PlaceCounts(ClassCounts):
    """A class for each of several places of a sample (pixels, tokens)."""

    places: float = 0.0  # that count
    # (3,), for intervals: of right answers r and places p of each sample Σ r², Σ rp, Σ p²
    squares: Floats = field(default_factory=none)
    # (3, K), of right answers h of a class, and its labels and answers t together, Σ h², Σ ht, Σ t²
    overlaps: Floats = field(default_factory=none)

    @classmethod
    def of(cls, s: Scores, *, spread: bool = False) -> Self:
        """Count the answers to places; with `spread` also what intervals need."""
        about = len(s), s.mean_loss(), mean_right(s)
        # a vocabulary has too many tokens
        found = cls(*about, NONE, NONE, NONE)
        if s.task.kind == "segmentation":
            found = cls(*about, *by_class(s), _table(s))
        counting = s.task.units(s.y)
        if not spread or counting is None:
            return found
        units = counting.double().numpy()
        right = np.rint(s.right.double().numpy() * units)
        overlaps = NONE
        if found.hits.size:
            hits, labels, answers = by_class(s, each=True)
            overlaps = products(hits, labels + answers)
        return replace(found, places=units.sum(), squares=products(right, units), overlaps=overlaps)


@dataclass(frozen=True)
class NumberSums(Counts):
    """Numbers for each sample: means over samples of errors e and targets y, in the unit of the
    targets, (K,).
    """

    absolute: Floats  # of |e|
    squared: Floats  # of e²
    spread: Floats  # of d², with d the difference of y from its mean
    fourth: Floats  # (3, K), of e⁴, e²d², d⁴

    @classmethod
    def of(cls, s: Scores) -> Self:
        """Sum over samples."""
        y = s.y.view(s.answers.shape).double()
        e = s.answers.double() - y
        d = y - y.mean(0)
        products = (e.abs(), e.square(), d.square(), e**4, (e * d).square(), d**4)
        absolute, squared, spread, *fourth = (part.mean(0).numpy() for part in products)
        return cls(len(s), s.mean_loss(), absolute, squared, spread, np.stack(fourth))


@dataclass(frozen=True)
class PairCounts(Counts):
    """Times and events: pairs of samples, as `pairs` counts them."""

    ordered: float  # pairs in order; ties count half
    comparable: float
    # (3,) over samples, for intervals: Σ o², Σ oc, Σ c² of its pairs in order (twice) and
    # comparable
    squares: Floats

    @classmethod
    def of(cls, s: Scores) -> Self:
        """Count pairs of samples."""
        ordered, comparable = torch.stack(pairs(s)).double().numpy()
        squares = np.array([ordered @ ordered, ordered @ comparable, comparable @ comparable])
        return cls(len(s), s.mean_loss(), ordered.sum() / 4, comparable.sum() / 2, squares)


def by_class(s: Scores, *, each: bool = False) -> tuple[Floats, Floats, Floats]:
    """Return right answers, labels and answers of each class: (K,), or with `each` for each sample
    (n, K).
    """
    y = s.y.numpy().reshape(len(s), prod(s.y.shape[1:]))
    answers = s.chosen.numpy().reshape(y.shape)
    row = np.arange(len(s))[:, None] * each + np.zeros_like(y)

    def count(kind: NDArray[np.int64], where: NDArray[np.bool_]) -> Floats:
        where = where & (y != IGNORED)
        shape = (len(s), s.outputs) if each else (s.outputs,)
        places = row[where] * s.outputs + kind[where]
        return np.bincount(places, minlength=int(np.prod(shape))).reshape(shape).astype(float)

    right = np.asarray(answers == y)
    return count(y, right), count(y, y >= 0), count(answers, answers < s.outputs)


def _probabilities(s: Scores) -> Floats:
    """Return the probabilities (n, K); those of a model that has diverged count as 0, as between
    machines.
    """
    return np.asarray(np.nan_to_num(s.answers.double().numpy()))


def _table(s: Scores) -> Floats | None:
    if s.outputs <= MOST_TABLE:
        return confusion(s).double().numpy()
    return None


def products(a: Floats, b: Floats) -> Floats:
    """Return Σ a², Σ ab, Σ b² over samples, (3, ...), of two counts (n, ...)."""
    return np.stack([(a * a).sum(0), (a * b).sum(0), (b * b).sum(0)])


def by_confidence(p: Floats, right: NDArray[np.bool_]) -> Floats:
    """Return samples, right answers and sums of confidences p (n,), (3, 15), by groups that hold
    their upper end.
    """
    group = np.clip(np.ceil(p * GROUPS), 1, GROUPS).astype(int) - 1
    return np.stack(
        [np.bincount(group, weights, GROUPS) for weights in (np.ones_like(p), right, p)]
    )


def pairs(s: Scores) -> tuple[Tensor, Tensor]:
    """Return of each sample in how many pairs it is, (n,) int64: twice those in order, ties once,
    and comparable ones.

    A pair is comparable if one had the event before the other had it or was last seen. It is in
    order if the one with the earlier event has the higher answer.

    Frank Harrell et al.: Evaluating the yield of medical tests. JAMA 247, 1982.
    """
    time = s.y[:, 0]
    event = s.y[:, 1] > 0.5
    risk = s.answers[:, 0]
    ordered, comparable = torch.zeros(2, len(s), dtype=torch.int64, device=s.y.device)
    for rows in torch.split(event.nonzero().flatten(), _ROWS):
        early = time[rows, None]
        known = (early < time) | ((early == time) & ~event)
        right = ((risk[rows, None] - risk).sign().long() + 1) * known
        for counts, each in ((ordered, right), (comparable, known.long())):
            counts[rows] += each.sum(1)
            counts.add_(each.sum(0))
    return ordered, comparable
