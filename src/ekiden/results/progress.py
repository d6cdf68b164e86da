"""Bars that show how far a run in Python is: on a terminal and in a notebook, otherwise nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ekiden.data.tasks import Metric
from ekiden.engine.drive import Row

Advance = Callable[[str, int], None]
"""(text, done): what is shown behind the bar, and how many parts are done."""


def bars(console: Console, *, transient: bool = False) -> Progress:
    """Return a display of bars with a name, a count, the time, and a text."""
    return Progress(
        TextColumn("{task.fields[name]}", markup=False),  # paths may hold square brackets
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim", markup=False),
        console=console,
        transient=transient,
    )


@contextmanager
def bar(name: str, total: int, *, quiet: bool) -> Iterator[Advance]:
    """Show one bar on the standard error stream while the block runs, and remove it at the end."""
    console = Console(stderr=True)
    if quiet or not (console.is_terminal or console.is_jupyter):
        yield lambda text, done: None
        return
    with bars(console, transient=True) as progress:
        task = progress.add_task("", total=total, name=name, text="")
        yield lambda text, done: progress.update(task, text=text, completed=done)


def measured(metric: Metric, row: Row) -> str:
    """Return the headline metric of a row as text, empty if it was not measured."""
    value = row.get(metric.name)
    if value is None:
        return ""
    return f"{metric.name} {100 * value:.1f} %" if metric.share else f"{metric.name} {value:.4g}"
