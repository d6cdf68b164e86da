"""Class statistics of features, and mean inputs of classes: what can stand for samples that are out of reach."""

from collections.abc import Iterable
from math import isqrt, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.authoring import UserError

SHARE = 0.05
"""the part of a model's bytes that its class statistics may take"""
_RIDGE, _SHRINK = 0.01, 0.05
_GRID = 8  # most cells along a side of a mean image: on CIFAR-10 32 gained nothing over 8


class ClassStatistics(NamedTuple):
    """A Gaussian for each class, all with the covariance D + F Fᵀ."""

    counts: Tensor  # (K,) int64, number of samples
    means: Tensor  # (K, A) of their features; zeros for a class without samples
    diagonal: Tensor  # (A,) D, the part of the variances that F leaves
    factor: Tensor  # (A, r) F, the leading directions within classes

    def moments(self, classes: int, features: int) -> "ClassMoments":
        """Return the statistics as full matrices."""
        shapes = [tuple(part.shape) for part in self[:3]]
        if shapes != [(classes,), (classes, features), (features,)] or self.factor.shape[:-1] != (features,):
            raise UserError(
                f"class statistics of shapes {shapes} do not fit this network of {classes} classes and {features} "
                "features: use the same model at every client"
            )
        factor = self.factor.double()
        return ClassMoments(
            self.counts.double(), self.means.double(), self.diagonal.double().diag() + factor @ factor.T
        )


class ClassMoments(NamedTuple):
    """Class statistics for computing, in double precision."""

    counts: Tensor  # (K,)
    means: Tensor  # (K, A)
    covariance: Tensor  # (A, A), the covariance within classes, a mean over all samples

    def moved(self, before: Tensor, after: Tensor) -> "ClassMoments":
        """Return the statistics of moved features, by the linear map that best takes `before` to `after` (n, A).

        The map is the identity and a ridge regression of what is left.
        """
        x, y = before.double(), after.double()
        x, y = x - (centre := x.mean(0)), y - (target := y.mean(0))
        gram, eye = x.T @ x, torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        ridge = _RIDGE * gram.diagonal().mean() + 1e-9
        # f ↦ target + (f - centre) A with A = I + (XᵀX + λI)⁻¹Xᵀ(Y - X), so that unseen directions stay as they are
        change = eye + torch.linalg.solve(gram + ridge * eye, x.T @ (y - x))
        present = (self.counts > 0)[:, None]
        means = torch.where(present, (self.means - centre) @ change + target, self.means)
        return ClassMoments(self.counts, means, change.T @ self.covariance @ change)

    def without(self, counts: Tensor) -> "ClassMoments":
        """Return the same moments with fewer samples of each class."""
        return self._replace(counts=(self.counts - counts.to(self.counts)).clamp(min=0))

    def merged(self, other: "ClassMoments") -> "ClassMoments":
        """Return the statistics of the samples of both."""
        counts = self.counts + other.counts
        share = (other.counts / counts.clamp(min=1))[:, None]
        apart = other.means - self.means
        between = (apart * share * self.counts[:, None]).T @ apart  # Σ n n'/(n + n')·(m - m')(m - m')ᵀ
        within = self.counts.sum() * self.covariance + other.counts.sum() * other.covariance
        return ClassMoments(counts, self.means + share * apart, (within + between) / counts.sum().clamp(min=1))

    def classifier(self) -> Tensor:
        """Return (K, A + 1) weights and biases of linear discriminant analysis: log n_k N(features; m_k, C) + constant.

        A class without samples counts as half of one in the middle of all.
        """
        eye = torch.eye(len(self.covariance), dtype=self.covariance.dtype, device=self.covariance.device)
        shrunk = self.covariance + (_SHRINK * self.covariance.diagonal().mean() + 1e-9) * eye
        middle = self.counts @ self.means / self.counts.sum()
        means = torch.where((self.counts > 0)[:, None], self.means, middle)
        rows = torch.linalg.solve(shrunk, means.T).T  # (K, A) C⁻¹ m_k
        bias = self.counts.clamp(min=0.5).log() - (rows * means).sum(1) / 2
        return torch.cat([rows, bias[:, None]], 1)

    def compressed(self, rank: int) -> ClassStatistics:
        """Return the statistics as they travel, with `rank` directions."""
        values, vectors = torch.linalg.eigh(self.covariance)
        factor = vectors[:, len(values) - rank :] * values[len(values) - rank :].clamp(min=0).sqrt()
        rest = (self.covariance.diagonal() - factor.square().sum(1)).clamp(min=0)
        return ClassStatistics(self.counts.long(), self.means.float(), rest.float(), factor.float().contiguous())


def measure(features: Tensor, labels: Tensor, classes: int) -> ClassMoments:
    """Return the class statistics of features (n, A) with these labels (n,)."""
    x, of = features.double(), F.one_hot(labels, classes).double()
    counts = of.sum(0)
    means = of.T @ x / counts.clamp(min=1)[:, None]
    within = x - means[labels]
    return ClassMoments(counts, means, within.T @ within / len(x))


def rank(classes: int, features: int, model: int, taken: int = 0) -> int:
    """Return r, as many directions as fit into `SHARE` of a model of this many bytes, some of which are `taken`.

    The result is negative if not even the means fit.
    """
    room = int(SHARE * model) - taken - size(classes, features, 0)
    return min(room // (4 * features), features)


def size(classes: int, features: int, rank: int) -> int:
    """8K + 4A(K + 1 + r), bytes of class statistics."""
    return 8 * classes + 4 * features * (classes + 1 + rank)


class ClassInputs(NamedTuple):
    """The number of samples of each class, and their mean input."""

    counts: Tensor  # (K,) int64
    means: Tensor  # (K, C, h, w) for images, averaged over the cells of a grid; (K, d) for other samples; zeros if none

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


def measure_means(batches: Iterable[tuple[Tensor, Tensor]], classes: int, shape: tuple[int, ...]) -> ClassInputs:
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


def size_of_means(classes: int, shape: tuple[int, ...]) -> int:
    """8K + 4K·(numbers of a mean), bytes of class means of this shape."""
    return 8 * classes + 4 * classes * prod(shape)
