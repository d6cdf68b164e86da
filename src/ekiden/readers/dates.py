"""Read dates and times: as ISO 8601 writes them, or in the one form that the user names."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

ISO = "2024-01-31"
ZONE = "dates with a time zone"
LIKE = (
    r"^(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}[ .-]+[A-Za-z]{3,9}[ .,-]+\d{4}"
    r"|[A-Za-z]{3,9}[ .]+\d{1,2},? +\d{4})"
)
"""how the cells begin that may be dates"""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
# microseconds
DAY = 86_400_000_000
LOST = -(2**63)
"""in place of a missing time"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS_OF_YEAR = 4


def date_of(text: str, form: str = "") -> datetime | None:
    """Return the date that a text is: 2024-01-31, with or without a time, or of this form of
    `strptime`; None if it is none.
    """
    try:
        # without signs, 20240131 is a number
        if text[_DIGITS_OF_YEAR : _DIGITS_OF_YEAR + 1] == "-":
            return datetime.fromisoformat(text)
        return datetime.strptime(text, form) if form else None
    except ValueError:
        return None


def microseconds(when: datetime) -> int:
    """Return microseconds since 1970; without a time zone, as if it was that of Greenwich."""
    zoned = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // timedelta(microseconds=1)


def stamps_of(column: Any) -> NDArray[np.int64]:
    """Return microseconds since 1970 of an array of dates or timestamps (n,); `LOST` if one is
    missing.
    """
    import pyarrow as pa

    stamps = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return np.array(stamps.fill_null(LOST), dtype=np.int64)


def iso(stamp: int, *, whole: bool) -> str:
    """Return microseconds since 1970 as a text file shows them."""
    try:
        when = (_EPOCH + timedelta(microseconds=stamp)).replace(tzinfo=None)
    except OverflowError:
        return str(stamp)
    return when.date().isoformat() if whole else when.isoformat(" ")
