"""Tables as tensors, and what silos tell one another so that all scale alike: sums and counts, never a row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.files import natural
from ekiden.data.inputs import Inputs, Table
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.data.tasks import Regression, Task

_SHOWN = 5  # names in a message
Numbers = NDArray[np.float64]
Names = NDArray[np.str_]


@dataclass(frozen=True)
class ColumnSums:
    """What a silo tells of its training rows.

    A column with fewer values than the least count, and a category with fewer rows, are not told of.

    Attributes:
        values: by numeric column and by target: how many values there are, their sum, and the sum of their squares.
        missing: by numeric column, how many values are missing.
        categories: by categorical column, how many rows each category has.
    """

    values: Mapping[str, tuple[int, float, float]]
    missing: Mapping[str, int]
    categories: Mapping[str, Mapping[str, int]]

    def plus(self, other: "ColumnSums") -> "ColumnSums":
        """The sums of both."""

        def each(a: tuple[int, float, float], b: tuple[int, float, float]) -> tuple[int, float, float]:
            return a[0] + b[0], a[1] + b[1], a[2] + b[2]

        return ColumnSums(
            {k: each(v, other.values[k]) for k, v in self.values.items()},
            {k: n + other.missing[k] for k, n in self.missing.items()},
            {k: _counted(counts, other.categories[k]) for k, counts in self.categories.items()},
        )

    def to_json(self) -> str:
        """As text, the same for the same sums."""
        return json.dumps(
            {"values": self.values, "missing": self.missing, "categories": self.categories}, indent=1, sort_keys=True
        )

    @staticmethod
    def from_json(text: str, where: str) -> "ColumnSums":
        """The sums in a text.

        Raises:
            UserError: they are none.
        """
        try:
            found = json.loads(text)
            values = {str(k): (int(n), float(s), float(q)) for k, (n, s, q) in found["values"].items()}
            missing = {str(k): int(n) for k, n in found["missing"].items()}
            categories = {str(k): {str(c): int(n) for c, n in v.items()} for k, v in found["categories"].items()}
            if set(missing) - set(values):
                raise ValueError("columns")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{where} holds no sums of a table: make them with `ekiden silo sums silo.toml`") from None
        return ColumnSums(values, missing, categories)

    def moments(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a column; 1 for a column that does not vary.

        Raises:
            UserError: no silo told of it.
        """
        n, total, squares = self.values[name]
        if not n:
            raise UserError(
                f"no silo has enough values in column {name!r} to send its sums: leave it out by --drop-columns "
                f"{name}, or lower --min-count"
            )
        mean = total / n
        variance = squares / n - mean * mean
        # What is left of a constant after rounding is not a scale.
        return mean, sqrt(variance) if variance > 1e-12 * max(mean * mean, 1e-12) else 1.0


def sums(x: Tensor, table: Table, least: int, targets: Mapping[str, Tensor]) -> ColumnSums:
    """Add up training rows.

    Args:
        x: (n, d) float64 rows that are not scaled yet.
        table: their columns.
        least: fewest rows about which anything is told.
        targets: (n,) numbers to predict, by name.
    """
    rows = x.numpy()
    values, missing = {}, {}
    for place, name in enumerate(table.numeric):
        column = rows[:, place]
        present = column[~np.isnan(column)]
        gaps = len(column) - len(present)
        values[name] = _told(present, least)
        missing[name] = gaps if gaps >= least else 0
    for name, y in targets.items():
        values[target(name)] = _told(y.double().numpy(), least)
    categories = {}
    for place, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True)):
        counts = np.bincount(rows[:, len(table.numeric) + place].astype(np.int64), minlength=len(known) + 1)
        categories[name] = {known[code - 1]: int(n) for code, n in enumerate(counts) if code and n >= least}
    return ColumnSums(values, missing, categories)


def target(name: str) -> str:
    """What a target is called among the sums, where a column may have the same name."""
    return f"target: {name}"


def agree(table: Table, told: Sequence[ColumnSums]) -> Table:
    """The scaling and the vocabularies for which all silos have told enough.

    Raises:
        UserError: no silo told of a column.
    """
    total = told[0]
    for one in told[1:]:
        total = total.plus(one)
    moments = [total.moments(name) for name in table.numeric]
    vocabularies = tuple(tuple(sorted(total.categories[name], key=natural)) for name in table.categorical)
    for name, known in zip(table.categorical, vocabularies, strict=True):
        if not known:
            raise UserError(
                f"column {name!r} has no text that enough rows of a silo share: leave it out by --drop-columns {name}, "
                f"read it as text by --text-column {name}, or lower --min-count"
            )
    return Table(
        table.numeric,
        table.categorical,
        tuple(mean for mean, _ in moments),
        tuple(std for _, std in moments),
        tuple(name for name in table.numeric if total.missing[name]),
        vocabularies,
    )


def encode(numbers: Numbers, names: Sequence[Names], table: Table) -> Tensor:
    """Return (n, d) float32 rows.

    Args:
        numbers: (n, numeric) values as they are, NaN where one is missing.
        names: (n,) for each categorical column, "" where one is missing.
        table: what was agreed.
    """
    centre, scale = np.array(table.centre), np.array(table.scale)
    scaled = np.nan_to_num((numbers - centre) / scale) if table.numeric else numbers
    gaps = np.isnan(numbers[:, [table.numeric.index(name) for name in table.gaps]])
    codes = [_codes(column, known) for column, known in zip(names, table.vocabularies, strict=True)]
    parts = [scaled, gaps.astype(np.float64), *(c[:, None] for c in codes)]
    return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))


def encode_again(x: Tensor, before: Table, after: Table) -> Tensor:
    """(n, d) float64 rows that were not scaled yet, scaled."""
    rows, n = x.numpy(), len(before.numeric)
    known = [np.array(["", *names], dtype=np.str_) for names in before.vocabularies]
    names = [known[k][rows[:, n + k].astype(np.int64)] for k in range(len(known))]
    return encode(rows[:, :n], names, after)


def unscaled(
    parts: Sequence[Any], sources: Sequence[str], categorical: Sequence[str] = ()
) -> tuple[Table, list[Tensor]]:
    """The columns of several tables together, and their rows (n, d) float64, not scaled.

    Args:
        parts: Arrow tables.
        sources: what they are called in messages.
        categorical: columns of numbers that are codes of categories.

    Raises:
        UserError: they have different columns, or a column holds numbers in one and text in another.
    """
    wanted = parts[0].column_names
    for part, source in zip(parts, sources, strict=True):
        _same_columns(wanted, part.column_names, sources[0], source)
    for name in categorical:
        if name not in wanted:
            raise UserError(f"{sources[0]} has no column {name!r} to take as categories: it has {', '.join(wanted)}")
    kinds = {name: _kind(name, parts, sources, categorical) for name in wanted}
    if lost := [name for name, kind in kinds.items() if not kind]:
        raise UserError(
            f"column {lost[0]!r} of {sources[0]} has no value at all: leave it out by --drop-columns {lost[0]}"
        )
    table = Table(*(tuple(n for n in wanted if kinds[n] == kind) for kind in ("numbers", "names")))
    read = [rows(part, table, source) for part, source in zip(parts, sources, strict=True)]
    found = [np.unique(np.concatenate([names[k] for _, names in read])) for k in range(len(table.categorical))]
    table = replace(table, vocabularies=tuple(tuple(map(str, names)) for names in found))
    tensors = []
    for numbers, names in read:
        codes = [_codes(column, known)[:, None] for column, known in zip(names, table.vocabularies, strict=True)]
        tensors.append(torch.from_numpy(np.concatenate([numbers, *codes], axis=1)))
    return table, tensors


def rows(frame: Any, table: Table, source: str) -> tuple[Numbers, list[Names]]:
    """The numbers (n, numeric), and the names (n,) of each categorical column, of an Arrow table.

    Raises:
        UserError: a column is missing, or holds text where numbers are expected.
    """
    _same_columns([*table.numeric, *table.categorical], frame.column_names, "the model's data", source, more=True)
    numbers = [_numbers(frame[name], name, source) for name in table.numeric]
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
            f"{first} has not: leave out by --drop-columns {' '.join(extra[:_SHOWN])}"
        )


def _kind(name: str, parts: Sequence[Any], sources: Sequence[str], categorical: Sequence[str]) -> str:
    """numbers, names, or "" for a column without any value."""
    kinds = [_type(part[name].type, name, source) for part, source in zip(parts, sources, strict=True)]
    if name in categorical:
        return "names" if any(kinds) else ""
    known = [(kind, source) for kind, source in zip(kinds, sources, strict=True) if kind]
    for kind, source in known[1:]:
        if kind != known[0][0]:
            text, other = (source, known[0][1]) if kind == "names" else (known[0][1], source)
            part = parts[list(sources).index(text)]
            raise UserError(
                f"column {name!r} of {text} holds text ({_first_text(part[name])}), that of {other} numbers: "
                f"correct it, or take it as categories everywhere by --categorical-columns {name}"
            )
    return known[0][0] if known else ""


def _first_text(column: Any) -> str:
    """The first value that is not a number, with its row."""
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value)
        except (TypeError, ValueError):
            if value is not None:
                return f"{value!r} in row {row}"
    return "numbers in quotes"


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
        f"column {name!r} of {source} holds {kind}, which is neither numbers nor text: leave it out by --drop-columns "
        f"{name}, or name it by --image-column or --array-column"
    )


def _numbers(column: Any, name: str, source: str) -> Numbers:
    """(n,) values; days since 1970 for dates and times."""
    import pyarrow as pa  # noqa: PLC0415

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
        raise UserError(f"column {name!r} of {source} holds {kind}: leave it out by --drop-columns {name}")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    try:
        values = column.cast(pa.float64(), safe=False).to_numpy()
    except pa.ArrowException:
        raise UserError(
            f"column {name!r} of {source} holds text ({_first_text(column)}), numbers are expected: correct it"
        ) from None
    values = np.array(values, dtype=np.float64)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise UserError(f"column {name!r} of {source} is infinite in row {row}: give a number, or leave it empty")
    return values


def _texts(column: Any) -> Names:
    """(n,) names, "" where one is missing."""
    import pyarrow as pa  # noqa: PLC0415

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return np.array(["" if v is None else str(v) for v in column.to_pylist()], dtype=np.str_)


def _codes(names: Names, known: Sequence[str]) -> NDArray[np.float64]:
    """Places in `known` from 1; 0 for other names."""
    place = {name: i for i, name in enumerate(known, 1)}
    found, inverse = np.unique(names, return_inverse=True)
    return np.array([place.get(str(name), 0) for name in found], dtype=np.float64)[inverse]


def _told(values: Numbers, least: int) -> tuple[int, float, float]:
    if len(values) < least:
        return 0, 0.0, 0.0
    return len(values), float(values.sum()), float(np.square(values).sum())


def _counted(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}


def agreed(fed: FederatedData) -> FederatedData:
    """The federation with one scaling for all clients, from what each tells of its training rows.

    Scaled are the columns of a table, and the targets of a regression.

    Raises:
        UserError: no client told of a column.
    """
    if not fed.dataset.least:
        return fed
    told = [told_by(client, fed.dataset) for client in fed.clients]
    table = fed.dataset.inputs
    after = agree(table, told) if isinstance(table, Table) else table
    return scaled(fed, after, scaled_task(fed.dataset.task, fed.dataset.classes, told))


def told_by(client: ClientData, dataset: Dataset) -> ColumnSums:
    """What a client tells of its training rows."""
    targets: dict[str, Tensor] = {}
    if isinstance(dataset.task, Regression):
        y = client.train.y
        columns = y[:, None] if y.ndim == 1 else y
        targets = {name: columns[:, k] for k, name in enumerate(dataset.classes)}
    table = dataset.inputs if isinstance(dataset.inputs, Table) else Table((), ())
    rows = client.train.x if isinstance(dataset.inputs, Table) else torch.empty(len(client.train), 0)
    return sums(rows, table, dataset.least, targets)


def scaled_task(task: Task, names: Sequence[str], told: Sequence[ColumnSums]) -> Task:
    """The task with the targets' scale, for regression."""
    if not isinstance(task, Regression):
        return task
    total = told[0]
    for one in told[1:]:
        total = total.plus(one)
    moments = [total.moments(target(name)) for name in names]
    return replace(task, mean=tuple(m for m, _ in moments), std=tuple(s for _, s in moments))


def scaled(fed: FederatedData, after: Inputs, task: Task) -> FederatedData:
    """The same samples, encoded as agreed."""
    dataset, before = fed.dataset, fed.dataset.inputs
    train, test = dataset.train, dataset.test
    if isinstance(before, Table) and isinstance(after, Table):
        train, test = (replace(s, x=encode_again(s.x, before, after)) for s in (train, test))

    def moved(part: Subset) -> Subset:
        return Subset(train if part.samples is dataset.train else test, part.rows)

    clients = tuple(replace(c, train=moved(c.train), val=moved(c.val), test=moved(c.test)) for c in fed.clients)
    return FederatedData(replace(dataset, train=train, test=test, inputs=after, task=task, least=0), clients)
