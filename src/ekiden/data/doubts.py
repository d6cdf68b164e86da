"""Say in one line what may be wrong with data that can be read: ids among the features, and samples that are twice."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import counted, tell
from ekiden.base.outside import pa, pc
from ekiden.data.cells import DATE, is_text
from ekiden.data.kinds import Inputs
from ekiden.data.samples import Dataset, Samples
from ekiden.data.tasks import Classification, MultiLabel, Regression
from ekiden.data.undecoded import Raw

_ID = re.compile(
    r"(^|[\W_])((id|ids|uid|uuid|guid|mrn|ssn|pid|patient|person|subject|participant|index|row)([\W_]?(id|no|nr|num|number|code|key))?"
    r"|(record|case|visit|encounter|study|sample|row)[\W_]?(id|no|nr|num|number|key))$"
)
_FEW = 10  # different values that may be a category, whatever the name of the column
_MANY = 30  # rows from which nearly as many different values mean something
_NEARLY = 0.95
_SMALL = 20  # rows of a group that may be a patient, hardly a hospital
_ROWS_DIFFER = 0.95  # share of different rows from which equal rows mean something
FEATURES = 2  # of a sample; rows of a single number are equal by chance
_COPIED = 20  # rows from which a column that equals the label is hardly chance
_PEEK = 512  # rows that are looked at first
_LARGE = 1 << 28  # bytes of samples that are not compared
_SHOWN = 5


def ids_among_features(raws: Sequence[Raw]) -> None:
    """Name the columns of tables that look like ids: by name, or since nearly every row has its own text."""
    shared = [
        field.name
        for field in raws[0].images.schema
        if DATE not in (field.metadata or {}) and all(field.name in raw.images.column_names for raw in raws)
    ]
    found = []
    for name in shared:
        columns = [raw.images[name] for raw in raws]
        values = [pc.unique(column).drop_null() for column in columns]
        different = len({value for part in values for value in part.to_pylist()})
        if different > _FEW and ((_named_id(name) and _may_be_id(columns)) or _differ_in_each_row(columns, different)):
            found.append(f"{name!r} ({different:,} different values)")
    if found:
        several = len(found) > 1
        first = found[0].split("'")[1]
        tell(
            f"{'columns' if several else 'column'} {', '.join(found[:_SHOWN])} of {raws[0].source} "
            f"{'look like ids' if several else 'looks like an id'}, which a model learns by heart: leave out ids "
            f"(--drop-columns={first!r}), and name the column of patients, writers or devices by --subject-column"
        )


def _named_id(name: str) -> bool:
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_ID.search(parted.lower()))


def _may_be_id(columns: Sequence[Any]) -> bool:
    """Return whether values are texts or whole numbers."""

    def whole(column: Any) -> bool:
        if pa.types.is_floating(column.type):
            values = column.drop_null().to_numpy()
            return bool((values == np.floor(values)).all())
        return not (pa.types.is_temporal(column.type) or pa.types.is_boolean(column.type))

    return all(map(whole, columns))


def _differ_in_each_row(columns: Sequence[Any], different: int) -> bool:
    """Return whether nearly every row has its own text."""
    text = all(is_text(column.type) for column in columns)
    rows = sum(len(column) - column.null_count for column in columns)
    return text and rows >= _MANY and different >= _NEARLY * rows


def copied_labels(dataset: Dataset, labels: Sequence[str]) -> None:
    """Name the features that are the label in other words: equal to it, or a one-to-one function of it.

    Args:
        dataset: its training samples are compared.
        labels: names of the columns of labels.
    """
    x, y = dataset.train.x, dataset.train.y
    numbers = isinstance(dataset.task, Regression)
    wanted = isinstance(dataset.task, Classification | MultiLabel) or numbers
    if not wanted or x.ndim != 2 or not x.is_floating_point() or x.nbytes > _LARGE or len(x) < _COPIED:
        return
    values = np.nan_to_num(x.double().cpu().numpy(), nan=np.finfo(np.float64).max)
    columns = y.double().cpu().numpy().reshape(len(y), -1).T
    for target, label in enumerate(columns):
        if len(np.unique(label)) < (_FEW if numbers else 2):
            continue
        copies = [k for k in _like(values[:_PEEK], label[:_PEEK], numbers) if _like(values[:, [k]], label, numbers)]
        if copies:
            names = dataset.inputs.values_named(x.shape[1])
            shown = ", ".join(names[k] for k in copies[:_SHOWN])
            what = f"the label {labels[target]!r}" if target < len(labels) else "the label"
            are, them = ("are", "them") if len(copies) > 1 else ("is", "it")
            drop = " with --drop-columns" if dataset.inputs.agreed else ""
            tell(
                f"{shown} of {dataset.name} {are} the same as {what}, or a one-to-one function of it, in all "
                f"{len(x):,} training rows: a model copies {them} and learns nothing else; leave {them} out{drop}"
            )


def _like(values: NDArray[np.float64], label: NDArray[np.float64], numbers: bool) -> list[int]:
    """Return the columns (n, d) that are a one-to-one function of the label (n,); of numbers, one that keeps order."""
    order = np.argsort(label, kind="stable")
    steps, new = np.diff(values[order], axis=0), np.diff(label[order]) > 0
    if numbers:  # labels may have been rounded to float32
        ordered = (steps >= 0).all(axis=0) | (steps <= 0).all(axis=0)
        many = _NEARLY * (1 + new.sum())
        return [int(k) for k in np.flatnonzero(ordered) if len(np.unique(values[:, k])) >= many]
    moved = (steps != 0) == new[:, None]  # values change where the label does
    first = values[order][[0, *(np.flatnonzero(new) + 1)]]  # a value for each class
    return [int(k) for k in np.flatnonzero(moved.all(axis=0)) if len(np.unique(first[:, k])) == len(first)]


def small_groups(raws: Sequence[Raw], column: str) -> None:
    """Say that a column that makes many silos of few rows may be the column of subjects."""
    groups = [raw.group for raw in raws if raw.group is not None]
    if not groups:
        return
    _, sizes = np.unique(np.concatenate([g.astype(np.str_) for g in groups]), return_counts=True)
    middle = int(np.median(sizes))
    if len(sizes) >= _FEW and (middle < _SMALL or _named_id(column)):
        tell(
            f"--group-column {column} makes {len(sizes):,} silos, half of them with {middle:,} rows or fewer, and each "
            "has rows in training and in the test: if it says whom a row is about (a patient, a device), name it by "
            "--subject-column instead, which keeps all rows of one in one part"
        )


def shared_subjects(train: Samples, test: Samples) -> None:
    """Say how many rows of a given test part are about subjects of training."""
    if train.subject is None or test.subject is None:
        return
    both = np.isin(test.subject.cpu().numpy(), train.subject.cpu().numpy())
    if both.any():
        people = counted(len(np.unique(test.subject.cpu().numpy()[both])), "subject")
        tell(
            f"{both.sum():,} of {len(test):,} test rows are about {people} of training, so the test is too easy: take "
            "them out of one part, or leave out the test part, and Ekiden holds out whole subjects"
        )


def early_tests(train: Samples, test: Samples) -> None:
    """Say how many rows of a given test part are not later than training."""
    if train.time is None or test.time is None:
        return
    early = int((test.time <= train.time.max()).sum())
    if early:
        tell(f"{early:,} of {len(test):,} test rows are not later than the last training row: check the test part")


def rows_in_both(train: Samples, test: Samples, inputs: Inputs) -> None:
    """Say how many test rows equal a training row."""
    if train.x.nbytes + test.x.nbytes > _LARGE or train.x[0].numel() < FEATURES:
        return
    rows = fingerprints(train.x, inputs, b"")
    known = set(rows)
    equal = sum(row in known for row in fingerprints(test.x, inputs, b""))
    if equal and len(known) >= _ROWS_DIFFER * len(rows):
        tell(
            f"{equal:,} of {len(test):,} test rows equal a training row, so the test is too easy: take out rows that "
            "are twice"
        )


def classes_in_test_only(train: Samples, test: Samples, classes: Sequence[str]) -> None:
    """Say how many test rows are of classes that no training row has."""
    strange = ~torch.isin(test.y, train.y)
    if strange.any():
        names = [repr(classes[k]) for k in np.unique(test.y[strange].cpu().numpy())]
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        tell(
            f"{int(strange.sum()):,} of {len(test):,} test rows are of classes without a training row "
            f"({', '.join(names[:_SHOWN])}{more}), which a model cannot learn: check the names of classes in both"
        )


def no_class_in_common(dataset: Dataset) -> None:
    """Name a natural owner of several classes that shares none with the others: it may write them in another way."""
    train, names = dataset.train, dataset.groups
    if train.group is None or len(names) < 2:
        return
    held = [set(train.y[train.group == k].tolist()) for k in range(len(names))]
    owners = Counter(label for own in held for label in own)
    for name, own in zip(names, held, strict=True):
        if len(own) > 1 and all(owners[label] == 1 for label in own):
            here, there = (
                ", ".join(repr(dataset.classes[k]) for k in sorted(each)[:_SHOWN]) for each in (own, set(owners) - own)
            )
            tell(
                f"silo {name} shares no class with others (it has {here}; others have {there}): check that all silos "
                "write classes alike"
            )
            return


def rows_of_several(held: Mapping[str, Sequence[bytes | str]]) -> None:
    """Say how many rows several silos hold, from the fingerprints of their rows."""
    own = {name: set(rows) for name, rows in held.items()}
    if sum(map(len, own.values())) < _ROWS_DIFFER * sum(map(len, held.values())):
        return
    owners: dict[bytes | str, list[str]] = {}
    for name, rows in own.items():
        for row in rows:
            owners.setdefault(row, []).append(name)
    found = Counter(pair for names in owners.values() for pair in combinations(names, 2))
    pairs = [(n, a, b) for (a, b), n in found.most_common()]
    if pairs:
        shown = ", ".join(f"{a} and {b} {counted(n, 'row')}" for n, a, b in pairs[:_SHOWN])
        more = f", and {len(pairs) - _SHOWN:,} more pairs" if len(pairs) > _SHOWN else ""
        tell(
            f"silos hold equal rows: {shown}{more}. A row that one silo trains on may be another's test: take out what "
            "is twice"
        )


def by_group(dataset: Dataset) -> dict[str, list[bytes]]:
    """Return fingerprints of the rows of each natural owner."""
    found: dict[str, list[bytes]] = {name: [] for name in dataset.groups}
    for part in (dataset.train, dataset.test):
        if part.x.nbytes <= _LARGE and part.group is not None:
            for owner, print_ in zip(part.group.tolist(), fingerprints(part.x, dataset.inputs, b""), strict=True):
                found[dataset.groups[owner]].append(print_)
    return found


def fingerprints(x: Tensor, inputs: Inputs, salt: bytes) -> list[bytes]:
    """Return 8 bytes for each sample (n, ...), equal for equal samples and salts."""
    rows = np.ascontiguousarray(inputs.compared(x))
    if rows.dtype.kind == "f":
        rows = np.where(np.isnan(rows), np.nan, rows + 0.0)  # one NaN, one zero
    return [blake2b(row.tobytes(), digest_size=8, key=salt[:64]).digest() for row in rows]
