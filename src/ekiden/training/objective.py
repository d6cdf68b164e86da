"""What local training minimises: objectives, penalties on top of them, and the passes that they cost."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ekiden.data.tasks import Task

Forward = Callable[[Tensor], Tensor]
Loss = Callable[[Forward, Tensor, Tensor], Tensor]
"""(network, inputs (b, ...), labels (b, ...)) -> mean loss of the batch, differentiable."""


@dataclass
class Work:
    """Samples that went forward and backward through a network: compute, whatever the machine."""

    forward: int = 0
    backward: int = 0

    def add(self, other: "Work") -> None:
        """Add `other`."""
        self.forward += other.forward
        self.backward += other.backward


class Objective(ABC):
    """The loss that `fit` minimises instead of the task's. A plain function is enough if there are no teachers."""

    @property
    def teachers(self) -> tuple[Forward, ...]:
        """Frozen networks that the loss compares with; `fit` runs them, counts the passes and hands on the outputs."""
        return ()

    def asks(self, batch: int) -> int:
        """Return for how many of the `batch` inputs, counted from the first, it needs the teachers' outputs."""
        return batch

    def further(self, batch: int) -> Work:
        """Return its own passes for a mini-batch of `batch`, in addition to one forward and one backward."""
        return Work()

    @abstractmethod
    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the mean loss of a batch, differentiable.

        Args:
            forward: the network in training.
            x: inputs (b, ...).
            y: labels (b, ...).
            answers: the outputs of each teacher for the inputs, (b, ...), float32 and without gradient.
        """


@dataclass(frozen=True)
class TaskLoss(Objective):
    """The mean loss ℓ of a task: what a client minimises unless its method says otherwise."""

    task: Task

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        return self.task.mean_loss(forward(x).float(), y)


@dataclass(frozen=True)
class FunctionLoss(Objective):
    """A plain function as an objective."""

    function: Loss

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        return self.function(forward, x, y)


class Penalty(Protocol):
    """A regulariser with a closed-form gradient.

    One that adds something up over the steps keeps it in a dict of tensors called `progress`, which survives a crash
    together with the rest of the fit.
    """

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add its gradient at `params` (P,) to `grad` (P,) in place; `loss` is the batch's, detached."""


def cross_entropy(forward: Forward, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy ℓ of a batch."""
    return F.cross_entropy(forward(x).float(), y)


def as_objective(loss: Objective | Loss) -> Objective:
    """Return `loss`, a plain function as an objective."""
    return loss if isinstance(loss, Objective) else FunctionLoss(loss)
