"""The gradient of a mini-batch: by autograd, or by the same kernels without it.

With a small network, most of a step passes between the kernels. So a chain of linear layers is
written out (`Chain`), and on a GPU a whole step, or a pass without gradient, is recorded and
replayed (`Recording`). Such a `Shortcut` is taken for tensors of one shape once it has given the
bits of the plain way, with this network, on this machine.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from ekiden.core.base.settings import Hardware
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Task
from ekiden.core.tasks.labels import Classification
from ekiden.core.training.network import Elastic, Network

Pass = Callable[..., Tensor]
"""A function of tensors that returns one, without gradient, and may change others: the loss () of a
batch, whose gradient is left in `network.grad`."""


@dataclass(frozen=True)
class Gradient:
    """Puts the gradient of the loss of a batch into `network.grad`, and returns the loss ()."""

    network: Network  # what is trained
    hardware: Hardware  # on what
    # (network, inputs, labels, further tensors) -> the mean loss (), differentiable
    loss: Callable[..., Tensor]
    shortcut: "Shortcut | None" = None  # may do the same more quickly

    def __call__(self, *batch: Tensor) -> Tensor:
        if self.shortcut is None:
            return self._by_autograd(*batch)
        return self.shortcut(self._by_autograd, *batch)

    def _by_autograd(self, *batch: Tensor) -> Tensor:
        network = self.network
        network.grad.zero_()
        with self.hardware.autocast():
            loss = self.loss(network.module, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class Shortcut:
    """A quicker way to what a function of tensors gives, taken where it gives the same bits.

    The first call with tensors of some shapes is left to the function: it makes workspaces, which a
    recording must not make. The second is done both ways and compared.
    """

    def __init__(
        self,
        network: Network,
        quicker: Callable[[Pass, tuple[Tensor, ...]], Pass | None],
        changing: Sequence[Tensor] = (),
    ) -> None:
        """Prepare.

        Args:
            network: what the function computes with.
            quicker: given the function and its arguments, returns what may give the same for
                arguments of these shapes.
            changing: what the function changes, apart from the network's gradient and buffers.
        """
        self._module = network.module
        self._quicker = quicker
        self._changing = (network.grad, network.buffers, network.counters, *changing)
        self._draws = generators(network.params.device)
        # None: to be compared; False: the function itself
        self._ways: dict[Any, Pass | Literal[False] | None] = {}

    def __call__(self, function: Pass, *given: Tensor) -> Tensor:
        """Return what `function` does: the same one in each call, as far as bits can tell."""
        kind = (self._module.training, *[tensor.shape for tensor in given])
        if kind not in self._ways:
            self._ways[kind] = None
            return function(*given)
        way = self._ways[kind]
        if way is None:
            return self._compare(kind, function, given)
        if way:
            return way(*given)
        return function(*given)

    def _compare(self, kind: Any, function: Pass, given: tuple[Tensor, ...]) -> Tensor:
        """Return what the function gives, and note which way to take from now on."""
        before = self._state()
        way = self._quicker(function, given)
        # making it may have changed what is on the CPU, and replaying it would not
        self._restore(before)
        found = [way(*given), *self._state()] if way else []
        self._restore(before)
        right = function(*given)
        same = found and all(map(torch.equal, found, [right, *self._state()]))
        self._ways[kind] = way if way and same else False
        return right

    def _state(self) -> list[Tensor]:
        tensors = [tensor.clone() for tensor in self._changing]
        return tensors + [draw.get_state() for draw in self._draws]

    def _restore(self, state: list[Tensor]) -> None:
        for tensor, value in zip(self._changing, state, strict=False):
            tensor.copy_(value)
        for draw, value in zip(self._draws, state[len(self._changing) :], strict=True):
            draw.set_state(value)


class Recording:
    """A function of tensors on a GPU as a CUDA graph, which owns its arguments.

    All else that the function reads must live as long.
    """

    def __init__(self, function: Pass, given: tuple[Tensor, ...]) -> None:
        self._given = [tensor.clone() for tensor in given]
        self._graph = torch.cuda.CUDAGraph()
        pool = _keeper().pool()
        torch.cuda.synchronize()
        # Collecting garbage could free another graph, which a recording does not survive.
        gc.disable()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                self._graph.capture_begin(pool)
                try:
                    self._found = function(*self._given)
                finally:
                    self._graph.capture_end()
        except RuntimeError:
            # PyTorch's memory and generator would stay in a recording that fails: this ends that of
            # the memory, and a recording that succeeds that of the generator.
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            _keeper.cache_clear()
            _keeper()
            raise
        finally:
            gc.enable()

    def __call__(self, *given: Tensor) -> Tensor:
        for own, new in zip(self._given, given, strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._found.clone()


def record(function: Pass, given: tuple[Tensor, ...]) -> Pass | None:
    """Return a recording; None if the function waits for the GPU."""
    try:
        # found out before, since a recording in which something waits does harm
        with warnings.catch_warnings():
            # PyTorch calls the mode a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            function(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return Recording(function, given)
    except RuntimeError:
        return None


@cache
def _keeper() -> torch.cuda.CUDAGraph:
    """Return a graph that keeps the memory which all others share: one is replayed at a time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros((), device="cuda")
    return graph


def is_recordable(network: Network) -> bool:
    """Return whether a GPU may replay passes of a network: PyTorch's modules and ours do the same in
    each step.
    """
    if not network.params.is_cuda or is_changed(network.module):
        return False
    names = (type(part).__module__ for part in network.module.modules())
    return all(name.startswith(("torch.nn.modules.", "ekiden.core.models.")) for name in names)


def is_changed(module: nn.Module) -> bool:
    """Return whether a pass calls more, or something else, than the classes of the parts say."""
    for part in module.modules():
        hooks = [
            *part._forward_hooks.values(),
            *part._forward_pre_hooks.values(),
            *part._backward_hooks.values(),
            *part._backward_pre_hooks.values(),
        ]
        # ours align tensors
        if "forward" in vars(part) or any(h.__module__ != Network.__module__ for h in hooks):
            return True
    return False


def generators(device: torch.device) -> list[torch.Generator]:
    """Return what training draws from: PyTorch's generator on the CPU and, on a GPU, that GPU's.

    torch.manual_seed seeds these too, but without a GPU it keeps a traceback of each call.
    """
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


class _Linear:
    """The two passes of a linear layer with ReLU or nothing after it."""

    def __init__(self, layer: nn.Linear) -> None:
        self.rectified = False
        self.trained = [p for p in layer.parameters() if p.grad is not None]
        self._grads = [p.grad for p in self.trained if p.grad is not None]
        self._weight, *self._bias = (p.detach() for p in layer.parameters())
        self._transposed = self._weight.t()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (b, outputs) of inputs (b, inputs)."""
        self._x = x
        if self._bias:
            self._out = torch.addmm(self._bias[0], x, self._transposed)
        else:
            self._out = x.mm(self._transposed)
        if self.rectified:
            self._out.relu_()
        return self._out

    def backward(self, d: Tensor, *, first: bool) -> Tensor:
        """Return the gradient at the inputs from that at the outputs; the first layer needs none."""
        if self.rectified:
            d = torch.ops.aten.threshold_backward.default(d, self._out, 0)
        torch.mm(d.t(), self._x, out=self._grads[0])
        if self._bias:
            torch.sum(d, 0, out=self._grads[1])
        if first:
            return d
        return d.mm(self._weight)


class Chain:
    """The gradient of a chain of linear layers with ReLU between them, kernel by kernel."""

    def __init__(self, grad: Tensor, layers: list[_Linear], task: Task) -> None:
        self._grad = grad
        self._layers = layers
        plain = type(task) is Classification and not task.weights
        self._loss = _cross_entropy if plain else _by_autograd(task)

    @classmethod
    def of(cls, network: Network, task: Task) -> "Chain | None":
        """Return the chain of a network on a CPU; None if it is something else, or partly frozen."""
        layers: list[_Linear] = []
        for part in _parts(network.module):
            if type(part) is nn.Linear:
                layers.append(_Linear(part))
            elif type(part) is nn.ReLU and layers:
                layers[-1].rectified = True
            elif layers or type(part) is not nn.Flatten:
                return None
        trained = sum(p.numel() for layer in layers for p in layer.trained)
        if trained != len(network.params) or network.params.is_cuda or len(network.buffers):
            # a layer occurs twice, or a part of one is frozen
            return None
        return cls(network.grad, layers, task)

    def quicker(self, make: Pass, batch: tuple[Tensor, ...]) -> Pass | None:
        """Return its pass if it can read the batch: vectors, or what is flattened to them."""
        if batch[0].dtype == torch.float32 and not batch[0].requires_grad:
            return self
        return None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            value = x.flatten(1)
            for layer in self._layers:
                value = layer.forward(value)
            loss, d = self._loss(value, y)
            for layer in reversed(self._layers):
                d = layer.backward(d, first=layer is self._layers[0])
            # autograd adds to zeros, which turns -0 into 0
            self._grad.add_(0.0)
        return loss


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a network in the order in which they are run."""
    if type(module) in (nn.Sequential, SplitNetwork, Elastic):
        # also one that occurs twice
        for part in filter(None, module._modules.values()):
            yield from _parts(part)
    elif type(module) is not nn.Identity:
        yield module


def _cross_entropy(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy () and its gradient (b, K)."""
    logs = torch.log_softmax(outputs, 1)
    d = torch.zeros_like(outputs).scatter_(1, y.unsqueeze(1), -1 / y.shape[0])
    return nll_loss(logs, y), torch._log_softmax_backward_data(d, logs, 1, outputs.dtype)


def _by_autograd(task: Task) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what gives the mean loss () of a task and its gradient at the outputs."""

    def loss(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            value = task.mean_loss(leaf, y)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return loss
