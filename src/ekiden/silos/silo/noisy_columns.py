"""Sums of a silo's columns under differential privacy: bounds from the study's schema, and noise in
whole numbers.

A row adds (1, u, u²) to the sums of each column of numbers, where u in [-1, 1] is its value between
the schema's bounds, or 1 to the count of missing values; and 1 to the count of one category of each
other column. So it moves all sums together by a vector no longer than √(3·numbers + others), and
one discrete Gaussian (`ekiden.core.training.private`) hides that.
"""

import json
import math
import secrets
from dataclasses import dataclass

import numpy as np

from ekiden.core.base.errors import UserError, listed
from ekiden.core.data.samples import ClientData, Dataset
from ekiden.core.tasks import Classification, ScaledTask
from ekiden.core.training.private import DP, ROUNDED, Draw, Noise, planned_sums
from ekiden.readers import schema as schemas
from ekiden.readers.kinds import Table
from ekiden.readers.kinds.tables import Numbers
from ekiden.readers.moments import ColumnMoments, ColumnSums, target
from ekiden.readers.schema import Schema
from ekiden.silos.silo import budget
from ekiden.silos.silo.silo_file import SiloFile

# u and u² are rounded to multiples of 1/1024
_GRID = 1024
# standard deviations of the noise from which a count is not taken for noise alone
_SURE = 4
_LABEL = target("")


def sums(file: SiloFile, dp: DP) -> ColumnSums:
    """Return what the silo reports about its training rows, with noise, once it is written down
    that ε is spent.

    Raises:
        UserError: there is no schema that bounds every column, or the silo's limits do not admit ε.
    """
    if dp.honest > 1 or dp.clip != DP(dp.epsilon).clip:
        raise UserError(
            "--dp of sums of columns has epsilon and delta alone: the schema bounds the rows"
        )
    if file.data.fingerprints:
        raise UserError(
            f"{file.path}: fingerprints show rows, noise or not: leave out data.fingerprints"
        )
    dataset, client = file.unscaled()
    if not file.schema:
        raise UserError(
            f"{file.path}: noise needs the bounds of all columns: name the study's schema by "
            "data.schema"
        )
    columns = columns_of(dataset, client, schemas.parsed(json.loads(file.schema)))
    spent = planned_sums(dp, len(client.train), file.name)
    norm = math.sqrt(sum(column.squares for column in columns)) * _GRID
    deviation = math.ceil(math.sqrt(spent.noise**2 * norm**2 + ROUNDED))
    parts = [column.sums() for column in columns]
    budget.spend(file, dp, spent)
    drawn = Draw(Noise(secrets.token_bytes(32))).gaussian(deviation, sum(map(len, parts))).numpy()
    ends = np.cumsum([len(part) for part in parts])[:-1]
    noisy = np.split((np.concatenate(parts) + drawn) / _GRID, ends)
    least = max(dataset.least, math.ceil(_SURE * deviation / _GRID))
    moments, missing = dict[str, ColumnMoments](), dict[str, int]()
    categories = dict[str, dict[str, int]]()
    for column, told in zip(columns, noisy, strict=True):
        if isinstance(column, NameColumn):
            categories[column.name] = column.counts(told, least)
            continue
        moments[column.name] = column.moments(told[1:], least, deviation / _GRID)
        if not column.name.startswith(_LABEL):
            missing[column.name] = _rows(told[0], least)
    table, classes = Table.of(dataset.inputs), categories.pop(_LABEL, {})
    return ColumnSums(moments, missing, categories, table.dates, table.missing, file.name, classes)


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers (n,), NaN where one is missing, between two bounds."""

    name: str
    values: Numbers
    low: float
    high: float
    # by which a row moves the sums at most
    squares = 3

    def sums(self) -> Numbers:
        """Return the number of missing values, of others, Σu and Σu², in units of 1/1024."""
        present = self.values[~np.isnan(self.values)]
        middle, half = self._scale()
        u = np.clip((present - middle) / half, -1, 1)
        counts = [len(self.values) - len(present), len(present)]
        totals = [np.round(_GRID * u).sum(), np.round(_GRID * u * u).sum()]
        return np.array([*(_GRID * count for count in counts), *totals])

    def moments(self, told: Numbers, least: int, deviation: float) -> ColumnMoments:
        """Return moments that values between the bounds can have, from their noisy number, Σu and
        Σu².

        A spread that noise hides is as large as the noise. Of fewer than `least` values nothing is
        told.
        """
        count = _rows(told[0], least)
        if not count:
            return ColumnMoments()
        middle, half = self._scale()
        mean = float(np.clip(told[1] / count, -1, 1))
        spread = float(np.clip(told[2] / count - mean**2, min(1.0, deviation / count), 1))
        return ColumnMoments(count, middle + half * mean, count * half**2 * spread)

    def _scale(self) -> tuple[float, float]:
        return (self.low + self.high) / 2, (self.high - self.low) / 2 or 1.0


@dataclass(frozen=True)
class NameColumn:
    """The categories of rows, and those that the schema allows."""

    name: str
    values: tuple[str, ...]
    allowed: tuple[str, ...]
    # by which a row moves the sums at most
    squares = 1

    def sums(self) -> Numbers:
        """Return the rows of each allowed category, in units of 1/1024."""
        return np.array([_GRID * float(self.values.count(category)) for category in self.allowed])

    def counts(self, told: Numbers, least: int) -> dict[str, int]:
        """Return the rows of categories with enough of them."""
        each = zip(self.allowed, told, strict=True)
        found = {category: _rows(noisy, least) for category, noisy in each}
        return {category: count for category, count in found.items() if count}


def columns_of(
    dataset: Dataset, client: ClientData, schema: Schema
) -> list[NumberColumn | NameColumn]:
    """Return the columns and labels of a silo's training rows as `ColumnSums` names them; `_LABEL`
    are classes.
    """
    table, x, y = Table.of(dataset.inputs), client.train.x.double().numpy(), client.train.y
    numbers = {name: x[:, k] for k, name in enumerate(table.numeric)}
    if isinstance(dataset.task, ScaledTask):
        measured = dataset.task.measured(y).double().numpy()
        numbers |= {target(name): measured[:, k] for k, name in enumerate(dataset.classes)}
    found, lacking = list[NumberColumn | NameColumn](), list[str]()
    for name, values in numbers.items():
        bounds = schema.columns[name.removeprefix(_LABEL)]
        if bounds.least is None or bounds.most is None:
            lacking.append(name.removeprefix(_LABEL))
            continue
        # a day ends on the next one
        end = bounds.number(bounds.most) + (bounds.kind == "date")
        found.append(NumberColumn(name, values, bounds.number(bounds.least), end))
    names = list[tuple[str, tuple[str, ...], tuple[str, ...]]]()
    vocabularies = zip(table.categorical, table.vocabularies, strict=True)
    for k, (name, known) in enumerate(vocabularies, len(table.numeric)):
        rows = tuple(("", *known)[int(code)] for code in x[:, k])
        names.append((name, rows, schema.columns[name].categories))
    if isinstance(dataset.task, Classification):
        rows = tuple(dataset.classes[k] for k in y.tolist())
        names.append((_LABEL, rows, schema.classes or ()))
    for name, rows, allowed in names:
        if not allowed:
            lacking.append(name.removeprefix(_LABEL) or "label")
        missing = () if name == _LABEL else ("",)
        found.append(NameColumn(name, rows, (*missing, *allowed)))
    if lacking:
        raise UserError(
            "noise hides a row only between known bounds: give least and most, or categories, of "
            f"{listed(lacking)} in the schema"
        )
    return found


def _rows(noisy: float, least: int) -> int:
    """Return a noisy count; 0 if it is smaller than the least that is told."""
    found = round(noisy)
    return found if found >= least else 0
