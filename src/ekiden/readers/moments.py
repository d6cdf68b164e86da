"""Moments and counts, never a row, that silos tell about their training rows."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Annotated

import numpy as np

from ekiden.core.base.checks import CountOrZero, NonNegative, Range, made
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import read_text
from ekiden.core.data.samples import ClientData, Dataset
from ekiden.core.tasks import Classification, ScaledTask, Survival
from ekiden.readers.followed import Followed
from ekiden.readers.kinds import Table
from ekiden.readers.kinds.tables import Numbers

LARGEST = 1e140
"""a number whose square can still be added up in float64"""


@dataclass(frozen=True)
class ColumnMoments:
    """Count, mean, and sum of squared deviations from the mean, of the values of a column."""

    count: CountOrZero = 0
    mean: Annotated[float, Range(least=-LARGEST, most=LARGEST)] = 0.0
    squares: NonNegative = 0.0

    @staticmethod
    def of(values: Numbers, what: str) -> "ColumnMoments":
        """Return the moments of (n,) float64 values."""
        if not len(values):
            return ColumnMoments()
        low = float(values.min())
        high = float(values.max())
        if max(-low, high) > LARGEST:
            raise UserError(
                f"{what} holds {max(low, high, key=abs):g}: no number may be above {LARGEST:g}"
            )
        if low == high:
            return ColumnMoments(len(values), low)
        mean = float(values.mean())
        mean += float((values - mean).mean())
        apart = values - mean
        return ColumnMoments(
            len(values), mean, float(np.square(apart).sum() - apart.sum() ** 2 / len(values))
        )

    @staticmethod
    def together(parts: Sequence["ColumnMoments"]) -> "ColumnMoments":
        """Return the moments of all values, by the formula of Chan, Golub and LeVeque (1979) for
        any number of parts.

        It is computed in rational numbers and rounded once: the same bits in any order of the
        parts, on any machine.
        """
        told = [part for part in parts if part.count]
        count = sum(part.count for part in told)
        if not count:
            return ColumnMoments()
        mean = sum((part.count * Fraction(part.mean) for part in told), Fraction()) / count
        squares = Fraction()
        for part in told:
            squares += Fraction(part.squares) + part.count * (Fraction(part.mean) - mean) ** 2
        return ColumnMoments(count, float(mean), float(squares))

    @property
    def deviation(self) -> float:
        """Return the standard deviation; 0 if the values differ by rounding errors only, or there
        are none.
        """
        std = sqrt(self.squares / max(self.count, 1))
        if std > 2 * float(np.finfo(np.float64).eps) * abs(self.mean):
            return std
        return 0.0


@dataclass(frozen=True)
class ColumnSums:
    """What a silo reports about its training rows.

    Columns with fewer values than the least count, and categories with fewer rows, are left out. A
    column is told as if it had one value if fewer values differ from the commonest one.
    """

    # of each numeric column and target
    moments: Mapping[str, ColumnMoments]
    # for each numeric column, the number of missing values
    missing: Mapping[str, CountOrZero]
    # for each categorical column, the number of rows of each category
    categories: Mapping[str, Mapping[str, CountOrZero]]
    # the numeric columns that are days since 1970
    dates: tuple[str, ...] = ()
    # cells that mark a missing value, in addition to the usual ones
    marks: tuple[str, ...] = ()
    # name of the silo; empty for several together
    silo: str = ""
    # the number of rows of each class, if labels are classes
    classes: Mapping[str, CountOrZero] = field(default_factory=dict)
    # fingerprints of all rows, in hexadecimal and sorted, if the silo tells them
    rows: tuple[str, ...] = ()
    # how many rows had the event between some times, if labels are times and events
    followed: Followed | None = None
    # fingerprint of the secret that `rows` were made with
    secret: str = ""

    @property
    def least_rows(self) -> int:
        """Return a number of rows that the silo has at least."""
        least = sum(self.classes.values())
        for name, moments in self.moments.items():
            least = max(least, moments.count + self.missing.get(name, 0))
        for categories in self.categories.values():
            least = max(least, sum(categories.values()))
        return least

    @staticmethod
    def together(told: Sequence["ColumnSums"]) -> "ColumnSums":
        """Return the sums of all silos, the same in any order of them."""
        first = told[0]
        moments = dict[str, ColumnMoments]()
        for name in first.moments:
            moments[name] = ColumnMoments.together([one.moments[name] for one in told])
        categories = dict[str, dict[str, int]]()
        for name in first.categories:
            categories[name] = counted_together([one.categories[name] for one in told])
        missing = counted_together([one.missing for one in told])
        marks = tuple(sorted(set(chain.from_iterable(one.marks for one in told))))
        classes = counted_together([one.classes for one in told])
        return ColumnSums(moments, missing, categories, first.dates, marks, classes=classes)

    def to_json(self) -> str:
        """Return the sums as text, the same text for the same sums."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str, where: str) -> "ColumnSums":
        """Return the sums in a text."""
        with suppress(ValueError, AttributeError, RecursionError, UserError):
            values = json.loads(text)
            if values.get("followed"):
                values["followed"] = made(Followed, values["followed"])
            found = made(ColumnSums, values)
            if found._agrees():
                return found
        raise UserError(
            f"{where} holds no sums of a table: make them with `ekiden silo sums silo.toml`"
        )

    def _agrees(self) -> bool:
        """Return whether the columns go together, and names are such."""
        prints = self.rows if not self.secret else (*self.rows, self.secret)
        columns = {name for name in self.moments if not name.startswith(target(""))}
        return (
            {*self.missing} == columns
            and {*self.dates} <= columns
            and not {*self.categories} & {*self.moments}
            and re.fullmatch(r"[\w.-]{0,200}", self.silo) is not None
            and all(re.fullmatch(r"[0-9a-f]{16}", one) for one in prints)
        )

    def scale(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a column; the latter is 0 for a column that does
        not vary.
        """
        found = self.moments[name]
        if not found.count:
            raise UserError(
                f"no silo has enough values in column {name!r} to send its sums: leave it out with "
                f"--drop-columns={name!r}, or lower --min-count"
            )
        return found.mean, found.deviation


def read_sums(file: Path) -> ColumnSums:
    """Return the sums in a file that another silo wrote."""
    try:
        return ColumnSums.from_json(read_text(file), str(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def target(name: str) -> str:
    """Return a target's name among the sums, which no column has."""
    return f"target: {name}"


def counted_together(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def told_by(client: ClientData, dataset: Dataset, times: Sequence[float] = ()) -> ColumnSums:
    """Return what a client reports about its training rows, which are not scaled yet, and of events
    between times.
    """
    if times and not isinstance(dataset.task, Survival):
        raise UserError("times at which survival is shown need --task=survival: leave them out")
    least = dataset.least
    moments = {}
    missing = {}
    categories = {}

    def told(values: Numbers, what: str) -> ColumnMoments:
        if len(values) < least:
            return ColumnMoments()
        different, counts = np.unique(values, return_counts=True)
        few = least <= counts.max() and len(values) - counts.max() < least
        # mean and deviation would tell their values
        if few:
            values = np.full_like(values, different[counts.argmax()])
        return ColumnMoments.of(values, what)

    labels = client.train.y
    table = Table.of(dataset.inputs)
    rows = np.empty((0, 0))
    if table.numeric or table.categorical:
        rows = client.train.x.numpy()
    for place, name in enumerate(table.numeric):
        present = rows[~np.isnan(rows[:, place]), place]
        if name.startswith(target("")):
            raise UserError(
                f"rename the column {name!r}: sums of a number to predict have this name"
            )
        moments[name] = told(present, f"column {name!r}")
        missing[name] = len(rows) - len(present)
        if missing[name] < least:
            missing[name] = 0

    def counted(codes: Numbers, names: Sequence[str]) -> dict[str, int]:
        counts = np.bincount(codes.astype(np.int64), minlength=len(names)).tolist()
        return {name: n for name, n in zip(names, counts, strict=True) if n >= least}

    for place, (name, known) in enumerate(
        zip(table.categorical, table.vocabularies, strict=True), len(table.numeric)
    ):
        # code 0 is a missing value
        categories[name] = counted(rows[rows[:, place] > 0, place] - 1, known)
    if isinstance(dataset.task, ScaledTask):
        for name, values in zip(
            dataset.classes, dataset.task.measured(labels).numpy().T, strict=True
        ):
            moments[target(name)] = told(values, f"the label {name!r}")
    classes: dict[str, int] = {}
    if isinstance(dataset.task, Classification):
        classes = counted(labels.numpy(), dataset.classes)
    followed = None
    if times:
        followed = Followed.of(labels.double().numpy(), times, least)
    return ColumnSums(
        moments,
        missing,
        categories,
        table.dates,
        table.missing,
        client.name,
        classes,
        followed=followed,
    )
