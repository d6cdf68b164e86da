"""Results of sweeps next to the printed values, as tables in Markdown."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from textwrap import fill

from ekiden.core.base.errors import UserError, counted
from ekiden.lab.tables.experiment import Experiment
from ekiden.lab.tables.sweep import Sweep, cell_of
from ekiden.lab.tables.verdicts import (
    CellResult,
    Contrast,
    as_printed,
    collect,
    contrasts,
    names,
    obstacle,
    runs_of,
    scaled_down,
    verdict,
)
from ekiden.runs.summary import duration, metric_of, size, spread

_TITLES = ("row", "column", "ours", "seeds", "sent", "passes")
_COMPARED = ("printed", "difference", "t (limit)", "verdict")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [table_row(titles), "|---" * len(titles) + "|", *map(table_row, rows)]


def runs_line(experiment: Experiment) -> list[str]:
    """Return the line that says how many runs the printed values are means of, if that is known."""
    for cell in experiment.cells:
        if cell.published and cell.published.runs:
            return [f"Printed values are means of {counted(cell.published.runs, 'run')}.", ""]
    return []


def table_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def page(sweeps: Sequence[Sweep]) -> str:
    """Return a section for each command of these sweeps, in their order."""
    alike: dict[str, list[Sweep]] = {}
    for sweep in sweeps:
        alike.setdefault(sweep.command, []).append(sweep)
    return "\n".join(section(*found) for found in alike.values())


def section(sweep: Sweep, *more: Sweep) -> str:
    """Return the section of one sweep, which may have several folders or files of records."""
    experiment = sweep.experiment
    results = collect(sweep, more=more)
    places = {run.folder.name for run in sweep.runs()}
    for one in more:
        for run in one.runs():
            if run.folder.name not in places and run.finished:
                raise UserError(
                    f"{sweep.folder} has no cell for {run.folder}: name {one.folder} first"
                )
    done = [result for result in results if result.runs]
    lines = [f"## {experiment.title}", ""]
    source = experiment.source
    if experiment.link:
        source = f"[{source}]({experiment.link})"
    if source:
        lines += [f"Printed: {source}.", ""]
    budget = "Budget: nothing scaled."
    if scaled := scaled_down(experiment):
        budget = f"Budget {experiment.budget}: {scaled}."
    lines += [f"    {sweep.command}", "", budget, ""]
    if experiment.note:
        note = fill(experiment.note, 118, break_on_hyphens=False)
        lines += [re.sub("^#", r"\\#", note, flags=re.MULTILINE), ""]
    if done:
        titles = [*_TITLES]
        if any(result.cell.published for result in done):
            titles += _COMPARED
        rows = [line(result, experiment)[: len(titles)] for result in done]
        runs = len(runs_of(done))
        lines += [*runs_line(experiment), *table(titles, rows), ""]
        lines.append(
            f"{len(done)} of {len(results)} cells, {runs} runs{_origins(done)}; "
            f"{_environment(done)}."
        )
    else:
        lines.append("No run is finished.")
    if remarks := _remarks(results):
        lines += ["", *remarks]
    lines += _intervals(done, experiment)
    for contrast in contrasts(experiment, results):
        lines += ["", *_contrast(contrast)]
    return "\n".join([*lines, ""])


def _remarks(results: Sequence[CellResult]) -> list[str]:
    """Return a line for each note of a cell that was run, and each run that does not count."""
    notes = defaultdict[str, list[str]](list)
    left_out: list[str] = []
    for result in results:
        if result.runs and result.cell.note:
            notes[result.cell.note].append(result.cell.label)
        left_out += result.left_out
    lines = [f"- {', '.join(labels)}: {note}" for note, labels in notes.items()]
    return lines + list(map("- {}".format, left_out))


def _intervals(results: Sequence[CellResult], experiment: Experiment) -> list[str]:
    """Return a table of 95 % intervals of the metric, where runs have them."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    columns = dict[str, str]()
    for result in results:
        name = result.cell.metric
        each = []
        for run in result.runs:
            figures = run.last.get("figures", {})
            if name in figures.get("intervals", {}):
                each.append((figures["values"][name], *figures["intervals"][name]))
        tuned = result.cell.plan is not None and result.cell.plan.tune
        if not tuned and len(each) == len(result.runs):
            scale = metric_of(result.runs[0], name).scale
            value, low, high = (scale * mean(numbers) for numbers in zip(*each, strict=True))
            row, column = names(result.cell, experiment)
            found[row][column] = f"{value:.2f} ({low:.2f} to {high:.2f})"
            columns[column] = ""
    if not found:
        return []
    # a row lacks some columns
    rows = [[row, *(columns | cells).values()] for row, cells in found.items()]
    title = "**From counts of silos, with 95 % intervals over test samples; means over the seeds**"
    lines = ["", title, "", *table(["", *columns], rows)]
    if any(result.cell.metric == "c_index" for result in results):
        lines += ["", "A C-index from counts compares samples of one silo only."]
    return lines


def _contrast(contrast: Contrast) -> list[str]:
    behind = fill(contrast.behind, 118, break_on_hyphens=False)
    return [f"**{contrast.title}**", "", *table(contrast.header, contrast.rows), "", behind]


def line(result: CellResult, experiment: Experiment) -> list[str]:
    """Return a cell that has been run, as the texts of the columns of the table."""
    seeds = []
    sent = []
    passes = []
    for run in result.runs:
        seeds.append(str(run.recipe["seed"]))
        sent.append(run.last["bytes"])
        passes.append(run.last["forward"] + 2 * run.last["backward"])
    cells = [*names(result.cell, experiment), spread(result.values), ", ".join(seeds)]
    cells += [size(mean(sent)), f"{mean(passes) / 1e6:,.3g}", as_printed(result.cell.published)]
    far = t = ""
    if compared := result.comparison:
        far = f"{compared.difference:+.2f}"
        if compared.t is not None and not obstacle(result.cell, experiment):
            t = f"{compared.t:+.2f} ({compared.limit:.2f})"
    return [*cells, far, t, verdict(result, experiment)]


def _origins(results: Sequence[CellResult]) -> str:
    """Say how many of the runs were made for other experiments."""
    made_for = (cell_of(run.config).get("of") for run in runs_of(results))
    origins = Counter(filter(None, made_for))
    return "".join(f", {n} of them from {of}" for of, n in sorted(origins.items()))


def _environment(results: Sequence[CellResult]) -> str:
    """Say on what machine and with what versions they were run, and how long that took."""
    versions = set()
    seconds = 0.0
    for run in runs_of(results):
        seconds += run.seconds
        device = "CPU"
        torch = run.environment.get("torch") or "unknown"
        if run.config["hardware"].get("device") != "cpu":
            device = run.environment.get("gpu") or device
        versions.add(f"Ekiden {run.config.get('ekiden', 'unknown')}, PyTorch {torch}, {device}")
    return f"{'; '.join(sorted(versions))}; {duration(seconds)} of computing in all"
