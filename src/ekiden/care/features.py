"""Rules about the columns of a table: which hardly are features, and which tell the label."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ekiden.care.seen import LARGE, SeenData, chance, improbable
from ekiden.care.spelling import bare_id
from ekiden.core.base.errors import listed
from ekiden.core.tasks import Classification, MultiLabel, Regression, ScaledTask
from ekiden.readers.cells import DATE, is_text
from ekiden.readers.undecoded import PARTS

_ID = re.compile(
    r"(^|[\W_])((id|ids|uid|uuid|guid|mrn|ssn|pid|patient|person|subject|participant|index|row|record|encounter|admission"
    r"|accession|specimen|barcode|seqn)([\W_]?(id|no|nr|num|number|code|key))?"
    r"|(pat|case|visit|study|sample|stay|fall)[\W_]?(id|no|nr|num|number|nummer|key)|patienten[\W_]?(id|nr|nummer))$"
)
_TIME = re.compile(r"time|days|weeks|months|years|follow|surviv|duration|^(os|pfs|dfs|ttd|tte)$")
_EVENT = re.compile(r"event|status|died|death|dead|deceased|cens|relapse|recur")
_SPLIT = re.compile(r"(is_?)?(train|test|val|valid|validation|split|fold|partition)")
_WEIGHT = re.compile(
    r"(^|[\W_])((sample|survey|sampling|case|row|instance|propensity|frequency)[\W_]?(weights?|wgt|wt)"
    r"|iptw|ipw|ipcw|[pfa]weight)$"
)
_PART = re.compile(r"^$|\d|train|test|val|dev|hold|^(true|false|yes|no|none|nan)$")
"""what a split is called; not the arms of a trial, which a column `fold` may hold as well"""
_AGAIN = re.compile(
    r"(?<=.)([.]\d+|_duplicated_\d+|\.{3}\d+|( - )? ?\(?(copy|kopie)\)?( ?\(?\d+\)?)?| "
    r"\(\d+\))$|^copy of ",
    re.I,
)
Numbers = NDArray[np.float64]


def has_name_of_id(name: str) -> bool:
    """Return whether a column is called as ids are: patient_id, PatientID, mrn."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_ID.search(parted.lower()))


def _raw_columns(seen: SeenData) -> Iterator[tuple[str, list[Any]]]:
    """Yield the columns of features that all parts of a table have, as they were read."""
    first = seen.raws[0]
    if not first.kind.agreed or not seen.unscaled or seen.reading.feature_columns:
        return
    for field in first.images.schema:
        everywhere = all(field.name in raw.images.column_names for raw in seen.raws)
        if everywhere and DATE not in (field.metadata or {}):
            yield field.name, [raw.images[field.name] for raw in seen.raws]


def ids(seen: SeenData) -> Iterator[str]:
    """Name the columns of tables that look like ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = list[str]()
    for name, columns in _raw_columns(seen):
        different = {value for column in columns for value in pc.unique(column).to_pylist()} - {
            None
        }
        rows = sum(len(column) - column.null_count for column in columns)
        texts = all(is_text(column.type) for column in columns)
        whole = all(
            pc.all(pc.equal(column, pc.floor(column))).as_py()
            for column in columns
            if pa.types.is_floating(column.type)
        )
        # in fewer rows, different texts prove nothing; a few ids may be there twice
        own_texts = texts and rows >= 30 and len(different) >= 0.95 * rows
        # as few may be categories, whatever the name of the column
        if len(different) > 10 and (own_texts or (whole and has_name_of_id(name))):
            found.append(f"{name!r} ({len(different):,} different values)")
    if found:
        yield (
            f"column {listed(found)} of {seen.raws[0].source} looks like an id, which a model "
            f"learns by heart: leave out ids (--drop-columns={found[0].split(' (')[0]}), and name "
            "the column of patients, writers or devices by --subject-column"
        )


def row_numbers(seen: SeenData) -> Iterator[str]:
    """Name the columns that hold 0, 1, 2, ... or 1, 2, 3, ..., in each source or in all together,
    in any order.
    """
    import pyarrow as pa

    found = list[str]()
    for name, columns in _raw_columns(seen):
        if has_name_of_id(name) or not all(pa.types.is_floating(c.type) for c in columns):
            continue
        parts = [column.to_numpy() for column in columns]
        if all(map(_counts_up, parts)) or _counts_up(np.concatenate(parts)):
            found.append(repr(name))
    if found:
        yield (
            f"column {listed(found)} of {seen.raws[0].source} counts rows, so it tells their order "
            f"and nothing else: leave out row numbers (--drop-columns={found[0]})"
        )


def _counts_up(values: Numbers) -> bool:
    # fewer may be a rank, or a small scale
    if len(values) < 20 or values.min() not in (0, 1):
        return False
    return bool((np.sort(values) == values.min() + np.arange(len(values))).all())


def splits_and_weights(seen: SeenData) -> Iterator[str]:
    """Name the features that say which rows are for training and which for the test, or how much a
    row weighs.
    """
    import pyarrow.compute as pc

    first = seen.raws[0]
    if not first.kind.agreed or seen.reading.feature_columns:
        return
    for name in first.images.column_names:
        columns = [raw.images[name] for raw in seen.raws if name in raw.images.column_names]
        # a split has fewer
        some = [value for column in columns for value in pc.unique(column).to_pylist()[:10]]
        values = {str(value).strip().lower() for value in some}
        named = _SPLIT.fullmatch(name.lower()) and all(map(_PART.search, values))
        says = ""
        if named or (len(values) > 1 and values <= {*PARTS}):
            says = "which rows are for training and which for the test"
        elif _WEIGHT.search(name.lower()):
            says = "how much each row weighs"
        if says:
            yield (
                f"column {name!r} of {first.source} seems to say {says}, and nothing follows it: "
                f"leave it out (--drop-columns={name!r}); rows for the test may be in a file of "
                "their own"
            )


def times_without_events(seen: SeenData) -> Iterator[str]:
    """Say that the number to predict may be the time until an event that is among the features."""
    data, labels = seen.data, seen.raws[0].targets
    if not isinstance(data.task, Regression) or not data.inputs.agreed or len(labels) != 1:
        return
    if not _TIME.search(labels[0].lower()):
        return
    x = data.train.x
    for k, name in enumerate(data.inputs.values_named(x.shape[1])):
        if _EVENT.search(name.lower()) and len(np.unique(x[:, k].cpu())) == 2:
            yield (
                f"the label {labels[0]!r} of {data.name} may be the time until the event that "
                f"{name} says: then use --task=survival --label-column TIME EVENT, because who had "
                "no event yet lived longer"
            )
            return


def equal_columns(seen: SeenData) -> Iterator[str]:
    """Name features that are there twice, as pandas renames the second of two columns with one name
    to a.1.
    """
    x, inputs = seen.data.train.x, seen.data.inputs
    # in fewer rows, two columns of few values may be equal by chance
    if not inputs.agreed or not seen.unscaled or len(x) < 20:
        return
    alike = dict[bytes, list[str]]()
    for name, values in zip(inputs.values_named(x.shape[1]), x.T.contiguous(), strict=True):
        if len(values.unique()) > 1:
            alike.setdefault(values.numpy().tobytes(), []).append(name)
    several = [" and ".join(names) for names in alike.values() if len(names) > 1]
    if several:
        yield (
            f"{listed(several, sign='; ')} of {seen.data.name} are equal in all rows: leave out "
            "all but one"
        )


def columns_named_alike(seen: SeenData) -> Iterator[str]:
    """Name columns whose names differ in case and signs only, or that a program has numbered as
    copies.
    """
    first = seen.raws[0]
    if not first.kind.agreed:
        return
    names = [*first.images.column_names, *first.targets]
    pairs = list[str]()
    # more take seconds, and are hardly names that somebody wrote
    for one, other in permutations(names[:200], 2):
        alike = one < other and bare_id(one) == bare_id(other)
        if alike or _AGAIN.sub("", other) == one != other:
            pairs.append(f"{one!r} and {other!r}")
    if pairs:
        yield (
            f"column {listed(pairs)} of {first.source} may be one that is there twice: leave one "
            "out, or give them names that tell them apart"
        )


def telling_columns(seen: SeenData) -> Iterator[str]:
    """Name the features that tell the label, or the silo, in all training rows, or in nearly
    all.
    """
    data = seen.data
    x, y = data.train.x, data.train.y
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
            measure, least = _share_of_numbers, 10
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
    copies, near = list[str](), list[str]()
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
    share, guess = float(best.sum()) / len(label), np.bincount(codes).max() / len(label)
    return share if share > _TELLS and 1 - share < (1 - guess) / 2 else 0.0


def repeated_rows(seen: SeenData) -> Iterator[str]:
    """Name a column if many rows differ in it alone, as after a join of a table with its visits."""
    x, y = seen.data.train.x, seen.data.train.y
    table = seen.data.inputs.agreed and seen.unscaled and seen.data.train.subject is None
    # larger tables would take seconds; in fewer rows or columns, equal ones are chance
    if not table or x.shape[1] < 3 or len(x) < 30 or x.numel() > 1 << 24:
        return
    columns = [*x.double().cpu().numpy().T, *y.double().cpu().numpy().reshape(len(y), -1).T]
    draw = np.random.default_rng(0)
    fine = [len(np.unique(one)) >= max(20, len(x) / 10) for one in columns[: x.shape[1]]]
    # rows of coarse columns are equal by chance
    if sum(fine) < 3:
        return
    # a row's print is the sum of a random number for each value, so without a column it is a
    # difference
    prints = [
        draw.integers(1 << 62, size=len(x))[np.unique(column, return_inverse=True)[1]]
        for column in columns
    ]
    whole = np.sum(prints, axis=0)
    same = [len(x) - len(np.unique(whole - own)) for own in prints[: x.shape[1]]]
    place, most = int(np.argmax(same)), max(same)
    rest = [k for k in range(x.shape[1]) if k != place]
    if most >= len(x) / 4 and improbable(most, len(x) ** 2 / 2 * chance(x[:, rest])):
        yield (
            f"{most:,} of {len(x):,} training rows of {seen.source} equal another in all but "
            f"{seen.data.inputs.values_named(x.shape[1])[place]}, so such a row may be in training "
            "and in the test: if a join repeated them, keep one; if they are about the same, name "
            "whom by --subject-column"
        )


RULES = (
    ids,
    row_numbers,
    splits_and_weights,
    telling_columns,
    equal_columns,
    times_without_events,
    columns_named_alike,
    repeated_rows,
)
"""each yields a line for what it finds"""
