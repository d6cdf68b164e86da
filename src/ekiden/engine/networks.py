"""Make the network of a run from a name, a module or a function, with the same values in every call.

Also: the initial weights of a run, and the files of its models.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

from ekiden import models
from ekiden.base.errors import UserError
from ekiden.base.files import Damaged, read_tensors
from ekiden.base.seeds import derive, seeded
from ekiden.data.kinds import Inputs
from ekiden.data.samples import FederatedData
from ekiden.data.tasks import Task
from ekiden.engine import wire
from ekiden.engine.folder import RunFolder
from ekiden.engine.method import Method
from ekiden.engine.worker import Setup
from ekiden.models import training_part
from ekiden.models.split import Widened
from ekiden.training import frozen
from ekiden.training.elastic import adapted
from ekiden.training.network import Network
from ekiden.training.weights import Weights


@dataclass(frozen=True)
class NamedNetwork:
    """Builds a network of the library from the seed."""

    name: str
    shape: tuple[int, ...]
    classes: int
    seed: int
    inputs: Inputs | None = None

    def __call__(self) -> nn.Module:
        """Build it. A network that comes with values is read even on the device meta."""
        device = torch.get_default_device()
        read = device.type == "meta" and models.is_pretrained(self.name)
        with seeded(derive(self.seed, "initial")), torch.device("cpu") if read else nullcontext():
            module = models.build(self.name, self.shape, self.classes, self.inputs)
        return module.to(device) if read else module


@dataclass(frozen=True)
class GivenNetwork:
    """Copies the user's module."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return _complete(copy.deepcopy(self.module))


@dataclass(frozen=True)
class Made:
    """Calls the user's function with the seed set."""

    make: Callable[[], nn.Module]
    seed: int

    def __call__(self) -> nn.Module:
        with seeded(derive(self.seed, "initial")):
            module = self.make()
        if not isinstance(module, nn.Module):
            raise UserError(f"{_named(self.make)} returns {type(module).__name__}: return a torch.nn.Module")
        return _complete(module)


def _complete(module: nn.Module) -> nn.Module:
    """Refuse a network with lazy layers, whose weights do not exist yet."""
    for name, part in module.named_modules():
        if any(is_lazy(value) for value in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise UserError(
                f"layer {name!r} of the model is a {type(part).__name__} without a size: call the model on a sample "
                "first, or give the size"
            )
    return module


_OPTIONAL = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _parameters(make: Callable[[], nn.Module]) -> list[Parameter]:
    """What a function takes; nothing where it does not say."""
    try:
        return list(signature(make).parameters.values())
    except (TypeError, ValueError):
        return []


def _named(make: Callable[[], nn.Module]) -> str:
    return getattr(make, "__qualname__", type(make).__name__)


@dataclass(frozen=True)
class Prepared:
    """Gives what is built the values of a file, and freezes what is not trained."""

    build: Callable[[], nn.Module]  # makes the network
    pretrained: str  # safetensors file with its values; empty keeps the values that `build` gave
    train: str  # what is trained, see `models.training_part`
    seed: int  # for drawing adapters

    def __call__(self) -> nn.Module:
        named = isinstance(self.build, NamedNetwork) and (
            self.pretrained or self.train != "all" or models.is_pretrained(self.build.name)
        )
        if not named or torch.get_default_device().type != "cpu":
            return self.make()
        key = f"{self} {Path(self.pretrained).stat().st_mtime_ns if Path(self.pretrained).is_file() else 0}"
        if key not in _made:  # reading a large file takes long
            _made.clear()
            _made[key] = self.make()
        return frozen.copied(_made[key])

    def make(self) -> nn.Module:
        """Return the network."""
        module = self.build()
        if self.pretrained and torch.get_default_device().type != "meta":
            models.load_weights(module, Path(self.pretrained))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(self.seed, "adapters"))  # copies are made on the CPU
            return frozen.fix(training_part.freeze(module, training_part.parsed(self.train)))


_made: dict[str, nn.Module] = {}  # the last network that was read from files, keyed by what it was made from


@dataclass(frozen=True)
class OfMethod:
    """Builds the network that a method makes from the one that the user chose."""

    build: Callable[[], nn.Module]
    method: Method
    shape: tuple[int, ...]
    classes: int
    seed: int
    task: Task

    def __call__(self) -> nn.Module:
        module = self.build()
        with seeded(derive(self.seed, "own network")):
            return self.method.own_network(module, self.shape, self.classes, self.task)


def builder(
    model: str | nn.Module | Callable[[], nn.Module],
    data: FederatedData,
    seed: int,
    method: Method,
    train: str = "all",
    pretrained: str = "",
) -> Callable[[], nn.Module]:
    """Return a function that makes the initial network of a run of `method`, the same at every call."""
    dataset = data.dataset
    method.check_source(pretrained, dataset)
    shape, classes = dataset.shape, dataset.outputs
    build: Callable[[], nn.Module]
    if isinstance(model, nn.Module):
        build = GivenNetwork(model)
    elif callable(model):
        if needed := [p.name for p in _parameters(model) if p.default is p.empty and p.kind not in _OPTIONAL]:
            raise UserError(
                f"{_named(model)} needs {', '.join(needed)}: give a module, or a function without arguments, as in "
                f"lambda: {_named(model)}(...)"
            )
        build = Made(model, seed)
    else:
        name = models.default_for(dataset.name, shape, dataset.inputs, dataset.task) if model == "auto" else model
        build = NamedNetwork(name, shape, classes, seed, dataset.inputs)
    training_part.check(train, method.title(), averages=method.traits.averages)
    return of_method(Prepared(build, pretrained, train, seed), method, shape, classes, seed, dataset.task)


def of_method(
    build: Callable[[], nn.Module], method: Method, shape: tuple[int, ...], classes: int, seed: int, task: Task
) -> Callable[[], nn.Module]:
    """Return `build`, or a function that makes the parties' network of `method` from it."""
    if method.traits.extra_outputs:
        build = Widened(build, method.traits.extra_outputs, seed)
    if type(method).own_network is Method.own_network:
        return build
    return OfMethod(build, method, shape, classes, seed, task)


def network_name(build: Callable[[], nn.Module]) -> str | None:
    """Return the name of the library's network that is built; None for a network of the user's own."""
    while isinstance(build, Widened | OfMethod | Prepared):
        build = build.build
    return build.name if isinstance(build, NamedNetwork) else None


def prepared(build: Callable[[], nn.Module]) -> Prepared | None:
    """Return the part of `build` that says what is trained, and from which values."""
    while isinstance(build, Widened | OfMethod):
        build = build.build
    return build if isinstance(build, Prepared) else None


def initial_weights(setup: Setup) -> Weights:
    """Return the model that all parties build from the seed."""
    return Network(setup.build(), setup.hardware.device).weights()


def model_bytes(setup: Setup) -> int:
    """Return M, the bytes of content of one model on the wire."""
    return wire.size(initial_weights(setup))


def as_module(build: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    """Return a module that holds `weights`, in evaluation mode."""
    network = Network(adapted(build(), weights))
    network.load(weights)
    return network.module.eval()


def write_models(
    folder: RunFolder,
    own: Callable[[], nn.Module],
    build: Callable[[], nn.Module],
    clients: Sequence[str],
    model: Weights | None,
    personal: Sequence[Weights],
) -> None:
    """Write results as named state dicts. The global model is written last: if it exists, all do."""
    for name, weights in zip(clients, personal, strict=False):
        folder.write_model(f"personal/{name}.safetensors", dict(as_module(own, weights).state_dict()))
    if model is not None:
        folder.write_model("model.safetensors", dict(as_module(build, model).state_dict()))


def read_model(folder: Path, name: str, build: Callable[[], nn.Module], *, own: bool = True) -> Weights:
    """Return a model that a run wrote, with a digest; `own=False`: the values in any safetensors file."""
    file = folder / name
    module = build()
    todo = "run it again" if own else "give one with the values of the run's network"
    state = module.state_dict()  # has versions of layers; without, BatchNorm expects counters
    try:
        found = read_tensors(file)[0] if own else load_file(file)
        state.clear()
        state.update(found)
        module.load_state_dict(state)
        state.clear()
        del found  # it would be in memory twice
    except FileNotFoundError:
        models = (*folder.glob("model.safetensors"), *folder.glob("personal/*.safetensors"))
        present = sorted(str(p.relative_to(folder)) for p in models)
        hint = f"it has {', '.join(present)}" if present else "run `ekiden resume` first"
        hint += ": choose one by --client" if any("personal" in file for file in present) else ""
        raise UserError(f"{folder} has no {name}: {hint}") from None
    except (SafetensorError, OSError, ValueError, Damaged) as error:
        raise UserError(f"{file} is damaged or not a safetensors file ({error}): {todo}") from None
    except RuntimeError:
        raise UserError(f"{file} holds another network than the run's: {'was it replaced?' if own else todo}") from None
    return Network(module).weights()
