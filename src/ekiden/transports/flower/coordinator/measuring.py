"""Measure models on the test samples of all silos; the samples stay at the silos."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ekiden.data.tasks import Task
from ekiden.data.tasks.counting import FIXED, Counting
from ekiden.data.tasks.figures import Figures, Wanted, figures
from ekiden.engine.evaluation import consensus
from ekiden.training.weights import Weights
from ekiden.transports.flower.coordinator.transport import Remote
from ekiden.transports.flower.trust import report as measured
from ekiden.transports.flower.trust.agreement import Agreement
from ekiden.transports.flower.trust.report import FIRST, SiloReport

_MOST_LISTED = 100  # classes whose metrics are listed


class SiloTests:
    """Measures models on the test samples of all silos; the samples stay at the silos."""

    def __init__(self, remote: Remote, agreed: Agreement) -> None:
        self._remote = remote
        self._agreed = agreed

    def __call__(self, model: Weights | None, personal: list[Weights], *, last: bool = False) -> dict[str, Any]:
        """Return the row of metrics, as `ekiden.engine.evaluation.TestSet` does on one machine."""
        shared = [] if model is None else [model]
        models = shared + personal
        if not models:
            return {}
        agreed = self._agreed
        counting = measured.counting(agreed.labels, agreed.outputs, len(models), last=last)
        total, shown = self._remote.evaluate(agreed.clients, models, len(shared), counting, last=last)
        row = row_of(total, shown, agreed, len(shared), counting, last=last) if total else {}
        if row and personal:
            row["consensus"] = consensus(personal)
        return row


def row_of(
    total: SiloReport,
    shown: Mapping[str, SiloReport],
    agreed: Agreement,
    results: int,
    counting: Counting,
    *,
    last: bool,
) -> dict[str, Any]:
    """Return the metrics that follow from what silos reported, without those that need the models.

    Args:
        total: the sum of all reports.
        shown: the reports of single silos, of those that show theirs.
        agreed: the terms of the run.
        results: number of models that are the run's, not a client's own; they come first.
        counting: says what was counted.
        last: whether the run ends here.
    """
    personal = len(total.counts) > results
    wanted = Wanted() if last and len(total.counts) == 1 else None
    each = [figures(counting, numbers, wanted) for numbers in total.counts]
    if not each[0].samples:
        return {}
    found = _values(each[results if personal else 0 :], counting.task)
    reports, far = (int(total.own[0, FIRST.index(name)]) for name in FIRST)
    own = {
        name: figures(counting, one.counts[results + agreed.clients.index(name) if personal else 0])
        for name, one in shown.items()
    }
    found |= _over_silos(total, own, agreed.clients, counting.task, reports)
    if far and (personal or far == reports):
        found["diverged"] = True
    if personal and results:
        found |= {
            f"global_{name}": value for name, value in _values(each[:1], counting.task).items() if name != "metric"
        }
    if last and not personal:
        found |= _everything(each[0], total, own, counting, agreed.classes)
    if last and "accuracy" in found and (majority := each[-1].majority) is not None:
        found["majority"] = majority
    return found


def _values(each: Sequence[Figures], task: Task) -> dict[str, Any]:
    """Return mean accuracy, mean loss and mean headline metric of some models on all samples."""

    def mean(name: str) -> float | None:
        known = [one.values[name] for one in each if name in one.values]
        return sum(known) / len(known) if len(known) == len(each) else None

    row: dict[str, Any] = {}
    if any(metric.name == "accuracy" for metric in task.metrics):
        row["accuracy"] = mean("accuracy")
    loss = mean("loss")
    row["loss"] = float("nan") if loss is None else loss
    if task.headline.name != "accuracy":
        row |= {"metric": task.headline.name, task.headline.name: mean(task.headline.name)}
    return row


def _over_silos(
    total: SiloReport, own: Mapping[str, Figures], clients: Sequence[str], task: Task, reports: int
) -> dict[str, Any]:
    """Return the mean of the headline metric over silos, and its spread and values where silos show them.

    Args:
        total: the sum of all reports.
        own: the figures of silos that show theirs.
        clients: names of all silos.
        task: what the labels mean.
        reports: number of silos with enough samples.
    """
    means, metric = means_of(total, task), task.headline
    found: dict[str, Any] = {"client_mean": means[metric.name]} if metric.name in means else {}
    each = [own[client].values.get(metric.name) if client in own else None for client in clients]
    known = torch.tensor([value for value in each if value is not None], dtype=torch.float64)
    if not len(known):
        return found
    found["clients"] = each
    if sum(one.silos for one in own.values()) < reports:
        return found
    return found | {
        "client_mean": float(known.mean()),
        "client_std": float(known.std(correction=0)),
        "client_worst": float(known.min() if metric.higher else known.max()),
        "client_decile": float(known.quantile(0.1 if metric.higher else 0.9)),
    }


def means_of(report: SiloReport, task: Task) -> dict[str, float]:
    """Return the mean of each metric over the silos at which it is defined."""
    sums, numbers = (row[len(FIRST) :].tolist() for row in report.own)
    triples = zip(task.metrics, sums, numbers, strict=True)
    return {metric.name: value / FIXED / number for metric, value, number in triples if number}


def _everything(
    one: Figures, total: SiloReport, own: Mapping[str, Figures], counting: Counting, classes: Sequence[str]
) -> dict[str, Any]:
    """Return all metrics of a model: pooled, averaged over silos, of silos that show theirs, and of each class."""
    names = [metric.name for metric in counting.task.metrics]
    groups: dict[str, Any] = {}
    if silos := {client: _listed(found.values, names) for client, found in own.items() if found.samples}:
        groups["client"] = silos
    if 1 < len(classes) == len(one.each) <= _MOST_LISTED:
        groups["class"] = {str(name): dict(values) for name, values in zip(classes, one.each, strict=True)}
    found: dict[str, Any] = {
        "metrics": _listed(one.values, names),
        "silo_means": means_of(total, counting.task),
        "figures": one.to_json(),
    }
    if groups:
        found["groups"] = groups
    if one.confusion:
        found["confusion"] = [list(row) for row in one.confusion]
    return found


def _listed(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values}
