"""What noise tells, and how much of it a promise needs.

Two data sets are neighbours if one has one training sample more. Numbers of samples are not secret.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ekiden.core.base.errors import UserError

Values = np.ndarray[Any, np.dtype[np.float64]]

_ORDERS = np.array(
    [
        1.05,
        1.1,
        1.2,
        1.35,
        *(quarters / 4 for quarters in range(6, 32)),
        *range(8, 24),
        *range(24, 64, 4),
        64,
        128,
        256,
        512,
    ]
)
"""α, orders of the Rényi divergence"""
_LEAST_NOISE = 0.2
_MOST_NOISE = 1e5
_FAR = (
    200.0  # standard deviations to which integrals go; orders whose peak lies beyond are left out
)


@dataclass(frozen=True)
class Spent:
    """What training tells: `steps` of Poisson samples at a `rate`, with Gaussian `noise` of that
    many C.
    """

    noise: float
    rate: float
    steps: int

    def epsilon(self, delta: float) -> float:
        """Return ε at δ."""
        return composed([self], delta)


def composed(parts: Sequence[Spent], delta: float) -> float:
    """Return ε at δ of all `parts` together, by their Rényi divergences; exactly if all q = 1.

    Ilya Mironov, Kunal Talwar, Li Zhang: Rényi Differential Privacy of the Sampled Gaussian
    Mechanism. 2019. https://arxiv.org/abs/1908.10530. From Rényi to (ε, δ): Clément Canonne, Gautam
    Kamath, Thomas Steinke: The Discrete Gaussian for Differential Privacy. NeurIPS 2020,
    Proposition 12. https://arxiv.org/abs/2004.00010.
    """
    parts = [part for part in parts if part.steps]
    if not parts:
        return 0.0
    if any(part.noise == 0 for part in parts):
        return math.inf
    each = [part.steps * _renyi(part.noise, part.rate) for part in parts]
    bounded = epsilon_of_renyi(np.sum(each, axis=0), delta)
    if any(part.rate < 1 for part in parts):
        return bounded
    return min(
        bounded,
        epsilon_of_gaussian(math.sqrt(sum(part.steps / part.noise**2 for part in parts)), delta),
    )


def epsilon_of_gaussian(ratio: float, delta: float) -> float:
    """Return ε at δ of Gaussian noise, given `ratio` μ = Δ/σ: δ = Φ(μ/2 - ε/μ) - exp(ε)·Φ(-μ/2 -
    ε/μ), rounded up.

    Borja Balle, Yu-Xiang Wang: Improving the Gaussian Mechanism for Differential Privacy. ICML
    2018, Theorem 8. https://arxiv.org/abs/1805.06530. Several releases, each chosen after the
    others, are as one with μ² = Σ μ_i²: Jinshuo Dong, Aaron Roth, Weijie Su: Gaussian Differential
    Privacy. Journal of the Royal Statistical Society B,
    2022. https://arxiv.org/abs/1905.02383.
    """

    def tells_more(epsilon: float) -> bool:
        near, far = torch.special.log_ndtr(
            torch.tensor(
                [ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio], dtype=torch.float64
            )
        ).tolist()
        rest = min(epsilon + far - near, 0.0)
        return bool(rest < 0 and near + math.log(-math.expm1(rest)) > math.log(delta))

    if not tells_more(0):
        return 0.0
    low = 0.0
    # above it Φ(μ/2 - ε/μ) is less than δ
    high = ratio * (ratio / 2 + math.sqrt(-2 * math.log(delta)))
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if tells_more(middle):
            low = middle
        else:
            high = middle
    return high


def epsilon_of_renyi(renyi: Values, delta: float) -> float:
    """Return ε at δ of a mechanism with this Rényi divergence at each of the orders."""
    a = _ORDERS
    found: Values = renyi + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(found.min()))


def _renyi(noise: float, rate: float) -> Values:
    """Return the Rényi divergence of one step at each order α: log E_z[(1 - q + q·exp((2z -
    1)/2σ²))^α] / (α - 1).

    The expectation over z ~ N(0, σ²) is a sum over a grid, whose error for an analytic integrand is
    below that of floating point.
    """
    if rate == 1:
        gaussian: Values = _ORDERS / (2 * noise**2)
        return gaussian
    found = np.full(len(_ORDERS), np.inf)
    near = _ORDERS / noise < _FAR
    a = _ORDERS[near, None]
    end = 14 + float(a.max(initial=0)) / noise
    # in units of σ; the peaks are at 0 and at α/σ
    z = np.linspace(-14, end, int(6 * (14 + end)))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + z / noise - 0.5 / noise**2)
    logs = a * ratio - z**2 / 2
    top = logs.max(1, keepdims=True)
    moments = top[:, 0] + np.log(np.exp(logs - top).sum(1) * (z[1] - z[0]) / math.sqrt(2 * math.pi))
    found[near] = np.maximum(moments, 0) / (a[:, 0] - 1)
    return found


@lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the least noise multiplier σ with which `steps` keep (ε, δ)."""
    if steps == 0:
        return 0.0
    low = math.log(_LEAST_NOISE)
    high = math.log(_MOST_NOISE)
    if Spent(_MOST_NOISE, rate, steps).epsilon(delta) > epsilon:
        raise UserError(
            f"--dp epsilon={epsilon:g} cannot be kept in {steps} steps: give a larger epsilon"
        )
    while high - low > 1e-3:
        middle = (low + high) / 2
        if Spent(math.exp(middle), rate, steps).epsilon(delta) <= epsilon:
            high = middle
        else:
            low = middle
    return math.exp(high)
