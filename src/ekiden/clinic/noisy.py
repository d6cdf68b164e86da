"""Counts of a model's answers with noise: differential privacy of each test sample.

One sample moves the numbers of a report by a vector of bounded length, part by part. Each part gets
discrete Gaussian noise of its own, and all parts together are one Gaussian mechanism; see
`ekiden.core.training.private.noise`. Silos add up what they tell, and the noise adds up with it.

Scores are counted in the nodes of a binary tree over few bins, and each silo tells the best estimate
of the bins that follows from its noisy nodes. So the sum over many bins, of which areas under curves
consist, has the noise of a few nodes.

Michael Hay et al.: Boosting the Accuracy of Differentially Private Histograms Through Consistency.
VLDB 2010. https://arxiv.org/abs/0904.0942. Hierarchical histograms for curves of federated
classifiers: Xuefeng Xu, Graham Cormode: Federated Computation of ROC and PR Curves. 2025.
https://arxiv.org/abs/2510.04979.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.clinic.counting import (
    BY_CLASS,
    EXACT,
    POWERS,
    Counted,
    Counting,
    binned,
    fixed,
    in_bins,
    probabilities,
    standardised,
)
from ekiden.clinic.figures import Figures, figures
from ekiden.clinic.ranked import Interval, Wanted, Z
from ekiden.core.base.errors import UserError
from ekiden.core.tasks.base import Scores, confusion
from ekiden.core.tasks.counts import GROUPS, pairs
from ekiden.core.tasks.labels import (
    Classification,
    MultiLabel,
    Regression,
    Survival,
)
from ekiden.core.training.private.noise import ROUNDED, Draw

Array = np.ndarray[Any, np.dtype[np.float64]]
GRID = 1 << 10  # the whole number that stands for 1
# a larger loss of a sample counts as this
MOST_LOSS = 10.0
# a mean loss above it is that of a model that has diverged
_FAR = 9.0
# of the standard deviation, as it can be drawn
_MOST = 1 << 28
# standard deviation below which sums of discrete Gaussians would not be one
_FEWEST = 16
# standard deviations to which errors and targets are cut off
_REACH = 4.0
# bins of scores, and how many of them a unit of the logit has
_BINS = 64
_UNIT = 4
# limits of what is not a metric: slopes of calibration
_ANY = (-math.inf, math.inf)
# times that noise is drawn again to see how far it moves figures
_REDRAWN = 50


@dataclass(frozen=True)
class NoisyPart(Counted):
    """Numbers that are told together."""

    norm: float = 1.0  # the length of the vector by which one sample moves them at most
    tree: bool = False  # whether the last axis has bins, which are counted in a tree


@dataclass(frozen=True)
class Exact:
    """What silos tell about answers, without noise."""

    counting: Counting

    @property
    def size(self) -> int:
        """The length of the vector of all numbers."""
        return self.counting.size

    def figures(self, told: Tensor, wanted: Wanted | None = None) -> Figures:
        """Return what follows from what silos told together."""
        return figures(self.counting.task, self.counting.told(told), wanted)

    def vector(self, told: Tensor) -> Tensor:
        """Return counts, as `Counting` has them."""
        return told


@dataclass(frozen=True)
class Noisy(Exact):
    """What silos tell with noise about answers, and which counts are likely then."""

    noise: float  # σ of all that one silo tells, in lengths by which one sample moves it
    places: int = 1  # of a sample that has several (pixels, tokens), how many
    honest: int = 1  # silos that share the noise
    whole: bool = True  # whether the number of samples is public, as it is of no subgroup

    @cached_property
    def parts(self) -> tuple[NoisyPart, ...]:
        """All that has noise."""
        k = self.counting.outputs
        scored = self.counting.scored
        told = [NoisyPart("loss", (), MOST_LOSS)]
        if not self.whole:
            told.append(NoisyPart("samples"))
        # a sample is in one node of each level
        deep = math.sqrt(_BINS.bit_length())
        scores = []
        if scored:
            shape = (scored, 2, _BINS)
            scores.append(NoisyPart("scores", shape, deep * math.sqrt(scored), tree=True))
        table = NoisyPart("table", (k, k + 1))
        match self.counting.task:
            case Classification():
                if not self.counting.has("table"):
                    table = NoisyPart("each", (3, k), 3**0.5)
                told += [NoisyPart("right"), table, *scores]
                # of two classes, the bins of scores tell them, too
                if scored and k > 2:
                    told.append(NoisyPart("groups", (2, GROUPS), 2**0.5))
            case MultiLabel():
                told += [NoisyPart("tables", (k, 2, 2), math.sqrt(k)), *scores]
            case Regression():
                for name, power in POWERS.items():
                    told.append(NoisyPart(name, (k,), math.sqrt(k) * _REACH**power))
            # they are divided by n: see `_bounded`
            case Survival():
                told += [NoisyPart("ordered", (), 3.01), NoisyPart("comparable", (), 1.51)]
            # in samples
            case _:
                told += [NoisyPart("places"), NoisyPart("right")]
                if self.counting.has("table"):
                    told.append(table)
        return tuple(told)

    @property
    def size(self) -> int:
        """The length of the vector of all numbers: first silos and samples, which are public."""
        return 2 + sum(part.size for part in self.parts)

    def deviation(self, part: NoisyPart) -> int:
        """Return σ of one silo's noise for a part, in units of 1/GRID; all parts get equal shares."""
        square = (self.noise * part.norm * GRID) ** 2 * len(self.parts)
        found = math.ceil(math.sqrt((square + ROUNDED) / self.honest))
        if found > _MOST:
            raise UserError(
                "noise of evaluations is too large to add up: measure fewer models, or raise its epsilon"
            )
        return max(found, _FEWEST)

    def release(self, s: Scores, draw: Draw, least: int = 1) -> Tensor:
        """Return what a silo tells, (size,) int64; zeros if it has fewer samples than `least`."""
        if self.whole and len(s) < max(least, 1):
            return torch.zeros(self.size, dtype=torch.int64)
        exact = self._bounded(s)
        samples = 0
        if self.whole:
            samples = len(s)
        told = [torch.tensor([1, samples])]
        for part in self.parts:
            numbers = (exact[part.name].double() * GRID).round().reshape(-1, *part.shape[-1:])
            if part.tree:
                numbers = numbers @ torch.from_numpy(_tree(_BINS)).T
            drawn = draw.gaussian(self.deviation(part), numbers.numel())
            numbers = numbers + drawn.view(numbers.shape)
            if part.tree:
                numbers = numbers @ torch.from_numpy(_estimate(_BINS)).T
            told.append(numbers.round().long().reshape(-1))
        return torch.cat(told)

    def _bounded(self, s: Scores) -> dict[str, Tensor]:
        """Return the numbers, to which each sample adds a vector that is no longer than the norm."""
        bounded = s.loss.double().nan_to_num(MOST_LOSS).clamp(-MOST_LOSS, MOST_LOSS)
        found = {"loss": (bounded * GRID).round().sum() / GRID, "samples": torch.tensor(len(s))}
        match self.counting.task:
            case Classification() | MultiLabel():
                return found | self._of_classes(s)
            case Regression() as task:
                return found | _of_numbers(s, task)
            case Survival():
                # A sample is in fewer than n pairs; n, too, is one less without it.
                both = torch.stack(pairs(s)).sum(1) // 2 / max(len(s), 1)
                return found | {"ordered": both[0], "comparable": both[1]}
        return found | self._of_places(s)

    def _of_classes(self, s: Scores) -> dict[str, Tensor]:
        """Return the counts of classes or labels, with scores in few bins."""
        found = self.counting.measure(s, EXACT)
        if "hits" in found:
            found["each"] = torch.stack(itemgetter(*BY_CLASS)(found))
        if not self.counting.scored:
            return found
        p, there = probabilities(s)
        # of all, or of two classes the second
        shown = slice(p.shape[1] - self.counting.scored, None)
        return found | {"scores": in_bins(p[:, shown], there[:, shown], _edges())}

    def _of_places(self, s: Scores) -> dict[str, Tensor]:
        """Return the counts of places, as shares of a sample with at most `places` of them."""
        k = self.counting.outputs
        units = self.counting.task.units(s.y)
        assert units is not None
        share = units.double().clamp(max=self.places) / self.places
        right = (s.right.double() * share * GRID).round().sum() / GRID
        found = {"places": (share * GRID).round().sum() / GRID, "right": right}
        if self.counting.has("table"):
            found["table"] = torch.zeros(k, k + 1, dtype=torch.float64)
            # cut off, so that a sample's vector gets no longer
            for i in range(len(s)):
                own = confusion(s.at(torch.tensor([i]))).double() / self.places
                found["table"] += (own * GRID).floor() / GRID
        return found

    def split(self, told: Tensor) -> tuple[int, int, dict[str, Array]]:
        """Return how many silos told something of how many samples, and the numbers by name."""
        if told.dtype != torch.int64 or told.shape != (self.size,):
            raise UserError(f"counts of {tuple(told.shape)} do not fit: refused")
        first, *pieces = torch.split(told, [2, *(part.size for part in self.parts)])
        silos, samples = first.tolist()
        found = {}
        for part, numbers in zip(self.parts, pieces, strict=True):
            found[part.name] = (numbers.double() / GRID).view(part.shape).numpy()
        if not self.whole:
            samples = max(round(float(found["samples"])), 0)
        return silos, samples, found

    def vector(self, told: Tensor) -> Tensor:
        """Return likely counts, as `Counting` has them without noise."""
        return self._filled(*self.split(told))

    def figures(self, told: Tensor, wanted: Wanted | None = None) -> Figures:
        """Return what follows from likely counts.

        Noise is drawn again to see how far it moves each figure. Intervals are wider by that.
        """
        silos, samples, found = self.split(told)
        if not samples:
            return Figures(0, silos)
        likely = self._filled(silos, samples, found)
        whole = figures(self.counting.task, self.counting.told(likely), wanted)
        # how far bins are from scores is little next to noise
        whole = replace(whole, errors={})
        if wanted is None:
            return whole
        draw = np.random.default_rng(0)
        squares = defaultdict[str, list[float]](list)
        for _ in range(_REDRAWN):
            again = {}
            for part in self.parts:
                again[part.name] = found[part.name] + self._drawn(part, silos, draw)
            counts = self.counting.told(self._filled(silos, samples, again))
            for name, value in figures(self.counting.task, counts, wanted).values.items():
                if name in whole.values:
                    squares[name].append((value - whole.values[name]) ** 2)
        moved = {name: math.sqrt(sum(each) / len(each)) for name, each in squares.items()}
        limits = {one.name: (one.least, one.most) for one in self.counting.task.metrics}
        ends = {}
        for name, at in whole.intervals.items():
            if name in moved:
                ends[name] = _wider(whole.values[name], at, moved[name], limits.get(name, _ANY))
        thresholds = tuple(replace(one, intervals={}) for one in whole.thresholds)
        return replace(whole, intervals=ends, thresholds=thresholds, noise=moved)

    def _drawn(self, part: NoisyPart, silos: int, draw: np.random.Generator) -> Array:
        """Return noise as the sum of all silos has it."""
        deviation = self.deviation(part) * math.sqrt(silos) / GRID
        if not part.tree:
            return np.asarray(draw.normal(0, deviation, part.shape))
        nodes = draw.normal(0, deviation, (*part.shape[:-1], len(_tree(_BINS))))
        return np.asarray(nodes @ _estimate(_BINS).T)

    def _filled(self, silos: int, samples: int, found: Mapping[str, Array]) -> Tensor:
        """Return counts that answers can have and are near to noisy numbers."""
        n = float(samples)
        likely: dict[str, Any] = {"reports": silos, "samples": samples}
        loss = float(np.clip(found["loss"], -MOST_LOSS * n, MOST_LOSS * n))
        likely |= {"loss": fixed(torch.tensor(loss)), "far": silos * (loss > _FAR * n)}
        match self.counting.task:
            case Classification():
                likely["right"] = np.clip(found["right"], 0, n)
                if "table" in found:
                    likely["table"] = _rounded(_nearest(found["table"], n))
                else:
                    likely |= zip(
                        BY_CLASS, map(_rounded, np.maximum(found["each"], 0)), strict=True
                    )
                    most = np.minimum(likely["labels"], likely["answers"])
                    likely["hits"] = np.minimum(likely["hits"], most)
            case MultiLabel():
                tables = [_rounded(_nearest(one, n)) for one in found["tables"]]
                likely["tables"] = np.stack(tables)
            case Regression():
                likely |= _of_normal({name: found[name] / max(n, 1.0) for name in POWERS}, n)
            case Survival():
                likely |= _of_pairs(float(found["ordered"]), float(found["comparable"]), n)
            case _:
                places = float(np.clip(found["places"], 0, n)) * self.places
                likely["places"] = places
                likely["right"] = np.clip(found["right"] * self.places, 0, places)
                if "table" in found:
                    likely["table"] = _rounded(_nearest(found["table"] * self.places, places))
        likely |= self._likely_scores(found, n)
        whole = {}
        for part in self.counting.layout:
            # what silos do not tell with noise is 0
            numbers = likely.get(part.name, torch.zeros(part.shape))
            whole[part.name] = torch.as_tensor(numbers, dtype=torch.float64).round()
        return self.counting.joined(whole)

    def _likely_scores(self, found: Mapping[str, Array], n: float) -> dict[str, Any]:
        """Return counts of scores that are near to noisy ones; none without scores."""
        likely: dict[str, Any] = {}
        if "scores" in found:
            rows = _monotone(found["scores"], n)
            likely["scores"] = self._spread(rows)
            likely["groups"] = _by_confidence(rows)
        if "groups" in found:
            told = _rounded(_nearest(found["groups"][0], n))
            likely["groups"] = np.stack([told, np.clip(np.round(found["groups"][1]), 0, told)])
        if "groups" in likely:
            middles = (np.arange(GROUPS) + 0.5) / GROUPS
            likely["confidence"] = fixed(torch.from_numpy(likely["groups"][0] * middles))
        return likely

    def _spread(self, rows: Array) -> Array:
        """Return counts by few bins as counts by the bins of `Counting`."""
        inner = self.counting.edges
        at = binned(torch.from_numpy(_middles()), inner).numpy()
        fine = np.zeros((*rows.shape[:-1], len(inner) + 1))
        for place, column in zip(at, np.moveaxis(rows, -1, 0), strict=True):
            fine[..., place] += column
        return fine


def _of_numbers(s: Scores, task: Regression) -> dict[str, Tensor]:
    """Return sums of powers of errors and targets, in standard deviations and cut off."""
    errors, y = standardised(s, task)
    errors = errors.nan_to_num(_REACH).clamp(-_REACH, _REACH)
    y = y.clamp(-_REACH, _REACH)
    values = torch.stack([errors.abs(), errors.square(), y, y.square()])
    sums = ((values * GRID).round() / GRID).sum(1)
    return dict(zip(POWERS, sums, strict=True))


def _edges() -> Tensor:
    """Return the inner boundaries of the bins of scores, as logits."""
    half = _BINS // 2
    return torch.arange(1 - half, half, dtype=torch.float64) / _UNIT


def _middles() -> Array:
    """Return a probability within each bin."""
    at = torch.arange(_BINS, dtype=torch.float64) + 0.5 - _BINS / 2
    return np.asarray(torch.sigmoid(at / _UNIT).numpy())


def _by_confidence(rows: Array) -> Array:
    """Return samples and right answers by groups of the confidence, (2, groups), from bins of scores
    without and with a label (..., 2, bins).
    """
    p = _middles()
    yes = _middles() >= 0.5
    group = np.clip(np.ceil(np.maximum(p, 1 - p) * GROUPS), 1, GROUPS).astype(int) - 1
    low, high = rows.reshape(-1, 2, _BINS).sum(0)
    samples = np.bincount(group, low + high, GROUPS)
    right = np.bincount(group, np.where(yes, high, low), GROUPS)
    return np.stack([samples, right])


@lru_cache
def _tree(bins: int) -> Array:
    """Return which of `bins` bins are below each node of a binary tree, (nodes, bins)."""
    levels = []
    for level in range(bins.bit_length()):
        nodes = np.eye(bins >> level)
        levels.append(np.repeat(nodes, 1 << level, axis=1))
    return np.concatenate(levels[::-1])


@lru_cache
def _estimate(bins: int) -> Array:
    """Return the matrix that gives the best estimate of bins from noisy nodes (least squares)."""
    return np.asarray(np.linalg.pinv(_tree(bins)))


def _nearest(found: Array, total: float) -> Array:
    """Return the nearest numbers that are not negative and add up to a total."""
    if total <= 0:
        return np.zeros_like(found)
    ordered = np.sort(found, axis=None)[::-1]
    over = (ordered.cumsum() - total) / np.arange(1, ordered.size + 1)
    last = int(np.nonzero(ordered > over)[0][-1])
    return np.asarray(np.maximum(found - over[last], 0))


def _rounded(numbers: Array) -> Array:
    """Return whole numbers with the same sum, if that is whole."""
    ends = np.round(numbers.cumsum())
    return np.asarray(np.diff(ends, prepend=0.0).reshape(numbers.shape))


def _monotone(found: Array, n: float) -> Array:
    """Return whole numbers that are not negative, of rows (..., 2, bins) that add up to n together.

    Their running sums are the nearest ones that never fall. (Nearest counts would move all areas under
    curves towards 1/2, because noise is spread over all bins and scores are not.)
    """
    # takes a second, and few need it
    from sklearn.isotonic import isotonic_regression

    sums = found.sum(-1)
    share = np.clip((sums[..., 1] + n - sums[..., 0]) / 2, 0, n)
    totals = np.round(np.stack([n - share, share], -1))[..., None]
    found = found + (totals - sums[..., None]) / found.shape[-1]
    nearest = np.apply_along_axis(isotonic_regression, -1, found.cumsum(-1))
    curve = np.clip(np.round(nearest), 0, totals)
    curve[..., -1:] = totals
    return np.asarray(np.diff(curve, prepend=0.0))


def _of_normal(mean: Mapping[str, Array], n: float) -> dict[str, Any]:
    """Return sums of powers, from noisy means of errors e and targets y and of their squares.

    Higher powers, for intervals, are as if both were normal and did not depend on each other.
    """
    squared = np.maximum(mean["squared"], 1e-6)
    target = mean["target"]
    absolute = np.clip(mean["absolute"], 0, np.sqrt(squared))
    spread = np.maximum(mean["target_squared"] - target**2, 1e-6)
    squares = target**2 + spread
    y3 = target**3 + 3 * target * spread
    y4 = target**4 + 6 * target**2 * spread + 3 * spread**2
    moments = np.stack([3 * squared**2, target * squared, squares * squared, y3, y4], 1)
    sums = {"absolute": absolute, "squared": squared, "target": target}
    sums |= {"target_squared": squares, "moments": moments}
    return {name: fixed(torch.from_numpy(values * n)) for name, values in sums.items()}


def _of_pairs(ordered: float, comparable: float, n: float) -> dict[str, Any]:
    """Return pairs, from noisy numbers by sample; for the interval, those of n/2 samples each of which
    is in one pair, which has at least the variance.

    Wassily Hoeffding: A class of statistics with asymptotically normal distribution. Annals of
    Mathematical Statistics 19, 1948.
    """
    pairs_ = max(comparable * n, n, 1.0)
    value = min(max(ordered * n / 2 / pairs_, 0.0), 1.0)
    # Σ c², if all samples are in equally many pairs
    alike = (2 * pairs_) ** 2 / max(n, 1.0)
    spread = pairs_**2 * value * (1 - value) * 2 / max(n, 1.0)
    return {
        "ordered": 2 * value * pairs_,
        "comparable": pairs_,
        "squares": [4 * (value**2 * alike + spread), 2 * value * alike, alike],
    }


def _wider(value: float, ends: Interval, moved: float, limits: Interval) -> Interval:
    """Return an interval of a figure that noise moves by a standard deviation `moved`, inside its
    limits.
    """
    low = math.hypot(ends[0] - value, Z * moved)
    high = math.hypot(ends[1] - value, Z * moved)
    return max(value - low, limits[0]), min(value + high, limits[1])
