"""Draft a study's schema from data, and check all sources against one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ekiden.base import outside
from ekiden.base.errors import UserError, counted
from ekiden.data import frames, sources, targets
from ekiden.data.cells import DATE, Writing
from ekiden.data.columns import Reading, image_column
from ekiden.data.holdings import Holding, find, hold, named_silos, read_part
from ekiden.data.kinds import Images, Table, Tokens, arrays
from ekiden.data.kinds.arrays import is_list
from ekiden.data.schema import SchemaError, Violation, key, string
from ekiden.data.sources import NAMED
from ekiden.data.tasks import Classification
from ekiden.data.undecoded import Raw, natural

_MANY = 50  # different names; more are not listed
_MOST = 1e300
_EPOCH = date(1970, 1, 1)


@dataclass
class _Drafted:
    """What a draft says about a column: its entries as TOML, each with a remark."""

    name: str
    entries: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, entry: str, value: str, remark: str = "") -> None:
        self.entries.append((entry, value, remark))

    def text(self) -> str:
        lines = [f"{e} = {v}{f'  # {remark}' if remark else ''}\n" for e, v, remark in self.entries]
        return f"\n[columns.{key(self.name)}]\n{''.join(lines)}"


def draft(data: str, silos: Sequence[str], reading: Reading, task: str = "") -> str:
    """Return a draft of the schema of these data, as TOML for a person to edit.

    Ranges are rounded outwards. All that is there is allowed: every table that was read meets its draft.

    Args:
        data: as in `ekiden.load`, files of your own.
        silos: or as in `ekiden.data.join`.
        reading: what the columns mean.
        task: as in `ekiden.load`.
    """
    if reading.schema:
        raise UserError("a schema is drafted from data that are read without one: leave out the schema")
    return drafted([hold(path, reading, name) for name, path in _sources(data, silos)], reading, task)


def drafted(holdings: Sequence[Holding], reading: Reading, task: str = "") -> str:
    """Return a draft of the schema of what sources hold."""
    raws = [part for holding in holdings for part in holding.parts]
    first, least = raws[0], reading.min_count
    columns: list[_Drafted] = []
    roles: dict[str, tuple[str, ...]] = {}
    if first.targets or first.kind in (Images, Table):
        labels = first.targets or ("label",)
        columns += _labels(raws, labels, task, least)
        roles["label_column"] = labels
    for role, name in (("subject_column", reading.subject_column), ("time_column", reading.time_column)):
        if name:
            columns.append(_subject(name) if role == "subject_column" else _time(raws, name, least))
            roles[role] = (name,)
    columns = [*_features(raws, reading), *columns]
    rows = counted(sum(map(len, raws)), "row")
    head = _HEAD.format(rows=rows, source=first.source + (" and others" * (len(raws) > 1)), least=least)
    named = [f"{role} = {_listed(names) if len(names) > 1 else string(names[0])}\n" for role, names in roles.items()]
    return head + "".join(named) + "".join(column.text() for column in columns)


def check(data: str, silos: Sequence[str], reading: Reading) -> list[Violation]:
    """Return what the schema of `reading` does not allow in these data; `draft` describes the other arguments."""
    found: list[Violation] = []
    for _, path in _sources(data, silos):
        for part in filter(None, find(path)):
            try:
                read_part(part, reading.with_schema())
            except SchemaError as error:
                found += error.violations
    return found


_HEAD = """\
# Draft of a study's schema, from {rows} of {source}. Edit it: write units, correct ranges, remove what is not needed.
# Then `--schema` with this file checks data against it, at every silo.
#
# It was written on this machine, and nothing was sent. Read it before you give it away: ranges were rounded outwards
# from the smallest and the largest value, and the names of categories are those of single rows. What fewer than
# {least} rows show is marked "few rows": it may say something about
# single patients.
#
# Each column: kind (number, date, category, text, image, array, id), unit in words, least and most, categories, missing
# (cells that mark a missing value) and required (whether every row needs a value).

"""


def _sources(data: str, silos: Sequence[str]) -> list[tuple[str, Path]]:
    if silos:
        return list(named_silos(silos).items())
    if data in NAMED or outside.is_file(data) or (path := sources.path_of(data)) is None:
        raise UserError(f"{data} has no columns that a schema could describe: a schema is for files of your own")
    return [("", path)]


def _features(raws: Sequence[Raw], reading: Reading) -> list[_Drafted]:
    """Draft the columns that a model gets."""
    kind = raws[0].kind
    if kind is not Table:
        column = _Drafted(_sample_column(raws[0], reading))
        column.add("kind", string("image" if kind is Images else "text" if kind is Tokens else "array"))
        return [column]
    lacking = [(n, raw.source) for n in raws[0].images.column_names for raw in raws if n not in raw.images.column_names]
    if lacking:
        raise UserError(f"{lacking[0][1]} has no column {lacking[0][0]!r}, which {raws[0].source} has: correct it")
    names = [n for n in raws[0].images.column_names if any(raw.images[n].null_count < len(raw) for raw in raws)]
    return [_feature(name, raws, reading) for name in names]


def _sample_column(raw: Raw, reading: Reading) -> str:
    """Return the column that holds the samples."""
    if named := reading.image_column or reading.text_column or reading.array_column:
        return named
    if not (file := Path(raw.source)).is_file() or file.suffix.lower() in arrays.SUFFIXES:
        return raw.kind.column or "x"
    table = frames.arrow(file, raw.source)
    image = image_column(table, reading)
    return image or next(n for n in table.column_names if is_list(table[n].type))


def _feature(name: str, raws: Sequence[Raw], reading: Reading) -> _Drafted:
    parts = [raw.images[name] for raw in raws]
    column, least = _Drafted(name), reading.min_count
    filled = [raw for raw in raws if raw.images[name].null_count < len(raw)]
    kinds = {str(raw.images[name].type) == "double" for raw in filled}
    dates = {DATE in (raw.images.schema.field(name).metadata or {}) for raw in filled}
    if len(kinds) > 1 or len(dates) > 1:
        raise UserError(f"column {name!r} holds numbers, dates or names, not alike in all sources: correct it")
    if kinds == {True}:
        values = np.concatenate([part.to_numpy() for part in parts if str(part.type) == "double"])
        _range(column, values[~np.isnan(values)], least, dates=dates == {True})
    else:
        column.add("kind", string("category"))
        _categories(column, Counter(v for part in parts for v in part.to_pylist() if v is not None), least)
    if marks := Writing(reading.missing).marks(name):
        column.add("missing", _listed([m for m in marks if not any(m.startswith(f"{c}=") for c in _all(raws))]))
    column.add("required", str(not any(part.null_count for part in parts)).lower())
    return column


def _all(raws: Sequence[Raw]) -> list[str]:
    return list(raws[0].images.column_names)


def _labels(raws: Sequence[Raw], labels: Sequence[str], task: str, least: int) -> list[_Drafted]:
    y, classes, chosen = targets.targets(raws, task)
    if isinstance(chosen, Classification):
        column, names = _Drafted(labels[0]), Counter[str]()
        for part in y:
            names.update(classes[k] for k in part.tolist())
        column.add("kind", string("category"))
        _categories(column, Counter({name: names[name] for name in classes}), least, ordered=True)
        return [column]
    found = []
    for place, name in enumerate(labels):
        column = _Drafted(name)
        values = np.concatenate([part.double().numpy().reshape(len(part), -1)[:, place] for part in y])
        _range(column, values, least)
        found.append(column)
    return found


def _subject(name: str) -> _Drafted:
    column = _Drafted(name)
    column.add("kind", string("id"))
    return column


def _time(raws: Sequence[Raw], name: str, least: int) -> _Drafted:
    column = _Drafted(name)
    values = np.concatenate([raw.time for raw in raws if raw.time is not None])
    dates = values.dtype.kind == "M"
    _range(column, values.astype(np.int64) / 86_400_000_000 if dates else values, least, dates=dates)
    return column


def _range(column: _Drafted, values: NDArray[np.float64], least: int, *, dates: bool = False) -> None:
    """Say between which numbers, or days since 1970, all values are; rounded outwards."""
    column.add("kind", string("date" if dates else "number"))
    if not dates:
        column.add("unit", '""', "in words")
    if len(values) < least:
        column.add("# least", "0", "few rows: not said here")
        return
    low, high = float(values.min()), float(values.max())
    if dates:
        first, last = (_EPOCH + timedelta(days=floor(day)) for day in (low, high))
        column.add("least", string(f"{first.year:04}-01-01"))
        column.add("most", string(f"{last.year:04}-12-31"))
        return
    for entry, bound in (("least", -_outward(-low, high - low)), ("most", _outward(high, high - low))):
        if abs(bound) <= _MOST:
            column.add(entry, f"{bound:.0f}" if bound.is_integer() and abs(bound) < 1e15 else repr(bound))


def _outward(value: float, span: float) -> float:
    """Return a round number that is not smaller than `value`."""
    size = span or abs(value)
    if not size or not isfinite(size):
        return value
    step = 10.0 ** floor(log10(size))
    rounded = -floor(-value / step) * step if step and isfinite(value / step) else value
    clean = float(f"{rounded:.12g}") + 0.0  # no -0
    return clean if clean >= value else rounded if rounded >= value else value


def _categories(column: _Drafted, names: Counter[str], least: int, *, ordered: bool = False) -> None:
    """List the names of a column, if they are few."""
    if not names:
        return
    if len(names) > _MANY:
        column.add("# categories", "[]", f"{len(names):,} different names: not listed, any is allowed")
        return
    listed = list(names) if ordered else sorted(names, key=natural)
    rare = [name for name in listed if names[name] < least]
    column.add("categories", _listed(listed), f"few rows: {', '.join(map(string, rare))}" if rare else "")


def _listed(names: Sequence[Any]) -> str:
    return f"[{', '.join(map(string, names))}]"
