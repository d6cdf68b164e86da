"""Runs from Python in the command line, and the commands of the command line in Python."""

import json
import threading
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ekiden
from ekiden import FedAvg, FederatedData, FedSeq, Training, UserError, federate, load, split
from ekiden.cli.app import COMMANDS
from ekiden.core.base.files import is_held, locked
from ekiden.core.engine.folder import client_digest

pandas = pytest.importorskip("pandas")
Command = Callable[..., tuple[int, str]]
FAST: dict[str, Any] = {"training": Training(max_steps=2), "quiet": True}


def frame(seed: int, rows: int = 60) -> Any:
    """Return rows of patients whose label follows a measurement."""
    x = np.random.default_rng(seed).normal(size=(rows, 3)).round(3)
    return pandas.DataFrame(x, columns=["age", "dose", "score"]).assign(
        died=np.where(x[:, 0] > 0, "yes", "no")
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tables of two hospitals."""
    folder = tmp_path_factory.mktemp("hospitals")
    for k, name in enumerate(("north", "south")):
        frame(k).to_csv(folder / f"{name}.csv", index=False)
    return folder


def of_file(folder: Path) -> FederatedData:
    return split(
        load(folder / "north.csv", label_column="died"), "iid", 2, seed=3, val_fraction=0.2
    )


def of_files(folder: Path) -> FederatedData:
    paths: list[Any] = [str(folder / "north.csv"), folder / "south.csv"]
    return federate(paths, label_column="died", seed=4)


def of_named_files(folder: Path) -> FederatedData:
    paths: list[Any] = [folder / "south.csv", folder / "north.csv"]
    return federate(paths, names=["Süd Haus", "Nord"], label_column="died")


def of_a_name(folder: Path) -> FederatedData:
    return split(load("digits", size=4), "dirichlet:0.5:1", 3, seed=1)


def one_less(folder: Path) -> FederatedData:
    return of_a_name(folder).without("client-1")


def for_tuning(folder: Path) -> FederatedData:
    return of_file(folder).for_tuning()


@pytest.mark.parametrize(
    "make", [of_file, of_files, of_named_files, of_a_name, one_less, for_tuning]
)
def test_a_run_from_python_is_resumed_measured_and_shown_on_the_command_line(
    make: Callable[[Path], FederatedData],
    files: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(files)
    silos, folder, whole = make(files), tmp_path / "run", tmp_path / "whole"
    options: dict[str, Any] = {**FAST, "seed": 7, "evaluate_every": 2}
    expected = ekiden.run(FedAvg(rounds=3, epochs=1), silos, folder=whole, **options)
    ekiden.run(FedAvg(rounds=3, epochs=1), silos, folder=folder, stop_after=1, **options)
    monkeypatch.chdir(tmp_path)
    code, said = command("show", str(folder))
    assert f"stopped after step 1: `ekiden resume {folder}`" in " ".join(said.split())
    code, said = command("resume", str(folder))
    assert code == 0, said
    for name in ("model.safetensors", "metrics.jsonl", "ledger.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    code, said = command("evaluate", str(folder), "--json")
    assert code == 0, said
    assert json.loads(said)["accuracy"] == pytest.approx(expected.accuracy)
    assert ekiden.evaluate(folder)["accuracy"] == pytest.approx(expected.accuracy)
    assert ekiden.evaluate(folder, silos)["accuracy"] == pytest.approx(expected.accuracy)


def test_data_that_were_read_and_divided_again_are_the_same(files: Path) -> None:
    for make in (of_file, of_files, of_named_files, of_a_name, one_less, for_tuning):
        folder_free = make(files)
        assert folder_free.origin is not None
        assert folder_free.origin.kept
        assert json.loads(json.dumps(folder_free.origin.to_json())) != {}


def test_data_that_may_have_been_changed_know_no_origin(files: Path) -> None:
    from dataclasses import replace

    data = load(files / "north.csv", label_column="died")
    assert replace(data, train=data.train.taken(torch.arange(20))).origin is None
    assert split(replace(data, std=(2.0,)), "iid", 2).origin is None


def test_other_files_under_the_same_name_are_refused(
    files: Path, tmp_path: Path, command: Command
) -> None:
    table, folder = tmp_path / "t.csv", tmp_path / "run"
    frame(0).to_csv(table, index=False)
    ekiden.run(
        FedSeq(epochs=1), split(load(table, label_column="died"), "iid", 2), folder=folder, **FAST
    )
    frame(5).to_csv(table, index=False)
    code, said = command("evaluate", str(folder))
    assert code == 2
    assert "the data of client-0, client-1 differ from what" in said
    with pytest.raises(UserError, match="differ from what"):
        ekiden.evaluate(folder)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run over frames."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    silos = {"north": frame(0), "south": frame(1)}
    data = federate(list(silos.values()), names=list(silos), label_column="died")
    ekiden.run(FedSeq(epochs=1), data, folder=folder, **FAST)
    return folder


def memory_silos(shift: int = 0) -> FederatedData:
    return federate([frame(shift), frame(shift + 1)], names=["north", "south"], label_column="died")


def test_evaluate_says_how_a_run_over_data_in_memory_is_measured(
    in_memory: Path, command: Command
) -> None:
    code, said = command("evaluate", str(in_memory), "--metric", "auroc")
    assert code == 2
    assert said.count("\n") == 1
    assert "its data were given in Python" in said


def test_data_in_memory_are_given_again_and_must_be_the_same(in_memory: Path) -> None:
    accuracy = ekiden.open_run(in_memory).accuracy
    assert ekiden.evaluate(in_memory, memory_silos())["accuracy"] == pytest.approx(accuracy)
    with pytest.raises(UserError, match="the data of north, south differ from what"):
        ekiden.evaluate(in_memory, memory_silos(5))
    assert ekiden.evaluate(in_memory, frame(9), label_column="died")["loss"] > 0  # other test data
    with pytest.raises(UserError, match="its data were given in Python: give them again"):
        ekiden.evaluate(in_memory)


def test_a_run_over_data_in_memory_goes_on_in_python(tmp_path: Path, command: Command) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    method = FedAvg(rounds=2, epochs=1)
    ekiden.run(method, memory_silos(), network, folder=whole, **FAST)
    ekiden.run(method, memory_silos(), network, folder=folder, stop_after=1, **FAST)
    code, said = command("show", str(folder))
    assert code == 0
    told = " ".join(said.split())
    assert (
        f"its data were given in Python, so continue it there: `ekiden.resume('{folder}', silos)`"
        in told
    )
    assert "`ekiden resume" not in told
    code, said = command("resume", str(folder))
    assert code == 2
    assert "its data were given in Python" in said
    with pytest.raises(UserError, match=r"its data were given in Python: give them again"):
        ekiden.resume(folder)
    with pytest.raises(UserError, match="network"):
        ekiden.resume(folder, memory_silos())
    with pytest.raises(UserError, match="the data of north, south differ"):
        ekiden.resume(folder, memory_silos(3), network=network)
    ekiden.resume(folder, memory_silos(), network=network, quiet=True)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


class Head(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


def test_a_network_of_ones_own_is_named_on_the_command_line_if_the_data_are_in_files(
    files: Path, tmp_path: Path, command: Command
) -> None:
    folder, network = tmp_path / "run", torch.nn.Linear(3, 2)
    ekiden.run(
        FedAvg(rounds=2, epochs=1), of_files(files), network, folder=folder, stop_after=1, **FAST
    )
    code, said = command("resume", str(folder))
    assert (code, said.count("\n")) == (2, 1)
    assert "its network (Linear) was made in Python: give it again" in said
    ekiden.run(FedAvg(rounds=1, epochs=1), of_files(files), Head, folder=tmp_path / "class", **FAST)
    with pytest.raises(UserError, match=r"its own network \(Head\)"):
        ekiden.load_model(tmp_path / "class")
    ekiden.resume(folder, network=network, quiet=True)  # the data are read again
    assert ekiden.open_run(folder, network=network).state.step == 2


@pytest.mark.slow
def test_a_report_draws_runs_over_data_in_memory_if_they_are_given(
    in_memory: Path, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    without = ekiden.report(in_memory, tmp_path / "without").read_text()
    assert "its data were given in Python" in without
    page = ekiden.report([in_memory], tmp_path / "with", data=memory_silos()).read_text()
    assert "its data were given in Python" not in page
    assert "By class" in page
    other = ekiden.report(in_memory, tmp_path / "other", data=memory_silos(5)).read_text()
    assert "the data of north, south differ" in other


def test_a_frame_gets_rows_of_predictions_as_its_file_does(in_memory: Path, tmp_path: Path) -> None:
    """Other columns are ignored, a threshold is of the second class, and a missing column is
    named."""
    rows = frame(7, 5).assign(id=range(5))
    rows.to_csv(tmp_path / "new.csv", index=False)
    found = ekiden.predict(in_memory, rows, threshold=0.0)
    assert {row["prediction"] for row in found} == {"yes"}
    assert list(found[0]) == ["row", "prediction", "probability_no", "probability_yes"]
    of_file = ekiden.predict(in_memory, tmp_path / "new.csv", threshold=0.0)
    assert of_file == [{"file": str(tmp_path / "new.csv"), **row} for row in found]
    assert ekiden.predict(in_memory, rows.to_dict("list"), tmp_path / "out.csv") == 5
    with pytest.raises(UserError, match="the frame given has no column 'age'"):
        ekiden.predict(in_memory, rows.drop(columns="age"))
    with pytest.raises(UserError, match="threshold 2 is not a share"):
        ekiden.predict(in_memory, rows, threshold=2)
    with pytest.raises(UserError, match="give a path, not int"):
        ekiden.predict(in_memory, 3)


def test_values_by_class_client_and_on_validation_data(
    in_memory: Path, files: Path, tmp_path: Path
) -> None:
    silos = of_files(files)
    result = ekiden.run(FedSeq(epochs=2), silos, folder=tmp_path / "run", **FAST)
    model, data = result.load_model().eval(), silos.dataset
    right = (model.encoded(data.test.x).argmax(1) == data.test.y).double()
    each = {str(name): float(right[data.test.y == k].mean()) for k, name in enumerate(data.classes)}
    assert result.per_class == pytest.approx(each)
    assert result.per_client == pytest.approx(
        {c.name: float(right[c.test.rows].mean()) for c in silos.clients}
    )
    held = torch.cat([c.val.rows for c in silos.clients])
    answers = model.encoded(data.train.x[held]).argmax(1)
    validation = float((answers == data.train.y[held]).double().mean())
    assert result.validation == pytest.approx(validation)
    assert ekiden.open_run(tmp_path / "run").validation == pytest.approx(validation)
    assert [*map(client_digest, result.data().clients)] == [*map(client_digest, silos.clients)]
    with pytest.raises(UserError, match="its data were given in Python"):
        _ = ekiden.open_run(in_memory).validation
    shown = ekiden.open_run(in_memory)._repr_html_()
    assert "accuracy % by client" in shown
    for name, value in ekiden.open_run(in_memory).per_class.items():
        assert f"<tr><th>{name}</th><td>{100 * value:.2f}</td></tr>" in shown
    stopped = ekiden.run(FedAvg(rounds=2), silos, network_of_two, stop_after=1, **FAST)
    with pytest.raises(UserError, match="classes were not measured"):
        _ = stopped.per_class


def network_of_two() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


FUNCTIONS: dict[str, str] = {
    "run": "run",
    "resume": "resume",
    "evaluate": "evaluate",
    "show": "show",
    "log": "follow",
    "compare": "compare",
    "report": "report",
    "predict": "predict",
    "export": "export",
    "card": "card",
    "audit": "audit",
    "data": "describe",
    "list": "available",
    "topology": "topology",
    "sweep": "sweep",
    "results": "sweep_results",
    "forget": "forget",
    "join": "join",
    "check": "check",
    "verify": "verify",
}
"""The function of `ekiden` that does what a command does."""
NO_FUNCTION = {
    **{name: "it writes files to edit" for name in COMMANDS if name.startswith("new ")},
    "trust": "a person decides at the terminal which files may run",
    **dict.fromkeys(("ps", "stop"), "it operates a service"),
    **{name: "it operates a service" for name in COMMANDS if name.startswith("federation ")},
    **{name: "it operates a silo" for name in COMMANDS if name.startswith("silo ")},
}
"""Commands without a function, and why."""


def test_each_command_has_a_function() -> None:
    assert FUNCTIONS.keys() | NO_FUNCTION.keys() == set(COMMANDS)
    assert not FUNCTIONS.keys() & NO_FUNCTION.keys()
    for name in FUNCTIONS.values():
        assert name in ekiden.__all__
        assert callable(getattr(ekiden, name))
        assert (getattr(ekiden, name).__doc__ or "").strip()


SWEEP = """
title = "digits"
seeds = [0]
[settings]
data = "digits"
clients = 2
epochs = 1
[[row]]
label = "FedSeq"
method = "fedseq"
printed = ["90 ± 5"]
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run over named data."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EKIDEN_DATA", raising=False)
        silos = split(load("digits"), "iid", 3)
        ekiden.run("fedgram", silos, folder=folder, quiet=True)
    return folder


def test_each_function_gives_what_the_command_prints(
    digits: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)

    def told(*args: Any) -> Any:
        code, said = command(*map(str, args), "--json")
        assert code == 0, said
        return json.JSONDecoder().raw_decode(said)[0]  # standard error comes behind

    assert ekiden.show(digits).split() == command("show", str(digits))[1].split()
    assert [row["step"] for row in ekiden.follow(digits)] == [1, 2, 3, 4]
    assert told("compare", digits) == ekiden.compare(digits) == ekiden.compare(digits.parent)
    assert told("list") == ekiden.available()
    assert told("topology", "torus", "--clients", 9) == ekiden.topology("torus", 9)
    assert (
        told("data", "digits", "--partition", "iid", "--clients", 2)
        == ekiden.describe(split(load("digits"), "iid", 2)).to_json()
    )
    assert "samples:  1,797" in str(ekiden.describe("digits"))
    assert ekiden.card(digits) == command("card", str(digits))[1]
    assert ekiden.export(digits, tmp_path / "m.csv").read_text().count("\n") == 5
    pictures = load("digits").test.x[:3]
    np.save("x.npy", pictures.numpy())
    assert ekiden.predict(digits, "x.npy", "answers.csv") == 3
    assert ekiden.predict(ekiden.load_model(digits), ["x.npy"], "same.csv") == 3
    assert Path("answers.csv").read_text() == Path("same.csv").read_text()
    Path("table.toml").write_text(SWEEP)
    (cell,) = ekiden.sweep("table.toml", records="kept.jsonl", cores=1)
    assert (cell["row"], cell["printed"], len(cell["values"])) == ("FedSeq", 90.0, 1)
    assert ekiden.sweep_results("runs/table") == [cell] == ekiden.sweep_results("kept.jsonl")
    assert told("results", "runs/table") == [{"sweep": str(Path("runs/table")), "cells": [cell]}]
    assert told("sweep", "table.toml") == [cell]
    assert all(finding.holds for finding in ekiden.check(FedSeq)[:1])
    left = ekiden.forget(digits, "client-1", out="left")
    assert left.clients == ("client-0", "client-2")
    assert ekiden.join("left", "client-1", out="back").clients == (
        "client-0",
        "client-1",
        "client-2",
    )
    with pytest.raises(UserError, match="nothing in it is signed"):
        ekiden.verify(digits)
    with pytest.raises(UserError, match="unknown format 'docx'"):
        ekiden.export(digits, "model.docx")
    with pytest.raises(UserError, match="there is no run to compare"):
        ekiden.compare([])
    with pytest.raises(UserError, match="give a path, not int"):
        ekiden.compare(3)  # type: ignore[arg-type]


def test_a_sweep_with_a_failing_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(SWEEP.replace('"digits"\nclients', '"no-such-data"\nclients'))
    with pytest.raises(
        UserError, match=r"1 run failed, such as .*: unknown data set 'no-such-data'"
    ):
        ekiden.sweep("table.toml", cores=1)


def test_a_run_is_followed_until_it_stops(digits: Path, tmp_path: Path, command: Command) -> None:
    code, said = command("log", str(digits), "-f")
    assert code == 0
    assert [line.split(",")[0] for line in said.splitlines()] == [
        f"step {k} of 4" for k in (1, 2, 3, 4)
    ]
    rows = [json.loads(line) for line in command("log", str(digits), "--json")[1].splitlines()]
    assert rows == list(ekiden.open_run(digits).metrics)
    folder, seen = tmp_path / "run", list[int]()
    silos = split((torch.randn(40, 3), torch.arange(40) % 2), "iid", 2)
    started = threading.Event()

    def watch() -> None:
        started.wait(20)
        seen.extend(row["step"] for row in ekiden.follow(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    ekiden.run(
        FedAvg(rounds=4, epochs=1), silos, folder=folder, on_step=lambda row: started.set(), **FAST
    )
    watcher.join(20)
    assert seen == [1, 2, 3, 4]
    assert not is_held(folder / "lock")
    with locked(folder / "lock"):
        assert is_held(folder / "lock")
    ekiden.run(FedAvg(rounds=4), silos, folder=tmp_path / "stopped", stop_after=1, **FAST)
    code, said = command("log", str(tmp_path / "stopped"), "-f")
    assert "not finished: its data were given in Python, so continue it there" in " ".join(
        said.split()
    )
    assert command("log", str(tmp_path))[0] == 2


@pytest.mark.parametrize("rows", [30, 60, 130, 250])
def test_small_data_are_divided_so_that_each_client_has_some(
    rows: int, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "t.csv"
    frame(0, rows).to_csv(file, index=False)
    code, said = command(
        "data", str(file), "--label-column", "died", "--draw", str(tmp_path / "d.png"), "--json"
    )
    assert code == 0, said
    clients = json.loads(said)["clients"]
    assert 2 <= len(clients) <= 10
    assert all(one["train"] + one["val"] > 0 for one in clients.values())
    assert len(split(load(file, label_column="died"), "iid").clients) == len(clients)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "resnet81"), "unknown model 'resnet81': did you mean 'resnet18'?"),
        (("--partition", "dirichlett:1"), "'dirichlett:1' is not a partition"),
        (("--track", "wand"), "unknown tracker 'wand'"),
    ],
)
def test_a_mistake_is_told_before_the_data_are_read(
    flags: tuple[str, ...], message: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiden.runs.plan.load", lambda *_, **__: pytest.fail("read first"))
    code, said = command("run", "fedseq", *flags)
    assert (code, said.count("\n")) == (2, 1)
    assert message in said


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: ekiden.topology("ring", 1), "clients 1 is out of range: it must be 2 or more"),
        (lambda: ekiden.topology("ring", "x"), "clients 'x' is of the wrong type"),  # type: ignore[arg-type]
        (lambda: ekiden.evaluate(3), "give a path, not int"),  # type: ignore[arg-type]
        (lambda: ekiden.study(["fedseq"], memory_silos(), seeds=3), "different whole numbers"),  # type: ignore[arg-type]
        (
            lambda: federate([frame(0), frame(1)], names="ab", label_column="died"),
            "a list with a name for each silo",
        ),
    ],
)
def test_a_mistake_in_python_gets_one_line(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        mistake()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "audit",
        "compare",
        "evaluate",
        "export",
        "follow",
        "forget",
        "join",
        "load_model",
        "open_run",
        "predict",
        "report",
        "resume",
        "show",
        "sweep",
        "verify",
    ],
)
def test_options_of_the_wrong_type_are_refused_before_anything_is_read(name: str) -> None:
    function = getattr(ekiden, name)
    given = dict[str, Any]()
    options = list[str]()
    for parameter in signature(function).parameters.values():
        if parameter.default is Parameter.empty:
            given[parameter.name] = "nowhere"
        elif parameter.name not in ("data", "metric"):  # of many types
            options.append(parameter.name)
    given.pop("columns", "")
    for option in options:
        with pytest.raises(UserError, match=rf"^{option} <object .*> is"):
            function(**given, **{option: object()})
