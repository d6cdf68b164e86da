"""What silos report about models on their own test samples.

Each answer reveals something about the samples. So silos add up what they report, under masks where a run is sealed;
nothing is told about few samples; the same models get the same answer again; and a run may have only a limited number
of models measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ekiden.base.modular import Masked
from ekiden.data.tasks import Scores, Task
from ekiden.data.tasks.counting import FIXED, Care, Counting, counting_of
from ekiden.data.tasks.figures import figures
from ekiden.engine.transport import opened

FIRST = ("reports", "far")
"""entries of `SiloReport.own` before those of the metrics"""


@dataclass(frozen=True)
class SiloReport:
    """What silos report about some models. Reports add up.

    Attributes:
        counts: (models, numbers) int64, what each model's answers count; see `Counting`.
        own: (2, 2 + metrics) int64, about one model of each silo: its own, or the run's. First how many silos reported,
            and at how many the model has diverged; then for each metric the sum over silos, in fixed point. In the
            second row stands at how many silos it is defined.
    """

    counts: Tensor
    own: Tensor

    def plus(self, other: "SiloReport") -> "SiloReport":
        """Return the report of both."""
        return SiloReport(self.counts + other.counts, self.own + other.own)


@dataclass(frozen=True)
class Reported:
    """A silo's answer.

    Attributes:
        masked: its report under masks, as a part of the sum of all silos; None if the run seals nothing.
        shown: its report in the clear: if nothing is masked, or if the silo's file allows it.
    """

    masked: Masked | None = None
    shown: SiloReport | None = None


def report(counting: Counting, answers: Sequence[Scores], mine: int, care: Care, train: Tensor) -> SiloReport:
    """Return what one silo reports.

    Args:
        counting: says what is counted.
        answers: of each model to the silo's test samples.
        mine: number of the model that is the silo's own, or the run's.
        care: how carefully the silo reports.
        train: labels of its training samples.
    """
    counts = torch.stack([counting.count(scores, care, train) for scores in answers])
    metrics = counting.task.metrics
    own = torch.zeros(2, len(FIRST) + len(metrics), dtype=torch.int64)
    split = counting.split(counts[mine])
    own[0, : len(FIRST)] = torch.stack([split[name] for name in FIRST])
    found = figures(counting, counts[mine]).values
    for i, metric in enumerate(metrics, start=len(FIRST)):
        if metric.name in found and abs(found[metric.name]) < _LARGEST:
            own[:, i] = torch.tensor([round(found[metric.name] * FIXED), 1])
    return SiloReport(counts, own)


def counting(task: Task, outputs: int, models: int, *, last: bool) -> Counting:
    """Return what is counted of models: scores too after the last step, or if the headline metric needs them.

    Of personal models they are counted only for the headline metric.
    """
    return counting_of(task, outputs, full=task.headline.full or (last and models == 1))


def fits(found: SiloReport, counting: Counting, models: int) -> bool:
    """Return whether a report has the numbers that it must have."""
    kinds = {found.counts.dtype, found.own.dtype} == {torch.int64}
    return kinds and (found.counts.shape, found.own.shape) == (
        (models, counting.size),
        (2, len(FIRST) + len(counting.task.metrics)),
    )


def total_of(found: Mapping[str, Reported], members: int) -> SiloReport | None:
    """Return the sum of all reports; None if there are none, or if parts of a sum under masks are missing.

    Args:
        found: reports of the silos.
        members: number of silos whose masks cancel; 0 if nothing is masked.

    Raises:
        UserError: the parts do not fit together.
    """
    masked = [one.masked for one in found.values() if one.masked is not None]
    if masked:
        if len(masked) < members:
            return None
        together: SiloReport = opened(reduce(Masked.plus, masked), SiloReport)
        return together
    shown = [one.shown for one in found.values() if one.shown is not None]
    return reduce(SiloReport.plus, shown) if shown else None


_LARGEST = 2.0**30
