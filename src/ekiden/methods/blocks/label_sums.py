"""Exact sums of features and of what a task makes of labels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ekiden.base.sums import LARGEST, AnySums, measure, measure_targets, size, size_of_targets
from ekiden.data.tasks import Classification, Task


def sums_of(
    blocks: Iterator[tuple[Tensor, Tensor]],
    task: Task,
    outputs: int,
    width: int,
    device: torch.device,
    largest: int = LARGEST,
) -> AnySums:
    """The sums over samples: of each class in classification, else with the targets of least squares.

    Args:
        blocks: features (b, D), whole numbers in any floating-point type, and labels (b, ...).
        task: what the labels mean.
        outputs: K.
        width: D.
        device: where they are.
        largest: absolute value of a feature; see `measure`.

    Raises:
        UserError: a feature or a label is too large for exact sums.
    """
    if isinstance(task, Classification):
        return measure(blocks, outputs, width, device, largest)
    counted = ((h, (task.targets(y, outputs) * task.unit).round()) for h, y in blocks)
    return measure_targets(counted, outputs, width, device, largest)


def labels_as_targets(task: Task, y: Tensor, outputs: int) -> Tensor:
    """(b, K) what least squares fits for these labels (b, ...): one-hot classes, or the targets of the task."""
    if isinstance(task, Classification):
        return torch.nn.functional.one_hot(y, outputs).float()
    return task.targets(y, outputs)


def size_of_sums(task: Task, outputs: int, width: int, *, wide: bool = False) -> int:
    """Bytes of the sums of `sums_of`; `wide` for features above `LARGEST`."""
    of = size if isinstance(task, Classification) else size_of_targets
    return of(outputs, width, wide=wide)
