"""Let all silos scale tables and targets alike, from the sums that they tell.

Between machines, `agree_on` makes a file of these sums, and each silo reads its scaling from there.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ekiden.core.base.errors import UserError, counted, listed, nearest, tell
from ekiden.core.base.files import read_text
from ekiden.core.data.samples import Dataset, FederatedData, Subset
from ekiden.core.tasks import ScaledTask, Task
from ekiden.readers import schema as schemas
from ekiden.readers.inspector import Spelling, inspector
from ekiden.readers.kinds import Inputs, Table, from_json
from ekiden.readers.kinds.tables import encode_again
from ekiden.readers.moments import ColumnSums, read_sums, target, told_by
from ekiden.readers.schema import Schema
from ekiden.readers.undecoded import named_twice, natural, not_in


def agree(table: Table, total: ColumnSums) -> Table:
    """Return the table with the scaling and the vocabularies that follow from the sums of all silos.

    Warns:
        DataWarning: a column does not vary.
    """
    centre = list[float]()
    scale = list[float]()
    constant = list[str]()
    for name in table.numeric:
        mean, std = total.scale(name)
        if not std:
            constant.append(name)
        centre.append(mean)
        scale.append(std or 1.0)
    if constant:
        tell(
            "a model learns nothing from columns with one value at all silos, or fewer than "
            "--min-count others at "
            f"each: lower --min-count, or leave them out with --drop-columns={constant}"
        )
    vocabularies = list[tuple[str, ...]]()
    for name in table.categorical:
        vocabularies.append(tuple(sorted(total.categories[name], key=natural)))
        if not vocabularies[-1]:
            raise UserError(
                f"column {name!r} has no text that enough rows of a silo share: leave it out with "
                f"--drop-columns={name!r}, read it as text with --text-column={name!r}, or lower "
                "--min-count"
            )
    return replace(
        table,
        centre=tuple(centre),
        scale=tuple(scale),
        gaps=tuple(name for name in table.numeric if total.missing[name]),
        vocabularies=tuple(vocabularies),
        missing=total.marks,
    )


def target_scales(total: ColumnSums) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of each number to predict, by name."""
    found = dict[str, tuple[float, float]]()
    for column in not_in(total.missing, total.moments):
        name = column.removeprefix(target(""))
        mean, std = found[name] = total.scale(column)
        if not std:
            raise UserError(
                f"the label {name!r} is {mean:g} in all training rows: name a label that varies"
            )
    return found


def agreed(fed: FederatedData, *, mixed: bool = False) -> FederatedData:
    """Return the federation with one scaling for all clients, from what each reports about its
    training rows.

    The columns of a table and the targets of a regression are scaled, and the times of survival.
    `mixed` says that a partition dealt out the rows of one source, so no client's unit or codes can
    differ from the others'.
    """
    if not fed.dataset.least:
        return fed
    told = [told_by(client, fed.dataset) for client in fed.clients]
    if not mixed:
        told = inspector().sums(told, None)
    total = ColumnSums.together(told)
    after = fed.dataset.inputs
    task = fed.dataset.task
    if isinstance(after, Table):
        after = agree(after, total)
        _say_folded(fed, after)
    if isinstance(task, ScaledTask):
        mean, std = zip(*map(target_scales(total).__getitem__, fed.dataset.classes), strict=True)
        task = replace(task, mean=mean, std=std)
    return scaled(fed, after, task)


def _say_folded(fed: FederatedData, after: Table) -> None:
    """Count and name the categories that too few training rows of each silo have, which count as
    one.
    """
    found = list[str]()
    table = Table.of(fed.dataset.inputs)
    for place, (name, known) in enumerate(
        zip(table.categorical, table.vocabularies, strict=True), len(table.numeric)
    ):
        kept = after.vocabularies[after.categorical.index(name)]
        if not {*known} - {"", *kept}:
            continue
        names = ("", *known)
        rows = Counter[str]()
        at = list[str]()
        for client in fed.clients:
            held = Counter[str]()
            for part in (client.train, client.val, client.test):
                codes = part.samples.x[part.rows, place].long().tolist()
                held.update(map(names.__getitem__, codes))
            for category in ("", *kept):
                held.pop(category, None)
            rows += held
            if held:
                at.append(client.name)
        if rows:
            rare = listed(map(repr, dict(rows.most_common())))
            found.append(
                f"column {name!r}: {rare} in {counted(rows.total(), 'row')} of {listed(at)}"
            )
    if found:
        tell(
            f"{fed.dataset.name} has categories that fewer than {fed.dataset.least} training rows "
            f"of each silo have ({listed(found, sign='; ')}): all of them count as one unknown "
            "category; correct slips, or lower --min-count"
        )


def scaled(fed: FederatedData, after: Inputs, task: Task) -> FederatedData:
    """Return the same samples, encoded as agreed."""
    dataset = fed.dataset
    before = fed.dataset.inputs
    train = dataset.train
    test = dataset.test
    if isinstance(before, Table):
        train, test = (
            replace(s, x=encode_again(s.x, before, Table.of(after))) for s in (train, test)
        )

    def moved(part: Subset) -> Subset:
        return Subset(train if part.samples is dataset.train else test, part.rows)

    clients = tuple(
        replace(c, train=moved(c.train), val=moved(c.val), test=moved(c.test)) for c in fed.clients
    )
    return FederatedData(
        replace(dataset, train=train, test=test, inputs=after, task=task, least=0), clients
    )


@dataclass(frozen=True)
class Scaling:
    """The scaling that silos agreed on."""

    # the columns, their scaling and vocabularies; None if samples are not rows of a table
    table: Inputs | None
    # mean and standard deviation of each number to predict, by name
    targets: Mapping[str, tuple[float, float]]
    # the study's schema, as `Schema.text` gives it; empty without one
    schema: str = ""
    # training samples of all silos in each class, by its name; empty for other tasks
    classes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.scales:
            return f"training samples of {len(self.classes)} classes"
        table = Table.of(self.table)
        shown = f"{len(table.numeric)} columns of numbers, {len(table.categorical)} of categories"
        if self.targets:
            shown += f"; {len(self.targets)} to predict"
        return shown

    @property
    def scales(self) -> bool:
        """Whether there is more than numbers of samples by class."""
        return self.table is not None or bool(self.targets)

    def to_json(self) -> dict[str, Any]:
        """Return the scaling as plain values."""
        return {
            "table": None if self.table is None else self.table.to_json(),
            "targets": dict(self.targets),
            "schema": json.loads(self.schema) if self.schema else None,
            "classes": dict(self.classes),
        }

    def scaled(self, dataset: Dataset) -> Dataset:
        """Return a silo's data set with the agreed scale of the numbers to predict."""
        if not isinstance(dataset.task, ScaledTask):
            return dataset
        if dataset.inputs.agreed and self.table is None:
            raise UserError(
                "the agreed scaling lacks the columns of the table: make it of the sums of this "
                "task"
            )
        for name in dataset.classes:
            if name not in self.targets:
                raise UserError(
                    f"the agreed scaling lacks the target {name!r}: make it of the sums of this "
                    "task"
                )
        mean, std = zip(*map(self.targets.__getitem__, dataset.classes), strict=True)
        return replace(dataset, task=replace(dataset.task, mean=mean, std=std), least=0)


def read_agreed(path: Path) -> Scaling:
    """Return the scaling in a file that `ekiden federation agree` made."""
    try:
        values = json.loads(read_text(path))
        table = values["table"]
        schema = values["schema"]
        found = Scaling(
            None if table is None else from_json(table),
            {str(name): (float(m), float(s)) for name, (m, s) in values["targets"].items()},
            schemas.parsed(schema).text() if schema else "",
            {str(name): int(n) for name, n in values["classes"].items()},
        )
        if min(found.classes.values(), default=1) < 1:
            raise ValueError("a class has no sample")
        if not all(isfinite(mean) and 0 < std < inf for mean, std in found.targets.values()):
            raise ValueError("a mean or a standard deviation is not a number, or not positive")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} holds no agreed scaling ({error}): make it by `ekiden federation agree`"
        ) from None
    return found


def agree_on(
    files: Sequence[Path],
    spelling: Spelling = "",
    expected: Sequence[str] = (),
    schema: Schema | None = None,
) -> Scaling:
    """Return the scaling for all silos that wrote these files with `ekiden silo sums`.

    `spelling` merges or keeps names that are written in several ways; "" refuses them. The schema
    becomes part of what is agreed on. Columns in another unit, and rows that several silos hold,
    are named.
    """
    told = list[ColumnSums]()
    for file in files:
        one = read_sums(file)
        told.append(replace(one, silo=one.silo or file.stem))
        _refuse_other_columns(files[0], told[0], file, one)
    _check_silos([one.silo for one in told], expected)
    told = inspector().sums(told, spelling)
    total = ColumnSums.together(told)
    known = None
    # those without a count of missing values are targets
    if total.missing or total.categories:
        table = Table(
            tuple(sorted(total.missing)),
            tuple(sorted(total.categories)),
            dates=tuple(sorted(total.dates)),
        )
        known = agree(table, total)
    if known is None and not total.moments and not total.classes:
        raise UserError(
            "no silo counts enough samples of any class: lower min_count in their silo.toml"
        )
    counts = dict(sorted(total.classes.items()))
    return Scaling(known, target_scales(total), schema.text() if schema else "", counts)


def _refuse_other_columns(usual: Path, first: ColumnSums, file: Path, one: ColumnSums) -> None:
    """Refuse sums of other columns than those of the first silo."""
    for what, known, own in (
        ("numbers", {*first.moments}, {*one.moments}),
        ("categories", {*first.categories}, {*one.categories}),
    ):
        if known == own:
            continue
        name = min(known ^ own)
        has = usual
        lacks = file
        others = own - known
        if name in own:
            has = file
            lacks = usual
            others = known - own
        rename = ""
        if near := nearest(name, others, n=1, cutoff=0.8):
            rename = f"rename {near[0]!r} there, or "
        raise UserError(
            f"{lacks} lacks the column {name!r} of {what}, which {has} has: {rename}give all silos "
            "the same columns, or leave it out at all by drop_columns in silo.toml"
        )
    if odd := sorted({*first.dates} ^ {*one.dates}):
        raise UserError(
            f"only one of {usual} and {file} holds dates in the column {odd[0]!r}: write it "
            "alike at all silos"
        )


def _check_silos(names: Sequence[str], expected: Sequence[str]) -> None:
    """Refuse sums that are given twice, and name silos whose sums are missing."""
    if twice := named_twice(names):
        raise UserError(f"two files are the sums of {twice}: give those of each silo once")
    if missing := not_in(names, expected):
        raise UserError(
            f"the sums of {', '.join(missing)} are missing: give those of all silos of the "
            "federation"
        )
    if expected and (strange := not_in(expected, names)):
        raise UserError(
            f"{', '.join(strange)} is not a silo of the federation: {', '.join(expected)}"
        )
