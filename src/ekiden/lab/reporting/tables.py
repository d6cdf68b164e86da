"""Tables of a report: results as papers print them, what the accuracy cost, and the command and
machine of each run.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from statistics import mean
from typing import Any, NamedTuple

from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method
from ekiden.core.training.private.promise import spent_epsilon
from ekiden.lab.reporting.runs import Found, Group, by_setting
from ekiden.lab.reporting.style import Value
from ekiden.lab.tables.experiment import Experiment
from ekiden.lab.tables.verdicts import (
    CellResult,
    Contrast,
    contrasts,
    ranks,
    scaled_down,
    verdict,
)
from ekiden.runs.plan import Plan, stored
from ekiden.runs.summary import COUNTED, Summary, deviation, duration, size, spread

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
class PlainTable:
    """A table; the first column is the name of the row.

    Parts of a text after "; " are shown below each other.
    """

    name: str  # name of its file
    title: str  # the heading
    note: str  # what the columns mean; one paragraph a line
    header: Sequence[str]  # names of the columns
    rows: Sequence[Sequence[str]]  # the texts that are shown
    # names of the numbers in the CSV file, if these differ from the header, and these numbers
    numbers: Sequence[str] = ()
    data: Sequence[Sequence[Value]] = ()
    texts: frozenset[int] = frozenset()  # columns of text, which are left-aligned and may wrap
    # of cells, by row and column: "best" and "second" of the compared methods
    marks: Mapping[tuple[int, int], str] = field(default_factory=dict)
    link: str = ""  # address of the publication


class _Result(NamedTuple):
    """A cell of a table of results."""

    text: str
    rank: int = 0  # 1 for the best of the compared methods, 2 for the second
    numbers: Sequence[Value] = ()  # see `_RESULT`; none if there is no value


_RESULT = (
    "row",
    "column",
    "mean",
    "std",
    "seeds",
    "metric",
    "rank",
    "published",
    "published_std",
    "difference_in_standard_errors",
    "verdict",
)


def results(found: Found) -> list[PlainTable]:
    """Return a table for each sweep, with its paired differences, and one table for runs that
    belong to no sweep.
    """
    tables: list[PlainTable] = []
    for number, (sweep, done) in enumerate(found.sweeps, 1):
        tables.append(_published(number, sweep.experiment, done))
        for i, contrast in enumerate(contrasts(sweep.experiment, done), 1):
            tables.append(_paired(f"paired-{number}-{i}", contrast))
    if found.loose:
        tables.append(_loose(len(found.sweeps) + 1, found.loose))
    return tables


def _results(
    number: int,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], _Result],
    note: str,
    link: str = "",
) -> PlainTable:
    """Return a table of these cells, by row and column."""
    texts = []
    marks = {}
    for i, row in enumerate(rows):
        there = [cells.get((row, column), _Result("–")) for column in columns]
        texts.append([row, *(one.text for one in there)])
        for j, one in enumerate(there, 1):
            if one.rank:
                marks[i, j] = ("best", "second")[one.rank - 1]
    data = [[*place, *one.numbers] for place, one in cells.items() if one.numbers]
    header = ["", *columns]
    return PlainTable(
        f"results-{number}", title, note, header, texts, _RESULT, data, marks=marks, link=link
    )


def costs(setting: str, number: int, groups: Sequence[Group]) -> PlainTable:
    """Return a table of what the methods reach in one setting and what it costs."""
    metric = groups[0].shown
    header = ["method", "seeds", f"{metric.name}{metric.unit}", f"own test data{metric.unit}"]
    header += [f"worst client{metric.unit}", "moved", "forward", "backward"]
    rows = []
    data = []
    named = (metric.name, "client_mean", "client_worst")
    for group in groups:
        cells = [group.name, str(len(group.runs))]
        numbers: list[Value] = [group.name, len(group.runs)]
        for key in named:
            values = group.values(key, group.shown.scale)
            cells.append(spread(values) or "–")
            numbers.append(_mean(values))
        moved, forward, backward = (mean(group.values(key)) for key in COUNTED)
        seconds = mean(run.seconds for run in group.runs)
        cells += [size(moved), f"{forward:,.0f}", f"{backward:,.0f}", duration(seconds)]
        rows.append(cells)
        data.append([*numbers, moved, forward, backward, seconds])
    titles = ["method", "seeds", *named, *COUNTED, "seconds"]
    return PlainTable(f"cost-{number}", setting, "", [*header, "time"], rows, titles, data)


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    if not values:
        return None
    return mean(values)


def _published(number: int, experiment: Experiment, done: Sequence[CellResult]) -> PlainTable:
    """Return our values next to the printed ones."""
    places = ranks(experiment, done)
    cells = {}
    reasons = {experiment.differs}
    printed = False
    for result in done:
        rank = places.get(result.cell.slug, 0)
        # only the first two are marked
        if rank > 2:
            rank = 0
        cells[result.cell.row, result.cell.column] = _compared(result, rank, experiment)
        if result.runs:
            reasons.add(result.cell.differs)
        printed = printed or result.cell.published is not None
    compared = "row"
    if experiment.methods_in_rows:
        compared = "column"
    notes = [_HOW, f"Best of a {compared} bold, second underlined."]
    if printed:
        notes.append(_ERROR)
    about = []
    if experiment.source:
        about.append(f"Source: {experiment.source}.")
    if scaled := scaled_down(experiment):
        about.append(f"Scaled down (budget {experiment.budget}): {scaled}.")
    if why := "; ".join(sorted(filter(None, reasons))):
        about.append(f"Not comparable with print: {why}.")
    if experiment.note:
        about.append(experiment.note)
    note = " ".join(notes) + "\n" + " ".join(about)
    columns = experiment.columns
    link = experiment.link
    return _results(number, experiment.title, experiment.rows, columns, cells, note, link)


def _compared(result: CellResult, rank: int, experiment: Experiment) -> _Result:
    """Return what a cell of a sweep shows."""
    cell = result.cell
    printed = result.cell.published
    if not result.runs:
        text = "not run"
        if cell.skip:
            text = "cannot be run"
        if printed:
            text += f"; published {printed.mean:.2f}"
        return _Result(text)
    parts = [spread(result.values), _unit(cell.metric)]
    numbers = _numbers(result.values, cell.metric, rank)
    if compared := result.comparison:
        said = verdict(result, experiment).partition(":")[0]
        parts += [compared.beside, said]
        numbers += [compared.printed.mean, compared.printed.std, compared.t, said]
    return _Result("; ".join(filter(None, parts)), rank, numbers)


def _numbers(values: Sequence[float], metric: str, rank: int) -> list[Value]:
    """Return the numbers of a cell, see `_RESULT`, that come from its runs."""
    return [_mean(values), deviation(values), len(values), metric, rank or None]


def _unit(metric: str) -> str:
    """Return what a metric is, or what it was measured on, if it is not the accuracy on the union
    of the test data.
    """
    if metric == "accuracy":
        return ""
    return METRICS.get(metric, metric)


def _paired(name: str, contrast: Contrast) -> PlainTable:
    """Return the differences between one method and the others."""
    data: list[list[Value]] = []
    for task in contrast.tasks:
        for gap in filter(None, task.each):
            data.append([task.label, gap.other, gap.mean, gap.error, len(gap.points)])
    note = f"{_PAIRED} {contrast.behind}"
    numbers = ["task", "other", "mean", "standard_error", "seeds"]
    return PlainTable(name, contrast.title, note, contrast.header, contrast.rows, numbers, data)


def _loose(number: int, groups: Sequence[Group]) -> PlainTable:
    """Return methods by data, in the order in which they first appear."""
    settings = by_setting(groups)
    rows = dict[str, None]()
    cells = {}
    guesses = dict[str, float]()
    how = _HOW
    title = ""
    for setting, inside in settings.items():
        best = _best_two(inside)
        for group in inside:
            rows[group.name] = None
            metric = group.shown
            values = group.values(metric.name, metric.scale)
            text = "; ".join(filter(None, (spread(values), _unit(metric.name))))
            rank = best.get(group.name, 0)
            cells[group.name, setting] = _Result(text, rank, _numbers(values, metric.name, rank))
            if metric.name != "accuracy":
                how = _HEADLINE
            elif shares := group.values("majority", 100):
                guesses.setdefault(setting, mean(shares))
    note = f"{how} Best of a column bold, second underlined; methods that pool the data are not ranked."
    if guesses:
        told = [f"{setting} {guess:.2f}" for setting, guess in guesses.items()]
        note += f" Always giving the commonest class: {', '.join(told)}."
    if number > 1:
        title = "Runs"
    return _results(number, title, list(rows), list(settings), cells, note)


def _best_two(groups: Sequence[Group]) -> dict[str, int]:
    """Return the ranks of the best two methods by name; alone, one is not the best of anything."""
    metric = groups[0].shown
    scores = {}
    for group in groups:
        values = group.values(metric.name)
        if values and group.shown.name == metric.name and not group.yardstick:
            scores[group.name] = mean(values)
    order = sorted(set(scores.values()), reverse=metric.higher)[:2]
    if len(groups) == 1:
        order = []
    return {name: 1 + order.index(score) for name, score in scores.items() if score in order}


def commands(found: Found) -> PlainTable:
    """Return one row per run: the command that repeats it."""
    rows = []
    for group, run in found.runs:
        cells = [group.name, str(run.recipe["seed"]), str(run.folder), _repeat(run)]
        rows.append([*cells, duration(run.seconds)])
    note = "The command that repeats a run alone, bit for bit on the same kind of machine."
    header = ["method", "seed", "folder", "repeat it by", "time"]
    return PlainTable("commands", "Commands", note, header, rows, texts=frozenset({2, 3}))


def promises(found: Found) -> list[PlainTable]:
    """Return one row per run with differential privacy; no table if there is none."""
    rows = []
    for group, run in found.runs:
        if told := run.config.get("privacy"):
            noise = max(one["noise"] for one in told["clients"].values())
            bound = [spent_epsilon(told["epsilon"]), f"{told['delta']:g}", f"{told['clip']:g}"]
            honest = str(told.get("honest", 1))
            seed = str(run.recipe["seed"])
            rows.append([group.name, seed, *bound, f"{noise:.3g}", honest])
    if not rows:
        return []
    note = (
        "Differential privacy of each training sample, for each silo and the whole run: ε at δ, "
        "the norm to which "
        "samples are clipped, the largest noise of a silo in this norm, and the number of silos "
        "that must add theirs."
    )
    header = ["method", "seed", "ε", "δ", "clip", "noise", "honest silos"]
    return [PlainTable("privacy", "Differential privacy", note, header, rows)]


def environments(found: Found) -> PlainTable:
    """Return one row for each kind of machine and software, with the runs made there."""
    made: dict[tuple[str, ...], list[str]] = {}
    for group, run in found.runs:
        name = f"{group.name} (seed {run.recipe['seed']})"
        made.setdefault(_environment(run), []).append(name)
    rows = [[*environment, ", ".join(runs)] for environment, runs in made.items()]
    header = ["Ekiden", "Python", "torch", "platform", "cores", "GPU", "runs"]
    note = "What the runs were made on."
    texts = frozenset({3, 5, 6})
    return PlainTable("environments", "Environments", note, header, rows, texts=texts)


def command(plan: Plan[Method]) -> str:
    """Return `ekiden run ...` with every flag that differs from its default."""
    return shlex.join(["ekiden", "run", plan.recipe.method.title(), *_flags(plan)])


def _flags(settings: Any) -> Iterator[str]:
    """Yield the flags of what differs from its default, also in parts of settings."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            yield from _flags(value)
        elif value != _default(one):
            yield from _flag(one.name.replace("_", "-"), value)


def _repeat(run: Summary) -> str:
    try:
        return command(stored(run.folder))
    except UserError:
        if run.config.get("on"):
            return "between machines"
        return "from Python, with data of its own"


def _environment(run: Summary) -> tuple[str, ...]:
    found = [str(run.config.get("ekiden", ""))]
    for key in ("python", "torch", "platform", "cores", "gpu"):
        found.append(str(run.environment.get(key) or "–"))
    return tuple(found)


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is MISSING:
        return field.default
    return field.default_factory()


def _flag(name: str, value: Any) -> list[str]:
    if value is False:
        return [f"--no-{name}"]
    if value is True:
        return [f"--{name}"]
    if isinstance(value, (tuple, list)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
