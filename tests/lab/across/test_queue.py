"""Runs of a sweep as jobs of a queue, with a stand-in for submitit."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ekiden
from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import read_lines
from ekiden.lab import launch

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

    job_id = "7"

    def __init__(self, log: Path) -> None:
        self.paths = SimpleNamespace(stderr=log)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for submitit, which executes commands in this process; what it was asked for."""
    asked = list[dict[str, Any]]()
    answers = iter([{"7"}, None])  # still in the queue; no answer; gone

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

        def submit(self, command: launch.Command) -> Job:
            words: Sequence[str] = pickle.loads(pickle.dumps(command))._words  # as submitit does
            self._folder.mkdir(exist_ok=True, parents=True)
            log = self._folder / f"{words[-1]}.err"
            try:
                call(list(words[3:]))
            except UserError as error:
                log.write_text(f"a warning\nekiden: {error}\nlast words\n")
            return Job(log)

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Executor))
    monkeypatch.setattr(launch, "require_extra", lambda *needed: None)
    monkeypatch.setattr(launch, "_POLL", {"slurm": 0.0})
    monkeypatch.setattr(launch, "_going_on", lambda *which: next(answers, set()))
    return asked


def test_a_sweep_by_jobs_ends_like_one_here(
    at_once: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(TABLE)
    call(
        [
            "sweep",
            "table.toml",
            "--out",
            "there",
            "--on",
            "slurm",
            "--queue",
            "slurm_partition=gpu",
            "timeout_min=7",
        ]
    )
    assert at_once == [
        {
            "cluster": "slurm",
            "name": "ekiden",
            "timeout_min": 7,
            "cpus_per_task": 1,
            "slurm_partition": "gpu",
        }
    ]
    assert [len(read_lines(file)) for file in Path("there").glob("*--seed*/metrics.jsonl")] == [
        2,
        2,
    ]
    ekiden.sweep("table.toml", out="there", on="slurm")
    assert len(at_once) == 1, "nothing was left to submit"
    again = [
        "sweep",
        "table.toml",
        "--out",
        "there",
        "--job",
        next(Path("there").glob("*--seed0")).name,
    ]
    call(again)  # a job that is requeued after its run has ended
    (Path("there") / again[-1] / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has run-folder format None"):
        call(again)
    (cell,) = ekiden.sweep("table.toml", out="again", on="slurm", queue={"timeout_min": 9})
    assert (at_once[1]["timeout_min"], cell["seeds"]) == (9, [0, 1])


def test_python_refuses_a_queue_without_a_cluster() -> None:
    with pytest.raises(UserError, match="unknown place `on` 'slum': did you mean 'slurm'"):
        ekiden.sweep("table.toml", on="slum")
    with pytest.raises(UserError, match='queue is for on="slurm": add that'):
        ekiden.sweep("table.toml", queue={"timeout_min": 9})


def test_why_a_job_failed_is_its_line(
    at_once: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(
        TABLE.replace("epochs = 1", "epochs = 1\nval_fraction = 0.0\nselect = 'best'")
    )
    monkeypatch.setattr(
        "ekiden.runs.plan.Plan.run",
        lambda *given, **more: (_ for _ in ()).throw(UserError("no disk")),
    )
    with pytest.raises(UserError, match="2 of 2 runs failed"):
        call(["sweep", "table.toml", "--out", "there", "--on", "slurm"])
    assert "job 7 ended: ekiden: no disk; see" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            ["--on", "slurm", "--queue", "gpu"],
            "queue takes NAME=VALUE, such as slurm_partition=gpu, not 'gpu'",
        ),
        (["--on", "slurm", "--queue", "wrong=1"], "queue: Unknown argument 'wrong'"),
        (["--queue", "timeout_min=1"], "queue is for on slurm: add that, or leave it out"),
        (["--job", "nobody"], "unknown run 'nobody'"),
    ],
)
def test_what_a_queue_does_not_take_is_one_line(
    given: list[str],
    why: str,
    at_once: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(helpers=helpers))
    command = launch.Command([sys.executable, "-c", "import time; time.sleep(60)"], str(tmp_path))
    monkeypatch.setattr("subprocess.Popen.wait", lambda self: 0)
    command()
    child = command._child
    assert child is not None
    again = command.checkpoint()
    monkeypatch.undo()
    assert child.wait() == -signal.SIGKILL
    assert pickle.loads(pickle.dumps(again))._words == command._words


LONG = (
    TABLE.replace("seeds = [0, 1]", "seeds = [0]")
    .replace('"fedseq"', '"fedavg"')
    .replace("epochs = 1", "epochs = 1\nrounds = 25")
)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def job_of(sweep: int) -> tuple[int, int]:
    """Return the processes of submitit's job and of the run that it executes."""
    (controller,) = (pid for pid in children(sweep) if "submitit.local._local" in command_of(pid))
    (job,) = (pid for pid in children(controller) if "submitit.core._submit" in command_of(pid))
    (run,) = (pid for pid in children(job) if "--job" in command_of(pid))
    return job, run


@pytest.fixture
def begun(alone: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """The sweep on submitit's local cluster, when its run has done three steps, and the run
    folder."""
    words = [
        sys.executable,
        "-m",
        "ekiden",
        "sweep",
        "table.toml",
        "--out",
        "there",
        "--on",
        "local-cluster",
    ]
    said = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=alone, stdout=said, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as swept:
        try:
            limit = time.monotonic() + 240
            while not any(
                len(read_lines(file)) >= 3 for file in alone.glob("there/*--seed0/metrics.jsonl")
            ):
                assert swept.poll() is None, swept.communicate()[0]
                assert time.monotonic() < limit
                time.sleep(0.05)
            (run,) = alone.glob("there/*--seed0")
            yield swept, run
        finally:
            with suppress(ProcessLookupError):
                os.killpg(swept.pid, signal.SIGKILL)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the table; `alone/here` has its run, executed without a queue."""
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(LONG)
    call(["sweep", "table.toml", "--out", "here"])
    return tmp_path


def same_bits(run: Path, place: Path) -> None:
    (here,) = place.glob("here/*--seed0")
    for name in ("model.safetensors", "metrics.jsonl", "ledger.jsonl"):
        assert (run / name).read_bytes() == (here / name).read_bytes()
    first, second = read_lines(run / "attempts.jsonl")
    assert first["from_step"] == 0
    assert 2 <= second["from_step"] < 25, "it was interrupted on the way, and went on there"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_that_the_queue_interrupts_is_requeued_and_goes_on(
    alone: Path, begun: tuple["subprocess.Popen[str]", Path]
) -> None:
    swept, run = begun
    job, executing = job_of(swept.pid)
    os.kill(
        job, signal.SIGUSR2
    )  # as Slurm does before it preempts a job, or at the end of its time
    said, _ = swept.communicate(timeout=400)
    assert swept.returncode == 0, said
    assert not Path(f"/proc/{executing}").exists()
    log = "".join(file.read_text() for file in alone.glob("there/jobs/*_log.out"))
    assert "Requeued job" in log
    same_bits(run, alone)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_that_is_killed_without_notice_goes_on_when_the_sweep_is_called_again(
    alone: Path, begun: tuple["subprocess.Popen[str]", Path]
) -> None:
    swept, run = begun
    for pid in job_of(swept.pid):
        os.kill(pid, signal.SIGKILL)
    said, _ = swept.communicate(timeout=400)
    assert swept.returncode == 2
    assert "1 of 1 runs failed" in " ".join(said.split())
    call(["sweep", "table.toml", "--out", "there", "--on", "local-cluster"])
    same_bits(run, alone)
