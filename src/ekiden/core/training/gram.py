"""Exact sums of products of features over samples, whose bits do not depend on the order.

A Gram matrix and products with labels are exact, because features are small whole numbers. Products
may travel in few bits: each client rounds its own, and the rounded sums add up exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import Annotated, NamedTuple, Self

import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import BLOCK, Packed, Shared, pack, unpack

# fewest bits of a product
LEAST = 9
# bits of a product that is not rounded
FULL = 32
# the largest absolute value of a feature
LARGEST = 127
WIDE = 2**15 - 1  # the largest absolute value of a feature whose sums travel as int64
# the largest absolute value of a target
FARTHEST = 2**20
# 1024 · 127² < 2^24: float32 adds up this number of products in any order without rounding
_ROWS = 1024
# columns of the Gram matrix that are computed together
_STRIPE = 256
# float64 adds them up; it is exact up to 2^53
_MOST = {torch.int32: 2**31 - 1, torch.int64: 2**53 - 1}


class Rounding(NamedTuple):
    """How sums of products are rounded."""

    bits: int  # b, from 9 to 31
    unit: int  # q; the sums become multiples of it

    @classmethod
    def within(cls, bits: int, samples: int, variance: int) -> "Rounding":
        """The finest rounding to `bits` with which `samples` samples of features with such
        variances have room.

        Covariances times n go up to n·`variance`, and room is for q·2^(b - 1).
        """
        return cls(bits, max(1, -(-samples * variance >> (bits - 1))))


@dataclass(frozen=True, eq=False)
class Rounded:
    """Σ φφᵀ over samples with features φ (D,): exact squares, and products that each client rounds
    to multiples of q.

    Products are counted in q modulo 2^b. Their sums have the same bits in any order, and a part can
    be subtracted again. `matrix` finds the multiples of q·2^b that are missing.
    """

    squares: Tensor  # (D,) int32, Σ φ²
    # (⌈b·D(D - 1)/16⌉,) uint8, b bits for each product above the diagonal, row by row
    products: Annotated[Tensor, Packed("bits")]
    bits: Annotated[int, Shared]  # b
    unit: Annotated[int, Shared]  # q
    parts: int  # how many sums were rounded

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        if not LEAST <= self.bits < FULL or not 0 < self.unit << self.bits < 2**53:
            raise UserError(
                f"sums of {self.bits} bits in units of {self.unit} are refused: use one version "
                "everywhere"
            )
        if (self.squares.dtype, self.products.dtype) != (torch.int32, torch.uint8):
            raise UserError(
                "squares must be of int32, rounded products of uint8: use one version of Ekiden "
                "everywhere"
            )
        if self.squares.ndim != 1 or tuple(self.products.shape) != (
            _packed_bytes(self.width, self.bits),
        ):
            raise UserError(
                "rounded sums do not fit together: use the same method and model everywhere"
            )
        _refuse_negative(self.squares, torch.tensor(self.parts))

    @property
    def width(self) -> int:
        """D, the number of features."""
        return len(self.squares)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed triangle in place of which it stands."""
        return (self.width * (self.width + 1) // 2,)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the sums with which it goes."""
        return torch.int32

    def plus(self, other: "Rounded") -> "Rounded":
        """Return the sums over the samples of both."""
        if (self.width, self.bits, self.unit) != (other.width, other.bits, other.unit):
            raise UserError(
                "sums that are rounded differently cannot be combined: use one --bits and one "
                "--samples"
            )
        squares = self.squares.long() + other.squares
        if bool((squares > 2**31 - 1).any()):
            raise UserError(
                "a sum of squares does not fit into 32 bits: there are too many samples for one "
                "run; leave out clients, or some samples of the largest"
            )
        blocks = zip(self._counts(), other._counts(), strict=True)
        products = [pack(own + others, self.bits) for own, others in blocks]
        return Rounded(
            squares.int(), torch.cat(products), self.bits, self.unit, self.parts + other.parts
        )

    def matrix(self, total: Tensor, samples: int) -> Tensor:
        """(D, D) float64 Σ φφᵀ on the CPU, up to the rounding of the parts.

        n·covariance is Σ φ_i φ_j - Σφ_i Σφ_j/n, and at most the root of the product of two
        n·variances. All of these but Σ φ_i φ_j are known exactly. So only one multiple of q·2^b can
        be missing, unless variances are too large.

        Args:
            total: (D,) Σ φ.
            samples: n, at least 1.
        """
        sums = total.cpu().double()
        squares = self.squares.cpu().double()
        period = float(self.unit << self.bits)
        largest = float((squares - sums.square() / samples).clamp(min=0).max())
        if 2 * largest + self.parts * self.unit >= period:
            raise UserError(
                f"the sums do not fit into {self.bits} bits: start a new run with --samples "
                f"{samples} or more, or with more --bits"
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
        if self.unit > 1:
            return float(self.unit * (self.parts / 12) ** 0.5)
        return 0.0

    def _counts(self) -> Iterator[Tensor]:
        """Products in units as int64 on the CPU, by blocks."""
        left = self.width * (self.width - 1) // 2
        for part in torch.split(self.products.cpu(), BLOCK // 8 * self.bits):
            yield unpack(part, self.bits, min(left, BLOCK))
            left -= BLOCK


def rounded(gram: Tensor, rounding: Rounding) -> Rounded:
    """Round the upper triangle of Σ φφᵀ (D, D), float64 of whole numbers; halves are rounded up."""
    squares = gram.diagonal().cpu()
    if squares.numel() and float(squares.max()) > 2**31 - 1:
        raise UserError(
            "a sum of squares does not fit into 32 bits: this client has too many samples; leave "
            "out some"
        )
    bits, unit = rounding
    above = torch.ones_like(gram, dtype=torch.bool).triu(1)
    counts = (gram[above].cpu().long() + unit // 2).div(unit, rounding_mode="floor")
    packed = [pack(block, bits) for block in torch.split(counts, BLOCK)]
    return Rounded(squares.int(), torch.cat(packed), bits, unit, 1)


def rounded_size(width: int, bits: int) -> int:
    """Return the bytes of `Rounded`: ⌈b·D(D - 1)/16⌉ + 4D + 24."""
    return _packed_bytes(width, bits) + 4 * width + 24


def _packed_bytes(width: int, bits: int) -> int:
    return -(-bits * (width * (width - 1) // 2) // 8)


class _Addable(ABC):
    """Sums over samples with features φ, to which those over other samples can be added."""

    gram: Tensor | Rounded

    @property
    def width(self) -> int:
        """D, the number of features."""
        if isinstance(self.gram, Rounded):
            return self.gram.width
        return (isqrt(8 * len(self.gram) + 1) - 1) // 2

    @property
    def error(self) -> float:
        """Standard deviation of the error of a product in `matrix`: 0 unless products were
        rounded.
        """
        if isinstance(self.gram, Rounded):
            return self.gram.error
        return 0.0

    def matrix(self) -> Tensor:
        """(D, D) float64, Σ φφᵀ, exact unless products were rounded."""
        if isinstance(self.gram, Rounded):
            return self.gram.matrix(*self._first())
        return _symmetric(self.gram, self.width)

    @abstractmethod
    def plus(self, other: "AnySums") -> Self:
        """The sums over the samples of both."""

    @abstractmethod
    def _first(self) -> tuple[Tensor, int]:
        """Σ φ (D,) and n."""


@dataclass(frozen=True, eq=False)
class Sums(_Addable):
    """What ridge regression and linear discriminant analysis need from n samples with features φ
    (D,).

    All entries are whole numbers, so sums of sums are the same bits in any order. They travel as
    int32, which is enough for 133,144 samples whatever their features are, and usually for more.
    Sums of wide features travel as int64, which is enough for 8,388,608 samples.
    """

    # (D(D + 1)/2,) int32 or int64, Σ φφᵀ, the upper triangle row by row; or rounded, which goes
    # with int32
    gram: Tensor | Rounded
    classes: Tensor  # (K, D) of the same type, Σ φ over the samples of each class
    counts: Tensor  # (K,) int64, number of samples of each class

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        shapes = (tuple(self.gram.shape), tuple(self.classes.shape), tuple(self.counts.shape))
        width = self.classes.shape[1] if self.classes.ndim == 2 else 0
        triangle = (width * (width + 1) // 2,)
        _refuse_other_shapes(
            width, shapes, (triangle, (len(self.counts), width), (len(self.classes),))
        )
        kind = self.gram.dtype
        if kind not in _MOST or (self.classes.dtype, self.counts.dtype) != (kind, torch.int64):
            raise UserError(
                "sums must be of int32 or int64, counts of int64: use one version of Ekiden "
                "everywhere"
            )
        self._refuse_impossible()

    def _refuse_impossible(self) -> None:
        """Refuse what no samples have."""
        _refuse_negative(self.counts, diagonal(self.gram, self.classes.shape[1]))

    @property
    def samples(self) -> int:
        """n, the number of samples."""
        return int(self.counts.sum())

    def _first(self) -> tuple[Tensor, int]:
        return self.classes.double().sum(0), self.samples

    def plus(self, other: "AnySums") -> Self:
        # noisy sums are sums, and do not go with exact ones
        same = type(other) is type(self) and _kind(other) == _kind(self)
        if not (isinstance(other, Sums) and same):
            raise _unlike(self, other)
        (classes,) = _added((self.classes,), (other.classes,))
        gram = _gram_added(self.gram, other.gram)
        return replace(self, gram=gram, classes=classes, counts=self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class NoisySums(Sums):
    """Sums to which each part has added whole-number noise, so that they keep differential
    privacy.
    """

    parts: int  # how many parts are in the sums
    # standard deviation of the noise that a part added to each entry of `gram`
    gram_noise: Annotated[int, Shared]
    class_noise: Annotated[int, Shared]  # the same for `classes`
    count_noise: Annotated[int, Shared]  # the same for `counts`

    def _refuse_impossible(self) -> None:
        """Accept negative squares and counts, which noise makes; refuse noise that is none."""
        if min(self.parts, self.gram_noise, self.class_noise, self.count_noise) < 1 or isinstance(
            self.gram, Rounded
        ):
            raise UserError("noisy sums name no noise: use the same version of Ekiden everywhere")

    @property
    def noise(self) -> tuple[int, int, int]:
        """The standard deviations of the noise of a part."""
        return self.gram_noise, self.class_noise, self.count_noise

    def plus(self, other: "AnySums") -> Self:
        if not isinstance(other, NoisySums) or other.noise != self.noise:
            raise UserError(
                "sums with different noise cannot be combined: use the same --dp everywhere"
            )
        return replace(super().plus(other), parts=self.parts + other.parts)


@dataclass(frozen=True, eq=False)
class TargetSums(_Addable):
    """What ridge regression needs from n samples with features φ (D,) and targets y (K,), all whole
    numbers.
    """

    gram: Tensor | Rounded  # (D(D + 1)/2,) int32 or int64, Σ φφᵀ, or rounded, as in `Sums`
    features: Tensor  # (D,) int64, Σ φ
    products: Tensor  # (K, D) int64, Σ yφᵀ
    targets: Tensor  # (K,) int64, Σ y
    powers: Tensor  # (K,) int64, Σ y²
    samples: int  # n

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        parts = (self.features, self.products, self.targets, self.powers)
        shapes = (tuple(self.gram.shape), *(tuple(part.shape) for part in parts))
        width = self.features.numel()
        outputs = len(self.targets)
        triangle = (width * (width + 1) // 2,)
        _refuse_other_shapes(
            width, shapes, (triangle, (width,), (outputs, width), (outputs,), (outputs,))
        )
        if self.gram.dtype not in _MOST or {part.dtype for part in parts} != {torch.int64}:
            raise UserError("sums must be of int32 or int64: use one version of Ekiden everywhere")
        _refuse_negative(self.powers, diagonal(self.gram, width), torch.tensor(self.samples))

    def _first(self) -> tuple[Tensor, int]:
        return self.features, self.samples

    def plus(self, other: "AnySums") -> Self:
        if not isinstance(other, TargetSums) or _kind(other) != _kind(self):
            raise _unlike(self, other)
        mine, others = ((s.features, s.products, s.targets, s.powers) for s in (self, other))
        names = ("features", "products", "targets", "powers")
        added = dict(zip(names, _added(mine, others), strict=True))
        gram = _gram_added(self.gram, other.gram)
        return replace(self, gram=gram, **added, samples=self.samples + other.samples)


AnySums = Sums | TargetSums | NoisySums


def noisy(
    sums: Sums, noise: tuple[int, int, int], drawn: Callable[[int, int], Tensor]
) -> NoisySums:
    """Return sums with noise.

    Args:
        sums: exact ones.
        noise: standard deviations for products, class sums and counts.
        drawn: (σ, n) -> (n,) int64, independent noise.
    """
    assert isinstance(sums.gram, Tensor), "rounded sums have no noise"
    parts = (sums.gram, sums.classes, sums.counts)
    found = [
        part.long().cpu() + drawn(s, part.numel()).view(part.shape)
        for part, s in zip(parts, noise, strict=True)
    ]
    gram, classes = (_narrow(part, sums.gram.dtype).to(sums.gram.device) for part in found[:2])
    return NoisySums(gram, classes, found[2].to(sums.counts.device), 1, *noise)


def _kind(sums: AnySums) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and type that two sums must share."""
    return (sums.classes if isinstance(sums, Sums) else sums.products).shape, sums.gram.dtype


def _gram_added(mine: Tensor | Rounded, other: Tensor | Rounded) -> Tensor | Rounded:
    if isinstance(mine, Rounded) and isinstance(other, Rounded):
        return mine.plus(other)
    if isinstance(mine, Rounded) or isinstance(other, Rounded):
        raise UserError(
            "rounded sums cannot be combined with exact ones: use the same --bits everywhere"
        )
    return _added((mine,), (other,))[0]


def _unlike(*both: AnySums) -> UserError:
    mine, other = ("{1} features and {0} outputs".format(*_kind(s)[0]) for s in both)
    return UserError(
        f"sums of {mine} cannot be combined with sums of {other}: use the same method and model "
        "everywhere"
    )


def measure(
    blocks: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    width: int,
    device: torch.device | str = "cpu",
    largest: int = LARGEST,
    rounding: Rounding | None = None,
) -> Sums:
    """Return the sums over samples that come in blocks of features and labels; at most 1024 rows
    are held at a time.

    Args:
        blocks: features (b, D), whole numbers in any floating-point type, and labels (b,).
        classes: K.
        width: D.
        device: where features and labels are.
        largest: absolute value of a feature, `LARGEST`, or `WIDE` for sums of int64.
        rounding: how products are rounded; None: not at all.
    """
    gram = _Gram(width, device, largest)
    sums = torch.zeros(width, classes, dtype=torch.float64, device=device)
    counts = torch.zeros(classes, dtype=torch.int64, device=device)
    for features, labels in _regrouped(blocks):
        phi = gram.add(features)
        of = torch.nn.functional.one_hot(labels, classes).to(phi)
        sums += phi.T @ of
        counts += of.sum(0).long()
    return Sums(gram.packed(rounding), _narrow(sums.T.contiguous(), gram.kind), counts)


def measure_targets(
    blocks: Iterable[tuple[Tensor, Tensor]],
    outputs: int,
    width: int,
    device: torch.device | str = "cpu",
    largest: int = LARGEST,
    rounding: Rounding | None = None,
) -> TargetSums:
    """Return the sums over samples that come in blocks of features and targets, like `measure`.

    Args:
        blocks: features (b, D) and targets (b, K), whole numbers in any floating-point type.
        outputs: K.
        width: D.
        device: where features and targets are.
        largest: absolute value of a feature, `LARGEST`, or `WIDE` for sums of int64.
        rounding: how products are rounded; None: not at all.
    """
    gram = _Gram(width, device, largest)
    sums = torch.zeros(width, dtype=torch.int64, device=device)
    products = torch.zeros(outputs, width, dtype=torch.int64, device=device)
    targets, powers = torch.zeros(2, outputs, dtype=torch.int64, device=device)
    count = 0
    for features, rows in _regrouped(blocks):
        phi = gram.add(features).double()
        y = rows.double()
        # also where one is NaN
        if y.shape[1:] != (outputs,) or not torch.equal(y.round(), y):
            raise UserError(
                f"exact sums need {outputs} targets for each sample that are whole numbers"
            )
        if float(y.abs().max()) > FARTHEST:
            raise UserError(
                f"a target is more than {FARTHEST} steps away from 0: remove samples so far from "
                "the rest"
            )
        # the sums of one block are whole numbers below 2^53
        sums += phi.sum(0).long()
        products += (y.T @ phi).long()
        targets += y.sum(0).long()
        powers += y.square().sum(0).long()
        count += len(y)
    sums, products, targets, powers = (
        _narrow(t, torch.int64) for t in (sums, products, targets, powers)
    )
    return TargetSums(gram.packed(rounding), sums, products, targets, powers, count)


class _Gram:
    """Adds up Σ φφᵀ.

    Attributes:
        kind: the type in which it travels.
    """

    def __init__(self, width: int, device: torch.device | str, largest: int) -> None:
        self.kind = torch.int32
        self._precision = torch.float32
        if largest > LARGEST:
            self.kind = torch.int64
            self._precision = torch.float64
        self._largest = largest
        self._total = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, features: Tensor) -> Tensor:
        """Add a block (b, D), and return it in a type in which products of its numbers add up
        exactly.
        """
        width = len(self._total)
        largest = self._largest
        if features.shape[1:] != (width,):
            raise UserError(
                f"features of shape {tuple(features.shape[1:])} where {width} numbers were "
                "announced"
            )
        # also where one is NaN
        if not torch.equal(features.round().clamp(-largest, largest), features):
            raise UserError(
                f"exact sums need features that are whole numbers from -{largest} to {largest}"
            )
        phi = features.to(self._precision)
        for start in range(0, width, _STRIPE):
            self._total[start : start + _STRIPE, start:] += (
                phi[:, start : start + _STRIPE].T @ phi[:, start:]
            )
        return phi

    def packed(self, rounding: Rounding | None) -> Tensor | Rounded:
        """Return the upper triangle as it travels."""
        if rounding is not None:
            return rounded(self._total, rounding)
        return _narrow(self._total[_upper(len(self._total), self._total.device)], self.kind)


def size(classes: int, width: int, *, wide: bool = False, bits: int = FULL) -> int:
    """Return the bytes of sums: 2D(D + 1) + 4KD + 8K; for wide features 4D(D + 1) + 8KD + 8K.

    Of products that are rounded to b bits, ⌈b·D(D - 1)/16⌉ + 4D + 24 instead of 2D(D + 1).
    """
    return _gram_size(width, wide, bits) + (1 + wide) * 4 * classes * width + 8 * classes


def size_of_targets(outputs: int, width: int, *, wide: bool = False, bits: int = FULL) -> int:
    """Return the bytes of sums with targets: 2D(D + 1) + 8(K + 1)D + 16K + 8; for wide features
    2D(D + 1) more.

    Of products that are rounded, as in `size`.
    """
    return _gram_size(width, wide, bits) + 8 * (outputs + 1) * width + 16 * outputs + 8


def _gram_size(width: int, wide: bool, bits: int) -> int:
    if bits == FULL:
        return (1 + wide) * 2 * width * (width + 1)
    return rounded_size(width, bits)


def diagonal(gram: Tensor | Rounded, width: int) -> Tensor:
    """Return (D,) Σ φ², from a packed or rounded Σ φφᵀ."""
    if isinstance(gram, Rounded):
        return gram.squares
    rows = torch.arange(width, device=gram.device)
    return gram[rows * width - rows * (rows - 1) // 2]


def _symmetric(gram: Tensor, width: int) -> Tensor:
    """Return (D, D) float64 from a packed Σ φφᵀ."""
    upper = torch.zeros(width, width, dtype=torch.float64, device=gram.device)
    upper[_upper(width, gram.device)] = gram.double()
    return upper + upper.triu(1).T


def _refuse_other_shapes(
    width: int, found: tuple[tuple[int, ...], ...], fitting: tuple[tuple[int, ...], ...]
) -> None:
    if not width or found != fitting:
        raise UserError(
            f"sums of shapes {found} do not fit together: use the same method and model everywhere"
        )


def _refuse_negative(*squares: Tensor) -> None:
    if any(bool((part < 0).any()) for part in squares):
        raise UserError(
            "sums of squares or counts are negative: these are not the sums of any samples"
        )


def _added(mine: Iterable[Tensor], others: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(_narrow(a.long() + b, a.dtype) for a, b in zip(mine, others, strict=True))


def _regrouped(blocks: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same rows in float32 blocks of `_ROWS`; the last one may be shorter."""
    held: list[tuple[Tensor, Tensor]] = []
    rows = 0
    for features, labels in blocks:
        for part in zip(
            torch.split(features.float(), _ROWS), torch.split(labels, _ROWS), strict=True
        ):
            if rows + len(part[1]) > _ROWS:
                yield _joined(held)
                held = []
                rows = 0
            held.append(part)
            rows += len(part[1])
    if rows:
        yield _joined(held)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    features, labels = zip(*parts, strict=True)
    return torch.cat(features), torch.cat(labels)


def _upper(width: int, device: torch.device) -> Tensor:
    """(D, D) bool, the upper triangle."""
    return torch.ones(width, width, dtype=torch.bool, device=device).triu()


def _narrow(values: Tensor, kind: torch.dtype) -> Tensor:
    """Return whole numbers as int32 or int64."""
    if values.numel() and float(values.abs().max()) > _MOST[kind]:
        raise UserError(
            f"a sum of products does not fit into {32 if kind == torch.int32 else 53} bits: there "
            "are too many samples for one run; leave out clients, or some samples of the largest"
        )
    return values.to(kind)
