"""A sweep as users run it: killed, run again with the same command, with a failing cell, with a
changed file."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ekiden.core.engine.folder import read_lines
from ekiden.lab import launch
from ekiden.lab.tables import experiment
from tests.e2e.sweeps import Call, caller

TABLE = """
title = "digits"
source = "a paper, Table 1"
seeds = [0]
[settings]
data = "digits"
clients = 3
partition = "dirichlet:0.5"
[[row]]
label = "FedSeq"
method = "fedseq"
epochs = 30
printed = ["90 ± 5"]
[[row]]
label = "apart"
method = "dfedavgm"
epochs = 1
topology = "erdos_renyi:0.0"
"""
PIECES = """
[settings]
data = "rows.csv"
label_column = ["label"]
clients = 3
[[row]]
label = "FedAvg"
method = "fedavg"
epochs = 1
rounds = 500
"""
SAME = ("metrics.jsonl", "ledger.jsonl", "model.safetensors")


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """The command in this process, its runs too, one after the other; gives exit code and what it
    printed."""
    monkeypatch.chdir(tmp_path)
    execute = launch.execute
    monkeypatch.setattr(
        launch, "execute", lambda jobs, report, *_, **options: execute(jobs, report, 1)
    )

    return caller(monkeypatch, capfd)


@pytest.mark.slow
def test_a_sweep_lives_in_pieces_and_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Time is up in the middle of a run; its folder and its data go to another place in small
    files."""
    call = caller(monkeypatch, capfd)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here, there, whole, parts = (tmp_path / name for name in ("here", "there", "whole", "parts"))
    for folder in (here, there, parts):
        folder.mkdir()
    draw = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'pq'[int(a > b)]}" for a, b in draw.normal(size=(4000, 2))]
    (here / "rows.csv").write_text("\n".join(["a,b,label", *rows]))
    (here / "table.toml").write_text(PIECES)
    shutil.copytree(here, whole)
    monkeypatch.chdir(here)
    folder = Path("runs/table/FedAvg--headline-metric--seed0")
    # from too short for a step on any machine to as long as the first steps take on this one
    minutes = 0.05
    done = 0
    while done <= 5:
        code, out, err = call("sweep", "table.toml", "--minutes", f"{minutes:.3f}")
        assert (code, err, "failed" in out) == (0, "", False)
        assert "time is up, 1 run left: rerun the same command" in out
        if (folder / "metrics.jsonl").exists():
            done = len(read_lines(folder / "metrics.jsonl"))
        minutes *= 1.3
    assert not (folder / "model.safetensors").exists()
    # the command of docs/experiments.md, with smaller parts
    subprocess.run("tar -c . | split -b 20k - ../parts/part.", shell=True, cwd=here, check=True)
    shutil.rmtree(here)
    sizes = [part.stat().st_size for part in parts.iterdir()]
    assert (len(sizes) > 2, max(sizes)) == (True, 20 << 10)
    subprocess.run("cat ../parts/part.* | tar -x", shell=True, cwd=there, check=True)
    for place in (there, whole):
        monkeypatch.chdir(place)
        code, out, err = call("sweep", "table.toml")
        assert (code, err, "time is up" in out) == (0, "", False)
    for name in SAME:
        assert (there / folder / name).read_bytes() == (whole / folder / name).read_bytes()
    assert read_lines(there / folder / "attempts.jsonl")[-1]["from_step"] > 0
    code, _, err = call("sweep", "table.toml", "--minutes", "1", "--on", "slurm")
    assert (code, "write --queue timeout_min=MINUTES" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_killed_resumed_failing_and_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ekiden = caller(monkeypatch, capfd)
    file = Path("table.toml")
    file.write_text(TABLE)
    code, out, _ = ekiden("sweep", "table.toml", "--dry-run")
    assert (code, "2 runs, 0 of them finished" in out) == (0, True)
    assert not Path("runs").exists()

    folder = Path("runs/table/FedSeq--accuracy--seed0")
    killed = subprocess.Popen(
        [sys.executable, "-m", "ekiden", "sweep", "table.toml", "--only", "FedSeq"],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    # the last line of a step: its state is there
    while not read_lines(folder / "times.jsonl") and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    while (folder / "lock").exists() and _held(folder / "lock"):  # its processes end with it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (folder / "model.safetensors").exists()

    code, out, err = ekiden("sweep", "table.toml")
    assert code == 2
    assert (
        err
        == "ekiden: 1 of 2 runs failed (listed above): fix the cause and rerun the same command\n"
    )
    assert "failed: apart--accuracy--seed0: erdos_renyi:0.0 falls into" in out
    assert re.search(r"FedSeq .*\d\d\.\d\d", out)
    assert ekiden("results", "runs/table")[0] == 0
    assert "90.00 ± 5.00" in out
    cell = experiment.read(file).cells[0]
    assert cell.plan is not None
    cell.plan.run(tmp_path / "whole", cell.plan.federation())
    for name in SAME:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    attempts = read_lines(folder / "attempts.jsonl")
    assert [attempt["from_step"] > 0 for attempt in attempts] == [False, True]

    code, out, err = ekiden("sweep", "table.toml", "--without", "apart")
    assert (code, err) == (0, "")
    assert len(read_lines(folder / "attempts.jsonl")) == 2, "a finished run is not done again"

    file.write_text(TABLE.replace("epochs = 30", "epochs = 20"))
    code, out, err = ekiden("sweep", "table.toml")
    assert (code, out) == (2, "")
    assert (
        f"table.toml has changed since {folder} was run: epochs is 30 there, 20 in the file" in err
    )
    assert "--out" in err
    code, out, _ = ekiden("results", "runs/table")
    assert code == 0
    assert "| FedSeq | accuracy % |" in out
    file.write_text(TABLE.replace("erdos_renyi:0.0", "ring"))
    code, out, err = ekiden("sweep", "table.toml")
    assert (code, err) == (0, "")
    code, out, _ = ekiden("compare", "runs/table")
    assert "fedseq (epochs=30" in out
    assert ekiden("sweep", "table.toml", "--records", "kept/table.jsonl")[0] == 0
    tables = ekiden("results", "runs/table")[1]
    shutil.rmtree("runs")
    code, out, _ = ekiden("sweep", "table.toml", "--records", "kept/table.jsonl")
    assert (code, re.search(r"FedSeq .*\d\d\.\d\d", out) is not None) == (0, True)
    assert not list(Path("runs").glob("table/*/config.json")), (
        "all that is recorded is not run again"
    )
    assert ekiden("results", "kept/table.jsonl")[1] == tables
    Path("other.toml").write_text(file.read_text())
    code, _, err = ekiden("sweep", "other.toml", "--reuse", "kept/table.jsonl")
    assert (code, "--reuse needs --records" in err) == (2, True)
    assert (
        ekiden(
            "sweep", "other.toml", "--reuse", "kept/table.jsonl", "--records", "kept/other.jsonl"
        )[0]
        == 0
    )
    assert not list(Path("runs").glob("other/*/config.json")), "another experiment made them"
    assert "2 runs, 2 of them from table;" in ekiden("results", "kept/other.jsonl")[1]
    Path("runs/mine").mkdir()
    Path("runs/mine/file").touch()
    code, _, err = ekiden("sweep", "table.toml", "--out", "runs/mine")
    assert (code, "is not empty and not a sweep folder" in err) == (2, True)


def _held(lock: Path) -> bool:

    with open(lock, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
