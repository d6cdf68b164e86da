"""What makes the network of a run: from a name, a module or a function, the same values at every call."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ekiden import models
from ekiden.base.seeds import derive
from ekiden.data.inputs import Inputs
from ekiden.data.samples import FederatedData
from ekiden.engine.method import Method
from ekiden.models.widen import Widened


@dataclass(frozen=True)
class Named:
    """Builds a network of the library from the seed."""

    name: str
    shape: tuple[int, ...]
    classes: int
    seed: int
    inputs: Inputs | None = None

    def __call__(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "initial"))
            return models.build(self.name, self.shape, self.classes, self.inputs)


@dataclass(frozen=True)
class Given:
    """Copies the user's module."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module)


@dataclass(frozen=True)
class Made:
    """Calls the user's function with the seed set."""

    make: Callable[[], nn.Module]
    seed: int

    def __call__(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "initial"))
            return self.make()


@dataclass(frozen=True)
class OfMethod:
    """Builds the network that a method makes from the one that the user chose."""

    build: Callable[[], nn.Module]
    method: Method
    shape: tuple[int, ...]
    classes: int
    seed: int

    def __call__(self) -> nn.Module:
        module = self.build()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "own network"))
            return self.method.own_network(module, self.shape, self.classes)


def builder(
    model: str | nn.Module | Callable[[], nn.Module], data: FederatedData, seed: int, method: Method
) -> Callable[[], nn.Module]:
    """What makes the initial network of a run of `method`, the same at every call."""
    dataset = data.dataset
    shape, classes = dataset.shape, dataset.outputs
    build: Callable[[], nn.Module]
    if isinstance(model, nn.Module):
        build = Given(model)
    elif callable(model):
        build = Made(model, seed)
    else:
        name = models.default_for(dataset.name, shape, dataset.inputs) if model == "auto" else model
        build = Named(name, shape, classes, seed, dataset.inputs)
    return of_method(build, method, shape, classes, seed)


def of_method(
    build: Callable[[], nn.Module], method: Method, shape: tuple[int, ...], classes: int, seed: int
) -> Callable[[], nn.Module]:
    """`build`, or what makes of it the network that the parties of a run of `method` have."""
    if method.extra_outputs:
        build = Widened(build, method.extra_outputs, seed)
    if type(method).own_network is Method.own_network:
        return build
    return OfMethod(build, method, shape, classes, seed)


def network_name(build: Callable[[], nn.Module]) -> str | None:
    """Return the name of the library's network that is built; None of a network of the user's own."""
    while isinstance(build, Widened | OfMethod):
        build = build.build
    return build.name if isinstance(build, Named) else None
