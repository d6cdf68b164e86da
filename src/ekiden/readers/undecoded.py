"""A part of a data set as its files hold it, undecoded."""

import unicodedata
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError, row_text
from ekiden.core.data.inputs import Inputs

PARTS = (
    "train",
    "test",
    "val",
    "valid",
    "validation",
    "dev",
    "eval",
    "training",
    "testing",
    "holdout",
)
"""what parts of a data set are called"""
# first character that is written onto the one before
_ACCENTS = 0x300


@dataclass(frozen=True)
class Raw:
    """A part of a data set (training or test) as its files hold it, undecoded."""

    # the file or folder, for messages
    source: str
    # n encoded images, files or opened images; or n texts; or the columns of a table
    # (`pyarrow.Table`); or an array (n,
    # ...)
    images: Any
    # (n,) integers or names, or float64 numbers; (n, K) float64 for several columns
    label: NDArray[Any]
    # (n,) integers or names, or None
    domain: NDArray[Any] | None = None
    # (n,) integers or names, or None
    group: NDArray[Any] | None = None
    # class names in the order of the labels; empty if the source has none
    classes: tuple[str, ...] = ()
    # names of domains in their order
    domains: tuple[str, ...] = ()
    # what the samples are
    kind: type[Inputs] = field(kw_only=True)
    # names of the columns of labels; none if there are no labels
    targets: tuple[str, ...] = ()
    # (n,) names or int64 numbers of whom or what the samples are about, such as patients, or None
    subject: NDArray[Any] | None = None
    # (n,) datetime64[us], or numbers, or None
    time: NDArray[Any] | None = None
    # whether these are arrays that were given in Python
    given: bool = False
    # (n,) number of each sample in the source; None if these are all samples of the source
    rows: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not len(self.images):
            what = "image" if self.kind.sized else "row"
            raise UserError(f"{self.source} is empty: it needs at least one labelled {what}.")
        if self.subject is not None and not self.given:
            # 7 of one file and 7.0 or "7" of another are one patient
            object.__setattr__(self, "subject", self.subject.astype(np.str_))
        for part in ("label", "domain", "group", "subject"):
            if (values := getattr(self, part)) is not None:
                object.__setattr__(self, part, _composed(values))
        for part in ("classes", "domains"):
            object.__setattr__(self, part, composed(getattr(self, part)))

    def __len__(self) -> int:
        return len(self.label)

    @property
    def positions(self) -> bool:
        """Whether whole numbers among the labels are positions of classes, from 0 without gaps.

        In a column of a table or an array of a file they are names of classes, so they may be any
        numbers.
        """
        return self.given or self.kind.positions

    def taken(self, rows: NDArray[np.int64]) -> "Raw":
        """Return these rows."""
        taken: dict[str, Any] = {"label": self.label[rows], "rows": rows}
        for name in ("domain", "group", "subject", "time", "rows"):
            if (part := getattr(self, name)) is not None:
                taken[name] = part[rows]
        return replace(self, images=self.kind.taken(self.images, rows), **taken)

    def where(self, row: int) -> str:
        """Return where the source holds a sample, for messages: its file, or its row before any
        were taken out.

        Args:
            row: its place in this part.
        """
        if isinstance(self.images, list | tuple) and isinstance(self.images[row], Path):
            return str(self.images[row])
        return f"{self.row(row)} of {self.source}"

    def row(self, row: int) -> str:
        """Return the row of the source that holds a sample, for messages."""
        if self.rows is not None:
            row = int(self.rows[row])
        return row_text(row)


def composed(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with one form of each character (NFC): macOS writes an accent in file names as a
    character.
    """
    return tuple(unicodedata.normalize("NFC", name) for name in names)


def named_twice(names: Sequence[str]) -> str:
    """Return the first name that is there twice; "" if there is none."""
    for name in names:
        if names.count(name) > 1:
            return name
    return ""


def not_in(known: Container[str], names: Iterable[str]) -> list[str]:
    """Return the names that are not among the known ones, in their order."""
    return [name for name in names if name not in known]


def all_are(kind: Any, values: Iterable[Any]) -> bool:
    """Return whether all values are of this type, or of one of these types."""
    return all(isinstance(value, kind) for value in values)


def _composed(values: NDArray[Any]) -> NDArray[Any]:
    """Return names (n,) as `composed` does; numbers unchanged."""
    if values.dtype.kind != "U" or not values.size or not values.dtype.itemsize:
        return values
    if np.ascontiguousarray(values).view(np.uint32).max() < _ACCENTS:
        return values
    names, places = np.unique(values, return_inverse=True)
    return np.array(list(composed(names.tolist())))[places]


def natural(name: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by value, before other names."""
    if name.isascii() and name.removeprefix("-").isdigit():
        return False, int(name), name
    return True, 0, name


def _values_of(parts: Sequence[Raw], what: str) -> list[NDArray[Any]] | None:
    """Return these values of each part; None if a part has none."""
    values = [getattr(part, what) for part in parts]
    if any(value is None for value in values):
        return None
    return values


def _cut(numbers: NDArray[np.int64], like: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return numbers of all parts together as numbers of each."""
    ends = np.cumsum([*map(len, like)])[:-1]
    return [torch.from_numpy(part.copy()) for part in np.split(numbers, ends)]


def owners(
    what: Literal["domain", "group"], parts: Sequence[Raw], preferred: tuple[str, ...] = ()
) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Return numbers and names of the domains or groups, if all parts have them.

    Args:
        what: domain or group.
        parts: parts of one data set.
        preferred: their names in order; used if the parts have no others and the files do not name
            them.
    """
    if (given := _values_of(parts, what)) is None:
        return [None] * len(parts), ()
    names = parts[0].domains if what == "domain" else ()
    if not names and set(preferred) >= {*map(str, np.unique(np.concatenate(given)))}:
        names = preferred
    if names and {part.dtype.kind for part in given} == {"i"}:
        for k, part in enumerate(given):
            # positions of names, unless names are numbers themselves
            if part.min() >= 0 and part.max() < len(names):
                given[k] = np.array(names)[part]
    each, inverse = np.unique(np.concatenate(given).astype(np.str_), return_inverse=True)
    found = each.tolist()
    order = names or tuple(sorted(found, key=natural))
    place = dict(zip(order, count()))
    for name in found:
        if name not in place:
            raise UserError(
                f"{what} {name!r} in {parts[0].source} is not among the {what} names: "
                f"{', '.join(order)}."
            )
    numbers = np.array([*map(place.get, found)], dtype=np.int64)
    return _cut(numbers[inverse], given), order


def subjects(parts: Sequence[Raw]) -> list[Tensor | None]:
    """Return the number of each sample's subject, the same for the same name in all parts; None
    without subjects.
    """
    if (given := _values_of(parts, "subject")) is None:
        return [None] * len(parts)
    return [*_cut(np.unique(np.concatenate(given), return_inverse=True)[1].astype(np.int64), given)]


def times(parts: Sequence[Raw]) -> list[Tensor | None]:
    """Return the times of all parts as numbers (n,) that can be compared; None if the parts have no
    times.
    """
    if (given := _values_of(parts, "time")) is None:
        return [None] * len(parts)
    dated = [values.dtype.kind == "M" for values in given]
    if len({*dated}) > 1:
        dates, numbers = (parts[dated.index(known)].source for known in (True, False))
        raise UserError(
            f"the times of {dates} are dates, those of {numbers} numbers: write all as 2024-01-31, "
            "2024-01-31 10:30:00, or as numbers"
        )
    if dated[0]:
        # microseconds
        given = [values.astype(np.int64) for values in given]
    return [*map(torch.from_numpy, given)]
