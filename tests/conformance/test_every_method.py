"""What holds for every method of the library, measured without knowing any of them."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.api import Result, of_method
from ekiden.cli import RunOptions
from ekiden.cli_silos import RemoteOptions
from ekiden.core.federation import Request, live_refs
from ekiden.core.folder import read_config
from ekiden.core.method import INITIAL, Method, Size
from ekiden.core.outline import outline
from ekiden.core.refs import SERVER, Ref
from ekiden.core.worker import Job, Outcome, Setup, Worker, payload_types
from ekiden.experiments.plan import Plan
from ekiden.learning import fit as fitting
from ekiden.learning.fit import Bench, Work
from ekiden.learning.network import Network
from ekiden.learning.weights import Weights
from ekiden.methods import METHODS, SPFL, UAPDFL, DisPFL, FedELMY, FedFisher, FedLPA, FedOV, FedTasuki, MAEcho, MetaFed
from ekiden.methods._hosts import HOSTS
from ekiden.transports.flower.session import RemotePlan
from ekiden.transports.simulation import Simulation
from tests.conformance.ridge import Ridge
from tests.conftest import Tiny, make_blobs

ROOT = Path(__file__).parents[2]
every_method = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.xdist_group(kind.title()), id=kind.title()) for kind in METHODS],
)


def small(kind: type[Method]) -> Method:
    """The method with its counts brought down to 2, 2 rounds if it has rounds, half the clients or more in each."""
    method = kind()
    if getattr(method, "participation", 1.0) < 0.5:
        method = replace(method, **{"participation": 0.5})
    counts = {f.name: getattr(method, f.name) for f in fields(method) if type(getattr(method, f.name)) is int}
    return replace(method, **{name: 2 if name == "rounds" else min(value, 2) for name, value in counts.items()})


def settings(kind: type[Method]) -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 3,
    }


def same(a: Weights | None, b: Weights | None) -> bool:
    """Whether two models are equal bit for bit."""
    if a is None or b is None:
        return a is b
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def outcome(result: Result) -> tuple[object, ...]:
    return result.metrics, result.ledger


def files(folder: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on how it came about."""
    names = ["metrics.jsonl", "ledger.jsonl", "model.safetensors"]
    names += [str(p.relative_to(folder)) for p in sorted(folder.glob("personal/*"))]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


@dataclass(frozen=True)
class Seen:
    """A small run, and what was seen in it.

    Attributes:
        result: what it gave; models were measured at the end only.
        config: the configuration that its folder held.
        requests: what the method asked for.
        read: the values that somebody asked the transport for.
        passes: see `watched_passes`.
        selected: what local training returned, each way that occurred.
    """

    result: Result
    config: Mapping[str, Any]
    requests: Sequence[Request]
    read: Set[Ref[Any]]
    passes: Sequence["Passes"]
    selected: Set[str]


@cache
def plain(kind: type[Method]) -> Result:
    """The small run in memory, for all tests that compare with it."""
    return run(small(kind), make_blobs(), Tiny, **settings(kind))


@cache
def seen(kind: type[Method]) -> Seen:
    """The small run in a folder, for all tests that look into it."""
    with (
        TemporaryDirectory() as folder,
        watched_passes() as passes,
        watched_transport() as (requests, read),
        watched_fits() as selected,
    ):
        path = Path(folder) / "run"
        result = run(small(kind), make_blobs(), Tiny, folder=path, evaluate_every=10**9, **settings(kind))
        return Seen(result, read_config(path), requests, read, passes, selected)


@contextmanager
def watched_transport() -> Iterator[tuple[list[Request], set[Ref[Any]]]]:
    """Meanwhile: the requests, and the values that were read."""
    requests: list[Request] = []
    read: set[Ref[Any]] = set()
    submit, value = Simulation.submit, Simulation.value

    def spy_submit(self: Simulation, request: Request) -> None:
        requests.append(request)
        submit(self, request)

    def spy_value(self: Simulation, ref: Ref[Any]) -> Any:
        read.add(ref)
        return value(self, ref)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "submit", spy_submit)
        patch.setattr(Simulation, "value", spy_value)
        yield requests, read


@contextmanager
def watched_fits() -> Iterator[set[str]]:
    """Meanwhile: what local training was told to return."""
    selected: set[str] = set()
    train = fitting.fit

    def spy(bench: Bench, *args: Any, **options: Any) -> Weights:
        selected.add(bench.training.select)
        return train(bench, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "fit", spy)
        yield selected


@every_method
def test_describes_itself(kind: type[Method]) -> None:
    text = inspect.getdoc(kind) or ""
    assert re.match(r"\S.*\.\n\n", text), "the first line is one sentence"
    assert re.search(r"https://[\w-]+\.\S+", text), "a link to what it cites"
    assert re.search(r"\b(19|20)\d\d\b", text), "the year"
    assert "Departures from the paper:" in text
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    after = {
        node.target.id: follower
        for node, follower in zip(body.body, body.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for f in fields(kind):
        follower = after[f.name]
        assert isinstance(follower, ast.Expr), f"{f.name} has no help text"
        assert isinstance(follower.value, ast.Constant), f"{f.name} has no help text"
        assert f.default is not MISSING or f.default_factory is not MISSING


@every_method
def test_has_one_page_and_one_test_file(kind: type[Method]) -> None:
    module = kind.__module__.rsplit(".", 1)[1]
    assert (ROOT / "docs" / "methods" / f"{module}.md").exists()
    assert (ROOT / "tests" / "methods" / f"test_{module}.py").exists()


@every_method
def test_its_flags_are_no_other_flags(kind: type[Method]) -> None:
    others = {f.name for c in (Plan, RemotePlan, Training, Hardware, RunOptions, RemoteOptions) for f in fields(c)}
    assert not others & {f.name for f in fields(kind)}, "a name twice on the command line"


@every_method
def test_learns_and_reports(kind: type[Method], blobs: FederatedData) -> None:
    method = small(kind)  # two epochs are too little to learn anything in few communications
    counts = [name for name, value in vars(kind()).items() if type(value) is int and name != "rounds" and value > 10]
    short, long = (replace(method, **dict.fromkeys(counts, count)) for count in (5, 20))
    more = replace(long, rounds=8) if "rounds" in vars(method) else long  # type: ignore[call-arg]
    # Most need little; CriticalFL's server gets a fifth of the parameters in a round.
    attempts = ((short, 0.1), (long, 0.1), (more, 0.1), (more, 0.01))
    for method, lr in attempts:
        result = run(method, blobs, Tiny, **(settings(kind) | {"training": Training(lr=lr, batch_size=16)}))
        models = [*([result.weights] if result.weights else []), *result.personal]
        assert models
        assert all(m.is_finite() for m in models)
        best = max(result.metrics[-1]["accuracy"], result.metrics[-1]["client_mean"])
        if best > 0.45:
            break
    assert best > 0.45, "better than one class in three"
    assert [row["step"] for row in result.metrics] == list(range(1, method.steps(4) + 1))
    assert {"bytes", "forward", "backward"} <= result.metrics[-1].keys()


class Plain(nn.Module):
    """A network without BatchNorm, which some methods treat in another way, and of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


Passes = tuple[str, Work, Work]


@contextmanager
def watched_passes() -> Iterator[list[Passes]]:
    """Meanwhile, of each task: its name, the work that it reported, and the samples that went through the network.

    A sample counts once for a pass: where it enters the first layer (the only one of 4 inputs), and on the way back
    where it leaves the first layer, or the last where the first is frozen.
    """
    passes: list[Passes] = []
    forward, execute = nn.Linear.forward, Worker.execute
    measured, reaches_first = Work(), False

    def back(gradient: torch.Tensor) -> None:
        measured.backward += len(gradient)

    def counted(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        nonlocal reaches_first
        out = forward(layer, x)
        if layer.in_features == 4:
            measured.forward += len(x)
            reaches_first = out.requires_grad
        last = layer.out_features in (3, 4) and not reaches_first
        if out.requires_grad and (layer.in_features == 4 or last):
            out.register_hook(back)  # type: ignore[no-untyped-call]
        return out

    def watched(worker: Worker, job: Job, *journal: Any) -> Outcome:
        nonlocal measured
        measured = Work()
        outcome = execute(worker, job, *journal)
        passes.append((job.task, outcome.work, replace(measured)))
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", counted)
        patch.setattr(Worker, "execute", watched)
        yield passes


def check_passes(passes: Sequence[Passes]) -> None:
    assert passes
    for task, reported, measured in passes:
        assert reported == measured, task


@every_method
def test_every_pass_at_a_client_is_counted(kind: type[Method]) -> None:
    check_passes(seen(kind).passes)


@pytest.mark.parametrize(
    ("kind", "changes", "build", "training"),
    [
        (FedTasuki, {"rounds": 2, "statistics": True, "recall": 0.3, "widen": 0.2}, Plain, {}),
        (FedTasuki, {}, Tiny, {"optimizer": "sam"}),
        (MAEcho, {"projector": "closed"}, Plain, {}),
        (MAEcho, {"form": "paper", "step": 1.0, "decentralised": True, "align": True}, Plain, {}),
        (FedFisher, {"form": "diagonal", "fisher": "sampled"}, Plain, {}),
        (FedFisher, {"fisher": "given"}, Tiny, {}),
        (FedLPA, {"fisher": "expected"}, Plain, {}),
        (DisPFL, {"regrow": "gradient"}, Tiny, {}),
        (FedOV, {}, Plain, {}),
        (FedOV, {}, Plain, {"optimizer": "sam"}),
        (MetaFed, {"threshold": 0.0}, Tiny, {}),
        (MetaFed, {"threshold": 1.0}, Tiny, {}),
        (FedELMY, {"align_previous": 1.0, "align_global": 1.0}, Tiny, {}),
        (UAPDFL, {"threshold": 0.0}, Tiny, {"select": "last"}),
        *((SPFL, {"host": host.__name__.lower()}, Tiny, {}) for host in HOSTS),
    ],
)
def test_every_pass_is_counted_with_other_settings_too(
    kind: type[Method],
    changes: dict[str, Any],
    build: type[nn.Module],
    training: dict[str, Any],
    blobs: FederatedData,
) -> None:
    method, chosen = replace(small(kind), **changes), settings(kind)
    chosen["training"] = replace(chosen["training"], **training)
    with watched_passes() as passes:
        run(method, blobs, build, evaluate_every=10**9, **chosen)
    check_passes(passes)


@every_method
def test_ledger_equals_the_declared_cost(kind: type[Method]) -> None:
    method, result = small(kind), plain(kind)
    size = Size.of(Network(of_method(Tiny, method, (4,), 3, 3)()), (4,))
    assert result.bytes == method.moved(result.state, 4, size)
    assert result.bytes <= method.cost(4, size)


@every_method
def test_it_says_whether_it_ends_with_one_model(kind: type[Method]) -> None:
    method, result = small(kind), plain(kind)
    assert method.one_model == (result.weights is not None and not result.personal)
    assert method.complete(result.state)


@every_method
def test_resumes_after_every_step_bit_for_bit(kind: type[Method], blobs: FederatedData, tmp_path: Path) -> None:
    """Stopped after each step; and, where there are more, after several steps of one process."""
    method = small(kind)
    steps = method.steps(4)
    run(method, blobs, Tiny, folder=tmp_path / "whole", **settings(kind))
    for name, each in (("each", 1), ("half", -(-steps // 2)))[: 1 if steps <= 2 else 2]:
        for _ in range(0, steps, each):
            run(method, blobs, Tiny, folder=tmp_path / name, stop_after=each, **settings(kind))
        assert files(tmp_path / name) == files(tmp_path / "whole")


@every_method
def test_same_bits_on_every_transport(kind: type[Method], blobs: FederatedData) -> None:
    here, there = plain(kind), run(small(kind), blobs, Tiny, processes=True, **settings(kind))
    assert same(here.weights, there.weights)
    assert all(same(a, b) for a, b in zip(here.personal, there.personal, strict=True))
    assert outcome(here) == outcome(there)


@every_method
def test_another_seed_gives_another_model(kind: type[Method], blobs: FederatedData) -> None:
    other = run(small(kind), blobs, Tiny, evaluate_every=10**9, **(settings(kind) | {"seed": 4}))
    a, b = (result.weights or result.personal[0] for result in (plain(kind), other))
    assert not torch.equal(a.params, b.params)


@every_method
def test_nothing_is_returned_unused(kind: type[Method]) -> None:
    asked: set[Ref[Any]] = {Ref(request.client, request.key) for request in seen(kind).requests}
    assert asked
    assert asked <= seen(kind).read - {INITIAL}


@every_method
def test_its_outline_is_what_happens(kind: type[Method], blobs: FederatedData) -> None:
    result, asked = seen(kind).result, list(seen(kind).requests)
    setup = Setup(small(kind), Tiny, blobs.dataset, seed=3)
    names = [c.name for c in blobs.clients]
    found = outline(setup, names)
    values = [row for row in result.ledger if row.task == "get"]
    assert (found is None) == bool(values) or kind.pools_data
    if found is not None and not kind.pools_data:
        assert list(found.requests) == asked
        assert found.result == live_refs(result.state)
        given: list[Ref[Any]] = [Ref(request.client, request.key) for request in asked]
        moved = [(user, step, ref.owner) for ref in given for user, step in found.users(ref)]
        assert sorted(moved) == sorted((row.target, row.step, row.source) for row in result.ledger)


@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind.skips], ids=lambda kind: kind.title())
def test_goes_on_without_an_absent_client(kind: type[Method], blobs: FederatedData, tmp_path: Path) -> None:
    present = plain(kind)
    lost = next(row.target for row in present.ledger if row.step == 1 and row.target != SERVER)

    def away(step: int, client: str) -> bool:
        return step == 1 and client == lost

    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    result = run(small(kind), blobs, Tiny, folder=whole, absent=away, **settings(kind))
    assert [(row.step, row.source) for row in result.ledger if row.missing] == [(1, lost)]
    assert result.weights is not None
    assert result.weights.is_finite()
    for stop in (1, 2, None):
        run(small(kind), blobs, Tiny, folder=folder, absent=away, stop_after=stop, **settings(kind))
    assert files(folder) == files(whole)
    assert not same(result.weights, present.weights)


@every_method
def test_it_declares_what_local_training_returns(kind: type[Method], blobs: FederatedData) -> None:
    best = seen(kind)
    training = Training(lr=0.01, batch_size=16, select="last")
    with watched_fits() as last:
        run(small(kind), blobs, Tiny, evaluate_every=10**9, **(settings(kind) | {"training": training}))
    method, trains = small(kind), bool(best.result.metrics[-1]["backward"])
    assert best.config["selection"] == method.selection("best")
    assert best.selected == ({method.selection("best")} if trains else set()), "what does not train selects nothing"
    assert last == ({method.selection("last")} if trains else set())


@every_method
def test_its_tasks_are_fully_annotated(kind: type[Method]) -> None:
    tasks = [name for name, f in inspect.getmembers(kind) if getattr(f, "__on_client__", False)]
    assert tasks, "a method without client tasks is no federated method"
    for task in tasks:
        arguments, value = payload_types(kind(), task)
        assert value is not None
        assert all(a is not Any for a in arguments)


@pytest.mark.parametrize(
    "holds",
    [
        test_learns_and_reports,
        test_resumes_after_every_step_bit_for_bit,
        test_same_bits_on_every_transport,
        test_its_outline_is_what_happens,
        test_nothing_is_returned_unused,
    ],
)
def test_a_method_that_does_not_train_holds_too(
    holds: Callable[..., None], blobs: FederatedData, tmp_path: Path
) -> None:
    given = {"kind": Ridge, "blobs": blobs, "tmp_path": tmp_path}
    holds(**{name: given[name] for name in inspect.signature(holds).parameters})


def test_passes_that_a_task_does_by_itself_are_in_the_metrics(blobs: FederatedData) -> None:
    test_describes_itself(Ridge)
    test_ledger_equals_the_declared_cost(Ridge)
    test_every_pass_at_a_client_is_counted(Ridge)
    row = plain(Ridge).metrics[-1]
    assert (row["forward"], row["backward"]) == (sum(len(client.train) for client in blobs.clients), 0)


def test_methods_import_only_core_and_learning() -> None:
    allowed = (
        "ekiden.checks",
        "ekiden.core",
        "ekiden.learning",
        "ekiden.methods",
        "ekiden.errors",
        "ekiden.data",
        "ekiden.models",
        "ekiden.outside",
    )
    for file in (ROOT / "src" / "ekiden" / "methods").glob("*.py"):
        for name in imported(file):
            assert not name.startswith("ekiden") or name.startswith(allowed), f"{file.name} imports {name}"


def test_core_imports_no_method_and_no_transport() -> None:
    for file in (ROOT / "src" / "ekiden" / "core").glob("*.py"):
        for name in imported(file):
            assert not name.startswith(("ekiden.methods", "ekiden.transports", "ekiden.cli", "ekiden.app")), (
                f"{file.name}: {name}"
            )


def imported(file: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    return [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)] + [
        a.name for n in nodes if isinstance(n, ast.Import) for a in n.names
    ]
