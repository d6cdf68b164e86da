"""Differential privacy of sums of features: clipping, noise in whole numbers, and how many features it leaves room for.

The noise is a discrete Gaussian: Clément Canonne, Gautam Kamath, Thomas Steinke: The Discrete Gaussian for Differential
Privacy. NeurIPS 2020. https://arxiv.org/abs/2004.00010. For sensitivity Δ it has the Rényi divergence of a Gaussian of
the same σ: αΔ²/(2σ²) (Theorem 14). Silos can share it: Peter Kairouz, Ziyu Liu, Thomas Steinke: The Distributed
Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation. ICML 2021. https://arxiv.org/abs/2102.06387.
The sum of h shares is not quite a discrete Gaussian: its divergence differs by less than exp(-π²σ²) for each number,
with the σ of a share. `_LEAST` makes that less than 10^-1000.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.sums import LARGEST, NoisySums, measure, noisy
from ekiden.training.private import DP, Noise, Spent, check_delta, noise_for

_SHARES = (0.69, 0.3, 0.01)  # parts of 1/σ² that go to products, class sums and counts
_LEAST, _MOST = 16, 2**28
_ROOM = 0.5  # features for which the noise's largest eigenvalue is about as large as a usual one of the sums
_UNIT = LARGEST / 4  # of `clip`, for each feature
Whole = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def planned(dp: DP, samples: int, where: str) -> Spent:
    """Return what one release of a client's sums tells: a Gaussian mechanism of sensitivity 1.

    A sample is in the sums of its own silo only, so the run keeps the ε of one release.
    """
    check_delta(dp, samples, where)
    return Spent(noise_for(dp.epsilon, dp.delta, 1.0, 1), 1.0, 1)


def check_clients(dp: DP | None, clients: Sequence[object]) -> None:
    """Refuse noise that more clients share than there are."""
    if dp is not None and 0 < len(clients) < dp.honest:
        raise UserError(f"--dp honest={dp.honest} needs so many silos, and there are {len(clients)}: give fewer")


def width_for(dp: DP, samples: int) -> int:
    """Return D for so many samples of all clients, from them and from ε alone.

    The noise matrix has a norm of about 2σC²√D, and C²n/D is a usual eigenvalue of the sums.
    """
    return max(16, int((_ROOM * samples / noise_for(dp.epsilon, dp.delta, 1.0, 1)) ** (2 / 3)))


@dataclass(frozen=True)
class Release:
    """One release of a client's sums.

    The vector that one sample adds is (φφᵀ above and on the diagonal, φ in the row of its class, 1 in its count). Its
    parts have norms of at most √((C⁴ + C²·127²)/2), C and 1, where C bounds ‖φ‖. Each has noise of its own, and the
    three Rényi divergences add up to that of `spent`.
    """

    dp: DP  # the promise
    spent: Spent  # what the release tells
    noise: Noise  # the client's random numbers

    def deviations(self, width: int) -> tuple[int, int, int]:
        """Return the standard deviations of one client's noise for products, class sums and counts."""
        square = bound(self.dp, width)
        each = (math.sqrt(square * (square + min(square, LARGEST**2)) / 2), math.sqrt(square), 1.0)
        found = [
            math.ceil(self.spent.noise * norm / math.sqrt(share * self.dp.honest))
            for norm, share in zip(each, _SHARES, strict=True)
        ]
        if max(found) > _MOST:
            raise UserError(f"--dp epsilon={self.dp.epsilon:g} needs too much noise for {width} features: lower clip")
        return max(found[0], _LEAST), max(found[1], _LEAST), max(found[2], _LEAST)

    def sums(
        self, blocks: Iterable[tuple[Tensor, Tensor]], classes: int, width: int, device: torch.device
    ) -> NoisySums:
        """Return noisy sums of centred and clipped features (b, D), which are whole numbers, with labels (b,)."""
        square = bound(self.dp, width)
        clipped: Iterator[tuple[Tensor, Tensor]] = ((centred_clipped(phi, square), y) for phi, y in blocks)
        draw = Draw(self.noise)
        return noisy(measure(clipped, classes, width, device), self.deviations(width), draw.gaussian)


def bound(dp: DP, width: int) -> int:
    """Return C², the largest square of a norm; a whole number."""
    return max(1, math.floor((dp.clip * _UNIT) ** 2 * width))


def centred_clipped(phi: Tensor, square: int) -> Tensor:
    """Return whole numbers (b, D): each row minus its mean, with a squared norm of at most `square`.

    A row that is longer is shortened and rounded; if rounding makes it too long again, it is cut off towards 0.
    """
    u = phi.double()
    u = (u - u.mean(1, keepdim=True).round()).clamp(-LARGEST, LARGEST)
    squares = u.square().sum(1, keepdim=True)  # whole numbers below 2^53
    aim = max(square - phi.shape[1] / 8, square / 2)  # rounding adds D/12 to a square
    short = u * (aim / squares.clamp(min=1)).sqrt()
    shortened = torch.where(short.round().square().sum(1, keepdim=True) <= square, short.round(), short.trunc())
    return torch.where(squares <= square, u, shortened)


@dataclass
class Draw:
    """Exact draws of whole numbers: only whole numbers are computed with, and no random bit is used twice."""

    noise: Noise  # where the random bits come from
    _place: int = field(default=0)

    def gaussian(self, sigma: int, count: int) -> Tensor:
        """Return (count,) int64 of the discrete Gaussian, σ from 1 to 2^28 (Algorithm 3, with t = σ)."""
        if not 1 <= sigma <= _MOST:
            raise ValueError(f"σ = {sigma} is not from 1 to {_MOST}")
        kept: list[Whole] = []
        while (missing := count - sum(map(len, kept))) > 0:
            y = self._laplace(sigma, 2 * missing + 16)
            whole, rest = np.divmod(np.abs(np.abs(y) - sigma), sigma)
            # γ = (|y| - σ)²/(2σ²), with |y| - σ = whole·σ + rest, as a whole number and a part of 2σ²
            part = (whole**2 % 2) * sigma**2 + (2 * whole * rest % (2 * sigma)) * sigma + rest**2
            ones = whole**2 // 2 + 2 * whole * rest // (2 * sigma) + part // (2 * sigma**2)
            kept.append(y[self._exp(ones, part % (2 * sigma**2), 2 * sigma**2)][:missing])
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *kept]))

    def _laplace(self, scale: int, count: int) -> Whole:
        """Return up to `count` numbers of the discrete Laplace distribution (Algorithm 2, with s = 1)."""
        u = self._below(scale, count)
        u = u[self._exp(np.zeros_like(u), u, scale)]
        times = np.zeros_like(u)
        going = np.arange(len(u))
        while len(going):
            more = self._exp(np.ones(len(going), np.int64), np.zeros(len(going), np.int64), 1)
            going = going[more]
            times[going] += 1
        negative = self._below(2, len(u)) == 1
        y: Whole = (u + scale * times) * (1 - 2 * negative)
        found: Whole = y[~(negative & (y == 0))]
        return found

    def _exp(self, ones: Whole, part: Whole, of: int) -> Flags:
        """Return True with probability exp(-(ones + part/of)), for each (Algorithm 1)."""
        found = self._exp_of_part(part, of)
        left = np.where(found, ones, 0)
        while len(going := np.flatnonzero(left)):
            went_on = self._exp_of_part(np.ones(len(going), np.int64), 1)
            found[going] &= went_on
            left[going] = np.where(went_on, left[going] - 1, 0)
        return found

    def _exp_of_part(self, part: Whole, of: int) -> Flags:
        """Return True with probability exp(-part/of), for each; part/of is at most 1."""
        odd = np.ones(len(part), np.bool_)  # K, the first of 1, 2, ... whose event of probability γ/K fails
        going, k = np.arange(len(part)), 1
        while len(going):
            goes_on = self._below(of, len(going)) < part[going]
            if k > 1:
                goes_on &= self._below(k, len(going)) == 0
            going, k = going[goes_on], k + 1
            odd[going] = k % 2 == 1
        return odd

    def _below(self, limit: int, count: int) -> Whole:
        """Return (count,) uniform numbers from 0 to `limit` - 1."""
        most = np.uint64(2**64 // limit * limit - 1)  # above it, remainders are not equally likely
        kept: list[Whole] = []
        while (missing := count - sum(map(len, kept))) > 0:
            self._place += 1
            words = self.noise.bits("whole numbers", self._place, missing)
            kept.append((words[words <= most] % np.uint64(limit)).astype(np.int64))
        return np.concatenate([np.zeros(0, np.int64), *kept])
