"""Make a data set of what sources hold: the last step for files, frames, and data that are already in Python."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ekiden.base.checks import checked
from ekiden.base.errors import UserError, counted
from ekiden.data import doubts, holdout
from ekiden.data import schema as schemas
from ekiden.data.augment import Augment
from ekiden.data.columns import Reading
from ekiden.data.holdings import Holding, Source, hold, silo_name
from ekiden.data.kinds import Inputs, Tokens, of_tensor
from ekiden.data.moments import check_values, some
from ekiden.data.samples import Dataset, Samples
from ekiden.data.schema import Schema
from ekiden.data.spelling import check_classes, spelled
from ekiden.data.targets import refuse_constant, targets
from ekiden.data.tasks import Classification, LanguageModelling, Regression, ScaledTask, Task, scaled
from ekiden.data.tasks.base import IGNORED
from ekiden.data.undecoded import Encoding, Raw, composed, owners, subjects, times

_Piece: TypeAlias = tuple[Raw, Samples]
"""a part of a source, with its labels and owners; the samples' x is not read yet"""


@checked("train", "test", "task")
def from_tensors(
    train: Source,
    test: Source | None = None,
    *,
    name: str = "own data",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    augment: Augment | None = None,
    task: Task | str | None = None,
) -> Dataset:
    """Make a data set from tensors or map-style datasets.

    Args:
        train: (x, y), or a map-style dataset of such pairs. x: uint8 images (n, C, H, W) or (n, H, W), or
            float features or images of any shape (n, ...), which are used unchanged; y: integers, or class names
            (an array of strings). Samples from `load`, and data sets of Hugging Face, keep their class names. Or the
            labels of another task, see `task`. `Samples` may say whom each sample is about, and when it was taken
            (`subject`, `time`).
        test: the same for test data; None holds out 20 % of each class, with a fixed seed: whole subjects, or the most
            recent samples, if they are known.
        name: name of the data set.
        classes: class names in the order of the outputs; integer labels are positions in it. None means all names in
            `train` and `test`, sorted, or 0 to the largest label, each of which must have a sample.
        mean: per channel, subtracted after scaling bytes to [0, 1].
        std: per channel, divided by.
        augment: how training batches are augmented.
        task: the task, which says what the labels mean, or its name; None infers it from the labels
            (`ekiden.data.tasks.inferred`). Targets of a regression are standardised by the training samples' moments.

    Raises:
        UserError: there are no samples, NaN, labels that are not classes, names mixed with numbers, or shapes that do
            not fit.
    """
    holding = hold(train, Reading(), what="train")
    if test is not None:
        holding = replace(holding, test=hold(test, Reading(), what="test").train)
    made = assemble([holding], Reading(), name=name, task=task, classes=classes)
    return replace(made, mean=tuple(mean), std=tuple(std), augment=augment or Augment())


def assemble(
    holdings: Sequence[Holding],
    reading: Reading,
    *,
    name: str,
    size: int | None = None,
    task: Task | str | None = None,
    like: Dataset | None = None,
    inputs: Inputs | None = None,
    classes: Sequence[str] | None = None,
    domains: tuple[str, ...] = (),
    test: Raw | None = None,
    doubt: bool = True,
) -> Dataset:
    """Return one data set of what all sources hold. The samples of a source with a name (a silo) are a group.

    If a source has no test part, 20 % of it is held out, evenly from all (domain, group, label).

    Args:
        holdings: the sources.
        reading: how they were read.
        name: name of the data set.
        size: side of images in pixels.
        task: the task or its name; None or "" infers it from the labels.
        like: a data set whose classes, scaling and task are used, to measure a model on other data.
        inputs: what samples become, if the silos have agreed on that.
        classes: names of the outputs in their order, if the user gave some.
        domains: names of the domains in their order, if the sources do not name them.
        test: a test part of all sources, which then have none of their own.
        doubt: warn of what may be wrong with the data.
    """
    if reading.schema and like is None:
        task, classes = _of_schema(schemas.read(reading.schema), task, classes)
    parts = [holding.parts for holding in holdings]
    raws = [part for each in parts for part in each] + ([] if test is None else [test])
    _alike(raws)
    silos = tuple(holding.name for holding in holdings if holding.name)
    if silos and reading.group_column:
        raise UserError("several silos and --group-column both say which client holds what: give one of them")
    classes = None if classes is None else composed(classes)
    owned = [holding.name for holding, each in zip(holdings, parts, strict=True) for _ in each]
    owned += [""] * (test is not None)
    known = inputs if like is None else like.inputs
    named_ = like.classes if like is not None else classes or ()
    if like is None or reading.spelling == "merge":
        raws = spelled(raws, owned, reading.spelling, named_, known)
    y, outputs, chosen = targets(raws, task, like, classes)
    if isinstance(chosen, Classification) and like is None and not classes:
        check_classes(raws, owned, reading.spelling)
    domain, domains = owners("domain", raws, domains)
    group, groups = _silos(silos, parts, raws) if silos else owners("group", raws)
    found = zip(raws, y, domain, group, subjects(raws), times(raws), strict=True)
    pieces = [
        (raw, Samples(labels, labels, place, owner, subject=who, time=when))
        for raw, labels, place, owner, who, when in found
    ]
    sides = (pieces[:-1], pieces[-1:]) if test is not None else _sides(parts, pieces, chosen)
    x, kind = raws[0].kind.assembled(
        [[raw for raw, _ in side] for side in sides],
        Encoding(reading, size, known if isinstance(known, raws[0].kind) else None, () if like is None else like.shape),
    )
    train, held = (_together(tensor, side, outputs) for tensor, side in zip(x, sides, strict=True))
    if isinstance(chosen, LanguageModelling) and not raws[0].given:
        tokens = cast(Tokens, kind)
        chosen = replace(chosen, vocabulary=tokens.vocabulary)
        train, held = (replace(s, y=s.x.masked_fill(s.x == tokens.pad, IGNORED)) for s in (train, held))
    groups = groups if silos else _unlike(groups) if reading.group_column else ()
    made = Dataset(name, train, held, outputs, domains, task=chosen, inputs=kind or of_tensor(train.x), groups=groups)
    if like is not None:
        return replace(made, mean=like.mean, std=like.std)
    if doubt:
        given = test is not None or any(len(each) > 1 for each in parts)
        _doubt(made, raws, reading, tables=known is None, test_given=given)
    if isinstance(chosen, ScaledTask):  # until the clients agree; partitions divide by it
        refuse_constant(chosen.measured(train.y), outputs)
        made = replace(made, task=scaled(chosen, train.y))
    open_ = (made.inputs.agreed and known is None) or isinstance(chosen, ScaledTask)
    return replace(made, least=reading.min_count if open_ and not raws[0].given else 0)


def _of_schema(
    schema: Schema, task: Task | str | None, classes: Sequence[str] | None
) -> tuple[Task | str | None, Sequence[str] | None]:
    """Return task and classes as the schema says."""
    named = task.kind if isinstance(task, Task) else task
    if named and schema.task and named != schema.task:
        raise UserError(f"the schema's label is for {schema.task}, not for {named}: leave out the task")
    if classes and schema.classes and tuple(classes) != schema.classes:
        raise UserError(f"the schema has the classes {', '.join(schema.classes)}: leave out the list of classes")
    return task or schema.task, classes or schema.classes


def _doubt(made: Dataset, raws: Sequence[Raw], reading: Reading, *, tables: bool, test_given: bool) -> None:
    """Say what may be wrong with the data."""
    if raws[0].kind.agreed and tables and not reading.feature_columns:
        doubts.ids_among_features(raws)
    doubts.copied_labels(made, raws[0].targets)
    if isinstance(made.task, Regression) and raws[0].kind.agreed and len(raws[0].targets) == 1:
        doubts.times_without_events(made, raws[0].targets[0])
    doubts.names_of_missing(made, raws)
    doubts.slices_of_files(raws)
    if reading.group_column:
        doubts.small_groups(raws, reading.group_column)
    if test_given:
        doubts.shared_subjects(made.train, made.test)
        doubts.early_tests(made.train, made.test)
        check_values({"the training part": made.train.x, "the test part": made.test.x}, made.inputs)
    doubts.rows_in_both(made.train, made.test, made.inputs, given=test_given)
    if isinstance(made.task, Classification):
        doubts.classes_in_test_only(made.train, made.test, made.classes)
    if made.groups and made.train.x[0].numel() >= doubts.FEATURES:
        doubts.rows_of_several(doubts.by_group(made))
    if (group := made.train.group) is not None and not made.inputs.agreed:  # what silos report of tables comes later
        rows = {name: (group == k).nonzero()[:, 0] for k, name in enumerate(made.groups)}
        check_values({name: made.train.x[some(here)] for name, here in rows.items() if len(here)}, made.inputs)


def _silos(
    names: tuple[str, ...], held: Sequence[Sequence[Raw]], raws: Sequence[Raw]
) -> tuple[list[Tensor | None], tuple[str, ...]]:
    """Return the silo of each sample, None for a test part of all silos; and the silos' names."""
    group: list[Tensor | None] = [torch.full((len(part),), k) for k, parts in enumerate(held) for part in parts]
    return [*group, *[None] * (len(raws) - len(group))], names


def _unlike(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the owners' names as names of silos, all different."""
    names = tuple(map(silo_name, groups))
    return names if len(set(names)) == len(names) else tuple(f"{name}-{k}" for k, name in enumerate(names))


def _sides(held: Sequence[Sequence[Raw]], pieces: Sequence[_Piece], task: Task) -> tuple[list[_Piece], list[_Piece]]:
    """Return the parts for training and for the test: as the sources say, or held out."""
    given = iter(pieces)
    sources = [[next(given) for _ in parts] for parts in held]
    divided = iter(_held_out([parts[0] for parts in sources if len(parts) == 1], task))
    pairs = [parts if len(parts) == 2 else next(divided) for parts in sources]
    train, test = [part for part, _ in pairs], [part for _, part in pairs if len(part[1])]
    if not test:
        raw = pieces[0][0]
        raise UserError(
            f"{raw.source} has only {counted(len(raw), 'sample')}, too few to hold out a test part: give a test set"
        )
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
                f"{raws[0].source} holds {raws[0].kind.words}, {raw.source} {raw.kind.words}: give one kind"
            )
    for name in ("subject", "time"):
        lacking = {getattr(raw, name) is None: raw.source for raw in raws}
        if len(lacking) > 1:
            raise UserError(
                f"samples of {lacking[False]} have a {name}, those of {lacking[True]} none: give it for all"
            )


def _held_out(sources: Sequence[_Piece], task: Task) -> list[list[_Piece]]:
    """Divide each source into a training part and a test part. A subject of several sources is not divided either."""
    each = [samples for _, samples in sources]
    strata = [scaled(task, s.y).strata(s.y) for s in each]
    rows = holdout.hold_out(each, strata, sources[0][0].source) if sources else []
    return [
        [(raw.taken(part.numpy()) if len(part) else raw, samples.taken(part)) for part in parts]
        for (raw, samples), parts in zip(sources, rows, strict=True)
    ]


def _together(x: Tensor, side: Sequence[_Piece], classes: tuple[str, ...]) -> Samples:
    """Return the encoded samples `x` of one side, with their labels and owners."""
    each = {name: [getattr(s, name) for _, s in side] for name in ("y", "domain", "group", "subject", "time")}
    whole: dict[str, Any] = {
        k: None if any(v is None for v in parts) else torch.cat(parts) for k, parts in each.items()
    }
    return Samples(x, classes=classes, **whole)
