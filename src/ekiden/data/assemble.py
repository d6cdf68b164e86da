"""Make data sets from the user's files and frames: from one source, or from one for each silo."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data import apart, doubts, times
from ekiden.data.encoding import encode
from ekiden.data.holdings import Holding
from ekiden.data.inputs import Inputs, Table, Tokens
from ekiden.data.raw import Raw, owners, subjects
from ekiden.data.reading import Reading
from ekiden.data.samples import Dataset, Samples
from ekiden.data.targets import KINDS, provisional, targets
from ekiden.data.tasks import LanguageModelling, Regression, Task
from ekiden.data.tasks.base import IGNORED
from ekiden.data.whose import silo_name

_Piece: TypeAlias = tuple[Raw, Samples]
"""a part of a source, with its labels and owners; the samples' x is not read yet"""


def assemble(
    holdings: Sequence[Holding],
    reading: Reading,
    *,
    name: str,
    size: int | None = None,
    task: str = "",
    like: Dataset | None = None,
    inputs: Inputs | None = None,
) -> Dataset:
    """Return one data set of what all sources hold; each silo's samples are a group.

    If a source has no test part, 20 % of it is held out, evenly from all (domain, group, label).

    Args:
        holdings: the sources.
        reading: how they were read.
        name: name of the data set.
        size: side of images in pixels.
        task: name of the task; "" infers it from the labels.
        like: a data set whose classes, scaling and task are used, to measure a model on other data.
        inputs: what samples become, if the silos have agreed on that.
    """
    raws = [part for holding in holdings for part in holding.parts]
    _alike(raws)
    if len(holdings) > 1 and reading.group_column:
        raise UserError("several silos and --group-column both say which client holds what: give one of them")
    y, classes, chosen = targets(raws, task, like)
    domain, domains = owners("domain", raws)
    group, groups = _groups(holdings, raws)
    found = zip(raws, y, domain, group, subjects(raws), times.numbers(raws), strict=True)
    pieces = [
        (raw, Samples(labels, labels, place, owner, subject=who, time=when))
        for raw, labels, place, owner, who, when in found
    ]
    sides = _sides(holdings, pieces, chosen)
    known = inputs if like is None else like.inputs
    x, inputs = encode(
        [[raw for raw, _ in side] for side in sides], reading, size, known, () if like is None else like.shape
    )
    train, test = (
        Samples(
            tensor,
            tensor if isinstance(chosen, LanguageModelling) else torch.cat([s.y for _, s in side]),
            _joined([s.domain for _, s in side]),
            _joined([s.group for _, s in side]),
            classes,
            _joined([s.subject for _, s in side]),
            _joined([s.time for _, s in side]),
        )
        for tensor, side in zip(x, sides, strict=True)
    )
    if isinstance(chosen, LanguageModelling):
        tokens = cast(Tokens, inputs)
        chosen = replace(chosen, vocabulary=tokens.vocabulary)
        train, test = (replace(s, y=s.x.masked_fill(s.x == tokens.pad, IGNORED)) for s in (train, test))
    named = _unlike(groups) if reading.group_column or len(holdings) > 1 else ()
    made = Dataset(name, train, test, classes, domains, task=chosen, inputs=inputs, groups=named)
    if like is not None:
        return replace(made, mean=like.mean, std=like.std)
    _doubt(made, holdings, reading, known is None)
    if isinstance(chosen, Regression):  # until the clients agree; partitions divide by it
        made = replace(made, task=provisional(chosen, train.y))
    open_ = (isinstance(inputs, Table) and known is None) or isinstance(chosen, Regression)
    return replace(made, least=reading.min_count if open_ else 0)


def _doubt(made: Dataset, holdings: Sequence[Holding], reading: Reading, open_: bool) -> None:
    """Say what may be wrong with the data."""
    raws = [part for holding in holdings for part in holding.parts]
    if raws[0].kind == "table" and open_ and not reading.feature_columns:
        doubts.ids_among_features(raws)
    if reading.group_column:
        doubts.small_groups(raws, reading.group_column)
    if any(holding.test is not None for holding in holdings):
        doubts.shared_subjects(made.train, made.test)
        doubts.early_tests(made.train, made.test)
        doubts.rows_in_both(made.train, made.test, made.inputs)
    if made.train.group is not None and made.groups:
        doubts.rows_of_several(doubts.by_group(made))


def _groups(holdings: Sequence[Holding], raws: Sequence[Raw]) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Return the owner of each sample, and the owners' names: the silos, if there are several."""
    if len(holdings) == 1:
        return owners("group", raws)
    group = [torch.full((len(part.label),), k) for k, holding in enumerate(holdings) for part in holding.parts]
    return group, tuple(holding.name for holding in holdings)


def _unlike(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the owners' names as names of silos, all different."""
    names = tuple(map(silo_name, groups))
    return names if len(set(names)) == len(names) else tuple(f"{name}-{k}" for k, name in enumerate(names))


def _sides(holdings: Sequence[Holding], pieces: Sequence[_Piece], task: Task) -> tuple[list[_Piece], list[_Piece]]:
    """Return the parts for training and for the test: as the sources say, or held out."""
    given = iter(pieces)
    train: list[_Piece] = []
    test: list[_Piece] = []
    sources = [[next(given) for _ in holding.parts] for holding in holdings]
    held = iter(_held_out([parts[0] for parts in sources if len(parts) == 1], task))
    for parts in sources:
        first, second = parts if len(parts) == 2 else next(held)
        train.append(first)
        test += [second] if len(second[1]) else []
    if not test:
        raw = pieces[0][0]
        raise UserError(f"{raw.source} has only {len(raw.label)} rows, too few to hold out a test part: add one")
    return train, test


def augmented(dataset: Dataset, reading: Reading) -> Dataset:
    """Return the data set with the augmentation that the user chose, or else with its own."""
    if not reading.augment.active:
        return dataset
    if len(dataset.shape) != 3:
        raise UserError(
            "--augment-crop, --augment-flip and --augment-rotation are for images, but these samples have shape "
            f"{dataset.shape}: leave them out"
        )
    return replace(dataset, augment=reading.augment)


def _alike(raws: Sequence[Raw]) -> None:
    for raw in raws[1:]:
        if raw.kind != raws[0].kind:
            raise UserError(
                f"{raws[0].source} holds {KINDS[raws[0].kind]}, {raw.source} {KINDS[raw.kind]}: give one kind"
            )


def _held_out(sources: Sequence[_Piece], task: Task) -> list[list[_Piece]]:
    """Divide each source into a training part and a test part. A subject of several sources is not divided either."""
    each = [samples for _, samples in sources]
    strata = [(provisional(task, s.y) if isinstance(task, Regression) else task).strata(s.y) for s in each]
    rows = apart.hold_out(each, strata, sources[0][0].source) if sources else []
    return [
        [(raw.taken(part.numpy()) if len(part) else raw, samples.taken(part)) for part in parts]
        for (raw, samples), parts in zip(sources, rows, strict=True)
    ]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if len(given) == len(parts) else None
