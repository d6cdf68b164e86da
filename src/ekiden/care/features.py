"""Rules about the columns of a table: which hardly are features, and which tell the label."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ekiden.care.seen import LARGE, SeenData, shared_columns
from ekiden.core.base.errors import listed
from ekiden.core.tasks import Classification, MultiLabel, ScaledTask
from ekiden.readers.cells import DATE, is_text
from ekiden.readers.kinds.tables import Numbers

_ID = re.compile(
    r"(^|[\W_])((id|ids|uid|uuid|guid|mrn|ssn|pid|patient|person|subject|participant|index|row|record|encounter|admission"
    r"|accession|specimen|barcode|seqn)([\W_]?(id|no|nr|num|number|code|key))?"
    r"|(pat|case|visit|study|sample|stay|fall)[\W_]?(id|no|nr|num|number|nummer|key)|patienten[\W_]?(id|nr|nummer))$"
)


def has_name_of_id(name: str) -> bool:
    """Return whether a column is called as ids are: patient_id, PatientID, mrn."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_ID.search(parted.lower()))


def ids(seen: SeenData) -> Iterator[str]:
    """Name the columns of tables that look like ids."""
    import pyarrow.compute as pc

    # who names the features, or has agreed on them, has thought of them
    if seen.reading.feature_columns or not seen.unscaled:
        return
    found = list[str]()
    for name, columns in shared_columns(seen.raws):
        if DATE in (seen.raws[0].images.schema.field(name).metadata or {}):
            continue
        different = set[Any]()
        rows = different_in_each = 0
        for column in columns:
            own = pc.unique(column.drop_null()).to_pylist()
            different.update(own)
            different_in_each += len(own)
            rows += len(column) - column.null_count
        # as few may be categories, whatever the name of the column
        if len(different) <= 10:
            continue
        if all(is_text(column.type) for column in columns):
            # in fewer rows, different texts prove nothing; a few ids may be there twice
            unlike = rows >= 30 and len(different) >= 0.95 * rows
            odd = unlike or has_name_of_id(name)
        else:
            whole = all(value.is_integer() for value in different)
            # 0, 1, 2, ... in each silo, or in all together
            without_gaps = max(different) - min(different) < len(different)
            counts_rows = different_in_each == rows and without_gaps and min(different) in (0, 1)
            # fewer may be a rank, or a small scale
            odd = whole and ((counts_rows and rows >= 20) or has_name_of_id(name))
        if odd:
            found.append(f"{name!r} ({len(different):,} different values)")
    if found:
        yield (
            f"column {listed(found)} of {seen.raws[0].source} looks like an id or a row number, "
            f"which a model learns by heart: leave it out (--drop-columns={found[0].split(' (')[0]}), "
            "and name the column of patients, writers or devices by --subject-column"
        )


def telling_columns(seen: SeenData) -> Iterator[str]:
    """Name the features that tell the label, or the silo, in all training rows, or in nearly
    all.
    """
    data = seen.data
    x = data.train.x
    y = data.train.y
    rows = x.ndim == 2 and x.is_floating_point() and x.nbytes <= LARGE
    # in fewer rows, a column that equals the label may be chance
    if not rows or len(x) < 20:
        return
    columns = dict(
        zip(data.inputs.values_named(x.shape[1]), x.double().cpu().numpy().T, strict=True)
    )
    labels = seen.raws[0].targets
    if isinstance(data.task, Classification | MultiLabel | ScaledTask):
        measure = _share_of_classes
        # with fewer different numbers to predict, many columns have the same order
        least = 2
        if isinstance(data.task, ScaledTask):
            measure = _share_of_numbers
            least = 10
        for place, label in enumerate(y.double().cpu().numpy().reshape(len(y), -1).T):
            what = "the label"
            if place < len(labels):
                what = f"the label {labels[place]!r}"
            if len(np.unique(label)) >= least:
                yield from _telling(seen, columns, what, label, measure)
    # a column of two values may tell two silos apart by nature
    if len(seen.compared) > 2 and data.train.group is not None:
        silo = data.train.group.double().cpu().numpy()
        yield from _telling(seen, columns, "the silo", silo, _share_of_classes)


def _telling(
    seen: SeenData,
    columns: Mapping[str, Numbers],
    what: str,
    label: Numbers,
    share_told: Callable[[Numbers, Numbers], float],
) -> Iterator[str]:
    order = np.argsort(label, kind="stable")
    copies = list[str]()
    near = list[str]()
    for name, values in columns.items():
        lost = np.isnan(values)
        filled = np.nan_to_num(values, nan=np.finfo(np.float64).max)
        share = share_told(filled[order], label[order])
        if share == 1:
            copies.append(name)
        elif share:
            near.append(f"{name} ({100 * share:.2f} %)")
        # a column that is nearly empty has gaps that tell as little as it does
        gaps = 0 < lost.mean() < 0.95 and share < 1
        if gaps and share_told(lost[order].astype(np.float64), label[order]) == 1:
            copies.append(f"the gaps of {name}")
    if near:
        yield (
            f"{listed(near)} of {seen.data.name} tells {what} in nearly all training rows: check "
            "that it is known before the label is, or leave it out"
        )
    if copies:
        drop = ""
        if seen.data.inputs.agreed:
            drop = " with --drop-columns"
        yield (
            f"{listed(copies)} of {seen.data.name} is the same as {what}, or a one-to-one function "
            f"of it, in all {len(label):,} training rows: a model copies it and learns nothing "
            f"else; leave it out{drop}"
        )


_TELLS = 0.995
"""share of rows in which a feature tells the label: a value that was measured later, or a slip"""


def _share_of_numbers(column: Numbers, label: Numbers) -> float:
    """Return in which share of rows a column is the number to predict, which ascends; 0 if in few.

    It is 1 also for a function of the number that keeps the order.
    """
    steps = np.diff(column)
    ordered = (steps >= 0).all() or (steps <= 0).all()
    # rounding makes a few of the column's values equal
    if ordered and len(np.unique(column)) >= 0.95 * len(np.unique(label)):
        return 1.0
    # labels may have been float32
    share = float(np.isclose(column, label, rtol=1e-6, atol=0).mean())
    return share if share > _TELLS else 0.0


def _share_of_classes(column: Numbers, label: Numbers) -> float:
    """Return in which share of rows a column with few values tells the class; 0 if in few.

    That is at most 99.5 %, or hardly more than the commonest class has.
    """
    kinds, codes = np.unique(label, return_inverse=True)
    # one for a missing value
    most = len(kinds) + 1
    # some rows are enough to see that there are more
    if len(np.unique(column[:: len(column) // 512 + 1])) > most:
        return 0.0
    values, places = np.unique(column, return_inverse=True)
    if not 2 <= len(values) <= most:
        return 0.0
    pairs, rows = np.unique(places * len(kinds) + codes, return_counts=True)
    best = np.zeros(len(values))
    np.maximum.at(best, pairs // len(kinds), rows)
    share = float(best.sum()) / len(label)
    guess = np.bincount(codes).max() / len(label)
    return share if share > _TELLS and 1 - share < (1 - guess) / 2 else 0.0


RULES = (
    ids,
    telling_columns,
)
"""each yields a line for what it finds"""
