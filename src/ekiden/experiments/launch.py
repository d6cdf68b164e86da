"""Several independent runs at once, one process each, with progress."""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ekiden import api
from ekiden.core.method import Method
from ekiden.core.run import Row
from ekiden.errors import UserError
from ekiden.experiments.plan import Plan
from ekiden.transports.processes import end_with_parent


@dataclass(frozen=True)
class Event:
    """Something that happened in a run: an epoch of training, a step, or its end.

    Attributes:
        run: which one.
        text: what to show beside the bar.
        step: steps done, where that changed.
        total: steps of the run, where that became known.
    """

    run: int
    text: str
    step: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `error` is empty where it went well."""

    folder: Path
    error: str = ""


Report = Callable[[Event], None]


def launch(runs: Sequence[tuple[Plan[Method], Path]], console: Console, cores: int | None = None) -> list[Outcome]:
    """Do all runs, on as many cores as there are; a failing run does not stop the others."""
    cores = cores or api.cores()
    with Progress(
        TextColumn("{task.fields[name]}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim"),
        console=console,
    ) as progress:
        bars = [progress.add_task("", total=None, name=folder.name, text="waiting") for _, folder in runs]

        def report(event: Event) -> None:
            known = {"completed": event.step, "total": event.total}
            given = {k: v for k, v in known.items() if v is not None}
            progress.update(bars[event.run], text=event.text, **given)  # type: ignore[arg-type]

        if len(runs) == 1 or cores == 1:
            return [_guarded(i, plan, folder, report) for i, (plan, folder) in enumerate(runs)]
        side_by_side = min(len(runs), max(1, cores // max(plan.workers for plan, _ in runs)))
        return _in_processes(runs, report, side_by_side)


def free_folder(parent: Path, name: str) -> Path:
    """The first of parent/name, parent/name-2, ... that does not exist."""
    name = re.sub(r"[^\w.-]+", "-", name)
    folder, k = parent / name, 2
    while folder.exists():
        folder, k = parent / f"{name}-{k}", k + 1
    return folder


def _guarded(run: int, plan: Plan[Method], folder: Path, report: Report) -> Outcome:
    """Do one run; an error that the user can mend becomes its outcome."""

    def on_step(row: Row) -> None:
        report(Event(run, f"accuracy {100 * row['accuracy']:.1f} %" if "accuracy" in row else "", row["step"]))

    def watch(client: str, epoch: int, epochs: int) -> None:
        report(Event(run, f"{client}: epoch {epoch}/{epochs}"))

    report(Event(run, "loading data"))
    try:
        data = plan.federation()
        report(Event(run, "starting", total=plan.method.steps(len(data.clients))))
        result = plan.run(folder, data, watch, on_step)
    except UserError as error:
        report(Event(run, "failed"))
        return Outcome(folder, str(error))
    report(Event(run, f"accuracy {100 * result.accuracy:.1f} %", result.state.step))
    return Outcome(folder)


def _in_processes(runs: Sequence[tuple[Plan[Method], Path]], report: Report, side_by_side: int) -> list[Outcome]:
    context = get_context("spawn")
    events: SimpleQueue[Event | None] = context.SimpleQueue()

    def forward() -> None:
        while (event := events.get()) is not None:
            report(event)

    listener = threading.Thread(target=forward, daemon=True)
    listener.start()
    with ProcessPoolExecutor(side_by_side, context, _start, (events,)) as pool:
        futures = [pool.submit(_child, i, plan, folder) for i, (plan, folder) in enumerate(runs)]
        outcomes = [_outcome(future, folder) for future, (_, folder) in zip(futures, runs, strict=True)]
    events.put(None)
    listener.join()
    return outcomes


def _outcome(future: "Future[Outcome]", folder: Path) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return Outcome(folder, "its process died (out of memory?): run fewer seeds at once, then `ekiden resume`")


_events: "SimpleQueue[Event | None]"


def _start(events: "SimpleQueue[Event | None]") -> None:
    global _events  # noqa: PLW0603
    _events = events
    end_with_parent()


def _child(run: int, plan: Plan[Method], folder: Path) -> Outcome:
    return _guarded(run, plan, folder, _events.put)
