"""Read when samples were taken: dates or numbers, from which only their order is used."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.undecoded import Raw

_WRITE = "write times as 2024-01-31, 2024-01-31 10:30:00, or as numbers"


def read(column: Any, what: str) -> NDArray[Any]:
    """Return the times of an Arrow column: (n,) datetime64[us] for dates, float64 for numbers.

    Args:
        column: a `pyarrow.ChunkedArray` of dates, timestamps, numbers, or texts such as 2024-01-31.
        what: its name in messages.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise UserError(f"{what} has no value in row {row}: give every row a time.")
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _dates(column, what)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _microseconds(column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _finite(np.array(column.cast(pa.float64(), safe=False).to_numpy()), what)
    raise UserError(f"{what} holds {kind}: {_WRITE}")


def of_array(values: NDArray[Any], what: str) -> NDArray[Any]:
    """Return the times of an array (n,) of numbers, dates or texts, as `read` does."""
    if values.ndim != 1 or values.dtype.kind not in "iufMU":
        raise UserError(f"{what} holds {values.dtype} of shape {values.shape}: {_WRITE}")
    return read(pa.chunked_array([pa.array(values)]), what)


def numbers(parts: Sequence[Raw]) -> list[Tensor | None]:
    """Return the times of all parts as numbers (n,) that can be compared; None if the parts have no times."""
    given = [part.time for part in parts if part.time is not None]
    if len(given) < len(parts):
        return [None] * len(parts)
    odd = next((k for k, values in enumerate(given) if values.dtype != given[0].dtype), None)
    if odd is not None:
        what = ["dates" if values.dtype.kind == "M" else "numbers" for values in (given[0], given[odd])]
        raise UserError(
            f"the times of {parts[0].source} are {what[0]}, those of {parts[odd].source} {what[1]}: {_WRITE} everywhere"
        )
    return [torch.from_numpy(values.astype(np.int64) if values.dtype.kind == "M" else values) for values in given]


def _dates(column: Any, what: str) -> NDArray[Any]:
    for zone in (None, "UTC"):  # Arrow reads texts either all with a time zone or all without one
        try:
            return _microseconds(column.cast(pa.timestamp("us", zone)))
        except pa.ArrowInvalid:
            continue
    texts = column.to_pylist()
    row = next((k for k, text in enumerate(texts) if not _is_date(text)), 0)
    raise UserError(f"{what} holds {texts[row]!r} in row {row}, which is not a time: {_WRITE}")


def _is_date(text: str) -> bool:
    try:
        pa.array([text]).cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        return False
    return True


def _microseconds(column: Any) -> NDArray[Any]:
    return np.array(column.cast(pa.timestamp("us"), safe=False).to_numpy(), dtype="datetime64[us]")


def _finite(values: NDArray[Any], what: str) -> NDArray[Any]:
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UserError(f"{what} is {values[row]} in row {row}: give every row a time.")
    return values
