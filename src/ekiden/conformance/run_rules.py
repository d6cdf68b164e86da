"""The contract about a method's runs, and about transports, measured by runs of different methods."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from ekiden.api import run
from ekiden.base.settings import Training
from ekiden.conformance.small_runs import CLIENTS, Broken, Subject, Tiny, blobs, files, same, settings
from ekiden.data.tasks import Classification
from ekiden.engine.folder import RunFolder
from ekiden.engine.method import Method, Size
from ekiden.engine.networks import of_method
from ekiden.methods import SCAFFOLD, FedGram, FedSeq, MetaFed
from ekiden.results.result import Result
from ekiden.training.network import Network
from ekiden.transports import MakesTransport

_CHANCE = 0.45  # of three classes, the largest holds a third


def ends_after_its_steps(subject: Subject) -> None:
    """It ends with a model after as many steps as `steps` says."""
    result = subject.plain
    done = [row["step"] for row in result.metrics]
    if done != list(range(1, subject.steps + 1)):
        many = f"more than {subject.steps}" if len(done) > subject.steps else str(len(done))
        raise Broken(f"a run over {CLIENTS} clients has {many} steps, `steps` says {subject.steps}")
    models = _models(result)
    if not models:
        raise Broken("the last state has no model, neither `model` nor `personal`")
    if not all(model.is_finite() for model in models):
        raise Broken("the model at the end has numbers that are not finite")


def learns(subject: Subject) -> None:
    """It learns: a small run ends better than chance. It need not train."""
    _, best = subject.plain, 0.0  # a run that fails is reported once
    for method, lr in _attempts(subject):
        row = _run(method, training=Training(lr=lr, batch_size=16)).metrics[-1]
        best = max(best, row["accuracy"], row["client_mean"])
        if best > _CHANCE:
            return
    raise Broken(f"accuracy {best:.2f} at best on three classes, at least {_CHANCE} is needed")


def weighs_classes(subject: Subject) -> None:
    """Weights of classes change what clients learn, unless `Traits.weighs` is False."""
    plain = subject.plain
    if not subject.default.traits.weighs:
        return  # a run with weights is refused
    training = replace(settings()["training"], class_weights="balanced")
    if not difference(plain, _run(subject.small, training=training)):
        raise Broken("--class-weights changes nothing: train on `client.loss`, or say `traits = Traits(weighs=False)`")


def counts_every_pass(subject: Subject) -> None:
    """It counts: each pass of a sample through the network at a client is in the metrics."""
    _ = subject.watched
    for passes in subject.seen.passes:
        for way in ("forward", "backward"):
            said, seen = getattr(passes.reported, way), getattr(passes.measured, way)
            if said != seen:
                raise Broken(f"{passes.task} sends {seen} samples {way}, {said} are counted: add to client.work.{way}")


def ledger_equals_the_cost(subject: Subject) -> None:
    """The ledger has the bytes that `cost` says, or fewer if `moved` says so."""
    method, result = subject.small, subject.plain
    size = Size.of(Network(of_method(Tiny, method, (4,), 3, 3, Classification())()), (4,))
    cost, moved = method.cost(CLIENTS, size), method.moved(result.state, CLIENTS, size)
    if result.bytes != moved:
        says = "cost" if type(method).moved is Method.moved else "moved"
        raise Broken(f"{result.bytes} bytes moved between {CLIENTS} clients, `{says}` says {moved} (M is {int(size)})")
    if result.bytes > cost:
        raise Broken(f"{result.bytes} bytes moved, more than `cost` says: {cost}")


def keeps_what_it_declares(subject: Subject) -> None:
    """`client.state` has the type that `Traits.private` of the class declares."""
    with suppress(Exception):
        _ = subject.watched
    for task, why in subject.seen.misfits.items():
        raise Broken(f"{task}: {why}")
    _ = subject.watched


def repeats(subject: Subject) -> None:
    """It gives the same bits again: all randomness is from `client.seed(...)` or `fed.generator(...)`."""
    again, _ = subject.watched
    if differs := difference(subject.plain, again):
        raise Broken(f"a second run with the same seed gives {differs}: does it draw from torch's own random numbers?")


def resumes(subject: Subject) -> None:
    """It resumes after every step bit for bit."""
    _, steps = subject.plain, subject.steps
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        _run(subject.small, folder=whole)
        # Stopped after each step; and, if there are more steps, after several steps of one process.
        for each in (1, -(-steps // 2))[: 1 if steps <= 2 else 2]:
            stopped = Path(folder) / f"each-{each}"
            for done in range(0, steps, each):
                try:
                    _run(subject.small, folder=stopped, stop_after=each)
                except Exception as error:
                    if not done:
                        raise
                    raise Broken(f"a run that was stopped after step {done} cannot go on{_STATE}") from error
            if different := _different(whole, stopped):
                raise Broken(f"a run that was stopped gives another {different}{_STATE}")


def same_on_processes(subject: Subject) -> None:
    """It gives the same bits on every transport: the values that cross have the annotated types."""
    here = subject.plain
    there = _run(subject.small, processes=True)
    if differs := difference(here, there):
        raise Broken(f"a run with worker processes gives {differs}: does a task use what no argument brings?")
    if there.metrics != here.metrics:
        raise Broken("a run with worker processes gives other metrics")


_STATE = ": is all that it knows in State and client.state?"


def _attempts(subject: Subject) -> Iterator[tuple[Any, float]]:
    """Yield methods and learning rates to try: most need little, some more epochs, rounds or smaller steps."""
    method = subject.small  # two epochs are too little to learn anything in few communications
    kinds = vars(subject.default)
    counts = [name for name in subject.counts if name != "rounds" and kinds[name] > 10]
    short, long = (replace(method, **dict.fromkeys(counts, count)) for count in (5, 20))
    more = replace(long, **{"rounds": 8}) if "rounds" in kinds else long
    return iter(((short, 0.1), (long, 0.1), (more, 0.1), (more, 0.01)))


def _models(result: Result) -> list[Any]:
    return [*([result.weights] if result.weights else []), *result.personal]


def difference(a: Result, b: Result) -> str:
    """Say in what two runs differ; empty if they are equal."""
    if a.ledger != b.ledger:
        return "another ledger"
    models = zip(a.personal, b.personal, strict=True)
    return "" if same(a.weights, b.weights) and all(same(x, y) for x, y in models) else "another model"


SHAPES: tuple[Method, ...] = (FedSeq(epochs=1), SCAFFOLD(rounds=2, epochs=1), MetaFed(epochs=1, warmup=1), FedGram())
"""Models that are handed on; rounds with private state; clients' own models; sums that clients add up."""


def gives_the_same_bits(make: MakesTransport) -> None:
    """Models, metrics and ledger are those of a run in one process."""
    for method in SHAPES:
        here, there = _run(method), _run(method, transport=make)
        differs = difference(here, there) or ("other metrics" if here.metrics != there.metrics else "")
        if differs:
            raise Broken(f"a run of {method.title()} gives {differs}")


def resumes_on_it(make: MakesTransport) -> None:
    """A run that is stopped after any step resumes and ends with the same files."""
    for method in SHAPES:

        def stopping(folder: Path, steps: int, method: Method = method) -> None:
            for _ in range(steps):
                _run(method, folder=folder, transport=make, stop_after=1)

        _compare(method, stopping)


def forgets_what_died(make: MakesTransport) -> None:
    """What is done in a step whose state is not written does not count: the step is done again."""
    save = RunFolder.save
    for method in SHAPES:

        def dying(folder: Path, steps: int, method: Method = method) -> None:
            for last in range(steps):

                def full(self: RunFolder, state: Any, *args: Any, last: int = last) -> None:
                    if state.step > last:
                        raise _Died
                    save(self, state, *args)

                with patch.object(RunFolder, "save", full), suppress(_Died):
                    _run(method, folder=folder, transport=make)
            _run(method, folder=folder, transport=make)

        _compare(method, dying)


class _Died(Exception):
    """The state could not be written."""


def _compare(method: Method, attempts: Callable[[Path, int], None]) -> None:
    """Refuse a run made by `attempts` that left other files than a run in one process."""
    with TemporaryDirectory() as scratch:
        whole, other = Path(scratch) / "whole", Path(scratch) / "other"
        _run(method, folder=whole)
        attempts(other, method.steps(len(blobs().clients)))
        if different := _different(whole, other):
            raise Broken(f"a run of {method.title()} gives another {different}")


def _different(a: Path, b: Path) -> str:
    """Return the names of the files in which two runs differ."""
    here, there = files(a), files(b)
    return ", ".join(sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)))


def _run(method: Method, **options: Any) -> Any:
    return run(method, blobs(), Tiny, **(settings() | options))


OF_TRANSPORTS = (gives_the_same_bits, resumes_on_it, forgets_what_died)
"""The lines of the contract of transports."""
