"""Rules about labels and categories: one value only, classes without a training row, and codes of
missing values.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ekiden.care.seen import WHOLE, SeenData
from ekiden.core.base.errors import listed
from ekiden.core.tasks import Classification, MultiLabel
from ekiden.readers.kinds import Table

_MARK = re.compile(r"-?(7{2,}|8{2,}|9+)|-[78]|-100")


def constant_labels(seen: SeenData) -> Iterator[str]:
    """Name a class that all samples have, or labels that all rows have or none has."""
    data = seen.data
    if not isinstance(data.task, Classification | MultiLabel):
        return
    y = torch.cat([data.train.y, data.test.y])
    same = (y == y[0]).all(0)
    if isinstance(data.task, Classification) and same:
        yield (
            f"all labels of {seen.source} are {data.classes[int(y[0])]!r}: a model learns nothing "
            "from one class; if other silos hold others, train together with them"
        )
    if isinstance(data.task, MultiLabel) and same.any():
        flat = seen.classes(same.nonzero()[:, 0])
        yield f"the label {flat} of {seen.source} is the same in all rows: leave it out"


def classes_in_test_only(seen: SeenData) -> Iterator[str]:
    """Say how many test rows are of classes that no training row has."""
    train = seen.data.train
    test = seen.data.test
    strange = ~torch.isin(test.y, train.y)
    if isinstance(seen.data.task, Classification) and strange.any():
        names = seen.classes(np.unique(test.y[strange].cpu()))
        yield (
            f"{strange.sum():,} of {len(test):,} test rows are of classes without a training "
            f"row ({names}), which a model cannot learn: check the names of classes in both"
        )


def marks_of_missing(seen: SeenData) -> Iterator[str]:
    """Name classes and categories that are codes of missing values among whole numbers: -999, 99."""
    table = Table.of(seen.data.inputs)
    named = dict[str, Sequence[str]]()
    for column, known in zip(table.categorical, table.vocabularies, strict=False):
        named[f"category of column {column!r}"] = known
    if isinstance(seen.data.task, Classification):
        named["class"] = seen.data.classes
    for what, names in named.items():
        whole = names and all(map(WHOLE.fullmatch, names))
        if whole and (found := _codes_of_missing(names)):
            yield (
                f"{what} {listed(map(repr, found))} of {seen.raws[0].source} seems to mark missing "
                "values: leave such rows out, or say so with --missing"
            )


def _codes_of_missing(names: Sequence[str]) -> list[str]:
    """Return which of some whole numbers lie apart from the others, as codes of missing values
    do.
    """
    rest = [int(name) for name in names if not _MARK.fullmatch(name)] or [0]
    least = min(rest) - 1
    most = max(rest) + 1
    found = list[str]()
    for name in names:
        apart = not least <= int(name) <= most
        if apart and str(int(name) - 1) not in names:
            found.append(name)
    # below the codes 0, 1, 2 it marks a missing value; next to -2 it is a value itself
    if {"-1", "0", "1", "2"} <= {*names} and "-2" not in names:
        found.append("-1")
    return found


RULES = (constant_labels, classes_in_test_only, marks_of_missing)
"""each yields a line for what it finds"""
