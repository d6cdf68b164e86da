"""Table one of a study: what the rows of each silo are like, and of all together, from counts and sums."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ekiden.base.errors import UserError
from ekiden.data import kinds
from ekiden.data.moments import ColumnMoments, ColumnSums, told_by
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset

ALL = "all"
_OTHER = "(other)"


@dataclass(frozen=True)
class CohortCell:
    """What is known of a column, or of one of its categories, at a silo.

    Attributes:
        count: rows that have it.
        share: of the silo's rows.
        mean: of numbers; None for categories, and if too few rows have a number.
        deviation: standard deviation.
    """

    count: int
    share: float
    mean: float | None = None
    deviation: float | None = None

    def __str__(self) -> str:
        if self.mean is None or self.deviation is None:
            return f"{self.count:,} ({100 * self.share:.1f} %)" if self.count else "-"
        return f"{self.mean:.4g} ({self.deviation:.3g})"


@dataclass(frozen=True)
class CohortLine:
    """A line of the table.

    Attributes:
        column: name of the column; "label" for classes.
        category: one of its categories; "missing"; empty for numbers.
        silos: what is known, for all together and for each silo.
    """

    column: str
    category: str
    silos: Mapping[str, CohortCell]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "column": self.column,
            "category": self.category,
            "silos": {k: asdict(v) for k, v in self.silos.items()},
        }


def table_one(told: Sequence[ColumnSums]) -> list[CohortLine]:
    """Return the lines of the table, from what each silo told about its rows."""
    if len({tuple(one.moments) + tuple(one.categories) for one in told}) > 1:
        raise UserError("the silos told sums of different columns: make them with the same columns everywhere")
    whole = replace(ColumnSums.together(told), classes=_classes(told))
    silos = {ALL: whole} | {one.silo or f"silo {k}": one for k, one in enumerate(told, 1)}
    rows = {name: _rows(one) for name, one in silos.items() if name != ALL}
    rows = {ALL: sum(rows.values())} | rows
    lines = [CohortLine("rows", "", {name: CohortCell(n, 1.0) for name, n in rows.items()})]

    def add(column: str, category: str, counts: Mapping[str, int]) -> None:
        lines.append(
            CohortLine(column, category, {name: CohortCell(n, n / max(rows[name], 1)) for name, n in counts.items()})
        )

    for column in whole.moments:
        lines.append(
            CohortLine(column, "", {name: _number(one.moments[column], rows[name]) for name, one in silos.items()})
        )
        if whole.missing.get(column):
            add(column, "missing", {name: one.missing[column] for name, one in silos.items()})
    for column, known in whole.categories.items():
        for category in sorted(known):
            add(
                column,
                category or "missing",
                {name: one.categories[column].get(category, 0) for name, one in silos.items()},
            )
    for category in whole.classes:
        add("label", category, {name: one.classes.get(category, 0) for name, one in silos.items()})
    return lines


def drawn(lines: Sequence[CohortLine]) -> Table:
    """Return the table for the terminal: mean (standard deviation) of numbers, rows (share) of categories."""
    table = Table(title="mean (standard deviation), or rows (share)", title_justify="left")
    table.add_column("column")
    for name in lines[0].silos:
        table.add_column(name, justify="right")
    for line in lines:
        if line.column == "rows":
            table.add_row("rows", *(f"{cell.count:,}" for cell in line.silos.values()))
            continue
        table.add_row(" = ".join(filter(None, (line.column, line.category))), *map(str, line.silos.values()))
    return table


def told(fed: FederatedData) -> list[ColumnSums]:
    """Return what silos on this machine tell about all their rows: those for training, validation and test."""
    if not isinstance(fed.dataset.inputs, kinds.Table):
        raise UserError(f"table one is for tables, these samples are {fed.dataset.inputs.words}: leave it out")
    return [_of_client(client, fed.dataset) for client in fed.clients]


def _of_client(client: ClientData, dataset: Dataset) -> ColumnSums:
    """Return the sums over rows that are scaled already, in the columns' own units."""
    table = dataset.inputs
    assert isinstance(table, kinds.Table)
    parts = [part for part in (client.train, client.val, client.test) if len(part)]
    x = torch.cat([part.x for part in parts]).double()
    values = x[:, : len(table.numeric)].numpy() * np.array(table.scale) + np.array(table.centre)
    for place, name in enumerate(table.gaps, len(table.numeric)):
        values[x[:, place].numpy() > 0.5, table.numeric.index(name)] = np.nan
    rows = np.concatenate([values, x[:, table.numbers :].numpy()], axis=1)
    plain = replace(table, centre=(), scale=(), gaps=())
    samples = replace(parts[0].samples, x=torch.from_numpy(rows), y=torch.cat([part.y for part in parts]))
    everything = Subset(samples, torch.arange(len(rows)))
    found = told_by(replace(client, train=everything), replace(dataset, inputs=plain, least=1))
    rare = (x[:, table.numbers :] == 0).sum(0).tolist()  # categories that the silos did not agree on
    others = {name: {_OTHER: int(n)} if n else {} for name, n in zip(table.categorical, rare, strict=True)}
    return replace(found, categories={name: {**known, **others[name]} for name, known in found.categories.items()})


def _rows(one: ColumnSums) -> int:
    """Return the number of rows; between machines of those that columns with few values do not hide."""
    each = [m.count + one.missing.get(name, 0) for name, m in one.moments.items()]
    return max(
        [*each, sum(one.classes.values()), *(sum(known.values()) for known in one.categories.values())], default=0
    )


def _number(found: ColumnMoments, rows: int) -> CohortCell:
    share = found.count / max(rows, 1)
    return CohortCell(found.count, share, found.mean, found.deviation) if found.count else CohortCell(0, 0.0)


def _classes(told: Sequence[ColumnSums]) -> dict[str, int]:
    names = dict.fromkeys(name for one in told for name in one.classes)
    return {name: sum(one.classes.get(name, 0) for one in told) for name in names}
