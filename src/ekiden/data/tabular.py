"""Sums and counts, never a row, that silos share so that all scale tables alike."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.inputs import Inputs, Table
from ekiden.data.raw import natural
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.data.tables import Numbers, encode_again
from ekiden.data.tasks import Regression, Task


@dataclass(frozen=True)
class ColumnSums:
    """What a silo reports about its training rows.

    Columns with fewer values than the least count, and categories with fewer rows, are left out.

    Attributes:
        values: for each numeric column and target: number of values, their sum, and the sum of their squares.
        missing: for each numeric column, the number of missing values.
        categories: for each categorical column, the number of rows of each category.
    """

    values: Mapping[str, tuple[int, float, float]]
    missing: Mapping[str, int]
    categories: Mapping[str, Mapping[str, int]]

    def plus(self, other: "ColumnSums") -> "ColumnSums":
        """Return the sums of both."""

        def each(a: tuple[int, float, float], b: tuple[int, float, float]) -> tuple[int, float, float]:
            return a[0] + b[0], a[1] + b[1], a[2] + b[2]

        return ColumnSums(
            {k: each(v, other.values[k]) for k, v in self.values.items()},
            {k: n + other.missing[k] for k, n in self.missing.items()},
            {k: _counted(counts, other.categories[k]) for k, counts in self.categories.items()},
        )

    def to_json(self) -> str:
        """Return the sums as text, the same text for the same sums."""
        return json.dumps(
            {"values": self.values, "missing": self.missing, "categories": self.categories}, indent=1, sort_keys=True
        )

    @staticmethod
    def from_json(text: str, where: str) -> "ColumnSums":
        """Return the sums in a text.

        Raises:
            UserError: the text holds no sums.
        """
        try:
            found = json.loads(text)
            values = {str(k): (int(n), float(s), float(q)) for k, (n, s, q) in found["values"].items()}
            missing = {str(k): int(n) for k, n in found["missing"].items()}
            categories = {str(k): {str(c): int(n) for c, n in v.items()} for k, v in found["categories"].items()}
            if set(missing) - set(values):
                raise ValueError("columns")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{where} holds no sums of a table: make them with `ekiden silo sums silo.toml`") from None
        return ColumnSums(values, missing, categories)

    def moments(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a column; the latter is 1 for a column that does not vary.

        Raises:
            UserError: no silo reported the column.
        """
        n, total, squares = self.values[name]
        if not n:
            raise UserError(
                f"no silo has enough values in column {name!r} to send its sums: leave it out with --drop-columns "
                f"{name}, or lower --min-count"
            )
        mean = total / n
        variance = squares / n - mean * mean
        # The rounding error that a constant leaves is not a scale.
        return mean, sqrt(variance) if variance > 1e-12 * max(mean * mean, 1e-12) else 1.0


def sums(x: Tensor, table: Table, least: int, targets: Mapping[str, Tensor]) -> ColumnSums:
    """Add up training rows.

    Args:
        x: (n, d) float64 rows that are not scaled yet.
        table: their columns.
        least: smallest number of rows that is reported.
        targets: (n,) numbers to predict, by name.
    """
    rows = x.numpy()
    values, missing = {}, {}
    for place, name in enumerate(table.numeric):
        column = rows[:, place]
        present = column[~np.isnan(column)]
        gaps = len(column) - len(present)
        values[name] = _told(present, least)
        missing[name] = gaps if gaps >= least else 0
    for name, y in targets.items():
        values[target(name)] = _told(y.double().numpy(), least)
    categories = {}
    for place, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True)):
        counts = np.bincount(rows[:, len(table.numeric) + place].astype(np.int64), minlength=len(known) + 1)
        categories[name] = {known[code - 1]: int(n) for code, n in enumerate(counts) if code and n >= least}
    return ColumnSums(values, missing, categories)


def target(name: str) -> str:
    """Return a target's name among the sums, which no column has."""
    return f"target: {name}"


def agree(table: Table, told: Sequence[ColumnSums]) -> Table:
    """Return the table with the scaling and the vocabularies that follow from the silos' sums.

    Raises:
        UserError: no silo reported a column.
    """
    total = told[0]
    for one in told[1:]:
        total = total.plus(one)
    moments = [total.moments(name) for name in table.numeric]
    vocabularies = tuple(tuple(sorted(total.categories[name], key=natural)) for name in table.categorical)
    for name, known in zip(table.categorical, vocabularies, strict=True):
        if not known:
            raise UserError(
                f"column {name!r} has no text that enough rows of a silo share: leave it out with --drop-columns "
                f"{name}, read it as text with --text-column {name}, or lower --min-count"
            )
    return Table(
        table.numeric,
        table.categorical,
        tuple(mean for mean, _ in moments),
        tuple(std for _, std in moments),
        tuple(name for name in table.numeric if total.missing[name]),
        vocabularies,
    )


def _told(values: Numbers, least: int) -> tuple[int, float, float]:
    if len(values) < least:
        return 0, 0.0, 0.0
    return len(values), float(values.sum()), float(np.square(values).sum())


def _counted(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}


def agreed(fed: FederatedData) -> FederatedData:
    """Return the federation with one scaling for all clients, from what each reports about its training rows.

    The columns of a table and the targets of a regression are scaled.

    Raises:
        UserError: no client reported a column.
    """
    if not fed.dataset.least:
        return fed
    told = [told_by(client, fed.dataset) for client in fed.clients]
    table = fed.dataset.inputs
    after = agree(table, told) if isinstance(table, Table) else table
    return scaled(fed, after, scaled_task(fed.dataset.task, fed.dataset.classes, told))


def told_by(client: ClientData, dataset: Dataset) -> ColumnSums:
    """Return what a client reports about its training rows."""
    targets: dict[str, Tensor] = {}
    if isinstance(dataset.task, Regression):
        y = client.train.y
        columns = y[:, None] if y.ndim == 1 else y
        targets = {name: columns[:, k] for k, name in enumerate(dataset.classes)}
    table = dataset.inputs if isinstance(dataset.inputs, Table) else Table((), ())
    rows = client.train.x if isinstance(dataset.inputs, Table) else torch.empty(len(client.train), 0)
    return sums(rows, table, dataset.least, targets)


def scaled_task(task: Task, names: Sequence[str], told: Sequence[ColumnSums]) -> Task:
    """Return the task; a regression gets the targets' scale."""
    if not isinstance(task, Regression):
        return task
    total = told[0]
    for one in told[1:]:
        total = total.plus(one)
    moments = [total.moments(target(name)) for name in names]
    return replace(task, mean=tuple(m for m, _ in moments), std=tuple(s for _, s in moments))


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
