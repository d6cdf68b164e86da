"""Intervals of ranks, calibration, thresholds and net benefit of two classes, from scores or bins
of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan, sqrt
from typing import Annotated, Any

import numpy as np

from ekiden.core.base.checks import Checked, Range
from ekiden.core.tasks.ranked import Floats, Ranked, below

Interval = tuple[float, float]
Z = 1.959963984540054  # of the normal distribution, for 95 %
# samples of a kind below which DeLong's variance is too small
_FEW = 10
# of a logit: otherwise one sample that is confidently wrong decides a slope
_FARTHEST = 16.5
# slope of a recalibration; with a larger one the scores separate the classes
_STEEPEST = 100.0
# of Newton's method
_LAPS = 50
# points of a calibration curve
_TENTHS = 10
# thresholds of a decision curve
_DECISIONS = (0.01, 0.02, *(step / 20 for step in range(1, 20)))


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
class Decision:
    """The net benefit of acting on a threshold of the second class's probability, TP/n - FP/n ·
    t/(1 - t).

    Andrew Vickers, Elena Elkin: Decision curve analysis. Medical Decision Making 26, 2006.
    """

    threshold: float  # t
    model: float  # of acting on samples with this probability or more
    all: float  # of acting on all samples; acting on none has 0


@dataclass(frozen=True)
class Wanted(Checked):
    """Which thresholds are shown, in addition to 0.5 and Youden's."""

    threshold: Annotated[float, Range(least=0, most=1)] | None = None  # one that was chosen before
    sensitivity: Annotated[float, Range(least=0, most=1)] = (
        0.95  # the least that the highest threshold must have
    )


def recalibrated(ranked: Ranked, *, shift: bool) -> tuple[float, float] | None:
    """Return slope and intercept of the logistic regression of the label on the logit of the score.

    John Platt: Probabilistic outputs for support vector machines. 1999. Chuan Guo et al.: On
    calibration of modern neural networks. ICML 2017. https://arxiv.org/abs/1706.04599

    Args:
        ranked: samples of two classes by their scores.
        shift: whether there is an intercept; otherwise it is 0.

    Returns:
        None if there is no such line: the scores separate the classes, or higher scores mean the
        other class.
    """
    logits = _logits(ranked)
    columns = [logits]
    if shift:
        columns.append(np.ones_like(logits))
    found = _logistic(ranked, np.stack(columns))
    if found is None or found[0][0] <= 0:
        return None
    return float(found[0][0]), float(found[0][1]) if shift else 0.0


def calibration(ranked: Ranked) -> dict[str, tuple[float, Interval]]:
    """Return the calibration in the large, and its slope, with 95 % intervals (Wald).

    They are 0 and 1 if all is right. The slope is that of `recalibrated`; in the large it is the
    intercept if the slope is 1.

    David Cox: Two further applications of a model for binary regression. Biometrika 45, 1958.
    """
    logits = _logits(ranked)
    one = np.ones_like(logits)
    lines = {
        "calibration_in_the_large": _logistic(ranked, one[None], logits),
        "calibration_slope": _logistic(ranked, np.stack([logits, one])),
    }
    found = dict[str, tuple[float, Interval]]()
    for name, line in lines.items():
        if line is not None:
            value = float(line[0][0])
            reach = Z * sqrt(line[1][0, 0])
            found[name] = value, (value - reach, value + reach)
    return found


def _logits(ranked: Ranked) -> Floats:
    with np.errstate(divide="ignore"):
        logits = np.log(ranked.scores) - np.log1p(-ranked.scores)
    return np.asarray(np.clip(logits, -_FARTHEST, _FARTHEST))


def _logistic(ranked: Ranked, x: Floats, offset: Any = 0.0) -> tuple[Floats, Floats] | None:
    """Return coefficients of the label on columns x (C, m), and their covariance; None without."""
    total = ranked.low + ranked.high
    line = np.zeros(len(x))

    def likelihood(at: Floats) -> float:
        eta = at @ x + offset
        return float(ranked.high @ eta - total @ np.logaddexp(0, eta))

    for _ in range(_LAPS):
        p = np.exp(-np.logaddexp(0, -(line @ x + offset)))
        hessian = (x * (total * p * (1 - p))) @ x.T
        if np.linalg.cond(hessian) > 1 / np.finfo(float).eps:
            return None
        step = np.linalg.solve(hessian, x @ (ranked.high - total * p))
        while likelihood(line + step) < likelihood(line) - 1e-9 * total.sum():
            step /= 2
        line = line + step
        if not np.abs(line).max() < _STEEPEST:
            return None
        if np.abs(step).max() < 1e-10:
            return line, np.linalg.inv(hessian)
    return None


def area_error(ranked: Ranked) -> float:
    """Return DeLong's standard error of the area; see `delong`."""
    area, _ = ranked.auroc()
    negatives = ranked.low.sum()
    positives = ranked.high.sum()
    of_high = (below(ranked.low) + ranked.low / 2) / negatives
    of_low = (positives - below(ranked.high) - ranked.high / 2) / positives
    squares = 0.0
    for counts, shares in ((ranked.high, of_high), (ranked.low, of_low)):
        total = counts.sum()
        squares += float(counts @ (shares - area) ** 2) / max(total - 1, 1) / total
    return sqrt(squares)


def rarer(ranked: Ranked) -> float:
    """Return the samples of the rarer kind."""
    return float(min(ranked.low.sum(), ranked.high.sum()))


def brier_error(ranked: Ranked) -> float:
    """Return the standard error of the mean of (p - y)²."""
    wrong = ranked.scores**2
    right = (1 - ranked.scores) ** 2
    total = float((ranked.low + ranked.high).sum())
    if not total:
        return nan
    mean = float(ranked.low @ wrong + ranked.high @ right) / total
    squares = ranked.low @ (wrong - mean) ** 2 + ranked.high @ (right - mean) ** 2
    return sqrt(float(squares)) / total


def delong(ranked: Ranked) -> Interval:
    """Return DeLong's interval of the area, on the logit scale.

    Of few samples its variance is too small, and 0 if all pairs are in order. So with fewer than
    10 of the rarer kind, it is at least as wide as Wilson's interval of as large a share of these.

    Elizabeth DeLong, David DeLong, Daniel Clarke-Pearson: Comparing the areas under two or more
    correlated receiver operating characteristic curves. Biometrics 44, 1988.
    """
    area, _ = ranked.auroc()
    error = area_error(ranked)
    rare = rarer(ranked)
    share = wilson(area * rare, rare)
    if not 0 < area < 1 or error <= 0:
        return share
    middle = np.log(area / (1 - area))
    spread = Z * error / (area * (1 - area))
    low = float(1 / (1 + np.exp(spread - middle)))
    high = float(1 / (1 + np.exp(-spread - middle)))
    if rare < _FEW:
        return min(low, share[0]), max(high, share[1])
    return low, high


def thresholds(ranked: Ranked, wanted: Wanted) -> tuple[Threshold, ...]:
    """Return 0.5, Youden's threshold, that of a sensitivity, and a chosen one."""
    wrong = _from(ranked.low)
    hits = _from(ranked.high)
    sensitivity = hits / hits[0]
    specificity = 1 - wrong / wrong[0]
    # rounding in the option
    enough = np.nonzero(sensitivity >= wanted.sensitivity - 1e-12)[0]
    rules = {
        "0.5": _place(ranked, 0.5),
        "Youden": int((sensitivity + specificity).argmax()),
        f"sensitivity {wanted.sensitivity:g}": int(enough[-1]),
    }
    if wanted.threshold is not None:
        rules["chosen"] = _place(ranked, wanted.threshold)
    # of bins, only their boundaries are known
    given: dict[str, float | None] = {}
    if ranked.exact:
        given = {"0.5": 0.5, "chosen": wanted.threshold}
    positives = float(hits[0])
    negatives = float(wrong[0])
    found = []
    for rule, place in rules.items():
        at = given.get(rule)
        if at is None:
            at = float(ranked.bounds[place])
        true = float(hits[place])
        false = float(wrong[place])
        right = negatives - false
        of_called = _share(true, false)
        of_others = _share(right, positives - true)
        intervals = {
            "sensitivity": wilson(true, positives),
            "specificity": wilson(right, negatives),
        }
        shares = (true / positives, 1 - false / negatives, of_called, of_others)
        found.append(Threshold(rule, at, *shares, intervals))
    return tuple(found)


def _share(right: float, wrong: float) -> float | None:
    """Return the share of right ones; None if there are none at all."""
    if not right + wrong:
        return None
    return right / (right + wrong)


def decisions(ranked: Ranked) -> tuple[Decision, ...]:
    """Return the net benefit at thresholds from 1 to 95 %."""
    wrong = _from(ranked.low)
    hits = _from(ranked.high)
    total = hits[0] + wrong[0]
    found = []
    for threshold in _DECISIONS:
        odds = threshold / (1 - threshold)
        net = (hits - wrong * odds) / total
        of_model = float(net[_place(ranked, threshold)])
        found.append(Decision(threshold, of_model, float(net[0])))
    return tuple(found)


def _from(counts: Floats) -> Floats:
    """Return how many have this score or a higher one, (m + 1,); at the end, 0."""
    return np.append(counts[::-1].cumsum()[::-1], 0.0)


def _place(ranked: Ranked, threshold: float) -> int:
    """Return from where on samples are called positive; of bins, from the boundary next to it."""
    if ranked.exact:
        return int(np.searchsorted(ranked.scores, threshold))
    return int(np.abs(ranked.bounds - threshold).argmin())


def curve(ranked: Ranked) -> tuple[tuple[int, float, float], ...]:
    """Return samples, mean score and share of the label by tenths of the samples, by score."""
    totals = ranked.low + ranked.high
    middle = totals.cumsum() - totals / 2
    group = np.minimum(middle / totals.sum() * _TENTHS, _TENTHS - 1).astype(int)
    found = []
    for tenth in range(_TENTHS):
        inside = group == tenth
        if samples := totals[inside].sum():
            score = float((totals * ranked.scores)[inside].sum() / samples)
            found.append((int(samples), score, float(ranked.high[inside].sum() / samples)))
    return tuple(found)


def wilson(hits: float, samples: float) -> Interval:
    """Return the 95 % score interval of a share.

    Edwin Wilson: Probable inference, the law of succession, and statistical inference. JASA 22,
    1927.
    """
    share = hits / samples
    z = Z**2 / samples
    variance = share * (1 - share) / samples + z / (4 * samples)
    half = Z * sqrt(max(variance, 0.0))
    low = (share + z / 2 - half) / (1 + z)
    high = (share + z / 2 + half) / (1 + z)
    return max(float(low), 0.0), min(float(high), 1.0)
