"""What regressions tell: estimates with standard errors, and the baseline hazard, from which
survival follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ekiden.core.base.checks import Checked, Positive
from ekiden.core.base.errors import UserError
from ekiden.core.data.inputs import Inputs
from ekiden.core.models.tables_and_texts import OTHER, Term, terms
from ekiden.core.tasks import Regression, Survival, Task
from ekiden.methods.statistics.hazards import Numbers, baseline, hazard_counts

_HOW = (
    "run glm --family cox with --times, or predict from rows whose hazard it is (--baseline FILE)"
)


@dataclass(frozen=True)
class Baseline(Checked):
    """The cumulative hazard of a sample for which the model gives 0."""

    times: tuple[Positive, ...] = ()  # at which it is known
    hazard: tuple[Positive, ...] = ()  # at these times
    # for networks that were trained with a constant hazard, one event in this time; otherwise None
    mean: Positive | None = None

    @classmethod
    def of(
        cls, task: Task, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self | None:
        """Return the baseline of a run's model; None if it has none."""
        if not isinstance(task, Survival):
            return None
        if "family" not in settings:
            return cls(mean=task.mean[0])
        if "hazard" not in tensors:
            return None
        told = zip(
            map(float, settings["times"].split(",")), tensors["hazard"].tolist(), strict=True
        )
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
            raise UserError(
                f"survival at {lacking[0]:g} is not known, only at {known}: choose one of these, "
                f"or {_HOW}"
            )
        return tuple(self.hazard[self.times.index(time)] for time in times)

    def survival(self, answers: Tensor, times: Sequence[float]) -> Tensor:
        """Return the share (n, T) that has not had the event at the times, for samples with these
        answers (n, 1).
        """
        hazard = torch.tensor(self.hazard_at(times), dtype=torch.float64)
        return (-hazard * answers.double().exp()).exp()


def baseline_of(found: Baseline | None, task: Task) -> Baseline:
    """Return the baseline of a model, or refuse a model without one."""
    if not isinstance(task, Survival):
        raise UserError(
            f"survival at a time is for times and events, the task is {task.kind}: leave out --at"
        )
    if found is None:
        raise UserError(f"Cox regression tells no baseline hazard by itself: {_HOW}")
    return found


_LEVEL = 0.95


@dataclass(frozen=True)
class Coefficient:
    """What a column contributes, in its own unit; None where no sample tells it."""

    output: str  # the class (compared with the first one) or the target
    column: str  # name of the column; of a category after it, compared with the first one
    estimate: float | None  # of the logit, the mean, or the logarithm of the rate or the hazard
    error: float | None  # standard error
    statistic: float | None  # estimate / error
    # two-sided, from the normal distribution; for linear regression from Student's t
    p: float | None
    low: float | None  # lower end of the 95 % interval
    high: float | None  # upper end

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def coefficients(
    tensors: Mapping[str, Tensor], family: str, task: Task, inputs: Inputs, classes: Sequence[str]
) -> tuple[Coefficient, ...]:
    """Return the table of a finished regression of this family.

    `tensors` are of the model, by name: head.weight, head.bias, covariance, samples.
    """
    # takes a second, and few need it
    from scipy import stats

    weight, bias, covariance = (
        tensors[name].double() for name in ("head.weight", "head.bias", "covariance")
    )
    entering = [*terms(inputs, weight.shape[1]), Term("constant")]
    rows, first = torch.cat([weight, bias[:, None]], 1), 1 if family == "logistic" else 0
    samples, found = int(tensors["samples"]), []
    # what makes coefficients of columns in their own units of those of columns as they enter: (P,
    # P)
    own = torch.diag(torch.tensor([1 / term.scale for term in entering], dtype=torch.float64))
    own[-1, :-1] = torch.tensor(
        [-term.centre / term.scale for term in entering[:-1]], dtype=torch.float64
    )
    # mean and standard deviation of each target
    scales = [(0.0, 1.0)] * len(rows)
    if isinstance(task, Regression) and family == "linear":
        # One scale is that of all targets.
        each = list(zip(task.mean, task.std, strict=True))
        scales = each * (len(rows) // len(each))
    for k, row in enumerate(rows[first:]):
        start = k * len(entering) if family == "logistic" else 0
        of = covariance[0 if family == "logistic" else k][
            start : start + len(entering), start : start + len(entering)
        ]
        known = of.diagonal() > 0
        mean, std = scales[k + first]
        estimates = std * (own @ row)
        estimates[-1] += mean
        errors = std * (own @ of @ own.T).diagonal().clamp(min=0).sqrt()
        spread = stats.t(samples - int(known.sum())) if family == "linear" else stats.norm()
        for term, estimate, error, there in zip(
            entering, estimates.tolist(), errors.tolist(), known, strict=True
        ):
            if not there and term.name.endswith(OTHER):
                # every category is known
                continue
            if family == "cox" and term is entering[-1]:
                # each client has its own hazard
                continue
            found.append(
                _coefficient(
                    classes[k + first], term.name, estimate, error if there else 0.0, spread
                )
            )
    return tuple(found)


def _coefficient(
    output: str, column: str, estimate: float, error: float, spread: Any
) -> Coefficient:
    if not error:
        return Coefficient(output, column, *[None] * 6)
    reach = float(spread.ppf((1 + _LEVEL) / 2)) * error
    statistic = estimate / error
    p = 2 * float(spread.sf(abs(statistic)))
    return Coefficient(
        output, column, estimate, error, statistic, p, estimate - reach, estimate + reach
    )
