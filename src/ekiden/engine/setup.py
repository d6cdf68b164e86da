"""What a run is made of, checked before it begins: the machine, who takes part with which data, and the network."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekiden.base.checks import require
from ekiden.base.errors import UserError
from ekiden.base.settings import Hardware
from ekiden.data import kinds
from ekiden.data.samples import ClientData, FederatedData, Sizes, Subset, held_by
from ekiden.data.tasks import Task, balanced, recorded
from ekiden.engine import wire
from ekiden.engine.folder import data_differences, model_digest, samples_digest
from ekiden.engine.method import Method, Size
from ekiden.engine.networks import network_name
from ekiden.engine.wire import EVERYONE, SERVER
from ekiden.engine.worker import Setup, Worker
from ekiden.training import frozen, private
from ekiden.training.network import Network


def resolved_hardware(hardware: Hardware, workers: int, build: Callable[[], nn.Module]) -> Hardware:
    """Replace defaults that depend on the machine and the network, so that the run folder says what was used."""
    require(workers > 0, "workers", workers, "1 or more")
    if reason := why_unusable(hardware.device):
        raise UserError(f"device {hardware.device!r} cannot be used here ({reason}): try --device=cpu")
    if hardware.threads:
        return hardware
    small = sum(p.numel() for p in build().parameters()) < 1_000_000
    return replace(hardware, threads=1 if small else max(1, core_count() // workers))


def why_unusable(device: str) -> str:
    """Return why `device` cannot be used on this machine; empty if it can."""
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        return "there is no such device; a GPU is called cuda" if reason.startswith("Expected one of") else reason
    return ""


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_same_data(config: Mapping[str, Any], method: Method, data: FederatedData, folder: Path) -> None:
    """Refuse to measure a run on other data than its own, if its folder has digests of the data."""
    before = config.get("digests", {}).get("test")
    if before is None:
        return
    held = held_by(holders(method, data))
    if different := data_differences(folder, held, samples_digest(data.dataset.test), before):
        raise UserError(
            f"{', '.join(different)} differ from what {folder} was made with: put these data back, or give other test "
            "data by --data: a file, a folder or a data set"
        )


def holders(method: Method, data: FederatedData) -> Sequence[ClientData]:
    """Return the clients that take part: all of them, or the one place that all data are brought to."""
    return _pool(data) if method.traits.pools_data else data.clients


def check_clients(clients: Mapping[str, Sizes], method: Method) -> None:
    """Refuse a federation in which somebody has nothing to train on, or no validation data that the method needs."""
    if not clients:
        raise UserError("there is no client: give at least one data set")
    for name, (train, val, _) in clients.items():
        if name in ("", ".", "..", SERVER, EVERYONE) or not _FORBIDDEN.isdisjoint(name):
            raise UserError(f"a client cannot be called {name!r}: give it another name, of letters and digits")
        if not train:
            raise UserError(f"client {name} has no training sample: leave it out or use fewer clients")
        if method.traits.needs_validation and not val:
            raise UserError(
                f"{method.title()} needs validation data at every client, {name} has none: raise --val-fraction"
            )


_FORBIDDEN = frozenset("/\\,\0\n")


def check_subjects(clients: Sequence[ClientData]) -> None:
    """Refuse a subject with training samples at two clients: ε of one client does not hold for it."""
    held: dict[int, str] = {}
    for client in clients:
        subjects = client.train.samples.subject
        for subject in [] if subjects is None else torch.unique(subjects[client.train.rows]).tolist():
            if (other := held.setdefault(subject, client.name)) != client.name:
                raise UserError(
                    f"one subject has training samples at {other} and {client.name}, and --dp is for each silo alone: "
                    "give all samples of a subject to one silo"
                )


def _pool(data: FederatedData) -> tuple[ClientData, ...]:
    """One client that holds everything."""

    def union(part: Callable[[ClientData], Subset]) -> Subset:
        return Subset(part(data.clients[0]).samples, torch.cat([part(c).rows for c in data.clients]))

    return (ClientData("all", union(lambda c: c.train), union(lambda c: c.val), union(lambda c: c.test)),)


def describe_model(setup: Setup, *, digests: bool = True) -> dict[str, Any]:
    """Return what `ekiden.load_model` needs in addition to a run's method and model file; M; and perhaps digests.

    The network is made once for all of it: a large one takes long.
    """
    dataset, name = setup.dataset.fed(setup.training), network_name(setup.build)
    network = Network(setup.build(), setup.hardware.device)
    kind, layers = type(network.module), re.sub(r" at 0x[0-9a-f]+", "", repr(network.module))
    digest = frozen.digest(network.module)
    return {
        "model_bytes": wire.size(network.weights()),
        "network": name,
        **({} if name else {"architecture": {"class": f"{kind.__module__}:{kind.__qualname__}", "layers": layers}}),
        "frozen": {"digest": digest, "values": frozen.size(network.module)} if digest else {},
        "task": recorded(dataset.task),
        "classes": [str(name) for name in dataset.classes],
        "input": {
            "shape": list(dataset.shape),
            "mean": [float(value) for value in dataset.mean],
            "std": [float(value) for value in dataset.std],
        },
        "inputs": kinds.to_json(dataset.inputs),
        **({"digests": {"model": model_digest(network, setup.dataset.shape, digest)}} if digests else {}),
    }


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
        raise UserError(f"all training labels are {name!r}: classification needs two classes or more")


def check_model(worker: Worker, data: FederatedData) -> None:
    """Refuse a network that does not fit the data."""
    dataset, task, extra = data.dataset, data.dataset.task, worker.setup.method.traits.extra_outputs
    bench = worker.bench("check")
    if worker.setup.dp is not None:
        private.check_module(worker.network.module)
        if worker.setup.method.traits.releases and dataset.task.kind != "classification":
            raise UserError("--dp adds noise to sums over classes, and these labels are none: choose another method")
    if worker.setup.method.traits.splits_model:
        _ = worker.network.head
    try:
        x, y = bench.feed.batch(
            Subset(dataset.train, torch.arange(min(2, len(dataset.train)))), slice(None), train=False
        )
        with torch.enable_grad():
            out = worker.network.module.eval()(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"the model cannot take samples of shape {dataset.shape}: {reason}") from None
    wanted = task.output_shape(x, y, dataset.outputs + extra)
    if not isinstance(out, torch.Tensor) or out.shape != wanted:
        found = _own(tuple(out.shape[1:]), extra) if isinstance(out, torch.Tensor) else type(out).__name__
        if task.kind != "classification":
            kinds = {"language-modelling": "a causal language model, --model=hf:FOLDER", "segmentation": "--model=unet"}
            other = kinds.get(task.kind, "another --model")
            needs = f"{task.kind} with these data needs {wanted[1:]}"
            raise UserError(f"the model gives {found} per sample, but {needs}: choose {other}")
        raise UserError(
            f"the model gives {found} per sample, but the data have {dataset.outputs} classes: "
            f"give its last layer {dataset.outputs} outputs"
        )
    if not out.requires_grad:
        raise UserError(
            "no gradient reaches the model's parameters: its output is cut off from them, by detach, no_grad or a "
            "conversion to another library; take that out of forward"
        )
    _refuse_probabilities(out, data.dataset.task)
    worker.setup.method.check_network(Size.of(worker.network, dataset.shape, task))


_LAST = {"Softmax": "softmax", "Sigmoid": "sigmoid", "Relu": "ReLU", "Tanh": "tanh"}


def _refuse_probabilities(out: torch.Tensor, task: Task) -> None:
    """Refuse a network whose last operation bounds its outputs: they are logits, or numbers of any size."""
    last = _LAST.get(type(out.grad_fn).__name__.removesuffix("Backward0"), "")
    if task.kind == "regression" and last:
        raise UserError(
            f"the model ends in a {last}, so it cannot give all numbers: targets are scaled to mean 0 and deviation 1; "
            "leave the last layer out"
        )
    if task.kind == "classification" and out.ndim == 2 and out.shape[1] > 1 and bool((out >= 0).all()):
        sums = out.detach().sum(1)
        last = "softmax" if torch.allclose(sums, torch.ones_like(sums), atol=1e-4) else last
    if last in ("softmax", "sigmoid") and task.kind in ("classification", "segmentation", "multi-label"):
        own = "sigmoid" if task.kind == "multi-label" else "softmax"
        raise UserError(
            f"the model ends in a {last}, but training applies the {own} itself to its outputs: leave the last layer "
            "out, so that the model returns logits"
        )


def _own(outputs: tuple[int, ...], extra: int) -> tuple[int, ...]:
    """Return the outputs per sample of the user's network, without those that the method added."""
    return (*outputs[:-1], outputs[-1] - extra) if outputs else ()
