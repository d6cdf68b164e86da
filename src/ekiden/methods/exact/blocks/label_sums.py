"""Exact sums of features and of the targets that a task makes from labels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ekiden.authoring import Task
from ekiden.base.sums import FULL, LARGEST, AnySums, Rounding, measure, measure_targets, size, size_of_targets
from ekiden.data.tasks import Classification


def sums_of(
    blocks: Iterator[tuple[Tensor, Tensor]],
    task: Task,
    outputs: int,
    width: int,
    device: torch.device,
    largest: int = LARGEST,
    rounding: Rounding | None = None,
) -> AnySums:
    """Return sums over samples: for each class in classification, otherwise with the targets of least squares.

    Args:
        blocks: features (b, D), whole numbers in any floating-point type, and labels (b, ...).
        task: what the labels mean.
        outputs: K.
        width: D.
        device: device of the sums.
        largest: absolute value of a feature; see `measure`.
        rounding: how products are rounded; None: not at all.
    """
    if isinstance(task, Classification):
        return measure(blocks, outputs, width, device, largest, rounding)
    counted = ((h, (task.targets(y, outputs) * task.unit).round()) for h, y in blocks)
    return measure_targets(counted, outputs, width, device, largest, rounding)


def labels_as_targets(task: Task, y: Tensor, outputs: int) -> Tensor:
    """Return (b, K), what least squares fits for labels (b, ...): one-hot classes, or the targets of the task."""
    if isinstance(task, Classification):
        return torch.nn.functional.one_hot(y, outputs).float()
    return task.targets(y, outputs)


def size_of_sums(task: Task, outputs: int, width: int, *, wide: bool = False, bits: int = FULL) -> int:
    """Return the bytes of the sums of `sums_of`; `wide` is for features above `LARGEST`, `bits` for rounded ones."""
    of = size if isinstance(task, Classification) else size_of_targets
    return of(outputs, width, wide=wide, bits=bits)
