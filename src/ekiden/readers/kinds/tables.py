"""Make tensors of the rows of a table."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError, listed, nearest, tell
from ekiden.core.data.inputs import Encoding, Inputs
from ekiden.readers import frames
from ekiden.readers.cells import DATE, Cells, Writing
from ekiden.readers.dates import ZONE
from ekiden.readers.undecoded import Raw, not_in

# deviations between the middle of a column and that of training
_FAR = 8.0
Numbers = NDArray[np.float64]
Names = NDArray[np.str_]


@dataclass(frozen=True)
class Table(Inputs):
    """Rows of a table: (d,) float32.

    A row holds the scaled numbers; then, for each column in which numbers are missing, 1 if this
    row's is missing and 0 otherwise; then the code of each category. A missing number is encoded as
    the mean, which is 0. Code 0 means any category that is not in the vocabulary; the others count
    from 1.

    Before the silos have agreed (`Dataset.least`), rows are float64: unscaled numbers, NaN for a
    missing one, and codes of all categories that occur.
    """

    kind = "table"
    words = "a table"
    agreed = True

    # names of the columns of numbers
    numeric: tuple[str, ...] = ()
    # names of the columns of categories
    categorical: tuple[str, ...] = ()
    # per numeric column, subtracted
    centre: tuple[float, ...] = ()
    # per numeric column, divided by
    scale: tuple[float, ...] = ()
    # the numeric columns for which a row says whether the number is missing
    gaps: tuple[str, ...] = ()
    # per categorical column, its known categories; "" is a missing one
    vocabularies: tuple[tuple[str, ...], ...] = ()
    # the numeric columns that are dates, as days since 1970
    dates: tuple[str, ...] = ()
    # cells that mark a missing value, in addition to the usual ones
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        agreed = len(self.scale) == len(self.centre) == len(self.numeric) and all(
            s > 0 for s in self.scale
        )
        if (self.scale and not agreed) or not set(self.gaps) <= set(self.numeric):
            raise UserError(
                "the columns of a table and their scaling do not go together: agree on them again"
            )
        if self.vocabularies and len(self.vocabularies) != len(self.categorical):
            raise UserError(
                "the columns of a table and their categories do not go together: agree on them "
                "again"
            )

    @property
    def continuous(self) -> bool:
        """See `Inputs`; codes of categories are not."""
        return not self.categorical

    def network(self, shape: tuple[int, ...]) -> str:
        return "table_mlp"

    def takes(self, shape: Sequence[int]) -> str:
        return f"rows with the columns {', '.join((*self.numeric, *self.categorical))}."

    @classmethod
    def taken(cls, samples: Any, rows: NDArray[np.int64]) -> Any:
        return samples.take(rows)

    @classmethod
    def assembled(
        cls, sides: Sequence[Sequence[Raw]], wanted: Encoding
    ) -> tuple[list[Tensor], Inputs | None]:
        """Encode rows as agreed, or leave them unscaled until the silos agree."""
        known = wanted.known
        if wanted.size:
            raise UserError("--size is the side of images, but the data are a table: leave it out")
        raws = [*chain.from_iterable(sides)]
        if isinstance(known, Table):
            known.say_unknown(raws)
        if known:
            return [torch.cat([*map(known.encode, side)]) for side in sides], known
        table, x = unscaled(raws, wanted.reading.missing)
        # copies: a process that gets one side would get the memory of both
        sizes = [sum(map(len, side)) for side in sides]
        return [*map(torch.clone, torch.split(x, sizes))], table

    @staticmethod
    def of(inputs: Inputs | None) -> "Table":
        """Return these inputs if they are a table, otherwise a table without columns."""
        if isinstance(inputs, Table):
            return inputs
        return Table()

    @property
    def numbers(self) -> int:
        """Return how many values of a row are numbers; codes follow."""
        return len(self.numeric) + len(self.gaps)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Return how many codes each categorical column has."""
        return tuple(len(names) + 1 for names in self.vocabularies)

    def compared(self, x: Tensor) -> NDArray[Any]:
        """See `Inputs`; silos may have the columns in another order, and other categories."""
        values = x.double().cpu().numpy()
        # gaps and codes follow
        columns = dict(zip(self.numeric, values.T, strict=False))
        for k, (name, known) in enumerate(
            zip(self.categorical, self.vocabularies, strict=True), self.numbers
        ):
            hashes = [int.from_bytes(blake2b(c.encode(), digest_size=6).digest()) for c in known]
            columns[name] = np.array([0, *hashes], dtype=np.float64)[values[:, k].astype(np.int64)]
        return np.stack([columns[name] for name in sorted(columns)], axis=1)

    def encode(self, raw: Any) -> Tensor:
        """Return (n, d) float32 for a path, a frame (pandas, polars, Arrow), a dict of columns, or
        what `read` gave.
        """
        if not isinstance(raw, Raw):
            raw = self.read(frames.arrow(raw, "the table given"), "the table given")
        numbers, names = rows(raw, self)
        self.say_far(numbers, raw.source)
        return self.scaled(numbers, names)

    def values_named(self, width: int) -> list[str]:
        found = [f"column {name!r}" for name in self.numeric]
        # unscaled rows hold no gaps
        if self.scale:
            found += [f"the gaps of column {name!r}" for name in self.gaps]
        return found + [f"column {name!r}" for name in self.categorical]

    def say_unknown(self, raws: Sequence[Raw]) -> None:
        """Count and name the categories that were not agreed on."""
        found = []
        rows_ = sum(map(len, raws))
        for name, known in zip(self.categorical, self.vocabularies, strict=True):
            counts = Counter[str]()
            for raw in raws:
                counts.update(_names(raw.images[name]).tolist())
            for text in ("", *known):
                counts.pop(text, None)
            if counts:
                strange = listed(map(repr, dict(counts.most_common())))
                found.append(f"column {name!r}: {strange} in {counts.total():,} of {rows_:,} rows")
        if found:
            tell(
                f"{raws[0].source} holds categories that the model does not know "
                f"({'; '.join(found)}): all of them "
                "count as one, as categories with too few rows did in training"
            )

    def say_far(self, numbers: Numbers, source: str) -> None:
        """Name columns (n, numeric) of which the middle is far from training, or that have no
        value.
        """
        for name, values, mean, scale in zip(
            self.numeric, numbers.T, self.centre, self.scale, strict=True
        ):
            known = values[~np.isnan(values)]
            if not len(known):
                tell(
                    f"column {name!r} of {source} has no value: all rows count as the mean of "
                    f"training, {mean:.4g}"
                )
            elif abs((middle := float(np.median(known))) - mean) > _FAR * scale:
                tell(
                    f"column {name!r} of {source} has the median {middle:.4g}, and training "
                    f"{mean:.4g} ± {scale:.3g}: check units"
                )

    def scaled(self, numbers: Numbers, names: Sequence[Names]) -> Tensor:
        """Return (n, d) float32 rows of unscaled numbers (n, numeric) and names (n,); NaN and ""
        are missing.
        """
        centre = np.array(self.centre)
        scale = np.array(self.scale)
        scaled = np.nan_to_num((numbers - centre) / scale)
        gaps = np.isnan(numbers[:, [*map(self.numeric.index, self.gaps)]])
        codes = map(_codes, names, self.vocabularies)
        parts = [scaled, gaps.astype(np.float64), *codes]
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))

    def read(self, frame: Any, source: str) -> Raw:
        """Return an Arrow table as rows of these columns, which are not encoded yet."""
        columns = [*self.numeric, *self.categorical]
        _same_columns(columns, frame.column_names, "the model's data", source, more=True)
        cells = Cells(frame, source, Writing(self.missing), self.numeric)
        read = cells.features(columns, self.categorical, self.numeric)
        found = Raw(source, read, np.zeros(len(frame)), kind=Table)
        self.say_unknown([found])
        return found


def encode_again(x: Tensor, before: Table, after: Table) -> Tensor:
    """Return unscaled rows (n, d) float64 as scaled rows."""
    rows = x.numpy()
    n = len(before.numeric)
    names = list[Names]()
    for k, known in enumerate(before.vocabularies, n):
        names.append(np.array(["", *known], dtype=np.str_)[rows[:, k].astype(np.int64)])
    return after.scaled(rows[:, :n], names)


def unscaled(raws: Sequence[Raw], missing: Sequence[str]) -> tuple[Table, Tensor]:
    """Return the columns of tables by `Cells.features` together, and their rows (n, d) float64,
    unscaled.

    `missing` are cells that mark a missing value, in addition to the usual ones.
    """
    first = raws[0].source
    wanted = raws[0].images.column_names
    for raw in raws:
        _same_columns(wanted, raw.images.column_names, first, raw.source)
    of_kind = defaultdict[str, list[str]](list)
    for name in wanted:
        kind = _kind(name, raws)
        if not kind:
            raise UserError(
                f"column {name!r} of {first} has no value at all: leave it out with "
                f"--drop-columns={name!r} at all silos, or name a --schema, which says what it "
                "holds"
            )
        of_kind[kind].append(name)
    categorical = tuple(of_kind["names"])
    table = Table(
        tuple(not_in(categorical, wanted)),
        categorical,
        dates=tuple(of_kind["dates"]),
        missing=tuple(missing),
    )
    numbers, names = zip(*(rows(raw, table) for raw in raws), strict=True)
    columns = [np.concatenate(numbers)]
    vocabularies = list[tuple[str, ...]]()
    for parts in zip(*names, strict=True):
        known, codes = np.unique(np.concatenate(parts), return_inverse=True)
        vocabularies.append(tuple(known.tolist()))
        columns.append(codes[:, None] + 1.0)
    x = torch.from_numpy(np.concatenate(columns, axis=1))
    return replace(table, vocabularies=tuple(vocabularies)), x


def rows(raw: Raw, table: Table) -> tuple[Numbers, list[Names]]:
    """Return the numbers (n, numeric) of rows by `Cells.features`, and the names (n,) of each
    categorical column.
    """
    frame = raw.images
    _same_columns(
        [*table.numeric, *table.categorical],
        frame.column_names,
        "the model's data",
        raw.source,
        more=True,
    )
    numbers = np.empty((len(frame), len(table.numeric)))
    for k, name in enumerate(table.numeric):
        numbers[:, k] = _numbers(raw, name, date=name in table.dates)
    return numbers, [_names(frame[name]) for name in table.categorical]


def _same_columns(
    wanted: Sequence[str], found: Sequence[str], first: str, source: str, *, more: bool = False
) -> None:
    lacking = not_in(found, wanted)
    extra = not_in(wanted, found)
    if lacking:
        rename = ""
        if near := nearest(lacking[0], extra, n=1, cutoff=0.8):
            rename = (
                f"rename {near[0]!r} to {lacking[0]!r} if it is that in the same unit, because "
            )
        raise UserError(
            f"{source} has no column {listed(map(repr, lacking))}, which {first} has: it has "
            f"{', '.join(found)}; {rename}all silos need the same columns"
        )
    if extra and not more:
        raise UserError(
            f"{source} has the column{'s' * (len(extra) > 1)} {listed(map(repr, extra))}, which "
            f"{first} does not have: use --drop-columns={extra}"
        )


def _kind(name: str, raws: Sequence[Raw]) -> str:
    """Return numbers, dates, names, or "" for a column without any value."""
    known: dict[str, Raw] = {}
    for raw in raws:
        if kind := _stored(raw, name):
            known.setdefault(kind, raw)
    if "names" in known and len(known) > 1:
        text = known.pop("names")
        other = next(iter(known.values()))
        row, value = _first(text, name)
        raise UserError(
            f"column {name!r} of {text.source} holds text ({value!r} in {text.row(row)}), but that "
            f"of {other.source} numbers: correct it, or take it as categories everywhere with "
            f"--categorical-columns={name!r}"
        )
    if len(known) > 1:
        (one, first), (other_, odd) = [*known.items()][:2]
        raise UserError(
            f"column {name!r} of {odd.source} holds {other_}, but that of {first.source} {one}: "
            "write them alike at all silos"
        )
    # a schema may say what it would hold
    if not known:
        stored = str(raws[0].images.schema.field(name).type)
        return {"double": "numbers", "null": ""}.get(stored, "names")
    (kind,) = known
    if kind == ZONE:
        return "dates"
    return kind


def _first(raw: Raw, name: str) -> tuple[int, Any]:
    """Return the first value of a column that is not missing, and its place."""
    column = raw.images[name]
    row = column.is_valid().to_pylist().index(True)
    return row, column[row].as_py()


def _stored(raw: Raw, name: str) -> str:
    """Return what a column holds: names, numbers, dates, or "" if it has no value."""
    field = raw.images.schema.field(name)
    if raw.images[name].null_count == len(raw.images):
        return ""
    if str(field.type) != "double":
        return "names"
    return str((field.metadata or {}).get(DATE, b"numbers").decode())


def _numbers(raw: Raw, name: str, *, date: bool) -> Numbers:
    """Return the values (n,) of a column; dates and times are days since 1970."""
    kind = _stored(raw, name)
    wanted = "numbers"
    if date:
        wanted = "dates"
    if not kind:
        return np.full(len(raw.images), np.nan)
    if kind == ZONE:
        kind = "dates"
    if kind != wanted:
        row, value = _first(raw, name)
        raise UserError(
            f"column {name!r} of {raw.source} holds {kind} ({value!r} in {raw.row(row)}), but "
            f"{wanted} are expected: correct it"
        )
    return np.array(raw.images[name], dtype=np.float64)


def _names(column: Any) -> Names:
    """Return names (n,), "" if one is missing."""
    values = column.to_pylist()
    whole = str(column.type) == "double" and all(v is None or v.is_integer() for v in values)
    for row, value in enumerate(values):
        if value is None:
            values[row] = ""
        elif whole:
            # a category that a file stores as 3.0 is 3
            values[row] = str(int(value))
    return np.array(values, dtype=np.str_)


def _codes(names: Names, known: Sequence[str]) -> Numbers:
    """Return positions (n, 1) in `known`, counted from 1; 0 for other names."""
    place = dict(zip(known, count(1)))
    found, inverse = np.unique(names, return_inverse=True)
    codes = np.array([place.get(name, 0) for name in found.tolist()], dtype=np.float64)
    return codes[inverse][:, None]
