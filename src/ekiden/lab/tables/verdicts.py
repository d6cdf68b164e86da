"""Results of a sweep next to the printed values, and next to each other: mean, spread, difference
and verdict.

Paired differences are one method minus another, seed by seed. A seed gives both the same data and
initial model.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from statistics import mean
from typing import Any, NamedTuple

from rich.table import Table as RichTable
from rich.text import Text

from ekiden.lab.drawing import table_of
from ekiden.lab.tables.experiment import METRICS, PAPER, Cell, Experiment, Published
from ekiden.lab.tables.sweep import Sweep
from ekiden.runs.summary import Summary, deviation, headline, metric_of, spread, value_of

# two-sided
LEVEL = 0.95


@dataclass(frozen=True)
class Comparison:
    """Our mean and the printed one, in per cent."""

    mean: float  # mean of our runs
    std: float | None  # sample standard deviation of our runs, None if there is none
    runs: int  # number of our runs
    printed: Published  # if its spread or number of runs is not known, ours is used

    @property
    def difference(self) -> float:
        """Ours minus theirs."""
        return self.mean - self.printed.mean

    @property
    def error(self) -> float | None:
        """Standard error of the difference of the means, √(s₁²/n₁ + s₂²/n₂); None if no spread is
        known.
        """
        if self._errors is None:
            return None
        return hypot(*self._errors) or None

    @property
    def t(self) -> float | None:
        """The difference in standard errors; None if no spread is known."""
        if self.error is None:
            return None
        return self.difference / self.error

    @property
    def limit(self) -> float | None:
        """The limit of |t| in 95 % of cases if both have the same mean: the quantile of Student's
        distribution.

        Its degrees of freedom are those of Welch and Satterthwaite. If no spread is printed, ours
        is used for both. Then there are n₁ - 1 degrees, and t has exactly Student's distribution.
        """
        # takes a while, and few need it
        from scipy.special import stdtrit

        if self._errors is None or not self.error:
            return None
        ours, theirs = self._errors
        printed = self.printed.runs or self.runs
        freedom = float(self.runs - 1)
        if self.printed.std is not None and printed > 1:
            # divided first: fourth powers of errors leave the range of floats
            spread = (ours / self.error) ** 4 / (self.runs - 1)
            spread += (theirs / self.error) ** 4 / (printed - 1)
            freedom = 1 / spread
        return float(stdtrit(freedom, (1 + LEVEL) / 2))

    @property
    def verdict(self) -> str:
        """The verdict: `consistent` if spreads explain the difference, else `above` or `below`."""
        t = self.t
        limit = self.limit
        if self.runs == 1:
            return "no spread known: one seed"
        if self.std is None:
            return "no spread known: a value is not finite"
        if t is None or limit is None:
            return "no spread known: its seeds agree"
        if abs(t) <= limit:
            return "consistent"
        return "above" if t > 0 else "below"

    @property
    def beside(self) -> str:
        """The printed value, and how far ours is from it."""
        far = f"{self.difference:+.2f} points"
        if self.t is not None:
            far = f"{self.t:+.1f} standard errors"
        return f"published {as_printed(self.printed)}; {far}"

    @property
    def _errors(self) -> tuple[float, float] | None:
        """Standard errors of the two means."""
        if self.std is None:
            return None
        theirs = self.printed.std
        if theirs is None:
            theirs = self.std
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
        found = []
        for run in self.runs:
            value = value_of(run, self.cell.metric)
            if value is not None:
                found.append(metric_of(run, self.cell.metric).scale * value)
        return tuple(found)

    @property
    def higher(self) -> bool:
        """Whether a higher value is better; there is at least one."""
        return metric_of(self.runs[0], self.cell.metric).higher

    @property
    def mean(self) -> float:
        """The mean over the seeds; there is at least one."""
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """The standard deviation over the seeds, see `deviation`."""
        return deviation(self.values)

    @property
    def comparison(self) -> Comparison | None:
        """The comparison with the printed value, None if nothing was printed or run."""
        if not self.cell.published or not self.runs:
            return None
        return Comparison(self.mean, self.std, len(self.runs), self.cell.published)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; shares in per cent, as papers print them."""
        cell = self.cell
        compared = self.comparison
        average = None
        printed = cell.published
        if self.runs:
            average = self.mean
        return {
            "row": cell.row,
            "column": cell.column,
            "method": cell.plan and cell.plan.recipe.method.title(),
            "metric": cell.metric,
            "printed": printed and printed.mean,
            "printed_std": printed and printed.std,
            "seeds": [run.config["recipe"]["seed"] for run in self.runs],
            "values": list(self.values),
            "mean": average,
            "std": self.std,
            "difference": compared and compared.difference,
            "skip": cell.skip,
            "left_out": list(self.left_out),
        }


def collect(
    sweep: Sweep, cells: Sequence[Cell] | None = None, more: Sequence[Sweep] = ()
) -> tuple[CellResult, ...]:
    """Return what is finished of a sweep, or of some of its cells, cell by cell.

    `more` are folders and records of the same sweep, for runs that the first lacks; folders count
    before records.
    """
    chosen = cells or sweep.experiment.cells
    done = defaultdict[str, list[Summary]](list)
    left_out = defaultdict[str, list[str]](list)
    places = [replace(one, experiment=sweep.experiment).runs(chosen) for one in (sweep, *more)]
    for copies in zip(*places, strict=True):
        cell = copies[0].cell
        seed = copies[0].seed
        counted = []
        reasons = []
        for copy in copies:
            state = copy.state
            why = state.why
            if state.result:
                why = unmeasured(state.result, cell.metric)
            if why:
                reasons.append(f"{cell.label}, seed {seed} does not count: {why}")
            elif state.result:
                counted.append(state.result)
        if counted:
            done[cell.slug].append(min(counted, key=lambda found: found.recorded))
        else:
            left_out[cell.slug] += dict.fromkeys(reasons)
    results = []
    for cell in chosen:
        results.append(CellResult(cell, tuple(done[cell.slug]), tuple(left_out[cell.slug])))
    return tuple(results)


def as_rows(sweep: Sweep, cells: Sequence[Cell] | None = None) -> list[dict[str, Any]]:
    """Return what is finished of a sweep, or of some of its cells, as plain values, for
    `--json`.
    """
    return list(map(CellResult.to_json, collect(sweep, cells)))


def runs_of(results: Sequence[CellResult]) -> list[Summary]:
    """Return the runs of all cells, cell by cell."""
    return [run for result in results for run in result.runs]


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
    if not result.runs:
        return "not run"
    if compared is None:
        return "not printed"
    if reason := obstacle(result.cell, experiment):
        return f"not comparable: {reason}"
    return compared.verdict


def obstacle(cell: Cell, experiment: Experiment) -> str:
    """Say why a value cannot be compared with the printed one; empty if it can."""
    reasons = [cell.differs, experiment.differs]
    if cell.plan and cell.plan.tune:
        reasons.insert(0, "on validation data")
    if cell.scaled:
        reasons.insert(0, f"budget {experiment.budget} ({', '.join(map(str, cell.scaled))})")
    return "; ".join(filter(None, reasons))


def scaled_down(experiment: Experiment) -> str:
    """Say what a budget reduced; empty for the whole experiment."""
    if experiment.budget == PAPER:
        return ""
    scaled = set[str]()
    for cell in experiment.cells:
        scaled.update(map(str, cell.scaled))
    return ", ".join([*sorted(scaled), f"{len(experiment.seeds)} of {experiment.all_seeds} seeds"])


def listing(experiment: Experiment, results: Sequence[CellResult]) -> RichTable:
    """Show a line for each cell. The best compared value is bold, the second underlined."""
    places = ranks(experiment, results)
    numbers = ("ours", "seeds", "printed", "difference")
    made = table_of("row", "column", *numbers, right=numbers)
    made.title = Text(heading(experiment, results))
    made.title_justify = "left"
    for r in results:
        value = Text("not run")
        if r.runs:
            value = Text(spread(r.values), style=_STYLES.get(places.get(r.cell.slug, 0), ""))
        far = ""
        if compared := r.comparison:
            far = f"{compared.difference:+.2f}"
        row, column = map(Text, names(r.cell, experiment))
        made.add_row(row, column, value, str(len(r.runs)), as_printed(r.cell.published), far)
    return made


# by rank
_STYLES = {1: "bold", 2: "underline"}


def heading(experiment: Experiment, results: Sequence[CellResult]) -> str:
    """Return the lines above the table: what it shows, and what a budget reduced."""
    what = "mean ± std over seeds (printed, difference)"
    if all(headline(run).share for run in runs_of(results)):
        what = f"% as {what}"
    line = f"{experiment.title}: {what}"
    if scaled := scaled_down(experiment):
        line += f"\nbudget {experiment.budget}: {scaled}"
    return line


def ranks(experiment: Experiment, results: Sequence[CellResult]) -> dict[str, int]:
    """Return the rank, from 1, of every cell with a value in its column, or in its row if the
    columns are methods.

    Methods that pool the data are yardsticks and have no rank. What was measured on the clients'
    own test data, after training or after averaging, is ranked separately.
    """
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for result in results:
        if result.runs and not result.cell.method.traits.pools_data:
            task, _ = _places(experiment, result)
            score = result.mean
            if not result.higher:
                score = -score
            groups[task, result.cell.measured][result.cell.slug] = score
    found = {}
    for scores in groups.values():
        # alone, a method has no rank
        if len(scores) > 1:
            for slug, score in scores.items():
                found[slug] = 1 + sum(other > score for other in scores.values())
    return found


def names(cell: Cell, experiment: Experiment) -> tuple[str, str]:
    """Return a cell's row and column. The method among them is marked if its result is not one
    model.

    A label that has the mark already keeps one.
    """
    mark = ""
    if cell.plan and cell.plan.recipe.method.traits.joins_models:
        mark = " (N models)"
    if experiment.methods_in_rows:
        return cell.row.removesuffix(mark) + mark, cell.column
    return cell.row, cell.column.removesuffix(mark) + mark


def as_printed(value: Published | None) -> str:
    """Return mean ± standard deviation, or only the mean if no deviation is printed; "-" for
    nothing.
    """
    if value is None:
        return "-"
    if value.std is None:
        return _digits(value.mean)
    return f"{_digits(value.mean)} ± {_digits(value.std)}"


def _digits(value: float) -> str:
    """Return a number with two digits after the point, or with those that were printed."""
    if round(value, 2) == value:
        return f"{value:.2f}"
    return f"{value:g}"


@dataclass(frozen=True)
class Difference:
    """The difference between two cells."""

    # differences in points of per cent, one for each seed that both have; at least one
    points: tuple[float, ...]
    other: str  # label of the method that is subtracted
    whole: bool  # whether no seed is missing
    bound: bool  # whether the other method pools the data. Then it is a bound and not a competitor.
    higher: bool = True  # whether a higher value is better

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return mean(self.points)

    @property
    def error(self) -> float | None:
        """Standard error of the mean, s/√n; None without a deviation."""
        std = deviation(self.points)
        if std is None:
            return None
        return std / sqrt(len(self.points))

    @property
    def gain(self) -> float:
        """The mean, above 0 where the method is better."""
        if self.higher:
            return self.mean
        return -self.mean

    def __str__(self) -> str:
        """Return mean ± standard error, and the number of seeds if some are missing."""
        text = f"{self.mean:+.2f}"
        if self.error is not None:
            text += f" ± {self.error:.2f}"
        if not self.whole:
            text += f" ({len(self.points)})"
        return text


class ComparedTask(NamedTuple):
    """One method compared with the others on a task; None where there is no difference."""

    label: str
    each: tuple[Difference | None, ...]  # to the others
    best: Difference | None  # to the best of them that is neither a form of it nor a bound


@dataclass(frozen=True)
class Contrast:
    """One method compared with all others, task by task."""

    method: str  # label of the method
    others: tuple[str, ...]  # labels of the others, in the order of the file
    tasks: tuple[ComparedTask, ...]

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
        found = []
        for task in self.tasks:
            row = [task.label, *(str(d or "") for d in task.each), ""]
            if task.best:
                row[-1] = f"{task.best}: {task.best.other}"
            found.append(row)
        return found

    @property
    def behind(self) -> str:
        """All cases in which the method is behind another one that is not a bound, in words."""
        lost = []
        compared = 0
        for task in self.tasks:
            for gap in task.each:
                if gap and not gap.bound:
                    compared += 1
                    if gap.gain < 0:
                        lost.append(f"{task.label}, {gap.other} ({gap})")
        count = f"Behind in {len(lost)} of {compared}"
        if lost:
            count += f": {'; '.join(lost)}"
        return f"{count}."

    @property
    def table(self) -> RichTable:
        """The table for the terminal, with only the best other method."""
        made = RichTable("", "points, mean ± standard error", "other method")
        made.title = Text(f"{self.method} minus the best other method, paired by seed")
        made.caption = Text(self.behind)
        made.title_justify = made.caption_justify = "left"
        for task in self.tasks:
            if task.best:
                made.add_row(Text(task.label), Text(str(task.best)), Text(task.best.other))
        return made


def contrasts(experiment: Experiment, results: Sequence[CellResult]) -> tuple[Contrast, ...]:
    """Return the comparisons that the file asks for with `paired`, for what is finished."""
    made = []
    for method in experiment.paired:
        contrast = _contrast(experiment, results, method)
        if contrast.tasks:
            made.append(contrast)
    return tuple(made)


def difference(ours: CellResult, other: CellResult, label: str, seeds: int) -> Difference | None:
    """Return ours minus the other's over the seeds of both; None if there are none, or the data
    measured differ.
    """
    if ours.cell.measured != other.cell.measured:
        return None
    theirs = _by_seed(other)
    points = []
    for seed, value in _by_seed(ours).items():
        if seed in theirs:
            points.append(value - theirs[seed])
    if not points:
        return None
    bound = other.cell.method.traits.pools_data
    return Difference(tuple(points), label, len(points) == seeds, bound, ours.higher)


def _contrast(experiment: Experiment, results: Sequence[CellResult], method: str) -> Contrast:
    """Compare the method with every other that has been run.

    The best other method is the one with the smallest gain.
    """
    by_task: dict[str, dict[str, CellResult]] = defaultdict(dict)
    for result in results:
        if result.runs:
            task, name = _places(experiment, result)
            by_task[task][name] = result
    found = set[str]()
    for here in by_task.values():
        if method in here:
            found |= here.keys() - {method}
    labels = experiment.columns
    if experiment.methods_in_rows:
        labels = experiment.rows
    others = tuple(filter(found.__contains__, labels))
    tasks = []
    for task, here in by_task.items():
        mine = here.get(method)
        if mine is None:
            continue
        each: list[Difference | None] = []
        rivals = []
        for name in others:
            gap = None
            if name in here:
                gap = difference(mine, here[name], name, len(experiment.seeds))
                form = type(here[name].cell.method)
                if gap and not gap.bound and form is not type(mine.cell.method):
                    rivals.append(gap)
            each.append(gap)
        if any(each):
            best = min(rivals, key=lambda d: d.gain, default=None)
            tasks.append(ComparedTask(task, tuple(each), best))
    return Contrast(method, others, tuple(tasks))


def _places(experiment: Experiment, result: CellResult) -> tuple[str, str]:
    """Return task and method of a cell."""
    places = result.cell.row, result.cell.column
    if experiment.methods_in_rows:
        return places[::-1]
    return places


def _by_seed(result: CellResult) -> dict[int, float]:
    seeds = [run.recipe["seed"] for run in result.runs]
    return dict(zip(seeds, result.values, strict=True))
