"""Tensors that stay in a file and are mapped into memory: the system reads what is used, and lets go of it again."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where bytes lie.

    Attributes:
        path: of the file.
        offset: of the first byte.
        shape: of the tensor.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def open(self) -> Tensor:
        """Map them as uint8. What is written into the tensor is written into the file.

        A private mapping would be refused where it is larger than memory.
        """
        size = self.offset + prod(self.shape)
        whole = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        tensor = whole[self.offset :].view(self.shape)
        tensor.__dict__["_ekiden_place"] = self
        return tensor


def place(tensor: Tensor) -> Place | None:
    """Where a tensor lies that `Place.open` gave; None of others, and of views of it."""
    found = vars(tensor).get("_ekiden_place")
    return found if isinstance(found, Place) else None
