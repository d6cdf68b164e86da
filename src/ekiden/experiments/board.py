"""The display of a sweep while it runs: how much is done, what runs now, and how long the rest will take."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ekiden.experiments.launch import Event, RunEnd
from ekiden.experiments.summary import duration


@dataclass
class _Running:
    """A run that has begun: its start time, its step and number of steps, and what it is doing now."""

    bar: TaskID
    began: float
    first: int | None = None
    step: int = 0
    total: int = 0

    def left(self, now: float) -> float | None:
        """Return the estimated seconds that the run still needs, from its steps so far."""
        if self.first is None or self.step <= self.first:
            return None
        return (now - self.began) / (self.step - self.first) * (self.total - self.step)


class Board:
    """Show the runs of a sweep; pass `report` to `launch.execute`."""

    def __init__(
        self, console: Console, names: Sequence[str], groups: Sequence[str], known: Mapping[str, float], cores: int
    ) -> None:
        """Start with no run begun.

        Args:
            console: where to print.
            names: names of the runs.
            groups: group of each run; the runs of a group take equally long.
            known: seconds that a run of a group took, if one was finished before.
            cores: number of runs at a time.
        """
        self._console, self._names, self._groups, self._cores = console, names, groups, cores
        self._seconds = {group: [seconds] for group, seconds in known.items()}
        self._running: dict[int, _Running] = {}
        self._waiting = set(range(len(names)))
        self._done = 0
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),  # labels may hold square brackets
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", style="dim", markup=False),
            console=console,
        )
        self._all = self.progress.add_task("all runs", total=len(names), text="")

    def report(self, event: Event | RunEnd) -> None:
        """Show an event."""
        now = time.monotonic()
        if event.run in self._waiting:
            self._waiting.remove(event.run)
            bar = self.progress.add_task(self._names[event.run], total=None, text="")
            self._running[event.run] = _Running(bar, now)
        if isinstance(event, RunEnd):
            self._end(event, now)
        else:
            self._go_on(event)
        left = self.left(now)
        text = "" if left is None else f"about {duration(left)} left"
        self.progress.update(self._all, completed=self._done, text=text)

    def left(self, now: float) -> float | None:
        """Return the seconds until all runs are done; None as long as nothing is known."""
        guesses = {i: run.left(now) for i, run in self._running.items()}
        whole = [mean(seconds) for seconds in self._seconds.values()]
        whole += [g + now - self._running[i].began for i, g in guesses.items() if g is not None]
        if not whole:
            return None

        def expected(run: int) -> float:
            seconds = self._seconds.get(self._groups[run])
            return mean(seconds) if seconds else mean(whole)

        rest = [
            max(0.0, expected(i) - (now - self._running[i].began)) if guess is None else guess
            for i, guess in guesses.items()
        ]
        rest += [expected(i) for i in self._waiting]
        return max([sum(rest) / self._cores, *rest]) if rest else 0.0

    def _go_on(self, event: Event) -> None:
        run = self._running[event.run]
        run.total = event.total or run.total
        if event.step is not None:
            run.first = event.step - 1 if run.first is None else run.first
            run.step = event.step
        self.progress.update(run.bar, completed=run.step, total=run.total or None, text=event.text)

    def _end(self, outcome: RunEnd, now: float) -> None:
        run = self._running.pop(outcome.run)
        self.progress.remove_task(run.bar)
        self._done += 1
        if not outcome.error:
            self._seconds.setdefault(self._groups[outcome.run], []).append(now - run.began)
        left = self.left(now)
        rest = f", about {duration(left)} left" if left else ""
        error = "another process is working on it" if outcome.elsewhere else outcome.error
        how = error or f"done in {duration(now - run.began)}"
        counted = f"[{self._done}/{len(self._names)}]"
        self._console.print(f"{counted} {self._names[outcome.run]}: {how}{rest}", markup=False, highlight=False)
