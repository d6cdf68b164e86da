"""Results of sweeps next to the printed values, as tables in Markdown."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import mean
from textwrap import fill

from ekiden.core.base.errors import UserError, counted
from ekiden.lab.tables.experiment import PAPER, Experiment
from ekiden.lab.tables.sweep import Sweep, failures
from ekiden.lab.tables.verdicts import (
    CellResult,
    Comparison,
    Contrast,
    as_printed,
    collect,
    contrasts,
    names,
    obstacle,
    ours,
)
from ekiden.runs.summary import duration, metric_of, size

_TITLES = ("row", "column", "ours", "seeds", "sent", "passes")
_COMPARED = ("printed", "difference", "t (limit)", "verdict")


@dataclass(frozen=True)
class Line:
    """A cell that has been run, as text. The attributes are the columns of the table, from left to
    right.
    """

    row: str
    column: str
    ours: str
    seeds: str
    sent: str
    passes: str
    printed: str = "-"
    difference: str = ""
    t: str = ""
    verdict: str = "not printed"


def judgement(compared: Comparison, reason: str) -> dict[str, str]:
    """Return the columns of a line that compare our value with the printed one."""
    beside = {"printed": as_printed(compared.printed), "difference": f"{compared.difference:+.2f}"}
    if reason:
        return beside | {"verdict": f"not comparable: {reason}"}
    t = "" if compared.t is None else f"{compared.t:+.2f} ({compared.limit:.2f})"
    return beside | {"t": t, "verdict": compared.verdict}


def table(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a table, without the comparison if nothing was printed."""
    titles = [*_TITLES]
    if any(line.printed != "-" for line in lines):
        titles += _COMPARED
    rows = [table_row(astuple(line)[: len(titles)]) for line in lines]
    return [table_row(titles), "|---" * len(titles) + "|", *rows]


def runs_line(experiment: Experiment) -> list[str]:
    """Return the line that says how many runs the printed values are means of, if that is known."""
    known = next((cell.published.runs for cell in experiment.cells if cell.published), None)
    return [f"Printed values are means of {counted(known, 'run')}.", ""] if known else []


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
    experiment, results = sweep.experiment, collect(sweep, more=more)
    places = {run.folder.name for run in sweep.runs()}
    for one in more:
        if other := next(
            (r for r in one.runs() if r.folder.name not in places and r.finished), None
        ):
            raise UserError(
                f"{sweep.folder} has no cell for {other.folder}: name {one.folder} first"
            )
    done = [r for r in results if r.runs]
    source = f"[{experiment.source}]({experiment.link})" if experiment.link else experiment.source
    lines = [f"## {experiment.title}", ""]
    lines += [f"Printed: {source}.", ""] if source else []
    lines += [f"    {sweep.command}", ""]
    lines += [_budget(sweep), ""]
    if experiment.note:
        note = fill(experiment.note, 118, break_on_hyphens=False)
        lines += [re.sub("^#", r"\\#", note, flags=re.MULTILINE), ""]
    if done:
        lines += [*runs_line(experiment), *table([_line(r, sweep) for r in done])]
        lines += [
            "",
            f"{len(done)} of {len(results)} cells, {sum(len(r.runs) for r in done)} "
            f"runs{_origins(done)}; "
            f"{_environment(done)}.",
        ]
    else:
        lines.append("No run is finished.")
    notes: dict[str, list[str]] = {}
    for result in done:
        if result.cell.note:
            notes.setdefault(result.cell.note, []).append(result.cell.label)
    came = {(result.cell.label, run.recipe["seed"]) for result in results for run in result.runs}
    failed = [
        f"- {run.cell.label}, seed {run.seed} failed: {why}"
        for one in (sweep, *more)
        for run, why in failures(one)
        if (run.cell.label, run.seed) not in came
    ]
    left_out = [f"- {line}" for result in results for line in result.left_out]
    noted = [f"- {', '.join(labels)}: {note}" for note, labels in notes.items()]
    if noted or failed or left_out:
        lines += ["", *noted, *dict.fromkeys(failed), *left_out]
    lines += _intervals(done, experiment)
    for contrast in contrasts(experiment, results):
        lines += ["", *_contrast(contrast)]
    return "\n".join([*lines, ""])


def _intervals(results: Sequence[CellResult], experiment: Experiment) -> list[str]:
    """Return a table of 95 % intervals of the metric, where runs have them."""
    ends: dict[str, dict[str, str]] = {}
    metrics = {result.cell.metric for result in results}
    for result in results:
        name, figures = result.cell.metric, [run.last.get("figures", {}) for run in result.runs]
        if (
            result.cell.plan
            and not result.cell.plan.tune
            and all(name in f.get("intervals", {}) for f in figures)
        ):
            each = [(f["values"][name], *f["intervals"][name]) for f in figures]
            scale = metric_of(result.runs[0], name).scale
            value, low, high = (scale * mean(numbers) for numbers in zip(*each, strict=True))
            row, column = names(result.cell, experiment)
            ends.setdefault(row, {})[column] = f"{value:.2f} ({low:.2f} to {high:.2f})"
    if not ends:
        return []
    columns = list(dict.fromkeys(column for row in ends.values() for column in row))
    rows = [
        table_row([row, *(found.get(column, "") for column in columns)])
        for row, found in ends.items()
    ]
    title = "**From counts of silos, with 95 % intervals over test samples; means over the seeds**"
    remark = (
        ["", "A C-index from counts compares samples of one silo only."]
        if "c_index" in metrics
        else []
    )
    return [
        "",
        title,
        "",
        table_row(["", *columns]),
        "|---" * (len(columns) + 1) + "|",
        *rows,
        *remark,
    ]


def _contrast(contrast: Contrast) -> list[str]:
    return [
        f"**{contrast.title}**",
        "",
        table_row(contrast.header),
        "|---" * len(contrast.header) + "|",
        *map(table_row, contrast.rows),
        "",
        fill(contrast.behind, 118, break_on_hyphens=False),
    ]


def _budget(sweep: Sweep) -> str:
    experiment = sweep.experiment
    if experiment.budget == PAPER:
        return "Budget: nothing scaled."
    scaled = sorted({str(s) for cell in experiment.cells for s in cell.scaled})
    seeds = f"{len(experiment.seeds)} of {experiment.all_seeds} seeds"
    return f"Budget {experiment.budget}: {', '.join([*scaled, seeds])}."


def _line(result: CellResult, sweep: Sweep) -> Line:
    seeds = ", ".join(str(run.recipe["seed"]) for run in result.runs)
    last = [run.last for run in result.runs]
    sent, passes = (
        mean(row["bytes"] for row in last),
        mean(row["forward"] + 2 * row["backward"] for row in last),
    )
    line = Line(
        *names(result.cell, sweep.experiment),
        ours(result),
        seeds,
        size(sent),
        f"{passes / 1e6:,.3g}",
    )
    if result.comparison is None:
        return line
    return replace(line, **judgement(result.comparison, obstacle(result.cell, sweep.experiment)))


def _origins(results: Sequence[CellResult]) -> str:
    """Say how many of the runs were made for other experiments."""
    origins = Counter(
        of for r in results for run in r.runs if (of := run.config.get("sweep", {}).get("of"))
    )
    return (
        f", {', '.join(f'{n} of them from {of}' for of, n in sorted(origins.items()))}"
        if origins
        else ""
    )


def _environment(results: Sequence[CellResult]) -> str:
    """Say on what machine and with what versions they were run, and how long that took."""
    runs = [run for result in results for run in result.runs]
    versions = set()
    for run in runs:
        given = run.environment  # empty if it could not be read
        device = (
            given.get("gpu") or "CPU" if run.config["hardware"].get("device") != "cpu" else "CPU"
        )
        versions.add(
            f"Ekiden {run.config.get('ekiden', 'unknown')}, PyTorch "
            f"{given.get('torch') or 'unknown'}, {device}"
        )
    return f"{'; '.join(sorted(versions))}; {duration(sum(run.seconds for run in runs))} of computing in all"
