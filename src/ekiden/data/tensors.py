"""Make data sets from data that are already in Python: tensors, arrays and map-style datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.checks import checked
from ekiden.base.errors import UserError
from ekiden.base.wording import row_text
from ekiden.data import apart
from ekiden.data.augment import Augment
from ekiden.data.given import NamedPairs, recognised
from ekiden.data.labels import by_name, refuse_constant, unify
from ekiden.data.samples import Dataset, Samples
from ekiden.data.tasks import (
    Classification,
    LanguageModelling,
    Regression,
    Task,
    inferred,
    named,
    names_of,
    scaled,
)


class Pairs(Protocol):
    """A map-style dataset of (x, y) pairs, such as those of torch."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """(x, y) of one sample."""
        ...


Source: TypeAlias = tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | Samples | Pairs
"""(x, y) with x (n, ...) and y (n,), or a map-style dataset of such pairs."""


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
    sources = {"train": train} | ({} if test is None else {"test": test})
    parts, names, meant = labelled(sources, classes, task)
    if len(parts) == 1:
        parts = [side[0] for side in held_out({"train": parts[0]}, meant)]
    return made_of(parts[0], parts[1], name=name, classes=names, mean=mean, std=std, augment=augment, task=meant)


def made_of(
    train: Samples,
    test: Samples,
    *,
    name: str,
    classes: tuple[str, ...],
    mean: Sequence[float],
    std: Sequence[float],
    augment: Augment | None,
    task: Task,
) -> Dataset:
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        raise UserError(
            f"training samples are {_kind(train)}, but test samples {_kind(test)}: give both one shape and type."
        )
    if isinstance(task, Regression):
        refuse_constant(train.y, classes)
    return Dataset(name, train, test, classes, (), tuple(mean), tuple(std), augment or Augment(), scaled(task, train.y))


def _kind(s: Samples) -> str:
    return f"{str(s.x.dtype).removeprefix('torch.')} of shape {tuple(s.x.shape[1:])}"


def held_out(parts: Mapping[str, Samples], task: Task) -> tuple[list[Samples], list[Samples]]:
    """Divide each of some samples, by their names in messages, into training and test samples.

    No subject is divided, also if it is in several of them.
    """
    strata = [scaled(task, s.y).strata(s.y) for s in parts.values()]
    rows = apart.hold_out(list(parts.values()), strata, ", ".join(parts))
    for (what, s), (_, chosen) in zip(parts.items(), rows, strict=True):
        if not len(chosen) and s.subject is None and s.time is None:
            raise UserError(f"{what} has only {len(s)} samples, too few to hold out a test part: give a test set.")
    train, test = ([s.taken(each[side]) for s, each in zip(parts.values(), rows, strict=True)] for side in (0, 1))
    return train, test


def concatenated(parts: list[Samples]) -> Samples:
    kinds = [_kind(p) for p in parts]
    odd = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise UserError(f"silo {odd} holds {kinds[odd]}, but silo 0 {kinds[0]}: all must have one shape and type.")
    return Samples(
        torch.cat([p.x for p in parts]),
        torch.cat([p.y for p in parts]),
        classes=parts[0].classes,
        subject=None if parts[0].subject is None else torch.cat([p.subject for p in parts if p.subject is not None]),
        time=None if parts[0].time is None else torch.cat([p.time for p in parts if p.time is not None]),
    )


def labelled(
    sources: Mapping[str, Source], classes: Sequence[str] | None, task: Task | str | None
) -> tuple[list[Samples], tuple[str, ...], Task]:
    """Return the samples of all sources with labels of one meaning, the names of the outputs, and the task.

    Args:
        sources: the sources by their names in messages.
        classes: names of the classes, if the user gave some.
        task: the task, its name, or None.
    """
    wanted = named(task) if isinstance(task, str) else task
    raw = [_samples(source, what, wanted) for what, source in sources.items()]
    for name in ("subject", "time"):
        lacking = {getattr(part, name) is None: what for part, what in zip(raw, sources, strict=True)}
        if len(lacking) > 1:
            raise UserError(
                f"samples of {lacking[False]} have a {name}, those of {lacking[True]} none: give it for all"
            )
    if wanted is None:
        # One silo by itself may look like another task: each of its samples may have exactly one of two labels.
        found = [Classification() if part.classes else inferred(part.y, part.x) for part in raw]
        wanted = next((one for one in found if not isinstance(one, Classification)), found[0])
    if isinstance(wanted, LanguageModelling) and not wanted.vocabulary and classes is None:
        wanted = replace(wanted, vocabulary=max(int(max(part.y.max(), part.x.max())) for part in raw) + 1)
    meant: Task = wanted
    parts = [replace(part, y=meant.labels(part.y, len(part.x), what)) for part, what in zip(raw, sources, strict=True)]
    if isinstance(meant, Classification):
        parts, names = unify(parts, list(sources), classes)
        return parts, names, meant
    if len({part.y.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(f"{what}: {tuple(part.y.shape)}" for what, part in zip(sources, parts, strict=True))
        raise UserError(f"the labels differ in shape ({shapes}): give all samples the same labels")
    names = names_of(meant, torch.cat([part.y for part in parts]), classes)
    return [replace(part, classes=names) for part in parts], names, meant


def _samples(source: Source, what: str, task: Task | None) -> Samples:
    source = recognised(source, what)
    names: tuple[str, ...] = ()
    subject = time = None
    if isinstance(source, Samples):
        x, y, names = source.x, source.y, source.classes
        subject, time = _for_each(source.subject, x, f"subject of {what}"), _for_each(source.time, x, f"time of {what}")
        if subject is not None and subject.is_floating_point():
            raise UserError(f"subject of {what} holds fractions: number the subjects by integers")
    elif isinstance(source, tuple) and len(source) == 2 and all(isinstance(s, Tensor | np.ndarray) for s in source):
        x, labels = torch.as_tensor(source[0]), source[1]
        if isinstance(labels, np.ndarray) and labels.ndim == 1 and all(isinstance(label, str) for label in labels):
            y, names = by_name(labels.tolist(), what)
        else:
            y = torch.as_tensor(labels)
    elif isinstance(source, NamedPairs):
        x, y, _ = _collect(source.pairs, what, task)
        names = source.classes
    else:
        x, y, names = _collect(source, what, task)
    x = x.long() if _tokens(x, y) else _inputs(x, what)
    if len(y) != len(x):
        raise UserError(
            f"{what} has {len(x)} samples and {len(y)} labels: it must hold {len(x)} integers or other labels"
        )
    return Samples(x, y, classes=names, subject=subject, time=time)


def _for_each(values: Any, x: Tensor, what: str) -> Tensor | None:
    """Return numbers (n,), one for each sample."""
    if values is None:
        return None
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} must be numbers ({error}): number names first") from None
    if numbers.shape != (len(x),) or not torch.isfinite(numbers).all():
        raise UserError(f"{what} has shape {tuple(numbers.shape)}: give one finite number for each of {len(x)} samples")
    return numbers if numbers.is_floating_point() else numbers.long()


def _collect(pairs: Pairs, what: str, task: Task | None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    names: tuple[str, ...] = ()
    try:
        items = [pairs[i] for i in range(len(pairs))] if hasattr(pairs, "__len__") else [*iter(pairs)]
        xs, ys = [x for x, _ in items], [y for _, y in items]
        if ys and all(isinstance(y, str) for y in ys):
            labels, names = by_name(ys, what)
        else:
            labels = _numbers(ys, task)
        tensors = [x if isinstance(x, Tensor) else _array(x) for x in xs]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{what} must be tensors (x, y) or a map-style dataset of pairs (x, y), y integers or names ({error})."
        ) from error
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) > 1:
        raise UserError(f"samples of {what} differ in shape ({', '.join(map(str, sorted(shapes)[:3]))}): resize them.")
    return (torch.stack(tensors) if tensors else torch.empty(0)), labels, names


def _array(x: Any) -> Tensor:
    """Return an array, a number, a list, or a PIL image (its channels come last) as a tensor."""
    channels_last = hasattr(x, "getbands") and len(x.getbands()) > 1
    tensor = torch.from_numpy(np.array(x))
    return tensor.permute(2, 0, 1) if channels_last else tensor


def _inputs(x: Tensor, what: str) -> Tensor:
    if len(x) == 0 or x.ndim < 2:
        raise UserError(f"{what} has x of shape {tuple(x.shape)}: it must be (n, ...) with n at least 1.")
    if x.dtype == torch.uint8 and x.ndim in (3, 4):
        return x.unsqueeze(1) if x.ndim == 3 else x
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise UserError(
            f"{what} has {kind} x of shape {tuple(x.shape)}: give uint8 images (n, C, H, W) or float values."
        )
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    if bad.any():
        raise UserError(
            f"{what} has NaN or infinity in {row_text(int(bad.nonzero()[0]))}: remove or replace such values."
        )
    return x.float()


def _tokens(x: Tensor, y: Tensor) -> bool:
    """Return whether these are texts (n, L) for a language model: their labels are the tokens themselves."""
    return isinstance(inferred(y, x), LanguageModelling)


def _numbers(ys: Sequence[Any], task: Task | None) -> Tensor:
    """Return the labels of pairs: whole numbers as int64, other numbers and arrays unchanged."""
    if any(np.ndim(y) for y in ys):
        return torch.stack([torch.as_tensor(y) for y in ys])
    values = [y.item() if isinstance(y, Tensor) else y for y in ys]
    if isinstance(task, Regression) or (task is None and any(int(value) != value for value in values)):
        return torch.tensor([float(value) for value in values])
    return torch.tensor([int(value) for value in values], dtype=torch.int64)
