"""What silos report about models on their own test samples, and the metrics that follow.

Each answer reveals something about the samples. So silos add noise, and add up what they report,
under masks; nothing is told about few samples; and a run measures the models
that its plan names, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import nan, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from ekiden.clinic import subgroups
from ekiden.clinic.counting import counting_of, fixed, real
from ekiden.clinic.figures import Figures
from ekiden.clinic.heterogeneity import FEWEST, Weighed, between, errors_of, heterogeneity
from ekiden.clinic.noisy import Exact, Noisy
from ekiden.clinic.ranked import Wanted
from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Masked
from ekiden.core.engine.evaluation import spread
from ekiden.core.engine.transport import opened
from ekiden.core.tasks import Task
from ekiden.core.training.private.accountant import noise_for
from ekiden.silos.trust.agreement import Agreement

# entries of `SiloReport.own` before those of the metrics
FIRST = ("reports", "far")
# of a number in a sum over silos
_LARGEST = 2.0**55
# classes whose metrics are listed
_MOST_LISTED = 100


@dataclass(frozen=True)
class SiloReport:
    """What silos report about some models. Reports add up."""

    # (models, numbers) int64, what each model's answers count; see `Counting`. Then rows of the
    # subgroups of the terms,
    # if they name columns; there is one model then.
    counts: Tensor
    # int64, about one model of each silo, its own or the run's. `FIRST`: how many silos reported,
    # and at how many the model has diverged. Then for each metric, by name, sums over silos as
    # `fixed` has them (6, 2): its value, and what `Weighed` has.
    own: dict[str, Tensor]

    def plus(self, other: "SiloReport") -> "SiloReport":
        """Return the report of both."""
        if self.own.keys() != other.own.keys():
            raise UserError("reports of other metrics cannot be added: use one version of Ekiden")
        own = {name: part + other.own[name] for name, part in self.own.items()}
        return SiloReport(self.counts + other.counts, own)


@dataclass(frozen=True)
class Reported:
    """A silo's answer."""

    # its report under masks, as a part of the sum of all silos; None if no other silo measures
    masked: Masked | None = None
    # its report in the clear: if no other silo measures, or if the silo's file allows it
    shown: SiloReport | None = None


def report(telling: Exact, counts: Tensor, mine: int, silos: int = 0) -> SiloReport:
    """Return what one silo of so many reports: counts of models and subgroups, and its own metrics.

    The latter follow from the counts of model `mine` as they are told. If silos share the noise,
    there are none, because one share hides too little.
    """
    task = telling.counting.task
    split = telling.counting.split(telling.vector(counts[mine]))
    own = {name: split[name] for name in FIRST}
    shared = isinstance(telling, Noisy) and telling.honest > 1
    found = telling.figures(counts[mine], Wanted())
    errors = errors_of(found, task)
    for metric in task.metrics:
        value = found.values.get(metric.name, nan)
        weighed = Weighed()
        if silos >= FEWEST and metric.name in errors:
            weighed = Weighed.of(*errors[metric.name])
        # an error of nearly 0: no room, and no weight
        if not max(map(abs, weighed)) < _LARGEST:
            weighed = Weighed()
        told = abs(value) < _LARGEST and not shared
        sums = [value, 1.0, *weighed] if told else [0.0] * 7
        own[metric.name] = fixed(torch.tensor(sums, dtype=torch.float64))
    if shared:
        own |= {"far": torch.zeros_like(own["far"])}
    return SiloReport(counts, own)


def rows(agreed: Agreement, models: int) -> int:
    """Return how many rows `SiloReport.counts` has for some models."""
    return models + sum(map(len, agreed.subgroups.values()))


def telling(agreed: Agreement, models: int, *, last: bool) -> Exact:
    """Return what silos tell about models: scores too after the last step, or if the headline metric
    needs them.

    Of personal models they are counted only for the headline metric. All that a run tells is one
    Gaussian mechanism: each of its steps has an equal part, and there each model and column of
    subgroups.
    """
    task = agreed.labels
    full = task.headline.full or (last and models == 1)
    counting = counting_of(task, agreed.outputs, full=full)
    dp = agreed.measured_dp
    if dp is None:
        return Exact(counting)
    releases = len(agreed.measured_steps) * (models + len(agreed.subgroups))
    noise = noise_for(dp.epsilon, dp.delta, 1.0, 1) * sqrt(releases)
    places = prod(agreed.shape[-2:])
    return Noisy(counting, noise, places, dp.honest, whole=not agreed.by)


def fits(found: SiloReport, telling: Exact, rows: int) -> bool:
    """Return whether a report has the numbers that it must have."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(FIRST, ())
    shapes |= {metric.name: (7, 2) for metric in telling.counting.task.metrics}
    whole = all(part.dtype == torch.int64 for part in (found.counts, *found.own.values()))
    told = {name: tuple(part.shape) for name, part in found.own.items()}
    return whole and found.counts.shape == (rows, telling.size) and told == shapes


def shown_of(found: Mapping[str, Reported]) -> dict[str, SiloReport]:
    """Return the reports of the silos that show theirs."""
    return {name: one.shown for name, one in found.items() if one.shown is not None}


def total_of(found: Mapping[str, Reported], members: int) -> SiloReport | None:
    """Return the sum of all reports; None if there are none, or if parts of a sum under masks are
    missing.

    `members` is the number of silos whose masks cancel; 0 if one measures alone.
    """
    masked = [one.masked for one in found.values() if one.masked is not None]
    if masked:
        if len(masked) < members:
            return None
        together: SiloReport = opened(reduce(Masked.plus, masked), SiloReport)
        return together
    shown = shown_of(found).values()
    return reduce(SiloReport.plus, shown) if shown else None


def row_of(
    total: SiloReport,
    shown: Mapping[str, SiloReport],
    agreed: Agreement,
    results: int,
    telling: Exact,
    *,
    last: bool,
) -> dict[str, Any]:
    """Return the metrics that follow from what silos reported, without those that need the models.

    `shown` has the reports of those that show theirs. The first `results` models are the run's, the
    others clients' own.
    """
    groups = agreed.subgroups
    task = telling.counting.task
    counts = total.counts
    divided = None
    if groups:
        counts, divided = counts[:results], counts[results:]
    personal = len(counts) > results
    wanted = Wanted() if last and len(counts) == 1 else None
    each = [telling.figures(numbers, wanted) for numbers in counts]
    if not each[0].samples:
        return {}
    found = _values(each[results if personal else 0 :], task)
    reports, far = (int(total.own[name]) for name in FIRST)
    own = {
        name: telling.figures(
            one.counts[results + agreed.clients.index(name) if personal else 0], wanted
        )
        for name, one in shown.items()
    }
    found |= _over_silos(total, own, agreed.clients, task, reports)
    if far and (personal or far == reports):
        found["diverged"] = True
    if personal and results:
        found |= {
            f"global_{name}": value
            for name, value in _values(each[:1], task).items()
            if name != "metric"
        }
    if last and not personal:
        found |= _everything(each[0], total, own, task, agreed.classes)
    if divided is not None or (shown and last and not personal and len(each) == 1):
        found["subgroups"] = _divided(each[0], divided, groups, shown, telling)
    if last and "accuracy" in found and (majority := each[-1].majority) is not None:
        found["majority"] = majority
    return found


def _divided(
    whole: Figures,
    counts: Tensor | None,
    groups: Mapping[str, Sequence[str]],
    shown: Mapping[str, SiloReport],
    telling: Exact,
) -> dict[str, Any]:
    """Return the table of subgroups, with one of the silos that show their own counts."""
    each = dict[str, Mapping[str, Tensor]]()
    parts = () if counts is None else torch.split(counts, [*map(len, groups.values())])
    for (column, names), part in zip(groups.items(), parts, strict=True):
        each[column] = dict(zip(names, map(telling.vector, part), strict=True))
    if shown:
        each["client"] = {name: telling.vector(one.counts[0]) for name, one in shown.items()}
    noisy = isinstance(telling, Noisy)
    return subgroups.table(telling.counting, each, whole, intervals=not noisy)


def _values(each: Sequence[Figures], task: Task) -> dict[str, Any]:
    """Return mean accuracy, mean loss and mean headline metric of some models on all samples."""

    def mean(name: str) -> float | None:
        known = [one.values[name] for one in each if name in one.values]
        return sum(known) / len(known) if len(known) == len(each) else None

    row: dict[str, Any] = {}
    if "accuracy" in task.by_name():
        row["accuracy"] = mean("accuracy")
    loss = mean("loss")
    row["loss"] = float("nan") if loss is None else loss
    if task.headline.name != "accuracy":
        row |= {"metric": task.headline.name, task.headline.name: mean(task.headline.name)}
    return row


def _over_silos(
    total: SiloReport, own: Mapping[str, Figures], clients: Sequence[str], task: Task, reports: int
) -> dict[str, Any]:
    """Return the mean of the headline metric over silos, and its spread and values where silos show
    them.
    """
    means = means_of(total, task)
    metric = task.headline
    found: dict[str, Any] = {"client_mean": means[metric.name]} if metric.name in means else {}
    each = [own[client].values.get(metric.name) if client in own else None for client in clients]
    known = torch.tensor([value for value in each if value is not None], dtype=torch.float64)
    if not len(known):
        return found
    found["clients"] = each
    if sum(one.silos for one in own.values()) < reports:
        return found
    return found | spread(known, metric)


def means_of(report: SiloReport, task: Task) -> dict[str, float]:
    """Return the mean of each metric over the silos at which it is defined."""
    each = {metric.name: real(report.own[metric.name].numpy()) for metric in task.metrics}
    return {name: float(sums[0] / sums[1]) for name, sums in each.items() if sums[1]}


def between_in(report: SiloReport, task: Task) -> dict[str, Any]:
    """Return how figures differ between silos, of four and more; see `Between`."""
    each = {m.name: Weighed(*real(report.own[m.name].numpy())[2:].tolist()) for m in task.metrics}
    return {name: plain(between(sums)) for name, sums in each.items() if sums.silos >= FEWEST}


def _everything(
    one: Figures,
    total: SiloReport,
    own: Mapping[str, Figures],
    task: Task,
    classes: Sequence[str],
) -> dict[str, Any]:
    """Return all metrics of a model: pooled, averaged over silos, of silos that show theirs, and of
    each class.
    """
    names = [metric.name for metric in task.metrics]
    groups: dict[str, Any] = {}
    if silos := {
        client: _listed(found.values, names) for client, found in own.items() if found.samples
    }:
        groups["client"] = silos
    if 1 < len(classes) == len(one.each) <= _MOST_LISTED:
        groups["class"] = {
            str(name): dict(values) for name, values in zip(classes, one.each, strict=True)
        }
    found: dict[str, Any] = {
        "metrics": _listed(one.values, names),
        "silo_means": means_of(total, task),
        "figures": one.to_json(),
    }
    if groups:
        found["groups"] = groups
    apart = between_in(total, task)
    if len(own) == int(total.own["reports"]):
        apart = heterogeneity([*own.values()], task)
    if apart:
        found["heterogeneity"] = apart
    if one.confusion:
        found["confusion"] = [list(row) for row in one.confusion]
    return found


def _listed(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values}
