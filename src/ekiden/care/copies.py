"""Rules about samples that are there twice, or that are about the same patient as another one."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.care.features import has_name_of_id
from ekiden.care.seen import (
    SeenData,
    are_pictures,
    beyond_chance,
    chance,
    improbable,
    repeated,
    rows_of_several,
    thumbnails,
)
from ekiden.core.base.errors import counted
from ekiden.core.models.images import SHORTEST
from ekiden.core.tasks import Classification
from ekiden.readers.kinds import Arrays
from ekiden.readers.raster import split

_RECORDS = re.compile(
    r"visit|encounter|stay|admission|sample|specimen|scan|image|file|slice|row|record|exam|study|series"
)
_SIGNALS = 30
"""pairs of signals that are looked at, and the least number of signals"""
_FEW_COPIES = 0.01
"""share of test rows that equal a training row; fewer make no difference"""


def files_of_patients(seen: SeenData) -> Iterator[str]:
    """Say that samples are slices of the same files, or that most names of files begin like a few
    others'.
    """
    raws = seen.raws
    files = Counter[Path]()
    for raw in raws:
        if raw.subject is not None or not isinstance(raw.images, list):
            return
        for one in raw.images:
            if isinstance(one, Path):
                files[split(one)[0]] += 1
    several = repeated(files)
    if several:
        yield (
            f"{several.total():,} images of {raws[0].source} are parts of only "
            f"{counted(len(several), 'file')}, such as {next(iter(several)).name}, so one file may "
            "be in training and in the test: name the column of patients or files by "
            "--subject-column"
        )
    begins = Counter[str]()
    for file in files:
        # 00000013_005.png is a patient's fifth image
        if match := re.match(r"(.*\d.*)[ _-]", file.name):
            begins[match[1]] += 1
    alike = repeated(begins)
    # fewer ways to begin may be days or scanners; a few files may have other names
    if len(alike) >= 10 and alike.total() >= 0.8 * len(files):
        yield (
            f"{alike.total():,} images of {raws[0].source} have names that begin in "
            f"{len(alike):,} ways, such as {next(iter(alike))}: if these are patients, list the "
            "files in a table, and name the column of patients by --subject-column, so that none "
            "is in training and in the test"
        )


def small_groups(seen: SeenData) -> Iterator[str]:
    """Say that a column that makes many silos of few rows may be the column of subjects."""
    column = seen.reading.group_column
    groups = [raw.group for raw in seen.raws if raw.group is not None]
    if not column or not groups:
        return
    _, sizes = np.unique(np.concatenate(groups), return_counts=True)
    middle = int(np.median(sizes))
    # a patient may have 20 rows, hardly a hospital
    if len(sizes) >= 10 and (middle < 20 or has_name_of_id(column)):
        yield (
            f"--group-column {column} makes {len(sizes):,} silos, half of them with {middle:,} "
            "rows or fewer, and each has rows in training and in the test: if it says whom a row "
            "is about (a patient, a device), name it by --subject-column instead, which keeps all "
            "rows of one in one part"
        )


def lone_subjects(seen: SeenData) -> Iterator[str]:
    """Say that a column of subjects keeps no rows together, because it names visits or samples."""
    column = seen.reading.subject_column
    named = [raw.subject for raw in seen.raws if raw.subject is not None]
    rows = sum(map(len, named))
    # fewer patients may have a row each
    alone = rows >= 30 and len(np.unique(np.concatenate(named))) == rows
    if alone and _RECORDS.search(column.lower()):
        yield (
            f"each row of {seen.source} has its own value in --subject-column {column}, so no rows "
            "are kept together: name the column that says whom they are about"
        )


def subjects_in_both(seen: SeenData) -> Iterator[str]:
    """Say how many rows of a given test part are about subjects of training."""
    train = seen.data.train.subject
    test = seen.data.test.subject
    if not seen.given or train is None or test is None:
        return
    both = torch.isin(test, train)
    if both.any():
        people = counted(len(np.unique(test[both].cpu())), "subject")
        yield (
            f"{both.sum():,} of {len(test):,} test rows are about {people} of training, so the "
            "test is too easy: take them out of one part, or leave out the test part, and Ekiden "
            "holds out whole subjects"
        )


def early_tests(seen: SeenData) -> Iterator[str]:
    """Say how many rows of a given test part are not later than training."""
    train = seen.data.train.time
    test = seen.data.test.time
    if not seen.given or train is None or test is None:
        return
    early = int((test <= train.max()).sum())
    if early:
        yield (
            f"{early:,} of {len(test):,} test rows are not later than the last training row: check "
            "the test part"
        )


def rows_in_both(seen: SeenData) -> Iterator[str]:
    """Say how many test rows equal a training row.

    Of a test part that was drawn from rows, only copies of images, or of rows that a single column
    tells apart, are not chance.
    """
    if seen.prints is None:
        return
    known, own = map(Counter, seen.prints)
    equal = sum(n for row, n in own.items() if row in known)
    x = seen.data.train.x
    if seen.given:
        copied = beyond_chance(known, own, chance(x))
    else:
        # equal rows may be drawn into both parts, so what is twice within them says nothing
        many = equal >= _FEW_COPIES * own.total() and x.dtype != torch.int64
        expected = known.total() * own.total() * chance(x)
        copied = many and _fine(x, len(known)) and improbable(equal, expected)
    if copied:
        yield (
            f"{equal:,} of {len(seen.data.test):,} test rows equal a training row, so the test is "
            "too easy: take out rows that are twice"
        )


def _fine(x: Tensor, different: int) -> bool:
    """Return whether samples are images or signals, or rows that one column tells apart."""
    if x.ndim > 2:
        return True
    values = map(np.unique, x.cpu().numpy().T)
    # a few rows may be twice, so nearly as many values as rows suffice
    return max(map(len, values)) >= 0.95 * different


def stored_again(seen: SeenData) -> Iterator[str]:
    """Say how many test images are nearly a training image, as if one was stored with losses."""
    train = seen.data.train.x
    test = seen.data.test.x
    if seen.prints is None or not are_pictures(train):
        return
    known = {*seen.prints[0]}
    rows = [k for k, own in enumerate(seen.prints[1]) if own not in known]
    # so many thumbnails of 8 x 8 are compared in a second
    rows = rows[:: len(rows) // 512 + 1]
    some = train[:: len(train) // 20_000 + 1]
    # among few images, the second nearest says little
    if len(some) < 30 or not rows:
        return
    small = thumbnails(some).flatten(1)
    other = thumbnails(test[rows]).flatten(1)
    near = torch.cdist(other, small).topk(2, largest=False).values / small.shape[1] ** 0.5
    # losses change a thumbnail by up to three grey levels, and no other image is as near
    found = int(((near[:, 0] <= 3) & (4 * near[:, 0] <= near[:, 1])).sum())
    if found >= max(2, _FEW_COPIES * len(rows)):
        yield (
            f"{found:,} of {len(rows):,} test images of {seen.source} that were looked at are "
            "nearly a training image, as if it was compressed again: take out pictures that are "
            "twice"
        )


def same_samples(seen: SeenData) -> Iterator[str]:
    """Say how many samples of an owner are one and the same, which rows of tables may be."""
    x = seen.data.train.x
    if x.ndim == 2 and x.dtype != torch.int64:
        return
    for owner, prints in seen.owned.items():
        same = max(Counter(prints).values(), default=0)
        # of fewer samples, half may be black
        if same >= 30 and same >= len(prints) / 2:
            yield (
                f"{same:,} of {len(prints):,} samples of {owner} are the same: check how they were "
                "read"
            )


def several_labels(seen: SeenData) -> Iterator[str]:
    """Say how many samples are there again with another class, unless such rows are equal by
    chance.
    """
    data = seen.data
    x = seen.data.train.x
    classes = isinstance(data.task, Classification) and x.dtype != torch.int64
    if seen.prints is None or not classes:
        return
    prints = [*chain(*seen.prints)]
    labels = defaultdict[bytes, set[int]](set)
    for own, label in zip(prints, torch.cat([data.train.y, data.test.y]).tolist(), strict=True):
        labels[own].add(label)
    several = [sorted(each) for each in labels.values() if len(each) > 1]
    # if most of those that are twice have one label, rows are coarse: equal ones are other samples
    coarse = x.ndim == 2 and len(repeated(Counter(prints))) >= 2 * len(several)
    if not coarse and improbable(len(several), len(prints) ** 2 / 2 * chance(x)):
        names = seen.classes(several[0])
        is_ = "is" if len(several) == 1 else "are"
        yield (
            f"{counted(len(several), 'sample')} of {seen.raws[0].source} {is_} there with several "
            f"labels ({names}): correct them, unless they are different samples that look alike"
        )


def windows(seen: SeenData) -> Iterator[str]:
    """Say that signals are overlapping windows of longer ones, so that some of the test are in
    training.
    """
    for raw in seen.raws:
        signals = raw.kind is Arrays and np.ndim(raw.images) == 3 and len(raw) >= _SIGNALS
        if raw.subject is not None or not signals:
            continue
        rows = range(0, len(raw) - 1, -(-len(raw) // _SIGNALS))
        overlap = sum(_overlap(*map(np.asarray, raw.images[row : row + 2])) for row in rows)
        if 2 * overlap >= len(rows):
            yield (
                f"signals of {raw.source} overlap with those that follow them, so parts of the "
                "test are in training: cut windows that do not overlap, or say whom each is about "
                "(subject=, --subject-column)"
            )
            return


def _overlap(one: NDArray[Any], following: NDArray[Any]) -> bool:
    """Return whether a signal (C, T) begins as the one before it ends."""
    for start in np.flatnonzero(one[0] == following[0, 0]):
        end = one[:, start:]
        long = end.shape[1] >= SHORTEST // 2 and np.ptp(end) > 0
        if long and (end == following[:, : end.shape[1]]).all():
            return True
    return False


def shared_rows(seen: SeenData) -> Iterator[str]:
    """Say how many rows several natural owners have."""
    if seen.data.groups:
        yield from rows_of_several(seen.owned, chance(seen.data.train.x))


RULES = (
    shared_rows,
    several_labels,
    files_of_patients,
    small_groups,
    lone_subjects,
    subjects_in_both,
    early_tests,
    rows_in_both,
    stored_again,
    same_samples,
    windows,
)
"""each yields a line for what it finds"""
