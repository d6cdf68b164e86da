"""The contract: about a method's class, without a run; about its runs, and transports, by runs of
different methods.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import patch

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware, Training
from ekiden.core.engine.folder import RunFolder
from ekiden.core.engine.local import MakesTransport
from ekiden.core.engine.method import Method, Size, payload_types, task_names
from ekiden.core.engine.setup import of_method
from ekiden.core.tasks import Classification
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import (
    CLIENTS,
    Broken,
    Subject,
    Tiny,
    blobs,
    files,
    same,
    settings,
)
from ekiden.methods import SCAFFOLD, FedGram, FedSeq, MetaFed
from ekiden.runs.api import run
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result

_WRONG: dict[Any, tuple[object, ...]] = {
    int: ("3", 3.5, True, None, nan),
    float: ("0.1", True, None, nan, inf, -inf),
    bool: (1, "yes", None),
    str: (3, None, True),
    Literal: ("no such choice", nan),
    tuple: ("0.5", 0.5, None),
}


def is_a_frozen_dataclass(subject: Subject) -> None:
    """It is a frozen dataclass derived from `Method` that defines `run`, `steps` and `cost`."""
    kind = subject.kind
    if "__dataclass_fields__" not in vars(kind) or not is_dataclass(kind):
        raise Broken("the class is not a dataclass: write @dataclass(frozen=True) above it")
    if inspect.isabstract(kind):
        raise Broken(f"the class does not define {', '.join(sorted(kind.__abstractmethods__))}")


def describes_itself(subject: Subject) -> None:
    """It describes itself: the docstring begins with a line of one sentence."""
    text = inspect.cleandoc(vars(subject.kind)["__doc__"] or "")
    # `dataclass` writes this if there is no docstring
    if text.startswith(f"{subject.kind.__name__}("):
        raise Broken("the class has no docstring")
    if not re.match(r"\S(?:(?!\n\n).)*\.(\n\n|$)", text, re.DOTALL):
        raise Broken(
            "the docstring's first paragraph is not one sentence with a full stop, followed by an empty "
            "line"
        )


def cites_its_source(subject: Subject) -> None:
    """A published method names its source: the year, an https link, and a paragraph "Departures
    from the paper:".
    """
    text = inspect.getdoc(subject.kind) or ""
    if not re.search(r"https://[\w-]+\.\S+", text):
        raise Broken("the docstring has no https link")
    if not re.search(r"\b(19|20)\d\d\b", text):
        raise Broken("the docstring has no year")
    if "Departures from the paper:" not in text:
        raise Broken('the docstring has no paragraph "Departures from the paper:"')


def every_field_has_default_and_help(subject: Subject) -> None:
    """Every field has a default and a help text."""
    # the command line is slow to import
    from ekiden.cli.flags import texts_below

    helped = texts_below(subject.kind)
    for f in fields(subject.kind):
        if f.default is MISSING and f.default_factory is MISSING:
            raise Broken(f"{f.name} has no default")
        if f.name not in helped:
            raise Broken(f"{f.name} has no text below it that says what it is")


def flags_do_not_collide(subject: Subject) -> None:
    """No field is called like another flag of the command line."""
    if taken := _flags() & {f.name for f in fields(subject.kind)}:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(taken))
        raise Broken(f"{flags} is a flag of `ekiden run` already: choose another name")


def refuses_wrong_values(subject: Subject) -> None:
    """It refuses wrong values: of another type, unknown choices, NaN and infinity."""
    default = subject.default
    hints = get_type_hints(subject.kind, include_extras=True)
    for f in fields(subject.kind):
        for value in _WRONG.get(_base(hints[f.name], getattr(default, f.name)), ()):
            try:
                replace(default, **{f.name: value})
            except UserError:
                continue
            except Exception as error:
                raise Broken(
                    f"{f.name}={value!r} ends in {type(error).__name__}, not in a UserError"
                ) from error
            raise Broken(f"{f.name}={value!r} is accepted")


def tasks_are_annotated(subject: Subject) -> None:
    """Tasks of clients are marked `@on_client`. Their arguments, after the client, and their
    results are annotated.
    """
    found = task_names(subject.kind)
    if not found:
        raise Broken("no function is marked @on_client")
    for name in _called(subject.kind):
        if callable(getattr(subject.kind, name, None)) and name not in found:
            raise Broken(f"{name} is called at clients, but is not marked @on_client")
    for name in found:
        try:
            arguments, value = payload_types(subject.default, name)
        except UserError as error:
            raise Broken(str(error)) from None
        if Any in (*arguments, value):
            raise Broken(f"{name} takes or returns Any: say which type")
        if value is type(None):
            raise Broken(f"{name} returns None: return what the method needs of the client")


def _base(hint: Any, default: object) -> Any:
    """Return the kind of value that an annotation describes; if it says nothing, that of the
    default.
    """
    if get_origin(hint) is Annotated:
        return _base(get_args(hint)[0], default)
    if hint in (Any, object):
        return type(default)
    return get_origin(hint) or hint


def _source(kind: type[Method]) -> ast.AST:
    """Return the syntax of a class.

    Raises:
        Broken: its source is not available.
    """
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        raise Broken(f"the source of {kind.__name__} cannot be read: put it into a file") from None


def _called(kind: type[Method]) -> Iterator[str]:
    """Yield the functions that `run` passes to `fed.call` or `fed.sum` as `self.NAME`."""
    for node in ast.walk(_source(kind)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("fed.call", "fed.sum"):
            owner, _, task = ast.unparse(node.args[0]).partition(".")
            if owner == "self" and task.isidentifier():
                yield task


def _flags() -> set[str]:
    """Return the names of the command line's own flags."""
    # the command line is slow to import
    from ekiden.cli.run_options import BetweenMachines, Here, RunOptions
    from ekiden.silos.coordinator.remote_plan import RemotePlan

    own = (Plan, RemotePlan, Recipe, Training, Hardware, RunOptions, Here, BetweenMachines)
    return {f.name for kind in own for f in fields(kind)}


# of three classes, the largest holds a third
_CHANCE = 0.45


def ends_after_its_steps(subject: Subject) -> None:
    """It ends with a model after as many steps as `steps` says."""
    result = subject.plain
    done = [row["step"] for row in result.metrics]
    if done != list(range(1, subject.steps + 1)):
        many = str(len(done))
        if len(done) > subject.steps:
            many = f"more than {subject.steps}"
        raise Broken(f"a run over {CLIENTS} clients has {many} steps, `steps` says {subject.steps}")
    models = _models(result)
    if not models:
        raise Broken("the last state has no model, neither `model` nor `personal`")
    if not all(model.is_finite() for model in models):
        raise Broken("the model at the end has numbers that are not finite")


def learns(subject: Subject) -> None:
    """It learns: a small run ends better than chance. It need not train."""
    # a run that fails is reported once
    _ = subject.plain
    best = 0.0
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
        # a run with weights is refused
        return
    training = replace(settings()["training"], class_weights="balanced")
    if not difference(plain, _run(subject.small, training=training)):
        raise Broken(
            "--class-weights changes nothing: train on `client.loss`, or say `traits = "
            "Traits(weighs=False)`"
        )


def counts_every_pass(subject: Subject) -> None:
    """It counts: each pass of a sample through the network at a client is in the metrics."""
    _ = subject.watched
    for passes in subject.seen.passes:
        for way in ("forward", "backward"):
            said = getattr(passes.reported, way)
            seen = getattr(passes.measured, way)
            if said != seen:
                raise Broken(
                    f"{passes.task} sends {seen} samples {way}, {said} are counted: add to "
                    f"client.work.{way}"
                )


def ledger_equals_the_cost(subject: Subject) -> None:
    """The ledger has the bytes that `cost` says, or fewer if `moved` says so."""
    method = subject.small
    result = subject.plain
    size = Size.of(Network(of_method(Tiny, method, (4,), 3, 3, Classification())()), (4,))
    cost = method.cost(CLIENTS, size)
    moved = method.moved(result.state, CLIENTS, size)
    if result.bytes != moved:
        says = "moved"
        if type(method).moved is Method.moved:
            says = "cost"
        raise Broken(
            f"{result.bytes} bytes moved between {CLIENTS} clients, `{says}` says {moved} (M is "
            f"{int(size)})"
        )
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
    """It gives the same bits again: all randomness is from `client.seed(...)` or
    `fed.generator(...)`.
    """
    again, _ = subject.watched
    if differs := difference(subject.plain, again):
        raise Broken(
            f"a second run with the same seed gives {differs}: does it draw from torch's own "
            "random numbers?"
        )


def resumes(subject: Subject) -> None:
    """It resumes after every step bit for bit."""
    _ = subject.watched
    steps = subject.steps
    with TemporaryDirectory() as folder:
        # Stopped after each step; and, if there are more steps, after several steps of one process.
        for each in sorted({1, -(-steps // 2)}):
            stopped = Path(folder) / f"each-{each}"
            for done in range(0, steps, each):
                try:
                    _run(subject.small, folder=stopped, stop_after=each, evaluate_every=10**9)
                except Exception as error:
                    if not done:
                        raise
                    raise Broken(
                        f"a run that was stopped after step {done} cannot go on{_STATE}"
                    ) from error
            if different := _different(subject.files, files(stopped)):
                raise Broken(f"a run that was stopped gives another {different}{_STATE}")


def same_on_processes(subject: Subject) -> None:
    """It gives the same bits on every transport: the values that cross have the annotated types."""
    here = subject.plain
    there = _run(subject.small, processes=True)
    if differs := difference(here, there):
        raise Broken(
            f"a run with worker processes gives {differs}: does a task use what no argument brings?"
        )
    if there.metrics != here.metrics:
        raise Broken("a run with worker processes gives other metrics")


_STATE = ": is all that it knows in State and client.state?"


def _attempts(subject: Subject) -> Iterator[tuple[Any, float]]:
    """Yield methods and learning rates to try: most need little, some more epochs, rounds or
    smaller steps.
    """
    # two epochs are too little to learn anything in few communications
    method = subject.small
    kinds = vars(subject.default)
    counts = [name for name in subject.counts if name != "rounds" and kinds[name] > 10]
    short = replace(method, **dict.fromkeys(counts, 5))
    long = replace(method, **dict.fromkeys(counts, 20))
    more = long
    if "rounds" in kinds:
        more = replace(long, **{"rounds": 8})
    yield from ((short, 0.1), (long, 0.1), (more, 0.1), (more, 0.01))


def _models(result: Result) -> list[Any]:
    return [model for model in (result.weights, *result.personal) if model]


def difference(a: Result, b: Result) -> str:
    """Say in what two runs differ; empty if they are equal."""
    if a.ledger != b.ledger:
        return "another ledger"
    models = zip((a.weights, *a.personal), (b.weights, *b.personal), strict=True)
    if not all(same(x, y) for x, y in models):
        return "another model"
    return ""


SHAPES: tuple[Method, ...] = (
    FedSeq(epochs=1),
    SCAFFOLD(rounds=2, epochs=1),
    MetaFed(epochs=1, warmup=1),
    FedGram(),
)
"""Models that are handed on; rounds with private state; clients' own models; sums that clients add
up."""


def gives_the_same_bits(make: MakesTransport) -> None:
    """Models, metrics and ledger are those of a run in one process."""
    for method in SHAPES:
        here = _run(method)
        there = _run(method, transport=make)
        differs = difference(here, there)
        if here.metrics != there.metrics:
            differs = differs or "other metrics"
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

                def full(
                    self: RunFolder, state: Any, *args: Any, last: int = last, **how: Any
                ) -> None:
                    if state.step > last:
                        raise _Died
                    save(self, state, *args, **how)

                with patch.object(RunFolder, "save", full), suppress(_Died):
                    _run(method, folder=folder, transport=make)
            _run(method, folder=folder, transport=make)

        _compare(method, dying)


class _Died(Exception):
    """The state could not be written."""


def _compare(method: Method, attempts: Callable[[Path, int], None]) -> None:
    """Refuse a run made by `attempts` that left other files than a run in one process."""
    with TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        other = Path(scratch) / "other"
        _run(method, folder=whole)
        attempts(other, method.steps(len(blobs().clients)))
        if different := _different(files(whole), files(other)):
            raise Broken(f"a run of {method.title()} gives another {different}")


def _different(here: dict[str, bytes], there: dict[str, bytes]) -> str:
    """Return the names of the files in which two runs differ."""
    # a file differs from one that is not there, too
    return ", ".join(sorted({name for name, _ in here.items() ^ there.items()}))


def _run(method: Method, **options: Any) -> Any:
    return run(method, blobs(), Tiny, **(settings() | options))


# The lines of the contract of transports
OF_TRANSPORTS = (
    gives_the_same_bits,
    resumes_on_it,
    forgets_what_died,
)
