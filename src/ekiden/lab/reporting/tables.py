"""Tables of a report: results as papers print them, what the accuracy cost, and the command and
machine of each run.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import read_lines
from ekiden.core.engine.method import Method
from ekiden.core.training.private import spent_epsilon
from ekiden.lab.reporting.runs import Found, Group
from ekiden.lab.reporting.style import Value
from ekiden.lab.tables.experiment import Experiment, Published
from ekiden.lab.tables.verdicts import CellResult, Comparison, Contrast, contrasts, ranks, verdict
from ekiden.runs.plan import Plan, stored
from ekiden.runs.summary import Summary, duration, size, spread

METRICS = {
    "client_mean": "on own test data",
    "client_mean_trained": "on own test data, after training",
    "global_accuracy": "of the global model",
}
_HOW = "Accuracy in per cent on the union of all clients' test data, mean ± standard deviation over the seeds."
_HEADLINE = (
    "Headline metric (accuracy unless another is named) on the union of all clients' test data, "
    "shares in per cent, "
    "mean ± standard deviation over the seeds."
)
_ERROR = (
    "Published: the printed value, and ours minus it in standard errors √(s₁²/n₁ + s₂²/n₂): s₁ "
    "over our n₁ seeds; a "
    "printed spread or number of runs that is not known is assumed to equal ours; in points with "
    "one seed."
)
_PAIRED = (
    "Differences over the seeds that both have, ± s/√n; in brackets the number of seeds if some "
    "are missing. "
    "Best other method: the one with the smallest difference that is not a form of this one and "
    "does not pool the data."
)


@dataclass(frozen=True)
class Entry:
    """One cell of a result table, in per cent."""

    mean: float  # mean over the seeds
    std: float | None  # sample standard deviation; None for one seed
    seeds: int  # number of seeds
    rank: int = 0  # 1 for the best of the compared methods, 2 for the second, otherwise 0
    metric: str = "accuracy"  # what was measured
    published: Published | None = None  # the printed value
    verdict: str = ""  # result of the comparison with the printed value

    @property
    def difference(self) -> float | None:
        """Ours minus theirs in standard errors; None if that is not known or 0."""
        return (
            Comparison(self.mean, self.std, self.seeds, self.published).t
            if self.published
            else None
        )

    @property
    def unit(self) -> str:
        """What the metric is, or what it was measured on, if it is not the accuracy on the union of
        the test data.
        """
        return METRICS.get(self.metric, "" if self.metric == "accuracy" else self.metric)

    @property
    def beside(self) -> str:
        """The printed value and our difference from it."""
        if self.published is None:
            return ""
        spread = "" if self.published.std is None else f" ± {self.published.std:.2f}"
        points = self.mean - self.published.mean
        far = (
            f"{points:+.2f} points"
            if self.difference is None
            else f"{self.difference:+.1f} standard errors"
        )
        return f"published {self.published.mean:.2f}{spread}; {far}"


@dataclass(frozen=True)
class ResultTable:
    """Rows and columns of a published table, or methods by data sets."""

    name: str  # name of its file
    title: str  # the heading
    columns: Sequence[str]  # names of the columns
    rows: Sequence[
        tuple[str, Sequence[Entry | str]]
    ]  # name, and one entry per column; a text if there is no value
    notes: Sequence[str]  # how to read the table and what to know about it, one paragraph each
    link: str = ""  # address of the publication

    def csv(self) -> tuple[list[str], list[list[Value]]]:
        """Return one line per entry."""
        header = [
            "row",
            "column",
            "mean",
            "std",
            "seeds",
            "metric",
            "rank",
            "published",
            "published_std",
        ]
        lines: list[list[Value]] = []
        for name, entries in self.rows:
            for column, e in zip(self.columns, entries, strict=True):
                if isinstance(e, Entry):
                    printed = (e.published.mean, e.published.std) if e.published else (None, None)
                    numbers = (e.mean, e.std, e.seeds, e.metric, e.rank or None)
                    lines.append([name, column, *numbers, *printed, e.difference, e.verdict])
        return [*header, "difference_in_standard_errors", "verdict"], lines


@dataclass(frozen=True)
class PlainTable:
    """Any other table; the first column is the name of the row."""

    name: str  # name of its file
    title: str  # the heading
    note: str  # what the columns mean
    header: Sequence[str]  # names of the columns
    rows: Sequence[Sequence[str]]  # the texts that are shown
    numbers: Sequence[
        str
    ] = ()  # names of the numbers in the CSV file, if these differ from the header
    data: Sequence[Sequence[Value]] = ()  # these numbers
    texts: frozenset[int] = frozenset()  # columns of text, which are left-aligned and may wrap


def results(found: Found) -> list[ResultTable | PlainTable]:
    """Return a table for each sweep, with its paired differences, and one table for runs that
    belong to no sweep.
    """
    tables: list[ResultTable | PlainTable] = []
    for number, (sweep, done) in enumerate(found.sweeps, 1):
        tables.append(_published(number, sweep.experiment, done))
        compared = contrasts(sweep.experiment, done)
        tables += [
            _paired(f"paired-{number}-{i}", contrast) for i, contrast in enumerate(compared, 1)
        ]
    return tables + ([_loose(len(found.sweeps) + 1, found.loose)] if found.loose else [])


def costs(setting: str, number: int, groups: Sequence[Group]) -> PlainTable:
    """Return a table of what the methods reach in one setting and what it costs."""
    metric = groups[0].shown
    header = ["method", "seeds", f"{metric.name}{metric.unit}", f"own test data{metric.unit}"]
    header += [f"worst client{metric.unit}", "moved", "forward", "backward"]
    rows, data = [], []
    for group in groups:
        shares = [
            group.values(key, group.shown.scale)
            for key in (metric.name, "client_mean", "client_worst")
        ]
        work = [mean(group.values(key)) for key in ("bytes", "forward", "backward")]
        seconds = mean(run.seconds for run in group.runs)
        shown = [spread(values) or "–" for values in shares]
        passes = [f"{w:,.0f}" for w in work[1:]]
        rows.append(
            [group.name, str(len(group.runs)), *shown, size(work[0]), *passes, duration(seconds)]
        )
        means = [mean(values) if values else None for values in shares]
        data.append([group.name, len(group.runs), *means, *work, seconds])
    numbers = [
        "method",
        "seeds",
        metric.name,
        "client_mean",
        "client_worst",
        "bytes",
        "forward",
        "backward",
        "seconds",
    ]
    return PlainTable(f"cost-{number}", setting, "", [*header, "time"], rows, numbers, data)


def _published(number: int, experiment: Experiment, done: Sequence[CellResult]) -> ResultTable:
    """Return our values next to the printed ones."""
    places = ranks(experiment, done)
    entries: dict[tuple[str, str], Entry | str] = {}
    for result in done:
        cell = result.cell
        place = places.get(cell.slug, 0)
        entries[cell.row, cell.column] = (
            Entry(
                result.mean,
                result.std,
                len(result.runs),
                place if place <= 2 else 0,
                cell.metric,
                cell.published,
                verdict(result, experiment).split(":")[0] if cell.published else "",
            )
            if result.runs
            else ("cannot be run" if cell.skip else "not run")
            + (f"; published {cell.published.mean:.2f}" if cell.published else "")
        )
    rows = [
        (row, [entries.get((row, column), "") for column in experiment.columns])
        for row in experiment.rows
    ]
    scaled = sorted({str(s) for result in done for s in result.cell.scaled})
    why = sorted({result.cell.differs for result in done if result.runs and result.cell.differs})
    best = f"Best of a {'column' if experiment.methods_in_rows else 'row'} bold, second underlined."
    reading = [_HOW, best, _ERROR if any(result.cell.published for result in done) else ""]
    about = [
        f"Source: {experiment.source}." if experiment.source else "",
        f"Scaled down (budget {experiment.budget}): {', '.join(scaled)}; {len(experiment.seeds)} "
        "of "
        f"{experiment.all_seeds} seeds."
        if scaled or len(experiment.seeds) < experiment.all_seeds
        else "",
        f"Not comparable with print: {'; '.join(filter(None, [experiment.differs, *why]))}."
        if experiment.differs or why
        else "",
        experiment.note,
    ]
    notes = [" ".join(" ".join(lines).split()) for lines in (reading, about)]
    return ResultTable(
        f"results-{number}", experiment.title, experiment.columns, rows, notes, experiment.link
    )


def _paired(name: str, contrast: Contrast) -> PlainTable:
    """Return the differences between one method and the others."""
    data: list[list[Value]] = [
        [task, d.other, d.mean, d.error, len(d.points)]
        for task, each, _ in contrast.tasks
        for d in each
        if d is not None
    ]
    note = f"{_PAIRED} {contrast.behind}"
    numbers = ["task", "other", "mean", "standard_error", "seeds"]
    return PlainTable(name, contrast.title, note, contrast.header, contrast.rows, numbers, data)


def _loose(number: int, groups: Sequence[Group]) -> ResultTable:
    """Return methods by data, in the order in which they first appear."""
    names, columns = (
        list(dict.fromkeys(getattr(g, part) for g in groups)) for part in ("name", "setting")
    )
    entries: dict[tuple[str, str], Entry] = {}
    for column in columns:
        inside = [g for g in groups if g.setting == column]
        metric = inside[0].shown
        alike = [g for g in inside if g.shown.name == metric.name]
        order = sorted(
            {mean(g.values(metric.name)) for g in alike if not g.yardstick}, reverse=metric.higher
        )[:2]
        for group in inside:
            values = group.values(group.shown.name, group.shown.scale)
            ours = mean(group.values(group.shown.name))
            rank = (
                order.index(ours) + 1
                if ours in order and not group.yardstick and len(inside) > 1
                else 0
            )
            std = stdev(values) if len(values) > 1 else None
            entries[group.name, column] = Entry(
                mean(values), std, len(values), rank, group.shown.name
            )
    rows = [(name, [entries.get((name, column), "–") for column in columns]) for name in names]
    how = _HOW if all(g.shown.name == "accuracy" for g in groups) else _HEADLINE
    note = f"{how} Best of a column bold, second underlined; methods that pool the data are not ranked."
    known = {
        g.setting: g.values("majority", 100)
        for g in groups
        if g.shown.name == "accuracy" and g.values("majority")
    }
    if known:
        guesses = ", ".join(f"{setting} {mean(shares):.2f}" for setting, shares in known.items())
        note += f" Always giving the commonest class: {guesses}."
    return ResultTable(f"results-{number}", "Runs" if number > 1 else "", columns, rows, [note])


def commands(found: Found) -> PlainTable:
    """Return one row per run: the command that repeats it, and the command that was typed."""
    rows = []
    for group in found.groups:
        for run in group.runs:
            typed = dict.fromkeys(
                _typed(row.get("command")) for row in _lines(run.folder / "attempts.jsonl")
            )
            cells = [
                group.name,
                str(run.recipe["seed"]),
                str(run.folder),
                _repeat(run),
                "; ".join(typed),
            ]
            rows.append([*cells, duration(run.seconds)])
    note = "The command that repeats a run alone, bit for bit on the same kind of machine; and what was typed."
    header = ["method", "seed", "folder", "repeat it by", "typed", "time"]
    return PlainTable("commands", "Commands", note, header, rows, texts=frozenset({2, 3, 4}))


def promises(found: Found) -> list[PlainTable]:
    """Return one row per run with differential privacy; no table if there is none."""
    rows = []
    for group in found.groups:
        for run in group.runs:
            if told := run.config.get("privacy"):
                noise = max(one["noise"] for one in told["clients"].values())
                bound = [
                    spent_epsilon(told["epsilon"]),
                    f"{told['delta']:g}",
                    f"{told['clip']:g}",
                    f"{noise:.3g}",
                ]
                rows.append(
                    [group.name, str(run.recipe["seed"]), *bound, str(told.get("honest", 1))]
                )
    note = (
        "Differential privacy of each training sample, for each silo and the whole run: ε at δ, "
        "the norm to which "
        "samples are clipped, the largest noise of a silo in this norm, and the number of silos "
        "that must add theirs."
    )
    header = ["method", "seed", "ε", "δ", "clip", "noise", "honest silos"]
    return [PlainTable("privacy", "Differential privacy", note, header, rows)] if rows else []


def environments(found: Found) -> PlainTable:
    """Return one row for each kind of machine and software, with the runs made there."""
    made: dict[tuple[str, ...], list[str]] = {}
    for group in found.groups:
        for run in group.runs:
            made.setdefault(_environment(run), []).append(
                f"{group.name} (seed {run.recipe['seed']})"
            )
    rows = [[*environment, ", ".join(runs)] for environment, runs in made.items()]
    header = ["Ekiden", "Python", "torch", "platform", "cores", "GPU", "runs"]
    note = "What the runs were made on."
    return PlainTable(
        "environments", "Environments", note, header, rows, texts=frozenset({3, 5, 6})
    )


def command(plan: Plan[Method]) -> str:
    """Return `ekiden run ...` with every flag that differs from its default."""
    return shlex.join(["ekiden", "run", plan.recipe.method.title(), *_flags(plan)])


def _flags(settings: Any) -> Iterator[str]:
    """Yield the flags of what differs from its default, also in parts of settings."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from _flags(value)
        elif value != _default(field):
            yield from _flag(field.name.replace("_", "-"), value)


def _repeat(run: Summary) -> str:
    try:
        return command(stored(run.folder))
    except UserError:
        return "between machines" if run.config.get("on") else "from Python, with data of its own"


def _typed(argv: Any) -> str:
    """Return the command that was typed, without the path of the installed program."""
    if not isinstance(argv, list) or not argv:
        return ""
    program, *rest = map(str, argv)
    name = Path(program).name
    return shlex.join(["ekiden" if name == "cli.py" else name, *rest])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, or nothing if it is damaged."""
    try:
        return [row for row in read_lines(file) if isinstance(row, dict)]
    except UserError:
        return []


def _environment(run: Summary) -> tuple[str, ...]:
    values = (run.environment.get(key) for key in ("python", "torch", "platform", "cores", "gpu"))
    return (
        str(run.config.get("ekiden", "")),
        *("–" if value is None else str(value) for value in values),
    )


def _default(field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (tuple, list)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
