"""A study's schema: which columns its data have and which values these may hold, in one TOML file
that all silos share.

label_column = "died"
subject_column = "patient"

[columns.patient]
kind = "id"

[columns.age]
kind = "number"
unit = "years"
least = 18
most = 110
missing = ["-1"]

[columns.died]
kind = "category"
categories = ["no", "yes"]
"""

import json
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base.checks import Checked, made, plain
from ekiden.core.base.errors import (
    PrivateError,
    UserError,
    at,
    counted,
    listed,
    nearest,
    row_text,
    unknown,
)
from ekiden.core.base.files import read_text
from ekiden.readers.cells import DATE, Cells, Writing, short
from ekiden.readers.undecoded import Raw, all_are, named_twice, not_in

Kind = Literal["number", "date", "category", "text", "image", "array", "id"]
SAMPLES = ("text", "image", "array")
"""kinds of columns of which one alone holds a sample"""
_ROLES = ("label_column", "subject_column", "time_column")
_MOST_TEXT = 100_000
_SHOWN = 8
_EPOCH = date(1970, 1, 1).toordinal()


@dataclass(frozen=True)
class Column(Checked):
    """What a column holds."""

    _flag: ClassVar[str] = "{}"

    kind: Kind
    """number; date; category: names, or codes; text, image or array: a sample; id: of subjects,
    which no model gets"""
    unit: str = ""
    """unit of the numbers, in words, for readers and messages"""
    least: float | str | None = None
    """smallest number, or first date"""
    most: float | str | None = None
    """largest number, or last date"""
    categories: tuple[str, ...] = ()
    """all categories; of the label, the classes in the order that all silos share. Without them any
    name is allowed"""
    missing: tuple[str, ...] = ()
    """cells that mark a missing value in this column, in addition to the usual ones"""
    required: bool = False
    """whether every row needs a value"""

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.least, self.most) if bound is not None]
        wanted = {"number": float, "date": str}.get(self.kind)
        if bounds and wanted is None:
            raise UserError(
                f"least and most are for numbers and dates, not for {self.kind}: leave them out"
            )
        if not all_are(wanted or object, bounds):
            raise UserError(
                f"least and most of a {self.kind} must be {self.kind}s, not {bounds[0]!r}"
            )
        numbers = [*map(self.number, bounds)]
        if len(numbers) == 2 and numbers[0] > numbers[1]:
            raise UserError(f"least {self.least} is above most {self.most}")
        if self.categories and self.kind != "category":
            raise UserError(
                f"categories are for the kind category, not for {self.kind}: leave them out"
            )
        if twice := named_twice(self.categories):
            raise UserError(f"the category {twice!r} is there twice: name each once")

    @staticmethod
    def number(bound: float | str) -> float:
        """Return a bound as the number that cells are read as: dates as days since 1970."""
        if isinstance(bound, float):
            return bound
        try:
            return float(date.fromisoformat(bound).toordinal() - _EPOCH)
        except ValueError:
            raise UserError(f"{bound!r} is not a date: write dates as 2024-01-31") from None

    def allows(self) -> str:
        """Return in words which values are allowed."""
        if self.categories:
            return listed(map(repr, self.categories), _SHOWN)
        what = {"category": "names", "id": "ids"}.get(self.kind, f"{self.kind}s")
        low = _shown(self.least)
        high = _shown(self.most)
        bounds = ""
        if low and high:
            bounds = f"{low} to {high}"
        elif low:
            bounds = f"from {low}"
        elif high:
            bounds = f"up to {high}"
        elif self.unit:
            bounds = "in"
        return " ".join(filter(None, (what, bounds, self.unit)))

    def within(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return (n,) which numbers, or days since 1970, are in the range; NaN counts as if it
        were.
        """
        outside = np.zeros(len(values), dtype=bool)
        if self.least is not None:
            outside |= values < self.number(self.least)
        if self.most is not None:
            if self.kind == "date":
                # the whole last day is in the range
                values = np.floor(values)
            outside |= values > self.number(self.most)
        return ~outside


@dataclass(frozen=True)
class Violation:
    """A value that the schema does not allow."""

    # the row or file
    where: str
    # name of the column
    column: str
    # what is wrong, without the value: all that other silos are told
    what: str
    # the value as it is written; of a missing column, another with nearly its name; empty if there
    # is none
    value: str
    # what the schema allows, in words; empty if the column is missing
    allowed: str

    def __str__(self) -> str:
        what = self.what
        if not self.allowed:
            what = f"{self.where} has no column {self.column!r}, which the schema names"
            if self.value:
                what += f": rename {self.value!r}"
            return what
        if self.value:
            what = f"holds {self.value}"
        return f"{self.where}: column {self.column!r} {what}, the schema allows {self.allowed}"


class SchemaError(PrivateError):
    """Data do not meet a schema."""

    def __init__(self, text: str, told: str = "", violations: Sequence[Violation] = ()) -> None:
        super().__init__(text, told)
        self.violations = tuple(violations)


@dataclass(frozen=True)
class Schema(Checked):
    """The columns of a study's data."""

    _flag: ClassVar[str] = "{}"

    # what each column holds, by name
    columns: Mapping[str, Column] = field(default_factory=dict)
    # columns of labels
    label_column: tuple[str, ...] = ()
    # the column that says whom a row is about
    subject_column: str = ""
    # the column that says when a row was measured
    time_column: str = ""

    def __post_init__(self) -> None:
        if not self.columns:
            raise UserError("it names no column: give each a table, as in [columns.age]")
        if not self.label_column and "label" in self.columns:
            object.__setattr__(self, "label_column", ("label",))
        roles = (*self.label_column, *filter(None, (self.subject_column, self.time_column)))
        for name in roles:
            if name not in self.columns:
                raise unknown("column", name, self.columns)
        if twice := named_twice(roles):
            raise UserError(f"column {twice!r} cannot be two things")
        for name in self.label_column:
            if self.columns[name].kind not in ("category", "number"):
                raise UserError(f"the label {name!r} must be of the kind category or number")
        if self.time_column and self.columns[self.time_column].kind not in ("date", "number"):
            raise UserError(f"the time {self.time_column!r} must be of the kind date or number")
        if len(self.samples) > 1:
            raise UserError(
                f"columns {' and '.join(map(repr, self.samples))} both hold samples: name one"
            )

    @cached_property
    def samples(self) -> tuple[str, ...]:
        """Return the columns that hold a sample each: texts, images or arrays."""
        return self.of_kind(*SAMPLES)

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Return the columns of a table that a model gets; none if one column holds the samples."""
        if self.samples:
            return ()
        meant = (*self.label_column, self.subject_column, self.time_column)
        own = self.of_kind("number", "date", "category")
        return tuple(name for name in own if name not in meant)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Return the classes in their order; None if labels are numbers, or any name is allowed."""
        if len(self.label_column) != 1:
            return None
        return self.columns[self.label_column[0]].categories or None

    @property
    def task(self) -> str:
        """Return the task of a single label; "" if the values decide."""
        if len(self.label_column) != 1:
            return ""
        kind = self.columns[self.label_column[0]].kind
        return "classification" if kind == "category" else "regression"

    def of_kind(self, *kinds: str) -> tuple[str, ...]:
        """Return the columns of these kinds."""
        return tuple(name for name, column in self.columns.items() if column.kind in kinds)

    def options(self) -> dict[str, Any]:
        """Return what the schema says about the fields of `Reading`."""
        marks = list[str]()
        for name, column in self.columns.items():
            marks += [f"{name}={mark}" for mark in column.missing]
        found: dict[str, Any] = {}
        for name in self.samples:
            if name != "image":
                found[f"{self.columns[name].kind}_column"] = name
        for name in _ROLES:
            if getattr(self, name) != ("label",):
                found[name] = getattr(self, name)
        categorical = tuple(name for name in self.features if self.columns[name].kind == "category")
        return found | {
            "feature_columns": self.features,
            "categorical_columns": categorical,
            "missing": tuple(marks),
        }

    def text(self) -> str:
        """Return the schema as JSON, the same for the same schema, without comments, which may be
        about patients.
        """
        values = {name: value for name, value in plain(self).items() if value}
        # each column needs its kind, also if it is that of the usual one
        usual = plain(Column("number")) | {"kind": ""}
        for name, column in values["columns"].items():
            values["columns"][name] = {k: v for k, v in column.items() if v != usual[k]}
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def read(path: Path | str) -> Schema:
    """Return the schema in a TOML file, or in what `ekiden federation agree` made of one."""
    path = Path(path).expanduser()
    try:
        text = read_text(path)
        if path.suffix == ".json":
            found = json.loads(text)
            values = found.get("schema") if isinstance(found, dict) else None
        else:
            values = tomllib.loads(text)
    except OSError as error:
        raise UserError(
            f"cannot read the schema {path} ({error.strerror}): check the name; `ekiden data "
            f"SOURCE --draft-schema {path.name}` drafts one"
        ) from None
    except (ValueError, RecursionError) as error:  # also of TOML and of the encoding
        raise UserError(f"{path} is not valid TOML: {error}") from None
    if values is None:
        raise UserError(
            f"{path} holds no schema: make it by `ekiden federation agree SUMS... --schema "
            "study.toml`"
        )
    with at(str(path)):
        return parsed(values)


def parse(text: str) -> Schema:
    """Return the schema in a text that `Schema.text` wrote."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("the schema cannot be read: it is not valid JSON") from None
    return parsed(values)


def parsed(values: Any) -> Schema:
    """Return the schema with these plain values."""
    if not isinstance(values, dict) or not isinstance(columns := values.get("columns", {}), dict):
        raise UserError("columns must be tables, as in [columns.age]")
    given = values | {"columns": {name: _listed(column) for name, column in columns.items()}}
    if isinstance(label := values.get("label_column"), str):
        given["label_column"] = (label,)
    found = made(Schema, given)
    if len(found.text()) > _MOST_TEXT:
        raise UserError(
            f"it has more than {_MOST_TEXT:,} characters: leave out categories of columns with "
            "many names"
        )
    return found


def _listed(column: Any) -> Any:
    """Return the values of a column; dates and codes may be written without quotes."""
    if not isinstance(column, dict):
        return column
    found = dict(column)
    for key, value in column.items():
        if key in ("categories", "missing") and isinstance(value, list):
            found[key] = tuple(map(_named, value))
        if isinstance(value, date):
            found[key] = value.isoformat()
    return found


def _named(value: Any) -> Any:
    """Return a category as a cell shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value) if isinstance(value, int) else value


def _shown(bound: float | str | None) -> str:
    """Return the end of a range as messages show it; "" if there is none."""
    if isinstance(bound, float):
        return f"{bound:.15g}"
    return bound or ""


def refuse(violations: Sequence[Violation], source: str) -> None:
    """Raise an error about data that do not meet a schema."""
    if not violations:
        return
    more = ""
    if len(violations) > 1:
        more = f" (and {counted(len(violations) - 1, 'more violation')})"
    told = ", ".join(dict.fromkeys(f"column {v.column!r} {v.what}" for v in violations[:1000]))
    raise SchemaError(
        f"{violations[0]}{more}: correct the data, or the schema; `ekiden data {source} --schema "
        "FILE` lists all",
        f"its data do not meet the study's schema ({told})",
        violations,
    )


def violations(
    table: Any, source: str, schema: Schema, writing: Writing, names: Mapping[str, tuple[str, ...]]
) -> list[Violation]:
    """Return what in a `pyarrow.Table`, as it was read, the schema does not allow, in the order of
    its columns.

    `writing` has the schema's marks of missing values, and `names` those of categories that are
    stored as positions.
    """
    lacking = not_in(table.column_names, schema.columns)
    others = not_in(schema.columns, table.column_names)
    found = list[Violation]()
    for name in lacking:
        near = [*nearest(name, others, n=1, cutoff=0.8), ""]
        found.append(Violation(source, name, "is missing", near[0], ""))
    check = _Check(
        table, source, schema, writing, names, lambda row: f"{row_text(row)} of {source}"
    )
    with warnings.catch_warnings():
        # they come when the data are read
        warnings.simplefilter("ignore")
        for name in schema.columns:
            if name not in lacking:
                found += check.of(name)
    return found


@dataclass(frozen=True)
class _Check:
    """Compares the columns of a table with a schema."""

    table: Any
    source: str
    schema: Schema
    writing: Writing
    names: Mapping[str, tuple[str, ...]]
    where: Callable[[int], str]

    @cached_property
    def measured(self) -> list[str]:
        """Return the columns that may hold numbers, which decide together on the decimal sign."""
        own = (*self.schema.features, *self.schema.label_column, self.schema.time_column)
        return [name for name in dict.fromkeys(own) if name in self.table.column_names]

    @cached_property
    def cells(self) -> Cells:
        return Cells(self.table, self.source, self.writing, self.measured)

    def of(self, name: str) -> list[Violation]:
        """Return the violations of a column, in the order of its rows."""
        column = self.schema.columns[name]
        if column.kind in ("number", "date"):
            return self._measured(name, column)
        if column.kind in ("category", "id"):
            return self._named(name, column)
        lost = np.array(self.table[name].is_null().to_pylist(), dtype=bool)
        return self._lost(name, column, lost)

    def _measured(self, name: str, column: Column) -> list[Violation]:
        """Return the violations of a column of numbers or dates."""
        odd = self.cells.odd(name, dates=column.kind == "date")
        found = self._at(name, column, odd, f"holds values that are not {column.kind}s")
        values, dates = self._values(name, odd)
        if len(found) > 1 and (values is None or np.isnan(values).all()):
            value = f"not {column.kind}s, but {found[0].value} in {found[0].where} and the like"
            return [
                Violation(
                    self.source, name, f"holds other than {column.kind}s", value, column.allows()
                )
            ]
        if values is None:
            return [Violation(self.source, name, f"holds {dates}", dates, column.allows())]
        found += self._at(name, column, ~column.within(values), "holds values out of range")
        return found + self._lost(name, column, np.isnan(values) & ~odd)

    def _values(self, name: str, odd: NDArray[np.bool_]) -> tuple[NDArray[np.float64] | None, str]:
        """Return a column without odd cells as numbers; None, and what it holds, if these are of
        another kind.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        table = self.table
        if odd.any():
            column = pa.chunked_array([pa.array(odd)])
            place = table.column_names.index(name)
            table = table.set_column(place, name, pc.if_else(column, None, table[name]))
        read = Cells(table, self.source, self.writing, self.measured).features([name], (), [name])
        kind = read.schema.field(name)
        if pa.types.is_null(kind.type):
            return np.full(len(table), np.nan), ""
        if str(kind.type) != "double":
            return None, "text"
        dates = DATE in (kind.metadata or {})
        if dates != (self.schema.columns[name].kind == "date"):
            return None, "dates" if dates else "numbers"
        return np.array(read[name], dtype=np.float64), ""

    def _named(self, name: str, column: Column) -> list[Violation]:
        """Return the violations of a column of names."""
        texts = self.cells.names(name).to_pylist()
        positions = dict(enumerate(self.names.get(name, ())))
        if positions:
            texts = [positions.get(int(t), t) if t and t.isdigit() else t for t in texts]
        known = {*column.categories} or {*texts}
        lost = np.array([text is None for text in texts], dtype=bool)
        strange = np.array([text not in known for text in texts], dtype=bool) & ~lost
        found = self._at(name, column, strange, "holds categories that are not in the schema")
        return found + self._lost(name, column, lost)

    def _lost(self, name: str, column: Column, lost: NDArray[np.bool_]) -> list[Violation]:
        """Return the rows without a value, if each needs one."""
        schema = self.schema
        meant = (*schema.label_column, schema.subject_column, schema.time_column, *schema.samples)
        if not column.required and name not in meant:
            return []
        needs = f"{column.allows()} in every row"
        return [
            Violation(self.where(row), name, "has no value", "", needs)
            for row in np.flatnonzero(lost).tolist()
        ]

    def _at(
        self, name: str, column: Column, which: NDArray[np.bool_], what: str
    ) -> list[Violation]:
        rows = np.flatnonzero(which)
        found = list[Violation]()
        for row, value in zip(rows.tolist(), self.table[name].take(rows).to_pylist(), strict=True):
            shown = str(value)
            if isinstance(value, str):
                shown = short(value)
            found.append(Violation(self.where(row), name, what, shown, column.allows()))
        return found


def of_labels(raw: Raw, schema: Schema) -> list[Violation]:
    """Return what in labels without a table (of folders, or in arrays) the schema does not
    allow.
    """
    import pyarrow as pa

    if len(schema.label_column) != 1 or raw.label.ndim != 1:
        return []
    name = schema.label_column[0]
    labels = raw.label
    if raw.classes and labels.dtype.kind == "i":
        labels = np.array(raw.classes)[labels]
    table = pa.table({name: labels.tolist()})
    return _Check(table, raw.source, schema, Writing(), {}, raw.where).of(name)


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def key(name: str) -> str:
    """Return a name as a key of TOML."""
    if _BARE.fullmatch(name):
        return name
    return string(name)


def string(text: str) -> str:
    """Return a text as a string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
