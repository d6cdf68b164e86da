"""Mean inputs of classes, and the client's own inputs moved there, close to other clients' samples."""

from collections.abc import Iterable
from math import isqrt, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.authoring import UserError
from ekiden.methods.chain.fedtasuki.statistics import SHARE

_GRID = 8  # most cells along a side of a mean image: on CIFAR-10 32 gained nothing over 8


class ClassInputs(NamedTuple):
    """The number of samples of each class, and their mean input.

    Attributes:
        counts: (K,) int64.
        means: (K, C, h, w) for images, averaged over the cells of a grid; (K, d) for other samples; zeros if none.
    """

    counts: Tensor
    means: Tensor

    def on_cpu(self) -> "ClassInputs":
        """Return the same means on the CPU, where `measure` puts its result."""
        return ClassInputs(self.counts.cpu(), self.means.cpu())

    def merged(self, other: "ClassInputs") -> "ClassInputs":
        """Return the means of the samples of both."""
        if self.means.shape != other.means.shape or self.counts.shape != other.counts.shape:
            raise UserError("the class means are of other classes or inputs: use the same data and model everywhere")
        return _weighed(self.counts + other.counts, self, other, 1)

    def without(self, other: "ClassInputs") -> "ClassInputs":
        """Return the means of the samples that are not in `other`."""
        return _weighed((self.counts - other.counts).clamp(min=0), self, other, -1)

    def moved(self, own: "ClassInputs", x: Tensor, y: Tensor) -> Tensor:
        """The client's own inputs (b, ...) of classes y (b,), each with the mean of its class replaced by one of these.

        Of which class is drawn by the counts.
        """
        drawn = torch.multinomial(self.counts.double(), len(x), replacement=True)
        change = self.means.to(x)[drawn] - own.means.to(x)[y]
        if x.ndim == 4:
            change = F.interpolate(change, size=x.shape[2:], mode="bilinear")
        return x + change


def _weighed(counts: Tensor, a: ClassInputs, b: ClassInputs, sign: int) -> ClassInputs:
    sums = [part.means.double() * part.counts.view(-1, *[1] * (part.means.ndim - 1)) for part in (a, b)]
    means = (sums[0] + sign * sums[1]) / counts.clamp(min=1).view(-1, *[1] * (a.means.ndim - 1))
    return ClassInputs(counts, means.float())


def measure(batches: Iterable[tuple[Tensor, Tensor]], classes: int, shape: tuple[int, ...]) -> ClassInputs:
    """Return class means, on the CPU, of samples in batches of inputs and labels; `shape` is from `mean_shape`."""
    counts, sums = torch.zeros(classes, dtype=torch.int64), torch.zeros(classes, *shape, dtype=torch.float64)
    for x, y in batches:
        coarse = (F.adaptive_avg_pool2d(x, (shape[1], shape[2])) if x.ndim == 4 else x).double().cpu()
        counts += torch.bincount(y.cpu(), minlength=classes)
        sums.index_add_(0, y.cpu(), coarse)
    return ClassInputs(counts, (sums / counts.clamp(min=1).view(-1, *[1] * len(shape))).float())


def mean_shape(classes: int, shape: tuple[int, ...], model: int, taken: int = 0) -> tuple[int, ...]:
    """Return the shape of a class's mean input, the finest that fits into half of the rest of a model's `SHARE`.

    Args:
        classes: K.
        shape: of an input.
        model: its bytes.
        taken: bytes of that share which other statistics need.
    """
    room = (int(SHARE * model - taken) // 2 - 8 * classes) // (4 * classes)
    if len(shape) == 3:
        side = min(isqrt(max(room, 0) // shape[0]), _GRID)
        shape = (shape[0], min(side, shape[1]), min(side, shape[2]))
    if not 0 < prod(shape) <= room:
        raise UserError(
            f"--recall has no room for mean inputs of {classes} classes in half of {SHARE:.0%} of this model's bytes "
            "(with --statistics half of what these leave): leave it out, or take a larger network"
        )
    return shape


def size(classes: int, shape: tuple[int, ...]) -> int:
    """8K + 4K·(numbers of a mean), bytes of class means of this shape."""
    return 8 * classes + 4 * classes * prod(shape)
