"""Mistakes that users made: each is one line that says what is wrong and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ekiden
from ekiden import FedGram, UserError, federate, load_model, run, study
from ekiden.base.errors import nearest

Command = Callable[..., tuple[int, str]]
X, Y = np.zeros((8, 2), np.float32), np.arange(8) % 2

IN_PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "no folder": (lambda: load_model(None), "give a path, not NoneType"),  # type: ignore[arg-type]
    "a number for a folder": (lambda: ekiden.show(3), "give a path, not int"),  # type: ignore[arg-type]
    "an empty folder name": (lambda: ekiden.resume(""), "give a path, not an empty text"),
    "a number among folders": (lambda: ekiden.compare(["runs", 3]), "give a path"),  # type: ignore[list-item]
    "a file for silos": (lambda: run("fedseq", "a.csv"), r"ekiden.split\(ekiden.load\('a.csv'\), 'iid', 10\)"),
    "no silo": (lambda: run("fedseq", []), "the list of silos is empty"),
    "one table for silos": (lambda: federate("p.csv"), "a list with the samples of each silo.*group_column=NAME"),
    "names twice": (lambda: federate({"a": (X, Y)}, names=["a"]), "leave out names"),
    "data that ignore the seed": (lambda: study(["fedseq"], lambda: None), "takes one argument, the seed"),
    "too many features": (lambda: FedGram(width=10**9), "width 1000000000 is out of range"),
    "a name for the label": (lambda: ekiden.load("digits", target="y"), "did you mean 'label_column'"),
    "a file without a class": (lambda: run("mine.py", [(X, Y), (X, Y)]), "name one, mine.py:CLASS"),
    "a lambda as metric": (
        lambda: run("fedseq", [(X, Y), (X, Y)], metric=lambda answers, labels: 1.0),
        "write a function, def NAME",
    ),
    "logistic regression of times": (
        lambda: run("glm", federate([(X, np.stack([1.0 + Y, Y], 1))] * 2, task="survival")),
        "the task is survival: add family='cox'",
    ),
    "no such devices": (lambda: ekiden.report("none", data=3, devices="nosuch"), "unknown name of devices"),
    "no such device": (
        lambda: run("fedseq", [(X, Y), (X, Y)], hardware=ekiden.Hardware(device="gpu")),
        r"device 'gpu' cannot be used here \(there is no such device\): try device='cpu'",
    ),
}

COMMANDS: dict[str, str] = {
    "run fedseq --class died": "unknown flag --class: did you mean --label-column?",
    "run mine.py": "mine.py may hold several classes: name one, mine.py:CLASS",
    "run fedsq": "unknown method 'fedsq': did you mean 'fedseq'?\n",
    "run --epochs 3": "METHOD is missing, which comes first",
    "runn fedseq": "unknown command 'runn': did you mean 'run'?\n",
    "trust": "name the Python files to trust",
    "check fedsq": "unknown method 'fedsq': did you mean 'fedseq'?",
    "data --data p.csv": "DATA comes without a flag: leave out --data",
    "run trees --secure": "unknown flag --secure: it is of fedavg, fedprox",
    "report none --devices nosuch": "unknown name of devices 'nosuch'",
    "compare none --devices nosuch": "unknown name of devices 'nosuch'",
    "data digits --draw x.xyz": "the picture is a PNG file",
    "data none.csv": "there is no file or folder 'none.csv': give a folder of class folders",
    "show digits": "digits is not a run folder",
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_mistake_in_python_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("--target", "--label-column"), ("--learning-rate", "--lr"), ("num_clients", "clients"), ("gpu", "device")],
)
def test_a_name_of_other_libraries_finds_ours(name: str, meant: str) -> None:
    assert nearest(name, ["--lr", "--label-column", "--task", "device", "clients"], n=3) == [meant]


def test_python_suggests_a_public_name() -> None:
    with pytest.raises(AttributeError) as missing:
        ekiden.FedSequ  # noqa: B018
    assert (missing.value.name, missing.value.obj) == ("FedSequ", ekiden)
    assert nearest("FedSequ", dir(ekiden), n=1) == ["FedSeq"]
