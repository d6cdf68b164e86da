"""Understand data as other libraries hold them: make tensors or pairs of them, and refuse what is unclear."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data import frames


@dataclass(frozen=True)
class NamedPairs:
    """Pairs (x, y) whose labels have names.

    Attributes:
        pairs: the samples.
        classes: the names, in the order of the labels.
    """

    pairs: list[tuple[Any, Any]]
    classes: tuple[str, ...]


def recognised(source: Any, what: str) -> Any:
    """Return `source` as (x, y) arrays or as a map-style dataset of pairs; unchanged if it is neither of these.

    Pairs of arrays, lists, and pandas frames and series become arrays. Data sets of Hugging Face with one column of
    images and one of classes become `NamedPairs`.

    Args:
        source: what the user gave.
        what: its name in messages.
    """
    if frames.is_frame(source) and not _is(source, "datasets", "Dataset"):
        raise UserError(
            f"{what} is a {type(source).__name__}, which does not say what the label is: name it, as in "
            'ekiden.load(frame, label_column="died") or ekiden.federate([frame, frame], label_column="died")'
        )
    if _is(source, "datasets", "DatasetDict"):
        raise UserError(f'{what} is a DatasetDict of {", ".join(source)}: give one of its parts, as in data["train"]')
    if _is(source, "datasets", "Dataset"):
        image, label = _columns(source, what)
        return NamedPairs([(row[image], row[label]) for row in source], tuple(source.features[label].names))
    if not isinstance(source, tuple) or len(source) != 2:
        return source
    x, y = source
    if np.ndim(y) == 0 and isinstance(y, Tensor | int | np.integer) and not isinstance(x, int | float | np.number):
        raise UserError(
            f"{what} is one sample, not many: give (inputs, labels) with one row and one label for each sample, or "
            "divide a data set with ekiden.split"
        )
    if not _array_like(x) or not _array_like(y):
        return source
    return _array(x, what), _array(y, what)


def _is(source: Any, library: str, name: str) -> bool:
    """Return whether `source` is an instance of a library's class; the library is not imported for this."""
    module = sys.modules.get(library)
    return module is not None and isinstance(source, getattr(module, name, ()))


def pairs_of_images(source: Any) -> bool:
    """Return whether `source` is a data set of Hugging Face with one column of images and one of classes."""
    kinds = [type(kind).__name__ for kind in source.features.values()] if _is(source, "datasets", "Dataset") else []
    return kinds.count("Image") == 1 and kinds.count("ClassLabel") == 1


def _columns(table: Any, what: str) -> tuple[str, str]:
    """Return the columns of images and of classes."""
    kinds = {name: type(kind).__name__ for name, kind in table.features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    if len(images) != 1 or len(labels) != 1:
        raise UserError(
            f"{what} is a Hugging Face data set with columns {', '.join(kinds)}, of which not exactly one holds images "
            'and one classes: name them, as in ekiden.load(data, text_column="text", label_column="label")'
        )
    return images[0], labels[0]


def _array_like(part: Any) -> bool:
    """Return whether `part` is an array, or a list of numbers, names, or lists."""
    if isinstance(part, list):
        return bool(part) and isinstance(part[0], int | float | str | np.number | list)
    return hasattr(part, "__array__")


def _array(part: Any, what: str) -> Any:
    if isinstance(part, Tensor | np.ndarray):
        return part
    try:
        array = np.asarray(part)
    except ValueError:
        raise UserError(f"{what} holds rows of different lengths: give each sample the same shape") from None
    if array.dtype == object and not all(isinstance(value, str) for value in array.flat):
        raise UserError(f"{what} holds values that are not numbers: give numbers, or name the columns to use")
    return array if array.flags.writeable else array.copy()
