"""Runs go on after their data have moved, with more laps, and on another machine."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ekiden
from ekiden import GLM, Hardware, UserError
from ekiden.core.base.errors import DataWarning
from ekiden.core.engine import folder as folders
from ekiden.core.engine.setup import resolved_hardware
from ekiden.methods import FedAvg
from ekiden.runs import api
from ekiden.runs.result import Result
from tests.methods.test_glm import held

Command = Callable[..., tuple[int, str]]


def table(path: Path, shift: float = 0.0) -> Path:
    draw = np.random.default_rng(0)
    v = draw.normal(size=90) + shift
    label = np.where(v - shift + draw.normal(size=90) > 0, "p", "q")
    rows = [f"{a},{b}" for a, b in zip(v, label, strict=True)]
    path.write_text("\n".join(["v,label", *rows]))
    return path


def begun(place: Path, **more: Any) -> Path:
    """A run of a file that was stopped after its first step."""
    place.mkdir()
    data = ekiden.split(ekiden.load(table(place / "t.csv"), label_column="label"), "iid", 3)
    method = FedAvg(rounds=2, epochs=1)
    ekiden.run(method, data, folder=place / "run", stop_after=1, quiet=True, **more)
    return place / "run"


def test_a_run_goes_on_with_data_that_were_moved(tmp_path: Path, command: Command) -> None:
    run = begun(tmp_path / "old")
    whole = ekiden.resume(shutil.copytree(run, tmp_path / "whole"))
    shutil.move(tmp_path / "old", tmp_path / "new")
    run = tmp_path / "new" / "run"
    with pytest.raises(UserError, match=r"t.csv, the data of .*run, is not there: say where by"):
        ekiden.resume(run)
    code, said = command("resume", str(run))
    assert code == 2
    assert "is not there: say where by --data" in said
    other = table(tmp_path / "other.csv", shift=1.0)
    before = (run / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"scale of .* differ from what"):
        ekiden.resume(run, other)
    assert (run / "config.json").read_bytes() == before
    assert command("resume", str(run), "--data", str(tmp_path / "new" / "t.csv"))[0] == 0
    for name in ("metrics.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert whole.state.step == 2
    ekiden.evaluate(run)  # it knows the new place


def test_a_regression_goes_on_with_more_laps(tmp_path: Path) -> None:
    rows = [slice(0, 90), slice(90, 200)]
    data = held("died", rows)

    def go(laps: int, name: str) -> Result:
        method = GLM(firth=True, laps=laps)
        return ekiden.run(method, data, folder=tmp_path / name, evaluate_every=10**9, quiet=True)

    with pytest.raises(UserError, match="has not converged"):
        go(4, "run")
    enough = go(30, "enough")
    with pytest.raises(UserError, match="makes so many laps already"):
        ekiden.resume(tmp_path / "run", data, laps=4)
    found = ekiden.resume(tmp_path / "run", data, laps=30, quiet=True)
    assert found.coefficients == enough.coefficients
    assert found.state.step == 118, "two laps for each step of two silos, the first one apart"
    with pytest.raises(UserError, match="has ended: leave out laps"):
        ekiden.resume(tmp_path / "run", data, laps=40)
    run = begun(tmp_path / "average")
    with pytest.raises(UserError, match="fedavg does not stop at a limit of laps"):
        ekiden.resume(run, laps=9)


def test_another_environment_is_named_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.resume(shutil.copytree(run, tmp_path / "same"))
    usual = folders._environment()
    changed = {"torch": "9.9", "platform": "a phone"}
    monkeypatch.setattr(folders, "_environment", lambda: usual | changed)
    with pytest.warns(DataWarning, match="torch .* before and 9.9 now, platform .* now;"):
        ekiden.resume(run)
    attempts = (run / "attempts.jsonl").read_text().splitlines()
    noted = [json.loads(line)["environment"]["torch"] for line in attempts]
    assert noted == [usual["torch"], "9.9"]


def test_threads_that_nobody_chose_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is the number that the machine has; a number that was chosen identifies the run."""
    data = ekiden.split(ekiden.load(table(tmp_path / "t.csv"), label_column="label"), "iid", 3)
    method, usual = FedAvg(rounds=2, epochs=1), resolved_hardware

    def go(threads: int, here: int, **more: Any) -> Result:
        def resolved(hardware: Hardware, *rest: Any) -> Hardware:
            return usual(hardware if hardware.threads else Hardware(threads=here), *rest)

        monkeypatch.setattr(api, "resolved_hardware", resolved)
        hardware = Hardware(threads=threads)
        more |= {"hardware": hardware, "folder": tmp_path / f"run{threads}", "quiet": True}
        return ekiden.run(method, data, **more)

    go(0, 1, stop_after=1)
    with pytest.warns(DataWarning, match="threads 1 before and 2 now"):
        assert go(0, 2).state.step == 2
    go(1, 1, stop_after=1)
    with pytest.raises(UserError, match=r"holds another run \(.*hardware"):
        ekiden.run(method, data, hardware=Hardware(threads=2), folder=tmp_path / "run1", quiet=True)
