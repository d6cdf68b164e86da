"""The metrics of each task. torchmetrics, which takes seconds to import, computes those of
probabilities.
"""

import warnings
from collections.abc import Callable
from math import exp, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.core.tasks.base import IGNORED, Metric, Scores, confusion, mean_right

_BINS = 15  # of the calibration error, as is usual
_ROWS = 1024  # samples that are compared with all at once


def classes(answers: Tensor) -> Tensor:
    """Return the answered classes (n,), from classes or probabilities."""
    return answers.argmax(1) if answers.ndim == 2 else answers


def share_right(answers: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers among the labels of each sample that count, (n,)."""
    answers = F.pad(answers, (0, y.shape[-1] - answers.shape[-1]), value=-1)
    counts = (y != IGNORED).flatten(1)
    right = (answers == y).flatten(1) & counts
    return right.sum(1).float() / counts.sum(1).clamp(min=1)


def divergence(outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean over rows of T² KL(teacher ‖ outputs) of softened classes (b, K)."""
    wanted, found = (F.log_softmax(each / temperature, dim=1) for each in (teacher, outputs))
    return temperature**2 * F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def _torchmetrics() -> Any:
    import torchmetrics.functional.classification as functional  # noqa: PLC0415  (seconds)

    return functional


def _mean(values: Tensor) -> float:
    """Return the mean of the values that are defined."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else nan


def _where(values: Tensor, defined: Tensor) -> Tensor:
    return torch.where(defined, values.double(), nan)


def _recall(s: Scores) -> Tensor:
    table = confusion(s).double()
    return _where(table.diagonal() / table.sum(1), table.sum(1) > 0)


def _f1(s: Scores) -> Tensor:
    table = confusion(s).double()
    total = table.sum(1) + table[:, : s.outputs].sum(0)
    return _where(2 * table.diagonal() / total, total > 0)


def _iou(s: Scores) -> Tensor:
    table = confusion(s).double()
    total = table.sum(1) + table[:, : s.outputs].sum(0) - table.diagonal()
    return _where(table.diagonal() / total, total > 0)


def _probabilities(s: Scores) -> Tensor:
    """Return the probabilities of the classes (n, K); a method may have more outputs than
    classes.
    """
    return s.answers[:, : s.outputs]


def _both(s: Scores) -> Tensor:
    """Return whether some samples are of a class and some are not, (K,)."""
    counts = torch.bincount(s.y, minlength=s.outputs)
    return (counts > 0) & (counts < len(s.y))


def _auroc(s: Scores) -> Tensor:
    found = _quiet(
        _torchmetrics().multiclass_auroc, _probabilities(s), s.y, s.outputs, average=None
    )
    return _where(found, _both(s))


def _precision(s: Scores) -> Tensor:
    found = _quiet(
        _torchmetrics().multiclass_average_precision,
        _probabilities(s),
        s.y,
        s.outputs,
        average=None,
    )
    return _where(found, torch.bincount(s.y, minlength=s.outputs) > 0)


def _average_precision(s: Scores) -> float:
    each = _precision(s)
    return float(each[1]) if s.outputs == 2 else _mean(each)


def _calibration(s: Scores) -> float:
    top, answer = s.answers.max(1)
    return float(
        _torchmetrics().binary_calibration_error(top, (answer == s.y).long(), n_bins=_BINS)
    )


def _quiet(
    function: Callable[..., Tensor], answers: Tensor, y: Tensor, outputs: int, **options: Any
) -> Tensor:
    """Call `function` without its warnings about classes without samples, which we leave out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(answers, y.long(), outputs, **options)


def _label_f1(s: Scores) -> Tensor:
    answer, there = s.answers >= 0.5, s.y > 0.5
    hits, total = (answer & there).sum(0).double(), (answer.sum(0) + there.sum(0)).double()
    return _where(2 * hits / total, total > 0)


def _label_right(s: Scores) -> Tensor:
    return ((s.answers >= 0.5) == (s.y > 0.5)).double().mean(0)


def _label_recall(s: Scores) -> Tensor:
    """Return the mean of both recalls of each label."""
    answer, there = s.answers >= 0.5, s.y > 0.5
    found = (
        (answer & there).sum(0) / there.sum(0) + (~answer & ~there).sum(0) / (~there).sum(0)
    ) / 2
    return found.double()  # NaN where all or none have the label


def _label_both(s: Scores) -> Tensor:
    return (s.y > 0.5).any(0) & (s.y < 0.5).any(0)


def _label_auroc(s: Scores) -> Tensor:
    found = _quiet(_torchmetrics().multilabel_auroc, s.answers, s.y, s.outputs, average=None)
    return _where(found.reshape(-1), _label_both(s))


def _label_precision(s: Scores) -> Tensor:
    found = _quiet(
        _torchmetrics().multilabel_average_precision, s.answers, s.y, s.outputs, average=None
    )
    return _where(found.reshape(-1), (s.y > 0.5).any(0))


def _label_calibration(s: Scores) -> float:
    """Return the calibration error of the probabilities of all labels together."""
    p = s.answers.flatten()
    right = (p >= 0.5) == (s.y.flatten() > 0.5)
    return float(
        _torchmetrics().binary_calibration_error(
            torch.maximum(p, 1 - p), right.long(), n_bins=_BINS
        )
    )


def _brier(s: Scores) -> float:
    """Return the mean of (p - y)² over samples: of the second of two classes, or summed over more
    classes.
    """
    wanted = F.one_hot(s.y, s.outputs).double()
    squares = (_probabilities(s).double() - wanted).square()
    return float(squares[:, 1].mean() if s.outputs == 2 else squares.sum(1).mean())


def _label_brier(s: Scores) -> float:
    """Return the mean of (p - y)² over samples and labels."""
    return float((s.answers.double() - s.y).square().mean())


def _errors(s: Scores) -> Tensor:
    return s.answers.double() - s.y.view(s.answers.shape).double()


def _squared(s: Scores) -> Tensor:
    return _mean_squared(s).sqrt()


def _mean_squared(s: Scores) -> Tensor:
    return _errors(s).square().mean(0)


def _absolute(s: Scores) -> Tensor:
    return _errors(s).abs().mean(0)


def _determination(s: Scores) -> Tensor:
    spread = s.y.view(s.answers.shape).double()
    spread = (spread - spread.mean(0)).square().sum(0)
    return _where(1 - _errors(s).square().sum(0) / spread, spread > 0)


class _Mean:
    """The mean over classes, labels or targets; a class, so that it can be sent to other
    processes.
    """

    def __init__(self, each: Callable[[Scores], Tensor]) -> None:
        self.each = each

    def __call__(self, s: Scores) -> float:
        return _mean(self.each(s))


def pairs(s: Scores) -> tuple[Tensor, Tensor]:
    """Return of each sample in how many pairs it is, (n,) int64: twice those in order, ties once,
    and comparable ones.

    A pair is comparable if one had the event before the other had it or was last seen. It is in
    order if the one with the earlier event has the higher answer.

    Frank Harrell et al.: Evaluating the yield of medical tests. JAMA 247, 1982.
    """
    time, event, risk = s.y[:, 0], s.y[:, 1] > 0.5, s.answers[:, 0]
    ordered, comparable = torch.zeros(2, len(s), dtype=torch.int64, device=s.y.device)
    for rows in torch.split(event.nonzero().flatten(), _ROWS):
        early = time[rows, None]
        known = (early < time) | ((early == time) & ~event)
        right = ((risk[rows, None] - risk).sign().long() + 1) * known
        for counts, each in ((ordered, right), (comparable, known.long())):
            counts[rows] += each.sum(1)
            counts.add_(each.sum(0))
    return ordered, comparable


def _concordance(s: Scores) -> float:
    ordered, comparable = pairs(s)
    return float(ordered.sum().double() / 2 / comparable.sum()) if comparable.any() else nan


def _perplexity(s: Scores) -> float:
    loss = s.mean_loss()
    return exp(loss) if loss < 700 else float("inf")


OF_CLASSES = (
    Metric("accuracy", mean_right, full=False, each=_recall),
    Metric("balanced_accuracy", _Mean(_recall), full=False),
    Metric("macro_f1", _Mean(_f1), full=False, each=_f1),
    Metric("auroc", _Mean(_auroc), each=_auroc),
    Metric("average_precision", _average_precision, each=_precision),
    Metric("calibration_error", _calibration, higher=False),
    Metric("brier", _brier, higher=False, share=False),
)
OF_LABELS = (
    Metric("auroc", _Mean(_label_auroc), each=_label_auroc),
    Metric("average_precision", _Mean(_label_precision), each=_label_precision),
    Metric("macro_f1", _Mean(_label_f1), each=_label_f1),
    Metric("accuracy", mean_right, each=_label_right),
    Metric("balanced_accuracy", _Mean(_label_recall), each=_label_recall),
    Metric("calibration_error", _label_calibration, higher=False),
    Metric("brier", _label_brier, higher=False, share=False),
)
OF_NUMBERS = (
    Metric("rmse", _Mean(_squared), higher=False, share=False, each=_squared),
    Metric("mae", _Mean(_absolute), higher=False, share=False, each=_absolute),
    Metric("mse", _Mean(_mean_squared), higher=False, share=False, each=_mean_squared),
    Metric("r2", _Mean(_determination), share=False, each=_determination),
)
OF_TIMES = (Metric("c_index", _concordance),)
OF_PIXELS = (
    Metric("miou", _Mean(_iou), each=_iou),
    Metric("dice", _Mean(_f1), each=_f1),
    Metric("accuracy", mean_right, each=_recall),
    Metric("balanced_accuracy", _Mean(_recall)),
)
OF_TOKENS = (
    Metric("perplexity", _perplexity, higher=False, share=False),
    Metric("accuracy", mean_right),
)
