"""Runs in their own processes: a failing one does not stop the others; and estimates of the time
left."""

import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from ekiden.data import Dataset, FederatedData
from ekiden.lab.launch import Board, Event, LaunchedRun, Lines, RunEnd, execute
from ekiden.methods import FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe


@dataclass(frozen=True)
class Dying(Plan[FedSeq]):
    """A run whose process is killed."""

    def federation(self, dataset: Dataset | None = None) -> FederatedData:
        os._exit(9)


@dataclass(frozen=True)
class Faulty(Plan[FedSeq]):
    """A run that fails in an unforeseen way."""

    def federation(self, dataset: Dataset | None = None) -> FederatedData:
        raise RuntimeError("out of\nluck")


def test_neither_a_kill_nor_a_fault_stops_the_others(tmp_path: Path) -> None:
    method = FedSeq(epochs=1)
    plans = [Dying(Recipe(method)), Faulty(Recipe(method)), Plan(Recipe(method), clients=2)]
    heard: list[Event | RunEnd] = []
    jobs = [LaunchedRun(plan, tmp_path / str(i)) for i, plan in enumerate(plans)]  # type: ignore[arg-type]
    outcomes = execute(jobs, heard.append, cores=3, apart=True)
    assert [o.run for o in outcomes] == [0, 1, 2]
    assert "its process died" in outcomes[0].error
    assert "RuntimeError: out of luck" in outcomes[1].error
    assert outcomes[2].error == ""
    assert (tmp_path / "2" / "model.safetensors").exists()
    assert sorted(o.run for o in heard if isinstance(o, RunEnd)) == [0, 1, 2]
    assert [e.step for e in heard if isinstance(e, Event) and e.run == 2 and e.step][-1] == 2


@dataclass(frozen=True)
class Unreadable(Plan[FedSeq]):
    """A run that its process cannot read, so that it ends before it begins, as in a script that
    starts itself."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


@pytest.mark.slow  # the process imports PyTorch
def test_a_process_that_cannot_begin_is_not_said_to_lack_memory(tmp_path: Path) -> None:
    job = LaunchedRun(Unreadable(Recipe(FedSeq())), tmp_path / "run")  # type: ignore[arg-type]
    (outcome,) = execute([job], lambda event: None, apart=True)
    assert "ended with an error before it began" in outcome.error
    assert "memory" not in outcome.error


def test_a_run_that_was_finished_before_says_how_many_steps_it_has(tmp_path: Path) -> None:
    job = LaunchedRun(Plan(Recipe(FedSeq(epochs=1)), clients=2), tmp_path / "run")
    for _ in ("the run", "the same again"):
        printed = io.StringIO()
        execute([job], Lines(Console(file=printed), [job]), cores=1)
        lines = printed.getvalue().splitlines()
        told = [line.split(":")[0] for line in lines[:6]]
        assert told == ["samples", "layout", "range", "labels", "silos", "subjects"]
        first, *_, last = lines[6:]
        assert first == "run, seed 0: 2 steps"
        assert last.startswith("run, seed 0: step 2 of 2, accuracy ")


def test_lines_are_few_where_steps_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    now = [0.0]
    monkeypatch.setattr("ekiden.lab.launch.time.monotonic", lambda: now[0])
    lines = Lines(
        Console(file=printed), [LaunchedRun(Plan(Recipe(FedSeq(), seed=5)), tmp_path / "[one]")]
    )
    lines(Event(0, "loading data"))
    lines(Event(0, "starting", total=1001))
    for step in range(1, 1002):
        lines(Event(0, "client-0: epoch 1/2"))
        lines(Event(0, f"accuracy {step}" if step % 2 else "", step))
    lines(Event(0, "accuracy 1001", 1001))  # the end reports the last step again
    lines(RunEnd(0, tmp_path))
    got = printed.getvalue().splitlines()
    assert got[:3] == [
        f"[one], seed 5: {text}"
        for text in ("1,001 steps", "step 21 of 1001, accuracy 21", "step 42 of 1001")
    ]
    assert got[-1] == "[one], seed 5: step 1001 of 1001, accuracy 1001"
    assert len(got) == 1 + 1001 // 21 + 1


def test_a_long_step_gives_a_sign_of_life_each_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    now = [0.0]
    monkeypatch.setattr("ekiden.lab.launch.time.monotonic", lambda: now[0])
    lines = Lines(Console(file=printed), [LaunchedRun(Plan(Recipe(FedSeq())), tmp_path / "one")])
    lines(Event(0, "starting", total=4))
    for epoch in range(1, 201):
        now[0] += 1
        lines(Event(0, f"photo: epoch {epoch}/200"))
    assert printed.getvalue().splitlines()[1:] == [
        f"one, seed 0: in step 1 of 4, photo: epoch {epoch}/200" for epoch in (60, 120, 180)
    ]


def test_how_the_runs_of_a_sweep_ended_and_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, printed = [0.0], io.StringIO()
    monkeypatch.setattr("ekiden.lab.launch.time.monotonic", lambda: now[0])
    board = Board(Console(file=printed), ["a", "b", "c"])
    board.report(Event(0, "starting", total=4))
    now[0] = 10.0
    board.report(Event(1, "starting", total=4))
    now[0] = 30.0
    board.report(RunEnd(0, Path("a")))
    board.report(RunEnd(1, Path("b"), "no memory"))
    board.report(RunEnd(2, Path("c"), elsewhere=True))
    assert printed.getvalue().splitlines() == [
        "[1/3] a: done in 30.0 s, about 1 min 00 s left",
        "[2/3] b: no memory, about 15.0 s left",
        "[3/3] c: another process is working on it",
    ]
