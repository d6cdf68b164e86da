"""Moments and counts, never a row, that silos share: all scale tables alike, and see other units.

Between machines, `agree_on` makes a file of what silos told, and each silo reads its scaling from there.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from math import floor, inf, isfinite, log10, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.base.checks import made
from ekiden.base.errors import UserError, counted, listed, nearest, tell
from ekiden.data import doubts
from ekiden.data import schema as schemas
from ekiden.data.curves import Followed
from ekiden.data.kinds import Inputs, Table, from_json, to_json
from ekiden.data.kinds.tables import Numbers, encode_again
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.data.schema import Schema
from ekiden.data.spelling import merging, nothing_in_common, numbered_from_two, refuse_spellings
from ekiden.data.tasks import Classification, ScaledTask, Survival, Task
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
_ALIKE = 0.4  # difference of the two factors' decimal logarithms
_NARROW = 3.0  # deviations between the mean and zero from which less tells another unit, such as pounds
_LEAST_FACTOR, _VERY_ALIKE = 2.0, 0.1
_FAR = 8.0  # deviations between means
_ROWS = 10  # values from which a silo's moments are compared
_CHANCE = 4.0  # squared standard errors that a mean is off by chance
_TARGETS, _SCHEMA, _CLASSES = "targets", "schema", "classes"
_TOLD = {"moments": "numbers", "categories": "categories"}
_ALL = "the input"  # all values of images and arrays
_LOOKED_AT = 200  # samples of images and arrays that are compared


def compare_units(silos: Mapping[str, Mapping[str, ColumnMoments]]) -> None:
    """Name silos whose columns are in another unit than the others', or do not vary as the others' do.

    Args:
        silos: for each silo, the moments of each column.

    Warns:
        DataWarning: a column of a silo is a factor of at least 5, or 8 standard deviations, away from the others', or
            has one value.
    """
    lines, constant, coded = list[str](), list[str](), list[str]()
    for column in next(iter(silos.values()), ()):
        each = {silo: told[column] for silo, told in silos.items() if told[column].count >= _ROWS}
        lines += _units(column, each)
        coded += _codes(column, each) if column != _ALL else []
        flat = {silo: f"{told.mean:.4g}" for silo, told in each.items() if not told.deviation}
        varied = {silo: told for silo, told in each.items() if silo not in flat}
        usual = ColumnMoments.together(list(varied.values()))
        flat = {silo: value for silo, value in flat.items() if not _rarely_else(each[silo], usual)}
        constant += _constant(column, flat, list(varied))
    _say(lines, "check units")
    _say(constant, "check how it was filled in there")
    _say(coded, "use the same codes at all silos")


def compare_categories(told: Sequence["ColumnSums"]) -> None:
    """Name silos in which a column has one category, while it has several at others; or none that others have.

    Warns:
        DataWarning: there is such a silo.
    """
    lines, strange = list[str](), list[str]()
    for column in told[0].categories:
        each = {one.silo: {c: n for c, n in one.categories[column].items() if c} for one in told}
        strange += filter(None, [nothing_in_common(each, f"category of column {column!r}")])
        least = {one.silo: max(_ROWS, one.least_rows) for one in told}  # categories of few rows are not reported
        flat = {
            silo: repr(next(iter(names)))
            for silo, names in each.items()
            if len(names) == 1 and sum(names.values()) >= least[silo]
        }
        lines += _constant(f"column {column!r}", flat, [silo for silo, names in each.items() if len(names) > 1])
    _say(lines, "check how it was filled in there")
    _say(strange, "check that categories mean the same everywhere")


def _say_empty(empty: Mapping[str, Sequence[str]], parts: int) -> None:
    """Name columns that have values at some silos, or in some parts, but not at all of them (`empty`)."""
    some = {name: at for name, at in empty.items() if 0 < len(at) < parts}
    lines = [f"column {name!r} has no values, or too few, at {listed(at)}" for name, at in some.items()]
    _say(lines, "check whether it was filled in there, or leave it out with --drop-columns")


def _constant(column: str, flat: Mapping[str, str], varied: Sequence[str]) -> list[str]:
    """Return a line if a column has one value at fewer silos (`flat`, with the value) than it varies at."""
    if not flat or len(flat) > len(varied):
        return []
    return [f"{column} has one value at {', '.join(f'{s} ({v})' for s, v in flat.items())} and varies at other silos"]


def _say(lines: Sequence[str], check: str) -> None:
    if lines:
        tell(f"{listed(lines, sign='; ')}: {check}")


def _rarely_else(flat: ColumnMoments, others: ColumnMoments) -> bool:
    """Return whether a silo may have one value because the column nearly always has it, such as a rare count.

    By the inequality of Cauchy and Schwarz, at least this share of the others' values is not the silo's. If they differ
    on one side only, few of that share would be expected at the silo, and a silo tells no few.
    """
    apart = others.count * (others.mean - flat.mean) ** 2
    share = apart / (apart + others.squares) if apart else 0.0
    one_sided = share * others.count >= _CHANCE
    return one_sided and share < 0.5 and share * flat.count < 2 * _ROWS


def _units(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line for each silo that is far from the others."""
    if len(silos) < 2:
        return []
    usual = [m for m in silos.values() if m.deviation] or list(silos.values())  # not halved by constants
    mean, spread = median(m.mean for m in usual), median(m.deviation for m in usual)
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


def _codes(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line if all values are 0 and 1 at some silos, and 1 and 2, or others next to each other, elsewhere.

    The variance of values between two whole numbers that are next to each other is smallest if they are these numbers.
    """
    coded: dict[int, list[str]] = {}
    for silo, told in silos.items():
        low = floor(told.mean)
        share = told.mean - low
        if 0 < share < 1 and abs(told.squares / told.count - share * (1 - share)) < 1e-9:
            coded.setdefault(low, []).append(silo)
    if len(coded) < 2:
        return []
    return [f"{column} is {', but '.join(f'{low} or {low + 1} at {listed(at)}' for low, at in sorted(coded.items()))}"]


def _apart(here: ColumnMoments, mean: float, spread: float) -> str:
    """Return in words how far a silo is from this mean and standard deviation; empty if it is not."""
    if here.deviation and spread:
        factor = here.deviation / spread
        ends = abs(here.mean) / here.deviation, abs(mean) / spread
        unlike = abs(log10(here.mean / mean / factor)) if here.mean * mean > 0 else inf
        narrow = min(ends) >= _NARROW and unlike < _VERY_ALIKE
        centred = max(ends) < 1
        if max(factor, 1 / factor) >= (_LEAST_FACTOR if narrow else _FACTOR) and (centred or unlike < _ALIKE):
            times = factor if centred else here.mean / mean
            return f"a factor of about {_round(max(times, 1 / times)):,g}"
    far, widest = abs(here.mean - mean), max(here.deviation, spread)
    return f"{far / widest:,.0f} standard deviations" if widest and far > _FAR * widest else ""


def _round(times: float) -> float:
    """Return a factor with two digits, or a power of ten if that is near."""
    power = 10.0 ** round(log10(times))
    return power if abs(log10(times / power)) < (0.1 if power > 10 else 0.02) else float(f"{times:.2g}")


@dataclass(frozen=True)
class ColumnSums:
    """What a silo reports about its training rows.

    Columns with fewer values than the least count, and categories with fewer rows, are left out. A column is told as if
    it had one value if fewer values differ from the commonest one.

    Attributes:
        moments: of each numeric column and target.
        missing: for each numeric column, the number of missing values.
        categories: for each categorical column, the number of rows of each category.
        dates: the numeric columns that are days since 1970.
        marks: cells that mark a missing value, in addition to the usual ones.
        silo: name of the silo; empty for several together.
        classes: the number of rows of each class, if labels are classes.
        rows: fingerprints of all rows, in hexadecimal and sorted, if the silo tells them.
        followed: how many rows had the event between some times, if labels are times and events.
    """

    moments: Mapping[str, ColumnMoments]
    missing: Mapping[str, int]
    categories: Mapping[str, Mapping[str, int]]
    dates: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    silo: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    followed: Followed | None = None

    @property
    def least_rows(self) -> int:
        """Return a number of rows that the silo has at least."""
        numbers = [moments.count + self.missing.get(name, 0) for name, moments in self.moments.items()]
        return max([*numbers, *(sum(each.values()) for each in (*self.categories.values(), self.classes))], default=0)

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
            classes=_counted([one.classes for one in told]),
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
            followed = made(Followed, found["followed"], what=where) if found.get("followed") else None
            counts = [*missing.values(), *classes.values(), *(n for each in categories.values() for n in each.values())]
            if min(counts, default=0) < 0:
                raise ValueError("counts")
            if not re.fullmatch(r"[\w.-]{0,200}", silo) or not all(re.fullmatch(r"[0-9a-f]{16}", row) for row in rows):
                raise ValueError("names")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise UserError(f"{where} holds no sums of a table: make them with `ekiden silo sums silo.toml`") from None
        return ColumnSums(moments, missing, categories, dates, marks, silo, classes, rows, followed)

    def scale(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a column; the latter is 0 for a column that does not vary."""
        found = self.moments[name]
        if not found.count:
            raise UserError(
                f"no silo has enough values in column {name!r} to send its sums: leave it out with "
                f"--drop-columns={name!r}, or lower --min-count"
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
        tell(
            "a model learns nothing from columns with one value at all silos, or fewer than --min-count others at "
            f"each: lower --min-count, or leave them out with --drop-columns={constant}"
        )
    vocabularies = tuple(tuple(sorted(total.categories[name], key=natural)) for name in table.categorical)
    for name, known in zip(table.categorical, vocabularies, strict=True):
        if not known:
            raise UserError(
                f"column {name!r} has no text that enough rows of a silo share: leave it out with "
                f"--drop-columns={name!r}, read it as text with --text-column={name!r}, or lower --min-count"
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


def told_by(client: ClientData, dataset: Dataset, times: Sequence[float] = ()) -> ColumnSums:
    """Return what a client reports about its training rows, which are not scaled yet.

    Args:
        client: whose rows.
        dataset: what they mean.
        times: between which events are counted.
    """
    if times and not isinstance(dataset.task, Survival):
        raise UserError("times at which survival is shown need --task=survival: leave them out")
    least, moments, missing, categories = dataset.least, {}, {}, {}

    def told(values: Numbers, what: str) -> ColumnMoments:
        if len(values) < least:
            return ColumnMoments()
        different, counts = np.unique(values, return_counts=True)
        few = least <= counts.max() and len(values) - counts.max() < least
        if few:  # mean and deviation would tell their values
            values = np.full_like(values, different[counts.argmax()])
        return ColumnMoments.of(values, what)

    labels, table = client.train.y, Table.of(dataset.inputs)
    rows = client.train.x.numpy() if table.numeric or table.categorical else np.empty((0, 0))
    for place, name in enumerate(table.numeric):
        present = rows[~np.isnan(rows[:, place]), place]
        gaps = len(rows) - len(present)
        moments[name] = told(present, f"column {name!r}")
        missing[name] = gaps if gaps >= least else 0
    for place, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True), len(table.numeric)):
        counts = np.bincount(rows[:, place].astype(np.int64), minlength=len(known) + 1)
        categories[name] = {known[code - 1]: int(n) for code, n in enumerate(counts) if code and n >= least}
    if isinstance(dataset.task, ScaledTask):
        y = dataset.task.measured(labels).numpy()
        moments |= {target(n): told(y[:, k], f"the label {n!r}") for k, n in enumerate(dataset.classes)}
    classes: dict[str, int] = {}
    if isinstance(dataset.task, Classification):
        held = torch.bincount(labels, minlength=len(dataset.classes)).tolist()
        classes = {name: n for name, n in zip(dataset.classes, held, strict=True) if n >= least}
    followed = Followed.of(labels.double().numpy(), times, least) if times else None
    return ColumnSums(moments, missing, categories, table.dates, table.missing, client.name, classes, followed=followed)


def agreed(fed: FederatedData, *, mixed: bool = False) -> FederatedData:
    """Return the federation with one scaling for all clients, from what each reports about its training rows.

    The columns of a table and the targets of a regression are scaled, and the times of survival.

    Args:
        fed: with tables that are not scaled yet.
        mixed: a partition dealt out the rows of one source, so no client's unit or codes can differ from the others'.
    """
    if not fed.dataset.least:
        return fed
    told = [told_by(client, fed.dataset) for client in fed.clients]
    if not mixed:
        check_units(told)
    after, task = fed.dataset.inputs, fed.dataset.task
    if isinstance(after, Table):
        after = agree(after, told)
        _say_folded(fed, after)
    if isinstance(task, ScaledTask):
        mean, std = zip(*map(target_scales(told).__getitem__, fed.dataset.classes), strict=True)
        task = replace(task, mean=mean, std=std)
    return scaled(fed, after, task)


def _say_folded(fed: FederatedData, after: Table) -> None:
    """Count and name the categories that too few training rows of each silo have, which count as one."""
    found, table = list[str](), Table.of(fed.dataset.inputs)
    for place, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True), len(table.numeric)):
        kept = after.vocabularies[after.categorical.index(name)]
        rare = {code: category for code, category in enumerate(known, 1) if category and category not in kept}
        rows: Counter[int] = Counter()
        at = dict[str, None]()
        for client in fed.clients if rare else ():
            for part in (client.train, client.val, client.test):
                held = [code for code in part.samples.x[part.rows, place].tolist() if code in rare]
                rows.update(held)
                at |= dict.fromkeys([client.name] * bool(held))
        if rare:
            names = listed(repr(rare[code]) for code, _ in rows.most_common())
            found.append(f"column {name!r}: {names} in {counted(rows.total(), 'row')} of {listed(at)}")
    if found:
        tell(
            f"{fed.dataset.name} has categories that fewer than {fed.dataset.least} training rows of each silo have "
            f"({'; '.join(found)}): all of them count as one unknown category; correct slips, or lower --min-count"
        )


def check_units(told: Sequence[ColumnSums]) -> None:
    """Name silos whose columns or targets are in another unit than the others', or do not vary."""
    if len(told) < 2:
        return
    compare_units({one.silo: {_shown(name): m for name, m in one.moments.items()} for one in told})
    compare_categories(told)
    empty = {
        name: [one.silo for one in told if not one.moments[name].count and one.missing[name]]
        for name in told[0].missing
    }
    empty |= {name: [one.silo for one in told if {*one.categories[name]} == {""}] for name in told[0].categories}
    _say_empty(empty, len(told))


def check_values(parts: Mapping[str, Tensor], inputs: Inputs) -> None:
    """Name parts of a data set (silos, or training and test) whose values are in another unit than those of the others.

    Args:
        parts: samples (n, ...) of each part. Of unscaled tables each column is compared, of bytes and of other floats
            all values of some samples together.
        inputs: what samples are.
    """
    if any(not x.is_floating_point() and x.dtype != torch.uint8 for x in parts.values()):
        return  # tokens
    table = Table.of(inputs)
    names = table.numeric
    moments: dict[str, dict[str, ColumnMoments]] = {}
    for name, part in parts.items():
        values = (part if names else some(part)).double().cpu().numpy()
        columns = {f"column {n!r}": values[~np.isnan(values[:, k]), k] for k, n in enumerate(names)}
        each = columns or {_ALL: values.ravel()}
        moments[name] = {what: ColumnMoments.of(one, what) for what, one in each.items()}
    compare_units(moments)
    lost = [[part for part, x in parts.items() if x[:, k].isnan().all()] for k in range(len(names))]
    for k, known in enumerate(table.vocabularies, len(names)):
        code = known.index("") + 1 if "" in known else -1
        lost.append([part for part, x in parts.items() if (x[:, k] == code).all()])
    _say_empty(dict(zip((*names, *table.categorical), lost, strict=True)), len(parts))


def some(part: Tensor) -> Tensor:
    """Return at most some hundred rows, from all over a part."""
    return part[:: max(1, len(part) // _LOOKED_AT)]


def _shown(name: str) -> str:
    """Return a column or target as messages name it."""
    plain = name.removeprefix(target(""))
    return f"column {name!r}" if plain == name else f"target {plain!r}"


def scaled(fed: FederatedData, after: Inputs, task: Task) -> FederatedData:
    """Return the same samples, encoded as agreed."""
    dataset, before = fed.dataset, fed.dataset.inputs
    train, test = dataset.train, dataset.test
    if isinstance(before, Table):
        train, test = (replace(s, x=encode_again(s.x, before, Table.of(after))) for s in (train, test))

    def moved(part: Subset) -> Subset:
        return Subset(train if part.samples is dataset.train else test, part.rows)

    clients = tuple(replace(c, train=moved(c.train), val=moved(c.val), test=moved(c.test)) for c in fed.clients)
    return FederatedData(replace(dataset, train=train, test=test, inputs=after, task=task, least=0), clients)


@dataclass(frozen=True)
class Scaling:
    """The scaling that silos agreed on.

    Attributes:
        table: the columns, their scaling and vocabularies; None if samples are not rows of a table.
        targets: mean and standard deviation of each number to predict, by name.
        schema: the study's schema, as `Schema.text` gives it; empty without one.
        classes: training samples of all silos in each class, by its name; empty for other tasks.
    """

    table: Inputs | None
    targets: Mapping[str, tuple[float, float]]
    schema: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.scales:
            return f"training samples of {len(self.classes)} classes"
        numeric, categorical = map(len, (Table.of(self.table).numeric, Table.of(self.table).categorical))
        return f"{numeric} columns of numbers, {categorical} of categories; {len(self.targets)} to predict"

    @property
    def scales(self) -> bool:
        """Whether there is more than numbers of samples by class."""
        return self.table is not None or bool(self.targets)

    def to_json(self) -> dict[str, Any]:
        """Return the scaling as plain values."""
        table = {} if self.table is None else to_json(self.table)
        more = {_SCHEMA: json.loads(self.schema)} if self.schema else {}
        more |= {_CLASSES: dict(self.classes)} if self.classes else {}
        return table | more | ({_TARGETS: {k: list(v) for k, v in self.targets.items()}} if self.targets else {})

    def scaled(self, dataset: Dataset) -> Dataset:
        """Return a silo's data set with the agreed scale of the numbers to predict."""
        if not isinstance(dataset.task, ScaledTask):
            return dataset
        if dataset.inputs.agreed and self.table is None:
            raise UserError("the agreed scaling lacks the columns of the table: make it of the sums of this task")
        for name in dataset.classes:
            if name not in self.targets:
                raise UserError(f"the agreed scaling lacks the target {name!r}: make it of the sums of this task")
        mean, std = zip(*(self.targets[name] for name in dataset.classes), strict=True)
        return replace(dataset, task=replace(dataset.task, mean=mean, std=std), least=0)


def read_agreed(path: Path) -> Scaling:
    """Return the scaling in a file that `ekiden federation agree` made."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        given = values.pop(_TARGETS, {}) if isinstance(values, dict) else {}
        schema = schemas.parsed(values.pop(_SCHEMA)).text() if isinstance(values, dict) and _SCHEMA in values else ""
        targets = {str(name): (float(mean), float(std)) for name, (mean, std) in given.items()}
        counts = values.pop(_CLASSES, {}) if isinstance(values, dict) else {}
        classes = {str(name): int(n) for name, n in counts.items()}
        if min(classes.values(), default=1) < 1:
            raise ValueError("a class has no sample")
        if not all(isfinite(mean) and 0 < std < inf for mean, std in targets.values()):
            raise ValueError("a mean or a standard deviation is not a number, or not positive")
        return Scaling(from_json(values) if values or not (targets or classes) else None, targets, schema, classes)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no agreed scaling ({error}): make it by `ekiden federation agree`") from None


def agree_on(
    files: Sequence[Path], spelling: str = "", expected: Sequence[str] = (), schema: Schema | None = None
) -> Scaling:
    """Return the scaling for all silos that wrote these sums.

    Args:
        files: what `ekiden silo sums` wrote at each silo.
        spelling: merge or keep names that are written in several ways; "" refuses them.
        expected: the silos of the federation, if they are known.
        schema: the study's schema, which becomes part of what is agreed on.

    Warns:
        DataWarning: a silo's column is in another unit than the others', or silos hold equal rows.
    """
    told = []
    for file in files:
        try:
            told.append(ColumnSums.from_json(file.read_text(encoding="utf-8"), str(file)))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
    for file, one in zip(files, told, strict=True):
        for what in ("moments", "categories"):
            here, there = set(getattr(told[0], what)), set(getattr(one, what))
            for has, lacks, names, others in (
                (files[0], file, here - there, there - here),
                (file, files[0], there - here, here - there),
            ):
                if names:
                    name = min(names)
                    near = nearest(name, others, n=1, cutoff=0.8)
                    rename = f"rename {near[0]!r} there, or " if near else ""
                    raise UserError(
                        f"{lacks} lacks the column {name!r} of {_TOLD[what]}, which {has} has: {rename}give all silos "
                        "the same columns, or leave it out at all by drop_columns in silo.toml"
                    )
        if odd := sorted({*told[0].dates} ^ {*one.dates}):
            raise UserError(
                f"only one of {files[0]} and {file} holds dates in the column {odd[0]!r}: write it alike at all silos"
            )
    told = [one if one.silo else replace(one, silo=file.stem) for file, one in zip(files, told, strict=True)]
    _check_silos([one.silo for one in told], expected)
    told = _spelled(told, spelling)
    if schema:
        _check_schema(told, schema)
    check_units(told)
    _check_rows(told)
    columns = [name for name in told[0].moments if name in told[0].missing]  # the others are targets
    table = Table(tuple(sorted(columns)), tuple(sorted(told[0].categories)), dates=tuple(sorted(told[0].dates)))
    table = agree(table, told)
    known = table if table.numeric or table.categorical else None
    if known is None and not any(one.moments or one.classes for one in told):
        raise UserError("no silo counts enough samples of any class: lower min_count in their silo.toml")
    classes = dict(sorted(_counted([one.classes for one in told]).items()))
    return Scaling(known, target_scales(told), schema.text() if schema else "", classes)


def _check_schema(told: Sequence[ColumnSums], schema: Schema) -> None:
    """Name silos whose sums show that their data do not meet the schema; each silo checks its own rows later."""
    wrong = [f"{one.silo}: {what}" for one in told for what in _unmet(one, schema)]
    if wrong:
        raise UserError(
            f"the sums do not meet the schema ({listed(wrong, sign='; ')}): correct the data or the schema, and "
            "make the sums again"
        )


def _unmet(one: ColumnSums, schema: Schema) -> Iterator[str]:
    """Yield what in a silo's sums the schema does not allow."""
    numbers, names = set(schema.of_kind("number", "date")), set(schema.of_kind("category"))
    for wanted, found in ((numbers, one.missing), (names, one.categories)):
        kind = "numbers" if wanted is numbers else "categories"
        for column in schema.features:
            if (column in wanted) != (column in found):
                yield f"column {column!r} {'does not hold' if column in wanted else 'holds'} {kind}"
        yield from (f"column {column!r} is not in the schema" for column in found if column not in schema.features)
    for name in schema.features:
        allowed = schema.columns[name]
        strange = [c for c in one.categories.get(name, ()) if allowed.categories and c not in allowed.categories]
        yield from (f"column {name!r} holds the category {c!r}" for c in strange)
        if (
            name in one.missing
            and one.moments[name].count
            and not allowed.within(np.array([one.moments[name].mean]))[0]
        ):
            yield f"the mean of column {name!r} is {one.moments[name].mean:.4g}, not in {allowed.allows()}"
        if allowed.required and one.missing.get(name):
            yield f"column {name!r} lacks values"
    if schema.classes:
        yield from (f"the label holds the class {c!r}" for c in one.classes if c not in schema.classes)


def _check_silos(names: Sequence[str], expected: Sequence[str]) -> None:
    """Refuse sums that are given twice, and name silos whose sums are missing."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two files are the sums of {twice}: give those of each silo once")
    if expected and (missing := [name for name in expected if name not in names]):
        raise UserError(f"the sums of {', '.join(missing)} are missing: give those of all silos of the federation")
    if expected and (strange := [name for name in names if name not in expected]):
        raise UserError(f"{', '.join(strange)} is not a silo of the federation: {', '.join(expected)}")


def _spelled(told: Sequence[ColumnSums], spelling: str) -> list[ColumnSums]:
    """Return the sums with one spelling of each name."""
    names: dict[str, dict[str, Mapping[str, int]]] = {"the label": {one.silo: one.classes for one in told}}
    for column in told[0].categories:
        names[f"column {column!r}"] = {one.silo: one.categories[column] for one in told}
    if not spelling:
        refuse_spellings(names)
    if spelling != "keep" and (line := numbered_from_two({one.silo: one.classes for one in told})):
        raise UserError(f"{line}: number them alike, or take them as they are by --spelling=keep")
    if spelling != "merge":
        return list(told)
    instead = {column: merging(each) for column, each in names.items()}
    return [
        replace(
            one,
            categories={c: _renamed(counts, instead[f"column {c!r}"]) for c, counts in one.categories.items()},
            classes=_renamed(one.classes, instead["the label"]),
        )
        for one in told
    ]


def _renamed(counts: Mapping[str, int], other: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, n in counts.items():
        found[other.get(name, name)] = found.get(other.get(name, name), 0) + n
    return found


def _check_rows(told: Sequence[ColumnSums]) -> None:
    """Say how many rows several silos hold, and which silos do not tell."""
    tells = {one.silo: one.rows for one in told if one.rows}
    if len(tells) > 1 and len(told[0].missing) + len(told[0].categories) >= doubts.FEATURES:
        for line in doubts.rows_of_several(tells):
            tell(line)
    if tells and (silent := [one.silo for one in told if not one.rows]):
        tell(f"rows of {', '.join(silent)} are not compared: it told no fingerprints of them")
