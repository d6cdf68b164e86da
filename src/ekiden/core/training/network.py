"""An `nn.Module` over flat vectors: parameters, gradients and buffers are views of one vector each.

A network of plain layers can take other widths, or be read as matrices, one for each layer.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import seeded
from ekiden.core.models.split import SplitNetwork
from ekiden.core.training import frozen
from ekiden.core.training.weights import Layout, Part, Weights, layout


class Network:
    """A module whose values are stored in flat vectors. The network takes over the module.

    The optimiser, penalties, averages and distances are then one vector operation each.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        # call it as usual
        self.module = module.to(device)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        resting = [p for p in self.module.parameters() if not p.requires_grad]
        floats = [b for b in _buffers(self.module) if b.is_floating_point()]
        integers = [b for b in _buffers(self.module) if b.dtype == torch.int64]
        if not trainable:
            raise UserError("the model has no trainable parameter: nothing can be learned")
        for buffer in _buffers(self.module):
            if not buffer.is_floating_point() and buffer.dtype != torch.int64:
                raise UserError(
                    f"the model has a buffer of {buffer.dtype} values, which would not travel: "
                    "register it as int64, or with persistent=False if it never changes"
                )
        for tensor in (*trainable, *resting, *floats):
            if tensor.dtype != torch.float32:
                raise UserError(
                    f"the model holds {tensor.dtype} values: convert it with model.float()"
                )
        # (P,) all trainable parameters
        self.params = _flatten(trainable, trainable[0].device)
        # (P,) their gradients; `backward` adds into it
        self.grad = torch.zeros_like(self.params)
        # (B,) floating-point buffers, and parameters that are not trained now. Constants made by
        # `frozen.fix` are in
        # none of the vectors; they stay in the module.
        self.buffers = _flatten([*floats, *resting], self.params.device)
        # (C,) int64 buffers
        self.counters = _flatten(integers, self.params.device, torch.int64)
        self.params.grad = self.grad
        self._tensors = (trainable, [*floats, *resting], integers)
        # of work that these tensors take part in, by what says that it is the same
        self.shortcuts: dict[object, Any] = {}

        # where each tensor is in `params` and `buffers`
        self.layout: Layout = layout(self.module, trainable, [*floats, *resting])
        offset = 0
        for parameter in trainable:
            parameter.grad = self.grad[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        if self.params.is_cuda:
            compute_aligned(self.module)

    def load(self, weights: Weights) -> None:
        """Copy `weights` in."""
        if weights.shapes != (self.params.shape, self.buffers.shape, self.counters.shape):
            raise UserError(
                f"weights of {len(weights.params)} parameters do not fit this network of "
                f"{len(self.params)}: use the same model at every client"
            )
        self.params.copy_(weights.params)
        self.buffers.copy_(weights.buffers)
        self.counters.copy_(weights.counters)

    @cached_property
    def head(self) -> Part:
        """The entries of the classifier, which the model declares by naming it `head`."""
        head = getattr(self.module, "head", None)
        if not isinstance(head, nn.Module):
            raise UserError(
                "the model does not say which part of it is the classifier: name that part `head`, "
                "as in `self.head = nn.Linear(84, 10)`; all the rest is the extractor"
            )
        inside = {id(t) for t in (*head.parameters(), *_buffers(head))}

        def entries(tensors: Sequence[Tensor]) -> Tensor:
            each = [torch.full((t.numel(),), id(t) in inside) for t in tensors]
            return torch.cat([torch.empty(0, dtype=torch.bool), *each]).to(self.params.device)

        params, buffers, counters = self._tensors
        return Part(entries(params), entries(buffers), entries(counters))

    @property
    def light(self) -> bool:
        """Whether only a frozen part reads the samples, and is run once for each."""
        return type(self.module) is SplitNetwork and frozen.is_asked_once(self.module.features)

    def probe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what enters the head (b, A) and the outputs (b, K), in evaluation mode and
        differentiable.
        """
        # raises if it is not declared
        _ = self.head
        entering: list[Tensor] = []

        def keep(head: nn.Module, args: tuple[Tensor, ...]) -> None:
            entering.extend(args)

        handle = self.module.get_submodule("head").register_forward_pre_hook(keep)
        was_training = self.module.training
        self.module.eval()
        try:
            logits: Tensor = self.module(x)
        finally:
            handle.remove()
            self.module.train(was_training)
        if len(entering) != 1:
            raise UserError(
                "the model must call its `head` once, on one tensor: the output of the extractor"
            )
        return entering[0].flatten(1).float(), logits.float()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the trainable tensors, in the order in which `params` holds them."""
        return tuple(tuple(t.shape) for t in self._tensors[0])

    def weights(self) -> Weights:
        """Return a copy of the present values."""
        return Weights(self.params.clone(), self.buffers.clone(), self.counters.clone())


# bytes that a GPU's kernels read at a time, from addresses that it divides
_WIDEST_LOAD = 16


def compute_aligned(module: nn.Module) -> None:
    """Let layers compute with copies of tensors whose address a GPU's kernels do not take.

    In a flat vector a tensor begins where the one before it ends: after a single scalar, nowhere
    that 16 bytes divide. The vectors, the names of tensors and the gradients stay as they are.
    """
    for part in module.modules():
        if any(value.data_ptr() % _WIDEST_LOAD for value in part.parameters(recurse=False)):
            part.register_forward_pre_hook(_copy_tensors)
            part.register_forward_hook(_drop_copies, always_call=True)


def _copy_tensors(part: nn.Module, args: object) -> None:
    # an attribute of this name hides the parameter
    for name, value in part.named_parameters(recurse=False):
        if value.data_ptr() % _WIDEST_LOAD:
            part.__dict__[name] = value.clone()


def _drop_copies(part: nn.Module, args: object, outputs: object) -> None:
    for name in part._parameters:
        part.__dict__.pop(name, None)


def trial(module: nn.Module, x: Tensor) -> Tensor:
    """Return `x` to try a network with, or whole numbers if the network takes tokens."""
    if not any(isinstance(part, nn.Embedding) for part in module.modules()):
        return x
    was_training = module.training
    try:
        with torch.no_grad():
            module.eval()(x)
    except (RuntimeError, TypeError, IndexError):
        return x.abs().long()
    finally:
        module.train(was_training)
    return x


def fresh(module: nn.Module, seed: int) -> nn.Module:
    """Return a copy of `module` with new initial values, which each layer draws by
    `reset_parameters`.

    Frozen layers keep theirs, and so do parameters of modules without such a method.
    """
    module = frozen.copied(module).cpu()
    with seeded(seed):
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            keeps = frozen.is_fixed(part) or (own and not any(p.requires_grad for p in own))
            if callable(reset := getattr(part, "reset_parameters", None)) and not keeps:
                reset()
    return module


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that `build` makes on the device `meta`: shapes without values or
    memory.
    """
    with torch.device("meta"):
        return build()


def blank(build: Callable[[], nn.Module], module: nn.Module) -> nn.Module:
    """Return the network that `build` makes, with NaN as values, for a `Network` that loads others
    into it.

    Drawing the values of a large network takes long. If a part may need its own values, because it
    is not a layer of PyTorch or shares a tensor with another part, all values are drawn. The
    parameters are one NaN, expanded, which `Network` lays out in its vectors.

    Args:
        build: makes the network.
        module: what `on_meta` returned for it, which is used up.
    """
    tensors = []
    holders = []
    for part in module.modules():
        if own := [*part.parameters(False), *part.buffers(False)]:
            tensors += own
            holders.append(part)
    known = all(_is_known(part) for part in holders)
    if (
        not known
        or len({id(t) for t in tensors}) < len(tensors)
        or any(not t.is_meta for t in tensors)
    ):
        return build()
    for part in holders:
        for name, old in list(part.named_parameters(recurse=False)):
            nothing = torch.tensor(torch.nan, dtype=old.dtype).expand(old.shape)
            setattr(part, name, nn.Parameter(nothing, old.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            empty = torch.nan if buffer.is_floating_point() else 0
            setattr(part, name, torch.full(buffer.shape, empty, dtype=buffer.dtype))
    return module


def _is_known(part: nn.Module) -> bool:
    """Return whether it is a layer of PyTorch all of whose values travel."""
    return (
        type(part).__module__.startswith("torch.nn.modules.")
        and not part._non_persistent_buffers_set
    )


def _buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield persistent buffers only; the others are constants of the architecture."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield buffer


def _flatten(
    tensors: list[Tensor] | list[nn.Parameter],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return one vector that holds all `tensors`; they become views of it."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=device)
    offset = 0
    for tensor in tensors:
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        view.copy_(tensor.detach())
        tensor.data = view
        offset += tensor.numel()
    return flat


Dense = nn.Linear | nn.Conv2d
_ADVICE = "matching needs linear and convolutional layers that follow one another, without shortcuts; use average"


class Form(NamedTuple):
    """The parts of a layer's matrix (outputs, units·fan) or (outputs, units·fan + 1)."""

    # number of weights of one output for each unit that it reads: 1, the size of a kernel, or the
    # positions of a
    # flattened channel. In the first layer, all weights of an output.
    fan: int
    bias: bool  # whether the last column is the bias

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (outputs, units, fan) and the bias (outputs, 1), or (outputs, 0)."""
        weights = matrix.shape[1] - self.bias
        return matrix[:, :weights].reshape(len(matrix), -1, self.fan), matrix[:, weights:]

    def spread(self, matrix: Tensor, units: Tensor, width: int) -> Tensor:
        """Return `matrix` for `width` inputs, its own at places `units` (n,); the weights of the
        others are zero.
        """
        weights, bias = self.split(matrix)
        placed = matrix.new_zeros(len(matrix), width, self.fan)
        placed[:, units.long()] = weights
        return torch.cat([placed.flatten(1), bias], 1)

    def pick(self, matrix: Tensor, units: Tensor) -> Tensor:
        """Return `matrix` for the inputs at places `units` only: the reverse of `spread`."""
        weights, bias = self.split(matrix)
        return torch.cat([weights[:, units.long()].flatten(1), bias], 1)


class Elastic(nn.Module):
    """A chain of linear and convolutional layers, BatchNorm folded in, with hidden layers of any
    width.
    """

    # (L - 1,) int64, units of the hidden layers. Travels with the weights, so that they say what
    # they fit.
    widths: Tensor

    def __init__(self, network: nn.Module) -> None:
        """Take the structure and the values of `network`."""
        super().__init__()
        # a copy of the network it was made from, each BatchNorm part of the layer before it
        self.network = folded(network)
        layers = self.layers
        if len(layers) < 2:
            raise UserError(
                "the network has no hidden layer whose units could be matched: use average"
            )
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
        outputs = [*widths, len(self.layers[-1].weight)]
        inputs = [1, *widths]
        return [
            out * (n * form.fan + form.bias)
            for form, out, n in zip(self.forms, outputs, inputs, strict=True)
        ]

    def adapt(self, widths: Sequence[int]) -> None:
        """Give the hidden layers these widths; if one changes, all values become zero."""
        if list(widths) == self.widths.tolist():
            return
        outputs = [*widths, len(self.layers[-1].weight)]
        inputs = [1, *widths]
        for layer, form, out, units in zip(self.layers, self.forms, outputs, inputs, strict=True):
            resize(layer, out, units * form.fan // prod(layer.weight.shape[2:]))
        self.widths = torch.tensor(list(widths), device=self.widths.device)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        widths = state_dict.get(f"{prefix}widths")
        if widths is not None:
            values = (
                sum(t.numel() for name, t in state_dict.items() if name.startswith(prefix))
                - widths.numel()
            )
            if not self.fits(widths.flatten().tolist(), values):
                raise RuntimeError(
                    f"widths {widths.tolist()} do not belong to the {values} values next to them"
                )
            self.adapt(widths.tolist())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def fits(self, widths: Sequence[int], parameters: int) -> bool:
        """Return whether it has this number of parameters if its hidden layers have these
        widths.
        """
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
        layer.out_features = outputs
        layer.in_features = inputs
    else:
        layer.out_channels = outputs
        layer.in_channels = inputs


def adapted(module: nn.Module, model: Weights) -> nn.Module:
    """Return `module`; an elastic network gets the widths that `model` says."""
    if isinstance(module, Elastic):
        widths = model.counters.tolist()
        if not module.fits(widths, len(model.params)):
            raise UserError(
                "weights of another network than this run's: use the same model at every client"
            )
        module.adapt(widths)
    return module


def folded(network: nn.Module) -> nn.Module:
    """Return a trainable copy of `network` in which each BatchNorm is folded into the layer before
    it.
    """
    network = copy.deepcopy(network).eval()
    last: Dense | None = None
    for layer in Network(copy.deepcopy(network).requires_grad_(True)).layout.layers:
        part = network.get_submodule(layer.name)
        if layer.kind in ("linear", "conv") and isinstance(part, Dense):
            last = part
        elif isinstance(part, _BatchNorm) and last is not None and part.running_mean is not None:
            assert part.running_var is not None
            if len(part.running_mean) != len(last.weight):
                raise UserError(
                    f"layer {layer.name} does not follow a layer of its width: {_ADVICE}"
                )
            last.weight, last.bias = fuse_conv_bn_weights(
                last.weight,
                last.bias,
                part.running_mean,
                part.running_var,
                part.eps,
                part.weight,
                part.bias,
            )
            parent, _, name = layer.name.rpartition(".")
            setattr(network.get_submodule(parent), name, nn.Identity())
        else:
            raise UserError(
                f"layer {layer.name} is of a kind whose units cannot be matched: {_ADVICE}"
            )
    return network.requires_grad_(True)


def matrices(network: Network) -> list[Tensor]:
    """Return copies of the trainable layers, each as (outputs, inputs); a bias is the last
    column.
    """
    return [layer.matrix(network.params) for layer in network.layout.dense]


def assemble(elastic: Elastic, layers: Sequence[Tensor]) -> Network:
    """Return the network of `elastic` with the widths and values of `layers`; it takes over
    `elastic`.
    """
    elastic.adapt([len(layer) for layer in layers[:-1]])
    network = Network(elastic, layers[0].device)
    put(network, layers)
    return network


def put(network: Network, layers: Sequence[Tensor]) -> None:
    """The reverse of `matrices`, in place."""
    for layer, matrix in zip(network.layout.dense, layers, strict=True):
        layer.put(network.params, matrix)


def check(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a network whose outputs change if hidden units change places, or if idle units are
    added.
    """
    if frozen.digest(network) or len({p.requires_grad for p in network.parameters()}) > 1:
        raise UserError(
            "some of the network's layers are frozen, and all units are matched: train all, or use "
            "average"
        )
    draw = torch.Generator().manual_seed(0)
    before = Network(copy.deepcopy(network).cpu().requires_grad_(True))
    for values in before.module.parameters():
        # biases and norms get values as after training
        if values.dim() == 1:
            values.data.add_(torch.randn(values.shape, generator=draw), alpha=0.1)
    before.buffers.uniform_(0.5, 1.5, generator=draw)
    elastic = Elastic(before.module)
    layers = matrices(Network(copy.deepcopy(elastic)))
    forms = elastic.forms
    for i in range(len(layers) - 1):
        width = len(layers[i]) + 2
        units = torch.randperm(width, generator=draw)[: len(layers[i])]
        rows = layers[i].new_zeros(width, layers[i].shape[1])
        rows[units] = layers[i]
        layers[i], layers[i + 1] = rows, forms[i + 1].spread(layers[i + 1], units, width)
    x = trial(before.module, torch.randn(2, *shape, generator=draw))
    with torch.no_grad():
        try:
            wanted = before.module.eval()(x)
            found = assemble(elastic, layers).module.eval()(x)
        except RuntimeError as error:
            raise UserError(f"the network does not run with wider layers: {_ADVICE}") from error
    if not torch.allclose(wanted, found, rtol=1e-3, atol=1e-4 * float(wanted.abs().max() + 1)):
        raise UserError(f"the network has shortcuts between its layers: {_ADVICE}")
