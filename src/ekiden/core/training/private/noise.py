"""Random numbers that nobody can foretell without their key, and exact draws of noise from them.

The noise of sums is a discrete Gaussian: Clément Canonne, Gautam Kamath, Thomas Steinke: The
Discrete Gaussian for Differential Privacy. NeurIPS 2020. https://arxiv.org/abs/2004.00010. It tells
no more than a Gaussian with a variance that is smaller by `ROUNDED` = 3. For if a sum with Gaussian
noise of variance s² is rounded at random, to a whole number at the distance d with a probability in
proportion to exp(-d²/6), the result is the sum with discrete Gaussian noise of variance s² + 3, up
to a factor of 1 ± 10^-24 for each number (Chris Peikert: An Efficient and Parallel Gaussian Sampler
for Lattices. CRYPTO 2010, Theorem 3.1). Silos can share the noise: Peter Kairouz, Ziyu Liu, Thomas
Steinke: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation.
ICML 2021. https://arxiv.org/abs/2102.06387. The sum of h shares is not quite a discrete Gaussian:
its divergence differs by less than exp(-π²σ²) for each number, with the σ of a share. `LEAST` makes
that less than 10^-1000.
"""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.core.training.private.accountant import Values

Whole = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

ROUNDED = 3  # what is taken from a discrete Gaussian's variance to compare it with a Gaussian
LEAST = 16
MOST = 2**28


@dataclass(frozen=True)
class Noise:
    """A stream of random numbers that nobody can foretell without its key: SHAKE-256 of key,
    purpose and place.

    PyTorch's generators do not suffice: their state follows from a few thousand outputs.
    """

    key: bytes  # 32 bytes

    def words(self, purpose: str, place: int, count: int) -> Values:
        """Return (count,) numbers, uniform on the multiples of 2^-53 in [0, 1)."""
        found: Values = (self.bits(purpose, place, count) >> np.uint64(11)).astype(np.float64)
        return found * 2.0**-53

    def bits(self, purpose: str, place: int, count: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """Return (count,) words of 64 random bits."""
        return np.frombuffer(
            hashlib.shake_256(self.key + f"{purpose} {place}".encode()).digest(8 * count), "<u8"
        )

    def normal(self, place: int, count: int) -> Values:
        """Return (count,) standard normal numbers (Box and Muller)."""
        half = -(-count // 2)
        u = self.words("normal", place, 2 * half)
        radius = np.sqrt(-2 * np.log1p(-u[:half]))
        angle = 2 * math.pi * u[half:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def chosen(self, place: int, samples: int, rate: float) -> Tensor:
        """Return the positions of a Poisson sample: each of `samples` with probability `rate`."""
        return torch.from_numpy(np.flatnonzero(self.words("sample", place, samples) < rate))

    def seed(self, place: int) -> int:
        """Return a 63-bit seed for what need not be foretold by nobody alone, such as
        augmentation.
        """
        return int(self.words("seed", place, 1)[0] * 2**53)


@dataclass
class Draw:
    """Exact draws of whole numbers: only whole numbers are computed with, and no random bit is used
    twice.
    """

    noise: Noise  # where the random bits come from
    _place: int = field(default=0)

    def gaussian(self, sigma: int, count: int) -> Tensor:
        """Return (count,) int64 of the discrete Gaussian, σ from 1 to 2^28 (Algorithm 3, with t =
        σ).
        """
        if not 1 <= sigma <= MOST:
            raise ValueError(f"σ = {sigma} is not from 1 to {MOST}")
        kept: list[Whole] = []
        while (missing := count - sum(map(len, kept))) > 0:
            y = self._laplace(sigma, 2 * missing + 16)
            whole, rest = np.divmod(np.abs(np.abs(y) - sigma), sigma)
            # γ = (|y| - σ)²/(2σ²), with |y| - σ = whole·σ + rest, as a whole number and a part of
            # 2σ²
            part = (whole**2 % 2) * sigma**2 + (2 * whole * rest % (2 * sigma)) * sigma + rest**2
            ones = whole**2 // 2 + 2 * whole * rest // (2 * sigma) + part // (2 * sigma**2)
            kept.append(y[self._exp(ones, part % (2 * sigma**2), 2 * sigma**2)][:missing])
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *kept]))

    def _laplace(self, scale: int, count: int) -> Whole:
        """Return up to `count` numbers of the discrete Laplace distribution (Algorithm 2, with s =
        1).
        """
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
        # K, the first of 1, 2, ... whose event of probability γ/K fails
        odd = np.ones(len(part), np.bool_)
        going = np.arange(len(part))
        k = 1
        while len(going):
            goes_on = self._below(of, len(going)) < part[going]
            if k > 1:
                goes_on &= self._below(k, len(going)) == 0
            going = going[goes_on]
            k = k + 1
            odd[going] = k % 2 == 1
        return odd

    def _below(self, limit: int, count: int) -> Whole:
        """Return (count,) uniform numbers from 0 to `limit` - 1."""
        # above it, remainders are not equally likely
        most = np.uint64(2**64 // limit * limit - 1)
        kept: list[Whole] = []
        while (missing := count - sum(map(len, kept))) > 0:
            self._place += 1
            words = self.noise.bits("whole numbers", self._place, missing)
            kept.append((words[words <= most] % np.uint64(limit)).astype(np.int64))
        return np.concatenate([np.zeros(0, np.int64), *kept])
