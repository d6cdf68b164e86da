"""Measure models on the test samples of all silos; the samples stay at the silos."""

from collections.abc import Sequence
from math import exp, isnan, sqrt
from typing import Any

import torch

from ekiden.data.tasks import LanguageModelling, Metric, Regression, Task
from ekiden.engine.evaluation import consensus
from ekiden.training.weights import Weights
from ekiden.transports.flower.coordinator.transport import Remote
from ekiden.transports.flower.silo.measuring import MOST
from ekiden.transports.flower.trust.parcel import Count


class SiloTests:
    """Measures models on the test samples of all silos; the samples stay at the silos."""

    def __init__(self, remote: Remote, clients: Sequence[str], task: Task, outputs: int) -> None:
        self._remote = remote
        self._clients = clients
        self._task = task
        self._outputs = outputs

    def __call__(self, model: Weights | None, personal: list[Weights], *, last: bool = False) -> dict[str, Any]:
        """Return the row of metrics, as `ekiden.engine.evaluation.TestSet` does on one machine."""
        shared = [] if model is None else [model]
        models = shared + personal
        if not models:
            return {}
        row = row_of(self._remote.evaluate(self._clients, models, len(shared)), len(shared), self._task, self._outputs)
        if row and personal:
            row["consensus"] = consensus(personal)
        return row


def row_of(counts: Sequence[Sequence[Count]], results: int, task: Task, outputs: int) -> dict[str, Any]:
    """Return the metrics that follow from the counts of all silos, without those that need the models.

    Args:
        counts: counts of each silo for each model.
        results: number of models that are the run's, not a client's own; they come first.
        task: what the labels mean.
        outputs: K.
    """
    samples = sum(row[0].samples for row in counts)
    if not samples:
        return {}
    models = len(counts[0])
    total = [
        Count(sum(row[m].right for row in counts), sum(row[m].loss for row in counts), samples) for m in range(models)
    ]
    personal = models > results
    first = results if personal else 0
    own = [row[first + i if personal else 0] for i, row in enumerate(counts)]
    found = _values(total[first:], task)
    metric = headline(task)
    if metric is not None:
        each = [_value(metric.name, task, c) if c.samples else None for c in own]
        known = torch.tensor([value for value in each if value is not None], dtype=torch.float64)
        found |= {
            "client_mean": float(known.mean()),
            "client_std": float(known.std(correction=0)),
            "client_worst": float(known.min() if metric.higher else known.max()),
            "client_decile": float(known.quantile(0.1 if metric.higher else 0.9)),
            "clients": each,
        }
    far = [_far_off(c, task.guess(outputs)) for c in own if c.samples]
    if (any if personal else all)(far) and far:
        found["diverged"] = True
    if personal and results:
        found |= {f"global_{name}": value for name, value in _values(total[:1], task).items() if name != "metric"}
    return found


def _far_off(count: Count, guess: float) -> bool:
    """Return whether a model must have diverged, from what a silo reported about it.

    On one machine its mean loss would be above 30; see `ekiden.engine.evaluation.diverged`. A silo counts no sample for
    more than `MOST`, so nearly all wrong answers cost that much, and the mean is far above the loss of guessing. A
    global model must be like this at all silos, because one that forgets is like this at most of them. With more than
    20,000 classes or tokens, guessing itself costs about `MOST`, and divergence is not noticed.
    """
    loss = count.loss / count.samples
    wrong = 1 - count.right / count.samples
    return isnan(loss) or (loss >= 0.9 * MOST * wrong and loss > min(2 * guess, 0.9 * MOST + 0.1 * guess))


def headline(task: Task) -> Metric | None:
    """Return the metric shown for runs between machines: one that follows from what silos report, if there is one.

    These are the accuracy, the perplexity of tokens, and the RMSE of one target. The RMSE of several targets needs the
    errors of each, and other metrics need the answers to single samples.
    """
    names = {metric.name: metric for metric in task.metrics}
    if isinstance(task, Regression):
        return names["rmse"] if len(task.std) == 1 else None
    return names["perplexity" if isinstance(task, LanguageModelling) else "accuracy"]


def _values(models: Sequence[Count], task: Task) -> dict[str, Any]:
    """Return mean accuracy, mean loss and mean headline metric of some models on all samples."""

    def mean(name: str) -> float:
        return sum(_value(name, task, count) for count in models) / len(models)

    metric = headline(task)
    names = [*(["accuracy"] if any(m.name == "accuracy" for m in task.metrics) else []), "loss"]
    row: dict[str, Any] = {name: mean(name) for name in names}
    if metric is not None and metric.name != "accuracy":
        row |= {"metric": metric.name, metric.name: mean(metric.name)}
    return row


def _value(name: str, task: Task, count: Count) -> float:
    """Return a metric of one model, from what was reported about it."""
    loss = count.loss / count.samples
    match task:
        case _ if name == "accuracy":
            return count.right / count.samples
        case LanguageModelling() if name == "perplexity":
            return exp(loss)
        case Regression(std=(std,)) if name == "rmse":
            return sqrt(loss) * std
        case _:
            return loss
