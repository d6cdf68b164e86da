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

from ekiden.base.errors import UserError
from ekiden.results.regressions import baseline, hazard_counts

Family = Literal["logistic", "linear", "poisson", "cox"]
CONSTANT = "constant"
_UNIT = 2.0**28  # the whole number that stands for 1 in sums
_MOST = 2.0**62
_ROWS = 8192  # samples that are multiplied together
_DEPENDENT = 1e-9  # least eigenvalue of a correlation matrix that can be inverted
_CONVERGED = 1e-10  # largest squared last step, in standard errors
_FEWEST = 5  # events that the baseline hazard rests on between two times
_SHOWN = 5  # columns in a message
_NONE = -(2**62)  # the likelihood before the first step
_EQUAL = 2**10  # difference of two likelihoods that may be due to rounding


@dataclass(frozen=True, eq=False)
class Derivatives:
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
        shapes = [tuple(t.shape) for t in self._tensors()]
        size = self.gradient.shape[-1] if self.gradient.ndim == 2 else 0
        count, times = len(self.gradient), self.hazard.shape[-1] if self.hazard.ndim == 2 else 0
        if shapes != [(count, size), (count, size * (size + 1) // 2), (count,), (2, times)]:
            raise UserError(
                f"sums of shapes {shapes} do not fit together: use one version of Ekiden everywhere"
            )
        if {t.dtype for t in self._tensors()} != {torch.int64} or self.samples < 0:
            raise UserError("sums must be whole numbers: use one version of Ekiden everywhere")

    def plus(self, other: "Derivatives") -> Self:
        """Return the sums over the samples of both."""
        if [t.shape for t in self._tensors()] != [t.shape for t in other._tensors()]:
            raise UserError(
                "sums of other coefficients cannot be combined: use the same data schema everywhere"
            )
        mine, others = self._tensors(), other._tensors()
        first, second, third, last = (
            _bounded(a.double() + b, a + b) for a, b in zip(mine, others, strict=True)
        )
        likelihood, samples = self.likelihood + other.likelihood, self.samples + other.samples
        return type(self)(first, second, third, last, likelihood, samples)

    def real(self) -> tuple[Tensor, Tensor]:
        """Return the gradient (G, S) and the Hessian (G, S, S), float64 on the CPU."""
        gradient, packed = self.gradient.cpu().double() / _UNIT, self.hessian.cpu().double() / _UNIT
        size = gradient.shape[1]
        full = torch.zeros(len(gradient), size, size, dtype=torch.float64)
        rows, columns = torch.triu_indices(size, size)
        full[:, rows, columns] = packed
        full[:, columns, rows] = packed
        return gradient, full

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gradient, self.hessian, self.squares, self.hazard


class Coefficients(NamedTuple):
    """Where the next derivatives are taken."""

    values: Tensor  # (G, S) float64
    step: Tensor  # (G, S) float64, the last step
    likelihood: int  # before that step, in units of 2^-28


class Solution(NamedTuple):
    """What follows from the last totals."""

    values: Tensor  # (G, S) float64
    covariance: Tensor  # (G, S, S) float64, of the estimates; 0 for coefficients that no sample has
    # (T,) float64, for Cox regression the cumulative hazard at the times where the linear
    # predictor, its constant
    # included, is 0; 0 at times after fewer than 5 events
    hazard: Tensor


def groups(family: Family, outputs: int) -> tuple[int, int]:
    """Return G, and how many coefficients of one column are in a group, for a network with this
    number of outputs.
    """
    return (1, outputs - 1) if family == "logistic" else (outputs, 1)


def derivatives(
    family: Family, x: Tensor, y: Tensor, values: Tensor, times: Sequence[float] = ()
) -> Derivatives:
    """Return a client's sums at the given coefficients.

    Args:
        family: which regression.
        x: (n, P) what enters it, 1 for the constant included.
        y: (n,) classes, or (n, K) numbers; for Cox regression (n, 2) time and event.
        values: (G, S) coefficients; for classes S = (K - 1)P, class by class from the second on.
        times: for Cox regression, between which events are counted.
    """
    count, width = values.shape
    rows, columns = torch.triu_indices(width, width, device=x.device)
    gradient = torch.zeros(count, width, dtype=torch.float64, device=x.device)
    hessian = torch.zeros(count, len(rows), dtype=torch.float64, device=x.device)
    squares, likelihood = torch.zeros(count, dtype=torch.float64, device=x.device), 0.0
    of_block = {"logistic": _classes, "cox": _times}.get(family, _numbers)
    size = max(len(x), 1) if family == "cox" else _ROWS  # who is at risk together stays together
    for block, of in zip(torch.split(x.double(), size), torch.split(y, size), strict=True):
        parts = of_block(family, block, of, values.to(x.device))
        gradient += parts[0]
        hessian += parts[1][:, rows, columns]
        squares += parts[2]
        likelihood += parts[3]
    hazard = torch.zeros(2, len(times), dtype=torch.float64, device=x.device)
    if times and len(x):
        risk = x[:, :-1].double() @ values[0, :-1].to(x.device)
        hazard = torch.from_numpy(
            np.stack(hazard_counts(y.cpu().numpy(), risk.cpu().numpy(), times))
        ).to(x.device)
    gradient, hessian, squares, hazard, total = (
        _bounded(part * _UNIT, (part * _UNIT).round().long())
        for part in (
            gradient,
            hessian,
            squares,
            hazard,
            torch.tensor(likelihood, dtype=torch.float64),
        )
    )
    return Derivatives(gradient, hessian, squares, hazard, int(total), len(x))


def _classes(
    family: Family, x: Tensor, y: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return gradient, Hessian, nothing, log-likelihood of logistic regression, binary or
    multinomial.
    """
    width = x.shape[1]
    logs = F.pad(x @ values.view(-1, width).T, (1, 0)).log_softmax(1)
    p = logs.exp()[:, 1:]
    rest = F.one_hot(y, logs.shape[1])[:, 1:] - p
    others = p.shape[1]
    hessian = torch.empty(others, width, others, width, dtype=torch.float64, device=x.device)
    for a in range(others):
        for b in range(a, others):
            block = x.T @ (((p[:, a] if a == b else 0.0) - p[:, a] * p[:, b])[:, None] * x)
            hessian[a, :, b], hessian[b, :, a] = block, block.T
    size = others * width
    found = float(logs.gather(1, y[:, None]).sum())
    return (rest.T @ x).view(1, -1), hessian.view(1, size, size), torch.zeros(1).to(x), found


def _numbers(
    family: Family, x: Tensor, y: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return gradient, Hessian, Σ y² and log-likelihood of linear or Poisson regression of each
    target.
    """
    eta, y = x @ values.T, y.double()
    mean = eta if family == "linear" else eta.exp()
    likelihood = -(y - eta).square() / 2 if family == "linear" else y * eta - mean
    weights = torch.ones_like(mean) if family == "linear" else mean
    hessian = torch.stack([x.T @ (w[:, None] * x) for w in weights.T])
    return (y - mean).T @ x, hessian, y.square().sum(0), float(likelihood.sum())


def _times(
    family: Family, x: Tensor, y: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return gradient, Hessian, Σ t exp(η) and log-likelihood of Cox regression of one silo, with
    Efron's ties.

    The constant has no part in the likelihood. In its place the gradient has the number of events.

    David Cox: Regression models and life-tables. Journal of the Royal Statistical Society B, 1972.
    Bradley Efron: The efficiency of Cox's likelihood function for censored data. JASA, 1977.
    """
    order = y[:, 0].argsort(descending=True, stable=True)
    x, time, event = x[order, :-1], y[order, 0], y[order, 1]
    gradient, hessian = (
        torch.zeros(1, x.shape[1] + 1).to(x),
        torch.zeros(1, x.shape[1] + 1, x.shape[1] + 1).to(x),
    )
    if not len(x):
        return gradient, hessian, torch.zeros(1).to(x), 0.0
    eta = x @ values[0, :-1]
    w = (eta - eta.max()).exp()
    wx = w[:, None] * x
    times, place = torch.unique_consecutive(time, return_inverse=True)  # descending
    last = torch.bincount(place).cumsum(0) - 1  # of those who are at risk at a time
    of_time = torch.zeros(len(times), 2 + x.shape[1]).to(x)
    of_time.index_add_(
        0, place, torch.cat([torch.ones_like(time)[:, None], w[:, None], wx], 1) * event[:, None]
    )
    deaths, dying, dying_x = of_time[:, 0], of_time[:, 1], of_time[:, 2:]
    who = event > 0
    at = place[who]  # for each event from here on
    left = (event.cumsum(0)[who] - deaths.cumsum(0)[at] + deaths[at] - 1) / deaths[
        at
    ]  # share that has gone
    at_risk = w.cumsum(0)[last][at] - left * dying[at]
    means = (wx.cumsum(0)[last][at] - left[:, None] * dying_x[at]) / at_risk[:, None]
    hazard, tied = (
        torch.zeros_like(dying).index_add(0, at, part / at_risk)
        for part in (torch.ones_like(left), left)
    )
    expected = w * (hazard.flip(0).cumsum(0).flip(0)[place] - event * tied[place])
    gradient[0, :-1], gradient[0, -1] = x.T @ (event - expected), event.sum()
    hessian[0, :-1, :-1] = x.T @ (expected[:, None] * x) - means.T @ means
    found = event @ (eta - eta.max()) - at_risk.log().sum()
    return gradient, hessian, (time @ eta.exp())[None], float(found)


def _bounded(found: Tensor, whole: Tensor) -> Tensor:
    """Return whole numbers, or refuse them if they had no room."""
    if not bool((found.abs() < _MOST).all()):  # also where one is NaN
        raise UserError(
            "the sums of a regression have no room: a value is too far from the others, or columns "
            "separate "
            "the samples without error; look at the largest values of the columns"
        )
    return whole


def start(family: Family, outputs: int, width: int) -> Coefficients:
    """Return the coefficients 0, for P = `width` numbers that enter."""
    count, each = groups(family, outputs)
    zeros = torch.zeros(count, each * width, dtype=torch.float64)
    return Coefficients(zeros, zeros, _NONE)


def improved(
    family: Family, before: Coefficients, totals: Derivatives, names: list[str]
) -> Coefficients:
    """Return the coefficients after Newton's step; after half of the last step if that made the
    likelihood smaller.

    The first totals also tell the step from the best constants, which is taken instead: it is the
    nearer start.
    """
    if totals.likelihood < before.likelihood - _EQUAL:
        half = before.step / 2
        return Coefficients(before.values - half, half, before.likelihood)
    gradient, hessian, values = *totals.real(), before.values
    if family == "cox":
        gradient[:, -1] = 0  # events
    elif before.likelihood == _NONE:
        values, gradient, hessian = _from_constants(
            family, gradient, hessian, totals.samples, len(names)
        )
    step = (_inverse(hessian, names, first=True) @ gradient[:, :, None])[:, :, 0]
    return Coefficients(values + step, values + step - before.values, totals.likelihood)


def solved(family: Family, before: Coefficients, totals: Derivatives, names: list[str]) -> Solution:
    """Return the estimates and their covariances after the last lap."""
    gradient, hessian = totals.real()
    events = gradient[:, -1].clone()
    if family == "cox":
        gradient[:, -1] = 0
    inverse = _inverse(hessian, names, first=family == "linear")
    step = (inverse @ gradient[:, :, None])[:, :, 0]
    values = before.values + step
    if family == "linear":
        free = totals.samples - int((hessian.diagonal(dim1=1, dim2=2)[0] > 0).sum())
        if free < 1:
            raise UserError(
                f"{totals.samples} samples are too few for {len(names)} coefficients: leave "
                "columns out"
            )
        rest = totals.squares.cpu().double() / _UNIT - (gradient * step).sum(1)
        return Solution(values, inverse * (rest.clamp(min=0) / free)[:, None, None], torch.zeros(0))
    left = float((step * gradient).sum(1).max())
    if totals.likelihood < before.likelihood - _EQUAL or not left < _CONVERGED:
        moved = (
            (step.abs() / inverse.diagonal(dim1=1, dim2=2).sqrt().clamp(min=1e-30))
            .view(-1, len(names))
            .amax(0)
        )
        names, moved = (
            [name for name in names if name != CONSTANT],
            moved[[name != CONSTANT for name in names]],
        )
        furthest = names[int(moved.argmax())] if names else CONSTANT
        raise UserError(
            "the regression did not converge: give more --laps; if that does not help, "
            f"{furthest!r} "
            "and other columns separate the samples without error: leave it out, or join rare "
            "categories"
        )
    hazard = torch.zeros(0)
    if (
        family == "cox"
    ):  # so that events are expected as often as they occur, if the hazard is constant
        values[:, -1] = (events / (totals.squares.cpu().double() / _UNIT)).log()
        count, exposure = (totals.hazard.cpu().double() / _UNIT).numpy()
        hazard = torch.from_numpy(baseline(count, exposure, _FEWEST)) / values[0, -1].exp()
        if len(hazard) and not hazard.any():
            raise UserError(
                f"fewer than {_FEWEST} events up to the last of the times: give later --times"
            )
    return Solution(values, inverse, hazard)


def _from_constants(
    family: Family, gradient: Tensor, hessian: Tensor, samples: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best constants, and gradient and Hessian there, from those where all coefficients
    are 0.
    """
    values = torch.zeros_like(gradient)
    if family == "poisson":
        squares = hessian
        counts = gradient[:, -1:] + samples
        if not bool((counts > 0).all()):
            raise UserError("a target of Poisson regression is 0 in all samples: leave it out")
        values[:, -1:] = (counts / samples).log()
        return (
            values,
            gradient + (1 - counts / samples) * squares[:, -1],
            counts[:, :, None] / samples * squares,
        )
    classes = gradient.shape[1] // width + 1
    share = 1 / classes
    squares = hessian[0, :width, :width] / (share * (1 - share))  # Σ xxᵀ
    sums = (
        gradient.view(-1, width) + share * squares[-1]
    )  # Σ x over the samples of each class but the first
    p = sums[:, -1] / samples
    first = 1 - float(p.sum())
    if first < 0.5 / samples or float(p.min()) < 0.5 / samples:
        raise UserError(
            "a class has no training samples: leave it out, as no regression can tell its "
            "coefficients"
        )
    constants = torch.zeros_like(sums)
    constants[:, -1] = (p / first).log()
    curved = torch.kron(torch.diag(p) - torch.outer(p, p), squares)
    return constants.view(1, -1), (sums - p[:, None] * squares[-1]).view(1, -1), curved[None]


def _inverse(hessian: Tensor, names: list[str], *, first: bool) -> Tensor:
    """Return H⁻¹ (G, S, S), with 0 for coefficients that no sample has.

    Args:
        hessian: (G, S, S).
        names: (P,) of what enters.
        first: whether a matrix that has no inverse means dependent columns, and not that classes
            can be separated.
    """
    found = torch.zeros_like(hessian)
    for place, h in enumerate(hessian):
        used = (h.diagonal() > 0.5 / _UNIT).nonzero().flatten()
        scale = h.diagonal()[used].rsqrt()
        values, vectors = torch.linalg.eigh(h[used][:, used] * torch.outer(scale, scale))
        if float(values[0]) < _DEPENDENT:
            loads = vectors[:, 0].abs()
            columns = dict.fromkeys(
                names[int(used[k]) % len(names)] for k in (loads > 0.1 * loads.max()).nonzero()
            )
            which = ", ".join(map(repr, [*columns][:_SHOWN])) + (
                " and others" if len(columns) > _SHOWN else ""
            )
            raise UserError(
                f"columns follow from each other: {which}; leave one of them out (--drop-columns)"
                if first
                else f"columns separate the samples without error: {which}; leave one out, or join rare categories"
            )
        inverse = (vectors / values) @ vectors.T * torch.outer(scale, scale)
        found[place][used[:, None], used] = inverse
    return found
