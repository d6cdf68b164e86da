"""Forgetting and joining: the bits of a run without the client or with it, the bytes that move, and
refusals."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ekiden
from ekiden import FederatedData, Hardware, UserError, federate, load_model
from ekiden.cli.app import main
from ekiden.core.base.files import read_tensors
from ekiden.core.base.settings import derive
from ekiden.core.engine.client import Client
from ekiden.core.engine.folder import read_lines
from ekiden.core.engine.method import Method
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.training.gram import size
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.lab.drawing import comparison
from ekiden.lab.reporting.runs import collect
from ekiden.methods import FedAvg, FedGram, FedKrylov, FedSeq, among
from ekiden.methods.exact.closing import with_lap
from ekiden.methods.exact.fedgram import Summing
from ekiden.runs.reruns import new_folder
from ekiden.runs.result import Result
from ekiden.runs.summary import summarise
from tests.methods.gram_runs import points
from tests.methods.test_fedgram import METHOD, bits, go, pictures

COUNTS = ("step", "bytes", "forward", "backward")
CLIENTS = [f"client-{i}" for i in range(5)]
SUMS = size(3, 24)
STAR = replace(METHOD, topology="star")


def five(names: list[str] = CLIENTS) -> FederatedData:
    """Five silos with different sizes and classes, each with its own test data."""
    x, y = points()
    rows = torch.split(y.argsort(stable=True), [50, 40, 90, 30, 90])
    held = [(x[r], y[r]) for r in rows]
    tests = [(x[:n], y[:n]) for n in (12, 7, 30, 9, 20)]
    data = federate(held, tests=tests, val_fraction=0.0, classes=["a", "b", "c"])
    return data.without(*(name for name in CLIENTS if name not in names))


def same(result: Result, expected: Result) -> None:
    """The same model, and the same measurements on the same test data."""
    assert bits(result) == bits(expected)
    rows = [{k: v for k, v in r.metrics[-1].items() if k not in COUNTS} for r in (result, expected)]
    assert rows[0] == rows[1]
    assert "accuracy" in rows[0]


def rest(client: str) -> list[str]:
    return [name for name in CLIENTS if name != client]


@pytest.mark.parametrize(
    "order",
    [
        "given",
        *(
            pytest.param(o, marks=pytest.mark.slow)
            for o in ("reversed", "client-4,client-1,client-3,client-2,client-0")
        ),
    ],
)
@pytest.mark.parametrize(
    "method", [METHOD, STAR, replace(METHOD, features="network"), replace(METHOD, personal=True)]
)
def test_forgetting_gives_the_bits_of_a_run_without(
    tmp_path: Path, method: FedGram, order: str
) -> None:
    method = replace(method, order=order)
    whole = go(five(), method, folder=tmp_path / "run")
    for client in (
        ("client-0", "client-4") if order == "given" else ("client-1",)
    ):  # the first may leave, too
        result = ekiden.forget(tmp_path / "run", client, five(), network=Tiny)
        left = ",".join(c for c in order.split(",") if c != client)
        expected = go(five(rest(client)), replace(method, order=left))
        same(result, expected)
        assert bits(result) != bits(whole)
        assert result.folder == tmp_path / f"run-without-{client}"
        assert [p.params.tolist() for p in result.personal] == [
            p.params.tolist() for p in expected.personal
        ]


@pytest.mark.parametrize(
    "method",
    [
        FedKrylov(width=24, laps=2),
        FedSeq(epochs=1),
        FedAvg(rounds=2, epochs=1),
        with_lap(FedSeq(epochs=1)),
    ],
)
def test_clients_leave_and_join_runs_of_any_method(tmp_path: Path, method: Method) -> None:
    """The order that a run named loses who leaves, and has who joins at its end."""
    if hasattr(method, "order"):
        method = replace(method, **{"order": "client-3,client-1,client-0,client-4,client-2"})
    whole = run_here(method, five(), folder=tmp_path / "run")
    left = ekiden.forget(tmp_path / "run", "client-2", five(), network=Tiny)
    assert left.folder
    same(left, run_here(among(method, rest("client-2")), five(rest("client-2"))))
    again = ekiden.join(left.folder, "client-2", five(), network=Tiny)
    same(again, whole)
    assert again.config["recipe"]["hyperparameters"] == whole.config["recipe"]["hyperparameters"]
    assert list(again.config["revisions"]) == [
        {"forgot": "client-2", "from": "run"},
        {"joined": "client-2", "from": "run-without-client-2"},
    ]


def run_here(method: Method, data: FederatedData, **options: Any) -> Result:
    return ekiden.run(method, data, Tiny, hardware=Hardware(threads=1), seed=3, **options)


def test_the_folder_is_that_of_a_run_without(tmp_path: Path) -> None:
    for order in ("given", "random", "client-1,client-0,client-3,client-2,client-4"):
        go(five(), replace(METHOD, order=order), folder=tmp_path / order)
        result = ekiden.forget(tmp_path / order, "client-2", five(), network=Tiny)
        assert result.folder is not None
        new = json.loads((result.folder / "config.json").read_text())
        assert new.pop("revisions") == [{"forgot": "client-2", "from": order}]
        method = replace(METHOD, order=new["recipe"]["hyperparameters"]["order"])
        again = go(five(rest("client-2")), method, folder=tmp_path / f"{order}-alone")
        same(result, again)
        assert new == json.loads((tmp_path / f"{order}-alone" / "config.json").read_text())
        assert (method.order == order) == ("," not in order)
        for name in ("model.safetensors", "ledger.jsonl", "metrics.jsonl"):
            assert (result.folder / name).read_bytes() == (
                tmp_path / f"{order}-alone" / name
            ).read_bytes()


def test_the_new_folder_is_next_to_the_run_also_from_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "run" / "personal"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    expected = tmp_path / "run-without-a"
    assert new_folder(Path(".."), None, "without-a") == expected
    monkeypatch.chdir("..")
    assert new_folder(Path(), None, "without-a") == expected
    assert new_folder(Path("personal"), None, "x") == Path("personal-x")


def test_who_joins_comes_where_the_data_have_it(tmp_path: Path) -> None:
    go(five(rest("client-0")), folder=tmp_path / "run")
    result = ekiden.join(tmp_path / "run", "client-0", five(), network=Tiny)
    same(result, go(five()))
    assert result.config["recipe"]["hyperparameters"]["order"] == "given"


def test_the_last_state_of_a_run_has_no_sums(tmp_path: Path) -> None:
    """What is left is the model: two runs that differ in one client do not show its sums by their
    difference."""
    for method in (METHOD, STAR, replace(METHOD, personal=True), replace(STAR, personal=True)):
        folder = tmp_path / f"{method.topology}-{method.personal}"
        result = go(five(), method, folder=folder)
        assert isinstance(result.state, Summing)
        assert result.state.totals is None
        assert {file.name.split("-")[-1] for file in folder.glob("clients/*/value-*")} <= {
            "solve.safetensors",
            "personalise.safetensors",
        }
        largest = max(
            (file.stat().st_size for file in folder.rglob("*") if file.suffix == ".safetensors"),
            default=0,
        )
        assert largest < SUMS + (folder / "model.safetensors").stat().st_size


def test_patches_of_images(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "lenet", "hardware": Hardware(threads=1), "seed": 3}
    ekiden.run(FedGram(width=32), pictures(), folder=tmp_path / "run", **options)
    result = ekiden.forget(tmp_path / "run", "client-1", pictures())
    same(result, ekiden.run(FedGram(width=32), pictures().without("client-1"), **options))
    again = ekiden.join(result.folder or "", "client-1", pictures())
    assert bits(again) == bits(ekiden.run(FedGram(width=32), pictures(), **options))
    x = pictures().dataset.test.x
    with torch.no_grad():
        assert torch.equal(load_model(result.folder or "")(x), result.model(x.float() / 255))


def test_clients_left_out_take_their_test_data_with_them() -> None:
    x = torch.arange(24.0).reshape(12, 2)
    y = torch.tensor([0, 1] * 6)
    held = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    for more in ({"tests": held}, {"test": (x, y)}):  # a test set of all stays whole
        data = federate(held, val_fraction=0.25, names=["a", "b", "c"], **more)
        left = data.without("a")
        two = more | ({"tests": held[1:]} if "tests" in more else {})
        alone = federate(held[1:], val_fraction=0.25, names=["b", "c"], **two)
        assert [*left.sizes] == ["b", "c"]
        for one, other in zip(left.clients, alone.clients, strict=True):
            for part in ("train", "val", "test"):
                assert torch.equal(getattr(one, part).x, getattr(other, part).x)
        assert torch.equal(left.dataset.test.x, alone.dataset.test.x)
    split = ekiden.split(federate(held).dataset, "iid", 3, val_fraction=0.4)
    left = split.without("client-1")
    assert [c.train.x.tolist() for c in left.clients] == [
        split.clients[k].train.x.tolist() for k in (0, 2)
    ]
    tuned = left.for_tuning().dataset.test
    assert tuned.x.tolist() == split.for_tuning().without("client-1").dataset.test.x.tolist()
    with pytest.raises(UserError, match="unknown client 'd'"):
        data.without("a", "d")
    with pytest.raises(UserError, match="no client would be left: name fewer"):
        data.without("a", "b", "c")


def wards() -> dict[str, dict[str, list[Any]]]:
    """Tables of three wards; the first and the last have classes, categories and scales of their
    own.
    """
    draw = np.random.default_rng(0)
    found = {}
    for ward, more in (("a", "early"), ("b", ""), ("c", "late")):
        value = draw.normal(0, 1, 120) + (50 if more else 0)
        kind, died = (
            draw.choice(["x", "y", more or "x"], 120),
            draw.choice(["no", "yes"], 120).astype(object),
        )
        died[::9] = more or "no"
        found[ward] = {"value": list(value), "kind": list(kind), "died": list(died)}
    return found


@pytest.mark.filterwarnings("ignore:.*column 'value'", "ignore:.*differs ")
@pytest.mark.parametrize("client", ["a", "c"])
def test_scale_categories_and_classes_leave_with_a_silo_and_come_with_it(
    tmp_path: Path, client: str
) -> None:
    """Also if it was the first, after which the rows of all others were shuffled."""
    method, held = FedAvg(rounds=2, epochs=1), wards()
    rest = {name: table for name, table in held.items() if name != client}
    data = federate(held, label_column="died")  # type: ignore[arg-type]
    whole = ekiden.run(method, data, folder=tmp_path / "run")
    alone = ekiden.run(method, federate(rest, label_column="died"), folder=tmp_path / "alone")  # type: ignore[arg-type]
    left = ekiden.forget(tmp_path / "run", client, data)
    same(left, alone)
    for entry in ("classes", "inputs", "input", "clients", "digests"):
        assert left.config[entry] == alone.config[entry]
    assert len(left.config["classes"]) == 3 < len(whole.config["classes"])
    same(ekiden.join(tmp_path / "alone", client, data), whole)


@pytest.mark.filterwarnings("ignore:.*column 'value'", "ignore:.*differs ")
def test_a_silo_of_one_file_leaves_as_if_its_rows_had_not_been_there(tmp_path: Path) -> None:
    rows = [
        f"{ward},{value},{kind},{died}"
        for ward, table in wards().items()
        for value, kind, died in zip(*table.values(), strict=True)
    ]
    for name, kept in (("all", "abc"), ("rest", "bc")):
        lines = ["ward,value,kind,died", *(row for row in rows if row[0] in kept)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    runs = []
    for name in ("all", "rest"):
        table = ekiden.load(tmp_path / f"{name}.csv", label_column="died", group_column="ward")
        data = ekiden.split(table, "natural")
        runs.append(ekiden.run(FedSeq(epochs=1), data, folder=tmp_path / name))
    left = ekiden.forget(tmp_path / "all", "a")
    same(left, runs[1])
    assert left.folder
    same(ekiden.resume(left.folder), runs[1])
    same(ekiden.join(left.folder, "a"), runs[0])


@pytest.mark.filterwarnings("ignore:.*column 'value'", "ignore:.*differs ")
def test_classes_that_the_user_named_stay() -> None:
    held, names = wards(), ["early", "late", "no", "yes"]
    data = federate(held, label_column="died", classes=names)  # type: ignore[arg-type]
    assert data.without("a").dataset.classes == tuple(names)


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def other_samples() -> FederatedData:
    """The same except for one number of one sample."""
    data = five()
    x = data.dataset.train.x.clone()
    x[data.clients[2].train.rows[0], 0] += 1
    train = replace(data.dataset.train, x=x)
    clients = (replace(c, train=replace(c.train, samples=train)) for c in data.clients)
    return FederatedData(replace(data.dataset, train=train), tuple(clients))


@pytest.mark.parametrize(
    ("change", "spoil", "arguments", "message"),
    [
        ("forget", None, ("client-9",), "unknown client 'client-9': did you mean"),
        ("forget", None, ("client-2", None), "was made from Python with its own data: give `data`"),
        (
            "forget",
            None,
            ("client-2", other_samples()),
            "the data of client-2 differ from what .* was made with",
        ),
        ("forget", None, ("client-2", five(rest("client-2"))), "the data of client-2, client-3"),
        (
            "forget",
            None,
            ("client-3", other_samples()),
            "the data of client-2 differ from what .* was made with",
        ),
        (
            "forget",
            lambda run: edited(run, on="flower"),
            ("client-2",),
            "is a run between machines",
        ),
        (
            "forget",
            lambda run: (run / "config.json").unlink(),
            ("client-2",),
            "is not a run folder",
        ),
        (
            "forget",
            lambda run: run.with_name("run-without-client-2").mkdir(),
            ("client-2",),
            "exists already",
        ),
        ("join", None, ("client-2",), "client-2 is in .* already"),
        ("join", None, ("client-9",), "have no client 'client-9'"),
        ("join", None, ("client-9", "digits"), "was made from Python with its own data"),
    ],
)
def test_refusals_write_nothing(
    tmp_path: Path,
    finished: Path,
    change: str,
    spoil: Callable[[Path], Any] | None,
    arguments: tuple[Any, ...],
    message: str,
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    if spoil:
        spoil(tmp_path / "run")
    before = contents(tmp_path)
    client, data = arguments if len(arguments) == 2 else (arguments[0], five())
    with pytest.raises(UserError, match=message) as refused:
        getattr(ekiden, change)(tmp_path / "run", client, data, network=Tiny)
    assert "\n" not in str(refused.value)
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file; folders are empty ones."""
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five clients."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    go(five(), folder=folder)
    return folder


def test_refuses_other_inputs_methods_and_absences(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(UserError, match=r"has its own network \(Tiny\): give it as `network`"):
        ekiden.forget(finished, "client-2", five())
    scaled = five()
    scaled = replace(scaled, dataset=replace(scaled.dataset, mean=(0.5,)))
    with pytest.raises(UserError, match=r"the shape or scale of inputs differ from those of"):
        ekiden.forget(finished, "client-2", scaled, network=Tiny)
    ekiden.run(METHOD, five(["client-3"]), Tiny, folder=tmp_path / "alone")
    with pytest.raises(UserError, match=r"client-3 is the only client of .*: delete the folder"):
        ekiden.forget(tmp_path / "alone", "client-3", five(), network=Tiny)
    go(five(), replace(METHOD, features="network"), folder=tmp_path / "network")
    with pytest.raises(
        UserError, match=r"the frozen part of the network differ from .*: give the same network"
    ):
        ekiden.forget(tmp_path / "network", "client-3", five(), network=Wider)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "network"]


class Wider(Tiny):
    """A network with more features than `Tiny`."""

    def __init__(self) -> None:
        super().__init__()
        self.features[0], self.features[1] = nn.Linear(4, 9), nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 3)


def test_features_of_a_network_are_measured_again_as_before() -> None:
    """Floating-point features depend on their batches by rounding, so batches must be the same in
    every step."""
    batches = [[x.tolist() for x, _ in client_at(step).batches(shuffle=False)] for step in (0, 3)]
    assert batches[0] == batches[1]
    shuffled = [[x.tolist() for x, _ in client_at(step).batches()] for step in (0, 3)]
    assert shuffled[0] != shuffled[1]


def client_at(step: int) -> Client:
    """A client in a step."""
    data = five()
    setup = Setup(METHOD, Tiny, data.dataset, hardware=Hardware(threads=1))
    return Client(
        Worker(setup, {}).bench("here"), data.clients[0], None, derive(0, step, "client-0", 0), ""
    )


class Commands:
    """The command line in this process and an empty folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capfd = monkeypatch, capfd

    def call(self, line: str) -> str:
        """What it prints."""
        self._patch.setattr(sys, "argv", ["ekiden", *line.split()])
        main()
        out, err = self._capfd.readouterr()
        assert err == ""
        return out

    def refused(self, line: str) -> str:
        """The line that says why; nothing may be written."""
        before = contents(Path())
        self._patch.setattr(sys, "argv", ["ekiden", *line.split()])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert contents(Path()) == before
        (said,) = self._capfd.readouterr().err.splitlines()
        return said


@pytest.fixture
def commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Commands:
    """In an empty folder, without local data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    return Commands(monkeypatch, capfd)


@pytest.mark.slow
def test_the_command_line(commands: Commands) -> None:
    call, refused = commands.call, commands.refused
    options = "--data digits --partition iid --clients 3 --width 32 --threads 1"
    call(f"run fedgram {options} --out runs")
    run = "runs/fedgram-digits-seed0"
    out = call(f"forget {run} --client client-1")
    assert f"run folder: {run}-without-client-1" in out
    assert f"{run} still holds client-1: delete it to forget it there, too" in out
    call(f"run fedgram {options} --without client-1 --out alone")
    files = [
        Path(folder, "model.safetensors")
        for folder in (f"{run}-without-client-1", f"alone/{Path(run).name}")
    ]
    assert tensors(files[0]) == tensors(files[1])
    new, old = (read_lines(file.parent / "metrics.jsonl")[-1] for file in files)
    assert {k: v for k, v in new.items() if k not in COUNTS} == {
        k: v for k, v in old.items() if k not in COUNTS
    }
    assert (
        json.loads(call(f"evaluate {run}-without-client-1 --json"))["accuracy"] == new["accuracy"]
    )
    assert "fedgram (width=32), client-1 forgotten" in call(f"show {run}-without-client-1").replace(
        "\n", " "
    )
    call(f"report {run}-without-client-1 -o page")
    tables = " ".join(file.read_text() for file in Path("page").rglob("*.csv"))
    assert "client-0,client-2" in tables
    call(f"resume {run}-without-client-1")
    assert tensors(files[0]) == tensors(files[1])
    call(f"join {run}-without-client-1 --client client-1 --out again")
    assert tensors(Path("again/model.safetensors")) == tensors(Path(run, "model.safetensors"))
    assert "exists already" in refused(f"forget {run} --client client-1")
    assert "unknown client 'client-1'" in refused(
        f"forget {run}-without-client-1 --client client-1"
    )
    assert "have no client 'client-7'" in refused(f"join {run} --client client-7")
    assert "--client" in refused(f"forget {run}")


SILOS = """
import torch

def silos(n, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(40, 4, generator=draw) + i + 1, torch.arange(40) % 2) for i in range(n)]

def three():
    return silos(3)

def four():
    return silos(4)

def other():
    return silos(4, seed=1)
"""


def test_a_silo_that_was_not_in_the_data_joins(commands: Commands) -> None:
    Path("hospitals.py").write_text(SILOS)
    options = "--model mlp --width 16 --threads 1"
    commands.call(f"run fedgram --data hospitals.py:three {options} --out runs")
    run = str(next(Path("runs").iterdir()))
    commands.call(f"join {run} --client client-3 --data hospitals.py:four")
    commands.call(f"run fedgram --data hospitals.py:four {options} --out alone")
    alone = next(Path("alone").iterdir())
    assert tensors(Path(f"{run}-with-client-3/model.safetensors")) == tensors(
        alone / "model.safetensors"
    )
    said = commands.refused(f"join {run} --client client-3 --data hospitals.py:other --out new")
    assert "the data of client-0, client-1, client-2 differ from what" in said


def tensors(file: Path) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in read_tensors(file)[0].items()}


def test_seeds_of_a_revised_run_are_one_row_and_one_line_of_the_report(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        ekiden.run(METHOD, five(), Tiny, seed=seed, folder=tmp_path / f"run-{seed}")
        folders.append(
            ekiden.forget(tmp_path / f"run-{seed}", "client-2", five(), network=Tiny).folder
        )
    assert comparison(summarise(folder) for folder in folders if folder).row_count == 1
    (group,) = collect([folder for folder in folders if folder]).groups
    assert [run.config["recipe"]["seed"] for run in group.runs] == [0, 1]
    both = comparison(summarise(folder) for folder in (*folders, tmp_path / "run-0") if folder)
    assert both.row_count == 2
