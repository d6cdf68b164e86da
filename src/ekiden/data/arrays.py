"""Read arrays from `.npy`, `.npz` and safetensors files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.checks import Checked
from ekiden.base.errors import UserError
from ekiden.base.wording import row_text

SUFFIXES = (".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class Arrays(Checked):
    """Numbers of one shape: signals (channels, time), embeddings (d,), or others. They become float32, unscaled."""

    def encode(self, raw: Any) -> Tensor:
        """Return (n, ...) float32 for an array, or for the path of a file of arrays."""
        return encode(raw, "the arrays given")


def encode(raw: Any, what: str) -> Tensor:
    """Return (n, ...) float32.

    Args:
        raw: an array or tensor, or a path: `.npy`, or `.npz` or safetensors with the array `x`.
        what: its name in messages.
    """
    if isinstance(raw, str | Path):
        found = read(Path(raw))
        if "x" not in found:
            raise UserError(f"{raw} has no array 'x': it has {', '.join(found)}")
        raw, what = found["x"], str(raw)
    try:
        x = torch.as_tensor(raw).float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{what} is not an array of numbers ({error})") from None
    if x.ndim < 2 or not x.numel():
        raise UserError(f"{what} has shape {tuple(x.shape)}: samples need (n, ...) with n at least 1")
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    if bad.any():
        raise UserError(
            f"{what} has NaN or infinity in {row_text(int(bad.nonzero()[0]))}: remove or replace such values"
        )
    return x


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays in a file by their names; the array of a `.npy` file is called x."""
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path")
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file  # noqa: PLC0415

            return dict(load_file(path))
        found = np.load(path, allow_pickle=False)
        return {name: found[name] for name in found.files} if path.suffix == ".npz" else {"x": found}
    except Exception as error:  # from numpy, zipfile or safetensors
        why = "it holds Python objects" if "pickle" in str(error) else str(error).splitlines()[0][:120]
        raise UserError(f"{path} cannot be read ({why}): write arrays of numbers") from None


def channels_first(x: NDArray[Any]) -> NDArray[Any]:
    """Return bytes (n, H, W) or (n, H, W, 1 or 3) as images (n, C, H, W), and any other array unchanged."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return x
    if x.ndim == 3:
        return x[:, None]
    return np.moveaxis(x, 3, 1) if x.shape[3] in (1, 3) and x.shape[1] > 3 else x
