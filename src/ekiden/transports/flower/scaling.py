"""The agreed scaling of a table's columns and of the numbers to predict, kept in a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError
from ekiden.data.inputs import Inputs, Table, from_json, to_json
from ekiden.data.samples import Dataset
from ekiden.data.tabular import ColumnSums, agree, target_scales
from ekiden.data.tasks import Regression

_TARGETS = "targets"


@dataclass(frozen=True)
class Scaling:
    """The scaling that silos agreed on.

    Attributes:
        table: the columns, their scaling and vocabularies; None if samples are not rows of a table.
        targets: mean and standard deviation of each number to predict, by name.
    """

    table: Inputs | None
    targets: Mapping[str, tuple[float, float]]

    def __str__(self) -> str:
        table = self.table if isinstance(self.table, Table) else Table((), ())
        numeric, categorical = len(table.numeric), len(table.categorical)
        return f"{numeric} columns of numbers, {categorical} of categories; {len(self.targets)} to predict"

    def to_json(self) -> dict[str, Any]:
        """Return the scaling as plain values."""
        table = {} if self.table is None else to_json(self.table)
        return table | ({_TARGETS: {k: list(v) for k, v in self.targets.items()}} if self.targets else {})

    def scaled(self, dataset: Dataset) -> Dataset:
        """Return a silo's data set with the agreed scale of the numbers to predict."""
        if not isinstance(dataset.task, Regression):
            return dataset
        if isinstance(dataset.inputs, Table) and self.table is None:
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
        targets = {str(name): (float(mean), float(std)) for name, (mean, std) in given.items()}
        if not all(isfinite(mean) and 0 < std < inf for mean, std in targets.values()):
            raise ValueError("a mean or a standard deviation is not a number, or not positive")
        return Scaling(from_json(values) if values or not targets else None, targets)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no agreed scaling ({error}): make it by `ekiden federation agree`") from None


def agree_on(files: Sequence[Path]) -> Scaling:
    """Return the scaling for all silos that wrote these sums."""
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
    columns = [name for name in told[0].moments if name in told[0].missing]  # the others are targets
    table = Table(tuple(sorted(columns)), tuple(sorted(told[0].categories)), dates=tuple(sorted(told[0].dates)))
    table = agree(table, told)
    return Scaling(table if table.numeric or table.categorical else None, target_scales(told))


_TOLD = {"moments": "numbers", "categories": "categories"}
