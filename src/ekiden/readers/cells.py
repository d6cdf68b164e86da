"""Find out what the cells of a table mean: numbers, dates, truth values or names.

What is stored otherwise but shown the same is read as the same: a CSV file, and the types of other
files and frames.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from math import isnan
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base.errors import UserError, counted, listed, row_text, tell
from ekiden.readers.dates import (
    DAY,
    ISO,
    LIKE,
    LOST,
    MONTHS,
    ZONE,
    Date,
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

TIMES = "write times as 2024-01-31, 2024-01-31 10:30:00, or as numbers"
_MANY = 10  # different numbers; more are hardly names of categories
_SHOWN = 4  # cells in a message
_UNITS = 3  # as many words after numbers are hardly units
_EXACT = 2**53  # larger whole numbers lose digits as float64
_LONG = 18  # characters of a whole number from which it may not fit into 64 bits

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
_ANY = r"[+-]?[\d.,' ]*\d[\d.,]*"
_MONEY = r"([$€£¥₹]|EUR|USD|GBP|CHF|JPY)"
_DECORATED = (
    rf"^(([<>≤≥~≈±]=?|{_MONEY})\s*{_ANY}|{_ANY}\s*([%‰-]|{_MONEY})|\({_ANY}\)|[+-]?\d+(,\d{{2,3}})+|\d+(_\d{{3}})+"
    rf"|{_ANY}\s*(±|[x×*]\s*10\s*\^?)\s*{_ANY}|[+-]?[٠-٩۰-۹０-９]+)$"
)
_UNITED = rf"^{_ANY}\s*[A-Za-zµ°/]+$"
_NO_NAME = (
    (r"^=(\"|[A-Z]+\()", "a formula of a spreadsheet"),
    (r"^'[\d.,]+$", "a number behind an apostrophe"),
    (r"^#(VALUE!|DIV/0!|REF!|NAME\?|NUM!|NULL!|SPILL!)$", "an error of a spreadsheet"),
    ("\ufffd", "a character that was lost in another encoding"),
    (r"^\d([.,]\d+)?E\+(1[1-9]|[2-9]\d)$", "a number of which a spreadsheet kept a few digits"),
)
"""forms of cells that are not names either"""
_SHORT_DATE = rf"^(\d{{1,2}}-(?i:{'|'.join(MONTHS)})|(?i:{'|'.join(MONTHS)})-\d{{2}})$"
_ALMOST = (
    (_DECORATED, "numbers with other signs"),
    (r"^\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?$", "times of day"),
    (r"^[+-]?\d+ days?( .*)?$", "durations"),
    (
        r"^(\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{4})[T ]+\d\d?:\d\d.*$",
        "times in a form that is not read",
    ),
    (r"^(\[.*\]|\{.*\}|[+-]?[\d.]+(\s*[;,|\s]\s*[+-]?[\d.]+){2,})$", "lists or objects"),
    (
        r"^((19|20)\d\d[-/](0?[1-9]|1[0-2])|(19|20)\d\d-?[QWqw]\d{1,2})$",
        "months, quarters or weeks without a day",
    ),
    (r"^\d+(\.\d+)?\s*[/|:]\s*\d+(\.\d+)?$", "two numbers"),
    (_UNITED, "numbers with a unit"),
)
"""forms of cells that are neither numbers nor names"""

_DATED = re.compile(r"(^|[\W_])(date|day|dob|datum|admitted|discharged)([\W_]|$)")
_SERIAL = (20_000, 60_000)  # 1954 to 2064
_CODED = re.compile(
    r"(^|[\W_])(zip|zip_?code|post_?code|postal_?code|plz|icd_?(9|10)?|cpt|codes?)$"
)
_STANDS_FOR_MISSING = re.compile(r"-[1-9]|-?(7{2,}|8{2,}|9{2,}(\.9+|\.25)?)|-32768|-2147483648")
_RUN = 4  # negative whole numbers up to -1 that are values if 0 is one
_GAP, _PART = (
    20,
    0.02,
)  # times between numbers in two units, and the least share of rows with either
_CLEAR = (
    2,
    4,
    # times between numbers that vary little, as degrees Celsius and Fahrenheit; and power of that they
    # vary
)
_CODES, _APART = (
    6,
    3,
)  # different values that may be codes, and how far from them 9 marks missing ones
_OUTLIER = 20  # times the range of all other values
_FAR_DATES = [
    date(1, 1, 1),
    date(1753, 1, 1),
    date(1899, 12, 30),
    date(1900, 1, 1),
    date(1970, 1, 1),
]
_FAR_DATES += [date(2099, 12, 31), date(2999, 12, 31), date(9999, 12, 31)]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Writing:
    """How a table is written, where its cells leave it open."""

    missing: tuple[
        str, ...
    ] = ()  # further cells that mark a missing value; COLUMN=CELL marks it in one column only
    decimal: Literal["", "point", "comma"] = ""  # the decimal sign; "" finds it out
    # whether 03/04/2024 begins with the day or with the month; "" finds it out
    dates: Literal["", "day-first", "month-first"] = ""

    def marks(self, column: str) -> tuple[str, ...]:
        """Return the cells that mark a missing value in a column."""
        own = f"{column}="
        return tuple(mark.removeprefix(own) for mark in self.missing)

    def numbers(self, column: str) -> list[float]:
        """Return the marks of missing values in a column that are numbers."""
        found = [_float(mark) for mark in self.marks(column)]
        return [number for number in found if number is not None]


@dataclass(frozen=True, eq=False)
class _Text:
    """The different cells of a column of text, without blanks at their ends."""

    cells: Any  # (k,) `pyarrow.Array` of the cells that are not missing
    places: NDArray[
        np.int64
    ]  # (n,) the position of each row's cell among them; -1 if it is missing
    counts: NDArray[np.int64]  # (k,) number of rows with each

    @staticmethod
    def of(column: Any, missing: Sequence[str]) -> "_Text":
        import pyarrow as pa
        import pyarrow.compute as pc

        trimmed = pc.utf8_trim_whitespace(column)
        trimmed = pc.if_else(
            pc.is_in(trimmed, pa.array([*NULLS, *missing], trimmed.type)), None, trimmed
        )
        coded = trimmed.dictionary_encode()
        places = np.array(
            coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64
        )
        counts = np.bincount(places[places >= 0], minlength=len(coded.dictionary))
        return _Text(coded.dictionary, places, counts)

    def like(self, pattern: str) -> NDArray[np.bool_]:
        """Return (k,) which cells have this form."""
        import pyarrow.compute as pc

        return np.array(
            pc.match_substring_regex(self.cells, pattern).to_numpy(zero_copy_only=False), dtype=bool
        )

    @cached_property
    def plain(self) -> "_Text":
        """Return the same cells with a plain minus and without blanks and apostrophes between
        thousands.
        """
        import pyarrow.compute as pc

        cells = pc.replace_substring(self.cells, "\u2212", "-")
        spaced = pc.match_substring_regex(cells, _SPACED)
        joined = pc.replace_substring_regex(cells, _SPACES, "")
        return _Text(pc.if_else(spaced, joined, cells), self.places, self.counts)

    @cached_property
    def numbers(self) -> dict[str, NDArray[np.bool_]]:
        """Return (k,) which cells are numbers, by the decimal sign."""
        return {sign: self.plain.like(f"^{form}$") for sign, form in _NUMBER.items()}

    @cached_property
    def texts(self) -> list[str]:
        return list(self.cells.to_pylist())

    @cached_property
    def dates(self) -> list[Date | None]:
        """Return the date (k,) that each cell is; None for other cells."""
        return [
            date_of(cell) if like else None
            for cell, like in zip(self.texts, self.like(LIKE), strict=True)
        ]

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
        more = int(self.counts[cell]) - 1
        return f"{short(self.texts[cell])} in {row_text(first)}" + (
            f" and {more} more" if more else ""
        )

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
        delimiter = (table.schema.metadata or {}).get(DELIMITER)
        self._delimiter = delimiter.decode() if delimiter else ""
        self._texts = {
            name: _Text.of(_strings(table[name]), writing.marks(name))
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

        arrays, fields = [], []
        for name in columns:
            column = self._table[name]
            if name in categorical or pa.types.is_dictionary(column.type):
                array, written = self.names(name), ""
            elif name in self._texts:
                array, written = self._of_text(name, strict=name in numeric)
            else:
                array, written = self._of_numbers(name)
            arrays.append(array)
            fields.append(
                pa.field(name, array.type, metadata={DATE: written.encode()} if written else None)
            )
        return pa.table(arrays, schema=pa.schema(fields))

    def as_text(self, name: str) -> bool:
        """Return whether a column that may hold numbers is stored as text."""
        return name in self._texts

    def odd(self, name: str, *, dates: bool) -> NDArray[np.bool_]:
        """Return (n,) which cells of a column are neither missing nor numbers, or dates."""
        if name not in self._texts:
            return np.zeros(len(self._table), dtype=bool)
        text = self._texts[name]
        if dates:
            return np.array(text.spread(~text.dated, False), dtype=bool)
        number, words = text.numbers[self.decimal], text.like("^(?i:true|false)$")
        fits = number | words if not (number & ~text.like("^[01]$")).any() else number
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
        self._doubt_names(name, found, texts)
        texts = pc.if_else(pa.array(found.places < 0), None, texts)
        if len(found.cells) and found.like(_WHOLE_FLOAT).all():
            return pc.replace_substring_regex(pc.utf8_trim_whitespace(texts), r"\.0*$", "")
        if found.truth is not None:
            lower = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
            return pc.if_else(
                pc.equal(lower, "1"), "true", pc.if_else(pc.equal(lower, "0"), "false", lower)
            )
        return texts

    def _doubt_names(self, name: str, text: _Text, texts: Any) -> None:
        """Refuse names that are none, and say what other programs may have done to them."""
        import pyarrow.compute as pc

        for pattern, what in _NO_NAME:
            if len(text.cells) and (odd := text.like(pattern)).any():
                raise UserError(self._line(name, f"{what} ({text.first(odd)})", "correct it"))
        if len(text.cells) and (short := text.like(_SHORT_DATE)).any():
            advice = "spreadsheets make such dates of names and codes, as of MARCH1 and 2-1: correct them if so"
            tell(
                self._line(name, f"dates without a year among names ({text.first(short)})", advice)
            )
        wrong = [cell for cell in text.texts if not cell.isascii() and garbled(cell)]
        if wrong:
            holds = f"{wrong[0]!r}, which is {garbled(wrong[0])!r} read in another encoding"
            tell(self._line(name, holds, "save the file as UTF-8 again"))
        codes = len(text.cells) > 1 and text.like("^[A-Z]{2}$").mean() >= 0.8
        if codes and (lost := pc.sum(pc.equal(pc.utf8_trim_whitespace(texts), "NA")).as_py()):
            holds = f"NA in {counted(lost, 'row')} among codes of two letters, which is read as a missing value"
            tell(self._line(name, holds, "if it is a name, as the code of Namibia, write another"))

    def label(self, name: str) -> NDArray[Any]:
        """Return a column of text as labels: (n,) names, int64, or float64."""
        text = self._texts[name]
        if (text.places < 0).any():
            self.refuse_missing(name, int(np.argmax(text.places < 0)))
        number = text.numbers[self.decimal]
        if number.any() and not number.all() and number.sum() > _MANY and text.share(number) >= 0.5:
            raise UserError(
                f"the label {name!r} of {self._source} holds numbers, but also text "
                f"({text.shown(~number)}): correct it, or leave such rows out"
            )
        whole, longest = text.like(_WHOLE).all(), max(map(len, text.texts))
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
        if (lost := text.like(_NO_NAME[-1][0])).any():
            tell(
                self._line(
                    name,
                    f"{_NO_NAME[-1][1]} ({text.first(lost)})",
                    "correct it, if these are codes",
                )
            )
        if whole:
            return text.spread(np.array([int(cell) for cell in text.plain.texts]), 0)
        return text.spread(self._parsed(text), np.nan)

    def refuse_missing(self, name: str, row: int) -> NoReturn:
        """Say that a label is missing."""
        raise UserError(
            f"the label in {row_text(row)} of {self._source} is missing (column "
            f"{name!r}{self.cell(name, row)}): give it one, or leave the row out"
        )

    def cell(self, name: str, row: int) -> str:
        """Return the cell of a missing value for messages, if there is something in it."""
        text = str(self._table[name][row].as_py() or "").strip()
        return f", which holds {short(text)}" if text else ""

    def time(self, name: str) -> NDArray[Any]:
        """Return a column of times (n,): datetime64[us] for dates, float64 for numbers."""
        import pyarrow as pa

        what, column = f"column {name!r} of {self._source}", self._table[name].combine_chunks()
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        text = (
            _Text.of(_strings(column), self._writing.marks(name)) if is_text(column.type) else None
        )
        lost = (
            text.places < 0 if text else np.array(column.is_null().to_numpy(zero_copy_only=False))
        )
        if lost.any():
            raise UserError(
                f"{what} has no value in {row_text(int(np.argmax(lost)))}: give every row a time."
            )
        kind = column.type
        dated = text.dated.all() if text else pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        if dated:
            stamps = (
                text.spread(self._microseconds(what, text)[0], 0) if text else stamps_of(column)
            )
            warn_of_marks(stamps / DAY, what, dates=True)
            if (late := stamps > (date.today() - date(1970, 1, 1)).days * DAY + DAY).any():
                shown = f"{iso(int(stamps.max()), whole=True)} in {row_text(int(stamps.argmax()))}"
                tell(
                    f"{what} holds {counted(int(late.sum()), 'time')} in the future ({shown}): "
                    "correct it"
                )
            return stamps.view("datetime64[us]")
        if text and text.numbers[self.decimal].all():
            return text.spread(self._parsed(text), 0.0)
        if text:
            raise UserError(f"{what} holds {text.first(~text.dated)}, which is not a time: {TIMES}")
        if not any(
            test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
        ):
            raise UserError(f"{what} holds {kind}: {TIMES}")
        values = np.array(
            column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64
        )
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            raise UserError(f"{what} is {values[row]} in {row_text(row)}: give every row a time.")
        return values

    def _microseconds(self, what: str, text: _Text) -> tuple[NDArray[np.int64], str]:
        """Return microseconds since 1970 of cells that are all dates (k,), and how these are
        written.
        """
        dates = [one for one in text.dates if one]
        stamps, form = microseconds(dates, what, self._writing.dates, text.where)
        zoned = dates[0].form.endswith("+zone") and (stamps % DAY).any()
        return stamps, form + ZONE * bool(zoned)

    @cached_property
    def decimal(self) -> Literal[".", ","]:
        """Return the decimal sign of the table, which all its numbers decide together."""
        if self._writing.decimal:
            return "." if self._writing.decimal == "point" else ","
        only: dict[
            str, tuple[str, str]
        ] = {}  # a number that has this sign for certain, and its column
        open_: tuple[str, str] | None = None
        for name, text in self._texts.items():
            point, comma = text.numbers["."], text.numbers[","]
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
        if only:
            return "," if "," in only else "."
        if open_ is not None:
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
            return (
                _floats(np.full(len(text.places), np.nan)) if strict else pa.nulls(len(text.places))
            ), ""
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
            stamps, form = self._microseconds(what, text)
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
        if text.like(rf"^[1-9]\d*[eE]\d+$|{_NO_NAME[-1][0]}").all():
            holds = f"only whole numbers with an exponent ({text.where(0)})"
            tell(self._line(name, holds, f"if they are codes, {_categories(name)}"))
        if text.like(_WHOLE).any():
            self._look_for_large(name, values)
        return self._finite(name, values), ""

    def _of_numbers(self, name: str) -> tuple[Any, str]:
        """Return a column of numbers, truth values or dates as float64."""
        import pyarrow as pa

        column = self._table[name].combine_chunks()
        kind, what = column.type, f"column {name!r} of {self._source}"
        if pa.types.is_null(kind):
            return column, ""
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            stamps = stamps_of(column)
            given = map(date_of, self._writing.marks(name))
            marks = [mark.microseconds() for mark in given if mark and not mark.open]
            days = np.where(np.isin(stamps, [LOST, *marks]), np.nan, stamps / DAY)
            warn_of_marks(days, what, dates=True)
            zoned = pa.types.is_timestamp(kind) and kind.tz and (stamps[stamps != LOST] % DAY).any()
            return _floats(days), ISO + ZONE * bool(zoned)
        numeric = (
            pa.types.is_integer,
            pa.types.is_floating,
            pa.types.is_decimal,
            pa.types.is_boolean,
        )
        if pa.types.is_temporal(kind):
            raise UserError(self._line(name, kind, _out(name)))
        if not any(test(kind) for test in numeric):
            advice = f"{_out(name)}, or name it with --image-column or --array-column"
            raise UserError(self._line(name, f"{kind}, neither numbers nor text", advice))
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        values = np.array(
            column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64
        )
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
        if units := _two_units(values):
            tell(self._line(name, f"numbers {units}", "write all in one unit, if they are in two"))
        if _look_like_dates(values):
            holds = f"numbers like {values[~np.isnan(values)][0]:.0f}, which look like dates but are read as numbers"
            tell(self._line(name, holds, "write dates as 2024-01-31"))
        known = values[~np.isnan(values)]
        low, high = _SERIAL
        if (
            _DATED.search(name.lower())
            and len(known)
            and low <= known.min()
            and known.max() <= high
        ):
            holds = "numbers of days as a spreadsheet counts them (44197 is 2021-01-01), which are read as numbers"
            tell(self._line(name, holds, "write dates as 2024-01-31"))
        if _CODED.search(name.lower()) and (known >= 0).all():
            tell(
                self._line(
                    name,
                    "codes by its name, which are read as numbers",
                    f"if they are, {_categories(name)}",
                )
            )
        return _floats(values)

    def _parsed(self, text: _Text) -> Floats:
        """Return (k,) the numbers that all cells are."""
        import pyarrow as pa
        import pyarrow.compute as pc

        cells = pc.replace_substring_regex(text.plain.cells, r"^\+", "")
        cells = pc.replace_substring(cells, "," if self.decimal == "." else ".", "")
        cells = pc.replace_substring(cells, self.decimal, ".")
        return np.array(cells.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)

    def _refuse_odd(
        self, name: str, text: _Text, which: NDArray[np.bool_], kind: str, *, strict: bool
    ) -> None:
        """Refuse a column that holds numbers (or dates) with a few other texts."""
        odd, share = ~which, text.share(which)
        several = which.sum() > _MANY and 2 * odd.sum() <= which.sum()
        if not which.any() or which.all() or not (share >= 0.5 or several):
            return
        if strict:
            raise UserError(self._line(name, _other(text, odd, kind), "correct it"))
        marks = [text.texts[k] for k in np.flatnonzero(odd)[:_SHOWN]]
        advice = f"correct it, say that it marks missing values with --missing={marks}, or {_categories(name)}"
        raise UserError(self._line(name, f"{kind}, but also text ({text.shown(odd)})", advice))

    def _refuse_almost_numbers(self, name: str, text: _Text, advice: str) -> None:
        """Refuse numbers with signs or units, times of day, and durations."""
        number = text.numbers[self.decimal]
        for pattern, what in _ALMOST:
            which = text.like(pattern)
            units = {
                re.sub(r"[\d.,' +-]", "", text.texts[k])
                for k in np.flatnonzero(which & (pattern == _UNITED))
            }
            names = pattern in (_UNITED, _ALMOST[-2][0]) and (
                which.sum() <= _MANY or len(units) >= _UNITS
            )
            if not names and which.any() and text.share(which | number) >= 0.5:
                raise UserError(self._line(name, f"{what} ({text.first(which)})", advice))

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
            values = column.cast(pa.float64(), safe=False).to_pylist()
            known = [None if v is None or isnan(v) else v for v in values]
            if any(v is not None and abs(v) > _EXACT for v in known):
                raise UserError(
                    self._line(
                        name,
                        "codes above 2^53 as floats, which lost digits",
                        "give text or integers",
                    )
                )
            whole = all(v is None or v.is_integer() for v in known)
            return pa.array(
                [None if v is None else str(int(v)) if whole else repr(v) for v in known],
                pa.large_string(),
            )
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            stamps = stamps_of(column.combine_chunks())
            midnight = bool((stamps[stamps != LOST] % DAY == 0).all())
            return pa.array(
                [None if s == LOST else iso(int(s), whole=midnight) for s in stamps],
                pa.large_string(),
            )
        raise UserError(self._line(name, kind, "it must hold integers or names (strings)"))


def _look_like_dates(values: Floats) -> bool:
    """Return whether all of several numbers are dates written as 20240131."""
    known = np.unique(values[~np.isnan(values)])
    years, days = np.divmod(known, 10_000)
    months, days = np.divmod(days, 100)
    parts = ((years, 1900, 2100), (months, 1, 12), (days, 1, 31))
    return len(known) > 2 and all(
        ((low <= part) & (part <= high)).all() for part, low, high in parts
    )


def warn_of_marks(values: Floats, what: str, *, dates: bool = False, filled: bool = False) -> None:
    """Notice numbers (n,) that probably mark missing values: -999, 9999, or -1 far from positive
    numbers.

    Values that are known to be missing are NaN, and dates are days since 1970. Missing values of
    arrays must be `filled`.
    """
    different, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    few = False
    if dates:
        days = [(d - date(1970, 1, 1)).days for d in _FAR_DATES]
        marks = np.isin(np.floor(different), days)
    else:
        ends = [*range(min(8, len(different))), *range(max(8, len(different) - 8), len(different))]
        marks = np.zeros(len(different), dtype=bool)
        marks[ends] = [bool(_STANDS_FOR_MISSING.fullmatch(f"{different[k]:.15g}")) for k in ends]
        marks |= np.abs(different) >= 1e20
        marks |= _apart(different, counts)
        few = len(different) <= _CODES  # codes from 0 or 1 without gaps, and 9
        marks |= few & np.isin(different, (-9, 9))
        few &= different[~marks][:1].tolist() in ([0], [1]) and bool(
            (np.diff(different[~marks]) == 1).all()
        )
        marks &= (
            ~np.isin(different, range(-9, 0)) | ~np.isin(range(-_RUN, 1), different).all()
        )  # months from -6 to 5
    rest, common = different[~marks], counts[~marks]
    if len(rest) < (2 if few else 5) or not marks.any():
        return
    low, high = float(rest[0]), float(rest[-1])
    for mark, count in zip(different[marks].tolist(), counts[marks].tolist(), strict=True):
        gap = low - mark if mark < low else mark - high
        far = gap >= (0.25 if mark < low and not dates else 1) * (high - low) and gap > 0
        far &= (not -10 < mark < 0 or low >= 0) and (not few or gap >= _APART)
        often = count >= 5 and len(rest) >= 10 and count > 3 * int(common.max())
        if far or (often and (mark >= 0 or low >= 0)):
            shown = iso(int(mark * DAY), whole=True) if dates else f"{mark:.15g}"
            between = " to ".join(
                iso(int(v * DAY), whole=True) if dates else f"{v:.6g}" for v in (low, high)
            )
            advice = "fill them" if filled else f"say so with --missing={shown!r}"
            tell(
                f"{what} holds {shown} in {count} row{'s' * (count > 1)}, far from its other "
                f"values ({between}): correct it, or if it marks missing values, {advice}"
            )


def _apart(different: Floats, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return (k,) which values are alone: far outside all others, or zeros in a few rows below
    positive numbers.
    """
    found = np.zeros(len(different), dtype=bool)
    if len(different) >= 10:
        low, high = different[1], different[-2]
        found[0] = low - different[0] > _OUTLIER * (different[-1] - low)
        found[-1] = different[-1] - high > _OUTLIER * (high - different[0])
        zeros = different[0] == 0 and 5 <= counts[0] <= 0.5 * counts.sum()
        found[0] |= zeros and low > 0.25 * (different[-1] - low)
    return found


def _two_units(values: Floats) -> str:
    """Return between which ends numbers (n,) lie that have a wide gap between them, as grams and
    kilograms have.
    """
    known = np.sort(values[~np.isnan(values)])
    least = max(10, int(_PART * len(known)))
    if len(known) < 2 * least or known[0] <= 0:
        return ""
    steps = known[least:] / known[least - 1 : -1]
    at = least + int(steps[: len(known) - 2 * least + 1].argmax())
    (a, b), (c, d) = (known[0], known[at - 1]), (known[at], known[-1])
    several = min(len(np.unique(known[:at])), len(np.unique(known[at:]))) >= 5
    return (
        f"from {a:.4g} to {b:.4g} and from {c:.4g} to {d:.4g}"
        if several
        and c / b >= min(max(_GAP, b / a, d / c), max(_CLEAR[0], max(b / a, d / c) ** _CLEAR[1]))
        else ""
    )


def garbled(name: str) -> str:
    """Return what a name was before UTF-8 was read as another encoding, as KÃ¶ln for Köln; "" if it
    was not.
    """
    for code in ("cp1252", "latin-1") if not name.isascii() else ():
        with suppress(UnicodeError):
            return name.encode(code).decode()
    return ""


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is that of text."""
    import pyarrow as pa

    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"
    )


def _strings(column: Any) -> Any:
    """Return a column of text as one array."""
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.cast(pa.large_string())


def _floats(values: Floats) -> Any:
    """Return numbers as an Arrow array, null where they are missing."""
    import pyarrow as pa

    return pa.array(values, mask=np.isnan(values))


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _other(text: _Text, odd: NDArray[np.bool_], expected: str) -> str:
    return f"text ({text.shown(odd)}), but {expected} are expected"


def _out(name: str) -> str:
    return f"leave it out with --drop-columns={name!r}"


def _categories(name: str) -> str:
    return f"take it as categories with --categorical-columns={name!r}"


def short(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 40 else f"{text[:37]}...")
