"""Sums in whole numbers, which clients add up field by field; the state of a run that has only sums
so far; and the forms of what others send.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from ekiden.authoring import Model, State, UserError

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def forms(tensors: Iterable[Tensor]) -> list[Form]:
    """Return the forms of tensors, to compare with those that another party must send."""
    return [(tuple(t.shape), t.dtype) for t in tensors]


@dataclass(frozen=True)
class WithoutModel(State):
    """A state that has no model before the last step."""

    model: Model | None = None


class WholeSums:
    """Base class of frozen dataclasses whose fields are int64 tensors, tuples of them, or ints."""

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        if any(t.dtype != torch.int64 for t in self.tensors()):
            raise UserError("sums must be of int64: use the same version of Ekiden everywhere")

    def values(self) -> list[Any]:
        """Return the fields in their order."""
        return [getattr(self, one.name) for one in fields(self)]  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        """Return the fields that are tensors."""
        return [value for value in self.values() if isinstance(value, Tensor)]

    def plus(self, other: Self) -> Self:
        """Return the sums over the clients of both."""
        if [t.shape for t in self.tensors()] != [t.shape for t in other.tensors()]:
            raise UserError(
                "sums of different shape cannot be added up: use the same method, network and data "
                "schema at every client"
            )
        return type(self)(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))
