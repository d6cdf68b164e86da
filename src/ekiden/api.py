"""The Python interface: `ekiden.run(FedELMY(models=3), silos, model)`."""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekiden import models, outside
from ekiden.checks import Count, CountOrZero, checked, require
from ekiden.core import identity, wire
from ekiden.core.federation import Transfer
from ekiden.core.files import Damaged
from ekiden.core.folder import Marks, RunFolder, Trace
from ekiden.core.method import EVERYONE, SERVER, Method, Size, State
from ekiden.core.run import Row, drive
from ekiden.core.run import models as models_of
from ekiden.core.seeds import derive
from ekiden.core.worker import Setup, Watch, Worker
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.data.tensors import Source, federate
from ekiden.errors import DivergenceWarning, UserError
from ekiden.evaluation import EvaluateOn, TestSet, divergence
from ekiden.learning.elastic import adapted
from ekiden.learning.network import Network
from ekiden.learning.training import Hardware, Training
from ekiden.learning.weights import Weights
from ekiden.models.widen import Widened
from ekiden.transports.in_process import InProcess
from ekiden.transports.processes import Processes, refuse_within_worker
from ekiden.transports.simulation import Executor, Simulation

log = logging.getLogger("ekiden")


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
        state: the last state.
        weights: the global model, or None where the method has only personal ones.
        personal: one model per client, where the method personalises.
        metrics: one row a step, see `ekiden.evaluation.TestSet`.
        ledger: every transfer.
        folder: the run folder, if there is one.
        build: makes a network that `weights` fits.
    """

    state: State
    weights: Weights | None
    personal: tuple[Weights, ...]
    metrics: tuple[Row, ...]
    ledger: tuple[Transfer, ...]
    folder: Path | None
    build: Callable[[], nn.Module]

    @property
    def model(self) -> nn.Module:
        """The global model as a module, in evaluation mode.

        Raises:
            UserError: the method has only personal models.
        """
        if self.weights is None:
            raise UserError("this method gives no global model: take `personal`, one model per client")
        return as_module(self.build, self.weights)

    @property
    def accuracy(self) -> float:
        """Accuracy on the union of all clients' test data at the end."""
        return float(self.metrics[-1]["accuracy"])

    @property
    def diverged(self) -> bool:
        """Whether the models are far worse than guessing at the end; see `ekiden.evaluation.diverged`."""
        return bool(self.metrics and self.metrics[-1].get("diverged"))

    @property
    def bytes(self) -> int:
        """Bytes that the method moved."""
        return sum(row.bytes for row in self.ledger)


@checked("method", "data")
def run(
    method: Method | type[Method] | str,
    data: FederatedData | Sequence[Source],
    model: str | nn.Module | Callable[[], nn.Module] = "auto",
    *,
    training: Training | None = None,
    hardware: Hardware | None = None,
    seed: CountOrZero = 0,
    folder: str | os.PathLike[str] | None = None,
    workers: Count = 1,
    evaluate_every: Count = 1,
    config: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    on_step: Callable[[Row], None] = lambda row: None,
    stop_after: CountOrZero | None = None,
    processes: bool | None = None,
    absent: Callable[[int, str], bool] = lambda step, client: False,
    keep_trained: bool = False,
    evaluate_on: EvaluateOn = "all",
) -> Result:
    """Run a method over silos that are simulated on this machine.

    Args:
        method: what to run; a class, or its name on the command line, stands for the method with its defaults.
        data: who holds what, from `ekiden.split` or `ekiden.federate`, or a list with the samples of each client,
            which `ekiden.federate` is called with.
        model: name of a network of the library ("auto": the one fit for the data), a module (its values are the
            initial model), or a function that makes one (called with the seed set).
        training: how clients train.
        hardware: on what; `threads` = 0 means all cores, divided among the workers.
        seed: of everything random.
        folder: where to keep the run; with the folder of an interrupted run, goes on with it, from its first step
            where a file that it needs is damaged or gone. None: in memory.
        workers: processes for independent tasks; 1: all in this process.
        evaluate_every: steps between evaluations.
        config: what else identifies the run in `config.json`.
        watch: called after each epoch of training with (client, epoch, epochs), if all is in this process.
        on_step: called after each step with the row of metrics.
        stop_after: stop after so many steps, to go on later.
        processes: use worker processes even if there is one worker, or never.
        absent: which clients do not answer in which step, to try a method with.
        keep_trained: keep in the folder, at each client, the models that its last task trained.
        evaluate_on: measure personal models on all test data, or each on its own client's alone, which takes 1/N of the
            time. With "own", the models that clients trained last in the step are measured too, before any averaging.

    Raises:
        UserError: something that the caller can put right; the run folder then holds the last good state.

    Warns:
        DivergenceWarning: the result is far worse than guessing.
    """
    refuse_within_worker()
    method, data = _method(method, data), _data(data)
    clients = holders(method, data)
    check_clients(clients, method)
    method.check([c.name for c in clients])
    build = builder(model, data, seed, method)
    hardware = resolve(hardware or Hardware(), workers, build)
    setup = Setup(
        method, build, data.dataset, training or Training(), hardware, seed, keep_trained, evaluate_on == "own"
    )
    held = {c.name: c for c in clients}
    worker = Worker(setup, held, watch)
    check_model(worker, data)
    run_folder = None
    if folder is not None:
        label = model if isinstance(model, str) else f"{type(model).__name__}"
        described = {"model": label, **describe(setup, clients), **(config or {})}
        if evaluate_on != "all":  # as in runs that were begun before there was a choice
            described["evaluate_on"] = evaluate_on
        run_folder = RunFolder(Path(folder), described | {"workers": workers, "evaluate_every": evaluate_every})
    parallel = workers > 1 if processes is None else processes
    executor: Executor = Processes(setup, held, workers) if parallel else InProcess(worker)
    test = TestSet(worker, data, len(held), evaluate_on)

    def go() -> tuple[State, Weights | None, list[Weights], Trace]:
        state, marks = (run_folder.load(type(method.start())) if run_folder else None) or (
            method.start(),
            Marks(),
        )
        transport = Simulation(
            executor,
            method,
            lambda: initial_weights(setup),
            folder=run_folder.path / "clients" if run_folder else None,
            state=state,
            absent=absent,
            written=run_folder.written if run_folder else {},
        )
        trace = Trace()

        def evaluate(model: Weights | None, personal: list[Weights]) -> Row:
            return test(model, personal, transport.trained)

        steps = drive(
            method, tuple(held), transport, evaluate, seed, state, marks, trace, run_folder, evaluate_every, setup
        )
        try:
            for state in islice(steps, stop_after):  # noqa: B007
                on_step(trace.metrics[-1])
        finally:  # also when training failed: the last good model
            weights, personal = models_of(state, transport)
            if run_folder:
                write_models(run_folder, setup.build, test.build, tuple(held), weights, personal)
        return state, weights, personal, trace

    with closing(executor), closing(run_folder) if run_folder else nullcontext():
        try:
            state, weights, personal, trace = go()
        except Damaged as damage:
            if run_folder is None:
                raise
            log.warning("%s; the run goes back to its first step and gives the same result", damage)
            run_folder.forget()
            state, weights, personal, trace = go()
        if run_folder:
            trace = run_folder.trace()
    if trace.metrics and (line := divergence(trace.metrics[-1], len(data.dataset.classes), setup.training.lr)):
        warnings.warn(line, DivergenceWarning, stacklevel=2)
    return Result(
        state,
        weights,
        tuple(personal),
        tuple(trace.metrics),
        tuple(trace.ledger),
        run_folder.path if run_folder else None,
        test.build,
    )


def _method(method: Any, data: Any) -> Method:
    """The method that is meant."""
    if isinstance(data, Method) or (isinstance(data, type) and issubclass(data, Method)):
        raise UserError("run takes the method first, then the data: ekiden.run(method, data)")
    if isinstance(method, str):
        from ekiden.methods import method_named  # noqa: PLC0415  (`import ekiden` stays light)

        outside.trust(method)
        method = method_named(method)
    if isinstance(method, type) and issubclass(method, Method):
        method = method()
    if isinstance(method, Method):
        return method
    hint = "ekiden.run(method, data) takes one of ekiden.methods, as in FedELMY(), or its name, then the data"
    raise UserError(f"{type(method).__name__} is not a method: {hint}")


def _data(data: Any) -> FederatedData:
    """The federation that is meant."""
    if isinstance(data, FederatedData):
        return data
    if isinstance(data, Dataset):
        raise UserError('data are not divided among clients yet: give ekiden.split(data, "dirichlet:0.5", clients)')
    if isinstance(data, list | tuple):
        return federate(data)
    raise UserError(
        f"data cannot be of type {type(data).__name__}: give what ekiden.split or ekiden.federate returns, or a list "
        "with (inputs, labels) of each client"
    )


@dataclass(frozen=True)
class Named:
    """Builds a network of the library from the seed."""

    name: str
    shape: tuple[int, ...]
    classes: int
    seed: int

    def __call__(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "initial"))
            return models.build(self.name, self.shape, self.classes)


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
    shape, classes = dataset.shape, len(dataset.classes)
    build: Callable[[], nn.Module]
    if isinstance(model, nn.Module):
        build = Given(model)
    elif callable(model):
        build = Made(model, seed)
    else:
        name = models.default_for(dataset.name, shape) if model == "auto" else model
        build = Named(name, shape, classes, seed)
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


def initial_weights(setup: Setup) -> Weights:
    """The model that all parties build from the seed."""
    return Network(setup.build(), setup.hardware.device).weights()


def model_bytes(setup: Setup) -> int:
    """M, the content in bytes of one model on the wire."""
    return wire.size(initial_weights(setup))


def as_module(build: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    """A module that holds `weights`, in evaluation mode."""
    network = Network(adapted(build(), weights))
    network.load(weights)
    return network.module.eval()


def describe(setup: Setup, clients: Sequence[ClientData]) -> dict[str, Any]:
    """What a run folder says of a run."""
    from ekiden.methods import name_of  # noqa: PLC0415  (`import ekiden` stays light)

    digests = {"data": identity.data_digests(clients), "model": identity.model_digest(setup)}
    return {
        "method": name_of(type(setup.method)),
        "steps": setup.method.steps(len(clients)),
        "hyperparameters": asdict(setup.method),
        "training": asdict(setup.training),
        "selection": setup.method.selection(setup.training.select),
        "hardware": asdict(setup.hardware),
        "seed": setup.seed,
        "dataset": setup.dataset.name,
        "clients": {c.name: [len(c.train), len(c.val), len(c.test)] for c in clients},
        "model_bytes": model_bytes(setup),
        **describe_model(setup),
        "digests": digests,
    }


def describe_model(setup: Setup) -> dict[str, Any]:
    """Return what `ekiden.load_model` needs to know of a run besides its method and its model file."""
    dataset = setup.dataset.fed(setup.training)
    return {
        "network": network_name(setup.build),
        "classes": [str(name) for name in dataset.classes],
        "input": {
            "shape": list(dataset.shape),
            "mean": [float(value) for value in dataset.mean],
            "std": [float(value) for value in dataset.std],
        },
    }


def network_name(build: Callable[[], nn.Module]) -> str | None:
    """Return the name of the library's network that is built; None of a network of the user's own."""
    while isinstance(build, Widened | OfMethod):
        build = build.build
    return build.name if isinstance(build, Named) else None


def check_same_data(config: Mapping[str, Any], method: Method, data: FederatedData, folder: Path) -> None:
    """Refuse to measure a run on other data than it was made with, where its folder has digests of these.

    Raises:
        UserError: the data of some clients differ.
    """
    before = {k: v for k, v in config.get("digests", {}).items() if k == "data"}
    if before and (different := identity.unlike(before, {"data": identity.data_digests(holders(method, data))})):
        raise UserError(
            f"{', '.join(different)} differ from what {folder} was made with: put these data back, or name the data to "
            "measure on, `ekiden evaluate RUN --data DATA`"
        )


def holders(method: Method, data: FederatedData) -> tuple[ClientData, ...]:
    """Return the clients that take part: all of them, or the one place that all data are brought to."""
    return _pool(data) if method.pools_data else data.clients


def check_clients(clients: Sequence[ClientData], method: Method) -> None:
    """Refuse a federation in which somebody has nothing to train on, or no validation data that the method needs.

    Raises:
        UserError: no client, one name twice, or a client without such samples.
    """
    if not clients:
        raise UserError("there is no client: give at least one data set")
    names = [c.name for c in clients]
    for client in clients:
        if client.name in ("", ".", "..", SERVER, EVERYONE) or set(client.name) & set("/\\,\0\n"):
            raise UserError(f"a client cannot be called {client.name!r}: give it another name, of letters and digits")
        if names.count(client.name) > 1:
            raise UserError(f"two clients are called {client.name!r}: give each its own name")
        if not len(client.train):
            raise UserError(f"client {client.name} has no training sample: leave it out or use fewer clients")
        if method.needs_validation and not len(client.val):
            raise UserError(
                f"{method.title()} needs validation data at every client, {client.name} has none: raise --val-fraction"
            )


def check_model(worker: Worker, data: FederatedData) -> None:
    """Refuse a network that does not fit the data.

    Raises:
        UserError: it cannot take the samples, has another number of outputs than there are classes, or does not
            declare the head that the method needs; the method cannot treat it.
    """
    dataset, classes, extra = data.dataset, len(data.dataset.classes), worker.setup.method.extra_outputs
    bench = worker.bench("check")
    if worker.setup.method.splits_model:
        _ = worker.network.head
    try:
        x, _ = bench.feed.batch(
            Subset(dataset.train, torch.arange(min(2, len(dataset.train)))), slice(None), train=False
        )
        with torch.inference_mode():
            out = worker.network.module.eval()(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"the model cannot take samples of shape {dataset.shape}: {reason}") from None
    if not isinstance(out, torch.Tensor) or out.shape != (len(x), classes + extra):
        found = _own(tuple(out.shape[1:]), extra) if isinstance(out, torch.Tensor) else type(out).__name__
        raise UserError(
            f"the model gives {found} per sample, but the data have {classes} classes: "
            f"give its last layer {classes} outputs"
        )
    worker.setup.method.check_network(Size.of(worker.network, dataset.shape))


def _own(outputs: tuple[int, ...], extra: int) -> tuple[int, ...]:
    """The outputs per sample of the network as the user knows it, without those that the method added."""
    return (*outputs[:-1], outputs[-1] - extra) if outputs else ()


def resolve(hardware: Hardware, workers: int, build: Callable[[], nn.Module]) -> Hardware:
    """Settle what depends on the machine and the network, so that the run folder says what was used.

    Raises:
        UserError: the device is not there.
    """
    require(workers > 0, "workers", workers, "1 or more")
    if reason := missing(hardware.device):
        raise UserError(f"device {hardware.device!r} cannot be used here ({reason}): try --device cpu")
    if hardware.threads:
        return hardware
    small = sum(p.numel() for p in build().parameters()) < 1_000_000
    return replace(hardware, threads=1 if small else max(1, cores() // workers))


def missing(device: str) -> str:
    """Why `device` cannot be used on this machine; empty if it can."""
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n")[0]
    return ""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(data: FederatedData) -> tuple[ClientData, ...]:
    """One client that holds everything."""

    def union(part: Callable[[ClientData], Subset]) -> Subset:
        return Subset(part(data.clients[0]).samples, torch.cat([part(c).rows for c in data.clients]))

    return (ClientData("all", union(lambda c: c.train), union(lambda c: c.val), union(lambda c: c.test)),)


def write_models(
    folder: RunFolder,
    own: Callable[[], nn.Module],
    build: Callable[[], nn.Module],
    clients: Sequence[str],
    model: Weights | None,
    personal: Sequence[Weights],
) -> None:
    """Write results as named state dicts; the global model last, so that where it is, all are."""
    for name, weights in zip(clients, personal, strict=False):
        folder.write_model(f"personal/{name}.safetensors", dict(as_module(own, weights).state_dict()))
    if model is not None:
        folder.write_model("model.safetensors", dict(as_module(build, model).state_dict()))
