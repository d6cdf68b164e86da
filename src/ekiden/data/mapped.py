"""Map tensors in a file into memory: the system reads what is used, and frees it again."""

import os
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ekiden.base.errors import UserError

LARGE = 1 << 28
"""images of at least this number of bytes stay on the disk"""


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


def folder() -> Path:
    """Return `$EKIDEN_CACHE`, or else `~/.cache/ekiden`."""
    return Path(os.environ.get("EKIDEN_CACHE") or "~/.cache/ekiden").expanduser()


def room(shape: tuple[int, ...]) -> Tensor:
    """Make a uint8 tensor for images: in memory or, if it is large, in a file that vanishes after its last use."""
    size = prod(shape)
    if size < LARGE:
        return torch.empty(shape, dtype=torch.uint8)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), prefix=".decoding-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return Place(Path(file.name), 0, shape).open()
    except OSError as error:
        raise UserError(
            f"images of {size / 1e9:.1f} GB cannot be decoded into {folder()} ({error.strerror}): free space there, or "
            "set EKIDEN_CACHE to another folder"
        ) from None
