"""The figures of a study, from what was counted: values, intervals, and how far binned scores can
be off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan, sqrt
from typing import Any

import numpy as np

from ekiden.clinic import ranked as ranks
from ekiden.clinic.ranked import Decision, Interval, Threshold, Wanted, Z, wilson
from ekiden.core.base.checks import plain
from ekiden.core.tasks import Task
from ekiden.core.tasks.counts import (
    ClassCounts,
    Counts,
    LabelCounts,
    NumberSums,
    PairCounts,
    PlaceCounts,
)
from ekiden.core.tasks.measures import iou, label_accuracy, mean, ratio, recall
from ekiden.core.tasks.ranked import Floats, Ranked

RECALIBRATIONS = ("platt", "temperature")


@dataclass(frozen=True)
class CountedAnswers:
    """What was counted of a model's answers, and of the training samples."""

    counts: Counts
    silos: int = 1  # that told about their samples
    # whether the samples are available; otherwise scores are in bins, and pairs inside silos
    exact: bool = True
    train: Floats | None = None  # (K,) labels of the training samples; None if nobody told
    trained: int = 0  # training samples


@dataclass(frozen=True)
class Figures:
    """What follows from counts. Figures that are not defined are absent."""

    samples: int  # test samples that were counted
    silos: int  # silos that told about their samples
    # the metrics of the task, by their names; of two classes also slope and calibration in the
    # large
    values: Mapping[str, float] = field(default_factory=dict)
    # 95 % intervals of some of them, as if samples were drawn independently
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    # how far a value from binned scores can be from that of the scores themselves; absent if the
    # scores were available, or if counts have noise
    errors: Mapping[str, float] = field(default_factory=dict)
    # whether the samples were available. Otherwise scores are in bins, and times are compared
    # inside
    # silos.
    exact: bool = False
    each: tuple[Mapping[str, float], ...] = ()  # the metrics of each class, label or target
    prevalence: tuple[float, ...] = ()  # share of each class, or of samples with each label
    majority: float | None = (
        None  # accuracy of always giving the commonest label of the training samples
    )
    thresholds: tuple[Threshold, ...] = ()  # of two classes
    decisions: tuple[Decision, ...] = ()  # of two classes
    # of two classes, by tenths of the samples: samples, mean score, share of the second class
    calibration: tuple[tuple[int, float, float], ...] = ()
    # of two classes: slope a and intercept b of the logit a·z + b, with z that of the second
    # class's probability, which
    # has the greatest likelihood; `platt`, and `temperature` with b = 0 (T = 1/a). 1 and 0 if
    # probabilities are as they
    # should be.
    recalibration: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confusion: tuple[tuple[int, ...], ...] = ()  # samples (pixels) by label and answer
    # standard deviation of what the silos' noise adds to the values; intervals include it
    noise: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values, as a file has them, without those that are empty."""
        found = plain(self).items()
        return {name: value for name, value in found if value not in ([], {}, None, False)}


def figures(task: Task, told: CountedAnswers, wanted: Wanted | None = None) -> Figures:
    """Return what follows from counts; without `wanted`, no intervals, thresholds and
    calibration.
    """
    c = told.counts
    if not c.samples:
        return Figures(0, told.silos)
    values = {"loss": c.loss}
    each = {}
    for metric in task.metrics:
        values[metric.name] = metric.counted(c)
        if metric.each is not None:
            each[metric.name] = metric.each(c)
    found = Figures(
        c.samples,
        told.silos,
        _defined(values),
        errors=_errors(c),
        exact=told.exact,
        each=_rows(each),
        prevalence=_prevalence(c),
        majority=_majority(told),
        confusion=_confusion(c),
    )
    if wanted is None:
        return found
    ends = _intervals(c, values).items()
    known = {name: interval for name, interval in ends if not isnan(interval[0])}
    found = replace(found, intervals=known)
    if isinstance(c, ClassCounts) and c.second:
        return two_class_figures(found, c.second, wanted)
    return found


def two_class_figures(found: Figures, second: Ranked, wanted: Wanted) -> Figures:
    """Return figures with those that follow from the probability of the second of two classes."""
    values = dict(found.values)
    intervals = dict(found.intervals)
    for name, (value, ends) in ranks.calibration(second).items():
        values[name] = value
        intervals[name] = ends
    recalibration = {}
    for name in RECALIBRATIONS:
        line = ranks.recalibrated(second, shift=name == "platt")
        if line:
            recalibration[name] = line
    return replace(
        found,
        values=values,
        intervals=intervals,
        thresholds=ranks.thresholds(second, wanted),
        decisions=ranks.decisions(second),
        calibration=ranks.curve(second),
        recalibration=recalibration,
    )


def _defined(values: Mapping[str, float]) -> dict[str, float]:
    """Return values without those that are not defined."""
    return {name: float(value) for name, value in values.items() if not isnan(value)}


def _intervals(c: Counts, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return 95 % intervals."""
    match c:
        case LabelCounts():
            return label_intervals(c, values) | ranking_intervals(c, values)
        case PlaceCounts():
            return place_intervals(c, values)
        case ClassCounts():
            return class_intervals(c, values) | ranking_intervals(c, values)
        case NumberSums():
            return number_intervals(c, values)
        case PairCounts():
            return pair_intervals(c, values)
        case _:
            return {}


def class_intervals(c: ClassCounts, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return intervals of what follows from the answered classes; means as if classes were drawn by
    themselves.
    """
    known = c.labels > 0
    shares = recall(c)[known]
    # as estimated variances have it
    fewer = np.maximum(c.labels[known] - 1, 1)
    spread = sqrt(float((shares * (1 - shares) / fewer).sum())) / max(known.sum(), 1)
    rarest = nan
    if known.any():
        rarest = float(c.labels[known].min())
    return {
        "accuracy": wilson(values["accuracy"] * c.samples, c.samples),
        "balanced_accuracy": _around(values["balanced_accuracy"], spread, rarest),
        "macro_f1": _around(values["macro_f1"], _f1_errors(c), rarest),
    }


def _f1_errors(c: ClassCounts) -> Any:
    """Return the standard error of the F1 score of each class, twice that of a ratio."""
    total = c.labels + c.answers
    return 2 * _of_ratio(c.hits, total, np.stack([c.hits, 2 * c.hits, 2 * c.hits + total]))


def label_intervals(c: LabelCounts, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return intervals of what follows from the answered labels."""
    others, right = c.without
    samples = c.labels + others
    shares = label_accuracy(c)
    two = ratio(c.hits, c.labels)
    other = ratio(right, others)
    with np.errstate(invalid="ignore", divide="ignore"):
        both = np.sqrt(two * (1 - two) / c.labels + other * (1 - other) / others) / 2
    rarest = float(np.minimum(c.labels, others).min())
    return {
        "accuracy": _around(
            values["accuracy"], np.sqrt(ratio(shares * (1 - shares), samples)), c.samples
        ),
        "balanced_accuracy": _around(values["balanced_accuracy"], both, rarest),
        "macro_f1": _around(values["macro_f1"], _f1_errors(c), rarest),
    }


def ranking_intervals(c: ClassCounts, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return intervals of what follows from scores.

    The average precision is a mean of shares over samples with the label. So its interval is
    Wilson's of as large a share of these.

    Kendrick Boyd, Kevin Eng, David Page: Area under the precision-recall curve: point estimates and
    confidence intervals. ECML 2013.
    """
    known = [one for one in c.ranked if one.both]
    if not known:
        return {}
    errors = list(map(ranks.brier_error, c.ranked))
    if (two := c.second) is not None:
        positives = float(two.high.sum())
        return {
            "auroc": ranks.delong(two),
            "average_precision": wilson(values["average_precision"] * positives, positives),
            "brier": _around(values["brier"], errors[1], c.samples),
        }
    rarest = min(map(ranks.rarer, known))
    of_areas = list(map(ranks.area_error, known))
    most = 1.0
    # over classes it is a sum
    if not isinstance(c, LabelCounts):
        errors = [sum(errors)]
        most = 2.0
    return {
        "auroc": _around(values["auroc"], of_areas, rarest),
        "brier": _around(values["brier"], errors, c.samples, most=most),
    }


def number_intervals(c: NumberSums, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return intervals of errors of numbers; of numbers without any error there is none."""
    n = c.samples
    share = ratio(c.squared, c.spread)
    e4, both, d4 = c.fourth
    of_shares = e4 - 2 * share * both + share**2 * d4
    variances = np.stack([c.squared - c.absolute**2, e4 - c.squared**2, of_shares])
    absolute, squared, of_share = np.sqrt(np.maximum(variances, 0) / n)
    errors = {"rmse": ratio(squared, 2 * np.sqrt(c.squared)), "mae": absolute, "mse": squared}
    found = {name: _around(values[name], error, n, most=inf) for name, error in errors.items()}
    found["r2"] = _around(values["r2"], ratio(of_share, c.spread), n, -inf)
    return found


def pair_intervals(c: PairCounts, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return the interval of the infinitesimal jackknife."""
    if not c.comparable:
        return {}
    value = values["c_index"]
    aa, ab, bb = c.squares
    residuals = float(aa / 4 - value * ab + value**2 * bb)
    spread = sqrt(max(residuals, 0.0)) / c.comparable
    # samples that would be in as many pairs if all were in equally many
    alike = (2 * c.comparable) ** 2 / bb
    return {"c_index": _around(value, spread, float(alike))}


def place_intervals(c: PlaceCounts, values: Mapping[str, float]) -> dict[str, Interval]:
    """Return intervals over samples, as places of one sample are not independent."""
    if not c.squares.size:
        return {}
    right = _of_ratio(values["accuracy"] * c.places, c.places, c.squares)
    found = {"accuracy": _around(values["accuracy"], right, c.samples)}
    if c.hits.size:
        # of dice / 2
        half = _of_ratio(c.hits, c.labels + c.answers, c.overlaps)
        share = iou(c)
        found["dice"] = _around(values["dice"], 2 * half, c.samples)
        # x / (1 - x)
        found["miou"] = _around(values["miou"], half * (1 + share) ** 2, c.samples)
    return found


def _of_ratio(above: Any, below: Any, squares: Floats) -> Any:
    """Return the standard errors of ratios of sums, from Σ a², Σ ab, Σ b² over samples (3, ...).

    William Cochran: Sampling Techniques, 3rd edition, 1977, equation 6.13.
    """
    aa, ab, bb = squares
    share = ratio(above, below)
    # Σ (a - share·b)², which rounding can put below 0
    residuals = aa - 2 * share * ab + share**2 * bb
    return ratio(np.sqrt(np.maximum(residuals, 0)), below)


def _around(
    value: float, errors: Any, units: float, least: float = 0.0, most: float = 1.0
) -> Interval:
    """Return a 95 % interval of the mean of some figures with these standard errors, between two
    limits.

    The mean's error is at most the mean of the errors, however the figures depend on each other; of
    one figure it is that. So intervals of means are rather too wide. If all samples are alike, the
    error is 0, which says nothing about others: then it is Wilson's interval of as large a share of
    `units` samples, where there are two limits.
    """
    reach = Z * mean(errors)
    # below that it cannot matter
    if reach > 1e-6 or (reach > 0 and not most - least < inf):
        return max(value - reach, least), min(value + reach, most)
    if not units > 0 or not most - least < inf:
        return nan, nan
    low, high = wilson((value - least) / (most - least) * units, units)
    return least + low * (most - least), least + high * (most - least)


def _errors(c: Counts) -> dict[str, float]:
    """Return how far values from bins can be from those of the scores themselves."""
    if not isinstance(c, ClassCounts) or all(one.exact for one in c.ranked):
        return {}
    areas = []
    precisions = []
    for one in c.ranked:
        areas.append(one.auroc()[1])
        precisions.append(one.average_precision()[1])
    # of two classes, that of the second
    if c.second:
        precisions = precisions[1:]
    return _defined({"auroc": mean(areas), "average_precision": mean(precisions)})


def _prevalence(c: Counts) -> tuple[float, ...]:
    """Return the share of each class, or of samples with each label."""
    if isinstance(c, LabelCounts):
        return tuple(np.nan_to_num(ratio(c.labels, c.labels + c.without[0])).tolist())
    if not isinstance(c, ClassCounts) or not c.labels.sum():
        return ()
    return tuple((c.labels / c.labels.sum()).tolist())


def _majority(told: CountedAnswers) -> float | None:
    """Return the accuracy of always giving the commonest label of the training samples."""
    c = told.counts
    train = told.train
    if not isinstance(c, ClassCounts) or train is None or not len(train) or not c.labels.sum():
        return None
    if isinstance(c, LabelCounts):
        right = np.where(train >= 0.5 * told.trained, c.labels, c.without[0])
        return float(right.sum() / (c.labels + c.without[0]).sum())
    units: float = c.samples
    if isinstance(c, PlaceCounts):
        units = c.places
    return float(c.labels[train.argmax()] / units)


def _confusion(c: Counts) -> tuple[tuple[int, ...], ...]:
    if not isinstance(c, ClassCounts) or c.table is None:
        return ()
    return tuple(map(tuple, c.table[:, :-1].astype(int).tolist()))


def _rows(each: Mapping[str, Floats]) -> tuple[Mapping[str, float], ...]:
    """Return the metrics of each class, without those that are not defined."""
    known = {name: values.tolist() for name, values in each.items() if len(values)}
    rows = zip(*known.values(), strict=True)
    return tuple(_defined(dict(zip(known, row, strict=True))) for row in rows)
