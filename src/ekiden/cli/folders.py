"""The commands that read run folders: `ekiden show`, `log` and `compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ekiden.cli.console import console, print_json, say
from ekiden.core.base.checks import Alias, Positional
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import is_held
from ekiden.lab import drawing
from ekiden.lab.tables.sweep import refuse_records, summaries
from ekiden.runs import summary, tracking
from ekiden.runs.clock import devices_of
from ekiden.runs.tracking import follow


@dataclass(frozen=True)
class ShowOptions:
    """Show what a run folder holds: what was run, every step, what moved."""

    run: Positional[Path]
    """run folder"""
    devices: str = ""
    """also show how long it would have taken on these devices: equal, hospitals, phones, or a TOML
    file; see docs/time.md"""
    json: bool = False
    """print JSON, an object: `folder`, `method`, `data`, `seed`, `settings` (those that differ
    from the defaults), `clients` (numbers of training, validation and test samples),
    `finished`, `step`, `steps`, `metric` and its `value` after the last step, `bytes` moved,
    `forward` and `backward` (samples through a network), `seconds`, `metrics` (the rows of
    metrics.jsonl); of a regression `coefficients`; with --devices `simulated`, with `seconds`
    at the end of each step, and the share `computing`, null if the method counts no passes"""


@dataclass(frozen=True)
class LogOptions:
    """Print a line for each step of a run: what was measured, what moved."""

    run: Positional[Path]
    """run folder"""
    follow: Annotated[bool, Alias("-f")] = False
    """wait for steps to come, until the run ends or stops"""
    json: bool = False
    """print JSON: one line for each step, the row of metrics.jsonl; with -f until the run ends"""


@dataclass(frozen=True)
class CompareOptions:
    """Show runs side by side; those that differ only in the seed as mean ± standard deviation."""

    runs: Positional[tuple[Path, ...]]
    """run folders, sweep folders, folders that hold them, and files that `ekiden sweep --records`
    made"""
    devices: str = ""
    """also show how long they would have taken on these devices: equal, hospitals, phones, or a
    TOML file; see docs/time.md"""
    json: bool = False
    """print JSON: a list with an object for all runs that differ only in the seed: `method`,
    `data`, finished `seeds`, number `unfinished`, `metric`, whether `higher` is better,
    `values`, `mean`, `std`, means of `bytes`, `forward`, `backward` and `seconds`, number that
    `diverged`, `folders`; with --devices means of `simulated` and `computing`"""
    latex: bool = False
    """print a LaTeX table, for booktabs"""


def show(options: ShowOptions) -> None:
    """`ekiden show RUN`."""
    refuse_records(options.run)
    devices = devices_of(options.devices)
    if options.json:
        return print_json(summary.as_record(summary.summarise(options.run), devices))
    for number, part in enumerate(drawing.shown(options.run, devices)):
        console.print(part, style="" if number else "bold", highlight=False)


def log(options: LogOptions) -> None:
    """`ekiden log RUN [-f]`."""
    refuse_records(options.run)
    run = summary.summarise(options.run)
    for row in follow(options.run, wait=options.follow):
        if options.json:
            print_json(row, one_line=True)
            continue
        metric = summary.metric_named(run.config, str(row.get("metric", "accuracy")))
        value = tracking.measured(metric, row)
        loss = f"loss {row['loss']:.4g}" if "loss" in row else ""
        parts = [
            f"step {row['step']} of {run.config['steps']}",
            value,
            loss,
            f"{summary.size(row['bytes'])} moved",
        ]
        say(", ".join(filter(None, parts)))
    run = summary.summarise(options.run)
    if not run.finished and not options.json:
        state = summary.going_on(run)
        if is_held(options.run / "lock"):
            state = "a process works on it"
        say(f"not finished: {state}")


def compare(options: CompareOptions) -> None:
    """`ekiden compare RUN...`."""
    devices = devices_of(options.devices)
    runs = summaries(options.runs)
    if not runs:
        raise UserError(
            f"no run in {', '.join(map(str, options.runs))}: give other folders, or the file of "
            "--records"
        )
    if options.json:
        return print_json(summary.compared(runs, devices))
    table = drawing.comparison(runs, devices)
    if options.latex:
        return print(drawing.latex(table))
    console.print(table)
