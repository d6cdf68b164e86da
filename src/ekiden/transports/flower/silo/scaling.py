"""The agreed scaling of a table's columns and of the numbers to predict, kept in a file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ekiden.base.errors import UserError, tell
from ekiden.data import doubts
from ekiden.data import schema as schemas
from ekiden.data.kinds import Inputs, Table, from_json, to_json
from ekiden.data.moments import ColumnSums, agree, check_units, target_scales
from ekiden.data.samples import Dataset
from ekiden.data.schema import Schema
from ekiden.data.spelling import merging, numbered_from_two, refuse_spellings
from ekiden.data.tasks import Regression

_SHOWN = 5
_TARGETS, _SCHEMA = "targets", "schema"


@dataclass(frozen=True)
class Scaling:
    """The scaling that silos agreed on.

    Attributes:
        table: the columns, their scaling and vocabularies; None if samples are not rows of a table.
        targets: mean and standard deviation of each number to predict, by name.
        schema: the study's schema, as `Schema.text` gives it; empty without one.
    """

    table: Inputs | None
    targets: Mapping[str, tuple[float, float]]
    schema: str = ""

    def __str__(self) -> str:
        table = self.table if isinstance(self.table, Table) else Table((), ())
        numeric, categorical = len(table.numeric), len(table.categorical)
        return f"{numeric} columns of numbers, {categorical} of categories; {len(self.targets)} to predict"

    def to_json(self) -> dict[str, Any]:
        """Return the scaling as plain values."""
        table = {} if self.table is None else to_json(self.table)
        more = {_SCHEMA: json.loads(self.schema)} if self.schema else {}
        return table | more | ({_TARGETS: {k: list(v) for k, v in self.targets.items()}} if self.targets else {})

    def scaled(self, dataset: Dataset) -> Dataset:
        """Return a silo's data set with the agreed scale of the numbers to predict."""
        if not isinstance(dataset.task, Regression):
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
        if not all(isfinite(mean) and 0 < std < inf for mean, std in targets.values()):
            raise ValueError("a mean or a standard deviation is not a number, or not positive")
        return Scaling(from_json(values) if values or not targets else None, targets, schema)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no agreed scaling ({error}): make it by `ekiden federation agree`") from None


def agree_on(
    files: Sequence[Path], spelling: str = "", expected: Sequence[str] = (), schema: Schema | None = None
) -> Scaling:
    """Return the scaling for all silos that wrote these sums.

    Args:
        files: what `ekiden silo sums` wrote at each silo.
        spelling: merge or keep names that differ in case or blanks only; "" refuses them.
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
            if odd := sorted(here ^ there):
                raise UserError(
                    f"{files[0]} and {file} do not both describe the column {odd[0]!r} as {_TOLD[what]}: give "
                    "all silos the same columns"
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
    return Scaling(known, target_scales(told), schema.text() if schema else "")


def _check_schema(told: Sequence[ColumnSums], schema: Schema) -> None:
    """Name silos whose sums show that their data do not meet the schema; each silo checks its own rows later."""
    wrong = [f"{one.silo}: {what}" for one in told for what in _unmet(one, schema)]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UserError(
            f"the sums do not meet the schema ({'; '.join(wrong[:_SHOWN])}{more}): correct the data or the schema, and "
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
    if spelling != "keep" and all(name.isdecimal() for one in told for name in one.classes):
        line = numbered_from_two({one.silo: set(map(int, one.classes)) for one in told})
        if line:
            raise UserError(f"{line}: number them alike, or take them as they are by --spelling keep")
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
        doubts.rows_of_several(tells)
    if tells and (silent := [one.silo for one in told if not one.rows]):
        tell(f"rows of {', '.join(silent)} are not compared: it told no fingerprints of them")


_TOLD = {"moments": "numbers", "categories": "categories"}
