"""The figures of a study, from what was counted: values, intervals, and how far binned scores can
be off.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import exp, inf, isnan, nan, sqrt
from typing import Any

import numpy as np
from torch import Tensor

from ekiden.clinic.counting import FIXED, GROUPS, Counting, OfClasses, OfLabels, OfNumbers, OfTimes
from ekiden.clinic.ranked import (
    DRAWS,
    Interval,
    Ranked,
    Threshold,
    Wanted,
    Z,
    bounds,
    middles,
    percentiles,
    wilson,
)

RECALIBRATIONS = ("platt", "temperature")


@dataclass(frozen=True)
class Foretold:
    """Samples with about the same predicted survival at a time, or all."""

    samples: int  # how many there are
    predicted: float  # mean of the predicted survival
    observed: float  # share without the event, if all had been followed so long; see `OfTimes`
    interval: Interval  # of this share, 95 % (Wilson), as if weights were known


@dataclass(frozen=True)
class AtTime:
    """How well the survival is predicted at a time."""

    time: float
    brier: float  # mean of (predicted survival - o)², where o is 1 without the event and 0 with it
    interval: Interval  # of the Brier score, 95 %, as if weights were known
    guess: float  # Brier score of predicting the observed share for everybody
    whole: Foretold  # all samples
    groups: tuple[
        Foretold, ...
    ]  # those with a predicted survival below 10 %, below 20 %, ..., without empty ones


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
    # how far a value from binned scores can be from that of the scores themselves; absent if scores
    # in sparse bins were
    # moved
    errors: Mapping[str, float] = field(default_factory=dict)
    # whether some silos moved scores in sparse bins to their neighbours, so that these errors are
    # not known
    joined: bool = False
    each: tuple[Mapping[str, float], ...] = ()  # the metrics of each class, label or target
    prevalence: tuple[float, ...] = ()  # share of each class, or of samples with each label
    majority: float | None = (
        None  # accuracy of always giving the commonest label of the training samples
    )
    thresholds: tuple[Threshold, ...] = ()  # of two classes
    # of two classes, by tenths of the samples: samples, mean score, share of the second class
    calibration: tuple[tuple[int, float, float], ...] = ()
    # of two classes: slope a and intercept b of the logit a·z + b, with z that of the second
    # class's probability, which
    # has the greatest likelihood; `platt`, and `temperature` with b = 0 (T = 1/a). 1 and 0 if
    # probabilities are as they
    # should be.
    recalibration: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confusion: tuple[tuple[int, ...], ...] = ()  # samples (pixels) by label and answer
    survival: tuple[AtTime, ...] = ()  # at the task's times, where silos tell it

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values, as a file has them, without those that are empty."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in found.items() if value not in ([], {}, None, False)}


def figures(counting: Counting, numbers: Tensor, wanted: Wanted | None = None) -> Figures:
    """Return what follows from the sum of all counts; without `wanted`, no intervals, thresholds
    and calibration.
    """
    n = {name: values.double().numpy() for name, values in counting.split(numbers).items()}
    samples, silos = int(n["samples"]), int(n["reports"])
    if not samples:
        return Figures(0, silos)
    joined = int(n["exact"]) < samples and "scores" in n
    loss = nan if n["broken"] else float(n["loss"]) / FIXED
    match counting:
        case OfClasses():
            found = _of_classes(n, counting, wanted, joined=joined)
        case OfLabels():
            found = _of_labels(n, counting, wanted, joined=joined)
        case OfNumbers():
            found = _of_numbers(n, counting, wanted)
        case OfTimes():
            found = _of_times(n, counting, wanted)
        case _:
            found = _of_places(n, wanted)
    per = float(n["places"]) if "places" in n and int(n["exact"]) == samples else samples
    values = {"loss": loss / per if per else nan, **found.pop("values")}
    if counting.task.kind == "language-modelling":
        values["perplexity"] = exp(values["loss"]) if values["loss"] < 700 else float("inf")
    if joined:
        found["errors"] = {}
    known = {name: float(value) for name, value in values.items() if not isnan(value)}
    return Figures(samples, silos, known, joined=joined, **found)


def _of_classes(
    n: dict[str, Any], counting: OfClasses, wanted: Wanted | None, *, joined: bool
) -> dict[str, Any]:
    """Return the figures of one class for each sample, as arguments of `Figures`."""
    table, samples = n.get("table"), int(n["samples"])
    hits, labels, answers = (
        (n["hits"], n["labels"], n["answers"])
        if table is None
        else (table.diagonal(), table.sum(1), table[:, :-1].sum(0))
    )
    recall, f1 = _recall_f1(hits, labels, answers)
    each = {"accuracy": recall, "macro_f1": f1}
    values = {
        "accuracy": float(n["right"]) / samples,
        "balanced_accuracy": _mean(recall),
        "macro_f1": _mean(f1),
    }
    intervals: dict[str, Interval] = (
        {"accuracy": wilson(float(n["right"]), samples)} if wanted else {}
    )
    more: dict[str, Any] = {}
    if table is not None:
        intervals |= _of_table(table) if wanted and wanted.bootstrap else {}
        more["confusion"] = tuple(tuple(map(int, row)) for row in table[:, :-1])
    if "scores" in n:
        ranked = [
            Ranked(rows[0], rows[1], middles(counting.edges), bounds(counting.edges))
            for rows in n["scores"]
        ]
        two = counting.outputs == 2
        found, errors = _of_scores(ranked, n, samples=float(n["scores"][0].sum()), joined=joined)
        values |= found
        n.setdefault("top", _top_of_labels(n["scores"], counting.edges))
        each |= (
            {}
            if two
            else {
                "auroc": _all(ranked, "auroc"),
                "average_precision": _all(ranked, "average_precision"),
            }
        )
        values["calibration_error"], errors["calibration_error"] = _calibration(
            n, counting.edges, joined=joined
        )
        more["errors"] = {name: error for name, error in errors.items() if not isnan(error)}
        if wanted:
            intervals |= _of_means(ranked, values, summed=True)
        if two and ranked[0].both and wanted:
            intervals["auroc"] = ranked[0].delong()
            intervals |= ranked[0].bootstrap() if wanted.bootstrap else {}
            more["thresholds"] = ranked[0].thresholds(wanted)
            more["calibration"] = ranked[0].curve()
            for name, (value, ends) in ranked[0].calibration().items():
                values[name], intervals[name] = value, ends
            found_lines = {
                name: ranked[0].recalibrated(shift=name == "platt") for name in RECALIBRATIONS
            }
            more["recalibration"] = {name: line for name, line in found_lines.items() if line}
    counted = float(labels.sum())
    return {
        "values": values,
        "intervals": intervals,
        "each": _rows(each, counting.outputs),
        "prevalence": tuple((labels / counted).tolist()) if counted else (),
        "majority": _majority(n, labels),
        **more,
    }


def _of_labels(
    n: dict[str, Any], counting: OfLabels, wanted: Wanted | None, *, joined: bool
) -> dict[str, Any]:
    """Return the figures of several labels for each sample, as arguments of `Figures`."""
    tables = n["tables"]
    samples = tables.sum((1, 2))
    hits, there, answers = tables[:, 1, 1], tables[:, 1].sum(1), tables[:, :, 1].sum(1)
    right = tables[:, 0, 0] + hits
    with np.errstate(invalid="ignore", divide="ignore"):
        recalls = (hits / there + tables[:, 0, 0] / (samples - there)) / 2
        each = {
            "macro_f1": np.where(there + answers > 0, 2 * hits / (there + answers), nan),
            "accuracy": right / samples,
            "balanced_accuracy": recalls,
        }
        prevalence = there / samples
    total = float(samples.sum())
    values = {
        "macro_f1": _mean(each["macro_f1"]),
        "accuracy": float(right.sum()) / total if total else nan,
        "balanced_accuracy": _mean(recalls),
    }
    more: dict[str, Any] = {"intervals": {}}
    if wanted:
        with np.errstate(invalid="ignore", divide="ignore"):
            negatives, f1, shares = samples - there, each["macro_f1"], each["accuracy"]
            two, other = hits / there, tables[:, 0, 0] / negatives
            spreads = {
                "accuracy": np.sqrt(shares * (1 - shares) / samples),
                "balanced_accuracy": np.sqrt(
                    two * (1 - two) / there + other * (1 - other) / negatives
                )
                / 2,
                "macro_f1": np.sqrt(4 * hits * (1 - f1) ** 2 + (there + answers - 2 * hits) * f1**2)
                / (there + answers),
            }
        more["intervals"] = {
            name: _around(values[name], spread) for name, spread in spreads.items()
        }
    if "scores" in n:
        ranked = [
            Ranked(rows[0], rows[1], middles(counting.edges), bounds(counting.edges))
            for rows in n["scores"]
        ]
        found, errors = _of_scores(ranked, n, samples=total, joined=joined)
        more["intervals"] |= _of_means(ranked, found, summed=False) if wanted else {}
        n["top"] = _top_of_labels(n["scores"], counting.edges)
        values |= found
        values["calibration_error"], errors["calibration_error"] = _calibration(
            n, counting.edges, joined=joined
        )
        each |= {
            "auroc": _all(ranked, "auroc"),
            "average_precision": _all(ranked, "average_precision"),
        }
        more["errors"] = {name: error for name, error in errors.items() if not isnan(error)}
    guess = None
    if n["trained"] and total:
        common = n["train"] >= 0.5 * float(n["trained"])
        guess = float(np.where(common, there, samples - there).sum()) / total
    return {
        "values": values,
        "each": _rows(each, counting.outputs),
        "prevalence": tuple(np.nan_to_num(prevalence).tolist()),
        "majority": guess,
        **more,
    }


def _of_numbers(n: dict[str, Any], counting: OfNumbers, wanted: Wanted | None) -> dict[str, Any]:
    samples, std = float(n["samples"]), np.array(counting.regression.std)
    absolute, squared, target, squares = (
        n[name] / FIXED / samples for name in ("absolute", "squared", "target", "target_squared")
    )
    spread = squares - target**2
    with np.errstate(invalid="ignore", divide="ignore"):
        each = {
            "rmse": np.sqrt(squared) * std,
            "mae": absolute * std,
            "mse": squared * std**2,
            "r2": np.where(spread > 0, 1 - squared / spread, nan),
        }
        e4, e2y, e2y2, y3, y4 = n["moments"].T / FIXED / samples
        ratio = squared / spread
        both = e2y2 - 2 * target * e2y + target**2 * squared  # mean of e²(y - mean)²
        fourth = y4 - 4 * target * y3 + 6 * target**2 * squares - 3 * target**4
        of_squares = np.sqrt(np.maximum(e4 - squared**2, 0) / samples)
        errors = {
            "rmse": of_squares / (2 * np.sqrt(squared)) * std,
            "mae": np.sqrt(np.maximum(squared - absolute**2, 0) / samples) * std,
            "mse": of_squares * std**2,
            "r2": np.sqrt(np.maximum(e4 - 2 * ratio * both + ratio**2 * fourth, 0) / samples)
            / spread,
        }
    values = {name: _mean(found) for name, found in each.items()}
    limits = {"r2": (-inf, 1.0)}
    ends = {
        name: _around(values[name], found, *limits.get(name, (0.0, inf)))
        for name, found in errors.items()
    }
    return {
        "values": values,
        "intervals": {name: found for name, found in ends.items() if not isnan(found[0])}
        if wanted
        else {},
        "each": _rows(each, counting.outputs),
    }


def _of_times(n: dict[str, Any], counting: OfTimes, wanted: Wanted | None) -> dict[str, Any]:
    """Return the C-index over pairs inside silos, with the interval of the infinitesimal
    jackknife.
    """
    found: dict[str, Any] = {"values": {}}
    if "grouped" in n:
        every = zip(counting.survival.times, n["grouped"] / FIXED, n["errors"] / FIXED, strict=True)
        found["survival"] = tuple(_at_time(*one) for one in every if one[1][0].any())
    if not n["comparable"]:
        return found
    pairs, value = (
        float(n["comparable"]),
        min(float(n["ordered"]) / 2 / float(n["comparable"]), 1.0),
    )
    aa, ab, bb = n["squares"]
    found["values"] = {"c_index": value}
    if wanted:
        reach = Z * sqrt(max(float(aa / 4 - value * ab + value**2 * bb), 0.0)) / pairs
        found["intervals"] = {"c_index": (max(value - reach, 0.0), min(value + reach, 1.0))}
    return found


def _at_time(
    time: float, grouped: "np.ndarray[Any, Any]", errors: "np.ndarray[Any, Any]"
) -> AtTime:
    """Return what follows from the counts of one time, (6, SHARES) and (2,); see `OfTimes`."""
    whole, samples = _foretold(grouped.sum(1)), float(grouped[0].sum())
    brier = float(errors[0]) / samples
    error = sqrt(max(float(errors[1]) / samples - brier**2, 0.0) / samples)
    ends = max(brier - Z * error, 0.0), brier + Z * error
    groups = tuple(_foretold(one) for one in grouped.T if one[0] and one[2] + one[3] > 0)
    return AtTime(time, brier, ends, whole.observed * (1 - whole.observed), whole, groups)


def _foretold(sums: "np.ndarray[Any, Any]") -> Foretold:
    """Return what follows from the sums (6,) of a group."""
    samples, predicted, without, had, without2, had2 = map(float, sums)
    share = without / (without + had)
    spread = without2 * (1 - share) ** 2 + had2 * share**2  # of the weights' sums, as of a ratio
    alike = (
        share * (1 - share) * (without + had) ** 2 / spread
        if spread
        else (without + had) ** 2 / (without2 + had2)
    )
    return Foretold(round(samples), predicted / samples, share, wilson(share * alike, alike))


def _of_places(n: dict[str, Any], wanted: Wanted | None) -> dict[str, Any]:
    """Return the figures of places; intervals are over samples, as places of one sample are not
    independent.
    """
    told = bool(wanted) and n["exact"] == n["samples"]
    places = float(n["places"])
    values = {"accuracy": float(n["right"]) / places if places else nan}
    intervals = {
        "accuracy": _around(values["accuracy"], _of_ratio(n["right"], n["places"], n["squares"]))
    }
    if (table := n.get("table")) is None:
        return {"values": values, "intervals": intervals if told else {}}
    hits, labels, answers = table.diagonal(), table.sum(1), table[:, :-1].sum(0)
    recall, f1 = _recall_f1(hits, labels, answers)
    with np.errstate(invalid="ignore", divide="ignore"):
        iou = np.where(labels + answers > 0, hits / (labels + answers - hits), nan)
    values |= {"miou": _mean(iou), "dice": _mean(f1), "balanced_accuracy": _mean(recall)}
    half = _of_ratio(
        hits, labels + answers, n["overlaps"]
    )  # of hits / (labels + answers) = dice / 2
    intervals |= {
        "dice": _around(values["dice"], 2 * half),
        "miou": _around(values["miou"], half * (1 + iou) ** 2),  # iou = x / (1 - x)
    }
    return {
        "values": values,
        "intervals": intervals if told else {},
        "each": _rows({"miou": iou, "dice": f1, "accuracy": recall}, len(table)),
        "prevalence": tuple((labels / labels.sum()).tolist()) if labels.sum() else (),
        "majority": _majority(n, labels),
        "confusion": tuple(tuple(map(int, row)) for row in table[:, :-1]),
    }


def _of_ratio(above: Any, below: Any, squares: Any) -> Any:
    """Return the standard errors of ratios of sums, from Σ a², Σ ab, Σ b² over samples (..., 3).

    William Cochran: Sampling Techniques, 3rd edition, 1977, equation 6.13.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = above / below
        aa, ab, bb = np.moveaxis(squares, -1, 0)
        return np.sqrt(np.maximum(aa - 2 * ratio * ab + ratio**2 * bb, 0)) / below


def _around(value: float, errors: Any, least: float = 0.0, most: float = 1.0) -> Interval:
    """Return a 95 % interval of the mean of some figures with these standard errors, between two
    limits.

    The mean's error is at most the mean of the errors, however the figures depend on each other; of
    one figure it is that. So intervals of means are rather too wide.
    """
    reach = Z * _mean(errors)
    return max(value - reach, least), min(value + reach, most)


def _of_means(
    ranked: "list[Ranked]", values: Mapping[str, float], *, summed: bool
) -> dict[str, Interval]:
    """Return intervals of AUROC and Brier score of some classes or labels; `summed`: the score is a
    sum over them.
    """
    known = [one for one in ranked if one.both]
    if not known:
        return {}
    areas = _around(values["auroc"], [one.area_error() for one in known])
    errors = [one.brier_error() for one in ranked]
    return {
        "auroc": areas,
        "brier": _around(values["brier"], sum(errors) if summed else errors, 0.0, inf),
    }


def _of_scores(
    ranked: "list[Ranked]", n: dict[str, Any], *, samples: float, joined: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what follows from the scores of some classes, and how far each can be off."""
    areas, precisions = [one.auroc() for one in ranked], [one.average_precision() for one in ranked]
    if joined:
        squares = [one.brier() for one in ranked]
        brier = sum(value for value, _ in squares), sum(error for _, error in squares)
    else:
        brier = float(n["brier"]) / FIXED, 0.0
    found = {
        "auroc": (_mean([v for v, _ in areas]), _mean([e for _, e in areas])),
        "average_precision": (_mean([v for v, _ in precisions]), _mean([e for _, e in precisions])),
        "brier": (brier[0] / samples, brier[1] / samples) if samples else (nan, nan),
    }
    return {name: value for name, (value, _) in found.items()}, {
        name: error for name, (_, error) in found.items()
    }


def _calibration(n: dict[str, Any], inner: Tensor, *, joined: bool) -> tuple[float, float]:
    """Return Σ (n_b/n) |accuracy - confidence| over groups of equal width, and how far it can be
    off.
    """
    wrong, right = n["top"]
    total = float((wrong + right).sum())
    if not total:
        return nan, nan
    centres = middles(inner)
    groups = np.clip(np.ceil(centres * GROUPS).astype(int), 1, GROUPS) - 1
    rights = np.bincount(groups, right, GROUPS)
    sums = (
        np.bincount(groups, (wrong + right) * centres, GROUPS)
        if joined
        else n["confidence"] / FIXED
    )
    return float(np.abs(rights - sums).sum()) / total, 0.0


def _top_of_labels(scores: "np.ndarray[Any, Any]", inner: Tensor) -> "np.ndarray[Any, Any]":
    """Return wrong and right answers by bins of max(p, 1 - p), of all labels together, (2,
    bins).
    """
    low, high = scores.sum(0)
    centres = middles(inner)
    yes = centres >= 0.5
    mirrored = np.searchsorted(bounds(inner)[1:-1], 1 - centres, side="right")
    places = np.where(yes, np.arange(len(centres)), mirrored)
    right, wrong = np.where(yes, high, low), np.where(yes, low, high)
    return np.stack([np.bincount(places, row, len(centres)) for row in (wrong, right)])


def _of_table(table: "np.ndarray[Any, Any]") -> dict[str, Interval]:
    """Return percentile intervals of what follows from a confusion matrix, from samples drawn again
    from it.
    """
    total = int(table.sum())
    if not total:
        return {}
    found: list[tuple[Any, Any]] = []
    draw, most = (
        np.random.default_rng(0),
        max(1, 1_000_000 // table.size),
    )  # at once: of many classes only some
    for start in range(0, DRAWS, most):
        again = draw.multinomial(
            total, table.ravel() / total, size=min(most, DRAWS - start)
        ).astype(float)
        rows = again.reshape(-1, *table.shape)
        each = _recall_f1(rows.diagonal(axis1=1, axis2=2), rows.sum(2), rows[:, :, :-1].sum(1))
        found.append(tuple(np.nanmean(values, axis=1) for values in each))
    recall, f1 = (np.concatenate(values) for values in zip(*found, strict=True))
    return {"balanced_accuracy": percentiles(recall), "macro_f1": percentiles(f1)}


def _recall_f1(hits: Any, labels: Any, answers: Any) -> tuple[Any, Any]:
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(labels > 0, hits / labels, nan)
        return recall, np.where(labels + answers > 0, 2 * hits / (labels + answers), nan)


def _majority(n: dict[str, Any], labels: "np.ndarray[Any, Any]") -> float | None:
    if not n["trained"] or not len(n["train"]) or not labels.sum():
        return None
    return float(labels[n["train"].argmax()] / (n["places"] if "places" in n else n["samples"]))


def _all(ranked: "list[Ranked]", name: str) -> "np.ndarray[Any, Any]":
    return np.array([getattr(one, name)()[0] for one in ranked])


def _rows(each: Mapping[str, Any], outputs: int) -> tuple[Mapping[str, float], ...]:
    """Return the metrics of each class, without those that are not defined."""
    return tuple(
        {name: float(values[k]) for name, values in each.items() if not isnan(values[k])}
        for k in range(outputs)
    )


def _mean(values: Any) -> float:
    """Return the mean of the values that are defined."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else nan
