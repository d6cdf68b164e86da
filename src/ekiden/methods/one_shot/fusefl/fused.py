"""Networks side by side that read each other's features block by block, and thin versions of a network."""

import copy
from collections.abc import Sequence
from math import lcm
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ekiden.authoring import UserError, Weights
from ekiden.training.elastic import Dense, resize
from ekiden.training.network import Network

M = TypeVar("M", bound=nn.Module)


class Adapter(nn.Module):
    """A 1x1 convolution over maps (b, C, h, w), a linear layer over vectors (b, C)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))  # (C', C)
        self.bias = nn.Parameter(torch.empty(outputs))  # (C',)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw values as torch's own layers do."""
        for values in (self.weight, self.bias):
            nn.init.uniform_(values, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, C, ...) to (b, C', ...)."""
        return F.linear(x.movedim(1, -1), self.weight, self.bias).movedim(-1, 1)


class Stage(nn.Module):
    """One client's block and the adapter before it."""

    def __init__(self, block: nn.Module, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.adapter = adapter  # from the channels of all clients to those that the block reads; None: their mean
        self.block = block  # layers of the extractor

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Return features (b, C', ...) from those of every client in the level before, each (b, C, ...)."""
        joined = average(parts) if self.adapter is None else self.adapter(torch.cat(list(parts), 1))
        out: Tensor = self.block(joined)
        return out


class Fused(nn.Module):
    """Levels of stages; each stage reads the outputs of all stages of the level before."""

    def __init__(self, levels: Sequence[Sequence[Stage]], heads: Sequence[nn.Module], frozen: int = 0) -> None:
        super().__init__()
        # the levels, from the input on; a level has one stage per client, or only the owner's
        self.levels = nn.ModuleList(nn.ModuleList(level) for level in levels)
        # one classifier per stage of the last level, with logits averaged, or one classifier that reads their sum
        self.heads = nn.ModuleList(heads)
        self.frozen = frozen  # number of levels that are not trained and keep their statistics
        self.levels[:frozen].requires_grad_(False)

    def train(self, mode: bool = True) -> "Fused":
        """Set the mode; frozen levels stay in evaluation mode."""
        super().train(mode)
        self.levels[: self.frozen].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K) of inputs (b, ...)."""
        parts = self.parts(x) if len(self.heads) > 1 else [self.features(x)]
        return average([head(part) for head, part in zip(self.heads, parts, strict=True)])

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of each stage of the last level, (b, A)."""
        parts = [x]
        for level in self.levels:
            assert isinstance(level, nn.ModuleList)
            parts = [stage(parts) for stage in level]
        return parts

    def features(self, x: Tensor) -> Tensor:
        """Return the sum of the stages' outputs."""
        return torch.stack(self.parts(x)).sum(0)


def average(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape; a single tensor is returned unchanged."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts) if len(parts) > 1 else total


def filled(module: M, weights: Weights) -> M:
    """Return `module`, all of whose parameters are trainable, with these values."""
    Network(module, weights.params.device).load(weights)
    return module


def read(module: nn.Module) -> Weights:
    """Return the values of `module`, all of whose parameters are trainable, as a copy."""
    return Network(copy.deepcopy(module), next(module.parameters()).device).weights()


def content(module: nn.Module) -> int:
    """Return the bytes of the values of `module` on the wire."""
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


def cut(features: nn.Module, blocks: int) -> list[nn.Module]:
    """Divide the children of an extractor among `blocks` blocks, with as equal numbers of layers as possible.

    A block begins with a linear or convolutional layer, or a child that holds such layers, or with the flattening
    before it. Extractors with fewer of them than `blocks` are divided before norms too.
    """
    if not isinstance(features, nn.Sequential):
        raise UserError("FuseFL divides the extractor between its children: make `features` an nn.Sequential")
    children = list(features)
    starts = [i for i, child in enumerate(children) if any(isinstance(m, Dense) for m in child.modules())]
    if len(starts) < blocks:
        starts = [i for i, child in enumerate(children) if any(True for _ in child.parameters())]
    if len(starts) < blocks:
        raise UserError(f"the extractor has {len(starts)} layers with weights: use --blocks {max(len(starts), 1)}")
    begins = [int(part[0]) for part in torch.tensor(starts).tensor_split(blocks)]
    for i in range(1, blocks):
        while isinstance(children[begins[i] - 1], nn.Flatten):  # so that maps are joined, not their positions
            begins[i] -= 1
    ends = [*begins[1:], len(children)]
    return [nn.Sequential(*children[b:e]) for b, e in zip([0, *begins[1:]], ends, strict=True)]


def channels(blocks: Sequence[nn.Module]) -> list[int]:
    """Return C of each block: the outputs of the last linear or convolutional layer up to its end."""
    counts: list[int] = []
    for block in blocks:
        dense = [m for m in block.modules() if isinstance(m, Dense)]
        counts.append(len(dense[-1].weight) if dense else counts[-1])
    return counts


def thin(network: nn.Module, width: float) -> nn.Module:
    """Return a copy of `network` with `width` times the hidden units; unless that is 1, its values mean nothing.

    Widths are rounded to multiples of the numbers of groups of its GroupNorms, and are never less than these.
    """
    network = copy.deepcopy(network)
    if width == 1:
        return network
    multiple = lcm(*(m.num_groups for m in network.modules() if isinstance(m, nn.GroupNorm)))

    def scaled(n: int) -> int:
        return max(1, round(width * n / multiple)) * multiple

    dense = [m for m in network.modules() if isinstance(m, Dense)]
    before = 0  # outputs of the previous layer, before the change
    for name, layer in network.named_modules():
        if isinstance(layer, Dense):
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                raise UserError("a convolution in groups cannot be made thin: use --hidden-width=1")
            outputs, inputs = layer.weight.shape[:2]
            if before and isinstance(layer, nn.Linear) and inputs % before:
                raise UserError(f"layer {name} does not read the layer before it: use --hidden-width=1")
            fan = inputs // before if before and isinstance(layer, nn.Linear) else 1  # positions of a flattened map
            wanted = outputs if layer is dense[-1] else scaled(outputs)
            resize(layer, wanted, scaled(inputs // fan) * fan if before else inputs)
            before = outputs
        elif isinstance(layer, _BatchNorm | nn.GroupNorm) and layer.affine:
            resize_norm(layer, scaled(layer.weight.numel()))
        elif any(True for _ in layer.parameters(recurse=False)):
            raise UserError(f"layer {name} is of a kind that cannot be made thin: use --hidden-width=1")
    return network


def resize_norm(layer: _BatchNorm | nn.GroupNorm, units: int) -> None:
    """Give a norm that scales its channels another number of channels, with initial values."""
    layer.weight, layer.bias = nn.Parameter(torch.ones(units)), nn.Parameter(torch.zeros(units))
    if isinstance(layer, nn.GroupNorm):
        layer.num_channels = units
    else:
        layer.num_features = units
        if layer.running_mean is not None:
            layer.running_mean, layer.running_var = torch.zeros(units), torch.ones(units)
