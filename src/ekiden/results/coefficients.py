"""The table of a regression: estimates in the data's own units, standard errors, intervals, p-values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ekiden.data.kinds import Inputs
from ekiden.data.tasks import Regression, Task
from ekiden.models.linear import OTHER, Term, terms

_LEVEL = 0.95


@dataclass(frozen=True)
class Coefficient:
    """What a column contributes, in its own unit; None where no sample tells it."""

    output: str  # the class (compared with the first one) or the target
    column: str  # name of the column; of a category after it, compared with the first one
    estimate: float | None  # of the logit, the mean, or the logarithm of the rate or the hazard
    error: float | None  # standard error
    statistic: float | None  # estimate / error
    p: float | None  # two-sided, from the normal distribution; for linear regression from Student's t
    low: float | None  # lower end of the 95 % interval
    high: float | None  # upper end

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def coefficients(
    tensors: Mapping[str, Tensor], family: str, task: Task, inputs: Inputs, classes: Sequence[str]
) -> tuple[Coefficient, ...]:
    """Return the table of a finished regression.

    Args:
        tensors: of the model, by name: head.weight, head.bias, covariance, samples.
        family: which regression.
        task: what the labels mean.
        inputs: what a sample is.
        classes: names of classes or targets.
    """
    from scipy import stats  # noqa: PLC0415  takes a second, and few need it

    weight, bias, covariance = (tensors[name].double() for name in ("head.weight", "head.bias", "covariance"))
    entering = [*terms(inputs, weight.shape[1]), Term("constant")]
    rows, first = torch.cat([weight, bias[:, None]], 1), 1 if family == "logistic" else 0
    samples, found = int(tensors["samples"]), []
    # what makes coefficients of columns in their own units of those of columns as they enter: (P, P)
    own = torch.diag(torch.tensor([1 / term.scale for term in entering], dtype=torch.float64))
    own[-1, :-1] = torch.tensor([-term.centre / term.scale for term in entering[:-1]], dtype=torch.float64)
    scales = [(0.0, 1.0)] * len(rows)  # mean and standard deviation of each target
    if isinstance(task, Regression) and family == "linear":
        scales = list(zip(*(one * len(rows) if len(one) == 1 else one for one in (task.mean, task.std)), strict=True))
    for k, row in enumerate(rows[first:]):
        start = k * len(entering) if family == "logistic" else 0
        of = covariance[0 if family == "logistic" else k][start : start + len(entering), start : start + len(entering)]
        known = of.diagonal() > 0
        mean, std = scales[k + first]
        estimates = std * (own @ row)
        estimates[-1] += mean
        errors = std * (own @ of @ own.T).diagonal().clamp(min=0).sqrt()
        spread = stats.t(samples - int(known.sum())) if family == "linear" else stats.norm()
        for term, estimate, error, there in zip(entering, estimates.tolist(), errors.tolist(), known, strict=True):
            if not there and term.name.endswith(OTHER):
                continue  # every category is known
            if family == "cox" and term is entering[-1]:
                continue  # each client has its own hazard
            found.append(_coefficient(classes[k + first], term.name, estimate, error if there else 0.0, spread))
    return tuple(found)


def _coefficient(output: str, column: str, estimate: float, error: float, spread: Any) -> Coefficient:
    if not error:
        return Coefficient(output, column, *[None] * 6)
    reach = float(spread.ppf((1 + _LEVEL) / 2)) * error
    statistic = estimate / error
    p = 2 * float(spread.sf(abs(statistic)))
    return Coefficient(output, column, estimate, error, statistic, p, estimate - reach, estimate + reach)
