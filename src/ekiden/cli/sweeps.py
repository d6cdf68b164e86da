"""The command line of many runs: `ekiden sweep`, `results` and `report`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.table import Table as RichTable
from rich.text import Text

from ekiden.cli.console import console, print_json, say, telling
from ekiden.core.base.checks import Alias, Checked, Count, CountOrZero, Positional, Positive
from ekiden.core.base.errors import UserError, counted, unknown
from ekiden.core.base.files import read_text
from ekiden.core.base.outside import require_extra
from ekiden.lab import launch
from ekiden.lab.launch import Board, RunEnd
from ekiden.lab.tables import ledger, sweep, verdicts
from ekiden.lab.tables.experiment import PAPER, Cell
from ekiden.lab.tables.sweep import Sweep, SweepRun
from ekiden.lab.tables.verdicts import contrasts
from ekiden.runs import tracking
from ekiden.runs.clock import devices_of
from ekiden.runs.summary import divergence, summarise


@dataclass(frozen=True)
class SweepOptions(Checked):
    """Run the table of an experiment file on all cores; the same command goes on after a kill or a
    failure.
    """

    file: Positional[Path]
    """experiment file, such as experiments/fedelmy-table7.toml"""
    budget: str = PAPER
    """how much training: paper, or a budget that the file defines, such as small"""
    only: tuple[str, ...] = ()
    """only these cells: ROW, COLUMN or ROW/COLUMN, each a label or a part of labels"""
    without: tuple[str, ...] = ()
    """all but these cells"""
    cores: Count | None = None
    """number of runs at a time; by default one for each core"""
    minutes: Positive | None = None
    """stop after this many minutes; the same command continues, also after the folder was moved"""
    device: str = ""
    """cpu, cuda, ... instead of the file's"""
    out: Path | None = None
    """sweep folder; by default runs/FILE, or runs/FILE-BUDGET"""
    records: Path | None = None
    """file that keeps the results of finished runs, OUT.jsonl; runs that are in it are not run
    again"""
    reuse: tuple[Path, ...] = ()
    """records or sweep folders of other experiments; their runs with the same settings count and
    are not run again"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics of each run as it goes on: tensorboard (files in the run
    folders), mlflow (where MLFLOW_TRACKING_URI says), wandb, trackio"""
    on: Literal["here", "slurm", "local-cluster"] = "here"
    """where the runs are executed: here, as jobs of Slurm, or (to try that) as jobs on this
    machine; see docs/clusters.md"""
    queue: tuple[str, ...] = ()
    """with --on: what submitit should ask for, such as slurm_partition=gpu timeout_min=600
    gpus_per_node=1"""
    job: str = ""
    """execute only the run with this folder name and print no table; jobs of --on do this"""
    dry_run: bool = False
    """list the cells and what is done of them, and run nothing"""
    json: bool = False
    """print JSON, and all else to standard error: a list of cells: `row`, `column`, `method`,
    `metric`, `printed`, `printed_std`, finished `seeds`, `values`, `mean`, `std`, `difference`,
    `skip`, `left_out`; values in per cent"""


@telling
def run_sweep(options: SweepOptions, tell: Callable[[Any], None]) -> None:
    """`ekiden sweep FILE`."""
    if options.reuse and not options.records:
        raise UserError(
            "--reuse needs --records, the file that keeps them for this experiment: add it"
        )
    if options.queue and options.on == "here":
        raise UserError("--queue is for --on slurm: add that, or leave it out")
    if options.minutes and options.on != "here":
        raise UserError("--minutes is for runs here: write --queue timeout_min=MINUTES")
    launch.check_place(options.on)
    asked = launch.queue_settings(options.queue)
    tracking.check(options.track, Path())
    swept = sweep.plan_sweep(
        options.file, options.budget, options.out, options.records, options.reuse
    )
    cells = sweep.select(swept.experiment, options.only, options.without)
    runs = swept.runs(cells)
    jobs = [replace(job, track=options.track) for job in sweep.jobs(swept, runs, options.device)]
    if options.dry_run:
        damaged = sweep.damaged(runs)
        tell(verdicts.as_rows(swept, cells))
        console.print(_listed(swept, cells))
        finished = len(runs) - len(jobs) - len(damaged)
        say(f"{counted(len(runs), 'run')}, {finished} of them finished; folder {swept.folder}")
        for run, why in damaged:
            say(f"damaged: {run.folder.name}: {why}")
        return
    if options.job:
        return _one(options.job, runs, jobs)
    outcomes = sweep.SweepOutcomes(swept, read_text(options.file), options.records)
    if jobs:
        _do(options, runs, jobs, asked, outcomes.add)
    wrong = len(outcomes.failed) + _show(swept, cells, outcomes)
    tell(verdicts.as_rows(swept, cells))
    outcomes.end()
    left = sum(not run.finished for run in runs)
    if options.minutes and left > wrong:
        say(f"time is up, {counted(left, 'run')} left: rerun the same command")
    if wrong:
        raise UserError(
            f"{wrong} of {len(runs)} runs failed (listed above): fix the cause and rerun the same "
            "command"
        )


def _show(swept: Sweep, cells: Sequence[Cell], outcomes: sweep.SweepOutcomes) -> int:
    """Print the results so far and everything that is missing; return how many finished runs do not
    count.
    """
    came = verdicts.collect(swept, cells)
    console.print(verdicts.listing(swept.experiment, came))
    for contrast in contrasts(swept.experiment, came):
        console.print(contrast.table)
    for cell in cells:
        if cell.skip:
            say(f"not run: {cell.label}: {cell.skip}")
    say(f"sweep folder: {swept.folder}")
    left_out = [line for result in came for line in result.left_out]
    for line in left_out:
        say(line)
    for line in filter(None, map(divergence, verdicts.runs_of(came))):
        say(line)
    for run in outcomes.elsewhere:
        say(f"in progress in another process: {run.folder.name}")
    for name, why in outcomes.failed.items():
        say(f"failed: {name}: {why}")
    return len(left_out)


def _one(name: str, runs: Sequence[SweepRun], jobs: Sequence[launch.LaunchedRun]) -> None:
    """Execute the run with this folder name, if it is not finished."""
    if name not in (known := [run.folder.name for run in runs]):
        raise unknown("run", name, known)
    for run, why in sweep.damaged(runs):
        if run.folder.name == name:
            raise UserError(why)
    if asked := [job for job in jobs if job.folder.name == name]:
        (end,) = launch.execute(asked, lambda event: None)
        if end.error:
            raise UserError(end.error)


def _do(
    options: SweepOptions,
    runs: Sequence[SweepRun],
    jobs: Sequence[launch.LaunchedRun],
    asked: Mapping[str, str | int],
    ended: Callable[[SweepRun, RunEnd], None],
) -> None:
    """Execute the runs that are left, and print how each ended."""
    folders = {job.folder for job in jobs}
    left = [run for run in runs if run.folder in folders]
    if len(left) < len(runs):
        console.print(f"{len(runs) - len(left)} of {len(runs)} runs are finished already")
    board = Board(console, [f"{run.cell.label}, seed {run.seed}" for run in left])

    def report(event: launch.Event | RunEnd) -> None:
        board.report(event)
        if isinstance(event, RunEnd):
            ended(left[event.run], event)

    with board.progress:
        if options.on == "here":
            launch.execute(jobs, report, options.cores, apart=True, minutes=options.minutes or inf)
            return
        launch.submit(jobs, options.file, options.budget, options.device, options.on, asked, report)


def _listed(swept: Sweep, cells: Sequence[Cell]) -> RichTable:
    columns = ("row", "column", "method", "printed", "scaled", "finished")
    table = RichTable(*columns, title=Text(swept.experiment.title), title_justify="left")
    for cell in cells:
        runs = swept.runs([cell])
        done = f"not run: {cell.skip}"
        if runs:
            done = f"{sum(run.finished for run in runs)}/{len(runs)}"
        method = cell.plan.recipe.method.title() if cell.plan else ""
        table.add_row(
            Text(cell.row),
            Text(cell.column),
            method,
            verdicts.as_printed(cell.published),
            ", ".join(map(str, cell.scaled)),
            done,
        )
    return table


@dataclass(frozen=True)
class ResultsOptions:
    """Print the results of sweeps next to the printed values, as tables in Markdown."""

    sweeps: Positional[tuple[Path, ...]]
    """sweep folders, and files that `ekiden sweep --records` made"""
    json: bool = False
    """print JSON: a list of sweeps with their `cells`, as in `ekiden sweep --json`"""


def list_results(options: ResultsOptions) -> None:
    """`ekiden results SWEEP...`."""
    sweeps = [sweep.opened(folder) for folder in options.sweeps]
    if not options.json:
        print(ledger.page(sweeps))
        return
    print_json([{"sweep": one.folder, "cells": verdicts.as_rows(one)} for one in sweeps])


@dataclass(frozen=True)
class ReportOptions(Checked):
    """Write one page with tables, figures, and the numbers behind them. It needs no network."""

    runs: Positional[tuple[Path, ...]]
    """run folders, sweep folders, or folders that hold them"""
    out: Annotated[Path, Alias("-o")] = Path("report")
    """folder that gets index.html, figures/ and data/"""
    details: CountOrZero = 8
    """how many methods get figures of their own (groups, forgetting, ledger, ...); 0: none, no data
    are read"""
    devices: str = ""
    """also draw results over simulated time on these devices: equal, hospitals, phones, or a TOML
    file; see docs/time.md"""
    tripod: bool = False
    """write nothing; list which item of TRIPOD+AI each run answers, and where"""


def report(options: ReportOptions) -> None:
    """`ekiden report RUN... [-o FOLDER]`."""
    if options.tripod:
        # few need it
        from ekiden.lab.reporting.tripod import answered

        for folder in options.runs:
            table = RichTable("item", "asks for", "answered by", title=Text(str(folder)))
            for number, asks, where in answered(summarise(folder)):
                table.add_row(number, asks, where or "not here")
            console.print(table)
        return
    require_extra("report", "ekiden report", "matplotlib", "jinja2")
    # it needs an extra
    from ekiden.lab.reporting import report as write

    with console.status("reading runs") as status:
        devices = devices_of(options.devices)
        found = write(options.runs, options.out, options.details, status.update, devices=devices)
    for folder, why in found.left_out:
        say(f"left out: {folder}: {why}")
    say(f"report: {options.out / 'index.html'}")
