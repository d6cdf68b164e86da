"""An `nn.Module` over flat vectors: parameters, gradients and buffers are views of one vector each."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.base.seeds import seeded
from ekiden.models.split import SplitNetwork
from ekiden.training import frozen
from ekiden.training.weights import Layout, Part, Weights, layout


class Network:
    """A module whose values are stored in flat vectors. The network takes over the module.

    The optimiser, penalties, averages and distances are then one vector operation each.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device)  # call it as usual
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        resting = [p for p in self.module.parameters() if not p.requires_grad]
        floats = [b for b in _buffers(self.module) if b.is_floating_point()]
        integers = [b for b in _buffers(self.module) if b.dtype == torch.int64]
        if not trainable:
            raise UserError("the model has no trainable parameter: nothing can be learned")
        for buffer in _buffers(self.module):
            if not buffer.is_floating_point() and buffer.dtype != torch.int64:
                raise UserError(
                    f"the model has a buffer of {buffer.dtype} values, which would not travel: register it as int64, "
                    "or with persistent=False if it never changes"
                )
        for tensor in (*trainable, *resting, *floats):
            if tensor.dtype != torch.float32:
                raise UserError(f"the model holds {tensor.dtype} values: convert it with model.float()")
        self.params = _flatten(trainable, trainable[0].device)  # (P,) all trainable parameters
        self.grad = torch.zeros_like(self.params)  # (P,) their gradients; `backward` adds into it
        # (B,) floating-point buffers, and parameters that are not trained now. Constants made by `frozen.fix` are in
        # none of the vectors; they stay in the module.
        self.buffers = _flatten([*floats, *resting], self.params.device)
        self.counters = _flatten(integers, self.params.device, torch.int64)  # (C,) int64 buffers
        self.params.grad = self.grad
        self._tensors = (trainable, [*floats, *resting], integers)

        # where each tensor is in `params` and `buffers`
        self.layout: Layout = layout(self.module, trainable, [*floats, *resting])
        offset = 0
        for parameter in trainable:
            parameter.grad = self.grad[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()

    def load(self, weights: Weights) -> None:
        """Copy `weights` in."""
        if weights.shapes != (self.params.shape, self.buffers.shape, self.counters.shape):
            raise UserError(
                f"weights of {len(weights.params)} parameters do not fit this network of {len(self.params)}: "
                "use the same model at every client"
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
                "the model does not say which part of it is the classifier: name that part `head`, as in "
                "`self.head = nn.Linear(84, 10)`; all the rest is the extractor"
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
        """Return what enters the head (b, A) and the outputs (b, K), in evaluation mode and differentiable."""
        _ = self.head  # raises if it is not declared
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
            raise UserError("the model must call its `head` once, on one tensor: the output of the extractor")
        return entering[0].flatten(1).float(), logits.float()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the trainable tensors, in the order in which `params` holds them."""
        return tuple(tuple(t.shape) for t in self._tensors[0])

    def weights(self) -> Weights:
        """Return a copy of the present values."""
        return Weights(self.params.clone(), self.buffers.clone(), self.counters.clone())


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
    """Return a copy of `module` with new initial values, which each layer draws by `reset_parameters`.

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
    """Return the network that `build` makes on the device `meta`: shapes without values or memory."""
    with torch.device("meta"):
        return build()


def blank(build: Callable[[], nn.Module], module: nn.Module | None = None) -> nn.Module:
    """Return the network that `build` makes, with NaN as values, for a `Network` that loads others into it.

    Drawing the values of a large network takes long. If a part may need its own values, because it is not a layer of
    PyTorch or shares a tensor with another part, all values are drawn. The parameters are one NaN, expanded, which
    `Network` lays out in its vectors.

    Args:
        build: makes the network.
        module: what `on_meta` returned for it, which is used up; made here if it is not given.
    """
    module = on_meta(build) if module is None else module
    tensors = [t for part in module.modules() for t in (*part.parameters(False), *part.buffers(False))]
    holders = [part for part in module.modules() if [*part.parameters(False), *part.buffers(False)]]
    known = all(_is_known(part) for part in holders)
    if not known or len({id(t) for t in tensors}) < len(tensors) or any(not t.is_meta for t in tensors):
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
    return type(part).__module__.startswith("torch.nn.modules.") and not part._non_persistent_buffers_set


def _buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield persistent buffers only; the others are constants of the architecture."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield buffer


def _flatten(
    tensors: list[Tensor] | list[nn.Parameter], device: torch.device, dtype: torch.dtype = torch.float32
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
