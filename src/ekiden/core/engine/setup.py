"""What a run is made of, checked before it begins: the machine, who takes part with which data, and
the network.

Networks are made from a name, a module or a function, with the same values in every call. Also: the
initial weights of a run, and the files of its models.
"""

import copy
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

from ekiden.core.base.checks import require
from ekiden.core.base.errors import UserError, first_line
from ekiden.core.base.files import Damaged, read_tensors
from ekiden.core.base.settings import Hardware, derive, seeded
from ekiden.core.data.inputs import Inputs
from ekiden.core.data.samples import ClientData, FederatedData, Sizes, Subset, held_by
from ekiden.core.engine import wire
from ekiden.core.engine.folder import RunFolder, data_differences, model_digest, samples_digest
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.wire import EVERYONE, SERVER
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.models import catalogue, pretrained
from ekiden.core.models.split import Widened, check_part, freeze, parse_part
from ekiden.core.tasks import Task, balanced, recorded
from ekiden.core.training import frozen
from ekiden.core.training import loop as own_loop
from ekiden.core.training.network import Network, adapted
from ekiden.core.training.private.gradients import check_samples
from ekiden.core.training.weights import Weights


def resolved_hardware(hardware: Hardware, workers: int, build: Callable[[], nn.Module]) -> Hardware:
    """Replace defaults that depend on the machine and the network, so that the run folder says what
    was used.
    """
    require(workers > 0, "workers", workers, "1 or more")
    if reason := why_unusable(hardware.device):
        raise UserError(
            f"device {hardware.device!r} cannot be used here ({reason}): try --device=cpu"
        )
    if hardware.threads:
        return hardware
    small = sum(p.numel() for p in build().parameters()) < 1_000_000
    return replace(hardware, threads=1 if small else max(1, core_count() // workers))


def why_unusable(device: str) -> str:
    """Return why `device` cannot be used on this machine; empty if it can."""
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return ""


def core_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_same_data(
    config: Mapping[str, Any], method: Method, data: FederatedData, folder: Path
) -> None:
    """Refuse to measure a run on other data than its own, if its folder has digests of the data."""
    before = config.get("digests", {}).get("test")
    if before is None:
        return
    held = held_by(holders(method, data))
    if different := data_differences(folder, held, samples_digest(data.dataset.test), before):
        raise UserError(
            f"{', '.join(different)} differ from what {folder} was made with: put these data back, "
            "or give other test data by --data: a file, a folder or a data set"
        )


def holders(method: Method, data: FederatedData) -> Sequence[ClientData]:
    """Return the clients that take part: all of them, or the one place that all data are brought
    to.
    """
    if method.traits.pools_data:
        return _pool(data)
    return data.clients


def check_clients(clients: Mapping[str, Sizes], method: Method) -> None:
    """Refuse a federation in which somebody has nothing to train on, or no validation data that the
    method needs.
    """
    if not clients:
        raise UserError("there is no client: give at least one data set")
    # the clients by the names of their files where case does not count
    files: dict[str, str] = {}
    for name, (train, val, _) in clients.items():
        if name in ("", ".", "..", SERVER, EVERYONE) or not _FORBIDDEN.isdisjoint(name):
            raise UserError(
                f"a client cannot be called {name!r}: give it another name, of letters and digits"
            )
        if (size := len(name.encode())) > _LONGEST:
            raise UserError(f"the name {name[:20]}... has {size} bytes: use {_LONGEST} at most")
        file = unicodedata.normalize("NFC", name).casefold().rstrip(" .")
        if (other := files.setdefault(file, name)) != name:
            raise UserError(
                f"clients {other!r} and {name!r} have one file on some machines: give them names "
                "that differ in more than case, accents' spelling and trailing blanks"
            )
        if not train:
            raise UserError(
                f"client {name} has no training sample: leave it out or use fewer clients"
            )
        if method.traits.needs_validation and not val:
            raise UserError(
                f"{method.title()} needs validation data at every client, {name} has none: raise "
                "--val-fraction"
            )


_FORBIDDEN = frozenset("/\\,\0\n")
# bytes; file systems allow 255, of which endings of files take some
_LONGEST = 200


def check_subjects(clients: Sequence[ClientData]) -> None:
    """Refuse a subject with training samples at two clients: ε of one client does not hold for
    it.
    """
    held: dict[int, str] = {}
    for client in clients:
        subjects = client.train.samples.subject
        if subjects is None:
            continue
        for subject in torch.unique(subjects[client.train.rows]).tolist():
            if (other := held.setdefault(subject, client.name)) != client.name:
                raise UserError(
                    f"one subject has training samples at {other} and {client.name}, and --dp is "
                    "for each silo alone: give all samples of a subject to one silo"
                )


def _pool(data: FederatedData) -> tuple[ClientData, ...]:
    """One client that holds everything."""

    def union(part: str) -> Subset:
        parts = [getattr(client, part) for client in data.clients]
        return Subset(parts[0].samples, torch.cat([one.rows for one in parts]))

    return (ClientData("all", union("train"), union("val"), union("test")),)


def describe_model(setup: Setup, *, digests: bool = True) -> dict[str, Any]:
    """Return what `ekiden.load_model` needs in addition to a run's method and model file; M; and
    perhaps digests.

    The network is made once for all of it: a large one takes long.
    """
    dataset = setup.dataset.fed(setup.training)
    name = network_name(setup.build)
    network = Network(setup.build(), setup.hardware.device)
    digest = frozen.digest(network.module)
    about: dict[str, Any] = {
        "model_bytes": wire.size(network.weights()),
        "network": name,
        "frozen": {"digest": digest, "values": frozen.size(network.module)} if digest else {},
        "task": recorded(dataset.task),
        "classes": [str(name) for name in dataset.classes],
        "input": {
            "shape": list(dataset.shape),
            "mean": [float(value) for value in dataset.mean],
            "std": [float(value) for value in dataset.std],
        },
        "inputs": dataset.inputs.to_json(),
    }
    if not name:
        kind = type(network.module)
        layers = re.sub(r" at 0x[0-9a-f]+", "", repr(network.module))
        about["architecture"] = {
            "class": f"{kind.__module__}:{kind.__qualname__}",
            "layers": layers,
        }
    if digests:
        about["digests"] = {"model": model_digest(network, setup.dataset.shape, digest)}
    return about


def with_weights(data: FederatedData) -> FederatedData:
    """Return the data with a weight of each class, from the training samples of all clients."""
    dataset = data.dataset
    each = [dataset.task.counts(client.train.y, dataset.outputs) for client in data.clients]
    counts = dict(zip(dataset.classes, torch.stack(each).sum(0).tolist(), strict=False))
    return data.with_task(balanced(dataset.task, counts, dataset.classes))


def check_labels(data: FederatedData) -> None:
    """Refuse classes of which only one has training samples at any client."""
    dataset = data.dataset
    present = dataset.task.counts(dataset.train.y, dataset.outputs) > 0
    if dataset.task.kind == "classification" and int(present.sum()) < 2:
        name = str(dataset.classes[int(present.long().argmax())])
        raise UserError(
            f"all training labels are {name!r}: classification needs two classes or more"
        )
    if dataset.task.kind == "survival" and not dataset.train.y[:, 1].any():
        raise UserError("no training sample has the event: nothing can be learned from them")


def check_model(worker: Worker, data: FederatedData) -> None:
    """Refuse a network that does not fit the data."""
    dataset = data.dataset
    task = data.dataset.task
    setup = worker.setup
    traits = worker.setup.method.traits
    bench = worker.bench("check")
    extra = traits.extra_outputs
    if setup.dp and traits.releases and task.kind != "classification":
        raise UserError(
            "--dp adds noise to sums over classes, and these labels are none: choose another method"
        )
    if traits.splits_model:
        _ = worker.network.head
    if setup.training.loop:
        own_loop.load(setup.training.loop)
    first = dataset.train.x[:_TRIED]
    padded = (first == first.min()).flatten(1).sum(1).argsort(descending=True, stable=True)
    try:
        x, y = bench.feed.batch(Subset(dataset.train, padded[:3]), slice(None), train=False)
        with torch.enable_grad():
            out = worker.network.module.eval()(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the model cannot take samples of shape {dataset.shape} ({dataset.inputs.words}): "
            f"{first_line(error)}; choose a model that takes them"
        ) from None
    wanted = task.output_shape(x, y, dataset.outputs + extra)
    if not isinstance(out, torch.Tensor) or out.shape != wanted:
        found: object = type(out).__name__
        if isinstance(out, torch.Tensor):
            found = _own(tuple(out.shape[1:]), extra)
        needs = f"{task.kind} with these data needs {wanted[1:]}: choose another --model, or leave it out"
        if task.kind == "classification":
            k = dataset.outputs
            needs = f"the data have {k} classes: give its last layer {k} outputs"
        raise UserError(f"the model gives {found} per sample, but {needs}")
    if not out.requires_grad:
        raise UserError(
            "no gradient reaches the model's parameters: its output is cut off from them, by "
            "detach, no_grad or a conversion to another library; take that out of forward"
        )
    _refuse_probabilities(out, task)
    setup.method.check_network(Size.of(worker.network, dataset.shape, task))
    if setup.dp and not traits.releases:
        check_samples(worker.network, x, y, task.mean_loss)


# samples, of which a network is tried on the three with most padding
_TRIED = 100
_LAST = {"Softmax": "softmax", "Sigmoid": "sigmoid", "Relu": "ReLU", "Tanh": "tanh"}


def _refuse_probabilities(out: torch.Tensor, task: Task) -> None:
    """Refuse a network whose last operation bounds its outputs: they are logits, or numbers of any
    size.
    """
    last = _LAST.get(type(out.grad_fn).__name__.removesuffix("Backward0"), "")
    if task.kind == "regression" and last:
        raise UserError(
            f"the model ends in a {last}, so it cannot give all numbers: targets are scaled to "
            "mean 0 and deviation 1; leave the last layer out"
        )
    if (
        task.kind == "classification"
        and out.ndim == 2
        and out.shape[1] > 1
        and bool((out >= 0).all())
    ):
        sums = out.detach().sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            last = "softmax"
    if last in ("softmax", "sigmoid") and task.kind in (
        "classification",
        "segmentation",
        "multi-label",
    ):
        own = "sigmoid" if task.kind == "multi-label" else "softmax"
        raise UserError(
            f"the model ends in a {last}, but training applies the {own} itself to its outputs: "
            "leave the last layer out, so that the model returns logits"
        )


def _own(outputs: tuple[int, ...], extra: int) -> tuple[int, ...]:
    """Return the outputs per sample of the user's network, without those that the method added."""
    if outputs:
        return (*outputs[:-1], outputs[-1] - extra)
    return ()


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
        read = device.type == "meta" and pretrained.is_pretrained(self.name)
        with seeded(derive(self.seed, "initial")), torch.device("cpu") if read else nullcontext():
            module = catalogue.build(self.name, self.shape, self.classes, self.inputs)
        if read:
            return module.to(device)
        return module


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
            raise UserError(
                f"{_named(self.make)} returns {type(module).__name__}: return a torch.nn.Module"
            )
        return _complete(module)


def _complete(module: nn.Module) -> nn.Module:
    """Refuse a network with lazy layers, whose weights do not exist yet."""
    for name, part in module.named_modules():
        if any(
            is_lazy(value)
            for value in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        ):
            raise UserError(
                f"layer {name!r} of the model is a {type(part).__name__} without a size: call the "
                "model on a sample first, or give the size"
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
    train: str  # what is trained, see `models.split.parse_part`
    seed: int  # for drawing adapters

    def __call__(self) -> nn.Module:
        named = isinstance(self.build, NamedNetwork) and (
            self.pretrained or self.train != "all" or pretrained.is_pretrained(self.build.name)
        )
        if not named or torch.get_default_device().type != "cpu":
            return self.make()
        file = Path(self.pretrained)
        key = f"{self} {file.stat().st_mtime_ns if file.is_file() else 0}"
        # reading a large file takes long
        if key not in _made:
            _made.clear()
            _made[key] = self.make()
        return frozen.copied(_made[key])

    def make(self) -> nn.Module:
        """Return the network."""
        module = self.build()
        if self.pretrained and torch.get_default_device().type != "meta":
            pretrained.load_weights(module, Path(self.pretrained))
        with torch.random.fork_rng(devices=[]):
            # copies are made on the CPU
            torch.default_generator.manual_seed(derive(self.seed, "adapters"))
            return frozen.fix(freeze(module, parse_part(self.train)))


# the last network that was read from files, keyed by what it was made from
_made: dict[str, nn.Module] = {}


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
    """Return a function that makes the initial network of a run of `method`, the same at every
    call.
    """
    dataset = data.dataset
    method.check_source(pretrained, dataset)
    shape = dataset.shape
    classes = dataset.outputs
    build: Callable[[], nn.Module]
    if isinstance(model, nn.Module):
        build = GivenNetwork(model)
    elif callable(model):
        if needed := [
            p.name for p in _parameters(model) if p.default is p.empty and p.kind not in _OPTIONAL
        ]:
            raise UserError(
                f"{_named(model)} needs {', '.join(needed)}: give a module, or a function without "
                f"arguments, as in lambda: {_named(model)}(...)"
            )
        build = Made(model, seed)
    else:
        name = (
            catalogue.default_for(dataset.name, shape, dataset.inputs, dataset.task)
            if model == "auto"
            else model
        )
        build = NamedNetwork(name, shape, classes, seed, dataset.inputs)
    check_part(train, method.title(), averages=method.traits.averages)
    return of_method(
        Prepared(build, pretrained, train, seed), method, shape, classes, seed, dataset.task
    )


def of_method(
    build: Callable[[], nn.Module],
    method: Method,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    task: Task,
) -> Callable[[], nn.Module]:
    """Return `build`, or a function that makes the parties' network of `method` from it."""
    if method.traits.extra_outputs:
        build = Widened(build, method.traits.extra_outputs, seed)
    if type(method).own_network is Method.own_network:
        return build
    return OfMethod(build, method, shape, classes, seed, task)


def network_name(build: Callable[[], nn.Module]) -> str | None:
    """Return the name of the library's network that is built; None for a network of the user's
    own.
    """
    while isinstance(build, Widened | OfMethod | Prepared):
        build = build.build
    if isinstance(build, NamedNetwork):
        return build.name
    return None


def prepared(build: Callable[[], nn.Module]) -> Prepared | None:
    """Return the part of `build` that says what is trained, and from which values."""
    while isinstance(build, Widened | OfMethod):
        build = build.build
    if isinstance(build, Prepared):
        return build
    return None


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
    """Write results as named state dicts. The global model is written last: if it exists, all
    do.
    """
    for name, weights in zip(clients, personal, strict=False):
        folder.write_model(
            f"personal/{name}.safetensors", dict(as_module(own, weights).state_dict())
        )
    if model is not None:
        folder.write_model("model.safetensors", dict(as_module(build, model).state_dict()))


def read_model(
    folder: Path, name: str, build: Callable[[], nn.Module], *, own: bool = True
) -> Weights:
    """Return a model that a run wrote, with a digest; `own=False`: the values in any safetensors
    file.
    """
    file = folder / name
    module = build()
    todo = "run it again" if own else "give one with the values of the run's network"
    # has versions of layers; without, BatchNorm expects counters
    state = module.state_dict()
    try:
        found = read_tensors(file)[0] if own else load_file(file)
        state.clear()
        state.update(found)
        module.load_state_dict(state)
        state.clear()
        # it would be in memory twice
        del found
    except FileNotFoundError:
        models = (*folder.glob("model.safetensors"), *folder.glob("personal/*.safetensors"))
        present = sorted(str(p.relative_to(folder)) for p in models)
        hint = f"it has {', '.join(present)}" if present else "run `ekiden resume` first"
        hint += ": choose one by --client" if any("personal" in file for file in present) else ""
        raise UserError(f"{folder} has no {name}: {hint}") from None
    except (SafetensorError, OSError, ValueError, Damaged) as error:
        raise UserError(f"{file} is damaged or not a safetensors file ({error}): {todo}") from None
    except RuntimeError:
        raise UserError(
            f"{file} holds another network than the run's: {'was it replaced?' if own else todo}"
        ) from None
    return Network(module).weights()
