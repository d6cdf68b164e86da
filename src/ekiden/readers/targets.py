"""Find out what labels mean, the same for every source: the task, the names of the outputs, and
tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError, listed, unknown
from ekiden.core.data.samples import Dataset
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    ScaledTask,
    Segmentation,
    Survival,
    Task,
    inferred,
    named,
    names_of,
    scaled,
)
from ekiden.core.tasks.base import IGNORED
from ekiden.core.tasks.labels import PlacesTask
from ekiden.readers.cells import warn_of_marks
from ekiden.readers.undecoded import Raw, natural

# labels in a message
_SHOWN = 8


def targets(
    raws: Sequence[Raw],
    task: Task | str | None,
    like: Dataset | None = None,
    classes: Sequence[str] | None = None,
) -> tuple[list[Tensor], tuple[str, ...], Task]:
    """Return the labels of each part, the names of the outputs, and the task.

    Args:
        raws: all parts of one data set.
        task: the task or its name; None or "" infers it from the labels.
        like: a data set whose task and classes are used.
        classes: names of the outputs, if the user gave some.
    """
    first = raws[0]
    chosen = _chosen(raws, task, like)
    if first.kind.unlabelled and not first.targets and not isinstance(chosen, LanguageModelling):
        raise UserError(
            f"{first.source} has no column 'label': say which one holds the labels "
            "(--label-column), or learn the texts themselves by --task=language-modelling"
        )
    if isinstance(chosen, LanguageModelling) and not first.given:
        if not first.kind.unlabelled:
            raise UserError(
                f"language modelling needs texts, but {first.source} holds {first.kind.words}: "
                "name a --text-column"
            )
        return [torch.zeros(len(raw), dtype=torch.int64) for raw in raws], (), chosen
    if isinstance(chosen, Classification):
        return *_classes(raws, like, classes), chosen
    y = [
        chosen.labels(torch.from_numpy(_numbers(raw, chosen.kind)), len(raw), raw.source)
        for raw in raws
    ]
    if isinstance(chosen, LanguageModelling) and not chosen.vocabulary and classes is None:
        largest = max(int(part.max()) for part in (*y, *(raw.images for raw in raws)))
        chosen = replace(chosen, vocabulary=1 + largest)
    each = zip(raws, y, strict=True)
    shapes = {part.shape[1:]: f"{raw.source}: {tuple(part.shape)}" for raw, part in each}
    if len(shapes) > 1:
        raise UserError(
            f"the labels differ in shape ({', '.join(shapes.values())}): give all samples the same "
            "labels"
        )
    if like is not None:
        _refuse_other_labels(first, torch.cat(y), chosen, like.classes)
        return y, like.classes, chosen
    if isinstance(chosen, Segmentation) and classes is None:
        _refuse_gaps(np.setdiff1d(torch.cat(y).numpy(), IGNORED).tolist(), first.source)
    return y, _outputs(first, torch.cat(y), chosen, classes), chosen


def _refuse_other_labels(first: Raw, y: Tensor, task: Task, known: tuple[str, ...]) -> None:
    """Refuse labels (n, ...) that are not those of a trained model, or not in their order."""
    outputs = task.outputs(known)
    if isinstance(task, PlacesTask):
        if int(y.max()) >= outputs:
            raise UserError(
                f"{first.source} has the label {int(y.max())}, but the model knows {outputs}, from "
                f"0 on: places that do not count have the label {IGNORED}"
            )
        return
    numbers = task.measured(y) if isinstance(task, ScaledTask) else y
    columns = first.targets or ("without names",)
    turned = columns != known and {*columns} == {*known}
    if numbers.shape[1] != outputs or turned:
        raise UserError(
            f"{first.source} has the labels {', '.join(columns)}, but the model knows "
            f"{', '.join(known)}: give these in this order (--label-column)"
        )


def _outputs(first: Raw, y: Tensor, task: Task, classes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the outputs for labels (n, ...), and look for marks of missing ones."""
    # labels (n,) are one column
    columns = y.reshape(len(y), -1).T
    if isinstance(task, ScaledTask):
        for name, values in zip(first.targets, columns, strict=False):
            warn_of_marks(values.numpy(), f"the label {name!r} of {first.source}")
    # the classes of pixels and tokens are in no columns
    if classes is not None or not first.targets or isinstance(task, PlacesTask):
        return names_of(task, y, classes)
    if isinstance(task, Survival):
        # the time, which has a unit
        return first.targets[:1]
    if len(first.targets) == len(columns):
        return first.targets
    return tuple(f"{first.targets[0]}-{k}" for k in range(len(columns)))


def _chosen(raws: Sequence[Raw], task: Task | str | None, like: Dataset | None) -> Task:
    """Return the task that the user or a trained model names, or else that of the labels."""
    if like is not None:
        return like.task
    if isinstance(task, Task):
        return task
    if task:
        return named(task)
    return _task_of(raws)


def _refuse_gaps(classes: Sequence[int], source: str) -> None:
    """Refuse masks with numbers such as 0 and 255, of which most would be classes without a
    pixel.
    """
    if classes and classes[-1] >= 2 * len(classes):
        raise UserError(
            f"pixels of {source} have the labels {listed(classes, _SHOWN)} only: number classes "
            "from 0 without gaps (255 often means foreground, which is 1, or pixels to ignore, "
            f"which are {IGNORED}), or name all by classes="
        )


def _task_of(raws: Sequence[Raw]) -> Task:
    """Infer the task from the labels, or ask for it."""
    first = raws[0]
    # each column is a label or a number
    if any(len(raw.targets) > 1 for raw in raws):
        if all(np.isin(raw.label, (0, 1)).all() for raw in raws):
            return MultiLabel()
        names = listed(map(repr, first.targets))
        raise UserError(
            f"the labels {names} of {first.source} are not all 0 and 1: use --task=regression for "
            "numbers to predict, or --task=survival for a time and an event"
        )
    # One silo by itself may look like another task: each of its samples may have exactly one of two
    # labels.
    for task in [*map(_task_of_part, raws)]:
        if not isinstance(task, Classification):
            return task
    for raw in raws:
        # Whole numbers of images, signals and tokens are classes.
        picture = raw.positions and not (raw.given and np.ndim(raw.images) == 2)
        if picture or raw.classes or _are_names(raw.label):
            return task
    different = len(np.unique(np.concatenate([raw.label for raw in raws])))
    # a score of 0 to 20 may be either; nobody has asked for as many classes without names
    if different > 20:
        shown = "the label"
        if first.targets:
            shown = f"the label {first.targets[0]!r}"
        raise UserError(
            f"{shown} of {first.source} has {different} different whole numbers: use "
            "--task=regression if they are numbers to predict, or --task=classification if they "
            "are classes"
        )
    return task


def _task_of_part(raw: Raw) -> Task:
    """Return the task that the labels of one part look like."""
    if raw.classes or _are_names(raw.label):
        return Classification()
    x = torch.empty(0)
    if isinstance(raw.images, Tensor):
        x = raw.images
    return inferred(torch.from_numpy(raw.label), x)


def _are_names(label: NDArray[np.generic]) -> bool:
    return label.dtype.kind == "U"


def _numbers(raw: Raw, kind: str) -> NDArray[np.generic]:
    """Return labels that are not classes of samples: numbers, or 0 and 1."""
    label = raw.label
    if kind == "multi-label" and _are_names(label) and set(np.unique(label)) <= {"true", "false"}:
        label = label == "true"
    # class names that are numbers
    if kind == "regression" and raw.classes and label.dtype.kind == "i":
        label = np.array(raw.classes)[label]
    if _are_names(label):
        try:
            return label.astype(np.float64)
        except ValueError:
            raise UserError(
                f"the label {next(iter(raw.targets), 'label')!r} of {raw.source} holds "
                f"text ({str(label[0])!r}): {kind} needs numbers"
            ) from None
    if kind == "multi-label" and label.ndim == 1:
        return label[:, None]
    return label


@dataclass(frozen=True)
class _Labels:
    """Labels of one part."""

    # the part
    raw: Raw
    # (n,) int64 positions in the names, or in names of others
    y: Tensor
    # the part's own names; none if its labels are numbers of classes
    names: tuple[str, ...]

    @property
    def numbered(self) -> bool:
        """Whether the labels have no names, or names that are these numbers."""
        return self.names == tuple(map(str, range(len(self.names))))

    def present(self) -> list[int]:
        """Return the labels that occur, in order."""
        found: list[int] = np.unique(self.y.numpy()).tolist()
        return found

    def first(self, label: int) -> str:
        """Return where a label occurs first."""
        return self.raw.where(int((self.y == label).nonzero()[0]))

    def placed(self, order: tuple[str, ...]) -> Tensor:
        """Return labels with names as positions in `order`."""
        place = dict(zip(order, count()))
        for label in self.present():
            if self.names[label] not in place:
                raise UserError(
                    f"label {self.names[label]!r} in {self.first(label)} is not among the classes: "
                    f"{', '.join(order)}"
                )
        return torch.tensor([place.get(name, -1) for name in self.names])[self.y]


def _classes(
    raws: Sequence[Raw], like: Dataset | None, given: Sequence[str] | None
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Give all parts one meaning of each class.

    Labels with names are matched by name, in the order that all parts share, or else sorted. Labels
    without names are numbers of classes. In a column of a table, whole numbers are names too, so
    they need not begin with 0.
    """
    parts = [_read(raw, like) for raw in raws]
    order = like.classes if like is not None else tuple(given or ())
    if not order:
        order = _together(parts)
    if len(order) < 2 and raws[0].targets and not raws[0].kind.positions:
        raise UserError(
            f"all labels in {raws[0].source} are {order[0]!r}: classification needs two classes or "
            "more; if other silos hold others, name all by classes (in [data] of silo.toml)"
        )
    return [_placed(part, order, by_number=like is None) for part in parts], order


def _read(raw: Raw, like: Dataset | None) -> _Labels:
    """Return the labels of one part with its own names."""
    label = raw.label
    if raw.targets and label.ndim > 1:
        raise UserError(
            "classification has one label per sample: name one --label-column, or use "
            "--task=multi-label"
        )
    if label.dtype.kind == "f" and not raw.positions:
        if (label != np.floor(label)).any():
            row = int(np.flatnonzero(label != np.floor(label))[0])
            raise UserError(
                f"the label in {raw.where(row)} is {label[row]}, not a class: use --task=regression"
            )
        label = label.astype(np.int64)
    values = not raw.classes and (not raw.positions or like is not None)
    if _are_names(label) or (values and label.dtype.kind == "i"):
        names, inverse = np.unique(label.astype(np.str_), return_inverse=True)
        found = _Labels(raw, torch.from_numpy(inverse.astype(np.int64)), tuple(map(str, names)))
        order = raw.classes or tuple(sorted(found.names, key=natural))
        return replace(found, y=found.placed(order), names=order)
    if label.dtype.kind in "iu" and label.ndim == 1:
        odd = label < 0
        named_ = ""
        if raw.classes:
            odd |= label >= len(raw.classes)
            named_ = f" ({len(raw.classes)} classes are named)"
        if odd.any():
            row = int(odd.argmax())
            raise UserError(
                f"label {label[row]} in {raw.where(row)}: labels must be integers from 0 to "
                f"classes - 1{named_}, or class names."
            )
    return _Labels(
        raw, Classification().labels(torch.from_numpy(label), len(raw), raw.source), raw.classes
    )


def _together(parts: Sequence[_Labels]) -> tuple[str, ...]:
    """Return the classes of all parts, if nobody names them."""
    if all(part.numbered for part in parts):
        return _numbered(parts)
    each = {part.names for part in parts}
    if () in each:
        named_ = next(part for part in parts if not part.numbered)
        nameless = next(part for part in parts if not part.names)
        raise UserError(
            f"the labels of {named_.raw.source} are names, but those of {nameless.raw.source} are "
            "numbers of unknown classes: use names everywhere, or name the classes in order by "
            "classes="
        )
    if len(each) == 1:
        return parts[0].names
    return tuple(sorted({*chain(*each)}, key=natural))


def _numbered(parts: Sequence[_Labels]) -> tuple[str, ...]:
    """Return the names of numbered classes. Their count comes from the parts' own names, or else
    from the labels.
    """
    present = np.unique(torch.cat([part.y for part in parts]).numpy())
    known = max(len(part.names) for part in parts)
    high = int(present[-1])
    # labels may be in billions, but as many numbers as this hold the first gaps
    few = min(high, len(present) + _SHOWN + 1)
    gaps = [*map(str, np.setdiff1d(np.arange(few), present))]
    if high >= known and gaps:
        shown = ", ".join(gaps[:_SHOWN])
        if len(gaps) > _SHOWN:
            shown += ", ..."
        largest = next(part for part in parts if high in part.present())
        raise UserError(
            f"no sample has label {shown}, but {largest.first(high)} has label {high}: number the "
            "labels from 0 without gaps, or give names of the classes instead of numbers"
        )
    return tuple(map(str, range(max(high + 1, known))))


def _placed(part: _Labels, order: tuple[str, ...], *, by_number: bool) -> Tensor:
    """Return labels as positions in the names of all."""
    known = part.names and set(part.names) <= set(order)
    numbers = part.raw.positions and part.numbered
    if known or not numbers or not by_number:
        return part.placed(order)
    if (high := int(part.y.max())) >= len(order):
        raise UserError(
            f"label {high} has no name among the {len(order)} classes ({part.first(high)}): "
            "name them all, or give no names"
        )
    return part.y


def with_labels_of(dataset: Dataset, task: str) -> Dataset:
    """Return the data set with its labels as labels of `task`: for a regression, integers become
    numbers.
    """
    if not task or dataset.task.kind == task:
        return dataset
    if task != "regression" or not isinstance(dataset.task, Classification):
        raise UserError(
            f"the labels of {dataset.name} are of {dataset.task.kind}, not of {task}: leave out "
            "--task"
        )
    try:
        values = torch.tensor([*map(float, dataset.classes)])
    except ValueError:
        raise UserError(
            f"the labels of {dataset.name} are names, but regression needs numbers: leave out "
            "--task"
        ) from None
    found = relabelled(dataset, values, ("target",))
    return replace(found, task=scaled(named(task), found.train.y))


def relabelled(dataset: Dataset, values: Tensor, classes: tuple[str, ...]) -> Dataset:
    """Return the same samples with values[k] in place of label k, and names of the outputs."""
    train, test = (
        replace(part, y=values[part.y], classes=classes) for part in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test, classes=classes)


def refuse_constant(y: Tensor, names: Sequence[str]) -> None:
    """Refuse numbers to predict (n,) or (n, K) of which one is the same for all samples."""
    for name, column in zip(names, y.reshape(len(y), -1).T, strict=True):
        if len(column) and bool((column == column[0]).all()):
            raise UserError(
                f"the label {name!r} is {column[0]:g} in all training rows: name a label that "
                "varies"
            )


def in_order(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Return the same samples with `classes` as the classes, for silos that do not hold all of
    them.
    """
    if not classes or dataset.classes == tuple(classes):
        return dataset
    if isinstance(dataset.task, Segmentation) and len(classes) >= len(dataset.classes):
        # pixels hold positions in this list
        return replace(dataset, classes=tuple(classes))
    if not isinstance(dataset.task, Classification):
        raise UserError(
            f"classes are named, but the labels are of {dataset.task.kind}: leave classes out"
        )
    for name in dataset.classes:
        if name not in classes:
            raise unknown("class in the data", name, classes)
    number = torch.tensor([*map(classes.index, dataset.classes)])
    return relabelled(dataset, number, tuple(classes))
