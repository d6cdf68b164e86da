"""Sums of products in few bits: each client rounds its own, and the rounded sums add up exactly."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.modular import Packed, Shared, pack, unpack

LEAST = 12
"""fewest bits of a product"""
FULL = 32
"""bits of a product that is not rounded"""
_BLOCK = 2**20  # products that are packed at a time; a multiple of 8, so that blocks end with a byte


class Rounding(NamedTuple):
    """How sums of products are rounded.

    Attributes:
        bits: b, from 12 to 31.
        unit: q; the sums become multiples of it.
    """

    bits: int
    unit: int

    @classmethod
    def within(cls, bits: int, samples: int, variance: int) -> "Rounding":
        """The finest rounding to `bits` with which `samples` samples of features with such variances have room.

        Covariances times n go up to n·`variance`, and room is for q·2^(b - 1).
        """
        return cls(bits, max(1, -(-samples * variance >> (bits - 1))))


@dataclass(frozen=True, eq=False)
class Rounded:
    """Σ φφᵀ over samples with features φ (D,): exact squares, and products that each client rounds to multiples of q.

    Products are counted in q modulo 2^b. Their sums have the same bits in any order, and a part can be subtracted
    again. `matrix` finds the multiples of q·2^b that are missing.

    Attributes:
        squares: (D,) int32, Σ φ².
        products: (⌈b·D(D - 1)/16⌉,) uint8, b bits for each product above the diagonal, row by row.
        bits: b.
        unit: q.
        parts: how many sums were rounded.
    """

    squares: Tensor
    products: Annotated[Tensor, Packed("bits")]
    bits: Annotated[int, Shared]
    unit: Annotated[int, Shared]
    parts: int

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        if not LEAST <= self.bits < FULL or not 0 < self.unit << self.bits < 2**53:
            raise UserError(f"sums of {self.bits} bits in units of {self.unit} are refused: use one version everywhere")
        if (self.squares.dtype, self.products.dtype) != (torch.int32, torch.uint8):
            raise UserError("squares must be of int32, rounded products of uint8: use one version of Ekiden everywhere")
        if self.squares.ndim != 1 or tuple(self.products.shape) != (_bytes(self.width, self.bits),):
            raise UserError("rounded sums do not fit together: use the same method and model everywhere")
        if self.parts < 0 or bool((self.squares < 0).any()):
            raise UserError("sums of squares or counts are negative: these are not the sums of any samples")

    @property
    def width(self) -> int:
        """D, the number of features."""
        return len(self.squares)

    def plus(self, other: "Rounded") -> "Rounded":
        """Return the sums over the samples of both."""
        if (self.width, self.bits, self.unit) != (other.width, other.bits, other.unit):
            raise UserError("sums that are rounded differently cannot be combined: use one --bits and one --samples")
        squares = self.squares.long() + other.squares
        if bool((squares > 2**31 - 1).any()):
            raise UserError(
                "a sum of squares does not fit into 32 bits: there are too many samples for one run; leave out "
                "clients, or some samples of the largest"
            )
        blocks = zip(self._counts(), other._counts(), strict=True)
        products = [pack(own + others, self.bits) for own, others in blocks]
        return Rounded(squares.int(), torch.cat(products), self.bits, self.unit, self.parts + other.parts)

    def matrix(self, total: Tensor, samples: int) -> Tensor:
        """(D, D) float64 Σ φφᵀ on the CPU, up to the rounding of the parts.

        n·covariance is Σ φ_i φ_j - Σφ_i Σφ_j/n, and at most the root of the product of two n·variances. All of these
        but Σ φ_i φ_j are known exactly. So only one multiple of q·2^b can be missing, unless variances are too large.

        Args:
            total: (D,) Σ φ.
            samples: n, at least 1.
        """
        sums, squares = total.cpu().double(), self.squares.cpu().double()
        period = float(self.unit << self.bits)
        largest = float((squares - sums.square() / samples).clamp(min=0).max())
        if 2 * largest + self.parts * self.unit >= period:
            raise UserError(
                f"the sums do not fit into {self.bits} bits: start a new run with --samples {samples} or more, or with "
                "more --bits"
            )
        rest = torch.cat(list(self._counts())).double() * self.unit
        above = torch.ones(self.width, self.width, dtype=torch.bool).triu(1)
        near = torch.outer(sums, sums)[above] / samples
        out = torch.zeros(self.width, self.width, dtype=torch.float64)
        out[above] = rest + ((near - rest) / period).round() * period
        return out + out.T + squares.diag()

    @property
    def error(self) -> float:
        """Standard deviation of the error of a product, if the parts' errors are independent."""
        return float(self.unit * (self.parts / 12) ** 0.5) if self.unit > 1 else 0.0

    def _counts(self) -> Iterator[Tensor]:
        """Products in units as int64 on the CPU, by blocks."""
        left = self.width * (self.width - 1) // 2
        for part in torch.split(self.products.cpu(), _BLOCK // 8 * self.bits):
            yield unpack(part, self.bits, min(left, _BLOCK))
            left -= _BLOCK


def rounded(gram: Tensor, rounding: Rounding) -> Rounded:
    """Round the upper triangle of Σ φφᵀ (D, D), float64 of whole numbers; halves are rounded up."""
    squares = gram.diagonal().cpu()
    if squares.numel() and float(squares.max()) > 2**31 - 1:
        raise UserError("a sum of squares does not fit into 32 bits: this client has too many samples; leave out some")
    bits, unit = rounding
    above = torch.ones_like(gram, dtype=torch.bool).triu(1)
    counts = (gram[above].cpu().long() + unit // 2).div(unit, rounding_mode="floor")
    packed = [pack(block, bits) for block in torch.split(counts, _BLOCK)]
    return Rounded(squares.int(), torch.cat(packed), bits, unit, 1)


def size(width: int, bits: int) -> int:
    """Return the bytes of `Rounded`: ⌈b·D(D - 1)/16⌉ + 4D + 24."""
    return _bytes(width, bits) + 4 * width + 24


def _bytes(width: int, bits: int) -> int:
    return -(-bits * (width * (width - 1) // 2) // 8)
