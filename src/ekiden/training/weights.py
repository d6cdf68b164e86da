"""A model's values as flat vectors, and their average."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from ekiden.base.errors import UserError


@dataclass(frozen=True, eq=False)
class Weights:
    """All values of a network. Treat as immutable: whoever changes them copies first.

    Attributes:
        params: (P,) float32, the trainable parameters in the order of `module.parameters()`.
        buffers: (B,) float32, values that travel too: running statistics, parameters that are not trained now.
        counters: (C,) int64, e.g. BatchNorm's number of batches seen.
    """

    params: Tensor
    buffers: Tensor
    counters: Tensor

    def with_params(self, params: Tensor) -> "Weights":
        """Return the same buffers with other parameters."""
        return replace(self, params=params)

    @property
    def shapes(self) -> tuple[torch.Size, torch.Size, torch.Size]:
        """The shapes of the three vectors."""
        return self.params.shape, self.buffers.shape, self.counters.shape

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return bool(torch.isfinite(self.params.sum()) and torch.isfinite(self.buffers.sum()))


@dataclass(frozen=True, eq=False)
class Part:
    """Some entries of a model, such as the classifier. True where an entry belongs to it.

    Attributes:
        params: (P,) bool.
        buffers: (B,) bool.
        counters: (C,) bool.
    """

    params: Tensor
    buffers: Tensor
    counters: Tensor

    def __invert__(self) -> "Part":
        """Return the mask of all other entries."""
        return Part(~self.params, ~self.buffers, ~self.counters)

    def of(self, model: Weights) -> Weights:
        """Return only these entries of `model`, in their order, for methods that send a part."""
        return Weights(model.params[self.params], model.buffers[self.buffers], model.counters[self.counters])

    def put(self, values: Weights, model: Weights) -> Weights:
        """Return `model` with these entries replaced by `values`, which `of` gave."""
        fits = (int(self.params.sum()), int(self.buffers.sum()), int(self.counters.sum()))
        if (len(values.params), len(values.buffers), len(values.counters)) != fits:
            raise UserError("these values are those of another part of the model: use the same network at every client")
        return Weights(
            model.params.masked_scatter(self.params, values.params),
            model.buffers.masked_scatter(self.buffers, values.buffers),
            model.counters.masked_scatter(self.counters, values.counters),
        )


def mean(models: Sequence[Weights], weights: Sequence[float] | None = None) -> Weights:
    """Return the weighted average of models; uniform without `weights`.

    Parameters and running statistics are averaged; for counters the largest is kept. It is a running mean: the average
    of equal models is that model bit for bit, and memory holds one model. A model of weight 0 is ignored, whatever it
    holds.

    Raises:
        UserError: no model, models of different shape, a weight that is negative or not finite, or all weights zero.
    """
    weights = [1.0] * len(models) if weights is None else list(weights)
    if not models or len(weights) != len(models) or not all(0 <= w < inf for w in weights) or not any(weights):
        raise UserError("an average needs at least one model and a finite weight >= 0 for each, not all zero")
    if any(m.shapes != models[0].shapes for m in models):
        raise UserError("models of different shape cannot be averaged: use the same network at every client")
    (first, total), *others = [(m, w) for m, w in zip(models, weights, strict=True) if w]
    params, buffers, counters = first.params.clone(), first.buffers.clone(), first.counters.clone()
    for model, weight in others:
        total += weight
        share = weight / total
        params.lerp_(model.params, share)
        buffers.lerp_(model.buffers, share)
        counters = torch.maximum(counters, model.counters)
    return Weights(params, buffers, counters)


def distance(a: Tensor, b: Tensor, chunk: int = 1 << 16) -> Tensor:
    """Return the squared Euclidean distance of two (P,) vectors, in pieces so that no third vector is allocated."""
    total = torch.zeros((), device=a.device)
    for x, y in zip(torch.split(a, chunk), torch.split(b, chunk), strict=True):
        difference = x - y
        total += difference.dot(difference)
    return total
