"""Exact sums over samples: Gram matrix and class sums of features that are small whole numbers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from ekiden.base.errors import UserError

LARGEST = 127
"""the largest absolute value of a feature"""
WIDE = 2**15 - 1
"""that of features whose sums travel as int64"""
_ROWS = 1024  # 1024 · 127² < 2^24: float32 adds up so many products without rounding, in whatever order
_STRIPE = 256  # columns of the Gram matrix that are computed together
_MOST = {torch.int32: 2**31 - 1, torch.int64: 2**53 - 1}  # float64, which adds them up, is exact up to the latter


@dataclass(frozen=True, eq=False)
class Sums:
    """What ridge regression and linear discriminant analysis need to know of n samples with features φ (D,).

    All entries are whole numbers, so that sums of sums are the same bits in any order. They travel as int32, which is
    enough for 133,144 samples whatever their features are, and for more of most. Those of wide features travel as
    int64, enough for 8,388,608 samples.

    Attributes:
        gram: (D(D + 1)/2,) int32 or int64, Σ φφᵀ, the upper triangle row by row.
        classes: (K, D) of the same type, Σ φ over the samples of each class.
        counts: (K,) int64, number of samples of each class.
    """

    gram: Tensor
    classes: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        """Check what may come from another party.

        Raises:
            UserError: the parts do not fit each other, or cannot be sums of squares and counts.
        """
        shapes = (tuple(self.gram.shape), tuple(self.classes.shape), tuple(self.counts.shape))
        width = self.classes.shape[1] if self.classes.ndim == 2 else 0
        if not width or shapes != ((width * (width + 1) // 2,), (len(self.counts), width), (len(self.classes),)):
            raise UserError(f"sums of shapes {shapes} do not fit together: use the same method and model everywhere")
        if self.gram.dtype not in _MOST or (self.classes.dtype, self.counts.dtype) != (self.gram.dtype, torch.int64):
            raise UserError("sums must be of int32 or int64, counts of int64: use one version of Ekiden everywhere")
        if bool((self.counts < 0).any()) or bool((self.squares < 0).any()):
            raise UserError("sums of squares or counts are negative: these are not the sums of any samples")

    @property
    def width(self) -> int:
        """D, the number of features."""
        return self.classes.shape[1]

    @property
    def samples(self) -> int:
        """n, the number of samples."""
        return int(self.counts.sum())

    @property
    def squares(self) -> Tensor:
        """(D,) the diagonal of Σ φφᵀ."""
        width = self.width
        rows = torch.arange(width, device=self.gram.device)
        return self.gram[rows * width - rows * (rows - 1) // 2]

    def matrix(self) -> Tensor:
        """(D, D) float64, Σ φφᵀ, exact."""
        upper = torch.zeros(self.width, self.width, dtype=torch.float64, device=self.gram.device)
        upper[_upper(self.width, self.gram.device)] = self.gram.double()
        return upper + upper.triu(1).T

    def plus(self, other: "Sums") -> "Sums":
        """The sums over the samples of both.

        Raises:
            UserError: they are of other features or classes, or too large for int32.
        """
        return self._combined(other, 1)

    def minus(self, other: "Sums") -> "Sums":
        """The sums over the samples that are not among those of `other`, exactly as if they had never been added.

        Raises:
            UserError: they are of other features or classes, or `other` is no part of these sums.
        """
        return self._combined(other, -1)

    def _combined(self, other: "Sums", sign: int) -> "Sums":
        if self.classes.shape != other.classes.shape or self.gram.dtype != other.gram.dtype:
            raise UserError(
                f"sums of {self.width} features and {len(self.counts)} classes cannot be combined with sums of "
                f"{other.width} and {len(other.counts)}: use the same method and model everywhere"
            )
        gram, classes = (
            _narrow(a.long().add(b, alpha=sign), a.dtype)
            for a, b in ((self.gram, other.gram), (self.classes, other.classes))
        )
        return Sums(gram, classes, self.counts + sign * other.counts)


def measure(
    blocks: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    width: int,
    device: torch.device | str = "cpu",
    largest: int = LARGEST,
) -> Sums:
    """The sums over samples that come in blocks of features and labels; no more than 1024 rows are held at a time.

    Args:
        blocks: features (b, D), whole numbers in any floating-point type, and labels (b,).
        classes: K.
        width: D.
        device: where features and labels are.
        largest: absolute value of a feature, `LARGEST`, or `WIDE` for sums of int64.

    Raises:
        UserError: a feature is no such number, or a sum is too large for its type.
    """
    kind, precision = (torch.int32, torch.float32) if largest <= LARGEST else (torch.int64, torch.float64)
    gram = torch.zeros(width, width, dtype=torch.float64, device=device)
    sums = torch.zeros(width, classes, dtype=torch.float64, device=device)
    counts = torch.zeros(classes, dtype=torch.int64, device=device)
    for features, labels in _regrouped(blocks):
        if features.shape[1:] != (width,):
            raise UserError(f"features of shape {tuple(features.shape[1:])} where {width} numbers were announced")
        if not torch.equal(features.round().clamp(-largest, largest), features):  # also where one is NaN
            raise UserError(f"exact sums need features that are whole numbers from -{largest} to {largest}")
        phi = features.to(precision)
        of = torch.nn.functional.one_hot(labels, classes).to(phi)
        for start in range(0, width, _STRIPE):
            gram[start : start + _STRIPE, start:] += phi[:, start : start + _STRIPE].T @ phi[:, start:]
        sums += phi.T @ of
        counts += of.sum(0).long()
    return Sums(_narrow(gram[_upper(width, gram.device)], kind), _narrow(sums.T.contiguous(), kind), counts)


def size(classes: int, width: int, *, wide: bool = False) -> int:
    """2D(D + 1) + 4KD + 8K, bytes of sums; 4D(D + 1) + 8KD + 8K of wide features."""
    return (1 + wide) * (2 * width * (width + 1) + 4 * classes * width) + 8 * classes


def widest(budget: int, classes: int, each: int = 0, fixed: int = 0) -> int:
    """The largest D of which sums, `each` more bytes a feature and `fixed` more in all take `budget` bytes or less.

    0 or less where not even one feature fits.
    """
    # 2D² + bD ≤ room
    b, room = 2 + 4 * classes + each, budget - fixed - 8 * classes
    return (isqrt(b * b + 8 * room) - b) // 4 if room > 0 else 0


def _regrouped(blocks: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows in float32 blocks of `_ROWS`, the last one shorter."""
    held: list[tuple[Tensor, Tensor]] = []
    rows = 0
    for features, labels in blocks:
        for part in zip(torch.split(features.float(), _ROWS), torch.split(labels, _ROWS), strict=True):
            if rows + len(part[1]) > _ROWS:
                yield _joined(held)
                held, rows = [], 0
            held.append(part)
            rows += len(part[1])
    if rows:
        yield _joined(held)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return parts[0] if len(parts) == 1 else (torch.cat([f for f, _ in parts]), torch.cat([y for _, y in parts]))


def _upper(width: int, device: torch.device) -> Tensor:
    """(D, D) bool, the upper triangle."""
    return torch.ones(width, width, dtype=torch.bool, device=device).triu()


def _narrow(values: Tensor, kind: torch.dtype) -> Tensor:
    """Whole numbers as int32 or int64.

    Raises:
        UserError: one is too large.
    """
    if len(values) and float(values.abs().max()) > _MOST[kind]:
        raise UserError(
            f"a sum of products does not fit into {32 if kind == torch.int32 else 53} bits: there are too many samples "
            "for one run; leave out clients, or some samples of the largest"
        )
    return values.to(kind)
