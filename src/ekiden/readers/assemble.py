"""Make a data set of what sources hold: the last step for files, frames, and data that are already
in Python.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base.checks import checked
from ekiden.core.base.errors import UserError, counted, unknown
from ekiden.core.data.augment import Augment
from ekiden.core.data.inputs import Encoding
from ekiden.core.data.samples import Dataset, Samples
from ekiden.core.tasks import Classification, LanguageModelling, ScaledTask, Task, scaled
from ekiden.core.tasks.base import IGNORED
from ekiden.readers import holdout
from ekiden.readers import schema as schemas
from ekiden.readers.columns import Reading
from ekiden.readers.holdings import Holding, Source, hold, silo_name
from ekiden.readers.inspector import inspector
from ekiden.readers.kinds import Images, Inputs, Tokens, of_tensor
from ekiden.readers.kinds.images import sized_masks
from ekiden.readers.targets import refuse_constant, targets
from ekiden.readers.undecoded import Raw, composed, owners, subjects, times

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
        train: (x, y), or a map-style dataset of such pairs. x: uint8 images (n, C, H, W) or (n, H,
            W), or float features or images of any shape (n, ...), which are used unchanged; y:
            integers, or class names (an array of strings). Samples from `load`, and data sets of
            Hugging Face, keep their class names. Or the labels of another task, see `task`.
            `Samples` may say whom each sample is about, and when it was taken (`subject`, `time`).
        test: the same for test data; None holds out 20 % of each class, with a fixed seed: whole
            subjects, or the most recent samples, if they are known.
        name: name of the data set.
        classes: class names in the order of the outputs; integer labels are positions in it. None
            means all names in `train` and `test`, sorted, or 0 to the largest label, each of which
            must have a sample.
        mean: per channel, subtracted after scaling bytes to [0, 1].
        std: per channel, divided by.
        augment: how training batches are augmented.
        task: the task, which says what the labels mean, or its name; None infers it from the labels
            (`ekiden.core.tasks.inferred`). Targets of a regression are standardised by the training
            samples' moments.

    Raises:
        UserError: there are no samples, NaN, labels that are not classes, names mixed with numbers,
            or shapes that do not fit.
    """
    holding = hold(train, Reading(), what="train")
    if test is not None:
        holding = replace(holding, test=hold(test, Reading(), what="test").train)
    made = assemble([holding], AskedData(name, task=task, classes=classes))
    return replace(made, mean=tuple(mean), std=tuple(std), augment=augment or Augment())


@dataclass(frozen=True)
class AskedData:
    """Which data set the user asks for."""

    # its name
    name: str
    # how sources are read
    reading: Reading = field(default_factory=Reading)
    # side of images in pixels
    size: int | None = None
    # the task or its name; None or "" infers it from the labels
    task: Task | str | None = None
    like: Dataset | None = (
        # a data set whose classes, scaling and task are used, to measure a model on other data
        None
    )
    # what samples become, if the silos have agreed on that
    inputs: Inputs | None = None
    classes: Sequence[str] | None = (
        None  # names of the outputs in their order, if the user gave some
    )
    # names of the domains in their order, if the sources do not name them
    domains: tuple[str, ...] = ()
    # warn of what may be wrong with the data
    doubt: bool = True
    # whether all samples of a source without a test part are for the test
    whole: bool = False
    # natural owners whose rows are left out
    without: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the samples of `like`; () without it."""
        return () if self.like is None else self.like.shape

    def __post_init__(self) -> None:
        """Check what is asked for, and take the rest from `like`, or from the schema."""
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise UserError(
                f"size is the side of the images in pixels, 1 or more; it is {self.size!r}."
            )
        if self.like is not None:
            object.__setattr__(self, "inputs", self.like.inputs)
        elif self.reading.schema:
            schema = schemas.read(self.reading.schema)
            named = getattr(self.task, "kind", self.task)
            if named and schema.task and named != schema.task:
                raise UserError(
                    f"the schema's label is for {schema.task}, not for {named}: leave out the task"
                )
            if self.classes and schema.classes and tuple(self.classes) != schema.classes:
                raise UserError(
                    f"the schema has the classes {', '.join(schema.classes)}: leave out the list "
                    "of classes"
                )
            object.__setattr__(self, "task", self.task or schema.task)
            object.__setattr__(self, "classes", self.classes or schema.classes)
        if self.classes is not None:
            object.__setattr__(self, "classes", composed(self.classes))


def assemble(holdings: Sequence[Holding], asked: AskedData, test: Raw | None = None) -> Dataset:
    """Return one data set of what all sources hold. The samples of a source with a name (a silo)
    are a group.

    Without `test`, the test part of all sources, 20 % of each source that has none is held out,
    evenly from all (domain, group, label).
    """
    like = asked.like
    reading = asked.reading
    raws, owned = _parts_of(holdings, test)
    _refuse_mixtures(raws)
    raws = [_with_masks(raw, asked) for raw in _without_owners(raws, asked.without)]
    silos = tuple(dict.fromkeys(filter(None, owned)))
    if silos and reading.group_column:
        raise UserError(
            "several silos and --group-column both say which client holds what: give one of them"
        )
    if like is None or reading.spelling == "merge":
        named = like.classes if like is not None else asked.classes or ()
        raws = inspector().names(raws, owned, reading.spelling, named, asked.inputs)
    y, outputs, task = targets(raws, asked.task, like, asked.classes)
    if isinstance(task, Classification) and like is None and not asked.classes:
        inspector().classes(raws, owned, reading.spelling)
    domain, domains = owners("domain", raws, asked.domains)
    group, groups = owners("group", raws)
    if silos:
        groups = silos
        group = [_silo_of(raw, name, silos) for raw, name in zip(raws, owned, strict=True)]
    elif reading.group_column:
        groups = _names_of_silos(groups)
    else:
        # numbers of an array do not name silos
        groups = ()
    pieces = [
        (raw, Samples(labels, labels, place, owner, subject=who, time=when))
        for raw, labels, place, owner, who, when in zip(
            raws, y, domain, group, subjects(raws), times(raws), strict=True
        )
    ]
    sides: tuple[Sequence[_Piece], Sequence[_Piece]] = pieces[:-1], pieces[-1:]
    if test is None:
        sides = _sides(holdings, pieces, task, whole=asked.whole)
    train, held, inputs, task = _encoded(sides, asked, outputs, task)
    made = Dataset(
        asked.name,
        train,
        held,
        outputs,
        domains,
        named=bool(asked.classes),
        task=task,
        inputs=inputs,
        groups=groups,
    )
    if like is not None:
        return replace(made, mean=like.mean, std=like.std)
    if asked.doubt and train is not held:
        inspector().data(
            made,
            raws,
            reading,
            unscaled=asked.inputs is None,
            given=test is not None or any(holding.test is not None for holding in holdings),
        )
    # until the clients agree; partitions divide by it
    if isinstance(task, ScaledTask):
        refuse_constant(task.measured(train.y), outputs)
        made = replace(made, task=scaled(task, train.y))
    open_ = (made.inputs.agreed and asked.inputs is None) or isinstance(task, ScaledTask)
    if not open_ or raws[0].given:
        return made
    return replace(made, least=reading.min_count)


def _parts_of(holdings: Sequence[Holding], test: Raw | None) -> tuple[list[Raw], list[str]]:
    """Return the parts of all sources and the silo of each; "" without one."""
    raws = list[Raw]()
    owned = list[str]()
    for holding in holdings:
        raws += holding.parts
        owned += [holding.name] * len(holding.parts)
    if test is not None:
        raws.append(test)
        owned.append("")
    return raws, owned


def _silo_of(raw: Raw, name: str, silos: Sequence[str]) -> Tensor | None:
    """Return the number (n,) of the silo for each sample; None for the test part of all."""
    if not name:
        return None
    return torch.full((len(raw),), silos.index(name))


def _without_owners(raws: Sequence[Raw], names: Collection[str]) -> Sequence[Raw]:
    """Return the parts without the rows of these natural owners, before anything follows from
    them.
    """
    if not names:
        return raws
    owned = [*map(_clients_of, raws)]
    known = set(chain(*owned))
    for name in names:
        if name not in known:
            raise unknown("client", name, known)
    left = [np.flatnonzero(~np.isin(clients, list(names))) for clients in owned]
    return [*map(Raw.taken, raws, left)]


def _clients_of(raw: Raw) -> list[str]:
    """Return the client that holds each row; none if rows have no natural owners."""
    if raw.group is None:
        return []
    return [*map(silo_name, map(str, raw.group))]


def _with_masks(raw: Raw, asked: AskedData) -> Raw:
    """Return a part with its masks, if labels are such, at the size of its images."""
    if raw.kind is not Images or (raw.label.ndim != 3 and raw.label.dtype != object):
        return raw
    images = asked.inputs
    if not isinstance(images, Images):
        images = asked.reading.images(asked.size)
    return replace(raw, label=sized_masks(raw.label, images.for_shape(asked.shape), raw.source))


def _encoded(
    sides: Sequence[Sequence[_Piece]], asked: AskedData, outputs: tuple[str, ...], task: Task
) -> tuple[Samples, Samples, Inputs, Task]:
    """Return the samples for training and for the test, what they are, and their task."""
    first = sides[0][0][0]
    known = asked.inputs
    if not isinstance(known, first.kind):
        known = None
    wanted = Encoding(asked.reading, asked.size, known, asked.shape)
    different = sides
    if sides[0] is sides[1]:
        # without a test part, all samples are for the test: encoded once
        different = sides[:1]
    x, kind = first.kind.assembled([*map(_raws, different)], wanted)
    encoded = [_together(each, side, outputs) for each, side in zip(x, different, strict=True)]
    train = encoded[0]
    test = encoded[-1]
    if isinstance(task, LanguageModelling) and not first.given:
        tokens = cast(Tokens, kind)
        task = replace(task, vocabulary=tokens.vocabulary)
        train, test = (
            replace(s, y=s.x.masked_fill(s.x == tokens.pad, IGNORED)) for s in (train, test)
        )
    for part in (train, test):
        task.check_samples(part.x, part.y, first.source)
    return train, test, kind or of_tensor(train.x), task


def _raws(side: Sequence[_Piece]) -> list[Raw]:
    return [raw for raw, _ in side]


def _names_of_silos(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the owners' names as names of silos, all different."""
    names = tuple(map(silo_name, groups))
    if len(set(names)) == len(names):
        return names
    return tuple(f"{name}-{k}" for k, name in enumerate(names))


def _sides(
    holdings: Sequence[Holding], pieces: Sequence[_Piece], task: Task, *, whole: bool
) -> tuple[Sequence[_Piece], Sequence[_Piece]]:
    """Return the parts for training and for the test: as the sources say, or held out.

    With `whole`, sources of which none has a test part are the same part twice.
    """
    if whole and len(pieces) == len(holdings):
        return pieces, pieces
    given = iter(pieces)
    sources = [[*islice(given, len(holding.parts))] for holding in holdings]
    divided = iter(_held_out([parts[0] for parts in sources if len(parts) == 1], task))
    train = list[_Piece]()
    test = list[_Piece]()
    for parts in sources:
        own, held = parts if len(parts) == 2 else next(divided)
        train.append(own)
        # a small source may have nothing to hold out
        if len(held[1]):
            test.append(held)
    if not test:
        raw = pieces[0][0]
        raise UserError(
            f"{raw.source} has only {counted(len(raw), 'sample')}, too few to hold out a test "
            "part: give a test set"
        )
    return train, test


def augmented(dataset: Dataset, reading: Reading) -> Dataset:
    """Return the data set with the augmentation that the user chose, or else with its own."""
    if not reading.augment.active:
        return dataset
    if len(dataset.shape) != 3:
        raise UserError(
            "--augment-crop, --augment-flip and --augment-rotation are for images, but these "
            f"samples have shape {dataset.shape}: leave them out"
        )
    return replace(dataset, augment=reading.augment)


def _refuse_mixtures(raws: Sequence[Raw]) -> None:
    """Refuse parts of several kinds, or of which only some have subjects or times."""
    for raw in raws[1:]:
        if raw.kind != raws[0].kind:
            raise UserError(
                f"{raws[0].source} holds {raws[0].kind.words}, {raw.source} {raw.kind.words}: give "
                "one kind"
            )
    for name in ("subject", "time"):
        lacking = {getattr(raw, name) is None: raw.source for raw in raws}
        if len(lacking) > 1:
            raise UserError(
                f"samples of {lacking[False]} have a {name}, those of {lacking[True]} none: give "
                "it for all"
            )


def _held_out(sources: Sequence[_Piece], task: Task) -> list[tuple[_Piece, _Piece]]:
    """Divide each source into a training part and a test part. A subject of several sources is not
    divided either.
    """
    if not sources:
        return []
    each = [samples for _, samples in sources]
    strata = [scaled(task, s.y).strata(s.y) for s in each]
    rows = holdout.hold_out(each, strata, sources[0][0].source)
    return [
        (_piece_of(source, train), _piece_of(source, test))
        for source, (train, test) in zip(sources, rows, strict=True)
    ]


def _piece_of(source: _Piece, rows: Tensor) -> _Piece:
    """Return these rows of a source."""
    raw, samples = source
    # a part without samples is left out later, and none can be read of it
    if len(rows):
        raw = raw.taken(rows.numpy())
    return raw, samples.taken(rows)


def _together(x: Tensor, side: Sequence[_Piece], classes: tuple[str, ...]) -> Samples:
    """Return the encoded samples `x` of one side, with their labels and owners."""
    whole: dict[str, Any] = {}
    for name in ("y", "domain", "group", "subject", "time"):
        parts = [getattr(samples, name) for _, samples in side]
        if all(part is not None for part in parts):
            whole[name] = torch.cat(parts)
    return Samples(x, classes=classes, **whole)
