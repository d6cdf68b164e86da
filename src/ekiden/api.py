"""The Python interface: `ekiden.run(FedELMY(models=3), silos, model)`."""

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekiden import models, outside
from ekiden.checks import Count, CountOrZero, checked
from ekiden.core import identity
from ekiden.core.federation import Transfer
from ekiden.core.folder import RunFolder
from ekiden.core.method import Method, Size, State
from ekiden.core.run import Row
from ekiden.core.seeds import derive
from ekiden.core.worker import Setup, Watch, Worker
from ekiden.data.samples import ClientData, Dataset, FederatedData, Subset
from ekiden.data.tensors import Source, federate
from ekiden.errors import DivergenceWarning, UserError
from ekiden.evaluation import EvaluateOn, TestSet, divergence
from ekiden.learning.training import Hardware, Training
from ekiden.learning.weights import Weights
from ekiden.machine import resolve
from ekiden.models.widen import Widened
from ekiden.modules import as_module, model_bytes
from ekiden.parties import check_clients, holders
from ekiden.simulated import Simulated
from ekiden.transports.in_process import InProcess
from ekiden.transports.processes import Processes, refuse_within_worker
from ekiden.transports.simulation import Executor


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
    simulated = Simulated(setup, tuple(held), executor, test, run_folder, evaluate_every, absent, on_step, stop_after)
    with closing(executor), closing(run_folder) if run_folder else nullcontext():
        end = simulated.run()
        trace = run_folder.trace() if run_folder else end.trace
    if trace.metrics and (line := divergence(trace.metrics[-1], len(data.dataset.classes), setup.training.lr)):
        warnings.warn(line, DivergenceWarning, stacklevel=2)
    path = run_folder.path if run_folder else None
    metrics, ledger = tuple(trace.metrics), tuple(trace.ledger)
    return Result(end.state, end.weights, tuple(end.personal), metrics, ledger, path, test.build)


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


def describe(setup: Setup, clients: Sequence[ClientData]) -> dict[str, Any]:
    """What a run folder says of a run."""
    from ekiden.methods import written  # noqa: PLC0415  (`import ekiden` stays light)

    digests = {"data": identity.data_digests(clients), "model": identity.model_digest(setup)}
    return {
        **written(setup.method),
        "steps": setup.method.steps(len(clients)),
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
