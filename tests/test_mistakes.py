"""Mistakes that users made: each is one line that says what is wrong and what to do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.metrics import f1_score
from torch import nn

import ekiden
from ekiden import FedGram, UserError, federate, load_model, run, study
from ekiden.core.base.errors import nearest
from ekiden.core.engine.method import Method
from ekiden.core.tasks import Classification
from ekiden.readers.kinds import Images
from ekiden.runs.loaded_model import LoadedModel

Command = Callable[..., tuple[int, str]]
_PIXELS = LoadedModel(
    nn.Flatten(), ("a", "b"), (1, 4, 4), (0.0,), (1.0,), Images(), Classification()
)
X, Y = np.zeros((8, 2), np.float32), np.arange(8) % 2

IN_PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "no folder": (lambda: load_model(None), "give a path, not NoneType"),  # type: ignore[arg-type]
    "a number for a folder": (lambda: ekiden.show(3), "give a path, not int"),  # type: ignore[arg-type]
    "an empty folder name": (lambda: ekiden.resume(""), "give a path, not an empty text"),
    "a number among folders": (lambda: ekiden.compare(["runs", 3]), "give a path"),  # type: ignore[list-item]
    "a file for silos": (
        lambda: run("fedseq", "a.csv"),
        r"ekiden.split\(data, 'iid', 10\)",
    ),
    "no silo": (lambda: run("fedseq", []), "the list of silos is empty"),
    "one table for silos": (
        lambda: federate("p.csv"),
        "a list with the samples of each silo.*group_column=NAME",
    ),
    "names twice": (lambda: federate({"a": (X, Y)}, names=["a"]), "leave out names"),
    "data that ignore the seed": (
        lambda: study(["fedseq"], lambda: None),
        "takes one argument, the seed",
    ),
    "too many features": (lambda: FedGram(width=10**9), "width 1000000000 is out of range"),
    "a name for the label": (
        lambda: ekiden.load("digits", target="y"),
        "did you mean 'label_column'",
    ),
    "a file without a class": (lambda: run("mine.py", [(X, Y), (X, Y)]), "name one, mine.py:CLASS"),
    "a lambda as metric": (
        lambda: run("fedseq", [(X, Y), (X, Y)], metric=lambda answers, labels: 1.0),
        "write a function, def NAME",
    ),
    "logistic regression of times": (
        lambda: run("glm", federate([(X, np.stack([1.0 + Y, Y], 1))] * 2, task="survival")),
        "the task is survival: add family='cox'",
    ),
    "no such devices": (
        lambda: ekiden.compare("none", devices="nosuch"),
        "unknown name of devices",
    ),
    "an argument of split": (
        lambda: run("fedseq", [(X, Y)], clients=3),  # type: ignore[arg-type]
        "clients is about the data: give it to ekiden.split",
    ),
    "the model first": (
        lambda: run("fedseq", "mlp", [(X, Y)]),  # type: ignore[arg-type]
        r"ekiden.run\(method, data, model\)",
    ),
    "a number for dp": (
        lambda: run("fedavg", [(X, Y)] * 2, dp="8"),
        "dp '8' is not a list of settings: write epsilon=8",
    ),
    "arrays for load": (
        lambda: ekiden.load((X, Y)),
        r"not tuple: several files, or arrays in memory, are silos, ekiden.federate",
    ),
    "an address": (
        lambda: ekiden.load("https://a.org/p.csv"),
        "it is an address: download what is there",
    ),
    "a label that is dropped": (
        lambda: ekiden.load("p.csv", label_column="y", drop_columns="y"),
        "column 'y' is in label_column and in drop_columns",
    ),
    "groups of a frame": (
        lambda: federate([("a", pandas.DataFrame({"y": [0]}))]),
        r"must be tensors .* not samples of type str",
    ),
    "a number of seeds": (lambda: study(["fedseq"], [(X, Y)], seeds=3), r"as in range\(3\), not 3"),  # type: ignore[arg-type]
    "a folder without a format": (
        lambda: ekiden.export("none", "tf"),
        "unknown format ''",
    ),
    "a negative number of figures": (
        lambda: ekiden.report("none", details=-1),
        "details -1 is out of range",
    ),
    "a metric of other arguments": (
        lambda: run(
            "average",
            [(X, Y)] * 2,
            metric=f1_score,
            training=ekiden.Training(max_steps=1),
            quiet=True,
        ),
        r"the metric f1_score failed: .*; it gets answers of shape \(\d+, 2\) and labels of "
        r"\(\d+,\)",
    ),
    "files for load": (
        lambda: ekiden.load(["a.csv", "b.csv"]),
        r"not list: several files, or arrays in memory, are silos",
    ),
    "data sets as silos": (
        lambda: federate([ekiden.load("digits")] * 2),  # type: ignore[list-item]
        "silo client-0 must be tensors .*'Dataset' object",
    ),
    "a silo without a name": (
        lambda: federate({"": (X, Y), "b": (X, Y)}),
        "a silo's name is empty",
    ),
    "no such device": (
        lambda: run("fedseq", [(X, Y), (X, Y)], hardware=ekiden.Hardware(device="gpu")),
        "there is no device 'gpu': choose cpu or cuda, which is a GPU",
    ),
    "hardware as an argument": (
        lambda: run("fedseq", [(X, Y)], device="cuda"),  # type: ignore[arg-type]
        r"give hardware=ekiden.Hardware\(device=...\)",
    ),
    "a method without steps": (
        lambda: run(type("Half", (Method,), {}), [(X, Y)]),
        "Half lacks cost, run, steps",
    ),
    "a list of two arrays": (
        lambda: federate([[X, Y], [X, Y]]),
        r"must be tensors .*, not samples of type ndarray",
    ),
    "arrays as columns": (
        lambda: federate([{"x": X, "y": Y}]),  # type: ignore[dict-item]
        r"'x' .* is an array, not a column",
    ),
    "a list for a grid": (
        lambda: study(["fedseq"], [(X, Y)] * 2, grid=["epochs"]),  # type: ignore[arg-type]
        "grid is a dict of lists",
    ),
    "an array to predict": (lambda: ekiden.predict(_PIXELS, X), "for an array call the model"),
    "float pixels up to 255": (
        lambda: _PIXELS(np.full((2, 1, 4, 4), 255.0)),
        "float pixels are from 0 to 1",
    ),
    "one sample for a batch": (
        lambda: _PIXELS(np.zeros((1, 4, 4))),
        r"which is one sample: give x\[None\]",
    ),
    "lists for pixels": (lambda: _PIXELS([[[[0]]]]), "not a list of lists"),
}

COMMANDS: dict[str, str] = {
    "run fedseq --class died": "unknown flag --class: did you mean --label-column?",
    "run mine.py": "mine.py may hold several classes: name one, mine.py:CLASS",
    "run fedsq": "unknown method 'fedsq': did you mean 'fedseq'?\n",
    "run --epochs 3": "missing METHOD (first argument)",
    "runn fedseq": "unknown command 'runn': did you mean 'run'?\n",
    "data digits --times 3": "--times is for --table-one: add it, or leave out --times",
    "run fedavg --dp 8": "--dp '8' is not a list of settings: write epsilon=8",
    "run fedseq --data p.csv --label-column y --drop-columns "
    "y": "column 'y' is in --label-column and in --drop-",
    "data --label-column y p.csv": "'p.csv' is read as a column: name the data first",
    "run fedseq --on flower": "say where the silos are: --federation FOLDER",
    "trust": "FILES is missing: see ekiden trust --help",
    "check fedsq": "unknown method 'fedsq': did you mean 'fedseq'?",
    "data --data p.csv": "DATA comes without a flag: leave out --data",
    "run trees --secure": "unknown flag --secure: it is of fedavg, fedprox",
    "compare none --devices nosuch": "unknown name of devices 'nosuch'",
    "data digits --draw x.xyz": "the picture is a PNG file",
    "data none.csv": "there is no file or folder 'none.csv': give a folder of class folders",
    "run fedseq --quiet": "unknown flag --quiet: see ekiden run fedseq --help",
    "run fedseq -o runs": "unknown flag -o: did you mean --out?",
    "show digits": "digits is not a run folder",
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_mistake_in_python_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, line = IN_PYTHON[name]
    with pytest.raises(UserError, match=line) as refused:
        make()
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", COMMANDS)
def test_a_mistake_at_the_command_line_is_one_line(
    line: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = command(*line.split())
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"ekiden: {COMMANDS[line]}") or COMMANDS[line] in said
    assert not list(tmp_path.iterdir())


def test_a_folder_of_runs_names_one(
    command: Command, blobs: ekiden.FederatedData, tmp_path: Path
) -> None:
    run(
        "average", blobs, training=ekiden.Training(max_steps=1), folder=tmp_path / "one", quiet=True
    )
    result = ekiden.open_run(tmp_path / "one")
    for mistake, line in (
        (
            lambda: ekiden.evaluate(tmp_path / "one", blobs, metric="auroc"),
            "unknown argument 'metric': only a file",
        ),
        (lambda: ekiden.resume(result), "give a path, not Result: its path is result.folder"),  # type: ignore[arg-type]
        (
            lambda: ekiden.Study({"average": (result,)}, (0,), {}, None)[0],  # type: ignore[index]
            "unknown method of the study 0",
        ),
    ):
        with pytest.raises(UserError, match=line):
            mistake()
    with pytest.raises(UserError, match=f"did you mean {re.escape(str(tmp_path / 'one'))}"):
        ekiden.show(tmp_path)
    with pytest.raises(UserError, match="gives no personal models: leave out client"):
        ekiden.evaluate(tmp_path / "one", blobs, client="client-0")
    code, said = command("evaluate", str(tmp_path / "one"), "--client", "client-0")
    assert (code, "measure it in Python, by ekiden.evaluate(" in said) == (2, True), said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--target", "--label-column"),
        ("--learning-rate", "--lr"),
        ("num_clients", "clients"),
        ("gpu", "device"),
    ],
)
def test_a_name_of_other_libraries_finds_ours(name: str, meant: str) -> None:
    assert nearest(name, ["--lr", "--label-column", "--task", "device", "clients"], n=3) == [meant]


def test_python_suggests_a_public_name() -> None:
    with pytest.raises(AttributeError) as missing:
        ekiden.FedSequ  # noqa: B018
    assert (missing.value.name, missing.value.obj) == ("FedSequ", ekiden)
    assert nearest("FedSequ", dir(ekiden), n=1) == ["FedSeq"]
