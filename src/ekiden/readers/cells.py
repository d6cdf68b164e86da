"""Find out what the cells of a table mean: numbers, dates, truth values or names.

What is stored otherwise but shown the same is read as the same: a CSV file, and the types of other
files and frames.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base.errors import UserError, counted, listed, row_text, tell
from ekiden.readers.dates import (
    DAY,
    ISO,
    LIKE,
    LOST,
    ZONE,
    date_of,
    iso,
    microseconds,
    stamps_of,
)

NULLS = (
    "",
    "NA",
    "N/A",
    "#N/A",
    "#NA",
    "<NA>",
    "n/a",
    "NaN",
    "nan",
    "NaT",
    "NULL",
    "null",
    "?",
    ".",
)
"""cells that mark a missing value in every table"""
DATE = b"ekiden date"
"""key in the metadata of a field: its numbers are days since 1970; the value is how the dates were
written"""
DELIMITER = b"ekiden delimiter"
"""key in the metadata of a schema: the table comes from a text file, whose cells have no types"""

# different numbers; more are hardly names of categories
_MANY = 10
# cells in a message
_SHOWN = 4
# larger whole numbers lose digits as float64
_EXACT = 2**53
# characters of a whole number from which it may not fit into 64 bits
_LONG = 18

_EXPONENT = r"([eE][+-]?\d+)?"
_INFINITE = r"[+-]?(?i:inf|infinity)"
_NUMBER = {
    ".": rf"([+-]?(\d+\.?\d*|\.\d+|[1-9]\d{{0,2}}(,\d{{3}})+(\.\d*)?){_EXPONENT}|{_INFINITE})",
    ",": rf"([+-]?(\d+,?\d*|,\d+|[1-9]\d{{0,2}}(\.\d{{3}})+(,\d*)?){_EXPONENT}|{_INFINITE})",
}
_SPACES = "[ \u00a0\u2009\u202f'’]"
_SPACED = rf"^[+-]?[1-9]\d{{0,2}}({_SPACES}\d{{3}})+([.,]\d+)?$"
_CODE = r"^0\d+$"
_WHOLE = r"^[+-]?\d+$"
_WHOLE_FLOAT = r"^[+-]?(0|[1-9]\d*)(\.0*)?$"
_SHORTENED = r"^\d([.,]\d+)?E\+(1[1-9]|[2-9]\d)$"
_NO_NAME = (
    (r"^=(\"|[A-Z]+\()|^#[A-Z0/]+[!?]$", "a formula or an error of a spreadsheet"),
    ("\ufffd", "a character that was lost in another encoding"),
    (_SHORTENED, "a number of which a spreadsheet kept a few digits"),
)
"""forms of cells that are not names either"""
_NO_LETTER = r"^\P{L}*$"
_DIGIT_FIRST = r"^\P{L}*\p{N}"
"""a digit, and no letter before it, as in 45%, 10:30, 12 mg, 60-69"""

# labels of one of several columns
_YES = ("true", "yes")
_NO = ("false", "no")
_STANDS_FOR_MISSING = re.compile(r"-[1-9]|-?(7{2,}|8{2,}|9{2,}(\.9+|\.25)?)|-32768|-2147483648")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Writing:
    """How a table is written, where its cells leave it open."""

    # further cells that mark a missing value; COLUMN=CELL marks it in one column only
    missing: tuple[str, ...] = ()
    # the decimal sign; "" finds it out
    decimal: Literal["", "point", "comma"] = ""
    # how dates are written, as a pattern of strptime, if not as ISO 8601 does
    dates: str = ""

    def marks(self, column: str) -> tuple[str, ...]:
        """Return the cells that mark a missing value in a column."""
        own = f"{column}="
        return tuple(mark.removeprefix(own) for mark in self.missing)

    def numbers(self, column: str) -> list[float]:
        """Return the marks of missing values in a column that are numbers."""
        found = list[float]()
        for mark in self.marks(column):
            with suppress(ValueError):
                found.append(float(mark))
        return found


@dataclass(frozen=True, eq=False)
class _Text:
    """The different cells of a column of text, without blanks at their ends."""

    # (k,) `pyarrow.Array` of the cells that are not missing
    cells: Any
    # (n,) the position of each row's cell among them; -1 if it is missing
    places: NDArray[np.int64]
    # (k,) number of rows with each
    counts: NDArray[np.int64]
    # how dates are written, if not as ISO 8601 does
    form: str = ""

    @staticmethod
    def of(column: Any, missing: Sequence[str], form: str = "") -> "_Text":
        import pyarrow as pa
        import pyarrow.compute as pc

        trimmed = pc.utf8_trim_whitespace(column)
        trimmed = pc.if_else(
            pc.is_in(trimmed, pa.array([*NULLS, *missing], trimmed.type)), None, trimmed
        )
        coded = trimmed.dictionary_encode()
        places = np.array(coded.indices.fill_null(-1), dtype=np.int64)
        counts = np.bincount(places[places >= 0], minlength=len(coded.dictionary))
        return _Text(coded.dictionary, places, counts, form)

    def like(self, pattern: str) -> NDArray[np.bool_]:
        """Return (k,) which cells have this form."""
        import pyarrow.compute as pc

        return np.array(pc.match_substring_regex(self.cells, pattern), dtype=bool)

    @cached_property
    def plain(self) -> "_Text":
        """Return the same cells with a plain minus and without blanks and apostrophes between
        thousands.
        """
        import pyarrow.compute as pc

        cells = pc.replace_substring(self.cells, "\u2212", "-")
        spaced = pc.match_substring_regex(cells, _SPACED)
        joined = pc.replace_substring_regex(cells, _SPACES, "")
        return replace(self, cells=pc.if_else(spaced, joined, cells))

    @cached_property
    def numbers(self) -> dict[str, NDArray[np.bool_]]:
        """Return (k,) which cells are numbers, by the decimal sign."""
        return {sign: self.plain.like(f"^{form}$") for sign, form in _NUMBER.items()}

    @cached_property
    def texts(self) -> list[str]:
        return list(self.cells.to_pylist())

    @cached_property
    def dates(self) -> list[datetime | None]:
        """Return the date (k,) that each cell is; None for other cells."""
        return [date_of(cell, self.form) for cell in self.texts]

    @cached_property
    def dated(self) -> NDArray[np.bool_]:
        """Return (k,) which cells are dates."""
        return np.array([one is not None for one in self.dates], dtype=bool)

    @cached_property
    def truth(self) -> Floats | None:
        """Return (k,) truth values as 0 and 1; None if the cells are others."""
        words = self.like("^(?i:true|false)$")
        if not words.any() or not (words | self.like("^[01]$")).all():
            return None
        return self.like("^(?i:true|1)$").astype(np.float64)

    def share(self, which: NDArray[np.bool_]) -> float:
        """Return the share of the rows with these cells among those with any."""
        return float(self.counts[which].sum() / max(self.counts.sum(), 1))

    def where(self, cell: int) -> str:
        """Return a cell and its first row, for messages."""
        first = int(np.flatnonzero(self.places == cell)[0])
        shown = f"{short(self.texts[cell])} in {row_text(first)}"
        if self.counts[cell] > 1:
            shown += f" and {self.counts[cell] - 1} more"
        return shown

    def first(self, which: NDArray[np.bool_]) -> str:
        """Return the first of these cells and its row, for messages."""
        return self.where(int(np.argmax(which)))

    def shown(self, which: NDArray[np.bool_]) -> str:
        """Return some of these cells with their rows, for messages."""
        found = sorted(
            np.flatnonzero(which).tolist(), key=lambda k: int(np.argmax(self.places == k))
        )
        return listed([*map(self.where, found[:_SHOWN]), *found[_SHOWN:]], _SHOWN)

    def spread(self, values: NDArray[Any], lost: Any) -> NDArray[Any]:
        """Return (n,) the value of each row's cell, `lost` where it is missing."""
        return np.append(values, lost)[self.places]


class Cells:
    """The columns of a table, read as what they are used for."""

    def __init__(self, table: Any, source: str, writing: Writing, measured: Sequence[str]) -> None:
        """Look at a `pyarrow.Table`. Columns that may hold numbers (`measured`) decide on the
        decimal sign.
        """
        self._table = table
        self._source = source
        self._writing = writing
        self._delimiter = (table.schema.metadata or {}).get(DELIMITER, b"").decode()
        self._texts = {
            name: _Text.of(_strings(table[name]), writing.marks(name), writing.dates)
            for name in measured
            if is_text(table[name].type)
        }

    def _line(self, name: str, holds: str, advice: str) -> str:
        return f"column {name!r} of {self._source} holds {holds}: {advice}"

    def features(
        self, columns: Sequence[str], categorical: Sequence[str], numeric: Sequence[str] = ()
    ) -> Any:
        """Return a `pyarrow.Table` with these columns as float64 (null if missing) or as text.

        Dates become days since 1970, and truth values 0 and 1. Columns in `categorical` are text,
        whatever they look like; those in `numeric` must be numbers or dates. A column that is
        probably not what it seems is named.
        """
        import pyarrow as pa

        arrays = []
        fields = []
        for name in columns:
            column = self._table[name]
            if name in categorical or pa.types.is_dictionary(column.type):
                array = self.names(name)
                written = ""
            elif name in self._texts:
                array, written = self._of_text(name, strict=name in numeric)
            else:
                array, written = self._of_numbers(name)
            arrays.append(array)
            fields.append(
                pa.field(name, array.type, metadata={DATE: written.encode()} if written else None)
            )
        return pa.table(arrays, schema=pa.schema(fields))

    def odd(self, name: str, *, dates: bool) -> NDArray[np.bool_]:
        """Return (n,) which cells of a column are neither missing nor numbers, or dates."""
        if name not in self._texts:
            return np.zeros(len(self._table), dtype=bool)
        text = self._texts[name]
        if dates:
            return np.array(text.spread(~text.dated, False), dtype=bool)
        fits = text.numbers[self.decimal]
        bits = text.like("^[01]$")
        # among 0 and 1 only, true and false are numbers as well
        if not (fits & ~bits).any():
            fits = fits | text.like("^(?i:true|false)$")
        return np.array(text.spread(~fits, False), dtype=bool)

    def names(self, name: str) -> Any:
        """Return a column as text (`pyarrow.Array`), null if missing: 01 and 1 stay apart, 1 and
        1.0 do not.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self._table[name]
        kind = column.type
        if pa.types.is_dictionary(kind):
            if pa.types.is_nested(kind.value_type) or isinstance(
                kind.value_type, pa.BaseExtensionType
            ):
                raise UserError(
                    self._line(
                        name,
                        f"categories of {kind.value_type}",
                        f"write them as text, or {_out(name)}",
                    )
                )
            column = column.cast(kind.value_type)
            kind = kind.value_type
        if pa.types.is_null(kind):
            return pa.nulls(len(column), pa.large_string())
        if not is_text(kind):
            column = self._shown(column, name)
        texts = pc.utf8_normalize(_strings(column), "NFC")
        found = _Text.of(texts, self._writing.marks(name))
        self._refuse_no_names(name, found)
        self._doubt_codes(name, found, texts)
        texts = pc.if_else(pa.array(found.places < 0), None, texts)
        if len(found.cells) and found.like(_WHOLE_FLOAT).all():
            return pc.replace_substring_regex(pc.utf8_trim_whitespace(texts), r"\.0*$", "")
        if found.truth is not None:
            lower = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
            return pc.if_else(
                pc.equal(lower, "1"), "true", pc.if_else(pc.equal(lower, "0"), "false", lower)
            )
        return texts

    def _refuse_no_names(self, name: str, text: _Text) -> None:
        """Refuse names that are none, such as errors of a spreadsheet."""
        for pattern, what in _NO_NAME:
            if len(text.cells) and (odd := text.like(pattern)).any():
                raise UserError(self._line(name, f"{what} ({text.first(odd)})", "correct it"))

    def _doubt_codes(self, name: str, text: _Text, texts: Any) -> None:
        """Say that NA among codes of two letters may be one of them, such as that of Namibia."""
        import pyarrow.compute as pc

        lost = pc.sum(pc.equal(pc.utf8_trim_whitespace(texts), "NA")).as_py()
        if lost and len(text.cells) > 1 and text.like("^[A-Z]{2}$").mean() >= 0.8:
            holds = f"NA in {counted(lost, 'row')} among codes of two letters, which is read as a missing value"
            tell(self._line(name, holds, "if it is a name, as the code of Namibia, write another"))

    def labels(self, columns: Sequence[str]) -> NDArray[Any]:
        """Return the labels: for one column (n,) integers, names, or float64; for several (n, K)
        float64.
        """
        each = [*map(self._label, columns)]
        if len(each) == 1:
            return each[0]
        for k, values in enumerate(each):
            if values.dtype.kind == "U":
                words = np.char.lower(values)
                each[k] = np.isin(words, _YES)
                if not np.isin(words[~each[k]], _NO).all():
                    raise UserError(
                        f"column {columns[k]!r} of {self._source} holds names: with several "
                        "--label-column, all must hold numbers, or yes and no"
                    )
        return np.stack(each, axis=1, dtype=np.float64)

    def _label(self, name: str) -> NDArray[Any]:
        """Return the labels of one column: (n,) integers, names, or float64."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if name in self._texts:
            return self._label_of_text(name, self._texts[name])
        column = self._table[name]
        kind = column.type
        if column.null_count:
            self._refuse_missing(name, column.is_null().to_pylist().index(True))
        large = pa.types.is_uint64(kind) and pc.max(column).as_py() >= 2**63
        if large or pa.types.is_dictionary(kind) or pa.types.is_boolean(kind):
            return np.array(self.names(name).to_pylist(), dtype=np.str_)
        if pa.types.is_integer(kind):
            # a copy, as Arrow's memory is read-only
            return np.array(column.to_numpy(), dtype=np.int64)
        if not pa.types.is_floating(kind) and not pa.types.is_decimal(kind):
            raise UserError(self._line(name, kind, "it must hold integers or names (strings)."))
        values = np.array(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UserError(
                f"the label in {row_text(row)} of {self._source} is {values[row]} (column "
                f"{name!r}): give a number"
            )
        return values

    def owners(self, name: str) -> NDArray[Any] | None:
        """Return groups, domains or subjects: integers or names; None if the table has no such
        column. Whole numbers that are stored as floats count as integers.
        """
        import pyarrow as pa

        if not name or name not in self._table.column_names:
            return None
        column = self._table[name]
        if pa.types.is_integer(column.type) and not column.null_count:
            # a copy, as Arrow's memory is read-only
            return np.array(column.to_numpy(), dtype=np.int64)
        names = self.names(name)
        if names.null_count:
            row = names.is_null().to_pylist().index(True)
            raise UserError(
                f"column {name!r} of {self._source} has no value in "
                f"{row_text(row)}{self._cell(name, row)}: give every row one."
            )
        found: NDArray[Any] = np.array(names.to_pylist(), dtype=np.str_)
        if not pa.types.is_floating(column.type):
            return found
        if not all(value.lstrip("-").isdigit() for value in np.unique(found)):
            raise UserError(
                self._line(name, "fractions", "it must hold integers or names (strings).")
            )
        return found.astype(np.int64)

    def _label_of_text(self, name: str, text: _Text) -> NDArray[Any]:
        """Return a column of text as labels: (n,) names, int64, or float64."""
        if (text.places < 0).any():
            self._refuse_missing(name, int(np.argmax(text.places < 0)))
        number = text.numbers[self.decimal]
        if number.any() and not number.all() and number.sum() > _MANY and text.share(number) >= 0.5:
            raise UserError(
                f"the label {name!r} of {self._source} holds numbers, but also text "
                f"({text.shown(~number)}): correct it, or leave such rows out"
            )
        whole = text.like(_WHOLE).all()
        longest = max(map(len, text.texts))
        if len(text.cells) > _MANY:
            self._refuse_almost_numbers(name, text, "write plain numbers")
        if (
            not number.all()
            or text.like(_CODE).any()
            or text.truth is not None
            or (whole and longest >= _LONG)
        ):
            names: NDArray[Any] = np.array(self.names(name).to_pylist(), dtype=np.str_)
            if text.dated.all():
                raise UserError(
                    f"the label {name!r} of {self._source} holds dates: give numbers or names of "
                    "classes"
                )
            return names
        if (lost := text.like(_SHORTENED)).any():
            tell(
                self._line(
                    name,
                    f"{_NO_NAME[-1][1]} ({text.first(lost)})",
                    "correct it, if these are codes",
                )
            )
        if whole:
            return text.spread(np.array([*map(int, text.plain.texts)]), 0)
        return text.spread(self._parsed(text), np.nan)

    def _refuse_missing(self, name: str, row: int) -> NoReturn:
        """Say that a label is missing."""
        raise UserError(
            f"the label in {row_text(row)} of {self._source} is missing (column "
            f"{name!r}{self._cell(name, row)}): give it one, or leave the row out"
        )

    def _cell(self, name: str, row: int) -> str:
        """Return the cell of a missing value for messages, if there is something in it."""
        text = str(self._table[name][row].as_py() or "").strip()
        if not text:
            return ""
        return f", which holds {short(text)}"

    def time(self, name: str) -> NDArray[Any] | None:
        """Return a column of times (n,): datetime64[us] for dates, float64 for numbers; None if the
        name is empty.
        """
        import pyarrow as pa

        if not name:
            return None
        kind = self._table[name].type
        if pa.types.is_dictionary(kind):
            # times of equal rows, which a frame may keep as categories
            plain = self._table.select([name]).cast(pa.schema([(name, kind.value_type)]))
            return Cells(plain, self._source, self._writing, [name]).time(name)
        read = self.features([name], (), [name])
        values = np.array(read[name].to_numpy(), dtype=np.float64)
        lost = np.isnan(values)
        if lost.any():
            raise UserError(
                f"column {name!r} of {self._source} has no value in "
                f"{row_text(int(lost.argmax()))}: give every row a time"
            )
        if DATE in (read.schema.field(name).metadata or {}):
            # days as float64 are exact to a third of a microsecond
            return np.rint(values * DAY).astype(np.int64).view("datetime64[us]")
        return values

    def _microseconds(self, name: str, text: _Text) -> tuple[NDArray[np.int64], str]:
        """Return microseconds since 1970 of cells that are all dates (k,), and what these are."""
        dates = [*filter(None, text.dates)]
        stamps = np.array([*map(microseconds, dates)], dtype=np.int64)
        zoned = np.array([one.tzinfo is not None for one in dates])
        if zoned.any() and not zoned.all():
            shown = f"{text.first(zoned)}, {text.first(~zoned)}"
            holds = f"dates with a time zone and without ({shown})"
            raise UserError(self._line(name, holds, "write all alike"))
        return stamps, _written(stamps, bool(zoned.any()))

    @cached_property
    def decimal(self) -> Literal[".", ","]:
        """Return the decimal sign of the table, which all its numbers decide together."""
        if self._writing.decimal == "point":
            return "."
        if self._writing.decimal == "comma":
            return ","
        # a number that has this sign for certain, and its column
        only: dict[str, tuple[str, str]] = {}
        open_: tuple[str, str] | None = None
        for name, text in self._texts.items():
            point = text.numbers["."]
            comma = text.numbers[","]
            if text.share(point | comma) < 0.5:
                continue
            for sign, which in ((".", point & ~comma), (",", comma & ~point)):
                if which.any():
                    only.setdefault(sign, (name, text.first(which)))
            signed = text.like("," if self._delimiter != ";" else "[.,]") & point & comma
            if signed.any() and open_ is None:
                open_ = name, text.first(signed)
        if len(only) == 2:
            raise UserError(
                f"{self._source} writes numbers with a point (column {only['.'][0]!r}: "
                f"{only['.'][1]}) and with a "
                f"comma (column {only[','][0]!r}: {only[','][1]}): write all alike"
            )
        if "," in only:
            return ","
        if open_ is not None and not only:
            raise UserError(
                f"column {open_[0]!r} of {self._source} holds {open_[1]}, which may have decimals "
                "or thousands: say "
                "which sign stands before decimals with --decimal=point or --decimal=comma"
            )
        return "."

    def _of_text(self, name: str, *, strict: bool) -> tuple[Any, str]:
        """Return a column of text as what it means (numbers or dates if `strict`), and how dates
        are written, or "".
        """
        import pyarrow as pa

        text = self._texts[name]
        what = f"column {name!r} of {self._source}"
        if not len(text.cells):
            empty = pa.nulls(len(text.places))
            if strict:
                empty = empty.cast(pa.float64())
            return empty, ""
        if (truth := text.truth) is not None:
            return _floats(text.spread(truth, np.nan)), ""
        number = text.numbers[self.decimal]
        if text.like(_CODE).any() and text.like(_WHOLE)[number].all() and not strict:
            holds = f"numbers with leading zeros ({text.first(text.like(_CODE))})"
            tell(
                self._line(
                    name, holds, "they are read as categories; write quantities without zeros"
                )
            )
            return self.names(name), ""
        for which, kind in ((number, "numbers"), (text.dated, "dates")):
            self._refuse_odd(name, text, which, kind, strict=strict)
        if text.dated.all():
            stamps, form = self._microseconds(name, text)
            days = stamps / DAY
            warn_of_marks(text.spread(days, np.nan), what, dates=True)
            return _floats(text.spread(days, np.nan)), form
        if not number.all():
            advice = f"write plain numbers, {_out(name)}, or {_categories(name)}"
            self._refuse_almost_numbers(name, text, advice)
            if strict:
                raise UserError(self._line(name, _other(text, ~number, "numbers"), "correct it"))
            return self.names(name), ""
        values = text.spread(self._parsed(text), np.nan)
        if not self._delimiter and text.like(_WHOLE).all():
            holds = "whole numbers stored as text, which are read as numbers"
            tell(self._line(name, holds, f"if they are codes, {_categories(name)}"))
        if text.like(rf"^[1-9]\d*[eE]\d+$|{_SHORTENED}").all():
            holds = f"only whole numbers with an exponent ({text.where(0)})"
            tell(self._line(name, holds, f"if they are codes, {_categories(name)}"))
        if text.like(_WHOLE).any():
            self._look_for_large(name, values)
        return self._finite(name, values), ""

    def _of_numbers(self, name: str) -> tuple[Any, str]:
        """Return a column of numbers, truth values or dates as float64."""
        import pyarrow as pa

        column = self._table[name].combine_chunks()
        kind = column.type
        what = f"column {name!r} of {self._source}"
        if pa.types.is_null(kind):
            return column, ""
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            stamps = stamps_of(column)
            marks = filter(None, map(date_of, self._writing.marks(name)))
            lost = [LOST, *map(microseconds, marks)]
            days = np.where(np.isin(stamps, lost), np.nan, stamps / DAY)
            warn_of_marks(days, what, dates=True)
            zoned = pa.types.is_timestamp(kind) and bool(kind.tz)
            return _floats(days), _written(stamps[stamps != LOST], zoned)
        if pa.types.is_temporal(kind):
            raise UserError(self._line(name, kind, _out(name)))
        if not pa.types.is_primitive(kind) and not pa.types.is_decimal(kind):
            advice = f"{_out(name)}, or name it with --image-column or --array-column"
            raise UserError(self._line(name, f"{kind}, neither numbers nor text", advice))
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        values = np.array(column.cast(pa.float64(), safe=False), dtype=np.float64)
        if pa.types.is_integer(kind):
            self._look_for_large(name, values)
        return self._finite(name, values), ""

    def _finite(self, name: str, values: Floats) -> Any:
        """Return numbers without those that mark missing values."""
        what = f"column {name!r} of {self._source}"
        values = np.where(np.isin(values, self._writing.numbers(name)), np.nan, values)
        if np.isinf(values).any():
            row = int(np.flatnonzero(np.isinf(values))[0])
            raise UserError(
                f"{what} is infinite in {row_text(row)}: give a number, or leave it empty"
            )
        warn_of_marks(values, what)
        return _floats(values)

    def _parsed(self, text: _Text) -> Floats:
        """Return (k,) the numbers that all cells are."""
        import pyarrow as pa
        import pyarrow.compute as pc

        cells = pc.replace_substring_regex(text.plain.cells, r"^\+", "")
        thousands = ","
        if self.decimal == ",":
            thousands = "."
        cells = pc.replace_substring(cells, thousands, "")
        cells = pc.replace_substring(cells, self.decimal, ".")
        return np.array(cells.cast(pa.float64()), dtype=np.float64)

    def _refuse_odd(
        self, name: str, text: _Text, which: NDArray[np.bool_], kind: str, *, strict: bool
    ) -> None:
        """Refuse a column that holds numbers (or dates) with a few other texts."""
        odd = ~which
        share = text.share(which)
        several = which.sum() > _MANY and 2 * odd.sum() <= which.sum()
        if not which.any() or which.all() or not (share >= 0.5 or several):
            return
        if strict:
            raise UserError(self._line(name, _other(text, odd, kind), "correct it"))
        marks = [text.texts[k] for k in np.flatnonzero(odd)[:_SHOWN]]
        advice = f"correct it, say that it marks missing values with --missing={marks}, or {_categories(name)}"
        raise UserError(self._line(name, f"{kind}, but also text ({text.shown(odd)})", advice))

    def _refuse_almost_numbers(self, name: str, text: _Text, advice: str) -> None:
        """Refuse text that may be meant as numbers: with signs or units, times of day, lists."""
        number = text.numbers[self.decimal]
        which = text.like(_DIGIT_FIRST) & ~number
        # a few texts with letters, such as 1a and 2b, are names
        if which.sum() <= _MANY:
            which &= text.like(_NO_LETTER)
        dates = text.like(LIKE)
        which |= dates
        if not which.any() or text.share(which | number) < 0.5:
            return
        holds = f"text that begins as numbers do ({text.first(which)})"
        if dates.any():
            holds = f"dates in another form ({text.first(dates)})"
            advice = f"say how they are written, as by --dates=%d.%m.%Y, or write {ISO}"
        raise UserError(self._line(name, holds, advice))

    def _look_for_large(self, name: str, values: Floats) -> None:
        if (np.abs(values[np.isfinite(values)]) > _EXACT).any():
            advice = f"if they are codes, {_categories(name)}, or {_out(name)}"
            tell(self._line(name, "whole numbers above 2^53, which lose digits", advice))

    def _shown(self, column: Any, name: str) -> Any:
        """Return numbers, truth values or dates as a text file shows them."""
        import pyarrow as pa

        kind = column.type
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return column.cast(pa.large_string())
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values = np.array(column.cast(pa.float64(), safe=False), dtype=np.float64)
            lost = np.isnan(values)
            if (np.abs(values) > _EXACT).any():
                holds = "codes above 2^53 as floats, which lost digits"
                raise UserError(self._line(name, holds, "give text or integers"))
            known = np.where(lost, 0, values)
            if (known == np.floor(known)).all():
                return pa.array(known, pa.int64(), mask=lost).cast(pa.large_string())
            return pa.array([*map(repr, values.tolist())], pa.large_string(), mask=lost)
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            stamps = stamps_of(column.combine_chunks())
            midnight = bool((stamps[stamps != LOST] % DAY == 0).all())
            texts = [iso(stamp, whole=midnight) for stamp in stamps.tolist()]
            return pa.array(texts, pa.large_string(), mask=stamps == LOST)
        raise UserError(self._line(name, kind, "it must hold integers or names (strings)"))


def warn_of_marks(values: Floats, what: str, *, dates: bool = False) -> None:
    """Notice numbers (n,) that probably mark missing values: -999, 9999, or -1 far from positive
    numbers.

    Values that are known to be missing are NaN, and dates are days since 1970.
    """
    different, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    marks = _may_mark(different, counts)
    if dates:
        # of whatever form, such as 1900-01-01 and 9999-12-31
        marks[:1] = marks[-1:] = True
    rest = different[~marks]
    # of fewer values nobody can say what is far from them
    if len(rest) < 5:
        return
    low = float(rest[0])
    high = float(rest[-1])
    # below all other numbers, a quarter of their range is far: hardly anything is measured there
    below = (high - low) / 4
    if dates:
        below = high - low
    far = marks & ((different < low - below) | (different >= 2 * high - low))
    for mark, count in zip(different[far].tolist(), counts[far].tolist(), strict=True):
        shown, *ends = (_shown_number(one, dates=dates) for one in (mark, low, high))
        tell(
            f"{what} holds {shown} in {counted(count, 'row')}, far from its other values "
            f"({' to '.join(ends)}): correct it, or if it marks missing values, say so with "
            f"--missing={shown!r}"
        )


def _may_mark(different: Floats, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return (k,) which of ascending numbers may mark missing values: by their form, at either end,
    or zeros below all others.
    """
    marks = np.abs(different) >= 1e20
    # a pressure of 0 in a few rows was not measured; in most rows, it is what is usual
    marks[:1] |= (different[:1] == 0) & (counts[:1] >= 5) & (2 * counts[:1] <= counts.sum())
    # -3, -2, -1, 0 are values, such as months before an event
    signed = (different < 0).sum() > 2
    for place in {*range(len(different))[:8], *range(len(different))[-8:]}:
        text = f"{different[place]:.15g}"
        if _STANDS_FOR_MISSING.fullmatch(text):
            marks[place] |= len(text) > 2 or not signed
    return marks


def _shown_number(value: float, *, dates: bool) -> str:
    if dates:
        return iso(int(value * DAY), whole=True)
    return f"{value:.15g}"


def _written(stamps: NDArray[np.int64], zoned: bool) -> str:
    """Return what dates are: without a time of day, a time zone changes nothing."""
    if zoned and (stamps % DAY).any():
        return ZONE
    return "dates"


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is that of text."""
    return str(kind) in ("string", "large_string", "string_view")


def _strings(column: Any) -> Any:
    """Return a column of text as one array."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.cast(pa.large_string())


def _floats(values: Floats) -> Any:
    """Return numbers as an Arrow array, null where they are missing."""
    import pyarrow as pa

    return pa.array(values, mask=np.isnan(values))


def _other(text: _Text, odd: NDArray[np.bool_], expected: str) -> str:
    return f"text ({text.shown(odd)}), but {expected} are expected"


def _out(name: str) -> str:
    return f"leave it out with --drop-columns={name!r}"


def _categories(name: str) -> str:
    return f"take it as categories with --categorical-columns={name!r}"


def short(text: str | None) -> str:
    if text is not None and len(text) > 40:
        text = f"{text[:37]}..."
    return repr(text)
