"""How precisely a client's data determine each weight: Fisher information, and moments of
inputs.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import UserError, Work
from ekiden.core.training.network import Network, trial
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import Trained
from ekiden.methods.blocks.symmetric import numbers, symmetric, upper

DAMPING_LINEAR = 0.01**0.8
DAMPING_CONV = 1e-5**0.8  # z of the released MA-Echo code
DAMPING = 0.5  # c of the released MA-Echo code
Labels = Literal["expected", "sampled", "given"]
"""The labels of squared gradients: all classes, weighted by the model's probabilities (the Fisher
information); one class drawn by them (an unbiased estimate); or the labels of the data (the
empirical Fisher information)."""
Batches = Iterable[tuple[Tensor, Tensor]]
_CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm)
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, *_CHANNELS_LAST)
_ENTRIES = 1 << 22  # most per-sample gradients in memory at a time


@dataclass
class Recursion:
    """The released recursion: Q ← Q - c·kkᵀ/(z + rᵀk), k = Qr, for every input r; P = I - Q.

    With c = 1 this is recursive least squares, and P the closed form on the inputs given.
    """

    q: Tensor  # (size, size) float64, the identity at first
    c: float
    z: float

    def add(self, inputs: Tensor) -> None:
        """Take in inputs (n, size), one after the other."""
        for r in inputs.double():
            k = self.q @ r
            self.q.addr_(k, k, alpha=-self.c / (self.z + float(r @ k)))

    def projector(self) -> Tensor:
        """Return P (size, size) float64."""
        # the mean with its transpose takes away the skew that rounding leaves
        return torch.eye(len(self.q), dtype=torch.float64) - (self.q + self.q.T) / 2


@dataclass
class Closed:
    """P = Xᵀ(XXᵀ + zI)⁻¹X = G(G + zI)⁻¹ with G = XᵀX, which is all that is kept of the inputs X."""

    gram: Tensor  # (size, size) float64, zeros at first
    z: float

    def add(self, inputs: Tensor) -> None:
        """Take in inputs (n, size)."""
        self.gram.addmm_(inputs.double().T, inputs.double())

    def projector(self) -> Tensor:
        """Return P (size, size) float64; G may be singular."""
        values, vectors = torch.linalg.eigh(self.gram)
        values = values.clamp(min=0)
        # V diag(s/(s + z)) Vᵀ for G = V diag(s) Vᵀ.
        projector: Tensor = (vectors * (values / (values + self.z))) @ vectors.T
        return projector


def projectors(
    network: nn.Module,
    layers: Iterable[Layer],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    closed: bool,
) -> list[Tensor]:
    """Return one projector (inputs, inputs) float64 for each of `layers`, from one pass of
    `batches` through `network`.

    Args:
        network: in evaluation mode.
        layers: linear and convolutional layers of it.
        batches: inputs and labels.
        closed: by the closed form over all samples, instead of the released recursion over batch
            means.
    """
    layers = list(layers)
    made: dict[str, Recursion | Closed] = {}
    for layer in layers:
        z = DAMPING_CONV
        if layer.kind == "linear":
            z = DAMPING_LINEAR
        identity = torch.eye(layer.inputs, dtype=torch.float64)
        made[layer.name] = Recursion(identity, DAMPING, z)
        if closed:
            made[layer.name] = Closed(torch.zeros_like(identity), z)
    for x, _ in batches:
        with torch.no_grad(), watched(network, layers) as seen:
            network(x)
        for layer in layers:
            module = network.get_submodule(layer.name)
            for read, _ in seen[layer.name]:
                rows = layer_inputs(module, read, mean=not closed).cpu()
                if layer.bias is not None:
                    rows = F.pad(rows, (0, 1), value=1.0)
                made[layer.name].add(rows)
    return [made[layer.name].projector() for layer in layers]


def layer_inputs(module: nn.Module, x: Tensor, *, mean: bool) -> Tensor:
    """Return (n, d): what one output of a linear or convolutional layer reads.

    With `mean` as in the released MA-Echo code: the mean input of the batch; of convolutions its
    patches without padding, two pixels apart. Otherwise every sample, and every patch that the
    layer itself reads.
    """
    if not isinstance(module, nn.Conv2d):
        rows = x.flatten(0, -2)
        return rows.mean(0, keepdim=True) if mean else rows
    kernel = cast(tuple[int, int], module.kernel_size)
    dilation = cast(tuple[int, int], module.dilation)
    if mean:
        x = x.mean(0, keepdim=True)
        sides = zip(x.shape[2:], kernel, dilation, strict=True)
        if any(n < d * (k - 1) + 1 for n, k, d in sides):
            x = F.pad(x, module._reversed_padding_repeated_twice)
        patches = F.unfold(x, kernel, dilation, stride=2)
    else:
        x = F.pad(x, module._reversed_padding_repeated_twice)
        patches = F.unfold(x, kernel, dilation, stride=cast(tuple[int, int], module.stride))
    return patches.transpose(1, 2).flatten(0, 1)


def compress(projector: Tensor, rank: int) -> Tensor:
    """Return (d, rank) F = U√s for the `rank` largest eigenvalues s, so that F Fᵀ ≈ P; P itself if
    F is not smaller.
    """
    if not 0 < rank < len(projector):
        return projector
    values, vectors = torch.linalg.eigh(projector)
    factor: Tensor = vectors[:, -rank:] * values[-rank:].clamp(min=0).sqrt()
    return factor


def thin(projector: Tensor) -> Tensor:
    """Return (d, k) F with F Fᵀ = P up to rounding, if k < d/3 columns are enough; otherwise P
    itself.

    Projectors of few batches have low rank. This is Cholesky's factorisation with pivoting, which
    stops early; products with F are then several times cheaper.
    """
    d = len(projector)
    left = projector.diagonal().double().clone()
    factor = left.new_zeros(d, d // 3)
    least = 1e-6 * float(left.max())
    for k in range(d // 3):
        pivot = int(left.argmax())
        if float(left[pivot]) <= least:
            return factor[:, :k].to(projector.dtype).contiguous()
        rest = projector[:, pivot].double() - factor[:, :k] @ factor[pivot, :k]
        column = rest / left[pivot].sqrt()
        factor[:, k] = column
        # what is left on the diagonal of P - F Fᵀ
        left -= column**2
    return projector


class Factors(NamedTuple):
    """The Fisher information A ⊗ B of one linear or convolutional layer with T positions (1, if it
    is linear).
    """

    inputs: Tensor  # (d, d) A, the mean over samples of Σ_t x_t x_tᵀ / T²
    # (o, o) B, the mean over samples of T·Σ_t g_t g_tᵀ, g being the gradients at the layer's output
    outputs: Tensor


class LayerSeen(NamedTuple):
    """What one layer saw of a batch: inputs (b, t, d), and gradients at its outputs (b, t, o)."""

    layer: Layer
    inputs: Tensor
    gradients: Tensor


Passes = Iterator[tuple[bool, list[LayerSeen]]]
"""See `gradients`."""


def refuse_layers(network: Network, shape: tuple[int, ...], layers: Sequence[Layer]) -> None:
    """Refuse a network if the Fisher information of some of `layers` cannot be measured."""
    module = copy.deepcopy(network.module).eval()
    advice = "use average instead"
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
            raise UserError(
                f"a normalisation without running statistics mixes the samples of a batch: {advice}"
            )
    for layer in layers:
        part = module.get_submodule(layer.name)
        odd = isinstance(part, nn.Conv2d) and part.padding_mode != "zeros"
        if odd or layer.kind == "other" or (layer.kind == "norm" and not isinstance(part, _NORMS)):
            raise UserError(
                f"layer {layer.name or type(part).__name__!r} is not a linear layer, zero-padded "
                f"2-d convolution without groups, or usual normalisation: {advice}"
            )
    with torch.no_grad(), watched(module, layers) as seen:
        module(trial(module, torch.zeros(2, *shape, device=network.params.device)))
    for name, calls in seen.items():
        if not calls:
            raise UserError(
                f"layer {name} is not called as a module, so its inputs cannot be measured: "
                f"{advice}"
            )


def moments(network: nn.Module, layers: Sequence[Layer], batches: Batches) -> list[Tensor]:
    """Return Σ_t x_t x_tᵀ (d, d) float64 of each layer's inputs, a mean over samples; a bias reads
    a constant 1.
    """
    found: list[Tensor] = []
    samples = 0
    for x, _ in batches:
        with torch.no_grad(), watched(network, layers) as seen:
            network(x)
        rows = [
            _inputs(layer, network, seen[layer.name]).flatten(0, 1).double() for layer in layers
        ]
        found = found or [r.new_zeros(r.shape[1], r.shape[1]) for r in rows]
        for total, r in zip(found, rows, strict=True):
            total.addmm_(r.T, r)
        samples += len(x)
    return [total / samples for total in found]


def diagonal(passes: Passes) -> Tensor:
    """Return the diagonal of the Fisher information (P,) float64: means of squared gradients of log
    p(y | x), from passes for all layers with trainable parameters.
    """
    flat = torch.zeros(0)
    samples = 0
    for first, seen in passes:
        if not samples:
            size = max(part.stop for layer, _, _ in seen for part in layer.params)
            flat = torch.zeros(size, dtype=torch.float64, device=seen[0].inputs.device)
        if first:
            samples += len(seen[0].inputs)
        for layer, x, g in seen:
            if layer.kind == "norm":
                for part in layer.params:
                    each = g * x if part.name.endswith("weight") else g
                    part.of(flat).add_(each.sum(1).square().sum(0))
            else:
                layer.put(flat, layer.matrix(flat) + _squares(x, g))
    return flat / samples


def kronecker(passes: Passes) -> list[Factors]:
    """Return Kronecker factors (float64) of the Fisher information of each layer, linear or
    convolutional.

    James Martens, Roger Grosse: Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature. ICML 2015. https://arxiv.org/abs/1503.05671. Convolutions as in Roger Grosse, James
    Martens: A Kronecker-factored approximate Fisher matrix for convolution layers. ICML 2016.
    https://arxiv.org/abs/1602.01407.
    """
    found: list[Factors] = []
    samples = 0
    for first, seen in passes:
        if not found:
            sides = [(s.inputs.shape[-1], s.gradients.shape[-1]) for s in seen]
            like = seen[0].inputs.double()
            found = [Factors(like.new_zeros(d, d), like.new_zeros(o, o)) for d, o in sides]
        if first:
            samples += len(seen[0].inputs)
        for (a, b), (_, x, g) in zip(found, seen, strict=True):
            positions = x.shape[1]
            rows = x.flatten(0, 1).double()
            columns = g.flatten(0, 1).double()
            if first:
                a.addmm_(rows.T, rows, alpha=1 / positions**2)
            # T here and 1/T² above share the T positions between A and B as `Factors` says
            b.addmm_(columns.T, columns, alpha=positions)
    return [Factors(a / samples, b / samples) for a, b in found]


def half(matrix: Tensor) -> Tensor:
    """Return (d(d + 1)/2,) float32, a symmetric matrix (d, d) as it travels."""
    return upper(matrix).float()


def halves(passes: Passes) -> list[Tensor]:
    """Return the Kronecker factors of each layer as they travel: the halves of A, B, A, B, ..."""
    return [half(side) for factors in kronecker(passes) for side in factors]


def unpacked(sent: Sequence[Tensor], layers: Sequence[Layer]) -> list[Factors]:
    """Return the factors of each layer from their `halves`."""
    pairs = zip(sent[::2], sent[1::2], layers, strict=True)
    return [Factors(whole(a, layer.inputs), whole(b, layer.width)) for a, b, layer in pairs]


def size_of_factors(layout: Layout) -> int:
    """Return the numbers in the halves of all factors."""
    return sum(numbers(layer.inputs) + numbers(layer.width) for layer in layout.dense)


def whole(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (size, size) float64 whose half is `triangle`."""
    if tuple(triangle.shape) != (numbers(size),):
        raise UserError(
            f"{tuple(triangle.shape)} numbers do not fit a symmetric matrix of {size} rows: use "
            "the same network at every client"
        )
    return symmetric(triangle.double())


def _squares(x: Tensor, g: Tensor) -> Tensor:
    """Return the sum over samples of each one's squared gradient (o, d); g and x are summed over
    positions first.
    """
    # Σ_b (g xᵀ)² of rank-one gradients is one product of the squares
    if x.shape[1] == 1:
        return (g[:, 0].square().T @ x[:, 0].square()).double()
    total = torch.zeros(g.shape[-1], x.shape[-1], dtype=torch.float64, device=x.device)
    some = max(1, _ENTRIES // total.numel())
    for a, b in zip(torch.split(x, some), torch.split(g, some), strict=True):
        total += (
            torch.bmm(b.transpose(1, 2), a).square().sum(0)
        )  # (b, o, d): Σ_t g_t x_tᵀ of each sample
    return total


def gradients(
    network: nn.Module,
    layers: Sequence[Layer],
    batches: Batches,
    labels: Labels,
    draw: torch.Generator,
    work: Work,
) -> Passes:
    """Yield, for each batch and each backward pass, whether it is the batch's first pass, and what
    each layer saw.

    Args:
        network: in evaluation mode; its parameters will require gradients, so pass a network of
            your own.
        layers: of kinds that `refuse_layers` accepts.
        batches: inputs and labels; their forward pass is counted by the code that makes them.
        labels: which labels y are used.
        draw: draws the labels if they are sampled.
        work: counts backward passes.
    """
    for layer in layers:
        for part in layer.params:
            network.get_parameter(part.name).requires_grad_(True)
    plain = {
        layer.name: _without_scale(network.get_submodule(layer.name))
        for layer in layers
        if layer.kind == "norm"
    }
    for x, y in batches:
        with torch.enable_grad(), watched(network, layers) as seen:
            logits = network(x).float()
        with torch.no_grad():
            inputs = [
                _inputs(layer, network, seen[layer.name], plain.get(layer.name)) for layer in layers
            ]
        outputs = [out for layer in layers for _, out in seen[layer.name]]
        for number, at_logits in enumerate(_at_logits(logits.detach(), y, labels, draw)):
            # the gradient of a sum: for one that is given PyTorch first imports all of SymPy
            found = torch.autograd.grad(
                (logits * at_logits).sum(), outputs, retain_graph=True, materialize_grads=True
            )
            work.backward += len(x)
            left = iter(found)
            parts = []
            for layer, x_t in zip(layers, inputs, strict=True):
                calls = [_positions(layer, network, next(left)) for _ in seen[layer.name]]
                parts.append(LayerSeen(layer, x_t, torch.cat(calls, 1)))
            yield number == 0, parts


def _at_logits(
    logits: Tensor, y: Tensor, labels: Labels, draw: torch.Generator
) -> Iterator[Tensor]:
    """Return gradients of log p(c | x) at the logits (b, K), times √p(c | x) if all classes c are
    used in turn.
    """
    p = logits.softmax(1)
    one_hot = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
    if labels == "expected":
        for c in range(p.shape[1]):
            # squares of gradients with this factor add up to the expectation over c
            yield p[:, c : c + 1].sqrt() * (one_hot[c] - p)
        return
    if labels == "sampled":
        y = torch.multinomial(p.cpu(), 1, generator=draw)[:, 0].to(p.device)
    yield one_hot[y] - p


@contextmanager
def watched(
    network: nn.Module, layers: Iterable[Layer]
) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record what enters and leaves each layer, call by call, while the context is open."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in layers}

    def note(name: str) -> torch.utils.hooks.RemovableHandle:
        def see(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            seen[name].append((args[0].detach(), out))
            # later layers may change their input in place
            return out.clone()

        return network.get_submodule(name).register_forward_hook(see)

    handles = [note(name) for name in seen]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _inputs(
    layer: Layer,
    network: nn.Module,
    calls: Sequence[tuple[Tensor, Tensor]],
    plain: nn.Module | None = None,
) -> Tensor:
    """Return (b, t, d): what the weights of a layer are multiplied with, at all positions of all
    its calls.
    """
    if plain is not None:
        return torch.cat([_positions(layer, network, plain(x)) for x, _ in calls], 1)
    module = network.get_submodule(layer.name)
    parts = []
    for x, _ in calls:
        rows = layer_inputs(module, x, mean=False)
        parts.append(rows.view(len(x), -1, rows.shape[1]))
    every = torch.cat(parts, 1)
    if layer.bias is not None:
        every = F.pad(every, (0, 1), value=1.0)
    return every


def _positions(layer: Layer, network: nn.Module, values: Tensor) -> Tensor:
    """Return (b, t, o): what belongs to the outputs of a layer, position by position."""
    linear = layer.kind == "linear" or isinstance(network.get_submodule(layer.name), _CHANNELS_LAST)
    if linear:
        return values.reshape(len(values), -1, values.shape[-1])
    return values.reshape(len(values), values.shape[1], -1).transpose(1, 2)


def _without_scale(norm: nn.Module) -> nn.Module:
    """Return the normalisation with scale 1 and shift 0: its output is what the scale is multiplied
    with.
    """
    norm = copy.deepcopy(norm)
    for name, parameter in norm.named_parameters():
        parameter.data.fill_(1.0 if name == "weight" else 0.0)
    return norm


def shares(sent: Sequence[Trained]) -> list[float]:
    """Return p_k, which sum to 1: n_k/n, or 1/N if clients report no numbers of samples."""
    counts = [float(t.counts.sum()) if t.counts.numel() else 1.0 for t in sent]
    return [n / sum(counts) for n in counts]


def note_averaged(method: str, layout: Layout) -> None:
    """Warn that layers that are neither linear nor convolutional are averaged."""
    others = [layer.name for layer in layout.layers if layer not in layout.dense]
    if others:
        logging.getLogger("ekiden").warning(
            "%s averages layers that it cannot treat: %s", method, ", ".join(others)
        )
