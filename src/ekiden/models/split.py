"""A network in two named parts, features and head, and a head with more outputs than classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.base.seeds import derive, seeded


class Split(Protocol):
    """A network that says where its classifier begins. Your own network does so by its attributes' names.

    Methods that personalise or exchange the head, or that read representations, need it. A static type
    only: `isinstance` does not see the submodules of an `nn.Module`.
    """

    @property
    def features(self) -> nn.Module:
        """Extractor: (B, *shape) inputs to (B, d) representations."""

    @property
    def head(self) -> nn.Module:
        """Classifier, often the last layer alone: (B, d) representations to (B, classes) logits."""


def as_split(network: object) -> Split:
    """`network` as a network in two parts."""
    if not (hasattr(network, "features") and hasattr(network, "head")):
        raise UserError(
            "this method reads representations: give the network two attributes, `features` and `head`, with "
            "forward(x) = head(features(x))"
        )
    return cast(Split, network)


class SplitNetwork(nn.Module):
    """`head(features(x))`."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features  # (B, *shape) inputs to (B, d) representations
        self.head = head  # (B, d) representations to (B, classes) logits

    def forward(self, x: Tensor) -> Tensor:
        """(B, classes) logits of (B, *shape) inputs."""
        logits: Tensor = self.head(self.features(x))
        return logits


@dataclass(frozen=True)
class Widened:
    """Builds what `build` does, with `extra` more outputs drawn from the seed."""

    build: Callable[[], nn.Module]
    extra: int
    seed: int

    def __call__(self) -> nn.Module:
        module = self.build()
        with seeded(derive(self.seed, "extra outputs")):
            return widen(module, self.extra)


def widen(module: nn.Module, extra: int) -> nn.Module:
    """`module` with `extra` more outputs after those that it has, whose values stay; the new rows are newly drawn.

    The classifier is what the module calls `head`, or the last linear layer in it.
    """
    path = "head" if isinstance(getattr(module, "head", None), nn.Module) else ""
    layers = [name for name, part in module.get_submodule(path).named_modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise UserError("this method adds outputs to the classifier: the model's last layer must be an nn.Linear")
    if name := ".".join(filter(None, (path, layers[-1]))):
        module.set_submodule(name, _wider(module.get_submodule(name), extra))
        return module
    return _wider(module, extra)


def _wider(layer: nn.Module, extra: int) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    bias, old = layer.bias is not None, layer.out_features
    wider = nn.Linear(layer.in_features, old + extra, bias, layer.weight.device, layer.weight.dtype)
    with torch.no_grad():
        wider.weight[:old] = layer.weight
        if bias:
            wider.bias[:old] = layer.bias
    return wider
