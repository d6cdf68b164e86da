"""Paired differences: one method minus another, seed by seed. A seed gives both the same data and initial model."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from rich.table import Table
from rich.text import Text

from ekiden.engine.method import Method
from ekiden.tables.experiment import Experiment
from ekiden.tables.verdicts import CellResult


@dataclass(frozen=True)
class Difference:
    """The difference between two cells.

    Attributes:
        points: differences in points of per cent, one for each seed that both have; at least one.
        other: label of the method that is subtracted.
        whole: whether no seed is missing.
        bound: whether the other method pools the data. Then it is a bound and not a competitor.
    """

    points: tuple[float, ...]
    other: str
    whole: bool
    bound: bool

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return mean(self.points)

    @property
    def error(self) -> float | None:
        """Standard error of the mean, s/√n; None for a single seed."""
        return stdev(self.points) / sqrt(len(self.points)) if len(self.points) > 1 else None

    def __str__(self) -> str:
        """Return mean ± standard error, and the number of seeds if some are missing."""
        error = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.mean:+.2f}{error}" + ("" if self.whole else f" ({len(self.points)})")


@dataclass(frozen=True)
class Contrast:
    """One method compared with all others, task by task.

    Attributes:
        method: label of the method.
        others: labels of the others, in the order of the file.
        tasks: for each task its label, the differences to all others, and the difference to the best other method. A
            difference is None if there is none.
    """

    method: str
    others: tuple[str, ...]
    tasks: tuple[tuple[str, tuple[Difference | None, ...], Difference | None], ...]

    @property
    def title(self) -> str:
        """What the table shows."""
        return f"{self.method} minus the others, paired by seed: points, mean ± standard error"

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return ["", *self.others, "best other method"]

    @property
    def rows(self) -> list[list[str]]:
        """One row per task."""
        return [
            [task, *("" if d is None else str(d) for d in each), "" if best is None else f"{best}: {best.other}"]
            for task, each, best in self.tasks
        ]

    @property
    def behind(self) -> str:
        """All cases in which the method is behind another one that is not a bound, in words."""
        found = [(task, d) for task, each, _ in self.tasks for d in each if d is not None and not d.bound]
        lost = [f"{task}, {d.other} ({d})" for task, d in found if d.mean < 0]
        return f"Behind in {len(lost)} of {len(found)}{': ' if lost else ''}{'; '.join(lost)}."

    @property
    def table(self) -> Table:
        """The table for the terminal, with only the best other method."""
        title = f"{self.method} minus the best other method, paired by seed"
        made = Table(title=Text(title), title_justify="left", caption=Text(self.behind), caption_justify="left")
        for name in ("", "points, mean ± standard error", "other method"):
            made.add_column(name)
        for task, _, best in self.tasks:
            if best is not None:
                made.add_row(Text(task), Text(str(best)), Text(best.other))
        return made


def contrasts(experiment: Experiment, results: Sequence[CellResult]) -> tuple[Contrast, ...]:
    """Return the comparisons that the file asks for with `paired`, for what is finished."""
    made = (_contrast(experiment, results, method) for method in experiment.paired)
    return tuple(contrast for contrast in made if contrast.tasks)


def difference(ours: CellResult, other: CellResult, label: str, seeds: int) -> Difference | None:
    """Return ours minus the other's over the seeds that both have; None if there are none, or the data measured differ.

    Args:
        ours: finished runs of a cell.
        other: finished runs of another cell.
        label: label of the other method.
        seeds: number of seeds that a complete comparison has.
    """
    theirs = _by_seed(other)
    points = tuple(value - theirs[seed] for seed, value in _by_seed(ours).items() if seed in theirs)
    pooled = other.cell.plan is not None and other.cell.plan.method.traits.pools_data
    return (
        Difference(points, label, len(points) == seeds, pooled)
        if points and ours.cell.measured == other.cell.measured
        else None
    )


def _contrast(experiment: Experiment, results: Sequence[CellResult], method: str) -> Contrast:
    """Compare the method with every other that has been run, and with the best one that is not a form of it.

    The best other method is the one with the smallest difference.
    """
    by_task: dict[str, dict[str, CellResult]] = {}
    for result in (r for r in results if r.runs):
        task, name = _places(experiment, result)
        by_task.setdefault(task, {})[name] = result
    labels = experiment.rows if experiment.methods_in_rows else experiment.columns
    found = {name for here in by_task.values() if method in here for name in here}
    others = tuple(label for label in labels if label in found and label != method)
    tasks = []
    for task, here in by_task.items():
        if method not in here:
            continue
        each = {
            name: difference(here[method], here[name], name, len(experiment.seeds)) if name in here else None
            for name in others
        }
        kind = _kind(here[method])
        rivals = [d for name, d in each.items() if d is not None and not d.bound and _kind(here[name]) is not kind]
        best = min(rivals, key=lambda d: d.mean, default=None)
        if any(each.values()):
            tasks.append((task, tuple(each.values()), best))
    return Contrast(method, others, tuple(tasks))


def _places(experiment: Experiment, result: CellResult) -> tuple[str, str]:
    """Return task and method of a cell."""
    cell = result.cell
    return (cell.column, cell.row) if experiment.methods_in_rows else (cell.row, cell.column)


def _kind(result: CellResult) -> type[Method] | None:
    return type(result.cell.plan.method) if result.cell.plan else None


def _by_seed(result: CellResult) -> dict[int, float]:
    return {run.config["seed"]: value for run, value in zip(result.runs, result.values, strict=True)}
