"""The metrics of each task. Each follows from what was counted, of available samples or by
silos.
"""

from collections.abc import Callable
from functools import partial
from math import exp, inf, nan
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ekiden.core.tasks.base import IGNORED, Metric
from ekiden.core.tasks.counts import ClassCounts, Counts, LabelCounts, NumberSums, PairCounts
from ekiden.core.tasks.ranked import Floats


def share_right(answers: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers among the labels of each sample that count, (n)."""
    answers = F.pad(answers, (0, y.shape[-1] - answers.shape[-1]), value=-1)
    counts = (y != IGNORED).flatten(1)
    right = (answers == y).flatten(1) & counts
    return right.sum(1).float() / counts.sum(1).clamp(min=1)


def divergence(outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean over rows of T² KL(teacher ‖ outputs) of softened classes (b, K)."""
    wanted = F.log_softmax(teacher / temperature, dim=1)
    found = F.log_softmax(outputs / temperature, dim=1)
    return temperature**2 * F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def ratio(above: Floats | float, below: Floats | float) -> Floats:
    """Return above / below, NaN where that is not defined."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, np.divide(above, below), nan)


def accuracy(c: ClassCounts) -> float:
    """Return the share of right answers."""
    return c.accuracy


def recall(c: ClassCounts) -> Floats:
    """Return the share of the samples of each class that are answered right."""
    return ratio(c.hits, c.labels)


def f1(c: ClassCounts) -> Floats:
    """Return the harmonic mean of precision and recall of each class; of pixels, the Dice
    coefficient.
    """
    return ratio(2 * c.hits, c.labels + c.answers)


def iou(c: ClassCounts) -> Floats:
    """Return the intersection over union of each class."""
    return ratio(c.hits, c.labels + c.answers - c.hits)


def auroc(c: ClassCounts) -> Floats:
    """Return the area under the ROC curve of each class or label against the others."""
    return np.array([one.auroc()[0] for one in c.ranked])


def precision(c: ClassCounts) -> Floats:
    """Return the average precision of each class or label."""
    return np.array([one.average_precision()[0] for one in c.ranked])


def precision_of_second(c: ClassCounts) -> float:
    """Return the average precision of the second of two classes; the mean over more classes."""
    each = precision(c)
    if len(each) == 2:
        return float(each[1])
    return mean(each)


def calibration_error(c: ClassCounts) -> float:
    """Return Σ (n_b/n) |accuracy - confidence| over 15 groups of the largest probability.

    Mahdi Naeini et al.: Obtaining well calibrated probabilities using Bayesian binning. AAAI 2015.
    """
    if not c.confidence.size:
        return nan
    samples, right, confidences = c.confidence
    return float(ratio(np.abs(right - confidences).sum(), samples.sum()))


def brier(c: ClassCounts) -> float:
    """Return the mean of (p - y)²: of the second of two classes, summed over more classes, or over
    labels.
    """
    return c.brier


def label_accuracy(c: LabelCounts) -> Floats:
    """Return the share of right answers of each label."""
    others, right = c.without
    return ratio(c.hits + right, c.labels + others)


def label_recall(c: LabelCounts) -> Floats:
    """Return the mean of both recalls of each label."""
    others, right = c.without
    return (ratio(c.hits, c.labels) + ratio(right, others)) / 2


def rmse(c: NumberSums) -> Floats:
    """Return the root of the mean squared error of each target."""
    return np.sqrt(c.squared)


def mse(c: NumberSums) -> Floats:
    """Return the mean squared error of each target."""
    return c.squared


def mae(c: NumberSums) -> Floats:
    """Return the mean absolute error of each target."""
    return c.absolute


def r2(c: NumberSums) -> Floats:
    """Return the share of the variance of each target that is explained."""
    return np.asarray(1 - ratio(c.squared, c.spread))


def c_index(c: PairCounts) -> float:
    """Return the share of comparable pairs in order."""
    if c.comparable:
        return c.ordered / c.comparable
    return nan


def perplexity(c: Counts) -> float:
    """Return the exponential of the mean loss."""
    # above, float64 has no such number
    if c.loss < 700:
        return exp(c.loss)
    return inf


def mean(values: Any) -> float:
    """Return the mean of the values that are defined."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    if len(known):
        return float(known.mean())
    return nan


def mean_of(each: Callable[[Any], Floats], c: Counts) -> float:
    """Return the mean over classes, labels or targets."""
    return mean(each(c))


def averaged(name: str, each: Callable[[Any], Floats], **how: Any) -> Metric:
    """Return the metric that is a mean over classes, labels or targets, and has a value for each of
    them; `how` are fields of `Metric`.
    """
    # not a function of its own: a metric is sent to other processes
    return Metric(name, partial(mean_of, each), each=each, **how)


OF_CLASSES = (
    Metric("accuracy", accuracy, full=False, each=recall, divides=True),
    Metric("balanced_accuracy", partial(mean_of, recall), full=False),
    averaged("macro_f1", f1, full=False),
    averaged("auroc", auroc, divides=True),
    Metric("average_precision", precision_of_second, each=precision),
    Metric("calibration_error", calibration_error, higher=False, divides=True),
    Metric("brier", brier, higher=False, share=False, divides=True, most=inf),
)
OF_LABELS = (
    averaged("auroc", auroc, divides=True),
    averaged("average_precision", precision),
    averaged("macro_f1", f1),
    Metric("accuracy", accuracy, each=label_accuracy, divides=True),
    averaged("balanced_accuracy", label_recall),
    Metric("calibration_error", calibration_error, higher=False, divides=True),
    Metric("brier", brier, higher=False, share=False, divides=True, most=inf),
)
OF_NUMBERS = (
    averaged("rmse", rmse, higher=False, share=False, most=inf),
    averaged("mae", mae, higher=False, share=False, divides=True, most=inf),
    averaged("mse", mse, higher=False, share=False, most=inf),
    averaged("r2", r2, share=False, divides=True, least=-inf),
)
OF_TIMES = (Metric("c_index", c_index, divides=True),)
OF_PIXELS = (
    averaged("miou", iou, divides=True),
    averaged("dice", f1, divides=True),
    Metric("accuracy", accuracy, each=recall, divides=True),
    Metric("balanced_accuracy", partial(mean_of, recall)),
)
OF_TOKENS = (
    Metric("perplexity", perplexity, higher=False, share=False, most=inf),
    Metric("accuracy", accuracy, divides=True),
)
