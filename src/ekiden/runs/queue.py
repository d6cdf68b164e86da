"""Runs as jobs of a queue, such as Slurm, by submitit.

A job is a command and the name of a run folder. What a job did is read from that folder and never from what submitit
pickles. A job that is requeued executes its command again, and the run continues where it was.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError
from ekiden.base.outside import Lazy, require_extra
from ekiden.engine.folder import read_config
from ekiden.runs.launch import Event, LaunchedRun, RunEnd
from ekiden.runs.summary import summarise

submitit = Lazy("submitit")
CLUSTERS = {"slurm": "slurm", "local-cluster": "local"}
"""submitit's name for each place; local-cluster: processes of this machine, to try it"""
_POLL = {"slurm": 10.0, "local-cluster": 2.0}  # seconds between looks
_SQUEUE = ("squeue", "--me", "--noheader", "--array", "--format=%i")
_DAY = 24 * 60


class Command:
    """What a job executes. submitit stores it by pickle, so it holds texts only."""

    def __init__(self, words: Sequence[str], place: str) -> None:
        self._words, self._place = tuple(words), place
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Execute the command in its folder; return the exit code, which nobody reads."""
        self._child = subprocess.Popen(self._words, cwd=self._place)
        return self._child.wait()

    def checkpoint(self) -> Any:
        """Return what a requeued job executes; submitit calls this before a job is preempted or runs out of time."""
        if self._child is not None:
            self._child.kill()  # the run folder is safe to kill
        return submitit.helpers.DelayedSubmission(Command(self._words, self._place))


def execute(
    jobs: Sequence[LaunchedRun],
    file: Path,
    budget: str,
    device: str,
    place: str,
    settings: Mapping[str, str | int],
    report: Callable[[Event | RunEnd], None],
) -> None:
    """Submit runs of a sweep, and report how they go on until all have ended. If this process ends, the jobs go on.

    What jobs print, and what submitit stores, is in the folder `jobs` of the sweep.

    Args:
        jobs: the runs.
        file: the experiment file.
        budget: how much of it.
        device: instead of the file's; empty for that one.
        place: one of `CLUSTERS`.
        settings: further parameters of submitit's `AutoExecutor`.
        report: called with what happens.
    """
    require_extra("submitit", f"--on {place}", "submitit")
    out, track = jobs[0].folder.parent, jobs[0].track
    command = [sys.executable, "-m", "ekiden", "sweep", str(file), "--budget", budget, "--device", device]
    command += ["--out", str(out), *(["--track", *track] if track else []), "--job"]
    executor = submitit.AutoExecutor(folder=out / "jobs", cluster=CLUSTERS[place])
    cores = max(job.plan.workers * max(1, job.plan.hardware.threads) for job in jobs)
    try:
        executor.update_parameters(**{"name": "ekiden", "timeout_min": _DAY, "cpus_per_task": cores, **settings})
    except (NameError, ValueError, TypeError) as error:
        raise UserError(f"--queue: {error}") from None
    with executor.batch():
        sent = [executor.submit(Command([*command, job.folder.name], os.getcwd())) for job in jobs]
    waiting = dict(enumerate(sent))
    steps = dict.fromkeys(waiting, -1)
    while waiting:
        left = _queued() if place == "slurm" else {job.job_id for job in waiting.values() if not job.done()}
        for run, job in list(waiting.items()):
            reached = _step(jobs[run].folder)
            if reached > steps[run]:
                steps[run] = reached
                report(Event(run, f"job {job.job_id}", reached, read_config(jobs[run].folder)["steps"]))
            if left is not None and job.job_id not in left:
                del waiting[run]
                report(RunEnd(run, jobs[run].folder, _error(jobs[run].folder, job)))
        if waiting:
            time.sleep(_POLL[place])


def _queued() -> set[str] | None:
    """Return the ids of the user's jobs in Slurm's queue; None if it does not answer now.

    submitit calls a job done once its process has ended. Slurm may still requeue it, and then it is in the queue.
    """
    said = subprocess.run(_SQUEUE, capture_output=True, text=True, check=False)
    return None if said.returncode else set(said.stdout.split())


def settings(given: Sequence[str]) -> dict[str, str | int]:
    """Return parameters of submitit from texts such as timeout_min=600."""
    found: dict[str, str | int] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"--queue takes NAME=VALUE, such as slurm_partition=gpu, not {text!r}")
        found[name] = int(value) if value.isdigit() else value
    return found


def _step(folder: Path) -> int:
    """Return the number of steps that a run has done; -1 if it has not begun."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else -1


def _error(folder: Path, job: Any) -> str:
    """Return why a run is not finished although its job has ended; empty if it is."""
    try:
        if (folder / "config.json").exists() and summarise(folder).finished:
            return ""
    except UserError as error:
        return str(error)
    log = job.paths.stderr
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    why = next((line for line in reversed(lines) if line.startswith("ekiden:")), lines[-1] if lines else "no output")
    return f"job {job.job_id} ended: {why.strip()}; see {log}"
