"""Read arrays from `.npy`, `.npz` and safetensors files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError, listed, row_text, tell
from ekiden.core.data.inputs import Encoding, Inputs, joined
from ekiden.core.models.images import SHORTEST
from ekiden.readers.undecoded import Raw

LEADS = 16
"""most channels that may be leads"""
SUFFIXES = (".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class Arrays(Inputs):
    """Numbers of one shape: signals (channels, time), embeddings (d,), or others. They become
    float32, unscaled.
    """

    kind = "arrays"
    words = "arrays"
    column = "x"
    arrays = True

    def network(self, shape: tuple[int, ...]) -> str:
        if len(shape) == 2 and shape[1] >= SHORTEST:
            return "cnn_signal"
        return ""

    def encode(self, raw: Any) -> Tensor:
        """Return (n, ...) float32 for an array, or for the path of a file of arrays."""
        return encode(raw, "the arrays given")

    @classmethod
    def assembled(
        cls, sides: Sequence[Sequence[Raw]], wanted: Encoding
    ) -> tuple[list[Tensor], Inputs | None]:
        """Put arrays together. Their type says whether they are images, tokens or other numbers."""
        parts = list[list[Tensor]]()
        found = dict[str, Tensor]()
        for side in sides:
            parts.append([torch.as_tensor(raw.images) for raw in side])
            for raw, x in zip(side, parts[-1], strict=True):
                # the training part comes first
                found.setdefault(raw.source, x)
        _say_range(found)
        return joined(sides, parts), None

    @classmethod
    def of_cells(cls, table: Any, source: str) -> NDArray[np.float32]:
        """Return the numbers (n, ...) of a column of lists, which may be nested."""
        import pyarrow.compute as pc

        name = table.column_names[0]
        kind = table.schema.types[0]
        if not is_list(kind):
            raise UserError(
                f"column {name!r} of {source} holds {kind}, not lists of numbers: give lists of "
                "equal length"
            )
        lengths = np.array(pc.list_value_length(table.column(0)).fill_null(0))
        odd = (lengths != lengths[0]) | (lengths == 0)
        if odd.any():
            row = int(odd.argmax())
            lacks = "no values"
            if lengths[row]:
                lacks = f"{lengths[row]} values, row 0 has {lengths[0]}"
            raise UserError(
                f"column {name!r} of {source} has {lacks} in {row_text(row)}: give all lists the "
                "same length"
            )
        rows = table.column(0).to_numpy()
        try:
            found = np.array(
                [np.stack(row) if row.dtype == object else row for row in rows], dtype=np.float32
            )
        except (ValueError, TypeError) as error:
            raise UserError(
                f"column {name!r} of {source} is not an array of numbers ({error}): give lists of "
                "numbers, all of one shape"
            ) from None
        return encode(found, f"column {name!r} of {source}").numpy()

    def takes(self, shape: Sequence[int]) -> str:
        return f"float32 arrays of shape {tuple(shape)}."


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is that of lists."""
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def encode(raw: Any, what: str) -> Tensor:
    """Return (n, ...) float32 of an array, or of a path: `.npy`, or `.npz` or safetensors with the
    array `x`.
    """
    if isinstance(raw, str | Path):
        found = read(Path(raw))
        if "x" not in found:
            raise UserError(f"{raw} has no array 'x': it has {', '.join(found)}")
        raw, what = found["x"], str(raw)
    try:
        x = torch.as_tensor(
            raw.astype(raw.dtype.newbyteorder("=")) if hasattr(raw, "astype") else raw
        )
        if x.is_complex():
            raise TypeError("give real and imaginary parts as channels")
        x = x.float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{what} is not an array of numbers ({error})") from None
    if x.ndim < 2 or not x.numel():
        raise UserError(
            f"{what} has shape {tuple(x.shape)}: it must be (n, features...) with n samples, at least 1"
        )
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    if bad.any():
        raise UserError(
            f"{what} has NaN or infinity in {row_text(int(bad.nonzero()[0]))}: remove or replace "
            "such values"
        )
    return x


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays in a file by their names; the array of a `.npy` file is called x."""
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path")
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(path))
        found = np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            return dict(found)
        return {"x": found}
    except Exception as error:  # from numpy, zipfile or safetensors
        why = str(error).partition("\n")[0][:120]
        if "pickle" in why:
            why = "it holds Python objects"
        raise UserError(f"{path} cannot be read ({why}): write arrays of numbers") from None


def samples(x: NDArray[Any], what: str) -> Tensor:
    """Return an array as samples: bytes (n, [C,] H, W) are pictures, all else becomes float32."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return with_channels(torch.from_numpy(np.array(x)), what)
    return with_channels(encode(x, what), what)


def with_channels(x: Tensor, what: str) -> Tensor:
    """Return samples, bytes (n, H, W) as (n, 1, H, W). Refuse bytes whose channels come last, and
    name floats, and signals, whose axes may be in another order.
    """
    shape = tuple(x.shape)
    if x.dtype == torch.uint8 and x.ndim == 3:
        return x.unsqueeze(1)
    # no picture has five channels, and hardly one is four pixels wide
    narrow = x.ndim == 4 and shape[3] <= 4 < shape[2]
    if narrow and shape[1] > 4 and x.dtype == torch.uint8:
        raise UserError(
            f"{what} has x of shape {shape}: the channels come last, so move them, as in "
            "x.transpose(0, 3, 1, 2)"
        )
    # a tensor of one channel in one column may be a picture as well
    if narrow and shape[3] > 1:
        tell(
            f"{what} has x of shape {shape}, which is read as {shape[1]} channels of "
            f"{shape[2]} x {shape[3]}: if the channels come last, move them, as in "
            "x.transpose(0, 3, 1, 2)"
        )
    # signals have more values in time than channels
    if x.ndim == 3 and shape[2] < SHORTEST and shape[1] >= 4 * shape[2]:
        tell(
            f"{what} has x of shape {shape}, which is read as {shape[1]} channels with {shape[2]} "
            "values in time: if time comes first, move it, as in x.transpose(0, 2, 1)"
        )
    return x


def _say_range(parts: Mapping[str, Tensor]) -> None:
    """Say which sources hold floats that are too large for a network to learn from."""
    large: dict[str, float] = {}
    for source, x in parts.items():
        if not x.is_floating_point():
            continue
        # pictures and signals are scaled, or have pixels up to 255
        most = 30
        if x.ndim < 4 and x[0].numel() < 64:
            # a few numbers may be ages or doses
            most = 1000
        if float(x.abs().max()) > most:
            large[source] = float(x.abs().max())
    if large:
        tell(
            f"floats of {listed(large)} go up to {max(large.values()):g}, and are used unchanged, "
            "but networks learn from values around 1: scale them, give pixels as uint8, or give "
            "their mean and std"
        )
