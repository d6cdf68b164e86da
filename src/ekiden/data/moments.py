"""Moments and counts, never a row, that silos share: all scale tables alike, and see other units."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from math import inf, log10, sqrt
from statistics import median

import numpy as np
import torch

from ekiden.base.errors import DataWarning, UserError
from ekiden.data.kinds import Inputs, Table
from ekiden.data.kinds.tables import Numbers, encode_again
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.data.tasks import Classification, Regression, Task
from ekiden.data.undecoded import natural

LARGEST = 1e140
"""a number whose square can still be added up in float64"""


@dataclass(frozen=True)
class ColumnMoments:
    """Count, mean, and sum of squared deviations from the mean, of the values of a column."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Numbers, what: str) -> "ColumnMoments":
        """Return the moments of (n,) float64 values."""
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
        if max(-low, high) > LARGEST:
            raise UserError(f"{what} holds {low if -low > high else high:g}: no number may be above {LARGEST:g}")
        if low == high:
            return ColumnMoments(len(values), low)
        mean = float(values.mean())
        mean += float((values - mean).mean())
        apart = values - mean
        return ColumnMoments(len(values), mean, float(np.square(apart).sum() - apart.sum() ** 2 / len(values)))

    @staticmethod
    def together(parts: Sequence["ColumnMoments"]) -> "ColumnMoments":
        """Return the moments of all values, by the formula of Chan, Golub and LeVeque (1979) for any number of parts.

        It is computed in rational numbers and rounded once: the same bits in any order of the parts, on any machine.
        """
        told = [part for part in parts if part.count]
        count = sum(part.count for part in told)
        if not count:
            return ColumnMoments()
        mean = sum((part.count * Fraction(part.mean) for part in told), Fraction()) / count
        squares = (Fraction(part.squares) + part.count * (Fraction(part.mean) - mean) ** 2 for part in told)
        return ColumnMoments(count, float(mean), float(sum(squares, Fraction())))

    @property
    def deviation(self) -> float:
        """Return the standard deviation; 0 if the values differ by rounding errors only, or there are none."""
        std = sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > 2 * float(np.finfo(np.float64).eps) * abs(self.mean) else 0.0


_FACTOR = 5.0  # times as large, in mean and in deviation: another unit
_ALIKE = 0.3  # difference of the two factors' decimal logarithms
_FAR = 8.0  # deviations between means
_ROWS = 10  # values from which a silo's moments are compared
_SHOWN = 5


def compare_units(silos: Mapping[str, Mapping[str, ColumnMoments]]) -> None:
    """Name silos whose columns are in another unit than the others'.

    Args:
        silos: for each silo, the moments of each column.

    Warns:
        DataWarning: a column of a silo is a factor of at least 5, or 8 standard deviations, away from the others'.
    """
    lines = []
    for column in next(iter(silos.values())):
        each = {silo: told[column] for silo, told in silos.items() if told[column].count >= _ROWS}
        lines += _units(column, each)
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        warnings.warn("; ".join(lines[:_SHOWN]) + more + ": check units", DataWarning, stacklevel=3)


def _units(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line for each silo that is far from the others."""
    if len(silos) < 2:
        return []
    mean, spread = median(m.mean for m in silos.values()), median(m.deviation for m in silos.values())
    if len(silos) == 2:
        (one, here), (other, there) = silos.items()
        apart = _apart(here, there.mean, there.deviation)
        means = f"means {here.mean:.4g} and {there.mean:.4g}"
        return [f"{column} of {one} and {other} differs by {apart} ({means})"] if apart else []
    found = {silo: _apart(here, mean, spread) for silo, here in silos.items()}
    return [
        f"{column} of {silo} differs from other silos by {apart} (mean {silos[silo].mean:.4g}, others' {mean:.4g})"
        for silo, apart in found.items()
        if apart
    ]


def _apart(here: ColumnMoments, mean: float, spread: float) -> str:
    """Return in words how far a silo is from this mean and standard deviation; empty if it is not."""
    if here.deviation and spread:
        factor = here.deviation / spread
        centred = max(abs(here.mean) / here.deviation, abs(mean) / spread) < 1
        same = here.mean * mean > 0 and abs(log10(here.mean / mean / factor)) < _ALIKE
        if max(factor, 1 / factor) >= _FACTOR and (centred or same):
            times = factor if centred else here.mean / mean
            return f"a factor of about {_round(max(times, 1 / times)):,}"
    far, widest = abs(here.mean - mean), max(here.deviation, spread)
    return f"{far / widest:,.0f} standard deviations" if widest and far > _FAR * widest else ""


def _round(times: float) -> int:
    """Return a factor with one digit, or a power of ten if that is near."""
    power = 10 ** round(log10(times))
    if abs(log10(times / power)) < 0.1:
        return int(power)
    digit = 10 ** int(log10(times))
    return int(round(times / digit) * digit)


@dataclass(frozen=True)
class ColumnSums:
    """What a silo reports about its training rows.

    Columns with fewer values than the least count, and categories with fewer rows, are left out.

    Attributes:
        moments: of each numeric column and target.
        missing: for each numeric column, the number of missing values.
        categories: for each categorical column, the number of rows of each category.
        dates: the numeric columns that are days since 1970.
        marks: cells that mark a missing value, in addition to the usual ones.
        silo: name of the silo; empty for several together.
        classes: the number of rows of each class, if labels are classes.
        rows: fingerprints of all rows, in hexadecimal and sorted, if the silo tells them.
    """

    moments: Mapping[str, ColumnMoments]
    missing: Mapping[str, int]
    categories: Mapping[str, Mapping[str, int]]
    dates: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    silo: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[str, ...] = ()

    @staticmethod
    def together(told: Sequence["ColumnSums"]) -> "ColumnSums":
        """Return the sums of all silos, the same in any order of them."""
        first = told[0]
        return ColumnSums(
            {name: ColumnMoments.together([one.moments[name] for one in told]) for name in first.moments},
            {name: sum(one.missing[name] for one in told) for name in first.missing},
            {name: _counted([one.categories[name] for one in told]) for name in first.categories},
            first.dates,
            tuple(sorted({mark for one in told for mark in one.marks})),
        )

    def to_json(self) -> str:
        """Return the sums as text, the same text for the same sums."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str, where: str) -> "ColumnSums":
        """Return the sums in a text."""
        try:
            found = json.loads(text)
            moments = {
                str(k): ColumnMoments(int(v["count"]), float(v["mean"]), float(v["squares"]))
                for k, v in found["moments"].items()
            }
            missing = {str(k): int(n) for k, n in found["missing"].items()}
            categories = {str(k): {str(c): int(n) for c, n in v.items()} for k, v in found["categories"].items()}
            dates, marks = (tuple(map(str, found[key])) for key in ("dates", "marks"))
            if set(missing) - set(moments) or set(dates) - set(missing):
                raise ValueError("columns")
            if not all(m.count >= 0 and abs(m.mean) <= LARGEST and 0 <= m.squares < inf for m in moments.values()):
                raise ValueError("moments")
            classes = {str(c): int(n) for c, n in found.get("classes", {}).items()}
            silo, rows = str(found.get("silo", "")), tuple(map(str, found.get("rows", ())))
            counts = [*missing.values(), *classes.values(), *(n for each in categories.values() for n in each.values())]
            if min(counts, default=0) < 0:
                raise ValueError("counts")
            if not re.fullmatch(r"[\w.-]{0,200}", silo) or not all(re.fullmatch(r"[0-9a-f]{16}", row) for row in rows):
                raise ValueError("names")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise UserError(f"{where} holds no sums of a table: make them with `ekiden silo sums silo.toml`") from None
        return ColumnSums(moments, missing, categories, dates, marks, silo, classes, rows)

    def scale(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a column; the latter is 0 for a column that does not vary."""
        found = self.moments[name]
        if not found.count:
            raise UserError(
                f"no silo has enough values in column {name!r} to send its sums: leave it out with --drop-columns "
                f"{name}, or lower --min-count"
            )
        return found.mean, found.deviation


def target(name: str) -> str:
    """Return a target's name among the sums, which no column has."""
    return f"target: {name}"


def agree(table: Table, told: Sequence[ColumnSums]) -> Table:
    """Return the table with the scaling and the vocabularies that follow from the silos' sums.

    Warns:
        DataWarning: a column does not vary.
    """
    total = ColumnSums.together(told)
    scales = {name: total.scale(name) for name in table.numeric}
    if constant := [name for name, (_, std) in scales.items() if not std]:
        several = len(constant) > 1
        warnings.warn(
            f"column{'s' * several} {', '.join(map(repr, constant))} {'have' if several else 'has'} one value in all "
            f"training rows, so a model learns nothing from {'them' if several else 'it'}: leave "
            f"{'them' if several else 'it'} out with --drop-columns {' '.join(constant)}",
            DataWarning,
            stacklevel=2,
        )
    vocabularies = tuple(tuple(sorted(total.categories[name], key=natural)) for name in table.categorical)
    for name, known in zip(table.categorical, vocabularies, strict=True):
        if not known:
            raise UserError(
                f"column {name!r} has no text that enough rows of a silo share: leave it out with --drop-columns "
                f"{name}, read it as text with --text-column {name}, or lower --min-count"
            )
    return replace(
        table,
        centre=tuple(mean for mean, _ in scales.values()),
        scale=tuple(std or 1.0 for _, std in scales.values()),
        gaps=tuple(name for name in table.numeric if total.missing[name]),
        vocabularies=vocabularies,
        missing=total.marks,
    )


def target_scales(told: Sequence[ColumnSums]) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of each number to predict, by name."""
    total = ColumnSums.together(told)
    found = {name.removeprefix(target("")): total.scale(name) for name in total.moments if name not in total.missing}
    if constant := next((name for name, (_, std) in found.items() if not std), None):
        mean = found[constant][0]
        raise UserError(f"the label {constant!r} is {mean:g} in all training rows: name a label that varies")
    return found


def _counted(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def told_by(client: ClientData, dataset: Dataset) -> ColumnSums:
    """Return what a client reports about its training rows, which are not scaled yet."""
    least, moments, missing, categories = dataset.least, {}, {}, {}

    def told(values: Numbers, what: str) -> ColumnMoments:
        return ColumnMoments.of(values, what) if len(values) >= least else ColumnMoments()

    labels, table, rows = client.train.y, Table(), np.empty((0, 0))
    if isinstance(dataset.inputs, Table):
        table, rows = dataset.inputs, client.train.x.numpy()
    for place, name in enumerate(table.numeric):
        present = rows[~np.isnan(rows[:, place]), place]
        gaps = len(rows) - len(present)
        moments[name] = told(present, f"column {name!r}")
        missing[name] = gaps if gaps >= least else 0
    for place, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True), len(table.numeric)):
        counts = np.bincount(rows[:, place].astype(np.int64), minlength=len(known) + 1)
        categories[name] = {known[code - 1]: int(n) for code, n in enumerate(counts) if code and n >= least}
    if isinstance(dataset.task, Regression):
        y = labels.double().numpy().reshape(len(labels), -1)
        moments |= {target(n): told(y[:, k], f"the label {n!r}") for k, n in enumerate(dataset.classes)}
    classes: dict[str, int] = {}
    if isinstance(dataset.task, Classification):
        held = torch.bincount(labels, minlength=len(dataset.classes)).tolist()
        classes = {name: n for name, n in zip(dataset.classes, held, strict=True) if n >= least}
    return ColumnSums(moments, missing, categories, table.dates, table.missing, client.name, classes)


def agreed(fed: FederatedData) -> FederatedData:
    """Return the federation with one scaling for all clients, from what each reports about its training rows.

    The columns of a table and the targets of a regression are scaled.
    """
    if not fed.dataset.least:
        return fed
    told = [told_by(client, fed.dataset) for client in fed.clients]
    check_units(told)
    table = fed.dataset.inputs
    after = agree(table, told) if isinstance(table, Table) else table
    task = fed.dataset.task
    if isinstance(task, Regression):
        mean, std = zip(*map(target_scales(told).__getitem__, fed.dataset.classes), strict=True)
        task = replace(task, mean=mean, std=std)
    return scaled(fed, after, task)


def check_units(told: Sequence[ColumnSums]) -> None:
    """Name silos whose columns or targets are in another unit than the others'."""
    if len(told) > 1:
        compare_units({one.silo: {_shown(name): m for name, m in one.moments.items()} for one in told})


def _shown(name: str) -> str:
    """Return a column or target as messages name it."""
    plain = name.removeprefix(target(""))
    return f"column {name!r}" if plain == name else f"target {plain!r}"


def scaled(fed: FederatedData, after: Inputs, task: Task) -> FederatedData:
    """Return the same samples, encoded as agreed."""
    dataset, before = fed.dataset, fed.dataset.inputs
    train, test = dataset.train, dataset.test
    if isinstance(before, Table) and isinstance(after, Table):
        train, test = (replace(s, x=encode_again(s.x, before, after)) for s in (train, test))

    def moved(part: Subset) -> Subset:
        return Subset(train if part.samples is dataset.train else test, part.rows)

    clients = tuple(replace(c, train=moved(c.train), val=moved(c.val), test=moved(c.test)) for c in fed.clients)
    return FederatedData(replace(dataset, train=train, test=test, inputs=after, task=task, least=0), clients)
