"""A network whose hidden layers get the widths of the weights that it holds; matching units needs it."""

import copy
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ekiden.base.errors import UserError
from ekiden.training import frozen
from ekiden.training.network import Network, trial
from ekiden.training.weights import Weights

Dense = nn.Linear | nn.Conv2d
_ADVICE = "matching needs linear and convolutional layers that follow one another, without shortcuts; use average"


class Form(NamedTuple):
    """The parts of a layer's matrix (outputs, units·fan) or (outputs, units·fan + 1)."""

    # number of weights of one output for each unit that it reads: 1, the size of a kernel, or the positions of a
    # flattened channel. In the first layer, all weights of an output.
    fan: int
    bias: bool  # whether the last column is the bias

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (outputs, units, fan) and the bias (outputs, 1), or (outputs, 0)."""
        weights = matrix.shape[1] - self.bias
        return matrix[:, :weights].reshape(len(matrix), -1, self.fan), matrix[:, weights:]

    def spread(self, matrix: Tensor, units: Tensor, width: int) -> Tensor:
        """Return `matrix` for `width` inputs, its own at places `units` (n,); the weights of the others are zero."""
        weights, bias = self.split(matrix)
        placed = matrix.new_zeros(len(matrix), width, self.fan)
        placed[:, units.long()] = weights
        return torch.cat([placed.flatten(1), bias], 1)

    def pick(self, matrix: Tensor, units: Tensor) -> Tensor:
        """Return `matrix` for the inputs at places `units` only: the reverse of `spread`."""
        weights, bias = self.split(matrix)
        return torch.cat([weights[:, units.long()].flatten(1), bias], 1)


class Elastic(nn.Module):
    """A chain of linear and convolutional layers, BatchNorm folded in, with hidden layers of any width."""

    # (L - 1,) int64, units of the hidden layers. Travels with the weights, so that they say what they fit.
    widths: Tensor

    def __init__(self, network: nn.Module) -> None:
        """Take the structure and the values of `network`."""
        super().__init__()
        # a copy of the network it was made from, each BatchNorm part of the layer before it
        self.network = folded(network)
        layers = self.layers
        if len(layers) < 2:
            raise UserError("the network has no hidden layer whose units could be matched: use average")
        widths = [len(layer.weight) for layer in layers[:-1]]
        if any(layer.weight[0].numel() % n for layer, n in zip(layers[1:], widths, strict=True)):
            raise UserError(f"a layer of the network does not read the layer before it: {_ADVICE}")
        self.register_buffer("widths", torch.tensor(widths))

    @property
    def layers(self) -> list[Dense]:
        """The linear and convolutional layers, the classifier last."""
        return [m for m in self.network.modules() if isinstance(m, Dense)]

    @property
    def forms(self) -> list[Form]:
        """Return the parts of the layers' matrices."""
        units = [1, *self.widths.tolist()]
        each = zip(self.layers, units, strict=True)
        return [Form(layer.weight[0].numel() // n, layer.bias is not None) for layer, n in each]

    def sizes(self, widths: Sequence[int]) -> list[int]:
        """Return the number of parameters of each layer if the hidden layers have these widths."""
        outputs, inputs = [*widths, len(self.layers[-1].weight)], [1, *widths]
        return [out * (n * form.fan + form.bias) for form, out, n in zip(self.forms, outputs, inputs, strict=True)]

    def adapt(self, widths: Sequence[int]) -> None:
        """Give the hidden layers these widths; if one changes, all values become zero."""
        if list(widths) == self.widths.tolist():
            return
        outputs, inputs = [*widths, len(self.layers[-1].weight)], [1, *widths]
        for layer, form, out, units in zip(self.layers, self.forms, outputs, inputs, strict=True):
            resize(layer, out, units * form.fan // prod(layer.weight.shape[2:]))
        self.widths = torch.tensor(list(widths), device=self.widths.device)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        widths = state_dict.get(f"{prefix}widths")
        if widths is not None:
            values = sum(t.numel() for name, t in state_dict.items() if name.startswith(prefix)) - widths.numel()
            if not self.fits(widths.flatten().tolist(), values):
                raise RuntimeError(f"widths {widths.tolist()} do not belong to the {values} values next to them")
            self.adapt(widths.tolist())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def fits(self, widths: Sequence[int], parameters: int) -> bool:
        """Return whether it has this number of parameters if its hidden layers have these widths."""
        known = len(widths) == len(self.widths) and min(widths) > 0
        return known and sum(self.sizes(widths)) == parameters

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.network(x)
        return logits


def resize(layer: Dense, outputs: int, inputs: int) -> None:
    """Give a layer new zero weights of other numbers of outputs and inputs."""
    old = layer.weight
    layer.weight = nn.Parameter(old.new_zeros(outputs, inputs, *old.shape[2:]))
    if layer.bias is not None:
        layer.bias = nn.Parameter(old.new_zeros(outputs))
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
    else:
        layer.out_channels, layer.in_channels = outputs, inputs


def adapted(module: nn.Module, model: Weights) -> nn.Module:
    """Return `module`; an elastic network gets the widths that `model` says."""
    if isinstance(module, Elastic):
        widths = model.counters.tolist()
        if not module.fits(widths, len(model.params)):
            raise UserError("weights of another network than this run's: use the same model at every client")
        module.adapt(widths)
    return module


def folded(network: nn.Module) -> nn.Module:
    """Return a trainable copy of `network` in which each BatchNorm is folded into the layer before it."""
    network = copy.deepcopy(network).eval()
    last: Dense | None = None
    for layer in Network(copy.deepcopy(network).requires_grad_(True)).layout.layers:
        part = network.get_submodule(layer.name)
        if layer.kind in ("linear", "conv") and isinstance(part, Dense):
            last = part
        elif isinstance(part, _BatchNorm) and last is not None and part.running_mean is not None:
            assert part.running_var is not None
            if len(part.running_mean) != len(last.weight):
                raise UserError(f"layer {layer.name} does not follow a layer of its width: {_ADVICE}")
            last.weight, last.bias = fuse_conv_bn_weights(
                last.weight, last.bias, part.running_mean, part.running_var, part.eps, part.weight, part.bias
            )
            parent, _, name = layer.name.rpartition(".")
            setattr(network.get_submodule(parent), name, nn.Identity())
        else:
            raise UserError(f"layer {layer.name} is of a kind whose units cannot be matched: {_ADVICE}")
    return network.requires_grad_(True)


def matrices(network: Network) -> list[Tensor]:
    """Return copies of the trainable layers, each as (outputs, inputs); a bias is the last column."""
    return [layer.matrix(network.params) for layer in network.layout.dense]


def assemble(elastic: Elastic, layers: Sequence[Tensor]) -> Network:
    """Return the network of `elastic` with the widths and values of `layers`; it takes over `elastic`."""
    elastic.adapt([len(layer) for layer in layers[:-1]])
    network = Network(elastic, layers[0].device)
    put(network, layers)
    return network


def put(network: Network, layers: Sequence[Tensor]) -> None:
    """The reverse of `matrices`, in place."""
    for layer, matrix in zip(network.layout.dense, layers, strict=True):
        layer.put(network.params, matrix)


def check(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a network whose outputs change if hidden units change places, or if idle units are added."""
    if frozen.digest(network) or len({p.requires_grad for p in network.parameters()}) > 1:
        raise UserError("some of the network's layers are frozen, and all units are matched: train all, or use average")
    draw = torch.Generator().manual_seed(0)
    before = Network(copy.deepcopy(network).cpu().requires_grad_(True))
    for values in before.module.parameters():
        if values.dim() == 1:  # biases and norms get values as after training
            values.data.add_(torch.randn(values.shape, generator=draw), alpha=0.1)
    before.buffers.uniform_(0.5, 1.5, generator=draw)
    elastic = Elastic(before.module)
    layers, forms = matrices(Network(copy.deepcopy(elastic))), elastic.forms
    for i in range(len(layers) - 1):
        width = len(layers[i]) + 2
        units = torch.randperm(width, generator=draw)[: len(layers[i])]
        rows = layers[i].new_zeros(width, layers[i].shape[1])
        rows[units] = layers[i]
        layers[i], layers[i + 1] = rows, forms[i + 1].spread(layers[i + 1], units, width)
    x = trial(before.module, torch.randn(2, *shape, generator=draw))
    with torch.no_grad():
        try:
            wanted, found = before.module.eval()(x), assemble(elastic, layers).module.eval()(x)
        except RuntimeError as error:
            raise UserError(f"the network does not run with wider layers: {_ADVICE}") from error
    if not torch.allclose(wanted, found, rtol=1e-3, atol=1e-4 * float(wanted.abs().max() + 1)):
        raise UserError(f"the network has shortcuts between its layers: {_ADVICE}")
