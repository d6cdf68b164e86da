"""Read dates as people write them: 2024-01-31, 31.01.2024 10:30, 1/31/2024, 31 Jan 2024."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base.errors import UserError

ISO = "YYYY-MM-DD"
ZONE = " with a time zone"
LIKE = r"^(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}[ .-]+[A-Za-z]{3}|[A-Za-z]{3,9}[ .]+\d{1,2},? )"
"""how the cells begin that may be dates"""
DAY = 86_400_000_000  # microseconds
LOST = int(np.iinfo(np.int64).min)
"""in place of a missing time"""
_EPOCH = datetime(1970, 1, 1)

_TIME = r"(?:[T ]+(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,9}))?)?(?: ?([AaPp])[Mm])?)? ?(Z|UTC|[+-]\d{2}(?::?\d{2})?)?"
_YEAR_FIRST = re.compile(rf"(\d{{4}})([-/.])(\d{{1,2}})\2(\d{{1,2}}){_TIME}")
_YEAR_LAST = re.compile(rf"(\d{{1,2}})([-/.])(\d{{1,2}})\2(\d{{4}}|\d{{2}}){_TIME}")
_WITH_MONTH = re.compile(rf"(\d{{1,2}})[ .-]+([A-Za-z]{{3,9}})[ .,-]+(\d{{4}}){_TIME}")
_MONTH_FIRST = re.compile(rf"([A-Za-z]{{3,9}})[ .]+(\d{{1,2}}),? +(\d{{4}}){_TIME}")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


@dataclass
class Date:
    """A date as it is written."""

    form: str  # how it is written, without the order of day and month
    year: int
    first: int  # the month, unless `open`
    second: int  # the day, unless `open`
    clock: int = 0  # microseconds since midnight
    sign: str = "-"  # between the numbers
    open: bool = False  # whether the first may be the day or the month
    short: bool = False  # whether the year has two digits

    def microseconds(self, order: str = "") -> int:
        """Return microseconds since 1970; a ValueError if there is no such date."""
        month, day = (
            (self.second, self.first) if order == "day-first" else (self.first, self.second)
        )
        return (datetime(self.year, month, day) - _EPOCH) // timedelta(microseconds=1) + self.clock

    def written(self, order: str) -> str:
        """Return how the date is written, as a pattern."""
        if not self.open:
            return self.form.partition("+")[0]
        return self.sign.join(
            ["DD", "MM", "YYYY"] if order == "day-first" else ["MM", "DD", "YYYY"]
        )


def microseconds(
    dates: Sequence[Date], what: str, order: str, where: Callable[[int], str]
) -> tuple[NDArray[np.int64], str]:
    """Return microseconds since 1970 of dates (k,) of a column, all of one form, and this form.

    `order` is day-first or month-first where the dates leave it open; "" if it is not known.
    `where` returns one of the dates and its row, for messages.
    """
    if short := [k for k, one in enumerate(dates) if one.short]:
        raise UserError(
            f"{what} holds dates with two-digit years ({where(short[0])}): write four digits"
        )
    if odd := [k for k, one in enumerate(dates) if one.form != dates[0].form]:
        raise UserError(
            f"{what} holds dates of different forms ({where(0)}, {where(odd[0])}): write all as "
            f"{ISO}"
        )
    order = _order(dates, what, order, where) if dates[0].open else ""
    stamps = np.empty(len(dates), dtype=np.int64)
    for k, one in enumerate(dates):
        try:
            stamps[k] = one.microseconds(order)
        except ValueError:
            raise UserError(f"{what} holds {where(k)}, which is not a date: correct it") from None
    return stamps, dates[0].written(order)


def _order(dates: Sequence[Date], what: str, order: str, where: Callable[[int], str]) -> str:
    """Return whether dates begin with the day or with the month."""
    days = next((k for k, one in enumerate(dates) if one.first > 12), None)
    months = next((k for k, one in enumerate(dates) if one.second > 12), None)
    if days is not None and months is not None:
        raise UserError(
            f"{what} holds dates that begin with the day ({where(days)}) and with the month "
            f"({where(months)}): write all as {ISO}"
        )
    if days is not None or months is not None:
        return "day-first" if days is not None else "month-first"
    if not order and (dates[0].sign == "." or all(one.first == one.second for one in dates)):
        return "day-first"
    if not order:
        raise UserError(
            f"{what} holds {where(0)}, which may begin with the day or with the month: say which "
            f"with --dates=day-first or --dates=month-first, or write {ISO}"
        )
    return order


def date_of(text: str) -> Date | None:
    """Return the date that a text is; None if it is none."""
    if m := _YEAR_FIRST.fullmatch(text):
        year, sign, month, day, *time = m.groups()
        found = Date(f"YYYY{sign}MM{sign}DD", int(year), int(month), int(day), sign=sign)
    elif m := _YEAR_LAST.fullmatch(text):
        first, sign, second, year, *time = m.groups()
        found = Date(
            f"..{sign}..{sign}YYYY",
            int(year),
            int(first),
            int(second),
            0,
            sign,
            True,
            len(year) == 2,
        )
        if max(found.first, found.second) > 31 or min(found.first, found.second) > 12:
            return None
    elif m := _WITH_MONTH.fullmatch(text) or _MONTH_FIRST.fullmatch(text):
        day, name, year, *time = m.groups() if m[1].isdigit() else (m[2], m[1], *m.groups()[2:])
        if name[:3].lower() not in MONTHS:
            return None
        form = "DD Month YYYY" if m[1].isdigit() else "Month DD YYYY"
        found = Date(form, int(year), MONTHS.index(name[:3].lower()) + 1, int(day))
    else:
        return None
    hour, minute, second_, fraction, half, zone = time
    if hour is not None:
        hours = int(hour) % 12 + 12 * (half.lower() == "p") if half else int(hour)
        found.clock = ((hours * 60 + int(minute)) * 60 + int(second_ or 0)) * 1_000_000
        found.clock += int((fraction or "0").ljust(6, "0")[:6])
        if int(minute) > 59 or int(second_ or 0) > 60 or found.clock > DAY:
            found.first = 0  # so that it is refused as a day that does not exist
    if zone is not None:
        found.form += "+zone"
        if zone not in ("Z", "UTC"):
            minutes = int(zone[1:3]) * 60 + int(zone[-2:] if len(zone) > 3 else 0)
            found.clock -= (1 if zone[0] == "+" else -1) * minutes * 60_000_000
    return found


def stamps_of(column: Any) -> NDArray[np.int64]:
    """Return microseconds since 1970 of an array of dates or timestamps (n,); `LOST` if one is
    missing.
    """
    import pyarrow as pa

    stamps = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return np.array(stamps.fill_null(LOST).to_numpy(zero_copy_only=False), dtype=np.int64)


def iso(stamp: int, *, whole: bool) -> str:
    """Return microseconds since 1970 as a text file shows them."""
    try:
        when = _EPOCH + timedelta(microseconds=stamp)
    except OverflowError:
        return str(stamp)
    return when.date().isoformat() if whole else when.isoformat(" ")
