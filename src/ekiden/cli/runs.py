"""The command line: `ekiden run`, `resume`, `evaluate`, `show`, `compare`, `verify`, `data`, `list`, `silo`, ..."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from tyro.conf import Positional

from ekiden import data as datasets
from ekiden.base import outside
from ekiden.base.checks import Checked, Count, CountOrZero
from ekiden.base.errors import UserError, counted
from ekiden.base.files import disk_error
from ekiden.cli.console import console, no_run
from ekiden.cli.flags import parse, parse_some
from ekiden.cli.helping import Boxes
from ekiden.data import Reading, study
from ekiden.data.holdings import located_silo
from ekiden.engine.method import Method
from ekiden.methods import METHODS, SORTS, method_named
from ekiden.results import tracking
from ekiden.runs import launch, summary
from ekiden.runs.plan import Plan, stored
from ekiden.tables.sweep import refuse_records, summaries

M = TypeVar("M", bound=Method)
Place: TypeAlias = Literal["here", "flower"]


@dataclass(frozen=True)
class RunOptions(Generic[M]):
    """Train one model over many data silos; ends with accuracy, bytes moved, time, and the run folders."""

    plan: Plan[M]
    seeds: tuple[int, ...] = ()
    """several seeds: one run each, side by side on the cores; overrides --seed"""
    out: Path = Path("runs")
    """folder in which the run folders METHOD-DATA-seedSEED are made"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics as the run goes on: tensorboard (files in the run folder), mlflow (where
    MLFLOW_TRACKING_URI says)"""
    on: Place = "here"
    """where the clients are: here, simulated; or flower: real silos, see --on flower --help"""


@dataclass(frozen=True)
class _Where:
    """The flag that decides which other flags exist."""

    on: Place = "here"


# The flags in the order of the help, after the method's own flags.
_BOXES: Boxes = (
    (
        "data",
        "Samples, and who holds them.",
        ("data", "silos", "partition", "clients", "without", "val_fraction", "size", "task", "metric"),
    ),
    ("columns", "", ("reading",)),
    ("network", "What is trained.", ("model", "pretrained", "train")),
    ("training", "", ("training",)),
    ("hardware", "", ("hardware",)),
    (
        "run",
        "The run as a whole: seeds, folder, what is measured.",
        (
            *("seeds", "out", "track", "on", "seed", "workers", "evaluate_every"),
            *("tune", "keep_trained", "evaluate_on"),
        ),
    ),
)


def run_options(default: Plan[Any], args: Sequence[str]) -> RunOptions[Any]:
    """Read the flags of `ekiden run METHOD`; flags that are not given have the values of `default`."""
    kind = type(default.method)
    own: type[RunOptions[Any]] = RunOptions[kind]  # type: ignore[valid-type]
    about = f"Train by {kind.title()}. Its own flags come first."
    return parse(own, args, f"ekiden run {kind.title()}", RunOptions(default), about, _BOXES)


@dataclass(frozen=True)
class ResumeOptions:
    """Continue interrupted runs; they end as if nothing had happened."""

    runs: Positional[tuple[Path, ...]]
    """run folders"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics as the run goes on, tensorboard or mlflow"""


@dataclass(frozen=True)
class ShowOptions:
    """Show what a run folder holds: what was run, every step, what moved."""

    run: Positional[Path]
    """run folder"""


@dataclass(frozen=True)
class CompareOptions:
    """Show runs side by side; those that differ only in the seed as mean ± standard deviation."""

    runs: Positional[tuple[Path, ...]]
    """run folders, sweep folders, and files that `ekiden sweep --records` made"""


@dataclass(frozen=True)
class DataOptions(Checked):
    """Show who holds what, as a table and as a picture."""

    data: Positional[str] = "digits"
    """name of a data set, folder, table or file of arrays"""
    partition: str = "auto"
    """iid, dirichlet:BETA, domains[:A,B,...], classes:K, natural"""
    clients: Count | None = None
    """number of clients"""
    size: Count | None = None
    """side of the images in pixels"""
    silos: tuple[str, ...] = ()
    """instead of DATA, the files or folders of the silos, or one folder or TOML file with all of them"""
    reading: Reading = field(default_factory=Reading)
    seed: CountOrZero = 0
    """of the partition"""
    draw: Path | None = None
    """PNG file to draw to; by default who-holds-what.png in this folder"""


_LINES = 100  # violations of a schema that are shown

_HELP = """usage: ekiden run METHOD [flags]         flags: ekiden run METHOD --help

between silos:     ekiden run METHOD --on flower --help
your own method:   ekiden run FILE.py:CLASS [flags]
what methods are:  ekiden list

"""


def overview() -> str:
    """`ekiden run --help`: the methods by kind, on one screen of 80 columns."""
    lists = {sort: ", ".join(method.title() for method in methods) for sort, methods in SORTS.items()}
    indented = partial(fill, width=80, initial_indent="  ", subsequent_indent="  ")
    return _HELP + "".join(f"{sort}\n{indented(names)}\n" for sort, names in lists.items())


def run(args: Sequence[str]) -> None:
    """`ekiden run METHOD [flags]`."""
    names = ", ".join(m.title() for m in METHODS)
    if args and args[0] in ("-h", "--help"):
        return print(overview(), end="")
    if not args or args[0].startswith("-"):
        raise UserError(f"say which method to run, first of all: {names}")
    for arg in args:
        outside.trust(arg)
    kind = method_named(args[0])
    rest, prog = args[1:], f"ekiden run {kind.title()}"
    if parse_some(_Where, rest, prog).on == "flower":
        from ekiden.cli import silos as cli_silos  # noqa: PLC0415  (most commands do not need it)

        return cli_silos.run(kind, rest)
    default: Plan[Any] = Plan(kind())
    options = run_options(default, rest)
    plan: Plan[Any] = replace(
        options.plan,
        data=datasets.located(options.plan.data),
        silos=tuple(map(located_silo, options.plan.silos)),
        model=outside.located(options.plan.model),
        metric=outside.located(options.plan.metric),
        reading=options.plan.reading.located(),
    )
    if plan.silos and plan.data != default.data:
        raise UserError("--silos and --data both say where the samples are: give one of them")
    name = f"{kind.title()}-{_stem(plan)}"
    seeds = options.seeds or (plan.seed,)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))} names one twice: give each once")
    tracking.check(options.track, options.out)
    folders = [launch.free_folder(options.out, f"{name}-seed{s}") for s in seeds]
    jobs = [launch.LaunchedRun(replace(plan, seed=s), folder) for s, folder in zip(seeds, folders, strict=True)]
    _launch([replace(job, track=options.track) for job in jobs])


def _stem(plan: Plan[Any]) -> str:
    """Return the name of the data for the name of a run folder."""
    return Path(plan.data).stem if not plan.silos else Path(plan.silos[0]).stem if len(plan.silos) == 1 else "silos"


def resume(options: ResumeOptions) -> None:
    """`ekiden resume RUN...`."""
    from ekiden.cli import silos as cli_silos  # noqa: PLC0415  (most commands do not need it)

    if not options.runs:
        raise UserError("name the run folders to resume")
    here = [folder for folder in options.runs if not cli_silos.resume(folder, options.track)]
    if here:
        tracking.check(options.track, here[0])
        _launch([launch.LaunchedRun(stored(folder), folder, track=options.track) for folder in here])


def show(options: ShowOptions) -> None:
    """`ekiden show RUN`."""
    refuse_records(options.run)
    for number, part in enumerate(summary.shown(options.run)):
        console.print(part, style="" if number else "bold", highlight=False)


def compare(options: CompareOptions) -> None:
    """`ekiden compare RUN...`."""
    runs = summaries(options.runs)
    if not runs:
        raise no_run("compare", options.runs)
    console.print(summary.comparison(runs))


def data(options: DataOptions) -> None:
    """`ekiden data NAME [flags]`."""
    outside.trust(options.data)
    outside.trust(options.reading.sample_kind)
    plan: Plan[Any] = Plan(
        METHODS[0](),
        options.data,
        options.partition,
        options.clients,
        options.size,
        silos=options.silos,
        reading=options.reading,
        seed=options.seed,
    )
    if schema := options.reading.schema:
        file = Path(schema).expanduser()
        if not file.exists():
            return _draft(options, file)
        _check(options)
    federation = plan.federation()
    console.print(datasets.table(federation))
    file = options.draw or Path("who-holds-what.png")
    if options.draw is None and find_spec("matplotlib") is None:
        console.print('not drawn, which needs matplotlib: pip install "ekiden[report]"', soft_wrap=True)
        return
    datasets.draw(federation, file)
    console.print(f"drawn to {file}")


def _draft(options: DataOptions, file: Path) -> None:
    """Write a draft of the study's schema."""
    text = study.draft(options.data, options.silos, replace(options.reading, schema=""))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, file) from None
    console.print(
        f"wrote {file}, a draft of the study's schema: there was no such file. It stays here; it has ranges and names "
        f"of categories of these data. Edit it; the same command then checks data against it",
        soft_wrap=True,
    )


def _check(options: DataOptions) -> None:
    """Compare the data with the study's schema, and print a line for each value that it does not allow."""
    found = study.check(options.data, options.silos, options.reading)
    for violation in found[:_LINES]:
        print(violation)
    if found:
        more = f", of which {_LINES} are shown" if len(found) > _LINES else ""
        raise UserError(
            f"{counted(len(found), 'violation')} of the schema {options.reading.schema}{more}: correct the data, or "
            "the schema"
        )
    console.print(f"the data meet the schema {options.reading.schema}", soft_wrap=True, highlight=False)


def _launch(jobs: list[launch.LaunchedRun]) -> None:
    """Execute the runs and print the results."""
    outcomes = launch.launch(jobs, console)
    done = [o.folder for o in outcomes if not o.error]
    if done:
        runs = [summary.summarise(folder) for folder in done]
        console.print(summary.comparison(runs))
        for line in filter(None, map(summary.divergence, runs)):
            console.print(line, soft_wrap=True, highlight=False)
        console.print("\n".join(f"run folder: {folder}" for folder in done), soft_wrap=True)
    failed = [o for o in outcomes if o.error]
    if failed:
        raise UserError("; ".join(f"{o.folder}: {o.error}" if len(outcomes) > 1 else o.error for o in failed))
