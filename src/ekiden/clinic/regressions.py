"""What regressions tell: estimates with standard errors, and the baseline hazard, from which
survival follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
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
        times = np.array(settings["times"].split(","), dtype=float)
        hazard = tensors["hazard"].numpy()
        known = hazard > 0
        return cls(times[known].tolist(), hazard[known].tolist())

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
        known = dict(zip(self.times, self.hazard, strict=True))
        found = []
        for time in times:
            if time not in known:
                raise UserError(
                    f"survival at {time:g} is not known, only at "
                    f"{', '.join(map('{:g}'.format, known))}: choose one of these, or {_HOW}"
                )
            found.append(known[time])
        return tuple(found)

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
    """What a column contributes, in its own unit; None where no sample tells it. The errors of a fit
    that has none, and what follows from them, are None, too: rounding would decide them.
    """

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

    weight = tensors["head.weight"].double()
    bias = tensors["head.bias"].double()
    rows = torch.cat([weight, bias[:, None]], 1)
    covariance = tensors["covariance"].double()
    entering = [*terms(inputs, weight.shape[1]), Term("constant")]
    own = _in_own_units(entering)
    if family == "logistic":
        # one matrix for all classes but the first, with which they are compared
        covariance = _blocks(covariance[0], len(entering))
        rows = rows[1:]
        classes = classes[1:]
    # mean and standard deviation of each target
    scales = [(0.0, 1.0)] * len(rows)
    if isinstance(task, Regression) and family == "linear":
        # One scale is that of all targets.
        each = list(zip(task.mean, task.std, strict=True))
        scales = each * (len(rows) // len(each))
    found = []
    for output, row, of, (mean, std) in zip(classes, rows, covariance, scales, strict=False):
        known = of.diagonal() > 0
        # of what no sample has, the variance and the coefficient are 0; every sample has the constant
        has_samples = known | (row != 0)
        has_samples[-1] = True
        estimates = std * (own @ row)
        estimates[-1] += mean
        errors = std * (own @ of @ own.T).diagonal().clamp(min=0).sqrt()
        errors[~known] = 0.0
        spread = stats.norm()
        if family == "linear":
            spread = stats.t(int(tensors["samples"]) - int(known.sum()))
        table = zip(entering, has_samples, estimates.tolist(), errors.tolist(), strict=True)
        for term, there, estimate, error in table:
            # every category is known
            unused = term.name.endswith(OTHER) and not there
            # each client has its own hazard
            hazard = family == "cox" and term is entering[-1]
            if unused or hazard:
                continue
            one = _coefficient(output, term.name, estimate, error, spread)
            if not there:
                one = replace(one, estimate=None)
            found.append(one)
    return tuple(found)


def _in_own_units(entering: Sequence[Term]) -> Tensor:
    """Return the matrix (P, P) that makes coefficients of columns in their own units of those of
    columns as they enter, of which the last is the constant.
    """
    centre, scale = torch.tensor(
        [(term.centre, term.scale) for term in entering], dtype=torch.float64
    ).T
    own = torch.diag(1 / scale)
    own[-1, :-1] = -(centre / scale)[:-1]
    return own


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """Return the square blocks of this size on the diagonal of a matrix."""
    count = len(matrix) // size
    blocks = matrix.view(count, size, count, size).diagonal(dim1=0, dim2=2)
    return blocks.movedim(-1, 0)


def _coefficient(
    output: str, column: str, estimate: float, error: float, spread: Any
) -> Coefficient:
    if not error:
        return Coefficient(output, column, estimate, *[None] * 5)
    reach = float(spread.ppf((1 + _LEVEL) / 2)) * error
    statistic = estimate / error
    p = 2 * float(spread.sf(abs(statistic)))
    return Coefficient(
        output, column, estimate, error, statistic, p, estimate - reach, estimate + reach
    )
