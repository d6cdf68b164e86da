"""Derivatives of log-likelihoods as sums over samples in fixed point, and Newton's steps from their
totals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.core.base.errors import UserError, listed
from ekiden.methods.blocks.sums import WholeSums
from ekiden.methods.blocks.symmetric import numbers, symmetric, upper
from ekiden.methods.statistics.hazards import baseline, hazard_counts

Family = Literal["logistic", "linear", "poisson", "cox"]
CONSTANT = "constant"
_UNIT = 2.0**28  # the whole number that stands for 1 in sums
# Units above which a difference of sums is right to a thousandth
_RESOLVED = 1024
_MOST = 2.0**62
_ROWS = 8192  # samples that are multiplied together
# Least eigenvalue of a correlation matrix that can be inverted
_DEPENDENT = 1e-9
# largest squared last step, in standard errors: Firth's next one is up to half as long
_CONVERGED = 1e-12
# Events that the baseline hazard rests on between two times
_FEWEST = 5
_SHOWN = 5  # columns in a message
_NONE = -(2**62)  # the likelihood before the first step
# Difference of two likelihoods that may be due to rounding
_EQUAL = 2**10
# A silo's least likelihood: those of 500 silos without room have room in 64 bits
_WORST = -(2**53)
# A silo's largest exposure; a larger one has no room next to those of others
_FAR = 2.0**27
# What R's glm adds to counts, whose logarithms are the first linear predictors
_FIRST = 0.1


@dataclass(frozen=True, eq=False)
class Derivatives(WholeSums):
    """Sums over samples, in units of 2^-28. There are G groups of S coefficients; those of a group
    are correlated.
    """

    gradient: Tensor  # (G, S) int64, of the log-likelihood
    # (G, S(S + 1)/2) int64, of the negative log-likelihood, the upper triangle row by row
    hessian: Tensor
    squares: Tensor  # (G,) int64, Σ y² for linear regression, Σ t exp(η) for Cox regression
    # (2, T) int64, for Cox regression events and exposure between T times; see
    # `curves.hazard_counts`
    hazard: Tensor
    likelihood: int  # of all groups, up to a constant
    samples: int  # n

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        super().__post_init__()
        shapes = [tuple(t.shape) for t in self.tensors()]
        size = self.gradient.shape[-1] if self.gradient.ndim == 2 else 0
        count = len(self.gradient)
        times = self.hazard.shape[-1] if self.hazard.ndim == 2 else 0
        if shapes != [(count, size), (count, numbers(size)), (count,), (2, times)]:
            raise UserError(
                f"sums of shapes {shapes} do not fit together: use one version of Ekiden everywhere"
            )
        if self.samples < 0:
            raise UserError("sums of fewer than no samples: use one version of Ekiden everywhere")

    def plus(self, other: Self) -> Self:
        """Return the sums over the samples of both."""
        total = super().plus(other)
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        # in floating point, since a sum in 64 bits without room is another number, not a large one
        if not all(_fits(a.double() + b) for a, b in pairs):
            raise UserError(_NO_ROOM.format("numbers are too far from the others"))
        return total

    def real(self) -> tuple[Tensor, Tensor]:
        """Return the gradient (G, S) and the Hessian (G, S, S), float64 on the CPU."""
        gradient = self.gradient.cpu().double() / _UNIT
        return gradient, symmetric(self.hessian.cpu().double() / _UNIT)


class Formula(NamedTuple):
    """What is fitted."""

    family: Family
    names: list[str]  # (P,) of what enters, the constant last
    columns: list[str]  # (P,) of the data, from which it comes
    ridge: float = 0.0  # λ: λ/2 times the squared coefficients, without constants, is subtracted
    firth: bool = False  # half the logarithm of the information's determinant is added


class Coefficients(NamedTuple):
    """Where the next derivatives are taken."""

    values: Tensor  # (G, S) float64
    step: Tensor  # (G, S) float64, the last step; 0 once the regression has converged
    likelihood: int  # before that step, with its penalty, in units of 2^-28
    # (G, S, S) float64, of the information at these values, for Firth's penalty; 0 where it is not
    # known, else (G, 0, 0)
    inverse: Tensor

    @property
    def first(self) -> bool:
        """Whether no step was made yet."""
        return self.likelihood == _NONE

    @property
    def final(self) -> bool:
        """Whether no further step is needed."""
        return not self.first and not self.step.any()


class Solution(NamedTuple):
    """What follows from the last totals."""

    values: Tensor  # (G, S) float64
    covariance: Tensor  # (G, S, S) float64, of the estimates; 0 for coefficients that no sample has
    # (T,) float64, for Cox regression the cumulative hazard at the times where the linear
    # predictor, its constant included, is 0; 0 at times after fewer than 5 events
    hazard: Tensor


class _Parts(NamedTuple):
    """What a block of samples adds."""

    gradient: Tensor  # (G, S)
    hessian: Tensor  # (G, S, S)
    squares: Tensor  # (G,)
    likelihood: Tensor  # ()


def groups(family: Family, outputs: int) -> tuple[int, int]:
    """Return G, and how many coefficients of one column are in a group, for a network with this
    number of outputs.
    """
    return (1, outputs - 1) if family == "logistic" else (outputs, 1)


def derivatives(
    family: Family, x: Tensor, y: Tensor, at: Coefficients, times: Sequence[float] = ()
) -> Derivatives:
    """Return a client's sums at the given coefficients.

    Where they have no room, because a step went too far, there are no sums, but a likelihood that
    is worse than any. Firth's penalty adds half the gradient of the trace of inverse and Hessian:
    David Firth: Bias reduction of maximum likelihood estimates. Biometrika, 1993.
    https://doi.org/10.1093/biomet/80.1.27

    Args:
        family: which regression.
        x: (n, P) what enters it, 1 for the constant included.
        y: (n,) classes, or (n, K) numbers; for Cox regression (n, 2) time and event.
        at: the coefficients; for classes S = (K - 1)P, class by class from the second on.
        times: for Cox regression, between which events are counted.

    Raises:
        UserError: numbers are so large that no coefficients help.
    """
    count, width = at.values.shape
    firth = bool(at.inverse.any())
    values = at.values.to(x.device).detach().requires_grad_(firth)
    inverse = at.inverse.to(x.device)
    gradient = torch.zeros(count, width, dtype=torch.float64, device=x.device)
    hessian = torch.zeros(count, width, width, dtype=torch.float64, device=x.device)
    squares = torch.zeros_like(gradient[:, 0])
    likelihood = torch.zeros_like(gradient[0, 0])
    # Cox regression compares all who are at risk at a time, so they stay in one block
    size = max(len(x), 1) if family == "cox" else _ROWS
    blocks = zip(torch.split(x.double(), size), torch.split(y, size), strict=True)
    with torch.set_grad_enabled(firth):
        for block, of in blocks:
            part = _parts(family, block, of, values, first=at.first)
            gradient += part.gradient.detach()
            hessian += part.hessian.detach()
            squares += part.squares.detach()
            likelihood += part.likelihood.detach()
            if firth:
                gradient += torch.autograd.grad((inverse * part.hessian).sum() / 2, values)[0]
    hazard = torch.zeros(2, len(times), dtype=torch.float64, device=x.device)
    if times and len(x):
        slopes = at.values[0, :-1].to(x.device)
        risk = x[:, :-1].double() @ slopes
        counts = hazard_counts(y.cpu().numpy(), risk.cpu().numpy(), times)
        hazard = torch.from_numpy(np.stack(counts)).to(x.device)
    # These sums count in the last lap only, in which they are checked.
    if family == "cox":
        squares = squares.clamp(max=_FAR)
        hazard = hazard.clamp(max=_FAR)
    sums = [part * _UNIT for part in (gradient, upper(hessian), squares, hazard)]
    worth = max(float(likelihood * _UNIT), _WORST)
    if not all(map(_fits, (*sums, likelihood))):
        if at.first:
            far = float(x.abs().max())
            high = float(y.abs().max())
            raise UserError(
                _NO_ROOM.format(f"scaled columns reach {far:.3g}, the target {high:.3g}")
            )
        sums = [torch.zeros_like(part) for part in sums]
        worth = 2 * _WORST
    first, second, third, last = (part.round().long() for part in sums)
    return Derivatives(first, second, third, last, round(worth), len(x))


_NO_ROOM = "the sums of a regression have no room: {}; look at the largest values"


def _fits(sums: Tensor) -> bool:
    """Return whether sums in units of 2^-28 have room in 64 bits; NaN has not."""
    return bool((sums.abs() < _MOST).all())


def _parts(family: Family, x: Tensor, y: Tensor, values: Tensor, *, first: bool) -> _Parts:
    """Return what a block of samples adds."""
    match family:
        case "logistic":
            return _classes(x, y, values)
        case "cox":
            return _times(x, y, values)
        case "poisson":
            if first:
                return _first_counts(x, y.double())
            return _counts(x, y.double(), values)
    rest = y.double() - x @ values.T
    hessian = (x.T @ x).expand(len(values), -1, -1)
    squares = y.double().square().sum(0)
    return _Parts(rest.T @ x, hessian, squares, -rest.square().sum() / 2)


def _classes(x: Tensor, y: Tensor, values: Tensor) -> _Parts:
    """Return the parts of logistic regression, binary or multinomial."""
    width = x.shape[1]
    scores = x @ values.view(-1, width).T
    # of the first class, the reference, they are 0
    logs = F.pad(scores, (1, 0)).log_softmax(1)
    p = logs.exp()[:, 1:]
    rest = F.one_hot(y, logs.shape[1])[:, 1:] - p
    others = p.shape[1]
    hessian = torch.empty(others, width, others, width, dtype=torch.float64, device=x.device)
    for a in range(others):
        for b in range(a, others):
            weights = float(a == b) * p[:, a] - p[:, a] * p[:, b]
            block = x.T @ (weights[:, None] * x)
            hessian[a, :, b] = block
            hessian[b, :, a] = block.T
    size = others * width
    likelihood = logs.gather(1, y[:, None]).sum()
    gradient = (rest.T @ x).view(1, -1)
    return _Parts(gradient, hessian.view(1, size, size), torch.zeros(1).to(x), likelihood)


def _counts(x: Tensor, y: Tensor, values: Tensor) -> _Parts:
    """Return the parts of Poisson regression of each target; of the likelihood minus the largest
    that is possible.
    """
    eta = x @ values.T
    mean = eta.exp()
    hessian = _weighed(x, mean)
    likelihood = (y * eta - mean - torch.xlogy(y, y) + y).sum()
    return _Parts((y - mean).T @ x, hessian, torch.zeros_like(values[:, 0]), likelihood)


def _weighed(x: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w x xᵀ (K, P, P) for each column of weights (n, K)."""
    return torch.stack([x.T @ (w[:, None] * x) for w in weights.T])


def _first_counts(x: Tensor, y: Tensor) -> _Parts:
    """Return parts of which the step is the first one of R's glm: it begins at log(y + 0.1), and
    not at coefficients.

    From coefficients of 0 it would go too far where a few samples lie far from the others. No
    likelihood is worse.
    """
    weights = y + _FIRST
    hessian = _weighed(x, weights)
    gradient = (weights * weights.log() + y - weights).T @ x
    return _Parts(gradient, hessian, torch.zeros_like(gradient[:, 0]), y.new_tensor(_WORST / _UNIT))


def _times(x: Tensor, y: Tensor, values: Tensor) -> _Parts:
    """Return the parts of Cox regression of one silo, with Efron's ties.

    The constant has no part in the likelihood. In its place the gradient has the number of events.

    David Cox: Regression models and life-tables. Journal of the Royal Statistical Society B, 1972.
    Bradley Efron: The efficiency of Cox's likelihood function for censored data. JASA, 1977.
    """
    order = y[:, 0].argsort(descending=True, stable=True)
    x = x[order, :-1]
    time = y[order, 0]
    event = y[order, 1]
    width = x.shape[1]
    gradient = torch.zeros(1, width + 1).to(x)
    hessian = torch.zeros(1, width + 1, width + 1).to(x)
    if not len(x):
        nothing = hessian + 0 * values.sum()
        return _Parts(gradient, nothing, gradient[:, 0], gradient[0, 0])
    eta = x @ values[0, :-1]
    w = (eta - eta.max()).exp()
    wx = w[:, None] * x
    # times descend as the samples do, so sums over who is at risk are running sums
    times, place = torch.unique_consecutive(time, return_inverse=True)
    # the place of the last who is at risk at each time
    last = torch.bincount(place).cumsum(0) - 1
    each = torch.column_stack([torch.ones_like(time), w, wx])
    of_time = torch.zeros(len(times), 2 + width).to(x)
    of_time = of_time.index_add(0, place, each * event[:, None])
    deaths = of_time[:, 0].detach()
    dying = of_time[:, 1]
    dying_x = of_time[:, 2:]
    who = event > 0
    # From here on there is a row for each event; `at` is its time.
    at = place[who]
    # Efron: of events at one time, the share that has already left when this one occurs.
    earlier = event.cumsum(0)[who] - deaths.cumsum(0)[at] + deaths[at] - 1
    left = earlier / deaths[at]
    at_risk = w.cumsum(0)[last][at] - left * dying[at]
    totals = wx.cumsum(0)[last][at] - left[:, None] * dying_x[at]
    means = totals / at_risk[:, None]
    hazard = torch.zeros_like(dying).index_add(0, at, 1 / at_risk)
    tied = torch.zeros_like(dying).index_add(0, at, left / at_risk)
    cumulative = hazard.flip(0).cumsum(0).flip(0)
    expected = w * (cumulative[place] - event * tied[place])
    gradient[0, :-1] = x.T @ (event - expected)
    gradient[0, -1] = event.sum()
    hessian[0, :-1, :-1] = x.T @ (expected[:, None] * x) - means.T @ means
    likelihood = event @ (eta - eta.max()) - at_risk.log().sum()
    return _Parts(gradient, hessian, (time @ eta.exp())[None], likelihood)


def start(family: Family, outputs: int, width: int) -> Coefficients:
    """Return the coefficients 0, for P = `width` numbers that enter."""
    count, each = groups(family, outputs)
    zeros = torch.zeros(count, each * width, dtype=torch.float64)
    return Coefficients(zeros, zeros, _NONE, zeros.new_zeros(count, 0, 0))


class _Newton(NamedTuple):
    """A step from where totals were taken."""

    values: Tensor  # (G, S), after it
    inverse: Tensor  # (G, S, S)
    likelihood: int  # before it, with its penalty
    length: float  # squared, in standard errors


def improved(formula: Formula, before: Coefficients, totals: Derivatives) -> Coefficients:
    """Return the coefficients after Newton's step; after half of the last step if that made the
    likelihood smaller.

    The first totals also tell the step from the best constants, which is taken instead: it is the
    nearer start. Firth's penalty takes two laps a step: its gradient needs the information at the
    same coefficients.
    """
    if before.final:
        return before
    after = _step(formula, before, totals)
    if after is None:
        half = before.step / 2
        return before._replace(values=before.values - half, step=half)
    if formula.firth and not before.first and not before.inverse.any():
        return before._replace(inverse=after.inverse)
    step = after.values - before.values
    inverse = before.inverse
    if not before.first and after.length < _CONVERGED:
        step = torch.zeros_like(step)
    elif formula.firth:
        inverse = torch.zeros_like(after.inverse)
    return Coefficients(after.values, step, after.likelihood, inverse)


def solved(formula: Formula, before: Coefficients, totals: Derivatives) -> Solution:
    """Return the estimates and their covariances after the last lap."""
    gradient, hessian = totals.real()
    after = _step(formula, before, totals)
    squares = totals.squares.cpu().double() / _UNIT
    if formula.family == "linear" and after is not None:
        used = hessian[0].diagonal() > 0
        free = totals.samples - int(used.sum())
        if free < 1:
            few = f"{totals.samples} samples are too few for {len(formula.names)} coefficients"
            raise UserError(f"{few}: leave columns out")
        b = after.values
        rest = squares - (b * gradient).sum(1)
        if formula.ridge:
            explained = (hessian @ b[:, :, None])[:, :, 0]
            rest -= (b * (gradient - explained)).sum(1)
        # where there are hardly any errors, this difference of sums is rounding: report 0
        rounding = _RESOLVED / _UNIT * (1 + b.abs().sum(1))
        rest = torch.where(rest > rounding, rest, 0.0)
        covariance = after.inverse * (rest / free)[:, None, None]
        return Solution(after.values, covariance, torch.zeros(0))
    if after is None or not after.length < _CONVERGED:
        step = before.step
        far = ""
        if after is not None:
            step = after.values - before.values
            far = f" (its last step was {after.length**0.5:.2g} standard errors)"
        names = _named(formula, _leading(formula, step.abs().amax(0)))
        raise UserError(
            f"the regression has not converged{far}: go on by `ekiden resume RUN --laps` with more "
            f"laps; if that does not help, columns such as {names} separate samples without error: "
            "give --firth or --ridge=1"
        )
    values = after.values
    hazard = torch.zeros(0)
    if formula.family == "cox":
        most = max(map(float, (totals.squares.max(), *totals.hazard.flatten())))
        if most >= _FAR * _UNIT:
            raise UserError(_NO_ROOM.format("the hazards of samples differ too much"))
        # With this constant, events are expected as often as they occur if the hazard is constant.
        values[:, -1] = (gradient[:, -1] / squares).log()
        count, exposure = (totals.hazard.cpu().double() / _UNIT).numpy()
        hazard = torch.from_numpy(baseline(count, exposure, _FEWEST)) / values[0, -1].exp()
        if len(hazard) and not hazard.any():
            raise UserError(
                f"fewer than {_FEWEST} events up to the last of the times: give later --times"
            )
    return Solution(values, after.inverse, hazard)


def _step(formula: Formula, before: Coefficients, totals: Derivatives) -> _Newton | None:
    """Return Newton's step, or None if the likelihood is smaller than before the last one."""
    gradient, hessian = totals.real()
    values = before.values
    likelihood = totals.likelihood
    if formula.family == "cox":
        # here `_times` put the number of events, not a slope
        gradient[:, -1] = 0
    penalty = torch.zeros_like(values).view(len(values), -1, len(formula.names))
    penalty[:, :, :-1] = formula.ridge
    penalty = penalty.flatten(1)
    likelihood -= round(float((penalty * values**2).sum()) / 2 * _UNIT)
    if formula.firth and totals.likelihood > _WORST:
        likelihood += round(sum(map(_log_determinant, hessian)) / 2 * _UNIT)
    if likelihood < before.likelihood - _EQUAL:
        return None
    if before.first and formula.family == "logistic":
        values, gradient, hessian = _from_constants(formula, gradient, hessian, totals.samples)
    inverse = _inverse(formula, hessian, penalty, first=before.first)
    if not before.first or formula.family != "poisson":
        gradient = gradient - penalty * values
    step = (inverse @ gradient[:, :, None])[:, :, 0]
    length = float((step * gradient).sum(1).max())
    gain = (likelihood - before.likelihood) / _UNIT
    # At a maximum the next step of Newton is much smaller, and far out on a likelihood that has
    # none it is as long
    plain = not (before.first or formula.firth or formula.ridge)
    if plain and 1e-6 < length < 1e-2 and length > gain / 4:
        raise _separated(formula, _leading(formula, step.abs().amax(0)))
    return _Newton(values + step, inverse, likelihood, length)


def _log_determinant(hessian: Tensor) -> float:
    used = (hessian.diagonal() > 0.5 / _UNIT).nonzero().flatten()
    return float(torch.logdet(hessian[used][:, used]))


def _leading(formula: Formula, loads: Tensor) -> list[int]:
    """Return the places (below P) of the largest of some numbers (S,)."""
    large = (loads > 0.1 * loads.max()).nonzero().flatten()
    found = {k % len(formula.names) for k in large.tolist()}
    # name the constant only if there is nothing else to name
    return sorted(found - {len(formula.names) - 1}) or sorted(found)


def _separated(formula: Formula, places: Sequence[int]) -> UserError:
    """Return the error for what enters at these places."""
    return UserError(
        "a regression has no estimates where columns separate samples without error: "
        f"{_named(formula, places)}; give --firth or --ridge=1, leave them out "
        f"(--drop-columns={_sources(formula, places)}), or join rare categories"
    )


def _sources(formula: Formula, places: Sequence[int]) -> list[str]:
    """Return the columns of the data, from which come what enters at these places."""
    return list(dict.fromkeys(formula.columns[k] for k in places))


def _named(formula: Formula, places: Sequence[int]) -> str:
    return listed((repr(formula.names[k]) for k in places), _SHOWN)


def _from_constants(
    formula: Formula, gradient: Tensor, hessian: Tensor, samples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best constants of classes, and gradient and Hessian there, from those where all
    coefficients are 0.
    """
    width = len(formula.names)
    values = torch.zeros_like(gradient)
    share = 1 / (gradient.shape[1] // width + 1)
    # Σ xxᵀ
    squares = hessian[0, :width, :width] / (share * (1 - share))
    # Σ x over the samples of each class but the first
    sums = gradient.view(-1, width) + share * squares[-1]
    p = sums[:, -1] / samples
    first = 1 - float(p.sum())
    if first < 0.5 / samples or float(p.min()) < 0.5 / samples:
        raise UserError(
            "a class has no training samples: leave it out, as no regression can tell its "
            "coefficients"
        )
    if not (formula.firth or formula.ridge):
        # called for its error: it refuses dependent columns
        _inverse(formula, squares[None], squares.new_zeros(1, width), first=True)
        _refuse_empty_cells(formula, torch.cat([squares[-1:] - sums.sum(0), sums]), squares)
    constants = values.view(-1, width)
    constants[:, -1] = (p / first).log()
    curved = torch.kron(torch.diag(p) - torch.outer(p, p), squares)
    slopes = sums - p[:, None] * squares[-1]
    return values, slopes.view(1, -1), curved[None]


def _refuse_empty_cells(formula: Formula, sums: Tensor, squares: Tensor) -> None:
    """Refuse indicators that no sample of a class has, or all samples of a class: their estimates
    are infinite.

    Args:
        formula: what is fitted.
        sums: (K, P) over the samples of each class.
        squares: (P, P) Σ xxᵀ.
    """
    total = squares[-1]
    n = squares[-1, -1]
    # x = x² for 0 and 1
    varies = (squares.diagonal() - total).abs() < 0.5
    varies &= (total > 0.5) & (total < n - 0.5)
    empty = ((sums < 0.5) | (sums > sums[:, -1:] - 0.5)).any(0)
    if (varies & empty).any():
        raise _separated(formula, (varies & empty).nonzero().flatten().tolist())


def _inverse(formula: Formula, hessian: Tensor, penalty: Tensor, *, first: bool) -> Tensor:
    """Return the inverse (G, S, S) of H and its penalty (G, S), with 0 for coefficients that no
    sample has.

    A matrix that has no inverse means dependent columns if it is the `first`, and else that classes
    can be separated.
    """
    found = torch.zeros_like(hessian)
    for place, h in enumerate(hessian):
        used = (h.diagonal() > 0.5 / _UNIT).nonzero().flatten()
        h = h + torch.diag(penalty[place])  # noqa: PLW2901
        scale = h.diagonal()[used].rsqrt()
        values, vectors = torch.linalg.eigh(h[used][:, used] * torch.outer(scale, scale))
        if float(values[0]) < _DEPENDENT:
            loads = torch.zeros_like(h[0])
            loads[used] = vectors[:, 0].abs()
            places = _leading(formula, loads)
            if not first:
                raise _separated(formula, places)
            raise UserError(
                f"columns {_named(formula, places)} are linearly dependent; leave one of them out "
                f"(one of --drop-columns={_sources(formula, places)}), or give --ridge=1"
            )
        inverse = (vectors / values) @ vectors.T * torch.outer(scale, scale)
        found[place][used[:, None], used] = inverse
    return found
