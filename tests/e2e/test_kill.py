"""Runs that are killed by SIGKILL, again and again, end as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.warm import WarmProcess, children, command

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
SAME = ("metrics.jsonl", "ledger.jsonl")
FEDELMY = "run fedelmy --data digits --models 3 --epochs 25 --warmup 25 --threads 1 --out"
LOCAL = "--data digits --clients 4 --rounds 3 --epochs 8 --threads 1 --out"
HELD = '''
import time
from pathlib import Path

from ekiden import Local
from ekiden.authoring import Client, Weights, on_client


class Held(Local):
    """Trains, and goes on only in a round that nobody holds."""

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        trained = super().train(client, model, round)
        held = Path(__file__).with_name(f"hold-{round}")
        if held.exists():
            held.with_name("held").touch()
            time.sleep(600)
        return trained
'''
PATIENCE = 120.0
"""Seconds after which something must have happened on the slowest machine."""


class Process:
    """A running `ekiden` command: a fresh interpreter, or a fork of one that has its imports behind
    it."""

    def __init__(self, args: list[str], log: Path, *, warm: bool) -> None:
        self.log = log
        if warm:
            self._process = WarmProcess(target=command, args=(args, Path.cwd(), log, log))
            self._process.start()
            self.poll: Callable[[], int | None] = lambda: self._process.exitcode
            self.wait: Callable[[float], object] = self._process.join
            self.pid = self._process.pid or 0
        else:
            with open(log, "ab") as output:
                other = subprocess.Popen(
                    [sys.executable, "-m", "ekiden", *args], stdout=output, stderr=output
                )
            self.poll, self.wait, self.pid = other.poll, other.wait, other.pid

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait until it ends or something has happened."""
        deadline = time.monotonic() + PATIENCE
        while self.poll() is None and not happened():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.004)  # to look takes time of the processors that the runs need

    def kill(self) -> bool:
        """Kill it; return whether it was still running."""
        running = self.poll() is None
        if running:
            os.kill(self.pid, signal.SIGKILL)
        self.wait(PATIENCE)
        return running

    def finish(self) -> None:
        """Let it end, and check that it succeeded."""
        self.wait(PATIENCE)
        assert self.poll() == 0, self.log.read_text()


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def results(folder: Path) -> dict[str, bytes]:
    models = [*folder.glob("*.safetensors"), *folder.glob("personal/*.safetensors")]
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in (*(folder / n for n in SAME), *models)
        if p.exists() and p.name != "state.safetensors"
    }


def seconds(folder: Path) -> float:
    return sum(
        float(json.loads(line)["seconds"])
        for line in (folder / "times.jsonl").read_text().splitlines()
    )


def next_command(out: Path, first: list[str]) -> tuple[list[str], Path | None]:
    """Use `resume`, or `run` as long as there is nothing to resume."""
    begun = [p.parent for p in out.glob("*/config.json")]
    if begun:
        return ["resume", str(begun[0])], begun[0]
    shutil.rmtree(out, ignore_errors=True)
    return first, None


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = FEDELMY.split()
    Process([*flags, str(tmp_path / "whole")], tmp_path / "log", warm=True).finish()
    (whole,) = (tmp_path / "whole").iterdir()
    out, draw, kills, started = tmp_path / "out", random.Random(0), 0, 0
    kinds = ["cold"] * 4 + ["metrics.jsonl"] * 3 + ["times.jsonl"] * 3 + ["any time"] * 10
    draw.shuffle(kinds)
    for kind in kinds:
        args, folder = next_command(out, [*flags, str(out)])
        before = lines(folder / "attempts.jsonl") if folder else 0
        steps = lines(folder / kind) if folder else 0
        process = Process(args, tmp_path / "log", warm=kind != "cold")
        if kind == "cold":  # while it imports, reads data, takes up the folder
            time.sleep(draw.uniform(0, 2))
        else:

            def begun(before: int = before) -> bool:
                return any(lines(p) > before for p in out.glob("*/attempts.jsonl"))

            def next_step(kind: str = kind, steps: int = steps) -> bool:
                return any(lines(p) > steps for p in out.glob(f"*/{kind}"))

            process.wait_until(begun)
            if kind != "any time":  # while values, metrics and state are written, or just after
                process.wait_until(next_step)
                time.sleep(draw.uniform(0, 0.008))
            else:
                time.sleep(draw.uniform(0, seconds(whole) / 15))
        kills += process.kill()
        started += kind != "cold"
    assert kills >= 15
    args, folder = next_command(out, [*flags, str(out)])
    assert folder is not None
    Process(args, tmp_path / "log", warm=True).finish()
    assert results(folder) == results(whole)
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert len(attempts) > started
    origins = [attempt["from_step"] for attempt in attempts]
    assert origins == sorted(origins)
    assert len(set(origins)) >= 4, "it was killed in several of its steps"
    assert not list(folder.rglob("value-0-*")), "what only the first steps needed is gone"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize(
    "kills", [(0,), pytest.param((0, 2), marks=pytest.mark.slow)], ids=["once", "twice"]
)
def test_killed_with_worker_processes(
    kills: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these rounds, each while clients train; each attempt starts two interpreters, which takes
    seconds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    method = tmp_path / "own.py"
    method.write_text(HELD)
    flags = ["run", f"{method}:Held", *LOCAL.split()]
    Process([*flags, str(tmp_path / "whole")], tmp_path / "log", warm=True).finish()
    (whole,) = (tmp_path / "whole").iterdir()
    out = tmp_path / "out"
    flags = [*flags, str(out), "--workers", "2"]
    for round in kills:
        hold = tmp_path / f"hold-{round}"
        hold.touch()
        args, _ = next_command(out, flags)
        process = Process(args, tmp_path / "log", warm=True)
        process.wait_until((tmp_path / "held").exists)
        workers = children(process.pid)
        assert process.kill(), process.log.read_text()
        assert len(workers) >= 2
        deadline = time.monotonic() + PATIENCE
        while any(map(alive, workers)):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.02)
        hold.unlink()
        (tmp_path / "held").unlink()
    args, folder = next_command(out, flags)
    assert folder is not None
    Process(args, tmp_path / "log", warm=True).finish()
    assert results(folder) == results(whole)
    assert len(results(folder)) == 1 + 4
