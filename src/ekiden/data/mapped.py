"""Map tensors in a file into memory: the system reads what is used, and frees it again."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor are.

    Attributes:
        path: path of the file.
        offset: position of the first byte.
        shape: shape of the tensor.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def open(self) -> Tensor:
        """Map the bytes as uint8. Writing into the tensor writes into the file.

        The system would refuse a private mapping that is larger than memory.
        """
        size = self.offset + prod(self.shape)
        whole = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        tensor = whole[self.offset :].view(self.shape)
        tensor.__dict__["_ekiden_place"] = self
        return tensor


def place(tensor: Tensor) -> Place | None:
    """Return where a tensor from `Place.open` is; None for other tensors and for views of it."""
    found = vars(tensor).get("_ekiden_place")
    return found if isinstance(found, Place) else None
