"""The command line: `ekiden run`, `resume`, `evaluate`, `show`, `compare`, `verify`, `data`, `list`, `silo`, ..."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from tyro.conf import Positional

from ekiden import data as datasets
from ekiden.base import outside
from ekiden.base.errors import UserError, unknown
from ekiden.cli.console import console, first_line, no_run, parse
from ekiden.data import Reading
from ekiden.engine.folder import read_lines
from ekiden.engine.method import Method
from ekiden.experiments import launch, summary
from ekiden.experiments.plan import Plan, stored
from ekiden.experiments.presets import PRESETS, preset
from ekiden.experiments.sweep import refuse_records, summaries
from ekiden.methods import METHODS, method_named
from ekiden.results import tracking

M = TypeVar("M", bound=Method)


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


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with interrupted runs; they end as if nothing had happened."""

    runs: Positional[tuple[Path, ...]]
    """run folders"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics as the run goes on, tensorboard or mlflow"""


@dataclass(frozen=True)
class ShowOptions:
    """What a run folder holds: what was run, every step, what moved."""

    run: Positional[Path]
    """run folder"""


@dataclass(frozen=True)
class CompareOptions:
    """Runs side by side; those that differ only in the seed as mean ± standard deviation."""

    runs: Positional[tuple[Path, ...]]
    """run folders, sweep folders, and files that `ekiden sweep --records` made"""


@dataclass(frozen=True)
class DataOptions:
    """Who holds what: prints it and draws it."""

    data: Positional[str] = "digits"
    """name of a data set, folder, table or file of arrays"""
    partition: str = "auto"
    """iid, dirichlet:BETA, domains[:A,B,...], classes:K, natural"""
    clients: int | None = None
    """number of clients"""
    size: int | None = None
    """side of the images in pixels"""
    silos: tuple[str, ...] = ()
    """instead of DATA, the files or folders of the silos, or one folder or TOML file with all of them"""
    reading: Reading = field(default_factory=Reading)
    seed: int = 0
    """of the partition"""
    draw: Path | None = None
    """PNG file to draw to; by default who-holds-what.png in this folder"""


def run(args: Sequence[str]) -> None:
    """`ekiden run METHOD [flags]`."""
    names = ", ".join(m.title() for m in METHODS)
    if args and args[0] in ("-h", "--help"):
        console.print(
            f"usage: ekiden run METHOD [flags]\n\nmethods: {names}\nflags: ekiden run METHOD --help\n"
            "between machines: ekiden run METHOD --on flower --help"
        )
        return
    if not args or args[0].startswith("-"):
        raise UserError(f"say which method to run, first of all: {names}")
    for arg in args:
        outside.trust(arg)
    kind = method_named(args[0])
    args, on = _take(args, "--on")
    if on == "flower":
        from ekiden.cli import silos as cli_silos  # noqa: PLC0415  (most commands do without it)

        return cli_silos.run(kind, args[1:])
    if on:
        raise unknown("place to run", on, ("flower",))
    rest, chosen = _take(args[1:], "--preset")
    default: Plan[Any] = Plan(kind())
    if chosen:
        default = preset(chosen, kind, _take(rest, "--data")[1] or default.data)
    options = parse(
        RunOptions[kind],  # type: ignore[valid-type]
        rest,
        f"ekiden run {kind.title()}",
        RunOptions(default),
        f"{first_line(kind)} --preset {{{','.join(PRESETS)}}} takes the settings of FedELMY's authors for --data: "
        "paper, those of the paper, with ResNet-18; released-cnn, their code's small CNN, learning rate and warm-up, "
        "the rest as in the paper.",
    )
    plan: Plan[Any] = replace(
        options.plan,
        data=datasets.located(options.plan.data),
        silos=tuple(str(Path(path).expanduser().absolute()) for path in options.plan.silos),
        model=outside.located(options.plan.model),
        metric=outside.located(options.plan.metric),
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
    """What the data are called in the name of a run folder."""
    return Path(plan.data).stem if not plan.silos else Path(plan.silos[0]).stem if len(plan.silos) == 1 else "silos"


def resume(args: Sequence[str]) -> None:
    """`ekiden resume RUN...`."""
    from ekiden.cli import silos as cli_silos  # noqa: PLC0415  (most commands do without it)

    options = parse(ResumeOptions, args, "ekiden resume")
    if not options.runs:
        raise UserError("name the run folders to go on with")
    here = [folder for folder in options.runs if not cli_silos.resume(folder, options.track)]
    if here:
        tracking.check(options.track, here[0])
        _launch([launch.LaunchedRun(stored(folder), folder, track=options.track) for folder in here])


def show(args: Sequence[str]) -> None:
    """`ekiden show RUN`."""
    options = parse(ShowOptions, args, "ekiden show")
    refuse_records(options.run)
    run = summary.summarise(options.run)
    console.print(summary.label(run.config), style="bold")
    console.print(summary.about(run))
    console.print(summary.steps(run))
    if noted := summary.notes(run):
        console.print(noted, markup=False, highlight=False)
    if crossed := summary.network(run):
        console.print(crossed, markup=False, highlight=False)
    attempts = read_lines(options.run / "attempts.jsonl", "lost_transfers")
    lost = sum(row["bytes"] for attempt in attempts for row in attempt["lost_transfers"])
    console.print(f"started {len(attempts)} times; moved in steps that died: {summary.size(lost)}")


def compare(args: Sequence[str]) -> None:
    """`ekiden compare RUN...`."""
    options = parse(CompareOptions, args, "ekiden compare")
    runs = summaries(options.runs)
    if not runs:
        raise no_run("compare", options.runs)
    console.print(summary.comparison(runs))


def data(args: Sequence[str]) -> None:
    """`ekiden data NAME [flags]`."""
    options = parse(DataOptions, args, "ekiden data")
    outside.trust(options.data)
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
    federation = plan.federation()
    console.print(datasets.table(federation))
    file = options.draw or Path("who-holds-what.png")
    if options.draw is None and find_spec("matplotlib") is None:
        console.print('not drawn, which needs matplotlib: pip install "ekiden[report]"', soft_wrap=True)
        return
    datasets.draw(federation, file)
    console.print(f"drawn to {file}")


def _launch(jobs: list[launch.LaunchedRun]) -> None:
    """Do the runs and print what came out.

    Raises:
        UserError: one of them failed.
    """
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


def _take(args: Sequence[str], flag: str) -> tuple[list[str], str]:
    """The arguments without `flag` and its value, and the value ("" if absent).

    Raises:
        UserError: the flag is there without a value.
    """
    rest, value = [], ""
    given = iter(args)
    for arg in given:
        if arg == flag:
            value = next(given, "")
        elif arg.startswith(f"{flag}="):
            value = arg.split("=", 1)[1]
        else:
            rest.append(arg)
            continue
        if not value:
            raise UserError(f"{flag} needs a value: see --help")
    return rest, value
