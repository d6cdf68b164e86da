"""Read samples that are already in Python: arrays, pairs, and map-style datasets such as those of torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.wording import row_text
from ekiden.data.arrays import Arrays, noticed
from ekiden.data.decode import Images, decode
from ekiden.data.raw import Raw
from ekiden.data.samples import Samples
from ekiden.data.tasks import LanguageModelling, inferred


class Pairs(Protocol):
    """A map-style dataset of (x, y) pairs, such as those of torch."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """(x, y) of one sample."""
        ...


Source: TypeAlias = tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | Samples | Pairs
"""(x, y) with x (n, ...) and y (n,), or a map-style dataset of such pairs."""


def raw_of(source: Any, what: str) -> Raw:
    """Return the samples of arrays (x, y), of `Samples`, or of a map-style dataset of pairs.

    Args:
        source: what the user gave.
        what: its name in messages.
    """
    if isinstance(source, Samples):
        raw = _raw(source.x, source.y, what, source.classes)
        subject, time = (_for_each(getattr(source, part), raw, part) for part in ("subject", "time"))
        if subject is not None and subject.dtype.kind == "f":
            raise UserError(f"subject of {what} holds fractions: number the subjects by integers")
        return replace(raw, subject=subject, time=time)
    if isinstance(source, tuple) and len(source) == 2:
        x, y = source
        if np.ndim(y) == 0 and isinstance(y, Tensor | int | np.integer) and not isinstance(x, int | float | np.number):
            raise UserError(
                f"{what} is one sample, not many: give (inputs, labels) with one row and one label for each sample, or "
                "divide a data set with ekiden.split"
            )
        if _array_like(x) and _array_like(y):
            numbers = _array(x, what)
            if isinstance(numbers, np.ndarray) and numbers.dtype.kind not in "biuf":
                raise UserError(f"{what} holds {numbers.dtype} as inputs: give numbers, or a frame of texts")
            return _raw(torch.as_tensor(numbers), _array(y, what), what)
    return _raw(*_collected(source, what), what)


def _raw(x: Tensor, y: Any, what: str, classes: tuple[str, ...] = ()) -> Raw:
    names = isinstance(y, np.ndarray) and y.ndim == 1 and len(y) > 0 and all(isinstance(label, str) for label in y)
    label = y.astype(np.str_) if names else torch.as_tensor(y).cpu().numpy()
    tokens = not names and isinstance(inferred(torch.as_tensor(label), x), LanguageModelling)
    x = x.long() if tokens else _inputs(x, what)
    if len(label) != len(x):
        raise UserError(
            f"{what} has {len(x)} samples and {len(label)} labels: it must hold {len(x)} integers or other labels"
        )
    return Raw(what, x, label, classes=classes, kind=Arrays, given=True)


def _for_each(values: Any, raw: Raw, part: str) -> NDArray[Any] | None:
    """Return numbers (n,), one for each sample."""
    if values is None:
        return None
    what = f"{part} of {raw.source}"
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} must be numbers ({error}): number names first") from None
    if numbers.shape != (len(raw),) or not torch.isfinite(numbers).all():
        raise UserError(
            f"{what} has shape {tuple(numbers.shape)}: give one finite number for each of {len(raw)} samples"
        )
    return (numbers if numbers.is_floating_point() else numbers.long()).cpu().numpy()


def _array_like(part: Any) -> bool:
    """Return whether `part` is an array, or a list of numbers, names, or lists."""
    if isinstance(part, list):
        return bool(part) and isinstance(part[0], int | float | str | np.number | list)
    return hasattr(part, "__array__")


def _array(part: Any, what: str) -> Any:
    if isinstance(part, Tensor):
        return part
    try:
        array = np.asarray(part)
    except ValueError:
        raise UserError(f"{what} holds rows of different lengths: give each sample the same shape") from None
    if array.dtype == object and not all(isinstance(value, str) for value in array.flat):
        raise UserError(f"{what} holds values that are not numbers: give numbers, or name the columns to use")
    foreign = not array.dtype.isnative or any(stride < 0 for stride in array.strides) or not array.flags.writeable
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C") if foreign else array


def _collected(pairs: Any, what: str) -> tuple[Tensor, Any]:
    """Return the samples and labels of pairs."""
    try:
        items = [pairs[i] for i in range(len(pairs))] if hasattr(pairs, "__len__") else [*iter(pairs)]
        xs, ys = [x for x, _ in items], [y for _, y in items]
        named = bool(ys) and all(isinstance(y, str) for y in ys)
        labels = np.array(ys, dtype=np.str_) if named else _numbers(ys)
        if xs and all(isinstance(x, Image.Image) for x in xs):
            return decode([[Raw(what, xs, np.zeros(len(xs), dtype=np.int64), kind=Images)]], Images())[0], labels
        tensors = [x if isinstance(x, Tensor) else torch.from_numpy(np.array(x)) for x in xs]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise UserError(
            f"{what} must be tensors (x, y) or a map-style dataset of pairs (x, y), y integers or names ({error})."
        ) from error
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) > 1:
        raise UserError(f"samples of {what} differ in shape ({', '.join(map(str, sorted(shapes)[:3]))}): resize them.")
    return (torch.stack(tensors) if tensors else torch.empty(0)), labels


def _numbers(ys: Sequence[Any]) -> Tensor:
    """Return the labels of pairs: whole numbers as int64, other numbers and arrays unchanged."""
    if any(np.ndim(y) for y in ys):
        return torch.stack([torch.as_tensor(y) for y in ys])
    values = [y.item() if isinstance(y, Tensor) else y for y in ys]
    if any(int(value) != value for value in values):
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    return torch.tensor([int(value) for value in values], dtype=torch.int64)


def _inputs(x: Tensor, what: str) -> Tensor:
    """Check samples (n, ...), and return them as uint8 images or float32."""
    if len(x) == 0 or x.ndim < 2:
        raise UserError(f"{what} has x of shape {tuple(x.shape)}: it must be (n, ...) with n at least 1.")
    if x.dtype == torch.uint8 and x.ndim in (3, 4):
        return noticed(x, what)
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise UserError(
            f"{what} has {kind} x of shape {tuple(x.shape)}: give uint8 images (n, C, H, W) or float values."
        )
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    if bad.any():
        raise UserError(
            f"{what} has NaN or infinity in {row_text(int(bad.nonzero()[0]))}: remove or replace such values."
        )
    return noticed(x.float(), what)
