"""The Python interface: `ekiden.run(FedELMY(models=3), silos, model)`."""

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor

from ekiden.clinic.answers import further
from ekiden.core.base.checks import Count, CountOrZero, admitted, checked
from ekiden.core.base.errors import DivergenceWarning, UserError, nearest, unknown, warn
from ekiden.core.base.settings import Hardware, Training
from ekiden.core.data.samples import Dataset, FederatedData, Sizes, coming_from, held_by
from ekiden.core.engine.drive import Row
from ekiden.core.engine.evaluation import EvaluateOn, TestSet, divergence
from ekiden.core.engine.folder import RunFolder, samples_digest
from ekiden.core.engine.local import (
    Executor,
    InProcess,
    MakesTransport,
    Processes,
    Simulation,
    Start,
    refuse_within_worker,
)
from ekiden.core.engine.method import Method, State, payload_types, task_names
from ekiden.core.engine.run import End, Run, last
from ekiden.core.engine.setup import (
    builder,
    check_clients,
    check_labels,
    check_model,
    check_subjects,
    describe_model,
    holders,
    resolved_hardware,
    with_weights,
)
from ekiden.core.engine.transport import Transport
from ekiden.core.engine.worker import Setup, Watch, Worker
from ekiden.core.models.pretrained import located_file
from ekiden.core.tasks import Metric, own_metric
from ekiden.core.training.private.promise import DP, check_honest
from ekiden.methods import check_needs, method_named, note_few_steps
from ekiden.readers.columns import Reading
from ekiden.readers.holdings import Source
from ekiden.readers.partition import split
from ekiden.readers.sources import federate, load
from ekiden.runs import tracking
from ekiden.runs.loaded_model import ModelSource
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from ekiden.runs.tracking import bar, measured

# (step, client) -> whether that client does not answer in that step
Absent = Callable[[int, str], bool]
__all__ = ["Result", "describe", "run", "steps"]


def no_argument(name: str, known: Sequence[str], method: object) -> UserError:
    """Return the error for an argument that a function does not have: where the user meant to put
    it.

    Args:
        name: the argument.
        known: those that the function has.
        method: the method that is run; its settings and those of training are known, too.
    """
    kind = type(as_method(method, None))
    owners = {
        Hardware: "is a setting of hardware: give hardware=ekiden.Hardware({}=...)",
        Training: "is a setting of training: give training=ekiden.Training({}=...)",
        Reading: "is about the data: give it to ekiden.load",
        kind: f"is a setting of the method: give {kind.__name__}({{}}=...) as the method",
    }
    meant = dict[str, str]()
    for owner, words in owners.items():
        for one in fields(owner):
            meant[one.name] = words
    for function in (federate, load, split):
        words = f"is about the data: give it to ekiden.{function.__name__}"
        # runs have a seed and studies seeds, whatever that of a partition is
        meant |= dict.fromkeys(signature(function).parameters.keys() - {"seed"}, words)
    near = next(iter(nearest(name, [*known, *meant], n=1)), "")
    if near in known or near not in meant:
        return unknown("argument", name, known)
    words = meant[near].format(near)
    if near == name:
        return UserError(f"{name} {words}")
    return UserError(f"unknown argument {name!r}: did you mean {near!r}? It {words}")


@dataclass(frozen=True)
class How:
    """Where a run takes place and what it leaves: those arguments of `run` that are not in its
    recipe.
    """

    hardware: Hardware = field(default_factory=Hardware)
    folder: Path | None = None
    workers: int = 1
    config: Mapping[str, Any] | None = None
    watch: Watch | None = None
    on_start: Callable[[], None] = lambda: None
    on_step: Callable[[Row], None] = lambda row: None
    stop_after: int | None = None
    processes: bool | None = None
    absent: Absent | None = None
    transport: MakesTransport | None = None
    track: tuple[str, ...] = ()
    quiet: bool = False


@checked("method", "data", "model", "metric", "dp", "others", "_then")
def run(  # noqa: D417  (there are no others)
    method: Method | type[Method] | str,
    data: FederatedData | Sequence[Source] | Mapping[str, Source],
    model: str | ModelSource = "auto",
    *,
    training: Training | None = None,
    dp: DP | str = "",
    hardware: Hardware | None = None,
    seed: CountOrZero = 0,
    folder: str | os.PathLike[str] | None = None,
    workers: Count = 1,
    evaluate_every: CountOrZero = 1,
    watch: Watch | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_step: Callable[[Row], None] = lambda row: None,
    stop_after: CountOrZero | None = None,
    processes: bool | None = None,
    absent: Absent | None = None,
    transport: MakesTransport | None = None,
    evaluate_on: EvaluateOn = "all",
    train: str = "all",
    pretrained: str | os.PathLike[str] = "",
    track: str | Sequence[str] = (),
    metric: str | Metric | Callable[[Tensor, Tensor], Any] = "",
    quiet: bool = False,
    _then: Callable[["PreparedRun"], Any] = lambda run: run.end(),
    **others: Never,
) -> Result:
    """Run a method over silos simulated on this machine.

    Args:
        method: the method, as an instance, a class or a name; a class or a name means its default
            hyperparameters.
        data: the silos, from `ekiden.split` or `ekiden.federate`; or a list of each silo's samples,
            or a dict by the silos' names, which are passed to `ekiden.federate`.
        model: the name of a network ("auto" chooses by the data), `hf:FOLDER`, `timm:NAME`, a
            module (its weights are the initial model), or a function that makes a module (called
            after the seed is set).
        training: how clients train.
        dp: differential privacy of each training sample, `ekiden.DP(epsilon=8, delta=1e-5,
            clip=1.0)`; see docs/privacy.md.
        hardware: device, threads and precision; `threads=0` divides all cores among the workers.
        seed: the seed of all random numbers.
        folder: the run folder. If it holds an interrupted run, that run continues, from its first
            step if a file is damaged or missing. None keeps the run in memory.
        workers: the number of processes for independent tasks; 1 does all tasks in this process.
        evaluate_every: the number of steps between evaluations; 0 evaluates only at the end.
        watch: called after each epoch of training with (client, epoch, epochs); only if all tasks
            are done in this process.
        on_start: called after all checks, before the first step.
        on_step: called after each step with its row of metrics.
        stop_after: stop after this number of steps, to resume later.
        processes: True uses worker processes even for one worker, False never.
        absent: (step, client) -> bool, true if the client does not answer in that step; to test a
            method.
        transport: your own transport instead of `workers`: makes an `ekiden.transports.Transport`
            from an `ekiden.transports.Start` (docs/reference/own-transport.md).
        evaluate_on: "all" measures personal models on all test data, "own" each on its own
            client's, N times faster. "own" also measures the models that clients trained last in
            the step, before any averaging.
        train: the part of the model to train: "all"; "head"; "last:2", the last two blocks and the
            head; or "lora:r=8,alpha=16,targets=query+value", low-rank adapters and the head. The
            rest is frozen: it does not travel, and stays in evaluation mode.
        pretrained: a safetensors file with the model's weights by name.
        track: "tensorboard", "mlflow", "wandb" or "trackio", or several, to follow the metrics
            during the run; needs `folder`. If a tracker fails, a warning is logged and the run
            continues.
        metric: the headline metric, which chooses the best epoch on validation data and is
            `Result.score`: a name (docs/tasks.md), a function (answers, labels) -> number for which
            more is better, or a `Metric`. Empty means the task's first metric, which is accuracy in
            classification.
        quiet: show no progress: else a bar on a terminal and in a notebook, and elsewhere a line
            each half minute.

    Raises:
        UserError: the caller can fix the cause; the run folder then holds the last good state.

    Warns:
        DivergenceWarning: the result is far worse than guessing.
    """
    chosen = as_method(method, data)
    if others:
        known = [name for name in signature(run).parameters if name not in ("_then", "others")]
        raise no_argument(next(iter(others)), known, chosen)
    if isinstance(data, str) and isinstance(model, FederatedData | list | tuple | Mapping):
        raise UserError(
            "run takes the method, then the data, then the model: ekiden.run(method, data, model)"
        )
    model = admitted("model", model, str | ModelSource)
    named: Any = model
    if not isinstance(model, str):
        named = getattr(model, "__name__", type(model).__name__)
    measure = _measure(metric)
    if isinstance(measure, Metric):
        measure = measure.name
    recipe = Recipe(
        method=chosen,
        model=named,
        pretrained=located_file(pretrained),
        train=train,
        training=training or Training(),
        dp=str(dp),
        seed=seed,
        metric=measure,
        evaluate_every=evaluate_every,
        evaluate_on=evaluate_on,
    )
    how = How(
        hardware=hardware or Hardware(),
        folder=None if folder is None else Path(folder),
        workers=workers,
        watch=watch,
        on_start=on_start,
        on_step=on_step,
        stop_after=stop_after,
        processes=processes,
        absent=absent,
        transport=transport,
        track=(track,) if isinstance(track, str) else tuple(track),
        quiet=quiet,
    )
    federation = as_federation(data)
    federation = coming_from(with_metric(federation, metric), federation.origin)
    if isinstance(model, str):
        return _then(prepared(recipe.located(), federation, how))  # type: ignore[no-any-return]
    return _then(prepared(recipe, federation, how, model))  # type: ignore[no-any-return]


def steps(
    method: Method | type[Method] | str,
    data: FederatedData | Sequence[Source] | Mapping[str, Source],
    model: str | ModelSource = "auto",
    **options: Any,
) -> Generator[Result, None, None]:
    """Run a method step by step: `for result in ekiden.steps(method, data, model):
    print(result.accuracy)`.

    You may leave the loop at any time: worker processes end, and a run in a folder can be resumed.

    Args:
        method: what to run, as in `ekiden.run`.
        data: who holds what, as in `ekiden.run`.
        model: the network, as in `ekiden.run`.
        options: further arguments of `ekiden.run`.

    Yields:
        After each step, the result of a run that stops there: the state, the models, and all rows
            of metrics so far.

    Raises:
        UserError: the caller can fix the cause; the run folder then holds the last good state.
    """
    # the checks come at once, the steps when the caller asks for them
    stepwise: Any = run
    return stepwise(method, data, model, **options, _then=PreparedRun.results)  # type: ignore[no-any-return]


def prepared(
    recipe: Recipe[Method], data: FederatedData, how: How, network: ModelSource | None = None
) -> "PreparedRun":
    """Check all that can be checked before the first step.

    Args:
        recipe: what is run; `Recipe.located`.
        data: who holds what, with the headline metric of the recipe.
        how: where the run takes place.
        network: the user's own network instead of the one that the recipe names.
    """
    refuse_within_worker()
    tracking.check(how.track, how.folder)
    method = recipe.method
    if how.folder is not None and type(method).__module__ == "__main__":
        kind = type(method).__name__
        warn(
            f"nothing but this program can open {how.folder} later, because {kind} is defined "
            f"here: put the class into a file of its own, and import it or give FILE.py:{kind}",
            UserWarning,
        )
    if recipe.training.class_weights != "none":
        data = with_weights(data)
    check_needs(method, data.dataset)
    # otherwise a missing type is found at the first resume
    for task in task_names(type(method)):
        payload_types(method, task)
    clients = held_by(holders(method, data))
    check_clients(clients.sizes, method)
    note_few_steps(method, [train for train, _, _ in clients.sizes.values()], recipe.training)
    tracking.check_names(how.track, clients)
    dp = DP.parse(recipe.dp)
    if dp is not None:
        check_subjects(clients.clients)
        check_honest(dp, clients.clients)
        if dp.honest > 1 and how.absent:
            raise UserError(
                f"--dp honest={dp.honest} needs the noise of all clients: leave out absent"
            )
    method.check([*clients])
    model = recipe.model if network is None else network
    build = builder(model, data, recipe.seed, method, recipe.train, recipe.pretrained)
    hardware = resolved_hardware(how.hardware, how.workers, build)
    own = recipe.evaluate_on == "own"
    setup = Setup(method, build, data.dataset, recipe.training, hardware, recipe.seed, own, dp)
    worker = Worker(setup, clients, how.watch)
    check_labels(data)
    check_model(worker, data)
    described = describe(recipe, setup, clients.sizes, digests=how.folder is not None)
    described |= _noted(how, method, data)
    test = TestSet(worker, data, len(clients), recipe.evaluate_on, further)
    return PreparedRun(recipe, worker, data, test, _transport(how, worker), described, how)


def _noted(how: How, method: Method, data: FederatedData) -> dict[str, Any]:
    """Return what the configuration says about where a run takes place and what may end it."""
    config = how.config or {}
    noted: dict[str, Any] = {**config, "workers": how.workers}
    if not how.hardware.threads:
        noted["auto_threads"] = True
    if method.traits.limit:
        noted["limit"] = method.traits.limit
    # all that the command line needs to go on with the run
    if "plan" not in config and data.origin:
        noted["origin"] = data.origin.to_json()
    return noted


def _transport(how: How, worker: Worker) -> MakesTransport:
    """Return what makes the transport: the user's, or that of clients on this machine."""
    if how.transport is None:
        processes = 0
        if how.processes or (how.processes is None and how.workers > 1):
            processes = how.workers
        return _Here(worker, processes, how.absent or nobody)
    if how.workers > 1 or how.processes or how.absent or how.watch:
        raise UserError(
            "the transport given decides where clients run: leave out workers, processes, absent "
            "and watch"
        )
    return how.transport


def nobody(step: int, client: str) -> bool:
    """Return False: every client answers in every step."""
    return False


@dataclass(frozen=True)
class _Here:
    """Makes the transport of clients on this machine."""

    worker: Worker  # executes tasks in this process
    processes: int  # number of worker processes; 0 does all tasks in this process
    absent: Absent  # which clients do not answer in which step

    def __call__(self, start: Start) -> Transport:
        """Make the transport that continues from `start`."""
        executor: Executor = InProcess(self.worker)
        if self.processes:
            executor = Processes(start.setup, start.clients, self.processes)
        return Simulation(executor, start, self.absent)


@dataclass(frozen=True)
class PreparedRun:
    """A run that was checked. Nothing is written yet, and no process has started."""

    recipe: Recipe[Method]
    worker: Worker
    data: FederatedData
    test: TestSet
    transport: MakesTransport
    described: Mapping[str, Any]  # the configuration, as the folder keeps it
    how: How

    def end(self) -> Result:
        """Do all steps, with a bar on a terminal, and return the result."""
        method = self.recipe.method
        dataset = self.data.dataset
        how = self.how
        total = method.steps(len(self.worker.clients))
        with bar(method.title(), total, quiet=how.quiet) as advance:

            def on_step(row: Row) -> None:
                advance(measured(dataset.task.headline, row), row["step"])
                how.on_step(row)

            result = self.result(last(self.ends(on_step)))
        guess = dataset.task.guess(dataset.outputs)
        lr = self.recipe.step_size
        if result.metrics and (line := divergence(result.metrics[-1], guess, lr)):
            warn(line, DivergenceWarning)
        return result

    @torch.enable_grad()  # also within the caller's no_grad
    def ends(self, on_step: Callable[[Row], None]) -> Generator[End, None, End]:
        """Yield what the run has after each step, and return what it has at the end."""
        setup = self.worker.setup
        held = self.worker.clients
        how = self.how
        with ExitStack() as stack:
            place = folder = None
            if how.folder is not None:
                place = how.folder / "clients"
                folder = stack.enter_context(closing(RunFolder(how.folder, self.described, held)))
            how.on_start()
            following = tracking.following(how.track, how.folder, self.described["steps"])
            tell = stack.enter_context(following)

            def followed(row: Row) -> None:
                on_step(row)
                tell(row)

            def begun(state: State, written: Mapping[str, str] | None) -> Transport:
                return self.transport(Start(setup, held, state, place, written))

            run = Run(
                setup,
                tuple(held),
                begun,
                self.test.with_trained,
                self.test.build,
                folder,
                self.recipe.evaluate_every,
                followed,
                stop_after=how.stop_after,
            )
            return (yield from run.steps())

    def results(self) -> Generator[Result, None, None]:
        """Yield the result so far after each step."""
        with closing(self.ends(self.how.on_step)) as ends:
            yield from map(self.result, ends)

    def result(self, end: End) -> Result:
        """Return the result of a run that stops here."""
        weights, personal = end.models
        metrics = tuple(end.trace.metrics)
        ledger = tuple(end.trace.ledger)
        models = weights, tuple(personal)
        # as it is read from a folder
        config = json.loads(json.dumps(self.described))
        build = self.test.build
        data = self.data
        passes = dict(end.trace.passes)
        return Result(
            end.state,
            metrics,
            ledger,
            self.how.folder,
            build,
            config,
            lambda: models,
            lambda: data,
            passes,
        )


def as_method(method: Any, data: Any) -> Method:
    """Return the method that the user means."""
    if isinstance(data, Method) or (isinstance(data, type) and issubclass(data, Method)):
        raise UserError("run takes the method first, then the data: ekiden.run(method, data)")
    if isinstance(method, str):
        method = method_named(method)
    if isinstance(method, type) and issubclass(method, Method):
        if lacking := sorted(getattr(method, "__abstractmethods__", ())):
            raise UserError(
                f"{method.__name__} lacks {', '.join(lacking)}, which every method defines"
            )
        method = method()
    if isinstance(method, Method):
        return method
    hint = "ekiden.run(method, data) takes one of ekiden.methods, as in FedELMY(), or its name, then the data"
    raise UserError(f"{type(method).__name__} is not a method: {hint}")


def as_federation(data: Any) -> FederatedData:
    """Return the federation that the user means."""
    if isinstance(data, FederatedData):
        return data
    if isinstance(data, list | tuple | Mapping):
        return federate(data)
    if isinstance(data, Dataset | str | os.PathLike) or hasattr(data, "columns"):
        raise UserError(
            "data are not divided among clients yet: give ekiden.split(data, 'iid', 10), or a list "
            "with the data of each client"
        )
    raise UserError(
        f"data cannot be of type {type(data).__name__}: give what ekiden.split or ekiden.federate "
        "returns, or a list "
        "(or a dict by names) with (inputs, labels) of each client"
    )


def _measure(metric: Any) -> Metric | str:
    """Return a metric by its name, or the user's own."""
    if isinstance(metric, Metric | str):
        return metric
    return own_metric(metric)


def with_metric(data: FederatedData, metric: Any) -> FederatedData:
    """Return the federation with the headline metric that the user means."""
    if metric:
        data = data.with_task(replace(data.dataset.task, metric=_measure(metric)))
    # exists
    _ = data.dataset.task.headline
    return data


def describe(
    recipe: Recipe[Method], setup: Setup, clients: Mapping[str, Sizes], *, digests: bool = True
) -> dict[str, Any]:
    """Return the configuration of a run. Digests take time, so only runs with a folder have
    them.
    """
    model = describe_model(setup, digests=digests)
    if digests:
        model["digests"]["test"] = samples_digest(setup.dataset.test)
    return {
        "recipe": recipe.to_json(),
        "steps": setup.method.steps(len(clients)),
        "selection": setup.method.selection(setup.training.select),
        "hardware": asdict(setup.hardware),
        "dataset": setup.dataset.name,
        "clients": {name: list(sizes) for name, sizes in clients.items()},
        **model,
        **setup.told({name: train for name, (train, _, _) in clients.items()}),
    }
