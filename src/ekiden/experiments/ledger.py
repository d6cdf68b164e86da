"""The ledger of reproduction: what finished runs of sweeps gave, beside the printed values, as a Markdown page."""

import re
from collections.abc import Sequence
from statistics import mean
from textwrap import fill

from ekiden.errors import UserError
from ekiden.experiments.budget import PAPER
from ekiden.experiments.paired import Contrast, contrasts
from ekiden.experiments.results import Result, collect, ours, theirs, verdict
from ekiden.experiments.summary import duration, size
from ekiden.experiments.sweep import Sweep, failures

_TITLE = "# Results\n\nMade by `ekiden results`; do not edit."
_HEAD = f"""{_TITLE} Every number of ours is from finished runs: mean ± standard deviation over the
seeds, in %. Printed values are from the papers. **Within 2 std**: the difference is at most twice √(ours² + theirs²) of
the standard deviations, as far as they are known. With three seeds that is a coarse test: "above" and "below" say no
more than that the values differ. A value at a smaller budget, or with other settings, is not compared. *Sent* are all
bytes that left a client or the server, *passes* the samples that went forward through a network plus twice those that
went backward, in millions: both of one run, a mean over the seeds. Time of computing is that of the attempts that ended
their steps. The command above a table makes all of it, with `--only "ROW/COLUMN"` one cell. Paired differences are over
the seeds that both have, ± s/√n; a number in brackets says how many these are where some are missing. The best other
method is that of the smallest difference among those that are not a form of the same and do not pool the data.
"""


def page(sweeps: Sequence[Sweep], old: str = "") -> str:
    """The ledger of these sweeps.

    Args:
        sweeps: in their order.
        old: a ledger written before: its sections of other sweeps stay as they are, those of these are made anew in
            their places.

    Raises:
        UserError: `old` is no ledger.
    """
    if old and not old.startswith(_TITLE):
        raise UserError("the file to write is there and no ledger: name another one by --write")
    # The command that makes a section names the experiment file and the budget, and so the sweep.
    sections = {_command(part): f"## {part.rstrip()}\n" for part in re.split(r"^## ", old, flags=re.MULTILINE)[1:]}
    return "\n".join([_HEAD, *(sections | {sweep.command: section(sweep) for sweep in sweeps}).values()])


def _command(part: str) -> str:
    """The command in a section."""
    found = re.search(r"^    (ekiden sweep .*)$", part, flags=re.MULTILINE)
    return found[1] if found else part


def section(sweep: Sweep) -> str:
    """What one sweep has to say."""
    experiment, results = sweep.experiment, collect(sweep)
    done = [r for r in results if r.runs]
    source = f"[{experiment.source}]({experiment.link})" if experiment.link else experiment.source
    lines = [f"## {experiment.title}", ""]
    lines += [f"Printed: {source}.", ""] if source else []
    lines += [f"    {sweep.command}", ""]
    lines += [_budget(sweep), ""]
    lines += [fill(experiment.note, 118), ""] if experiment.note else []
    if done:
        titles = ("row", "column", "ours", "seeds", "sent", "passes", "printed", "difference", "verdict")
        lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        lines += [_line(r, sweep) for r in done]
        lines += [
            "",
            f"{len(done)} of {len(results)} cells, {sum(len(r.runs) for r in done)} runs; {_environment(done)}.",
        ]
    else:
        lines.append("No run is finished.")
    notes: dict[str, list[str]] = {}
    for result in done:
        if result.cell.note:
            notes.setdefault(result.cell.note, []).append(result.cell.label)
    failed = [f"- {run.cell.label}, seed {run.seed} failed: {why}" for run, why in failures(sweep)]
    noted = [f"- {', '.join(labels)}: {note}" for note, labels in notes.items()]
    lines += ["", *noted, *failed] if noted or failed else []
    for contrast in contrasts(experiment, results):
        lines += ["", *_contrast(contrast)]
    return "\n".join([*lines, ""])


def _contrast(contrast: Contrast) -> list[str]:
    return [
        f"**{contrast.title}**",
        "",
        f"| {' | '.join(contrast.header)} |",
        "|---" * len(contrast.header) + "|",
        *(f"| {' | '.join(row)} |" for row in contrast.rows),
        "",
        fill(contrast.behind, 118),
    ]


def _budget(sweep: Sweep) -> str:
    experiment = sweep.experiment
    if experiment.budget == PAPER:
        return "Budget: nothing scaled."
    scaled = sorted({str(s) for cell in experiment.cells for s in cell.scaled})
    seeds = f"{len(experiment.seeds)} of {experiment.all_seeds} seeds"
    return f"Budget {experiment.budget}: {', '.join([*scaled, seeds])}."


def _line(result: Result, sweep: Sweep) -> str:
    difference = "" if result.difference is None else f"{result.difference:+.2f}"
    seeds = ", ".join(str(run.config["seed"]) for run in result.runs)
    last = [run.last for run in result.runs]
    sent, passes = mean(row["bytes"] for row in last), mean(row["forward"] + 2 * row["backward"] for row in last)
    cost = size(sent), f"{passes / 1e6:,.3g}"
    values = (result.cell.row, result.cell.column, ours(result), seeds, *cost, theirs(result.cell), difference)
    return f"| {' | '.join(values)} | {verdict(result, sweep.experiment)} |"


def _environment(results: Sequence[Result]) -> str:
    """On what they were run, and how long that took."""
    runs = [run for result in results for run in result.runs]
    versions = set()
    for run in runs:
        if not run.environment:
            raise UserError(f"cannot read {run.folder / 'environment.json'}: the run folder is damaged")
        device = run.environment["gpu"] or "CPU" if run.config["hardware"]["device"] != "cpu" else "CPU"
        versions.add(f"Ekiden {run.config['ekiden']}, PyTorch {run.environment['torch']}, {device}")
    return f"{'; '.join(sorted(versions))}; {duration(sum(run.seconds for run in runs))} of computing in all"
