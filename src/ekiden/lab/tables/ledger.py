"""The ledger of reproduction: results of sweeps next to the printed values, as a Markdown page."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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

_TITLES = (
    *("row", "column", "ours", "seeds", "sent", "passes", "printed", "difference"),
    *("t (limit)", "verdict"),
)
_TITLE = "# Results\n\nMade by `ekiden results`; do not edit."
_HEAD = f"""{_TITLE} Every number of ours is from finished runs: mean ± standard deviation over the
seeds, in %. Printed values are from the papers.

- **t** is the difference from the printed value in standard errors of the two means, √(s₁²/n₁ + s₂²/n₂), with Welch's
  limit in brackets: if both had the same mean, |t| would be above it in 5 % of the cases. If a spread or a number of
  runs is not printed, we assume that it equals ours; this leaves one estimate and a wider limit.
- **Consistent** means that |t| is at most the limit, "above" and "below" that it is larger. With three seeds the limit
  is wide: "consistent" then says only that these runs show no difference. Values at a smaller budget, or with other
  settings, are not compared. A section whose runs are not available stays as it was written.
- *Sent* are all bytes that left a client or the server. *Passes* are the samples that went forward through a network
  plus twice those that went backward, in millions. Both are for one run, a mean over the seeds. The time of
  computing counts only attempts that finished their steps.
- The command above a table makes all of it; with `--only "ROW/COLUMN"` it makes one cell.
- Paired differences are over the seeds that both have, ± s/√n. If some are missing, a number in brackets says how many
  there are. The best other method is the one with the smallest difference, except forms of the same method and methods
  that pool the data.
- [Data sets of our runs](experiments.md#data-sets-of-our-runs) says what was done to their images.
"""


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
    """Return the lines of a table."""
    rows = [table_row([getattr(line, f.name) for f in fields(line)]) for line in lines]
    return [table_row(_TITLES), "|---" * len(_TITLES) + "|", *rows]


def runs_line(experiment: Experiment) -> list[str]:
    """Return the line that says how many runs the printed values are means of, if that is known."""
    known = next((cell.published.runs for cell in experiment.cells if cell.published), None)
    return [f"Printed values are means of {counted(known, 'run')}.", ""] if known else []


def table_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def page(sweeps: Sequence[Sweep], old: str = "") -> str:
    """Return the ledger of these sweeps, in their order; several sweeps of one command make one
    section.

    Sections of other sweeps in an older ledger stay as they are.
    """
    if old and not old.startswith(_TITLE):
        raise UserError(
            "the file to write exists and is not a ledger: choose another one by --write"
        )
    _, *parts = re.split(r"^## ", old, flags=re.MULTILINE)
    # The command that makes a section names the experiment file and the budget, and so the sweep.
    sections = {_command(part): f"## {part.rstrip()}\n" for part in parts}
    alike: dict[str, list[Sweep]] = {}
    for sweep in sweeps:
        alike.setdefault(sweep.command, []).append(sweep)
    sections |= {command: section(*found) for command, found in alike.items()}
    return "\n".join([_HEAD, *sections.values()])


def _command(part: str) -> str:
    """Return the command in a section."""
    found = re.search(r"^    (ekiden sweep .*)$", part, flags=re.MULTILINE)
    return found[1] if found else part


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
