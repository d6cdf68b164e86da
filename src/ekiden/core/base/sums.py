"""Exact sums: whole numbers modulo powers of two, which masks can hide."""

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError

# bits of a packed number once it is unpacked
_WORD = 32
# packed numbers that are handled at a time; a multiple of 8, so that blocks end with a byte
BLOCK = 2**20
_KINDS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}
_NAME = re.compile(r"[\w.-]{1,200}")
_MOST_TEXT = 1 << 16
# bits after the point of numbers in fixed point
FRACTION = 28


class Shared:
    """Mark, with `Annotated`, a whole number in an addable payload that all parts share. It is not
    added up.
    """


@dataclass(frozen=True)
class Packed:
    """Mark, with `Annotated`, a tensor of bytes that holds numbers of fewer than 32 bits, one after
    the other.
    """

    bits: str  # name of the field that says how many bits each has


class Unopened(UserError, AttributeError):
    """A sum that lacks parts is used like its total."""


@dataclass(frozen=True, eq=False)
class Masked:
    """A sum of parts under masks. Each number is uniform until the parts of all members are in;
    then the masks cancel.

    It stands in place of the payload whose numbers it hides, and has the same number of bytes. All
    but `numbers` and `shared` is header.
    """

    form: str  # JSON tree of the payload; see `ekiden.core.engine.transport.summands`
    # whole numbers modulo 2^bits, as int16, int32 or int64; those of other bits packed in uint8
    numbers: list[Tensor]
    bits: list[int]  # of the numbers in each tensor
    shared: list[int]  # whole numbers that all parts share, not masked
    # digest of the numbers, modulo 2^64, under a mask of its own. It is linear, so the digest of a
    # sum is the sum of
    # the digests. A sum that does not fit into its bits, or whose masks do not cancel, has another
    # one.
    check: int
    sum: str  # name of the sum
    members: str  # digest of the list of those who give a part
    given: list[str]  # names of those who gave theirs

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        fits = len(self.numbers) == len(self.bits) and all(map(_holds, self.numbers, self.bits))
        once = self.given and len(set(self.given)) == len(self.given)
        named = all(map(_NAME.fullmatch, (self.sum, self.members, *self.given)))
        small = 0 <= self.check < 2**64 and len(self.form) <= _MOST_TEXT
        if not (fits and once and named and small):
            raise UserError(
                "a masked sum is not as it must be: use the same version of Ekiden everywhere"
            )

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be used like the payload that it hides."""
        raise Unopened(
            f"sum {self.sum} has only the parts of {', '.join(self.given)}: it opens when all "
            "silos of the run gave theirs; start the others, then `ekiden resume`"
        )

    @property
    def _terms(self) -> tuple[object, ...]:
        """What all parts of a sum have in common."""
        sizes = list(map(len, self.numbers))
        return self.form, self.bits, self.shared, self.sum, self.members, sizes

    def plus(self, other: "Masked") -> "Masked":
        """Return the sum with the parts of `other`."""
        if not isinstance(other, Masked):
            raise UserError(f"a part of sum {self.sum} is not masked: refused")
        if self._terms != other._terms:
            raise UserError(
                f"the parts of sum {self.sum} do not fit together: the silos got other lists of "
                "members, or sums of other features"
            )
        if twice := set(self.given) & set(other.given):
            raise UserError(
                f"{', '.join(sorted(twice))} would give a part to sum {self.sum} twice: refused"
            )
        numbers = [
            narrowed(wide(mine, bits) + wide(its, bits), bits)
            for mine, its, bits in zip(self.numbers, other.numbers, self.bits, strict=True)
        ]
        check = (self.check + other.check) % 2**64
        return replace(self, numbers=numbers, check=check, given=[*self.given, *other.given])


def _holds(numbers: Tensor, bits: int) -> bool:
    """Return whether a tensor holds numbers of so many bits as `Masked` does."""
    packed = numbers.dtype == torch.uint8 and 8 <= bits < _WORD
    return numbers.ndim == 1 and (packed or _KINDS.get(numbers.dtype) == bits)


def bits_of(tensor: Tensor) -> int:
    """Return the bits of the whole numbers in a tensor; 0 if it holds others."""
    return _KINDS.get(tensor.dtype, 0)


def wide(numbers: Tensor, bits: int) -> "np.ndarray[Any, Any]":
    """Return numbers modulo 2^bits, as `Masked` holds them, as unsigned words, which wrap around
    where they are added.

    They are in memory of their own.
    """
    if numbers.dtype != torch.uint8:
        return numbers.cpu().numpy().astype(f"<i{bits // 8}").view(f"<u{bits // 8}")
    parts = [unpack(part, bits) for part in torch.split(numbers.cpu(), BLOCK // 8 * bits)]
    return torch.cat(parts).numpy().astype("<u4")


def narrowed(words: "np.ndarray[Any, Any]", bits: int) -> Tensor:
    """Return words as `Masked` holds them: the opposite of `wide`."""
    if words.itemsize * 8 == bits:
        signed = torch.from_numpy(words.view(f"<i{bits // 8}"))
        # numpy's strides of nothing are not those of torch
        if len(words):
            return signed
        return signed.new_zeros(0)
    counts = torch.from_numpy(words.astype(np.int64))
    return torch.cat([pack(block, bits) for block in torch.split(counts, BLOCK)])


def fixed(values: Tensor, parts: int, what: str) -> Tensor:
    """Return numbers in fixed point: int64 in units of 2^-28, rounded, so that each is wrong by
    2^-29 at most.

    So many such tensors (`parts`) can be added up. The message calls the numbers `what`.
    """
    scaled = values.double() * 2.0**FRACTION
    most = 2.0**62 / parts
    # also where one is NaN
    if not bool((scaled.abs() < most).all()):
        raise UserError(
            f"{what} reach {float(values.abs().max()):.3g}, and a sum of {parts} in fixed point "
            "has room for "
            f"{most / 2.0**FRACTION:.3g}: scale the data, lower --lr, or leave out clients"
        )
    return scaled.round().long()


def real(numbers: Tensor) -> Tensor:
    """Return numbers in fixed point as float64."""
    return numbers.double() / 2.0**FRACTION


def digest(numbers: "list[np.ndarray[Any, Any]]") -> int:
    """Return Σ w x modulo 2^64 over signed numbers x, with fixed random weights w.

    Numbers that lost a multiple of 2^16 or 2^32 have another digest, except for one case in 2^32 or
    more.
    """
    total = 0
    start = 1
    for part in numbers:
        for block in np.array_split(part, max(1, len(part) // BLOCK)):
            with np.errstate(over="ignore"):
                weights = _scrambled(np.arange(start, start + len(block), dtype=np.uint64))
                total += int(
                    (block.astype(np.int64).view(np.uint64) * weights).sum(dtype=np.uint64)
                )
            start += len(block)
    return total % 2**64


def pack(counts: Tensor, bits: int) -> Tensor:
    """Pack whole numbers modulo 2^bits, the highest bit first; the last byte is filled up with
    zeros.
    """
    big = (counts & ((1 << bits) - 1)).numpy().astype(">u4").view(np.uint8).reshape(-1, 4)
    return torch.from_numpy(np.packbits(np.unpackbits(big, axis=1)[:, _WORD - bits :]))


def unpack(packed: Tensor, bits: int, count: int | None = None) -> Tensor:
    """Return packed numbers as int64, by default all that there is room for."""
    count = 8 * len(packed) // bits if count is None else count
    flags = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    full = np.zeros((count, _WORD), dtype=np.uint8)
    full[:, _WORD - bits :] = flags
    return torch.from_numpy(np.packbits(full, axis=1).view(">u4").reshape(-1).astype(np.int64))


def _scrambled(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return numbers that look random (SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    x = numbers * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
