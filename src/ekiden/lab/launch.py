"""Execute several independent runs at once, one process each; or as jobs of a queue, such as Slurm,
by submitit.

A failing run does not stop the others. A job is a command and the name of a run folder. What a job
did is read from that folder and never from what submitit pickles. A job that is requeued executes
its command again, and the run continues where it was.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from ekiden.core.base.errors import (
    DivergenceWarning,
    UserError,
    counted,
    unknown,
    warnings_as_lines,
)
from ekiden.core.base.outside import require_extra
from ekiden.core.engine.drive import Row
from ekiden.core.engine.folder import InUse, read_config
from ekiden.core.engine.local import MakesTransport, end_with_parent
from ekiden.core.engine.method import Method
from ekiden.core.engine.setup import core_count
from ekiden.lab.describe import description
from ekiden.lab.ray import OnRay
from ekiden.runs.api import How
from ekiden.runs.plan import Plan, go_on_with, stored
from ekiden.runs.summary import duration, summarise
from ekiden.runs.tracking import bars, measured


@dataclass(frozen=True)
class LaunchedRun:
    """A run to start or to resume."""

    plan: Plan[Method]  # what to run
    folder: Path  # its run folder
    about: Mapping[str, Any] = field(default_factory=dict)  # further entries of its config.json
    track: tuple[str, ...] = ()  # programs that draw the run while it computes; see `ekiden.run`
    on: str = "here"  # where its clients are; see `transport_of`
    data: str = ""  # where the data of a run that has begun are now, if they may have moved


def transport_of(on: str) -> MakesTransport | None:
    """Return what makes the transport of clients that are "here" (None), on "ray", or on
    "ray:ADDRESS".
    """
    kind, _, address = on.partition(":")
    if kind == "ray":
        return OnRay(address)
    if on != "here":
        raise unknown("`--on`", on, ("here", "ray", "ray:ADDRESS", "flower"))
    return None


@dataclass(frozen=True)
class Event:
    """Something that happened in a run: an epoch of training or a step."""

    run: int  # number of the run
    text: str  # what to show next to the bar
    step: int | None = None  # number of steps done, if that changed
    total: int | None = None  # number of steps of the run, if that became known
    lines: str = ""  # to print once, before the first step


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. `error` is empty if it went well; `elsewhere` means that another process is
    working on it.
    """

    run: int
    folder: Path
    error: str = ""
    elsewhere: bool = False


Report = Callable[[Event | RunEnd], None]
# about this many for the steps of one run
_MOST_LINES = 50
# seconds without a line during a step
_SILENCE = 60.0
_DIED = "its process died (out of memory?): run fewer at once, then `ekiden resume`"
_NOT_STARTED = (
    "its process ended with an error before it began, which Python printed: in a script, put what "
    "starts runs under "
    '`if __name__ == "__main__":`'
)


def launch(jobs: Sequence[LaunchedRun], console: Console) -> list[RunEnd]:
    """Execute all runs on all cores, with a bar for each on a terminal, otherwise with plain
    lines.
    """
    if not console.is_terminal:
        return execute(jobs, Lines(console, jobs))
    board = Board(console, [job.folder.name for job in jobs])
    with board.progress:
        return execute(jobs, board.report)


class Lines:
    """Prints plain lines while runs go on, for pipes and log files; `execute` calls it.

    There is one line for each step, or every k-th step of a long run, and a sign of life during
    long steps.
    """

    def __init__(self, console: Console, jobs: Sequence[LaunchedRun]) -> None:
        self._console = console
        self._names = [f"{job.folder.name}, seed {job.plan.recipe.seed}" for job in jobs]
        self._total = [0] * len(jobs)
        self._step = [0] * len(jobs)
        self._last = [time.monotonic()] * len(jobs)

    def __call__(self, event: Event | RunEnd) -> None:
        """Print an event if it is worth a line."""
        if isinstance(event, RunEnd):
            return
        run = event.run
        if event.lines:
            _print(self._console, event.lines)
        if event.total is not None:
            self._total[run] = event.total
            self._print(run, counted(event.total, "step"))
        elif event.step is not None and event.step != self._step[run]:
            self._step[run] = event.step
            total = self._total[run]
            every = max(1, -(-total // _MOST_LINES))
            if event.step % every == 0 or event.step == total:
                words = (f"step {event.step} of {total}", event.text)
                self._print(run, ", ".join(filter(None, words)))
        elif event.step is None and self._total[run]:
            silent = time.monotonic() - self._last[run]
            if silent >= _SILENCE:
                text = f"in step {self._step[run] + 1} of {self._total[run]}, {event.text}"
                self._print(run, text)

    def _print(self, run: int, text: str) -> None:
        self._last[run] = time.monotonic()
        _print(self._console, f"{self._names[run]}: {text}")
        self._console.file.flush()


def _print(console: Console, text: str) -> None:
    """Print a text as it is."""
    console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)


def execute(
    jobs: Sequence[LaunchedRun],
    report: Report,
    cores: int | None = None,
    apart: bool = False,
    minutes: float = inf,
) -> list[RunEnd]:
    """Execute all runs, and report what happens in them and how each ends.

    They start in this order, side by side on so many cores, by default on all; `report` is called
    from one thread at a time. `apart` puts even a single run into its own process, so that nothing
    in it can end this process. Only such processes end after so many minutes, as if they were
    killed: their runs go on later with the same bits.
    """
    cores = cores or core_count()
    if not apart and (len(jobs) == 1 or cores == 1):
        outcomes = []
        for i, job in enumerate(jobs):
            outcomes.append(_guarded(i, job, report))
            report(outcomes[-1])
        return outcomes
    side_by_side = min(len(jobs), max(1, cores // max(job.plan.workers for job in jobs)))
    return _in_processes(jobs, report, side_by_side, 60 * minutes)


def free_folder(parent: Path, name: str) -> Path:
    """Return the first of parent/name, parent/name-2, ... that does not exist."""
    name = re.sub(r"[^\w.-]+", "-", name)
    folder = parent / name
    k = 2
    while folder.exists():
        folder = parent / f"{name}-{k}"
        k = k + 1
    return folder


def _guarded(run: int, job: LaunchedRun, report: Callable[[Event], None]) -> RunEnd:
    """Execute one run; an error that the user can fix becomes its outcome."""

    # Called after the checks: refused runs get a single line, the reason.
    def begin() -> None:
        lines = ""
        if not run:
            lines = str(description(data))
        steps = job.plan.recipe.method.steps(len(data.clients))
        report(Event(run, "starting", total=steps, lines=lines))

    def on_step(row: Row) -> None:
        report(Event(run, measured(data.dataset.task.headline, row), row["step"]))

    def watch(client: str, epoch: int, epochs: int) -> None:
        report(Event(run, f"{client}: epoch {epoch}/{epochs}"))

    report(Event(run, "loading data"))
    try:
        transport = transport_of(job.on)
        plan = job.plan
        if job.data and job.data != plan.data:
            go_on_with(job.folder, [job.data])
            plan = stored(job.folder)
        data = plan.federation()
        with warnings.catch_warnings():
            # the command line prints its own line about it
            warnings.simplefilter("ignore", DivergenceWarning)
            result = plan.run(
                job.folder,
                data,
                job.about,
                How(
                    watch=watch if transport is None else None,
                    on_start=begin,
                    on_step=on_step,
                    transport=transport,
                    track=job.track,
                    quiet=True,
                ),
            )
    except UserError as error:
        report(Event(run, "failed"))
        return RunEnd(run, job.folder, str(error), isinstance(error, InUse))
    report(Event(run, measured(data.dataset.task.headline, result.last), result.state.step))
    return RunEnd(run, job.folder)


def _in_processes(
    jobs: Sequence[LaunchedRun], report: Report, side_by_side: int, seconds: float
) -> list[RunEnd]:
    """Execute runs in processes: each of `side_by_side` threads starts one after the other and
    listens to it.
    """
    lock = threading.Lock()

    def heard(event: Event | RunEnd) -> None:
        with lock:
            report(event)

    children = _Children()
    ending = threading.Timer(min(seconds, threading.TIMEOUT_MAX), children.kill)
    ending.daemon = True
    ending.start()
    with ThreadPoolExecutor(side_by_side) as threads:
        running = [threads.submit(_follow, i, job, heard, children) for i, job in enumerate(jobs)]
        try:
            return [future.result() for future in running]
        except BaseException:
            for future in running:
                future.cancel()
            children.kill()
            raise
        finally:
            ending.cancel()


class _Children:
    """The processes of the runs. After `kill` none is alive, and none starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[SpawnProcess] = []
        self.stopped = False

    def start(self, process: SpawnProcess) -> None:
        with self._lock:
            if not self.stopped:
                process.start()
                self._started.append(process)

    def kill(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._started:
                process.kill()


def _follow(run: int, job: LaunchedRun, report: Report, children: _Children) -> RunEnd:
    """Execute one run in its own process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(run, job, theirs))
    children.start(process)
    theirs.close()
    outcome = None
    begun = False
    while True:
        try:
            event = ours.recv()
        except EOFError:
            break
        if isinstance(event, RunEnd):
            outcome = event
        else:
            begun = True
            report(event)
    if process.pid is not None:
        process.join()
    if outcome is None:
        why = _DIED
        # after a kill the code is below 0
        if not begun and (process.exitcode or 0) > 0:
            why = _NOT_STARTED
        outcome = RunEnd(run, job.folder, why)
        # it did not fail
        if children.stopped:
            return outcome
    report(outcome)
    return outcome


def _child(run: int, job: LaunchedRun, to: "Connection[Any, Any]") -> None:
    """Execute the run in this process. Whatever goes wrong becomes its outcome."""
    end_with_parent()
    warnings_as_lines()
    # the parent gets it, too, and ends its processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = _guarded(run, job, to.send)
    except Exception as error:
        line = " ".join(str(error).split())
        hint = "is this a bug?"
        if job.folder.exists():
            hint = f"`ekiden resume {job.folder}` shows where"
        outcome = RunEnd(run, job.folder, f"{type(error).__name__}: {line} ({hint})")
    to.send(outcome)


class Board:
    """Shows runs as bars on a terminal; pass `report` to `execute`."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        """Start with no run begun."""
        self._console = console
        self._names = names
        # bar and start of each run that goes on
        self._running: dict[int, tuple[TaskID, float]] = {}
        self._done = 0
        self._began = time.monotonic()
        self.progress = bars(console)
        self._all = self.progress.add_task("", total=len(names), name="all runs", text="")

    def report(self, event: Event | RunEnd) -> None:
        """Show an event."""
        now = time.monotonic()
        if event.run not in self._running:
            name = self._names[event.run]
            bar = self.progress.add_task("", total=None, name=name, text="")
            self._running[event.run] = bar, now
        bar, began = self._running[event.run]
        if isinstance(event, Event):
            if event.lines:
                _print(self._console, event.lines)
            # None leaves a number of the bar as it is
            self.progress.update(bar, text=event.text, completed=event.step, total=event.total)
            return
        del self._running[event.run]
        self.progress.remove_task(bar)
        self._done += 1
        waiting = len(self._names) - self._done
        left = ""
        if waiting:
            left = f"about {duration((now - self._began) / self._done * waiting)} left"
        self.progress.update(self._all, completed=self._done, text=left)
        error = event.error
        if event.elsewhere:
            error = "another process is working on it"
        how = ", ".join(filter(None, (error or f"done in {duration(now - began)}", left)))
        _print(self._console, f"[{self._done}/{len(self._names)}] {self._names[event.run]}: {how}")


CLUSTERS = {"slurm": "slurm", "local-cluster": "local"}
"""submitit's name for each place; local-cluster: processes of this machine, to try it"""
# seconds between looks
_POLL = {"slurm": 10.0, "local-cluster": 2.0}
_SQUEUE = ("squeue", "--me", "--noheader", "--array", "--format=%i")
_DAY = 24 * 60


class Command:
    """What a job executes. submitit stores it by pickle, so it holds texts only."""

    def __init__(self, words: Sequence[str], place: str) -> None:
        self._words = tuple(words)
        self._place = place
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Execute the command in its folder; return the exit code, which nobody reads."""
        self._child = subprocess.Popen(self._words, cwd=self._place)
        return self._child.wait()

    def checkpoint(self) -> Any:
        """Return what a requeued job executes; submitit calls this before a job is preempted or
        runs out of time.
        """
        import submitit

        if self._child is not None:
            # the run folder is safe to kill
            self._child.kill()
        return submitit.helpers.DelayedSubmission(Command(self._words, self._place))


def submit(
    jobs: Sequence[LaunchedRun],
    file: Path,
    budget: str,
    device: str,
    place: str,
    settings: Mapping[str, str | int],
    report: Report,
) -> None:
    """Submit runs of a sweep, and report how they go on until all have ended. If this process ends,
    the jobs go on.

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
    import submitit  # an extra

    out = jobs[0].folder.parent
    track = jobs[0].track
    command = [sys.executable, "-m", "ekiden", "sweep", str(file), "--budget", budget]
    command += ["--device", device, "--out", str(out)]
    if track:
        command += ["--track", *track]
    command.append("--job")
    executor = submitit.AutoExecutor(folder=out / "jobs", cluster=CLUSTERS[place])
    cores = max(job.plan.workers * max(1, job.plan.hardware.threads) for job in jobs)
    try:
        usual = {"name": "ekiden", "timeout_min": _DAY, "cpus_per_task": cores}
        executor.update_parameters(**usual | dict(settings))
    except (NameError, ValueError, TypeError) as error:
        raise UserError(f"--queue: {error}") from None
    with executor.batch():
        sent = [executor.submit(Command([*command, job.folder.name], os.getcwd())) for job in jobs]
    waiting = dict(enumerate(sent))
    steps = dict.fromkeys(waiting, -1)
    while waiting:
        left = _going_on(place, waiting.values())
        for run, job in list(waiting.items()):
            folder = jobs[run].folder
            reached = _step(folder)
            if reached > steps[run]:
                steps[run] = reached
                total = read_config(folder)["steps"]
                report(Event(run, f"job {job.job_id}", reached, total))
            if left is not None and job.job_id not in left:
                del waiting[run]
                report(RunEnd(run, folder, _error(folder, job)))
        if waiting:
            time.sleep(_POLL[place])


def _going_on(place: str, jobs: Iterable[Any]) -> set[str] | None:
    """Return the ids of jobs that have not ended; None if Slurm does not answer now.

    submitit calls a job done once its process has ended. Slurm may still requeue it, and then it is
    in the queue.
    """
    if place != "slurm":
        return {job.job_id for job in jobs if not job.done()}
    said = subprocess.run(_SQUEUE, capture_output=True, text=True, check=False)
    if said.returncode:
        return None
    return set(said.stdout.split())


def check_place(place: str) -> None:
    """Refuse a place that is not known, or needs a package that is not here, before any work."""
    if place not in ("here", *CLUSTERS):
        raise unknown("place `on`", place, ("here", *CLUSTERS))
    if place in CLUSTERS:
        require_extra("submitit", f"--on {place}", "submitit")


def queue_settings(given: Sequence[str]) -> dict[str, str | int]:
    """Return parameters of submitit from texts such as timeout_min=600."""
    found: dict[str, str | int] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not (name and value):
            raise UserError(f"--queue takes NAME=VALUE, such as slurm_partition=gpu, not {text!r}")
        found[name] = value
        if value.isdigit():
            found[name] = int(value)
    return found


def _step(folder: Path) -> int:
    """Return the number of steps that a run has done; -1 if it has not begun."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return -1
    return file.read_bytes().count(b"\n")


def _error(folder: Path, job: Any) -> str:
    """Return why a run is not finished although its job has ended; empty if it is."""
    try:
        if (folder / "config.json").exists() and summarise(folder).finished:
            return ""
    except UserError as error:
        return str(error)
    log = job.paths.stderr
    said = ["no output"]
    if log.exists():
        said += filter(str.strip, log.read_text(errors="replace").splitlines())
    # The last line, or the last one that the command itself says.
    own = [line for line in said if line.startswith("ekiden:")]
    why = (own or said)[-1].strip()
    return f"job {job.job_id} ended: {why}; see {log}"
