"""The ledger of reproduction: results of sweeps next to the printed values, as a Markdown page."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from textwrap import fill

from ekiden.base.errors import UserError
from ekiden.data import describe
from ekiden.runs.summary import duration, size
from ekiden.tables import ledger_tables
from ekiden.tables.experiment import PAPER, Experiment, read
from ekiden.tables.ledger_tables import Line
from ekiden.tables.paired import Contrast, contrasts
from ekiden.tables.sweep import Sweep, failures
from ekiden.tables.verdicts import CONSISTENT, CellResult, collect, names, obstacle, ours

_TITLE = "# Results\n\nMade by `ekiden results`; do not edit."
_HEAD = f"""{_TITLE} Every number of ours is from finished runs: mean ± standard deviation over the
seeds, in %. Printed values are from the papers.

- **t** is the difference from the printed value in standard errors of the two means, √(s₁²/n₁ + s₂²/n₂), with Welch's
  limit in brackets: if both had the same mean, |t| would be above it in 5 % of the cases. If a spread or a number of
  runs is not printed, we assume that it equals ours; this leaves one estimate and a wider limit.
- **Consistent** means that |t| is at most the limit, "above" and "below" that it is larger. With three seeds the limit
  is wide: "consistent" then says only that these runs show no difference. *By single runs* is the verdict of earlier
  pages: "within 2 std" if the difference is at most 2√(s₁² + s₂²), with 0 for a spread that is not printed. If the
  runs of a section are not available, it keeps what was judged from them. Where a printed value has changed since, the
  rounded values are judged; a line says so if these do not decide. A value at a smaller budget, or with other
  settings, is not compared.
- *Sent* are all bytes that left a client or the server. *Passes* are the samples that went forward through a network
  plus twice those that went backward, in millions. Both are for one run, a mean over the seeds. The time of
  computing counts only attempts that finished their steps.
- The command above a table makes all of it; with `--only "ROW/COLUMN"` it makes one cell.
- Paired differences are over the seeds that both have, ± s/√n. A number in brackets says how many these are if some
  are missing. The best other method is the one with the smallest difference among those that are not a form of the
  same method and do not pool the data.
"""


def page(sweeps: Sequence[Sweep], old: str = "") -> str:
    """Return the ledger of these sweeps.

    Args:
        sweeps: in their order; several sweeps of one command make one section.
        old: an older ledger. Its sections of other sweeps keep the values of their runs and are judged again; sections
            of these sweeps are replaced.
    """
    if old and not old.startswith(_TITLE):
        raise UserError("the file to write exists and is not a ledger: choose another one by --write")
    before, *parts = re.split(r"^## ", old, flags=re.MULTILINE)
    # The command that makes a section names the experiment file and the budget, and so the sweep.
    kept = {_command(part): f"## {part.rstrip()}\n" for part in parts}
    alike: dict[str, list[Sweep]] = {}
    for sweep in sweeps:
        alike.setdefault(sweep.command, []).append(sweep)
    tables = {command: _experiment(command) for command in kept} | {c: s[0].experiment for c, s in alike.items()}
    sections = {command: ledger_tables.judged_again(text, tables[command]) for command, text in kept.items()}
    sections |= {command: section(*found) for command, found in alike.items()}
    data = [name for command, text in sections.items() for name in _data(text, tables[command])]
    return "\n".join([_HEAD, *_changes(sections.values()), *describe.paragraph(data, before), *sections.values()])


def _command(part: str) -> str:
    """Return the command in a section."""
    found = re.search(r"^    (ekiden sweep .*)$", part, flags=re.MULTILINE)
    return found[1] if found else part


def _experiment(command: str) -> Experiment | None:
    """Return the current content of a command's experiment file; None if it is gone or no longer fits the command."""
    words = shlex.split(command) if command.startswith("ekiden sweep ") else []
    path = Path(words[2]) if len(words) > 2 else None
    if path is None or not path.is_file():
        return None
    try:
        return read(path, words[words.index("--budget") + 1] if "--budget" in words else PAPER)
    except UserError:
        return None


def _data(text: str, experiment: Experiment | None) -> list[str]:
    """Return the names of the data sets behind a section."""
    if experiment is None:
        return []
    found = (ledger_tables.cell(line, experiment) for line in ledger_tables.lines(text))
    return [cell.plan.data for cell in found if cell and cell.plan]


def _changes(sections: Iterable[str]) -> list[str]:
    """Say how many verdicts differ from those by single runs, and how many would differ at two standard errors."""
    lines = [line for text in sections for line in ledger_tables.lines(text) if line.compared]
    if not lines:
        return []
    changes = Counter(line.change for line in lines if line.change)
    which = f" ({', '.join(f'{n} {change}' for change, n in changes.items())}), named below their tables"
    far = sum(line.verdict == CONSISTENT and abs(float(line.t.split()[0])) > 2 for line in lines)
    total = (
        f"Of {len(lines)} compared values {changes.total()} have another verdict than by single runs"
        f"{which if changes else ''}. {far} consistent ones are more than two standard errors from the printed value: "
        "a limit that ignores how few the seeds are would call them above or below."
    )
    return [fill(total, 118, break_on_hyphens=False), ""]


def section(sweep: Sweep, *more: Sweep) -> str:
    """Return the section of one sweep, which may have several folders or files of records."""
    experiment, results = sweep.experiment, collect(sweep, more=more)
    places = {run.folder.name for run in sweep.runs()}
    for one in more:
        if other := next((r for r in one.runs() if r.folder.name not in places and r.finished), None):
            raise UserError(f"{sweep.folder} has no cell for {other.folder}: name {one.folder} first")
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
        lines += [*ledger_tables.runs(experiment), *ledger_tables.table([_line(r, sweep) for r in done])]
        lines += [
            "",
            f"{len(done)} of {len(results)} cells, {sum(len(r.runs) for r in done)} runs{_origins(done)}; "
            f"{_environment(done)}.",
        ]
    else:
        lines.append("No run is finished.")
    notes: dict[str, list[str]] = {}
    for result in done:
        if result.cell.note:
            notes.setdefault(result.cell.note, []).append(result.cell.label)
    counted = {(result.cell.label, run.config["seed"]) for result in results for run in result.runs}
    failed = [
        f"- {run.cell.label}, seed {run.seed} failed: {why}"
        for one in (sweep, *more)
        for run, why in failures(one)
        if (run.cell.label, run.seed) not in counted
    ]
    left_out = [f"- {line}" for result in results for line in result.left_out]
    noted = [f"- {', '.join(labels)}: {note}" for note, labels in notes.items()]
    if noted or failed or left_out:
        lines += ["", *noted, *dict.fromkeys(failed), *left_out]
    for contrast in contrasts(experiment, results):
        lines += ["", *_contrast(contrast)]
    return "\n".join([*lines, ""])


def _contrast(contrast: Contrast) -> list[str]:
    return [
        f"**{contrast.title}**",
        "",
        ledger_tables.row(contrast.header),
        "|---" * len(contrast.header) + "|",
        *map(ledger_tables.row, contrast.rows),
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
    seeds = ", ".join(str(run.config["seed"]) for run in result.runs)
    last = [run.last for run in result.runs]
    sent, passes = mean(row["bytes"] for row in last), mean(row["forward"] + 2 * row["backward"] for row in last)
    line = Line(*names(result.cell, sweep.experiment), ours(result), seeds, size(sent), f"{passes / 1e6:,.3g}")
    if result.comparison is None:
        return line
    return replace(line, **ledger_tables.judgement(result.comparison, obstacle(result.cell, sweep.experiment)))


def _origins(results: Sequence[CellResult]) -> str:
    """Say how many of the runs were made for other experiments."""
    origins = Counter(of for r in results for run in r.runs if (of := run.config.get("sweep", {}).get("of")))
    return f", of which {', '.join(f'{n} are those of {of}' for of, n in sorted(origins.items()))}" if origins else ""


def _environment(results: Sequence[CellResult]) -> str:
    """Say on what machine and with what versions they were run, and how long that took."""
    runs = [run for result in results for run in result.runs]
    versions = set()
    for run in runs:
        given = run.environment  # empty if it could not be read
        device = given.get("gpu") or "CPU" if run.config["hardware"].get("device") != "cpu" else "CPU"
        versions.add(
            f"Ekiden {run.config.get('ekiden', 'unknown')}, PyTorch {given.get('torch') or 'unknown'}, {device}"
        )
    return f"{'; '.join(sorted(versions))}; {duration(sum(run.seconds for run in runs))} of computing in all"
