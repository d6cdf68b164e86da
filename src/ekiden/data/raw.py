"""A part of a data set as its files hold it, undecoded, and its labels as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.wording import row_text


@dataclass(frozen=True)
class Raw:
    """A part of a data set (training or test) as its files hold it, undecoded.

    Attributes:
        source: the file or folder, for messages.
        images: n encoded images, files or opened images; or n texts; or the columns of a table (`pyarrow.Table`); or
            an array (n, ...).
        label: (n,) integers or names, or float64 numbers; (n, K) float64 for several columns.
        domain: (n,) integers or names, or None.
        group: (n,) integers or names, or None.
        subject: (n,) names or int64 numbers of whom or what the samples are about, such as patients, or None.
        time: (n,) datetime64[us], or numbers, or None.
        classes: class names in the order of the labels; empty if the source has none.
        domains: names of domains in their order.
        kind: what the samples are.
        targets: names of the columns of labels; none if there are no labels.
        given: whether these are arrays that were given in Python.
        rows: (n,) number of each sample in the source; None if these are all samples of the source.
    """

    source: str
    images: Any
    label: NDArray[Any]
    domain: NDArray[Any] | None = None
    group: NDArray[Any] | None = None
    classes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    kind: Literal["images", "table", "tokens", "arrays"] = "images"
    targets: tuple[str, ...] = ()
    subject: NDArray[Any] | None = None
    time: NDArray[Any] | None = None
    given: bool = False
    rows: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not len(self.images):
            what = "image" if self.kind == "images" else "row"
            raise UserError(f"{self.source} is empty: it needs at least one labelled {what}.")

    def __len__(self) -> int:
        return len(self.label)

    @property
    def positions(self) -> bool:
        """Whether whole numbers among the labels are positions of classes, from 0 without gaps.

        In a column of a table or an array of a file they are names of classes, so they may be any numbers.
        """
        return self.given or self.kind == "images"

    def taken(self, rows: NDArray[np.int64]) -> "Raw":
        """Return these rows."""
        if isinstance(self.images, list | tuple):
            samples: Any = [self.images[row] for row in rows]
        else:
            samples = self.images.take(rows) if self.kind == "table" else self.images[rows]
        rest = {name: getattr(self, name) for name in ("domain", "group", "subject", "time")}
        taken: dict[str, Any] = {name: None if part is None else part[rows] for name, part in rest.items()}
        origin = rows if self.rows is None else self.rows[rows]
        return replace(self, images=samples, label=self.label[rows], rows=origin, **taken)

    def where(self, row: int) -> str:
        """Return where the source holds a sample, for messages: its file, or its row before any were taken out.

        Args:
            row: its place in this part.
        """
        sample = self.images[row] if isinstance(self.images, list | tuple) else None
        if isinstance(sample, Path):
            return str(sample)
        return f"{self.row(row)} of {self.source}"

    def row(self, row: int) -> str:
        """Return the row of the source that holds a sample, for messages."""
        return row_text(row if self.rows is None else int(self.rows[row]))


def natural(name: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by value, before other names."""
    number = name.isascii() and name.isdigit()
    return not number, int(name) if number else 0, name


def codes(
    parts: Sequence[NDArray[Any]], names: tuple[str, ...], what: str, source: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return numbers for the values of all parts: positions in `names`, or else in the sorted values."""
    if names and all(p.dtype.kind == "i" for p in parts):
        parts = [np.array(names)[p] if p.min() >= 0 and p.max() < len(names) else p for p in parts]
    found, inverse = np.unique(np.concatenate([p.astype(np.str_) for p in parts]), return_inverse=True)
    order = names or tuple(sorted(map(str, found), key=natural))
    place = {name: i for i, name in enumerate(order)}
    if strange := next((str(f) for f in found if str(f) not in place), None):
        raise UserError(f"{what} {strange!r} in {source} is not among the {what} names: {', '.join(order)}.")
    numbers = np.array([place[str(f)] for f in found], dtype=np.int64)[inverse]
    cuts = np.cumsum([len(p) for p in parts])[:-1]
    return [torch.from_numpy(p.copy()) for p in np.split(numbers, cuts)], order


def owners(
    what: Literal["domain", "group"], parts: Sequence[Raw], preferred: tuple[str, ...] = ()
) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Return numbers and names of the domains or groups, if all parts have them.

    Args:
        what: domain or group.
        parts: parts of one data set.
        preferred: their names in order; used if the parts have no others and the files do not name them.
    """
    values = [part.domain if what == "domain" else part.group for part in parts]
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        return [None] * len(values), ()
    names = parts[0].domains if what == "domain" else ()
    if not names and set(preferred) >= {str(v) for part in given for v in np.unique(part)}:
        names = preferred
    return codes(given, names, what, parts[0].source)


def subjects(parts: Sequence[Raw]) -> list[Tensor | None]:
    """Return the number of each sample's subject, the same for the same name in all parts; None without subjects."""
    given = [part.subject for part in parts if part.subject is not None]
    if len(given) < len(parts):
        return [None] * len(parts)
    _, numbers = np.unique(np.concatenate(given), return_inverse=True)
    cuts = np.cumsum([len(values) for values in given])[:-1]
    return [torch.from_numpy(values.copy()) for values in np.split(numbers.astype(np.int64), cuts)]
