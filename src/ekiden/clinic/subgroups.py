"""Tables of subgroups: who is in which, what a silo reports, and how one differs from the
others.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, nan, sqrt
from typing import Any, Self

import torch
from torch import Tensor

from ekiden.clinic.counting import Counting
from ekiden.clinic.figures import Figures, figures
from ekiden.clinic.ranked import Interval, Wanted
from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.data.samples import Dataset
from ekiden.core.tasks import Classification, Regression, Survival, Task
from ekiden.readers.kinds import Inputs, Table

DOMAIN = "domain"  # the column whose subgroups are the domains of a data set
CLIENT = "client"  # the column whose subgroups are the silos; every table has it
MISSING = "missing"
OTHER = "other"
# subgroups of a column
_MOST = 100
_TENTHS = 10


@dataclass(frozen=True)
class Division:
    """A column that divides samples into subgroups."""

    column: str  # name of a column that the model gets, or "domain"
    # of a column of numbers, ascending: a subgroup begins at each of them
    bounds: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what a text such as "sex" or "age:40:65" says."""
        column, *places = text.split(":")
        try:
            bounds = tuple(map(float, places))
        except ValueError:
            bounds = (nan,)
        # NaN is below nothing
        ascending = all(a < b for a, b in pairwise((-inf, *bounds, inf)))
        if not column or not ascending:
            raise UserError(
                f"--by {text}: write a column, or a column and ascending numbers that divide it: "
                "age:40:65"
            )
        return cls(column, bounds)

    @property
    def silos(self) -> bool:
        """Whether the subgroups are the silos themselves."""
        return self.column == CLIENT and not self.bounds

    def text(self) -> str:
        """Return what `parse` reads."""
        return ":".join([self.column, *(f"{bound:.17g}" for bound in self.bounds)])

    def names(self, inputs: Inputs, domains: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the names of the subgroups.

        Raises:
            UserError: samples do not have such a column, or numbers have no bounds, or categories
                have some.
        """
        table = Table.of(inputs)
        column = self.column
        if column in table.numeric:
            if not self.bounds:
                raise UserError(
                    f"column {column!r} has numbers: say where to divide it, --by {column}:40:65"
                )
            return self._intervals(gaps=column in table.gaps)
        # a column comes before the domains, as in `places`
        if column in table.categorical:
            categories = table.vocabularies[table.categorical.index(column)]
            missing = _new_name(MISSING, categories)
            found = [_new_name(OTHER, categories), *(name or missing for name in categories)]
        elif column == DOMAIN and domains:
            found = list(domains)
        else:
            known = [*table.numeric, *table.categorical]
            if domains:
                known.append(DOMAIN)
            if not known:
                raise UserError(
                    "the samples have neither columns nor domains to divide them by: leave out --by"
                )
            raise unknown("column", column, known)
        if self.bounds:
            raise UserError(
                f"column {column!r} has categories, which no number divides: --by {column}"
            )
        if len(found) > _MOST:
            raise UserError(
                f"column {column!r} has {len(found)} subgroups, {_MOST} at most: choose another"
            )
        return tuple(found)

    def _intervals(self, *, gaps: bool) -> tuple[str, ...]:
        """Return the names of the intervals of a column of numbers, which may have gaps."""
        # in full: rounded ones may be equal
        ends = [repr(bound).removesuffix(".0") for bound in self.bounds]
        names = [f"below {ends[0]}"]
        for low, high in pairwise(ends):
            names.append(f"{low} to below {high}")
        names.append(f"{ends[-1]} or more")
        if gaps:
            names.append(MISSING)
        return tuple(names)

    def places(self, x: Tensor, inputs: Inputs, domain: Tensor | None = None) -> Tensor:
        """Return the subgroup (n,) int64 of each sample: its place in `names`."""
        table = Table.of(inputs)
        if self.column in table.categorical:
            return x[:, table.numbers + table.categorical.index(self.column)].long()
        if self.column not in table.numeric:
            assert domain is not None
            return domain
        at = table.numeric.index(self.column)
        centre = table.centre[at]
        scale = table.scale[at]
        inner = (torch.tensor(self.bounds, dtype=torch.float64) - centre) / scale
        values = x[:, at].float().contiguous().cpu()
        found = torch.bucketize(values, inner.float(), right=True)
        if self.column in table.gaps:
            gap = x[:, len(table.numeric) + table.gaps.index(self.column)].cpu() > 0.5
            found = torch.where(gap, len(self.bounds) + 1, found)
        return found


def _new_name(name: str, known: Sequence[str]) -> str:
    """Return a name that no category has: in parentheses if one is called so."""
    while name in known:
        name = f"({name})"
    return name


def check_divisions(by: Sequence[Division], dataset: Dataset) -> None:
    """Refuse columns by which the samples of a data set cannot be divided, before models are
    measured.
    """
    check_task(dataset.task)
    table = Table.of(dataset.inputs)
    for one in by:
        if not one.silos:
            one.names(dataset.inputs, dataset.domains)
        elif CLIENT in (*table.numeric, *table.categorical):
            raise UserError(
                f"--by {CLIENT} means the silos, and a column has this name, too: rename the column"
            )


def divisions(by: Sequence[str], silos: str = "") -> tuple[Division, ...]:
    """Return the columns in a list of texts; commas may separate several.

    Args:
        by: the texts.
        silos: name of the column that says which silo holds a row; it is `CLIENT` here.

    Raises:
        UserError: one is not a column, or is there twice.
    """
    found = dict[str, Division]()
    for text in filter(None, ",".join(by).split(",")):
        one = Division.parse(text)
        if one.column == silos:
            one = replace(one, column=CLIENT)
        if one.column in found:
            raise UserError(
                f"--by names column {one.column!r} twice: two divisions subtracted would show a "
                "few samples"
            )
        found[one.column] = one
    if by and not found:
        raise UserError("--by names no column: give one, such as --by sex, or leave it out")
    return tuple(found.values())


def check_task(task: Task) -> None:
    """Refuse tasks whose subgroups are not counted."""
    if not isinstance(task, Classification | Regression | Survival):
        raise UserError(
            f"subgroups are for classes, numbers, and times, not for {task.kind}: leave out --by"
        )


@dataclass(frozen=True)
class Subgroup:
    """What follows from the counts of one subgroup."""

    samples: int  # about which something is reported
    positives: int | None  # of two classes, samples of the second one
    # figures, by name; sensitivity and specificity at the table's threshold; `shift` of the scores
    values: dict[str, float]
    intervals: dict[str, Interval]  # 95 % intervals of some of them
    # the figure minus that of all other subgroups of the column together, and the ends of the 95 %
    # interval of this difference, if they are known
    gaps: dict[str, tuple[float, ...]]
    # slope and intercept of the label on the logit of the score; 1 and 0 if probabilities are right
    recalibration: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        # of rows without an event, nothing is defined
        return _filled(plain(self)) | {"values": dict(self.values)}


def table(
    counting: Counting,
    counts: Mapping[str, Mapping[str, Tensor]],
    whole: Figures,
    threshold: float | None = None,
    *,
    intervals: bool = True,
) -> dict[str, Any]:
    """Return the table that follows from counts, as plain values.

    Args:
        counting: says what was counted.
        counts: the sums over silos, by column and subgroup.
        whole: the figures of all samples together.
        threshold: the chosen one; by default Youden's of all samples.
        intervals: whether there are any; they do not include noise.

    Returns:
        groups: each `Subgroup`, by column and name.
        threshold: of two classes: samples with this probability of the second one, or more, are
            called positive.
        untold: samples of which nothing was told, by column: in subgroups that are small, or would
            show small ones.
        shares: the figures of the columns, in order, and whether they are shown in percent.
    """
    if threshold is None:
        threshold = next((one.threshold for one in whole.thresholds if one.rule == "Youden"), None)
    wanted = Wanted(threshold)
    shares = {metric.name: metric.share for metric in counting.task.metrics if metric.divides}
    shares |= {"sensitivity": True, "specificity": True}
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    untold = dict[str, int]()
    named = set[str]()
    for column, groups in counts.items():
        known = {name: n for name, n in groups.items() if int(counting.split(n)["samples"])}
        total = sum(known.values(), torch.zeros(counting.size, dtype=torch.int64))
        left = whole.samples
        for name, numbers in known.items():
            rest = total - numbers
            others = None
            if len(known) > 1:
                others = figures(counting.task, counting.told(rest), wanted)
            own = figures(counting.task, counting.told(numbers), wanted)
            row = _subgroup(own, others, shares, intervals=intervals)
            here = counting.split(numbers)
            there = counting.split(rest)
            moved = shift(here.get("scores"), there.get("scores"))
            if moved is not None:
                row.values["shift"] = moved
            rows[column][name] = row.to_json()
            named.update(row.values)
            left -= row.samples
        if left > 0:
            untold[column] = left
    shares["shift"] = False
    shown = {name: share for name, share in shares.items() if name in named}
    more = {"threshold": threshold, "untold": untold, "shares": shown}
    return {"groups": dict(rows), **_filled(more)}


def shift(own: Tensor | None, others: Tensor | None) -> float | None:
    """Return the population stability index Σ (p - q) ln(p / q) of the scores of two classes, by
    tenths of all samples.

    p and q are the shares of own samples and of the others in the ten parts, from counts (1, 2,
    bins) by bins of scores; half a sample is added to each. Above 0.25 scores are usually said to
    differ much. Without counts it is None. It is Harold Jeffreys' divergence (Proceedings of the
    Royal Society A 186, 1946).
    """
    # scores of two classes are those of the second
    if own is None or others is None or len(own) != 1:
        return None
    # (2, bins)
    both = torch.cat([own, others]).sum(1).double()
    if not both.any(1).all():
        return None
    total = both.sum(0)
    tenth = ((total.cumsum(0) - total / 2) / total.sum() * _TENTHS).long().clamp(max=_TENTHS - 1)
    counts = torch.zeros(2, _TENTHS, dtype=torch.float64).index_add(1, tenth, both) + 0.5
    p, q = counts / counts.sum(1, keepdim=True)
    return float(((p - q) * (p / q).log()).sum())


def _subgroup(
    own: Figures, others: Figures | None, shares: Mapping[str, bool], *, intervals: bool
) -> Subgroup:
    values, ends = _shown(own, shares, intervals=intervals)
    gaps = {}
    if others is not None:
        theirs, their_ends = _shown(others, shares, intervals=intervals)
        for name, value in values.items():
            if name in theirs:
                gaps[name] = _gap(value, theirs[name], ends.get(name), their_ends.get(name))
    positives = None
    if len(own.confusion) == 2:
        positives = sum(own.confusion[1])
    line = own.recalibration.get("platt", ())
    return Subgroup(own.samples, positives, values, ends, gaps, line)


def _shown(
    found: Figures, shares: Mapping[str, bool], *, intervals: bool
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the figures of a table of subgroups, and their intervals, if there are any."""
    values = dict(found.values)
    ends = dict(found.intervals)
    for one in found.thresholds:
        if one.rule == "chosen":
            values |= {"sensitivity": one.sensitivity, "specificity": one.specificity}
            ends |= one.intervals
    shown = {}
    around = {}
    for name in shares:
        if name in values:
            shown[name] = values[name]
            if intervals and name in ends:
                around[name] = ends[name]
    return shown, around


def _gap(
    own: float, others: float, here: Interval | None, there: Interval | None
) -> tuple[float, ...]:
    """Return the difference of two figures of different samples, and the ends of the interval that
    follows from theirs.

    Robert Newcombe: Interval estimation for the difference between independent proportions.
    Statistics in Medicine 17, 1998 (method 10); for other figures: Guang Yong Zou, Allan Donner:
    Construction of confidence limits about effect measures. Statistics in Medicine 27, 2008.
    """
    value = own - others
    if here is None or there is None:
        return (value,)
    low = value - sqrt((own - here[0]) ** 2 + (there[1] - others) ** 2)
    return value, low, value + sqrt((here[1] - own) ** 2 + (others - there[0]) ** 2)


def _filled(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries without those that are empty."""
    return {name: value for name, value in entries.items() if value not in (None, {}, [])}


def cell(row: Mapping[str, Any], name: str, *, share: bool) -> str:
    """Return a figure of a subgroup of a table, with its interval, and its gap in a
    second line.
    """
    if name not in row["values"]:
        return "–"
    scale = 1
    digits = 3
    if share:
        scale = 100
        digits = 1

    def number(value: float, sign: str = "") -> str:
        return f"{scale * value:{sign}.{digits}f}"

    text = number(row["values"][name])
    if ends := row.get("intervals", {}).get(name):
        text += f" ({number(ends[0])} to {number(ends[1])})"
    if gap := row.get("gaps", {}).get(name):
        text += f"\ngap {number(gap[0], '+')}"
        if len(gap) == 3:
            text += f" ({number(gap[1], '+')} to {number(gap[2], '+')})"
    return text
