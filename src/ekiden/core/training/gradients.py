"""The gradient of a mini-batch: by autograd, or by the same kernels without it.

With a small network, most of a step passes between the kernels. So a chain of linear layers is
written out (`Chain`), and on a GPU the two passes of a network are recorded and replayed
(`Recording`). Such a shortcut is taken for batches of one shape once it has given the bits of
autograd for such a batch, with this network, on this machine. Otherwise autograd does the work.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from ekiden.core.base.settings import Hardware
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Task
from ekiden.core.tasks.labels import Classification
from ekiden.core.training.network import Elastic, Network

Pass = Callable[..., Tensor]
"""(inputs (b, ...), labels (b, ...), further tensors) -> the loss (), without gradient; the
gradient is left in `network.grad`."""


class Gradient:
    """Puts the gradient of the loss of a batch into `network.grad`, and returns the loss ()."""

    def __init__(
        self,
        network: Network,
        hardware: Hardware,
        loss: Callable[..., Tensor],
        shortcut: Callable[[Pass, tuple[Tensor, ...]], Pass | None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            network: what is trained.
            hardware: on what.
            loss: (network, inputs, labels, further tensors) -> the mean loss (), differentiable.
            shortcut: given the pass by autograd and a batch, returns what may do the same for
                batches of this shape.
        """
        self._network = network
        self._hardware = hardware
        self._loss = loss
        self._shortcut = shortcut
        self._seen: set[Any] = set()
        # by the shapes of a batch
        self._passes: dict[Any, Pass] = {}

    def __call__(self, *batch: Tensor) -> Tensor:
        if self._shortcut is None:
            return self._by_autograd(*batch)
        kind = (self._network.module.training, *[tensor.shape for tensor in batch])
        if kind in self._passes:
            return self._passes[kind](*batch)
        if kind in self._seen:
            return self._compared(kind, self._shortcut, batch)
        # the first pass makes workspaces, which a recording must not make
        self._seen.add(kind)
        return self._by_autograd(*batch)

    def _by_autograd(self, *batch: Tensor) -> Tensor:
        network = self._network
        network.grad.zero_()
        with self._hardware.autocast():
            loss = self._loss(network.module, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _compared(
        self,
        kind: Any,
        shortcut: Callable[[Pass, tuple[Tensor, ...]], Pass | None],
        batch: tuple[Tensor, ...],
    ) -> Tensor:
        """Return the loss by autograd; from now on take the shortcut, if it does the same."""
        network = self._network
        changing = network.grad, network.buffers, network.counters
        draws = generators(network.params.device)

        def state() -> tuple[list[Tensor], list[Tensor]]:
            return [t.clone() for t in changing], [draw.get_state() for draw in draws]

        def restore(values: list[Tensor], drawn: list[Tensor]) -> None:
            for tensor, value in zip(changing, values, strict=True):
                tensor.copy_(value)
            for draw, value in zip(draws, drawn, strict=True):
                draw.set_state(value)

        before = state()
        loss = self._by_autograd(*batch).clone()
        after = state()
        restore(*before)
        self._passes[kind] = self._by_autograd
        if short := shortcut(self._by_autograd, batch):
            found = [short(*batch), *changing]
            if all(map(torch.equal, found, [loss, *after[0]])):
                self._passes[kind] = short
        restore(*after)
        return loss


class Recording:
    """A pass over a batch on a GPU as a CUDA graph, which owns its inputs."""

    def __init__(self, make: Pass, batch: tuple[Tensor, ...], pool: Any) -> None:
        self._batch = [tensor.clone() for tensor in batch]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._loss = make(*self._batch)

    def __call__(self, *batch: Tensor) -> Tensor:
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._loss.clone()


def recorder(network: Network) -> Callable[[Pass, tuple[Tensor, ...]], Pass | None] | None:
    """Return what records passes of a network on a GPU; None if they may differ between steps."""
    if not network.params.is_cuda or not all(map(_does_the_same, network.module.modules())):
        return None

    # one is replayed at a time: they share memory
    pool = cache(torch.cuda.graph_pool_handle)

    def record(make: Pass, batch: tuple[Tensor, ...]) -> Pass | None:
        try:
            return Recording(make, batch, pool())
        except RuntimeError:  # something waits for the GPU
            return None

    return record


def _does_the_same(part: nn.Module) -> bool:
    """Return whether a module does the same in each step: PyTorch's and ours do."""
    return type(part).__module__.startswith(("torch.nn.modules.", "ekiden.core.models."))


def is_changed(module: nn.Module) -> bool:
    """Return whether a pass calls more, or something else, than the classes of the parts say."""
    return any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or "forward" in vars(part)
        for part in module.modules()
    )


def generators(device: torch.device) -> list[torch.Generator]:
    """Return what training draws from: PyTorch's generator on the CPU and, on a GPU, that GPU's.

    torch.manual_seed seeds these too, but without a GPU it keeps a traceback of each call.
    """
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


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
        return self._out.relu_() if self.rectified else self._out

    def backward(self, d: Tensor, *, first: bool) -> Tensor:
        """Return the gradient at the inputs from that at the outputs; the first layer needs none."""
        if self.rectified:
            d = torch.ops.aten.threshold_backward.default(d, self._out, 0)
        torch.mm(d.t(), self._x, out=self._grads[0])
        if self._bias:
            torch.sum(d, 0, out=self._grads[1])
        return d if first else d.mm(self._weight)


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

    def shortcut(self, make: Pass, batch: tuple[Tensor, ...]) -> Pass | None:
        """Return its pass if it can read the batch: vectors, or what is flattened to them."""
        return self if batch[0].dtype == torch.float32 and not batch[0].requires_grad else None

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
