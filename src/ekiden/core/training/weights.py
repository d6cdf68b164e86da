"""A model's values as flat vectors, their average, and the parts of such a vector: tensors and
layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Literal

import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError

Kind = Literal["linear", "conv", "norm", "other"]
_AVERAGE = "an average needs at least one model and a finite weight >= 0 for each, not all zero"


@dataclass(frozen=True, eq=False)
class Weights:
    """All values of a network. Treat as immutable: whoever changes them copies first.

    Attributes:
        params: (P,) float32, the trainable parameters in the order of `module.parameters()`.
        buffers: (B,) float32, values that travel too: running statistics, parameters that are not
            trained now.
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
    """Some entries of a model, such as the classifier. True where an entry belongs to it."""

    params: Tensor  # (P,) bool
    buffers: Tensor  # (B,) bool
    counters: Tensor  # (C,) bool

    def __invert__(self) -> "Part":
        """Return the mask of all other entries."""
        return Part(~self.params, ~self.buffers, ~self.counters)

    def of(self, model: Weights) -> Weights:
        """Return only these entries of `model`, in their order, for methods that send a part."""
        return Weights(
            model.params[self.params], model.buffers[self.buffers], model.counters[self.counters]
        )

    def put(self, values: Weights, model: Weights) -> Weights:
        """Return `model` with these entries replaced by `values`, which `of` gave."""
        if values.shapes != self.of(model).shapes:
            raise UserError(
                "these values are those of another part of the model: use the same network at "
                "every client"
            )
        return Weights(
            model.params.masked_scatter(self.params, values.params),
            model.buffers.masked_scatter(self.buffers, values.buffers),
            model.counters.masked_scatter(self.counters, values.counters),
        )


def mean(models: Sequence[Weights], weights: Sequence[float] | None = None) -> Weights:
    """Return the weighted average of models; uniform without `weights`.

    Parameters and running statistics are averaged; for counters the largest is kept. It is a
    running mean: the average of equal models is that model bit for bit, and memory holds one model.
    A model of weight 0 is ignored, whatever it holds.

    Raises:
        UserError: no model, models of different shape, a weight that is negative or not finite, or
            all weights zero.
    """
    weights = [1.0] * len(models) if weights is None else weights
    if len(weights) != len(models):
        raise UserError(_AVERAGE)
    middle = RunningMean()
    for model, weight in zip(models, weights, strict=True):
        middle.add(model, weight)
    return middle.model


class RunningMean:
    """What `mean` returns, of models that come one after the other.

    Attributes:
        total: sum of the weights so far.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._model: Weights | None = None
        self._shapes: tuple[torch.Size, ...] = ()

    def add(self, model: Weights, weight: float = 1.0) -> None:
        """Take in a model; it is not kept."""
        if not 0 <= weight < inf:
            raise UserError(_AVERAGE)
        self._shapes = self._shapes or model.shapes
        if model.shapes != self._shapes:
            raise UserError(
                "models of different shape cannot be averaged: use the same network at every client"
            )
        self.total += weight
        if not weight:
            return
        if (mean := self._model) is None:
            self._model = Weights(*(values.clone() for values in vars(model).values()))
            return
        mean.params.lerp_(model.params, weight / self.total)
        mean.buffers.lerp_(model.buffers, weight / self.total)
        torch.maximum(mean.counters, model.counters, out=mean.counters)

    @property
    def model(self) -> Weights:
        """The average so far."""
        if self._model is None:
            raise UserError(_AVERAGE)
        return self._model


def piece(flat: Tensor) -> int:
    """Return how many numbers of a vector to compute with at a time: a CPU's cache holds them; a
    GPU wants many.
    """
    return 1 << (16 if flat.device.type == "cpu" else 24)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared Euclidean distance of two (P,) vectors, in pieces so that no third vector
    is allocated.
    """
    total = torch.zeros((), device=a.device)
    some = piece(a)
    for x, y in zip(torch.split(a, some), torch.split(b, some), strict=True):
        difference = x - y
        total += difference.dot(difference)
    return total


@dataclass(frozen=True)
class TensorPart:
    """One tensor within a flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """The place where the next tensor starts."""
        return self.start + prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of this tensor in `flat`."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Layer:
    """A module that holds values of its own."""

    name: str  # of the module
    kind: Kind  # linear; conv (2-d, without groups); norm; other
    params: tuple[TensorPart, ...]  # all its trainable tensors, in the flat parameters
    # its running mean and variance, in the flat buffers; empty where it has none
    statistics: tuple[TensorPart, ...] = ()

    @property
    def weight(self) -> TensorPart:
        """(out, in) of a linear layer, (out, in, h, w) of a convolution, (channels,) of a norm."""
        return self.params[0]

    @property
    def bias(self) -> TensorPart | None:
        """(out,), if there is one."""
        if len(self.params) > 1:
            return self.params[1]
        return None

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Length of the input that one output of a linear or convolutional layer sees; the bias is
        one more.
        """
        return prod(self.weight.shape[1:]) + (self.bias is not None)

    def matrix(self, params: Tensor) -> Tensor:
        """Return a copy as (out, `inputs`): one row per output, the bias as last column."""
        rows = self.weight.of(params).flatten(1)
        if self.bias is None:
            return rows.clone()
        return torch.cat([rows, self.bias.of(params)[:, None]], 1)

    def put(self, params: Tensor, matrix: Tensor) -> None:
        """The reverse of `matrix`, in place."""
        self.weight.of(params).copy_(
            matrix[:, : prod(self.weight.shape[1:])].view(self.weight.shape)
        )
        if self.bias is not None:
            self.bias.of(params).copy_(matrix[:, -1])


@dataclass(frozen=True)
class Layout:
    """All tensors of a network in its flat vectors, and its layers in the order in which they are
    registered.
    """

    params: tuple[TensorPart, ...]
    buffers: tuple[TensorPart, ...]
    layers: tuple[Layer, ...]

    @cached_property
    def dense(self) -> tuple[Layer, ...]:
        """The linear and convolutional layers."""
        return tuple(layer for layer in self.layers if layer.kind in ("linear", "conv"))

    @cached_property
    def head(self) -> Layer:
        """The classifier: the last linear or convolutional layer; if the model has a `head`, the
        last one in it.
        """
        declared = [layer for layer in self.dense if layer.name.split(".")[0] == "head"]
        if not self.dense:
            raise UserError(
                "the model has no linear or convolutional layer: this method does not know its "
                "classifier"
            )
        return (declared or self.dense)[-1]

    @property
    def hidden(self) -> tuple[Layer, ...]:
        """The linear and convolutional layers without the classifier."""
        return tuple(layer for layer in self.dense if layer is not self.head)

    @property
    def classes(self) -> int:
        """K, outputs of the classifier."""
        return self.head.width


def layout(
    module: nn.Module, trainable: Iterable[nn.Parameter], buffers: Iterable[Tensor]
) -> Layout:
    """Return the layout of flat vectors that hold these tensors of `module` in this order."""
    names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    params = _parts(trainable, names)
    stored = _parts(buffers, names)
    layers = []
    seen = set[int]()
    for name, part in module.named_modules():
        own = []
        for p in part._parameters.values():
            if p is not None and id(p) in params and id(p) not in seen:
                own.append(p)
        seen.update(map(id, own))
        statistics = []
        for name_, b in part._buffers.items():
            if name_ in ("running_mean", "running_var") and id(b) in stored:
                statistics.append(b)
        if own or statistics:
            kind = _kind(part, [tuple(p.shape) for p in own])
            layers.append(
                Layer(
                    name,
                    kind,
                    tuple(params[id(p)] for p in own),
                    tuple(stored[id(b)] for b in statistics),
                )
            )
    return Layout(tuple(params.values()), tuple(stored.values()), tuple(layers))


def _kind(module: nn.Module, shapes: list[tuple[int, ...]]) -> Kind:
    """Return the kind of a module, given its trainable tensors."""
    if len(shapes) > 2:
        return "other"
    if isinstance(module, nn.Linear) and shapes and len(shapes[0]) == 2:
        return "linear"
    if isinstance(module, nn.Conv2d) and module.groups == 1 and shapes and len(shapes[0]) == 4:
        return "conv"
    if "Norm" in type(module).__name__ and all(len(s) == 1 for s in shapes):
        return "norm"
    return "other"


def _parts(tensors: Iterable[Tensor], names: dict[int, str]) -> dict[int, TensorPart]:
    parts: dict[int, TensorPart] = {}
    start = 0
    for tensor in tensors:
        parts[id(tensor)] = TensorPart(names[id(tensor)], tuple(tensor.shape), start)
        start += tensor.numel()
    return parts
