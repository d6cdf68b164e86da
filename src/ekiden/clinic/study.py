"""What a study needs in addition: drafts of its schema, checks of all sources against one, and
table one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ekiden.clinic import curves
from ekiden.core.base import outside
from ekiden.core.base.errors import UserError, counted
from ekiden.core.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.core.tasks import Classification
from ekiden.readers import frames, sources, targets
from ekiden.readers.cells import DATE, Writing
from ekiden.readers.columns import Reading, image_column
from ekiden.readers.dates import DAY
from ekiden.readers.holdings import Holding, find, hold, named_silos, read_part
from ekiden.readers.kinds import Images, Table, arrays
from ekiden.readers.kinds.arrays import is_list
from ekiden.readers.moments import ColumnMoments, ColumnSums, target, told_by
from ekiden.readers.schema import SAMPLES, SchemaError, Violation, key, string
from ekiden.readers.sources import NAMED
from ekiden.readers.undecoded import Raw, natural

# different names; more are not listed
_MANY = 50
_MOST = 1e300
_EPOCH = date(1970, 1, 1)


def draft(data: str, silos: Sequence[str], reading: Reading) -> str:
    """Return a draft of the schema of these data, as TOML for a person to edit.

    Ranges are rounded outwards. All that is there is allowed: every table that was read meets its
    draft.

    Args:
        data: as in `ekiden.load`, files of your own.
        silos: or as in `ekiden.data.join`.
        reading: what the columns mean.
    """
    if reading.schema:
        raise UserError(
            "a schema is drafted from data that are read without one: leave out the schema"
        )
    return drafted([hold(path, reading, name) for name, path in _sources(data, silos)], reading)


def drafted(holdings: Sequence[Holding], reading: Reading) -> str:
    """Return a draft of the schema of what sources hold."""
    raws: list[Raw] = []
    for holding in holdings:
        raws += holding.parts
    first = raws[0]
    least = reading.min_count
    columns = _features(raws, reading)
    roles = dict[str, tuple[str, ...]]()
    if first.targets or first.kind in (Images, Table):
        roles["label_column"] = first.targets or ("label",)
        columns |= _labels(raws, roles["label_column"], least)
    if reading.subject_column:
        roles["subject_column"] = (reading.subject_column,)
        columns[reading.subject_column] = _kind("id")
    if reading.time_column:
        roles["time_column"] = (reading.time_column,)
        columns[reading.time_column] = _time(raws, least)
    source = first.source
    if len(raws) > 1:
        source += " and others"
    text = _HEAD.format(rows=counted(sum(map(len, raws)), "row"), source=source, least=least)
    for role, names in roles.items():
        given = _listed(names)
        if len(names) == 1:
            given = string(names[0])
        text += _entry(role, given)
    for name, column in columns.items():
        text += f"\n[columns.{key(name)}]\n{column}"
    return text


def check(data: str, silos: Sequence[str], reading: Reading) -> list[Violation]:
    """Return what the schema of `reading` does not allow in these data; `draft` describes the other
    arguments.
    """
    found: list[Violation] = []
    for _, path in _sources(data, silos):
        for part in find(path):
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
        raise UserError(
            f"{data} has no columns that a schema could describe: a schema is for files of your own"
        )
    return [("", path)]


def _entry(name: str, value: str, remark: str = "") -> str:
    if remark:
        value += f"  # {remark}"
    return f"{name} = {value}\n"


def _kind(name: str) -> str:
    return _entry("kind", string(name))


def _features(raws: Sequence[Raw], reading: Reading) -> dict[str, str]:
    """Draft the columns that a model gets."""
    first = raws[0]
    if first.kind is not Table:
        kind = "array"
        if first.kind.column in SAMPLES:
            kind = first.kind.column
        return {_sample_column(first, reading): _kind(kind)}
    found = {}
    for name in first.images.column_names:
        for raw in raws:
            if name not in raw.images.column_names:
                raise UserError(
                    f"{raw.source} has no column {name!r}, which {first.source} has: correct it"
                )
        if any(raw.images[name].null_count < len(raw) for raw in raws):
            found[name] = _feature(name, raws, reading)
    return found


def _sample_column(raw: Raw, reading: Reading) -> str:
    """Return the column that holds the samples."""
    if named := reading.image_column or reading.text_column or reading.array_column:
        return named
    if not (file := Path(raw.source)).is_file() or file.suffix.lower() in arrays.SUFFIXES:
        return raw.kind.column or "x"
    table = frames.arrow(file, raw.source)
    image = image_column(table, reading)
    return image or next(n for n in table.column_names if is_list(table[n].type))


def _feature(name: str, raws: Sequence[Raw], reading: Reading) -> str:
    # whether a source has numbers, and dates
    kinds = set[tuple[bool, bool]]()
    values = []
    gaps = 0
    for raw in raws:
        part = raw.images[name]
        gaps += part.null_count
        known = part.drop_null()
        if len(known):
            about = raw.images.schema.field(name).metadata or {}
            kinds.add((str(part.type) == "double", DATE in about))
            values.append(known.to_numpy())
    if len(kinds) > 1:
        raise UserError(
            f"column {name!r} holds numbers, dates or names, not alike in all sources: correct it"
        )
    every = np.concatenate(values)
    numbers, dates = kinds.pop()
    if numbers:
        text = _range(every[~np.isnan(every)], reading.min_count, dates=dates)
    else:
        text = _categories(Counter(every.tolist()), reading.min_count)
    if marks := Writing(reading.missing).marks(name):
        # marks such as age=-1 are of one column
        of_one = tuple(f"{column}=" for column in raws[0].images.column_names)
        text += _entry("missing", _listed([m for m in marks if not m.startswith(of_one)]))
    return text + _entry("required", str(not gaps).lower())


def _labels(raws: Sequence[Raw], labels: Sequence[str], least: int) -> dict[str, str]:
    y, classes, chosen = targets.targets(raws, "")
    if isinstance(chosen, Classification):
        counts = torch.bincount(torch.cat(y), minlength=len(classes)).tolist()
        names = Counter(dict(zip(classes, counts, strict=True)))
        return {labels[0]: _categories(names, least, ordered=True)}
    values = torch.cat(y).double().view(-1, len(labels)).numpy().T
    return {name: _range(column, least) for name, column in zip(labels, values, strict=True)}


def _time(raws: Sequence[Raw], least: int) -> str:
    values = np.concatenate([raw.time for raw in raws if raw.time is not None])
    dates = values.dtype.kind == "M"
    if dates:
        values = values.astype(np.int64) / DAY
    return _range(values, least, dates=dates)


def _range(values: NDArray[np.float64], least: int, *, dates: bool = False) -> str:
    """Say between which numbers, or days since 1970, all values are; rounded outwards."""
    text = _kind("date")
    if not dates:
        text = _kind("number") + _entry("unit", '""', "in words")
    if len(values) < least:
        return text + _entry("# least", "0", "few rows: not said here")
    low = float(values.min())
    high = float(values.max())
    if dates:
        text += _entry("least", string(f"{_year(low)}-01-01"))
        return text + _entry("most", string(f"{_year(high)}-12-31"))
    bounds = {"least": -_outward(-low, high - low), "most": _outward(high, high - low)}
    for entry, bound in bounds.items():
        if abs(bound) > _MOST:
            continue
        written = repr(bound)
        # larger ones are not exact
        if bound.is_integer() and abs(bound) < 1e15:
            written = f"{bound + 0.0:.0f}"
        text += _entry(entry, written)
    return text


def _year(day: float) -> str:
    """Return the year of a day since 1970."""
    return f"{(_EPOCH + timedelta(days=floor(day))).year:04}"


def _outward(value: float, span: float) -> float:
    """Return a round number that is not smaller than `value`."""
    size = span or abs(value)
    if not size or not isfinite(size):
        return value
    step = 10.0 ** floor(log10(size))
    if not step or not isfinite(value / step):
        return value
    rounded = -floor(-value / step) * step
    # no -0
    clean = float(f"{rounded:.12g}") + 0.0
    return max(clean, value)


def _categories(names: Counter[str], least: int, *, ordered: bool = False) -> str:
    """List the names of a column, if they are few."""
    if len(names) > _MANY:
        more = f"{len(names):,} different names: not listed, any is allowed"
        return _kind("category") + _entry("# categories", "[]", more)
    if not names:
        return _kind("category")
    known = list(names)
    if not ordered:
        known.sort(key=natural)
    rare = [string(name) for name in known if names[name] < least]
    remark = ""
    if rare:
        remark = f"few rows: {', '.join(rare)}"
    return _kind("category") + _entry("categories", _listed(known), remark)


def _listed(names: Sequence[Any]) -> str:
    return f"[{', '.join(map(string, names))}]"


_OTHER = "(other)"


@dataclass(frozen=True)
class CohortCell:
    """What is known of a column, or of one of its categories, at a silo."""

    count: int  # rows that have it
    share: float = 0.0  # of the silo's rows
    mean: float | None = None  # of numbers; None for categories, and if too few rows have a number
    deviation: float | None = None  # standard deviation

    def __str__(self) -> str:
        if self.mean is not None and self.deviation is not None:
            return f"{self.mean:.4g} ({self.deviation:.3g})"
        if not self.count:
            return "-"
        return f"{self.count:,} ({100 * self.share:.1f} %)"


@dataclass(frozen=True)
class CohortLine:
    """A line of the table."""

    column: str  # name of the column; "label" for classes
    category: str  # one of its categories; "missing"; empty for numbers
    silos: Mapping[str, CohortCell]  # what is known, for all together and for each silo


def table_one(told: Sequence[ColumnSums]) -> list[CohortLine]:
    """Return the lines of the table, from what each silo told about its rows."""
    if len({tuple(one.moments) + tuple(one.categories) for one in told}) > 1:
        raise UserError(
            "the silos told sums of different columns: make them with the same columns everywhere"
        )
    whole = ColumnSums.together(told)
    silos = {curves.ALL: whole, **_named(told)}
    rows = {name: one.least_rows for name, one in silos.items()}
    rows[curves.ALL] = sum(one.least_rows for one in told)
    lines: list[CohortLine] = []

    def add(column: str, category: str, found: Iterable[CohortCell]) -> None:
        cells = {}
        for silo, cell in zip(silos, found, strict=True):
            cells[silo] = replace(cell, share=cell.count / max(rows[silo], 1))
        lines.append(CohortLine(column, category, cells))

    add("rows", "", map(CohortCell, rows.values()))
    each = list(silos.values())
    for column in whole.moments:
        add(column, "", [_of_numbers(one.moments[column]) for one in each])
        if whole.missing.get(column):
            add(column, "missing", [CohortCell(one.missing[column]) for one in each])
    for column, known in whole.categories.items():
        counts = [one.categories[column] for one in each]
        for category in sorted(known):
            add(column, category or "missing", [CohortCell(n.get(category, 0)) for n in counts])
    for category in whole.classes:
        add("label", category, [CohortCell(one.classes.get(category, 0)) for one in each])
    return lines


def _of_numbers(found: ColumnMoments) -> CohortCell:
    """Return what is known of a column of numbers, without the share."""
    if not found.count:
        return CohortCell(0)
    return CohortCell(found.count, 0.0, found.mean, found.deviation)


def _named(told: Sequence[ColumnSums]) -> dict[str, ColumnSums]:
    """Return what silos told by their names."""
    return {one.silo or f"silo {k}": one for k, one in enumerate(told, 1)}


def survival(told: Sequence[ColumnSums]) -> curves.Compared | None:
    """Return the survival curves of the silos, if they tell any."""
    silos = _named(told)
    given = {}
    without = ""
    for name, one in silos.items():
        if one.followed is not None:
            given[name] = one.followed
        else:
            without = without or name
    if not given:
        return None
    if without:
        raise UserError(
            f"{without} tells no events between times: make the sums of all silos with the same "
            "times"
        )
    # targets have no missing values
    name = next(column for column in told[0].moments if column not in told[0].missing)
    return curves.compared(name.removeprefix(target("")), given)


def cohort_sums(fed: FederatedData, times: Sequence[float] = ()) -> list[ColumnSums]:
    """Return what silos on this machine tell about all their rows: those for training, validation
    and test.

    Args:
        fed: the silos.
        times: between which events of survival are counted.
    """
    if not isinstance(fed.dataset.inputs, Table):
        raise UserError(
            f"table one is for tables, these samples are {fed.dataset.inputs.words}: leave it out"
        )
    return [_of_client(client, fed.dataset, times) for client in fed.clients]


def _of_client(client: ClientData, dataset: Dataset, times: Sequence[float]) -> ColumnSums:
    """Return the sums over rows that are scaled already, in the columns' own units."""
    table = Table.of(dataset.inputs)
    parts = list(filter(len, (client.train, client.val, client.test)))
    x = torch.cat([part.x for part in parts]).double()
    numbers = x[:, : len(table.numeric)]
    categories = x[:, table.numbers :]
    values = numbers.numpy() * np.array(table.scale) + np.array(table.centre)
    for place, name in enumerate(table.gaps, len(table.numeric)):
        values[x[:, place].numpy() > 0.5, table.numeric.index(name)] = np.nan
    rows = torch.cat([torch.from_numpy(values), categories], 1)
    y = torch.cat([part.y for part in parts])
    everything = Subset(replace(parts[0].samples, x=rows, y=y), torch.arange(len(rows)))
    plain = replace(table, centre=(), scale=(), gaps=())
    dataset = replace(dataset, inputs=plain, least=1)
    found = told_by(replace(client, train=everything), dataset, times)
    counts = dict(found.categories)
    # categories that the silos did not agree on
    rare = (categories == 0).sum(0).tolist()
    for name, n in zip(table.categorical, rare, strict=True):
        if n:
            counts[name] = {**counts[name], _OTHER: n}
    return replace(found, categories=counts)
