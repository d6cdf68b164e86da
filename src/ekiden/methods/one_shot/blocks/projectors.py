"""Projectors on the inputs that the layers of a network see at a client."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.training.weights import Layer

DAMPING_LINEAR, DAMPING_CONV = 0.01**0.8, 1e-5**0.8
"""z of the released MA-Echo code."""
DAMPING = 0.5
"""c of the released MA-Echo code."""


@dataclass
class Recursion:
    """The released recursion: Q ← Q - c·kkᵀ/(z + rᵀk), k = Qr, for every input r; P = I - Q.

    With c = 1 this is recursive least squares, and P the closed form on the inputs given.
    """

    size: int
    c: float
    z: float
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.q = torch.eye(self.size, dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        """Take in inputs (n, size), one after the other."""
        for r in inputs.double():
            k = self.q @ r
            self.q.addr_(k, k, alpha=-self.c / (self.z + float(r @ k)))  # Q ← Q - c·Qr(Qr)ᵀ / (z + rᵀQr)

    def projector(self) -> Tensor:
        """Return P (size, size) float64."""
        return torch.eye(self.size, dtype=torch.float64) - (self.q + self.q.T) / 2  # I - Q, without rounding's skew


@dataclass
class Closed:
    """P = Xᵀ(XXᵀ + zI)⁻¹X = G(G + zI)⁻¹ with G = XᵀX, which is all that is kept of the inputs X."""

    size: int
    z: float
    gram: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gram = torch.zeros(self.size, self.size, dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        """Take in inputs (n, size)."""
        self.gram.addmm_(inputs.double().T, inputs.double())

    def projector(self) -> Tensor:
        """Return P (size, size) float64; G may be singular."""
        values, vectors = torch.linalg.eigh(self.gram)
        values = values.clamp(min=0)
        projector: Tensor = (
            vectors * (values / (values + self.z))
        ) @ vectors.T  # V diag(s/(s + z)) Vᵀ for G = V diag(s) Vᵀ
        return projector


def projectors(
    network: nn.Module, layers: Iterable[Layer], batches: Iterable[tuple[Tensor, Tensor]], *, closed: bool
) -> list[Tensor]:
    """Return one projector (inputs, inputs) float64 for each of `layers`, from one pass of `batches` through `network`.

    Args:
        network: in evaluation mode.
        layers: linear and convolutional layers of it.
        batches: inputs and labels.
        closed: by the closed form over all samples, instead of the released recursion over batch means.
    """
    layers = list(layers)
    made: dict[str, Recursion | Closed] = {}
    for layer in layers:
        z = DAMPING_LINEAR if layer.kind == "linear" else DAMPING_CONV
        made[layer.name] = Closed(layer.inputs, z) if closed else Recursion(layer.inputs, DAMPING, z)

    def hook(layer: Layer) -> torch.utils.hooks.RemovableHandle:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = layer_inputs(module, args[0], mean=not closed).cpu()
            made[layer.name].add(F.pad(rows, (0, 1), value=1.0) if layer.bias is not None else rows)

        return network.get_submodule(layer.name).register_forward_pre_hook(see)

    hooks = [hook(layer) for layer in layers]
    with torch.no_grad():
        for x, _ in batches:
            network(x)
    for handle in hooks:
        handle.remove()
    return [made[layer.name].projector() for layer in layers]


def layer_inputs(module: nn.Module, x: Tensor, *, mean: bool) -> Tensor:
    """Return (n, d): what one output of a linear or convolutional layer reads.

    With `mean` as in the released MA-Echo code: the mean input of the batch; of convolutions its patches without
    padding, two pixels apart. Otherwise every sample, and every patch that the layer itself reads.
    """
    if not isinstance(module, nn.Conv2d):
        rows = x.flatten(0, -2)
        return rows.mean(0, keepdim=True) if mean else rows
    kernel, dilation = cast(tuple[int, int], module.kernel_size), cast(tuple[int, int], module.dilation)
    if mean:
        x = x.mean(0, keepdim=True)
        if any(n < d * (k - 1) + 1 for n, k, d in zip(x.shape[2:], kernel, dilation, strict=True)):
            x = F.pad(x, module._reversed_padding_repeated_twice)
        patches = F.unfold(x, kernel, dilation, stride=2)
    else:
        x = F.pad(x, module._reversed_padding_repeated_twice)
        patches = F.unfold(x, kernel, dilation, stride=cast(tuple[int, int], module.stride))
    return patches.transpose(1, 2).flatten(0, 1)


def compress(projector: Tensor, rank: int) -> Tensor:
    """Return (d, rank) F = U√s for the `rank` largest eigenvalues s, so that F Fᵀ ≈ P; P itself if F is not smaller."""
    if not 0 < rank < len(projector):
        return projector
    values, vectors = torch.linalg.eigh(projector)
    factor: Tensor = vectors[:, -rank:] * values[-rank:].clamp(min=0).sqrt()
    return factor


def thin(projector: Tensor) -> Tensor:
    """Return (d, k) F with F Fᵀ = P up to rounding, if k < d/3 columns are enough; otherwise P itself.

    Projectors of few batches have low rank. This is Cholesky's factorisation with pivoting, which stops early; products
    with F are then several times cheaper.
    """
    d = len(projector)
    left = projector.diagonal().double().clone()
    factor = left.new_zeros(d, d // 3)
    least = 1e-6 * float(left.max())
    for k in range(d // 3):
        pivot = int(left.argmax())
        if float(left[pivot]) <= least:
            return factor[:, :k].to(projector.dtype).contiguous()
        column = (projector[:, pivot].double() - factor[:, :k] @ factor[pivot, :k]) / left[pivot].sqrt()
        factor[:, k] = column
        left -= column**2  # diagonal of P - F Fᵀ
    return projector
