"""Scores of one class in bins: areas, calibration, thresholds, and intervals of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan, sqrt
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base.checks import Checked, Range

Interval = tuple[float, float]
Z = 1.959963984540054  # of the normal distribution, for 95 %
DRAWS = 1000  # of the bootstrap
_FEW = 10  # samples of a kind below which DeLong's variance is too small
_STEEPEST = 100.0  # slope of a recalibration; with a larger one the scores separate the classes
_LAPS = 50  # of Newton's method
_POINTS = 8  # within a bin, at which the precision is taken
_TENTHS = 10  # points of a calibration curve


@dataclass(frozen=True)
class Threshold:
    """How well a threshold of the second class's probability tells the two classes apart."""

    rule: str  # how it was chosen
    threshold: float  # samples with this probability or more are called positive
    sensitivity: float  # share of the positive samples that are
    specificity: float  # share of the negative samples that are not
    predictive: float | None  # share of the samples called positive that are; None if there is none
    negative_predictive: float | None  # share of the samples called negative that are
    intervals: Mapping[str, Interval]  # of sensitivity and specificity, 95 % (Wilson)


@dataclass(frozen=True)
class Wanted(Checked):
    """Which thresholds are shown, in addition to 0.5 and Youden's."""

    threshold: Annotated[float, Range(least=0, most=1)] | None = None  # one that was chosen before
    sensitivity: Annotated[float, Range(least=0, most=1)] = (
        0.95  # the least that the highest threshold must have
    )
    bootstrap: bool = True  # whether intervals without a formula are computed, which takes longest


@dataclass(frozen=True)
class Ranked:
    """Samples without (`low`) and with a label (`high`) by bins of its score, ascending."""

    low: "np.ndarray[Any, Any]"  # (bins,) samples without the label
    high: "np.ndarray[Any, Any]"  # (bins,) samples with it
    middles: "np.ndarray[Any, Any]"  # (bins,) a probability within each bin
    bounds: "np.ndarray[Any, Any]"  # (bins + 1,) the probabilities between which the bins lie

    @property
    def both(self) -> bool:
        """Whether there are samples of both kinds."""
        return bool(self.low.sum()) and bool(self.high.sum())

    def auroc(self) -> tuple[float, float]:
        """Return the area under the ROC curve, where scores in one bin are equal, and how far it
        can be off.

        The area counts pairs of samples. Only pairs within a bin can be in another order than the
        bins say.
        """
        if not self.both:
            return nan, nan
        pairs = self.low.sum() * self.high.sum()
        within = float(self.low @ self.high) / 2
        return float(self.high @ _below(self.low) + within) / pairs, within / pairs

    def average_precision(self) -> tuple[float, float]:
        """Return the average precision, and how far it can be off.

        It is Σ over samples with the label, from the highest score on, of the precision down to
        this sample. Within a bin these samples are taken to lie evenly among the others.
        """
        if not self.high.sum():
            return nan, nan
        low, high = self.low[::-1], self.high[::-1]
        hits, wrong = high.cumsum() - high, low.cumsum() - low
        points = np.minimum(high, _POINTS)
        at = np.arange(_POINTS)[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            place = (
                at + 0.5
            ) / points * high + 0.5  # all samples of a bin that has up to 8, otherwise 8 among them
            precision = (hits + place) / (hits + place + wrong + place * low / (high + 1))
            found = high * np.where(at < points, precision, 0).sum(0) / points
            best = high * (hits + high) / (hits + high + wrong)
            worst = high * (hits + 1) / (hits + 1 + wrong + low)
        value, most, least = (
            float(np.nan_to_num(each).sum() / high.sum()) for each in (found, best, worst)
        )
        return value, max(most - value, value - least)

    def brier(self) -> tuple[float, float]:
        """Return Σ (p - y)² from the middles of the bins, and how far it can be off."""

        def error(p: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
            return np.asarray(self.low * p**2 + self.high * (1 - p) ** 2)

        found = error(self.middles)
        ends = np.abs(np.stack([error(self.bounds[:-1]), error(self.bounds[1:])]) - found)
        return float(found.sum()), float(ends.max(0).sum())

    def recalibrated(self, *, shift: bool) -> tuple[float, float] | None:
        """Return slope and intercept of the logistic regression of the label on the logit of the
        score, from counts.

        John Platt: Probabilistic outputs for support vector machines. 1999. Chuan Guo et al.: On
        calibration of modern neural networks. ICML 2017. https://arxiv.org/abs/1706.04599

        Args:
            shift: whether there is an intercept; otherwise it is 0.

        Returns:
            None if there is no such line: the scores separate the classes, or higher scores mean
                the other class.
        """
        found = self._logistic(
            np.stack([self._logits, np.ones_like(self.middles)])[: 2 if shift else 1]
        )
        if found is None or found[0][0] <= 0:
            return None
        return float(found[0][0]), float(found[0][1]) if shift else 0.0

    def calibration(self) -> dict[str, tuple[float, Interval]]:
        """Return the calibration in the large, and its slope, with 95 % intervals (Wald); 0 and 1
        if all is right.

        The slope is that of `recalibrated`. In the large: the intercept, if the slope is 1.

        David Cox: Two further applications of a model for binary regression. Biometrika 45, 1958.
        """
        one = np.ones_like(self.middles)
        large, slope = (
            self._logistic(one[None], self._logits),
            self._logistic(np.stack([self._logits, one])),
        )
        found = dict[str, tuple[float, Interval]]()
        for name, line in (("calibration_in_the_large", large), ("calibration_slope", slope)):
            if line is not None:
                value, reach = float(line[0][0]), Z * sqrt(line[1][0, 0])
                found[name] = value, (value - reach, value + reach)
        return found

    @property
    def _logits(self) -> "np.ndarray[Any, Any]":
        return np.asarray(np.log(self.middles) - np.log1p(-self.middles))

    def _logistic(
        self, x: "np.ndarray[Any, Any]", offset: Any = 0.0
    ) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None":
        """Return coefficients of the label on columns x (C, bins), and their covariance; None if
        there are none.
        """
        total, line = self.low + self.high, np.zeros(len(x))

        def likelihood(at: "np.ndarray[Any, Any]") -> float:
            eta = at @ x + offset
            return float(self.high @ eta - total @ np.logaddexp(0, eta))

        for _ in range(_LAPS):
            p = np.exp(-np.logaddexp(0, -(line @ x + offset)))
            hessian = (x * (total * p * (1 - p))) @ x.T
            if np.linalg.cond(hessian) > 1 / np.finfo(float).eps:
                return None
            step = np.linalg.solve(hessian, x @ (self.high - total * p))
            while likelihood(line + step) < likelihood(line) - 1e-9 * total.sum():
                step /= 2
            line = line + step
            if not np.abs(line).max() < _STEEPEST:
                return None
            if np.abs(step).max() < 1e-10:
                return line, np.linalg.inv(hessian)
        return None

    def area_error(self) -> float:
        """Return DeLong's standard error of the area; see `delong`."""
        area, _ = self.auroc()
        negatives, positives = self.low.sum(), self.high.sum()
        of_high = (_below(self.low) + self.low / 2) / negatives
        of_low = (positives - _below(self.high) - self.high / 2) / positives
        return sqrt(
            sum(
                float(weights @ (placed - area) ** 2) / max(total - 1, 1) / total
                for weights, placed, total in (
                    (self.high, of_high, positives),
                    (self.low, of_low, negatives),
                )
            )
        )

    def brier_error(self) -> float:
        """Return the standard error of the mean of (p - y)², from the middles of the bins."""
        total, wrong, right = (self.low + self.high).sum(), self.middles**2, (1 - self.middles) ** 2
        if not total:
            return nan
        mean = float(self.low @ wrong + self.high @ right) / total
        return sqrt(
            float(self.low @ (wrong - mean) ** 2 + self.high @ (right - mean) ** 2)
        ) / float(total)

    def delong(self) -> Interval:
        """Return DeLong's interval of the area, on the logit scale.

        Of few samples its variance is too small, and 0 if all pairs are in order. So with fewer
        than 10 of the rarer kind, it is at least as wide as Wilson's interval of as large a share
        of these.

        Elizabeth DeLong, David DeLong, Daniel Clarke-Pearson: Comparing the areas under two or more
        correlated receiver operating characteristic curves. Biometrics 44, 1988.
        """
        area, _ = self.auroc()
        negatives, positives = self.low.sum(), self.high.sum()
        error = self.area_error()
        rare = float(min(negatives, positives))
        share = wilson(area * rare, rare)
        if not 0 < area < 1 or error <= 0:
            return share
        middle, spread = np.log(area / (1 - area)), Z * error / (area * (1 - area))
        low, high = (float(1 / (1 + np.exp(-(middle + sign * spread)))) for sign in (-1, 1))
        return (low, high) if rare >= _FEW else (min(low, share[0]), max(high, share[1]))

    def bootstrap(self) -> dict[str, Interval]:
        """Return percentile intervals of what has no formula, from samples drawn again from the
        bins.
        """
        counts = np.stack([self.low, self.high])
        used = counts.sum(0) > 0
        rows = counts[:, used].ravel()
        draw = np.random.default_rng(0)
        found: dict[str, list[float]] = {"average_precision": []}
        places = np.concatenate([self.bounds[:-1][used], self.bounds[-1:]])
        for again in draw.multinomial(int(rows.sum()), rows / rows.sum(), size=DRAWS):
            low, high = again.reshape(2, -1).astype(float)
            one = Ranked(low, high, self.middles[used], places)
            found["average_precision"].append(one.average_precision()[0])
        return {name: percentiles(values) for name, values in found.items()}

    def thresholds(self, wanted: Wanted) -> tuple[Threshold, ...]:
        """Return 0.5, Youden's threshold, that of a sensitivity, and a chosen one."""
        above = np.stack([_above(self.low), _above(self.high)])  # at each boundary, from bin k on
        sensitivity, specificity = above[1] / self.high.sum(), 1 - above[0] / self.low.sum()
        places = {"0.5": int(np.abs(self.bounds - 0.5).argmin())}
        places["Youden"] = int((sensitivity + specificity).argmax())
        enough = np.nonzero(sensitivity >= wanted.sensitivity - 1e-12)[0]
        places[f"sensitivity {wanted.sensitivity:g}"] = int(enough[-1])
        if wanted.threshold is not None:
            places["chosen"] = int(np.abs(self.bounds - wanted.threshold).argmin())
        return tuple(self._threshold(rule, place, above) for rule, place in places.items())

    def _threshold(self, rule: str, place: int, above: "np.ndarray[Any, Any]") -> Threshold:
        wrong, hits = above[:, place]
        negatives, positives = self.low.sum(), self.high.sum()
        called, others = wrong + hits, negatives + positives - wrong - hits
        return Threshold(
            rule,
            float(self.bounds[place]),
            float(hits / positives),
            float(1 - wrong / negatives),
            float(hits / called) if called else None,
            float((negatives - wrong) / others) if others else None,
            {
                "sensitivity": wilson(hits, positives),
                "specificity": wilson(negatives - wrong, negatives),
            },
        )

    def curve(self) -> tuple[tuple[int, float, float], ...]:
        """Return samples, mean score and share of the label by tenths of the samples, in order of
        their scores.
        """
        totals = self.low + self.high
        middle = totals.cumsum() - totals / 2
        group = np.minimum(middle / totals.sum() * _TENTHS, _TENTHS - 1).astype(int)
        found = []
        for tenth in range(_TENTHS):
            inside = group == tenth
            if samples := totals[inside].sum():
                score = float((totals * self.middles)[inside].sum() / samples)
                found.append((int(samples), score, float(self.high[inside].sum() / samples)))
        return tuple(found)


def wilson(hits: float, samples: float) -> Interval:
    """Return the 95 % score interval of a share.

    Edwin Wilson: Probable inference, the law of succession, and statistical inference. JASA 22,
    1927.
    """
    share, z = hits / samples, Z**2 / samples
    middle, half = (
        share + z / 2,
        Z * sqrt(max(share * (1 - share) / samples + z / (4 * samples), 0.0)),
    )
    return max(float((middle - half) / (1 + z)), 0.0), min(float((middle + half) / (1 + z)), 1.0)


def bounds(inner: Tensor) -> "np.ndarray[Any, Any]":
    """Return the probabilities between which bins lie."""
    return np.concatenate([[0.0], torch.sigmoid(inner).numpy(), [1.0]])


def middles(inner: Tensor) -> "np.ndarray[Any, Any]":
    """Return a probability within each bin."""
    ends = torch.cat([inner[:1] - 1, inner, inner[-1:] + 1])
    return np.asarray(torch.sigmoid((ends[1:] + ends[:-1]) / 2).numpy())


def _below(counts: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return how many are in lower bins."""
    return np.asarray(counts.cumsum() - counts)


def _above(counts: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return how many are in this bin or above; at the end, 0."""
    return np.append(counts[::-1].cumsum()[::-1], 0.0)


def percentiles(values: Any) -> Interval:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)
