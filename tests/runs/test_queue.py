"""Runs of a sweep as jobs of a queue, with a stand-in for submitit."""

import json
import pickle
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.base.errors import UserError
from ekiden.cli.app import call
from ekiden.engine.folder import read_lines
from ekiden.runs import queue

TABLE = """title = "digits"
seeds = [0, 1]
[settings]
data = "digits"
model = "mlp"
clients = 2
epochs = 1
[[row]]
label = "FedSeq"
method = "fedseq"
"""


class Job:
    """A job that has ended; what it printed is in a file."""

    job_id, state = "7", "COMPLETED"

    def __init__(self, log: Path) -> None:
        self.paths = SimpleNamespace(stderr=log)

    def done(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for submitit, which executes commands in this process; what it was asked for."""
    asked = list[dict[str, Any]]()

    class Executor:
        def __init__(self, folder: Path, cluster: str) -> None:
            self._folder = folder
            asked.append({"cluster": cluster})

        def update_parameters(self, **given: Any) -> None:
            if "wrong" in given:
                raise NameError("Unknown argument 'wrong'")
            asked[-1].update(given)

        def batch(self) -> Any:
            return nullcontext()

        def submit(self, command: queue.Command) -> Job:
            words: Sequence[str] = pickle.loads(pickle.dumps(command))._words  # as submitit does
            self._folder.mkdir(exist_ok=True, parents=True)
            log = self._folder / f"{words[-1]}.err"
            try:
                call(list(words[3:]))
            except UserError as error:
                log.write_text(f"a warning\nekiden: {error}\nlast words\n")
            return Job(log)

    monkeypatch.setattr(queue, "submitit", SimpleNamespace(AutoExecutor=Executor))
    monkeypatch.setattr(queue, "require_extra", lambda *needed: None)
    monkeypatch.setattr(queue, "_POLL", 0.0)
    return asked


def test_a_sweep_by_jobs_ends_like_one_here(
    at_once: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(TABLE)
    call(["sweep", "table.toml", "--out", "there", "--on", "slurm", "--queue", "slurm_partition=gpu", "timeout_min=7"])
    assert at_once == [
        {"cluster": "slurm", "name": "ekiden", "timeout_min": 7, "cpus_per_task": 1, "slurm_partition": "gpu"}
    ]
    assert [len(read_lines(file)) for file in Path("there").glob("*--seed*/metrics.jsonl")] == [2, 2]
    call(["sweep", "table.toml", "--out", "there", "--on", "slurm"])
    assert len(at_once) == 1, "nothing was left to submit"


def test_why_a_job_failed_is_its_line(
    at_once: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(TABLE.replace("epochs = 1", "epochs = 1\nval_fraction = 0.0\nselect = 'best'"))
    monkeypatch.setattr("ekiden.runs.plan.Plan.run", lambda *given, **more: (_ for _ in ()).throw(UserError("no disk")))
    with pytest.raises(UserError, match="2 of 2 runs failed"):
        call(["sweep", "table.toml", "--out", "there", "--on", "slurm"])
    assert "job 7 ended (COMPLETED): ekiden: no disk; see" in " ".join(capsys.readouterr().out.split())
    assert len(json.loads(Path("there", "failed.json").read_text())) == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--on", "slurm", "--queue", "gpu"], "queue takes NAME=VALUE, such as slurm_partition=gpu, not 'gpu'"),
        (["--on", "slurm", "--queue", "wrong=1"], "queue: Unknown argument 'wrong'"),
        (["--queue", "timeout_min=1"], "queue is for on slurm: add that, or leave it out"),
        (["--job", "nobody"], "unknown run 'nobody'"),
    ],
)
def test_what_a_queue_does_not_take_is_one_line(
    given: list[str], why: str, at_once: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(TABLE)
    with pytest.raises(UserError) as told:
        call(["sweep", "table.toml", "--out", "there", *given])
    assert why in str(told.value)
    assert not list(tmp_path.glob("there/*seed*"))


def test_a_requeued_job_is_the_same_command_and_its_child_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = SimpleNamespace(DelayedSubmission=lambda command: command)
    monkeypatch.setattr(queue, "submitit", SimpleNamespace(helpers=helpers))
    command = queue.Command([sys.executable, "-c", "import time; time.sleep(60)"], str(tmp_path))
    monkeypatch.setattr("subprocess.Popen.wait", lambda self: 0)
    command()
    child = command._child
    assert child is not None
    again = command.checkpoint()
    monkeypatch.undo()
    assert child.wait() == -signal.SIGKILL
    assert pickle.loads(pickle.dumps(again))._words == command._words
