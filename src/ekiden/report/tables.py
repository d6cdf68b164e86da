"""Result tables as papers print them, and what the accuracy cost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import mean, stdev

from ekiden.experiments.summary import duration, size
from ekiden.report.runs import Cell, Found, Group
from ekiden.report.style import Value


@dataclass(frozen=True)
class Entry:
    """One cell of a result table, in per cent.

    Attributes:
        mean: over the seeds.
        std: sample standard deviation; None of one seed.
        seeds: how many.
        cell: what was printed for it.
        rank: 1 the best of its column, 2 the second, else 0.
    """

    mean: float
    std: float | None
    seeds: int
    cell: Cell | None = None
    rank: int = 0

    @property
    def published(self) -> float | None:
        """The printed value."""
        return self.cell.published if self.cell else None

    @property
    def difference(self) -> float | None:
        """Ours minus theirs in standard errors, √((s² + s_p²) / n); None where that is 0 or not known.

        Papers rarely say how many seeds they took: as many as here are assumed.
        """
        if self.published is None or self.std is None:
            return None
        theirs = (self.cell.published_std if self.cell else None) or 0.0
        error = sqrt((self.std**2 + theirs**2) / self.seeds)
        return (self.mean - self.published) / error if error else None


@dataclass(frozen=True)
class ResultTable:
    """Rows of methods, columns of data.

    Attributes:
        name: of its file.
        title: its heading.
        columns: their names.
        rows: name and one entry a column, None where nothing was run.
        sources: where the printed values are from.
        scaled: what was made smaller than in print.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Entry | None]]]
    sources: Sequence[str] = ()
    scaled: Sequence[str] = ()

    @property
    def compares(self) -> bool:
        """Whether there is a printed value in it."""
        return any(e and e.published is not None for _, entries in self.rows for e in entries)

    def csv(self) -> tuple[list[str], list[list[Value]]]:
        """One line an entry."""
        header = ["row", "column", "mean", "std", "seeds", "rank", "published", "published_std", "difference_se"]
        lines: list[list[Value]] = []
        for name, entries in self.rows:
            for column, e in zip(self.columns, entries, strict=True):
                if e:
                    std = e.cell.published_std if e.cell else None
                    numbers = [e.mean, e.std, e.seeds, e.rank or None, e.published, std, e.difference]
                    lines.append([name, column, *numbers])
        return header, lines


@dataclass(frozen=True)
class PlainTable:
    """Any other table; the first column is the name of the row.

    Attributes:
        name: of its file.
        title: its heading.
        note: what its columns are.
        header: their names.
        rows: what is shown.
        data: the numbers behind it, one row each, as `numbers` names them.
        numbers: names of the numbers.
    """

    name: str
    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    data: Sequence[Sequence[Value]] = ()
    texts: frozenset[int] = frozenset()
    """columns of text, which are set to the left and may break"""


def results(found: Found) -> list[ResultTable]:
    """A table for each experiment, and one for all runs that belong to none."""
    experiments: dict[str, list[Group]] = defaultdict(list)
    for group in found.groups:
        experiments[group.cell.experiment if group.cell else ""].append(group)
    return [_table(i, title, groups) for i, (title, groups) in enumerate(experiments.items(), 1)]


def costs(setting: str, number: int, groups: Sequence[Group]) -> PlainTable:
    """What the methods reach and what it took, in one setting."""
    header = ["method", "seeds", "accuracy %", "own test data %", "worst client %", "moved", "forward", "backward"]
    rows, data = [], []
    for group in groups:
        shares = [group.values(key, 100) for key in ("accuracy", "client_mean", "client_worst")]
        work = [mean(group.values(key)) for key in ("bytes", "forward", "backward")]
        seconds = mean(run.seconds for run in group.runs)
        shown = [spread(values) for values in shares]
        rows.append(
            [
                group.name,
                str(len(group.runs)),
                *shown,
                size(work[0]),
                *(f"{w:,.0f}" for w in work[1:]),
                duration(seconds),
            ]
        )
        means = [mean(values) if values else None for values in shares]
        data.append([group.name, len(group.runs), *means, *work, seconds])
    numbers = ["method", "seeds", "accuracy", "client_mean", "client_worst", "bytes", "forward", "backward", "seconds"]
    return PlainTable(f"cost-{number}", setting, "", [*header, "time"], rows, numbers, data)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    return f"{mean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{mean(values):.2f}"


def _table(number: int, title: str, groups: Sequence[Group]) -> ResultTable:
    """Rows and columns in the order in which they first appear."""
    place = {g: (g.name, g.cell.column if g.cell else g.setting) for g in groups}
    names, columns = (list(dict.fromkeys(p[i] for p in place.values())) for i in (0, 1))
    entries: dict[tuple[str, str], Entry] = {}
    for column in columns:
        inside = [g for g in groups if place[g][1] == column]
        order = sorted({mean(g.values("accuracy")) for g in inside if not g.yardstick}, reverse=True)[:2]
        for group in inside:
            values = group.values("accuracy", 100)
            best = mean(group.values("accuracy"))
            rank = order.index(best) + 1 if best in order and not group.yardstick and len(inside) > 1 else 0
            entry = Entry(mean(values), stdev(values) if len(values) > 1 else None, len(values), group.cell)
            entries[place[group]] = replace(entry, rank=rank)
    rows = [(name, [entries.get((name, column)) for column in columns]) for name in names]
    cells = [g.cell for g in groups if g.cell]
    sources = list(dict.fromkeys(c.source for c in cells if c.source))
    scaled = list(dict.fromkeys(c.scaled for c in cells if c.scaled))
    return ResultTable(f"results-{number}", title or "All runs", columns, rows, sources, scaled)
