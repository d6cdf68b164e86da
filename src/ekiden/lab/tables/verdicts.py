"""Results of a sweep next to the printed values, and next to each other: mean, spread, difference
and verdict.

Paired differences are one method minus another, seed by seed. A seed gives both the same data and
initial model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from statistics import mean, stdev
from typing import Any

from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from ekiden.core.engine.method import Method
from ekiden.lab.tables.experiment import METRICS, Cell, Experiment, Published
from ekiden.lab.tables.sweep import Sweep
from ekiden.runs.summary import Summary, headline, metric_of, value_of

LEVEL = 0.95  # two-sided


@dataclass(frozen=True)
class Comparison:
    """Our mean and the printed one, in per cent."""

    mean: float  # mean of our runs
    std: float | None  # sample standard deviation of our runs, None for a single run
    runs: int  # number of our runs
    printed: (
        Published  # the printed value. If its spread or number of runs is not known, ours is used.
    )

    @property
    def difference(self) -> float:
        """Ours minus theirs."""
        return self.mean - self.printed.mean

    @property
    def error(self) -> float | None:
        """Standard error of the difference of the means, √(s₁²/n₁ + s₂²/n₂); None if no spread is
        known.
        """
        return hypot(*parts) or None if (parts := self._errors) else None

    @property
    def t(self) -> float | None:
        """The difference in standard errors; None if no spread is known."""
        return None if self.error is None else self.difference / self.error

    @property
    def limit(self) -> float | None:
        """The limit of |t| in 95 % of cases if both have the same mean: the quantile of Student's
        distribution.

        Its degrees of freedom are those of Welch and Satterthwaite. If no spread is printed, ours
        is used for both. Then there are n₁ - 1 degrees, and t has exactly Student's distribution.
        """
        from scipy.special import stdtrit  # takes a while, and few need it

        if (errors := self._errors) is None or not self.error:
            return None
        counts = (self.runs, self.printed.runs or self.runs)
        if self.printed.std is None or counts[1] == 1:
            freedom = float(counts[0] - 1)
        else:
            freedom = self.error**4 / sum(
                e**4 / (n - 1) for e, n in zip(errors, counts, strict=True)
            )
        return float(stdtrit(freedom, (1 + LEVEL) / 2))

    @property
    def verdict(self) -> str:
        """The verdict: `consistent` if spreads explain the difference, else `above` or `below`."""
        t, limit = self.t, self.limit
        if t is None or limit is None:
            return f"no spread known: {'one seed' if self.std is None else 'its seeds agree'}"
        return "consistent" if abs(t) <= limit else "above" if self.difference > 0 else "below"

    @property
    def _errors(self) -> tuple[float, float] | None:
        """Standard errors of the two means."""
        if self.std is None:
            return None
        theirs = self.std if self.printed.std is None else self.printed.std
        return self.std / sqrt(self.runs), theirs / sqrt(self.printed.runs or self.runs)


@dataclass(frozen=True)
class CellResult:
    """The finished runs of a cell."""

    cell: Cell
    runs: tuple[Summary, ...]  # one for each seed that is done, in the order of the file's seeds
    left_out: tuple[str, ...] = ()  # why runs do not count, one line each

    @property
    def values(self) -> tuple[float, ...]:
        """The metric of each run; shares in per cent."""
        found = [
            (value_of(run, self.cell.metric), metric_of(run, self.cell.metric).scale)
            for run in self.runs
        ]
        return tuple(scale * value for value, scale in found if value is not None)

    @property
    def higher(self) -> bool:
        """Whether a higher value is better."""
        return not self.runs or metric_of(self.runs[0], self.cell.metric).higher

    @property
    def mean(self) -> float:
        """The mean over the seeds; there is at least one."""
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """The standard deviation over the seeds, None for a single one."""
        return stdev(self.values) if len(self.runs) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, None if nothing was printed or run."""
        return self.comparison.difference if self.comparison else None

    @property
    def comparison(self) -> Comparison | None:
        """The comparison with the printed value, None if nothing was printed or run."""
        printed = self.cell.published
        return (
            Comparison(self.mean, self.std, len(self.runs), printed)
            if self.runs and printed
            else None
        )


def as_rows(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return cells as plain values, for `--json`; shares in per cent, as papers print them."""
    return [
        {
            "row": one.cell.row,
            "column": one.cell.column,
            "method": one.cell.plan.recipe.method.title() if one.cell.plan else None,
            "metric": one.cell.metric,
            "printed": None if one.cell.published is None else one.cell.published.mean,
            "printed_std": None if one.cell.published is None else one.cell.published.std,
            "seeds": [run.config["recipe"]["seed"] for run in one.runs],
            "values": list(one.values),
            "mean": one.mean if one.values else None,
            "std": one.std if len(one.values) > 1 else None,
            "difference": one.difference if one.values else None,
            "skip": one.cell.skip,
            "left_out": list(one.left_out),
        }
        for one in results
    ]


def collect(
    sweep: Sweep, cells: Sequence[Cell] | None = None, more: Sequence[Sweep] = ()
) -> tuple[CellResult, ...]:
    """Return what is finished of a sweep, or of some of its cells, cell by cell.

    `more` are folders and records of the same sweep, for runs that the first lacks; folders count
    before records.
    """
    chosen = sweep.experiment.cells if cells is None else cells
    done: dict[str, list[Summary]] = {cell.slug: [] for cell in chosen}
    left_out: dict[str, list[str]] = {cell.slug: [] for cell in chosen}
    places = [replace(one, experiment=sweep.experiment).runs(chosen) for one in (sweep, *more)]
    for copies in zip(*places, strict=True):
        run, states = copies[0], [copy.state for copy in copies]
        counted = [
            found
            for state in states
            if (found := state.result) and not unmeasured(found, run.cell.metric)
        ]
        if counted:
            done[run.cell.slug].append(min(counted, key=lambda found: found.recorded))
            continue
        whys = [unmeasured(s.result, run.cell.metric) if s.result else s.why for s in states]
        left_out[run.cell.slug] += [
            f"{run.cell.label}, seed {run.seed} does not count: {why}"
            for why in dict.fromkeys(whys)
            if why
        ]
    return tuple(
        CellResult(cell, tuple(done[cell.slug]), tuple(left_out[cell.slug])) for cell in chosen
    )


def unmeasured(run: Summary, metric: str) -> str:
    """Say why a run has no value of a metric, and which metrics it has; empty if it has a value."""
    if value_of(run, metric) is not None:
        return ""
    known = ", ".join(m for m in METRICS if run.last.get(m) is not None)
    return f"{run.folder}: metric {metric!r} was not measured: write one of {known} in the experiment file"


def verdict(result: CellResult, experiment: Experiment) -> str:
    """Return the verdict of the comparison with the printed value, or why they cannot be
    compared.
    """
    compared = result.comparison
    if compared is None:
        return "not printed" if result.runs else "not run"
    reason = obstacle(result.cell, experiment)
    return f"not comparable: {reason}" if reason else compared.verdict


def obstacle(cell: Cell, experiment: Experiment) -> str:
    """Say why a value cannot be compared with the printed one; empty if it can."""
    scaled = (
        f"budget {experiment.budget} ({', '.join(map(str, cell.scaled))})" if cell.scaled else ""
    )
    tuning = "on validation data" if cell.plan and cell.plan.tune else ""
    return "; ".join(filter(None, (scaled, tuning, cell.differs, experiment.differs)))


def listing(experiment: Experiment, results: Sequence[CellResult]) -> RichTable:
    """Show a line for each cell. The best compared value is bold, the second underlined."""
    places = ranks(experiment, results)
    numbers = (Column(name, justify="right") for name in ("ours", "seeds", "printed", "difference"))
    made = RichTable(
        "row", "column", *numbers, title=Text(heading(experiment, results)), title_justify="left"
    )
    for r in results:
        value = _marked(ours(r), places.get(r.cell.slug)) if r.runs else Text("not run")
        difference = "" if r.difference is None else f"{r.difference:+.2f}"
        made.add_row(
            *map(Text, names(r.cell, experiment)),
            value,
            str(len(r.runs)),
            theirs(r.cell),
            difference,
        )
    return made


def heading(experiment: Experiment, results: Sequence[CellResult]) -> str:
    """Return the lines above the table: what it shows, and what a budget reduced."""
    scaled = sorted({str(s) for r in results for s in r.cell.scaled})
    shares = all(headline(run).share for r in results for run in r.runs)
    lines = [
        f"{experiment.title}: {'% as ' if shares else ''}mean ± std over seeds (printed, "
        "difference)"
    ]
    if experiment.budget != "paper":
        seeds = f"{len(experiment.seeds)} of {experiment.all_seeds} seeds"
        lines.append(f"budget {experiment.budget}: {', '.join([*scaled, seeds])}")
    return "\n".join(lines)


def ranks(experiment: Experiment, results: Sequence[CellResult]) -> dict[str, int]:
    """Return the rank, from 1, of every cell with a value in its column, or in its row if the
    columns are methods.

    Methods that pool the data are yardsticks and have no rank. What was measured on the clients'
    own test data, after training or after averaging, is ranked separately.
    """
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for result in results:
        if result.runs and not (
            result.cell.plan and result.cell.plan.recipe.method.traits.pools_data
        ):
            task = result.cell.column if experiment.methods_in_rows else result.cell.row
            groups.setdefault((task, result.cell.measured), []).append(result)
    return {
        r.cell.slug: 1
        + sum((other.mean > r.mean) if r.higher else (other.mean < r.mean) for other in group)
        for group in groups.values()
        if len(group) > 1
        for r in group
    }


def names(cell: Cell, experiment: Experiment) -> tuple[str, str]:
    """Return a cell's row and column. The method among them is marked if its result is not one
    model.

    A label that has the mark already keeps one.
    """
    mark = " (N models)" if cell.plan and cell.plan.recipe.method.traits.joins_models else ""
    if experiment.methods_in_rows:
        return cell.row.removesuffix(mark) + mark, cell.column
    return cell.row, cell.column.removesuffix(mark) + mark


def ours(result: CellResult) -> str:
    """Return mean ± standard deviation, or only the mean for a single value."""
    return f"{result.mean:.2f}" if result.std is None else f"{result.mean:.2f} ± {result.std:.2f}"


def theirs(cell: Cell) -> str:
    """Return the printed value, or "-" if there is none."""
    return as_printed(cell.published) if cell.published else "-"


def as_printed(value: Published) -> str:
    """Return mean ± standard deviation, or only the mean if no deviation is printed."""
    return " ± ".join(_digits(v) for v in (value.mean, value.std) if v is not None)


def _digits(value: float) -> str:
    """Return a number with two digits after the point, or with those that were printed."""
    return f"{value:.2f}" if round(value, 2) == value else f"{value:g}"


def _marked(value: str, place: int | None) -> Text:
    """Show the best in bold, the second underlined."""
    return Text(value, style={1: "bold", 2: "underline"}.get(place or 0, ""))


@dataclass(frozen=True)
class Difference:
    """The difference between two cells."""

    points: tuple[
        float, ...
    ]  # differences in points of per cent, one for each seed that both have; at least one
    other: str  # label of the method that is subtracted
    whole: bool  # whether no seed is missing
    bound: bool  # whether the other method pools the data. Then it is a bound and not a competitor.

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
    """One method compared with all others, task by task."""

    method: str  # label of the method
    others: tuple[str, ...]  # labels of the others, in the order of the file
    # for each task its label, the differences to all others, and the difference to the best other
    # method. A difference
    # is None if there is none.
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
            [
                task,
                *("" if d is None else str(d) for d in each),
                "" if best is None else f"{best}: {best.other}",
            ]
            for task, each, best in self.tasks
        ]

    @property
    def behind(self) -> str:
        """All cases in which the method is behind another one that is not a bound, in words."""
        found = [
            (task, d) for task, each, _ in self.tasks for d in each if d is not None and not d.bound
        ]
        lost = [f"{task}, {d.other} ({d})" for task, d in found if d.mean < 0]
        return f"Behind in {len(lost)} of {len(found)}{': ' if lost else ''}{'; '.join(lost)}."

    @property
    def table(self) -> RichTable:
        """The table for the terminal, with only the best other method."""
        title = f"{self.method} minus the best other method, paired by seed"
        made = RichTable(
            title=Text(title),
            title_justify="left",
            caption=Text(self.behind),
            caption_justify="left",
        )
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
    """Return ours minus the other's over the seeds of both; None if there are none, or the data
    measured differ.
    """
    theirs = _by_seed(other)
    points = tuple(value - theirs[seed] for seed, value in _by_seed(ours).items() if seed in theirs)
    pooled = other.cell.plan is not None and other.cell.plan.recipe.method.traits.pools_data
    alike = points and ours.cell.measured == other.cell.measured
    return Difference(points, label, len(points) == seeds, pooled) if alike else None


def _contrast(experiment: Experiment, results: Sequence[CellResult], method: str) -> Contrast:
    """Compare the method with every other that has been run, and with the best one that is not a
    form of it.

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
            name: difference(here[method], here[name], name, len(experiment.seeds))
            if name in here
            else None
            for name in others
        }
        kind = _kind(here[method])
        rivals = [
            d
            for name, d in each.items()
            if d is not None and not d.bound and _kind(here[name]) is not kind
        ]
        best = min(rivals, key=lambda d: d.mean, default=None)
        if any(each.values()):
            tasks.append((task, tuple(each.values()), best))
    return Contrast(method, others, tuple(tasks))


def _places(experiment: Experiment, result: CellResult) -> tuple[str, str]:
    """Return task and method of a cell."""
    cell = result.cell
    return (cell.column, cell.row) if experiment.methods_in_rows else (cell.row, cell.column)


def _kind(result: CellResult) -> type[Method] | None:
    return type(result.cell.plan.recipe.method) if result.cell.plan else None


def _by_seed(result: CellResult) -> dict[int, float]:
    return {
        run.recipe["seed"]: value for run, value in zip(result.runs, result.values, strict=True)
    }
