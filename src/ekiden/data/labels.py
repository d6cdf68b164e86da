"""Make one list of classes for samples that several people have labelled."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ekiden.base.errors import UserError
from ekiden.data.raw import codes, natural
from ekiden.data.samples import Dataset, Samples
from ekiden.data.tasks import Classification, named, scaled

_SHOWN = 8  # labels in a message


def by_name(names: Sequence[str], what: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return numbers (n,) for labels that are names, and the names in the order of the numbers."""
    (numbers,), order = codes([np.array(names, dtype=np.str_)], (), "label", what)
    return numbers, order


def unify(
    parts: Sequence[Samples], whats: Sequence[str], classes: Sequence[str] | None
) -> tuple[list[Samples], tuple[str, ...]]:
    """Give all parts one meaning of each label.

    Labels with names (`Samples.classes`) are matched by name, in the order that all parts share, or else sorted.
    Labels without names are numbers of classes.

    Args:
        parts: samples of silos and test sets.
        whats: name of each part in messages.
        classes: names of all classes in their order, or None.

    Returns:
        The parts with their labels as positions in the names, and the names.
    """
    if classes is not None:
        order = tuple(classes)
    elif any(not _numerals(part) for part in parts):
        if not all(part.classes for part in parts):
            one = next(what for part, what in zip(parts, whats, strict=True) if not _numerals(part))
            other = next(what for part, what in zip(parts, whats, strict=True) if not part.classes)
            raise UserError(
                f"the labels of {one} are names, but those of {other} are numbers of unknown classes: use "
                "names everywhere, or name the classes in order by classes="
            )
        first = parts[0].classes
        together = {name for part in parts for name in part.classes}
        order = first if all(p.classes == first for p in parts) else tuple(sorted(together, key=natural))
    else:
        order = _numbers(parts)
    return [_renumbered(part, what, order) for part, what in zip(parts, whats, strict=True)], order


def meant(dataset: Dataset, task: str) -> Dataset:
    """Return the data set with its labels as labels of `task`: for a regression, integers become numbers."""
    if not task or dataset.task.kind == task:
        return dataset
    if task != "regression" or not isinstance(dataset.task, Classification):
        raise UserError(f"the labels of {dataset.name} are of {dataset.task.kind}, not of {task}: leave out --task")
    try:
        values = torch.tensor([float(name) for name in dataset.classes])
    except ValueError:
        raise UserError(
            f"the labels of {dataset.name} are names, but regression needs numbers: leave out --task"
        ) from None
    names = ("target",)
    train, test = (replace(part, y=values[part.y], classes=names) for part in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, classes=names, task=scaled(named(task), train.y))


def refuse_constant(y: torch.Tensor, names: Sequence[str]) -> None:
    """Refuse numbers to predict (n,) or (n, K) of which one is the same for all samples."""
    columns = y if y.ndim == 2 else y[:, None]
    for name, column in zip(names, columns.T, strict=True):
        if len(column) and bool((column == column[0]).all()):
            raise UserError(f"the label {name!r} is {column[0]:g} in all training rows: name a label that varies")


def missing(present: set[int], high: int) -> str:
    """Return the numbers from 0 to `high` that are not present, as text for a message; empty if all are present."""
    gaps = [str(k) for k in range(high + 1) if k not in present]
    return ", ".join(gaps[:_SHOWN]) + (", ..." if len(gaps) > _SHOWN else "")


def _numerals(part: Samples) -> bool:
    """Return whether the labels have no names, or names that are these numbers."""
    return part.classes == tuple(str(k) for k in range(len(part.classes)))


def _present(part: Samples) -> list[int]:
    """Return the labels that occur, in order."""
    return [int(label) for label in np.unique(part.y.cpu().numpy())]


def _numbers(parts: Sequence[Samples]) -> tuple[str, ...]:
    """Return the names of numbered classes. Their count comes from the parts' own names, or else from the labels."""
    present = {label for part in parts for label in _present(part)}
    known = max(len(part.classes) for part in parts)
    high = max(present)
    if high >= known and (gaps := missing(present, high)):
        raise UserError(
            f"no client has a sample with label {gaps}, but the largest label is {high}: number the labels from 0 "
            "without gaps, or name all classes by classes="
        )
    return tuple(str(k) for k in range(max(high + 1, known)))


def _renumbered(part: Samples, what: str, order: tuple[str, ...]) -> Samples:
    if _numerals(part) and not (part.classes and set(part.classes) <= set(order)):
        if (high := int(part.y.max())) >= len(order):
            raise UserError(
                f"label {high} has no name among the {len(order)} classes ({what}): name them all, or give no names"
            )
        return replace(part, classes=order)
    place = {name: i for i, name in enumerate(order)}
    used = [part.classes[label] for label in _present(part)]
    if strange := next((name for name in used if name not in place), None):
        raise UserError(f"label {strange!r} of {what} is not among the classes: {', '.join(order)}")
    places = torch.tensor([place.get(name, -1) for name in part.classes])
    return replace(part, y=places[part.y], classes=order)
