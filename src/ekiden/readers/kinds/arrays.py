"""Read arrays from `.npy`, `.npz` and safetensors files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError, listed, row_text, tell
from ekiden.core.data.inputs import Encoding, Inputs, joined
from ekiden.core.models.images import SHORTEST
from ekiden.readers.cells import warn_of_marks
from ekiden.readers.undecoded import Raw

LEADS = 16
"""most channels that may be leads"""
SUFFIXES = (".npy", ".npz", ".safetensors")
_MOST_CHANNELS = 4
_DARK = 32  # smallest largest value of pixels from 0 to 255
_PIXELS = 64  # values of a sample from which whole numbers may be pixels
_UNSCALED = 1000  # values above it are hardly scaled
_OPAQUE = 0.5  # share of pixels
_FEW = 100  # values of a vector that are looked at one by one
_LONGER = 4  # times as many channels as values in time


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
        return "cnn_signal" if len(shape) == 2 and shape[1] >= SHORTEST else ""

    def encode(self, raw: Any) -> Tensor:
        """Return (n, ...) float32 for an array, or for the path of a file of arrays."""
        return encode(raw, "the arrays given")

    @classmethod
    def assembled(
        cls, sides: Sequence[Sequence[Raw]], wanted: Encoding
    ) -> tuple[list[Tensor], Inputs | None]:
        """Put arrays together. Their type says whether they are images, tokens or other numbers."""
        parts = [[torch.as_tensor(raw.images) for raw in side] for side in sides]
        found: dict[str, Tensor] = {}
        for raw, x in zip(chain(*sides), chain(*parts), strict=True):
            found.setdefault(raw.source, x)  # the training part comes first
        _say_range(found)
        return joined(sides, parts), None

    @classmethod
    def of_cells(cls, table: Any, source: str) -> NDArray[np.float32]:
        """Return the numbers (n, ...) of a column of lists, which may be nested."""
        name, kind = table.column_names[0], table.schema.types[0]
        if not is_list(kind):
            raise UserError(
                f"column {name!r} of {source} holds {kind}, not lists of numbers: give lists of "
                "equal length"
            )
        rows = table.column(0).to_numpy()
        lengths = [-1 if row is None else len(row) for row in rows]
        odd = next((i for i, n in enumerate(lengths) if n != lengths[0] or n < 1), None)
        if odd is not None:
            lacks = (
                "no values"
                if lengths[odd] < 1
                else f"{lengths[odd]} values, row 0 has {lengths[0]}"
            )
            raise UserError(
                f"column {name!r} of {source} has {lacks} in {row_text(odd)}: give all lists the "
                "same length"
            )
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

    def bare(self, x: Tensor) -> Tensor:
        """See `Inputs`: samples of zeros, unless all are."""
        zeros = (x == 0).flatten(1).all(1)
        return zeros & ~zeros.all()

    def takes(self, shape: Sequence[int]) -> str:
        return f"float32 arrays of shape {tuple(shape)}."


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is that of lists."""
    import pyarrow as pa

    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


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
        return (
            {name: found[name] for name in found.files} if path.suffix == ".npz" else {"x": found}
        )
    except Exception as error:  # from numpy, zipfile or safetensors
        why = (
            "it holds Python objects"
            if "pickle" in str(error)
            else str(error).splitlines()[0][:120]
        )
        raise UserError(f"{path} cannot be read ({why}): write arrays of numbers") from None


def noticed(x: Tensor, what: str) -> Tensor:
    """Return samples with the channels of images first, and say where channels seem to come last.

    Bytes (n, H, W) and (n, H, W, C) become (n, C, H, W). Floats are not changed.
    """
    if x.dtype == torch.uint8 and x.ndim == 3:
        return x.unsqueeze(1)
    shape, bytes_ = tuple(x.shape), x.dtype == torch.uint8
    plain = x.ndim == 4 and shape[1] in (1, 3)  # as images with the channels first
    narrow = x.ndim == 4 and (shape[3] <= _MOST_CHANNELS or shape[3] < shape[1] == shape[2])
    if narrow and (not plain or shape[3] == 3 < shape[2]):
        if bytes_ and not plain and shape[3] <= _MOST_CHANNELS < min(shape[1:3]):
            x = x.movedim(3, 1)
            tell(
                f"{what} has x of shape {shape}: the channels come last, so they are moved, to "
                f"{tuple(x.shape)}"
            )
        else:
            tell(
                f"{what} has x of shape {shape}, which is read as {shape[1]} channels of "
                f"{shape[2]} x {shape[3]}: if "
                "the channels come last, move them, as in x.transpose(0, 3, 1, 2)"
            )
    elif bytes_ and x.ndim == 4 and shape[2] <= _MOST_CHANNELS < min(shape[1], shape[3]):
        tell(
            f"{what} has x of shape {shape}, which is read as {shape[1]} channels of {shape[2]} x "
            f"{shape[3]}: if samples come last, move them, as in x.transpose(3, 2, 0, 1)"
        )
    if (
        x.ndim == 4
        and x.shape[1] in (2, 4)
        and (x[:, -1] == (255 if bytes_ else 1)).double().mean() > _OPAQUE
    ):
        tell(
            f"the last of {x.shape[1]} channels of {what} is opaque in most pixels, as alpha is: "
            f"leave it out, as in x[:, :{x.shape[1] - 1}]"
        )
    if x.ndim == 3 and shape[2] < SHORTEST and shape[1] >= _LONGER * shape[2]:
        tell(
            f"{what} has x of shape {shape}, which is read as {shape[1]} channels with {shape[2]} "
            "values in time: if time comes first, move it, as in x.transpose(0, 2, 1)"
        )
    return x


def _say_range(parts: Mapping[str, Tensor]) -> None:
    """Say which sources hold floats that look like pixels from 0 to 255, or that no network learns
    from.
    """
    ends = {
        source: (float(x.min()), float(x.max()))
        for source, x in parts.items()
        if x.is_floating_point()
    }
    pixels = {
        source: ends[source]
        for source, x in parts.items()
        if source in ends and _pictured(x, *ends[source])
    }
    images = {source: end for source, end in ends.items() if parts[source].ndim == 4}
    above, signed = (
        [s for s, (a, _) in images.items() if low <= a <= high]
        for low, high in ((0, inf), (-inf, -0.5))
    )
    if above and signed:
        (a, b), (c, d) = images[signed[0]], images[above[0]]
        tell(
            f"images of {listed(signed)} are floats from {a:.2g} to {b:.2g}, those of "
            f"{listed(above)} from {c:.2g} to {d:.2g}: scale all alike"
        )
    rows = {s: x for s, x in parts.items() if x.ndim == 2 and x.is_floating_point()}
    length = {
        s: torch.linalg.vector_norm(x, dim=1) for s, x in rows.items() if x.shape[1] >= SHORTEST
    }
    one = [s for s, n in length.items() if bool(((n - 1).abs() < 1e-3).all())]
    if 0 < len(one) < len(length):
        tell(
            f"vectors of {listed(one)} have the length 1, and others have not: normalise those of "
            "all, or of none"
        )
    for source, x in rows.items():
        for k, values in enumerate(x.T if x.shape[1] <= _FEW else ()):
            warn_of_marks(
                values.double().cpu().numpy(), f"value {k} of the inputs of {source}", filled=True
            )
    large = {
        source: (a, b)
        for source, (a, b) in ends.items()
        if source not in pixels and max(-a, b) > _UNSCALED
    }
    for found, advice in (
        (pixels, "if they are pixels, give uint8 or divide by 255, or give their mean and std"),
        (large, "networks learn from values around 1, so scale them, or give their mean and std"),
    ):
        if found:
            low, high = (
                min(low for low, _ in found.values()),
                max(high for _, high in found.values()),
            )
            has = "has" if len(found) == 1 else "have"
            tell(
                f"{listed(found)} {has} floats from {low:g} to {high:g}, which are used unchanged: "
                f"{advice}"
            )


def _pictured(x: Tensor, low: float, high: float) -> bool:
    """Return whether floats look like pixels from 0 to 255: images with channels, or many whole
    numbers.
    """
    images = x.ndim == 4 and (x.shape[1] in (1, 3) or x.shape[3] in (1, 3))
    return (
        low >= 0
        and _DARK <= high <= 255
        and (images or (x[0].numel() >= _PIXELS and bool((x == x.round()).all())))
    )
