"""Commands that compute nothing start without PyTorch, and say the same; others begin again with it."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ekiden
from ekiden.cli.app import COMMANDS, call
from ekiden.cli.without_torch import _Given
from ekiden.methods import METHODS

HEAVY = ("numpy._core._multiarray_umath", "PIL._imaging", "torch._C", "pyarrow", "pandas")
PAGES = [name.split() for name in COMMANDS]
PAGES += [["run", method.title()] for method in METHODS]
_RUN = """
import json, sys
from ekiden.cli.app import call
from ekiden.cli.without_torch import start

def command():
    for args in json.loads(sys.argv[1]):
        try:
            call(args)
        except SystemExit:
            pass
    print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))

start(command)
"""


def without_torch(
    calls: list[list[str]], folder: Path, heavy: tuple[str, ...] = HEAVY
) -> tuple[str, list[str]]:
    """Return what these calls print in a process that starts without PyTorch, and what it loaded."""
    line = [sys.executable, "-c", _RUN, json.dumps(calls), json.dumps(heavy)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines(keepends=True)
    return "".join(lines), json.loads(loaded)


def test_every_help_page_is_the_same_without_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    calls = [["list"], ["run", "--help"], *([*name, "--help"] for name in PAGES)]
    for args in calls:
        with suppress(SystemExit):
            call(args)
    assert without_torch(calls, tmp_path) == (capsys.readouterr().out, [])


def test_a_silo_is_made_and_looked_at_without_pytorch(tmp_path: Path) -> None:
    calls = [["silo", "init", "north", "--link", "127.0.0.1:9092"]]
    calls += [["silo", "status", "north/silo.toml"], ["silo", "approve", "north/silo.toml"]]
    calls += [["federation", "init", "all", "north/north.key.pub"], ["federation", "status", "all"]]
    calls += [["silo", "join", "north/silo.toml", "all/roster.json"]]
    # nor do these commands wait for all methods
    heavy = (*HEAVY, "ekiden.methods")
    assert without_torch(calls, tmp_path, heavy)[1] == []
    assert (tmp_path / "north" / "north.key").exists()
    # those that only look hold no lock
    looks = [["silo", "status", "north/silo.toml"], ["federation", "status", "all"]]
    assert without_torch(looks, tmp_path, (*heavy, "filelock"))[1] == []


def test_a_command_about_one_method_loads_no_other(tmp_path: Path) -> None:
    others = ("ekiden.methods.chain.fedelmy", "ekiden.methods.one_shot.dense")
    calls = [["run", "--help"], ["run", "fedavg", "--help"], ["show", "--help"]]
    assert without_torch(calls, tmp_path, others)[1] == []


USES = [
    "torch.zeros(3) + 1",
    "torch.zeros(3)[0]",
    "float(torch.zeros(1))",
    "print(torch.zeros(1))",
    "f'{torch.zeros(1)}'",
    "bool(torch.zeros(1) == 0)",
    "[*torch.zeros(3)]",
    "torch.nn.Linear(2, 2)(torch.zeros(2))",
    "len(torch.zeros(3))",
    "torch.zeros(3).shape",
    "torch.pi * 2",
    "json.dumps(torch.zeros(1).item())",
    "with torch.no_grad(): 0",
]
_TRY = """
import sys, json
from ekiden.cli.without_torch import TensorsNeeded, start

def command():
    import torch
    for use in json.loads(sys.argv[1]):
        try:
            exec(use)
        except TensorsNeeded:
            continue
        print(use)
    print("torch._C" in sys.modules)

start(command)
"""
_AGAIN = """
from ekiden.cli.without_torch import start

def command():
    import sys, torch
    torch.zeros(3) + 1
    print("torch._C" in sys.modules)

start(command)
"""


def test_what_would_compute_is_not_done_without_pytorch() -> None:
    line = [sys.executable, "-c", _TRY, json.dumps(USES)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False"]


def test_what_would_compute_begins_again_with_pytorch() -> None:
    line = [sys.executable, "-c", _AGAIN]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True"]


def test_a_stand_in_has_no_name_that_python_itself_asks_for() -> None:
    """Python 3.12 asks each class whether it is a protocol, while it is made."""
    assert not hasattr(_Given, "_is_protocol")
    assert not hasattr(_Given, "__protocol_attrs__")
    assert hasattr(_Given, "Tensor")


def test_a_run_is_shown_without_pytorch_and_a_regression_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)
    silos = [(torch.randn(40, 2, generator=draw), torch.arange(40) % 2) for _ in range(2)]
    ekiden.run(ekiden.FedSeq(epochs=1), silos, "linear", folder="chain", quiet=True)
    ekiden.run(ekiden.GLM(), silos, folder="glm", quiet=True)
    chain = [["show", "chain"], ["log", "chain"], ["compare", "chain"]]
    for args in chain:
        call(args)
    assert without_torch(chain, tmp_path) == (capsys.readouterr().out, [])
    call(["show", "glm"])
    shown, loaded = without_torch([["show", "glm"]], tmp_path)
    assert shown == capsys.readouterr().out
    assert "torch._C" in loaded
