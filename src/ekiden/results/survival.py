"""The baseline hazard of a model of times, from which the share follows that has not had the event at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ekiden.base.checks import Checked, Positive
from ekiden.base.errors import UserError
from ekiden.data.curves import Numbers, baseline, hazard_counts
from ekiden.data.tasks import Survival, Task

_HOW = "run glm --family cox with --times, or predict from rows whose hazard it is (--baseline FILE)"


@dataclass(frozen=True)
class Baseline(Checked):
    """The cumulative hazard of a sample for which the model gives 0."""

    times: tuple[Positive, ...] = ()  # at which it is known
    hazard: tuple[Positive, ...] = ()  # at these times
    # for networks that were trained with a constant hazard, one event in this time; otherwise None
    mean: Positive | None = None

    @classmethod
    def of(cls, task: Task, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self | None:
        """Return the baseline of a run's model; None if it has none.

        Args:
            task: what the labels mean.
            settings: hyperparameters of the run's method.
            tensors: of the model, by name.
        """
        if not isinstance(task, Survival):
            return None
        if "family" not in settings:
            return cls(mean=task.mean[0])
        if "hazard" not in tensors:
            return None
        told = zip(map(float, settings["times"].split(",")), tensors["hazard"].tolist(), strict=True)
        known = [(time, value) for time, value in told if value > 0]
        return cls(tuple(time for time, _ in known), tuple(value for _, value in known))

    @classmethod
    def fitted(cls, y: Numbers, risk: Numbers, times: Sequence[float]) -> Self:
        """Return Breslow's estimate from rows.

        Args:
            y: (n, 2) times and events.
            risk: (n,) what the model gives for them.
            times: where it is wanted.

        Raises:
            UserError: no row is followed so long, or none had the event before.
        """
        if not len(y) or max(times) > y[:, 0].max():
            raise UserError(f"no row is followed up to {max(times):g}: choose earlier times")
        found = baseline(*hazard_counts(y, risk, times), least=0)
        if not found.all():
            raise UserError(f"no row had the event up to {min(times):g}: choose later times")
        return cls(tuple(times), tuple(found.tolist()))

    def hazard_at(self, times: Sequence[float]) -> tuple[float, ...]:
        """Return the cumulative hazard at some times."""
        if self.mean is not None:
            return tuple(time / self.mean for time in times)
        if lacking := [time for time in times if time not in self.times]:
            known = ", ".join(f"{time:g}" for time in self.times)
            raise UserError(f"survival at {lacking[0]:g} is not known, only at {known}: choose one of these, or {_HOW}")
        return tuple(self.hazard[self.times.index(time)] for time in times)

    def survival(self, answers: Tensor, times: Sequence[float]) -> Tensor:
        """Return the share (n, T) that has not had the event at the times, for samples with these answers (n, 1)."""
        hazard = torch.tensor(self.hazard_at(times), dtype=torch.float64)
        return (-hazard * answers.double().exp()).exp()


def baseline_of(found: Baseline | None, task: Task) -> Baseline:
    """Return the baseline of a model, or refuse a model without one."""
    if not isinstance(task, Survival):
        raise UserError(f"survival at a time is for times and events, the task is {task.kind}: leave out --at")
    if found is None:
        raise UserError(f"Cox regression tells no baseline hazard by itself: {_HOW}")
    return found
