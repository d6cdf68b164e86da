"""Make tensors of the rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.checks import Checked
from ekiden.base.errors import UserError
from ekiden.data import frames
from ekiden.data.raw import Raw

_SHOWN = 5  # names in a message
_QUOTED = "numbers in quotes"
Numbers = NDArray[np.float64]
Names = NDArray[np.str_]


@dataclass(frozen=True)
class Table(Checked):
    """Rows of a table: (d,) float32.

    A row holds the scaled numbers; then, for each column in which numbers are missing, 1 if this row's is missing and
    0 otherwise; then the code of each category. A missing number is encoded as the mean, which is 0. Code 0 means any
    category that is not in the vocabulary; the others count from 1.

    Before the silos have agreed (`Dataset.least`), rows are float64: unscaled numbers, NaN for a missing one, and codes
    of all categories that occur.

    Attributes:
        numeric: names of the columns of numbers.
        categorical: names of the columns of categories.
        centre: per numeric column, subtracted.
        scale: per numeric column, divided by.
        gaps: the numeric columns for which a row says whether the number is missing.
        vocabularies: per categorical column, its known categories; "" is a missing one.
        agreed: whether the silos have agreed on scaling and vocabularies; see above for rows before that.
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    centre: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    gaps: tuple[str, ...] = ()
    vocabularies: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        agreed = len(self.scale) == len(self.centre) == len(self.numeric) and all(s > 0 for s in self.scale)
        if (self.scale and not agreed) or not set(self.gaps) <= set(self.numeric):
            raise UserError("the columns of a table and their scaling do not go together: agree on them again")
        if self.vocabularies and len(self.vocabularies) != len(self.categorical):
            raise UserError("the columns of a table and their categories do not go together: agree on them again")

    @property
    def numbers(self) -> int:
        """Return how many values of a row are numbers; codes follow."""
        return len(self.numeric) + len(self.gaps)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Return how many codes each categorical column has."""
        return tuple(len(names) + 1 for names in self.vocabularies)

    def encode(self, raw: Any) -> Tensor:
        """Return (n, d) float32 for a path, a frame (pandas, polars, Arrow), or a dict of columns."""
        table = frames.arrow(raw, "the table given")
        return encode(*rows(Raw("the table given", table, np.zeros(len(table)), kind="table"), self), self)


def encode(numbers: Numbers, names: Sequence[Names], table: Table) -> Tensor:
    """Return (n, d) float32 rows.

    Args:
        numbers: (n, numeric) unscaled values, NaN if one is missing.
        names: (n,) for each categorical column, "" if one is missing.
        table: what the silos agreed on.
    """
    centre, scale = np.array(table.centre), np.array(table.scale)
    scaled = np.nan_to_num((numbers - centre) / scale) if table.numeric else numbers
    gaps = np.isnan(numbers[:, [table.numeric.index(name) for name in table.gaps]])
    codes = [_codes(column, known) for column, known in zip(names, table.vocabularies, strict=True)]
    parts = [scaled, gaps.astype(np.float64), *(c[:, None] for c in codes)]
    return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))


def encode_again(x: Tensor, before: Table, after: Table) -> Tensor:
    """Return unscaled rows (n, d) float64 as scaled rows."""
    rows, n = x.numpy(), len(before.numeric)
    known = [np.array(["", *names], dtype=np.str_) for names in before.vocabularies]
    names = [known[k][rows[:, n + k].astype(np.int64)] for k in range(len(known))]
    return encode(rows[:, :n], names, after)


def unscaled(raws: Sequence[Raw], categorical: Sequence[str] = ()) -> tuple[Table, list[Tensor]]:
    """Return the columns of several tables together, and their rows (n, d) float64, unscaled.

    Args:
        raws: the tables.
        categorical: columns of numbers that are codes of categories.
    """
    first, wanted = raws[0].source, raws[0].images.column_names
    for raw in raws:
        _same_columns(wanted, raw.images.column_names, first, raw.source)
    for name in categorical:
        if name not in wanted:
            raise UserError(f"{first} has no column {name!r} to take as categories: it has {', '.join(wanted)}")
    kinds = {name: _kind(name, raws, categorical) for name in wanted}
    if lost := [name for name, kind in kinds.items() if not kind]:
        raise UserError(
            f"column {lost[0]!r} of {first} has no value at all: leave it out with --drop-columns {lost[0]}"
        )
    table = Table(*(tuple(n for n in wanted if kinds[n] == kind) for kind in ("numbers", "names")))
    read = [rows(raw, table) for raw in raws]
    found = [np.unique(np.concatenate([names[k] for _, names in read])) for k in range(len(table.categorical))]
    table = replace(table, vocabularies=tuple(tuple(map(str, names)) for names in found))
    tensors = []
    for numbers, names in read:
        codes = [_codes(column, known)[:, None] for column, known in zip(names, table.vocabularies, strict=True)]
        tensors.append(torch.from_numpy(np.concatenate([numbers, *codes], axis=1)))
    return table, tensors


def rows(raw: Raw, table: Table) -> tuple[Numbers, list[Names]]:
    """Return from rows of a table the numbers (n, numeric), and the names (n,) of each categorical column."""
    frame = raw.images
    _same_columns([*table.numeric, *table.categorical], frame.column_names, "the model's data", raw.source, more=True)
    numbers = [_numbers(raw, name) for name in table.numeric]
    empty = np.empty((len(frame), 0))
    names = [_texts(frame[name]) for name in table.categorical]
    return (np.stack(numbers, axis=1) if numbers else empty), names


def _same_columns(wanted: Sequence[str], found: Sequence[str], first: str, source: str, *, more: bool = False) -> None:
    lacking = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not more]
    if lacking:
        raise UserError(
            f"{source} has no column {', '.join(map(repr, lacking[:_SHOWN]))}, which {first} has: it has "
            f"{', '.join(found)}; all silos need the same columns"
        )
    if extra:
        raise UserError(
            f"{source} has the column{'s' * (len(extra) > 1)} {', '.join(map(repr, extra[:_SHOWN]))}, which "
            f"{first} does not have: use --drop-columns {' '.join(extra[:_SHOWN])}"
        )


def _kind(name: str, raws: Sequence[Raw], categorical: Sequence[str]) -> str:
    """Return numbers, names, or "" for a column without any value."""
    kinds = [_type(raw.images[name].type, name, raw.source) for raw in raws]
    if name in categorical:
        return "names" if any(kinds) else ""
    texts, numbers = ([r for k, r in zip(kinds, raws, strict=True) if k == kind] for kind in ("names", "numbers"))
    if texts and numbers:
        shown = next((raw for raw in texts if _first_text(raw, name) != _QUOTED), texts[0])
        raise UserError(
            f"column {name!r} of {shown.source} holds text ({_first_text(shown, name)}), but that of "
            f"{numbers[0].source} numbers: correct it, or take it as categories everywhere with --categorical-columns "
            f"{name}"
        )
    return "names" if texts else "numbers" if numbers else ""


def _first_text(raw: Raw, name: str) -> str:
    """Return the first value of a column that is not a number, with its row."""
    for row, value in enumerate(raw.images[name].to_pylist()):
        try:
            float(value)
        except (TypeError, ValueError):
            if value is not None:
                return f"{value!r} in {raw.row(row)}"
    return _QUOTED


def _type(kind: Any, name: str, source: str) -> str:
    import pyarrow as pa  # noqa: PLC0415  (`import ekiden` stays light)

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
        return _type(kind, name, source) and "names"
    if types.is_null(kind):
        return ""
    numbers = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_temporal)
    if any(test(kind) for test in numbers):
        return "numbers"
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return "names"
    raise UserError(
        f"column {name!r} of {source} holds {kind}, neither numbers nor text: leave it out with --drop-columns "
        f"{name}, or name it with --image-column or --array-column"
    )


def _numbers(raw: Raw, name: str) -> Numbers:
    """Return the values (n,) of a column; dates and times become days since 1970."""
    import pyarrow as pa  # noqa: PLC0415

    column, source = raw.images[name], raw.source
    kind = column.type
    if pa.types.is_temporal(kind):
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            unit = 1e-9 / 86_400
            stamps = (
                column.cast(pa.timestamp("ns", tz=getattr(kind, "tz", None)))
                .cast(pa.int64())
                .cast(pa.float64(), safe=False)
            )
            return np.array(stamps.to_numpy(), dtype=np.float64) * unit
        raise UserError(f"column {name!r} of {source} holds {kind}: leave it out with --drop-columns {name}")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    try:
        values = column.cast(pa.float64(), safe=False).to_numpy()
    except pa.ArrowException:
        raise UserError(
            f"column {name!r} of {source} holds text ({_first_text(raw, name)}), but numbers are expected: correct it"
        ) from None
    values = np.array(values, dtype=np.float64)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise UserError(f"column {name!r} of {source} is infinite in {raw.row(row)}: give a number, or leave it empty")
    return values


def _texts(column: Any) -> Names:
    """Return names (n,), "" if one is missing."""
    import pyarrow as pa  # noqa: PLC0415

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return np.array(["" if v is None else str(v) for v in column.to_pylist()], dtype=np.str_)


def _codes(names: Names, known: Sequence[str]) -> NDArray[np.float64]:
    """Return positions in `known`, counted from 1; 0 for other names."""
    place = {name: i for i, name in enumerate(known, 1)}
    found, inverse = np.unique(names, return_inverse=True)
    return np.array([place.get(str(name), 0) for name in found], dtype=np.float64)[inverse]
