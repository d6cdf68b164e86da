"""More outputs than classes, for example for methods whose clients answer "unknown"."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ekiden.base.errors import UserError
from ekiden.base.seeds import derive, seeded


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
