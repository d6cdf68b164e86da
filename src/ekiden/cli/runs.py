"""The command line of runs: `ekiden run`, `resume`, `data`, `forget` and `join`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from ekiden import data as datasets
from ekiden.cli.console import console, only_json, print_json, say, telling
from ekiden.cli.flags import parse, parse_some
from ekiden.cli.run_options import BOXES, Here, RunOptions
from ekiden.clinic import study
from ekiden.core.base.checks import Checked, Count, CountOrZero, Positional, Positive
from ekiden.core.base.errors import UserError, counted
from ekiden.core.base.files import disk_error
from ekiden.core.engine.folder import read_config
from ekiden.lab import drawing, launch
from ekiden.methods import SORTS, method_named, titles
from ekiden.readers.columns import Reading
from ekiden.readers.holdings import located_silo
from ekiden.runs import reruns, summary, tracking
from ekiden.runs.plan import Plan, TaskName, go_on_with, read, refuse_lost, stored, written
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result


@dataclass(frozen=True)
class _First:
    """The flags that decide which other flags exist, or their defaults."""

    on: str = "here"
    config: Path | None = None


def run_options(default: Plan[Any], args: Sequence[str]) -> RunOptions[Plan[Any], Here]:
    """Read the flags of `ekiden run METHOD`; flags that are not given have the values of
    `default`.
    """
    kind = type(default.recipe.method)
    about = f"Train by {kind.title()}. Its own flags come first."
    usual = RunOptions(default, Here())
    return parse(RunOptions, args, f"ekiden run {kind.title()}", usual, about, BOXES)


@dataclass(frozen=True)
class ResumeOptions:
    """Continue interrupted runs; they end as if nothing had happened."""

    runs: Positional[tuple[Path, ...]]
    """run folders"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics as the run goes on: tensorboard, mlflow, wandb or trackio"""
    on: str = "here"
    """where the clients of simulated runs are: here, ray or ray:ADDRESS"""
    data: tuple[str, ...] = ()
    """where the data are now, if they were moved: as for `ekiden run --data`, or --silos"""
    laps: Count | None = None
    """largest number of laps for a regression that has not converged within its own limit"""
    json: bool = False
    """as for `ekiden run`"""


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
    """side to which images are scaled, in pixels"""
    silos: tuple[str, ...] = ()
    """instead of DATA, the files or folders of the silos, or one folder or TOML file with all of
    them"""
    reading: Reading = field(default_factory=Reading)
    seed: CountOrZero = 0
    """seed of the partition"""
    table_one: bool = False
    """show means and shares of all columns at each silo instead of who holds what; for tables"""
    times: tuple[Positive, ...] = ()
    """with --table-one of --task survival: times at which survival is shown, in ascending order"""
    task: TaskName = "auto"
    """what the labels mean (see docs/tasks.md); by default inferred from their values"""
    draw: Path | None = None
    """PNG file to draw to; by default who-holds-what.png in this folder"""
    json: bool = False
    """print JSON: `understood`, the six lines by name, and `clients` with samples for `train`,
    `val` and `test`, and `labels`; with --table-one `lines`, and with --times `survival`
    (`curves` and the log-rank test)"""
    draft_schema: Path | None = None
    """new TOML file for a draft of the study's schema, from these data; `--schema` with it then
    checks data"""


# violations of a schema that are shown
_LINES = 100

_HELP = """usage: ekiden run METHOD [flags]         flags: ekiden run METHOD --help

between silos:     ekiden run METHOD --on flower --help
your own method:   ekiden run FILE.py:CLASS [flags]
what methods are:  ekiden list

"""


def overview() -> str:
    """`ekiden run --help`: the methods by kind, on one screen of 80 columns."""
    text = _HELP
    for sort, places in SORTS.items():
        names = ", ".join(place.partition(":")[2].lower() for place in places)
        indented = fill(names, 80, initial_indent="  ", subsequent_indent="  ")
        text += f"{sort}\n{indented}\n"
    return text


def run(args: Sequence[str]) -> None:
    """`ekiden run METHOD [flags]`."""
    if args and args[0] in ("-h", "--help"):
        return print(overview(), end="")
    named = ""
    title = "METHOD"
    rest = args
    if args and not args[0].startswith("-"):
        named = args[0]
        rest = args[1:]
        title = method_named(named).title()
    prog = f"ekiden run {title}"
    first = parse_some(_First, rest, prog)
    if not named and first.config is None:
        raise UserError(f"missing METHOD (first argument). Choose one of {', '.join(titles())}")
    if first.on == "flower":
        # most commands do not need it
        from ekiden.cli import coordinator

        if first.config:
            raise UserError("--config is for runs on this machine: leave it out")
        return coordinator.run(method_named(named), rest)
    launch.transport_of(first.on)
    default = read(first.config, named) if first.config else Plan(Recipe(method_named(named)()))
    kind = type(default.recipe.method)
    options = run_options(default, rest)
    plan: Plan[Any] = replace(
        options.plan,
        data=datasets.located(options.plan.data),
        silos=tuple(map(located_silo, options.plan.silos)),
        reading=options.plan.reading.located(),
    )
    if plan.silos and plan.data not in (default.data, Plan.data):
        raise UserError("--silos and --data both say where the samples are: give one of them")
    if options.place.print_config:
        return print(written(plan), end="")
    # a folder with all silos names the run; several files have no name in common
    one = "silos" if len(plan.silos) > 1 else (*plan.silos, plan.data)[0]
    seeds = options.place.seeds or (plan.recipe.seed,)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))} names one twice: give each once")
    tracking.check(options.track, options.out)
    jobs = []
    for seed in seeds:
        name = f"{kind.title()}-{Path(one).stem}-seed{seed}"
        path = options.out / name
        if (path / "config.json").exists() and not summary.summarise(path).finished:
            say(f"{path} is not finished: `ekiden resume {path}` goes on (--data: moved data)")
        folder = launch.free_folder(options.out, name)
        seeded = replace(plan, recipe=replace(plan.recipe, seed=seed))
        jobs.append(launch.LaunchedRun(seeded, folder, track=options.track, on=options.on))
    _launch(jobs, options.json)


def resume(options: ResumeOptions) -> None:
    """`ekiden resume RUN...`."""
    # most commands do not need it
    from ekiden.cli import coordinator

    launch.transport_of(options.on)
    if options.data or options.laps:
        for folder in options.runs:
            go_on_with(folder, options.data, options.laps)
    here = [folder for folder in options.runs if not coordinator.resume(folder, options.track)]
    if here:
        tracking.check(options.track, here[0])
        jobs = []
        for folder in here:
            plan = stored(folder)
            refuse_lost(plan, folder)
            jobs.append(launch.LaunchedRun(plan, folder, track=options.track, on=options.on))
        _launch(jobs, options.json)


def data(options: DataOptions) -> None:
    """`ekiden data NAME [flags]`."""
    file = options.draw or Path("who-holds-what.png")
    if file.suffix != ".png":
        raise UserError(f"--draw {file}: the picture is a PNG file: give a name that ends in .png")
    plan: Plan[Any] = Plan(
        Recipe(method_named("fedelmy")(), seed=options.seed),
        options.data,
        options.partition,
        options.clients,
        options.size,
        silos=options.silos,
        reading=options.reading,
        task=options.task,
    )
    if options.times and not options.table_one:
        raise UserError("--times is for --table-one: add it, or leave out --times")
    if options.draft_schema:
        return _draft(options, options.draft_schema.expanduser())
    if options.reading.schema:
        _check(options)
    federation = plan.federation()
    if options.table_one:
        told = study.cohort_sums(federation, options.times)
        lines = study.table_one(told)
        survival = study.survival(told)
        if options.json:
            found: dict[str, Any] = {"lines": list(map(asdict, lines))}
            if survival:
                found["survival"] = asdict(survival)
            return print_json(found)
        console.print(drawing.cohort(lines))
        if survival:
            console.print(drawing.survival(survival))
        return None
    described = datasets.description(federation)
    if options.json:
        return print_json(described.to_json())
    say(str(described))
    console.print(datasets.table(federation))
    if options.draw is None and find_spec("matplotlib") is None:
        say('not drawn, which needs matplotlib: pip install "ekiden[report]"')
        return
    datasets.draw(federation, file)
    console.print(f"saved the picture as {file}")


def _draft(options: DataOptions, file: Path) -> None:
    """Write a draft of the study's schema."""
    if file.exists():
        raise UserError(
            f"{file} is there already: check data against it with --schema {file}, or name another "
            "file"
        )
    text = study.draft(options.data, options.silos, options.reading)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, file) from None
    say(
        f"wrote {file}, a draft of the study's schema. It stays here; it has ranges and names of "
        "categories of these "
        f"data. Edit it; `ekiden data` with --schema {file} then checks data against it"
    )


def _check(options: DataOptions) -> None:
    """Compare the data with the study's schema, and print a line for each value that it does not
    allow.
    """
    found = study.check(options.data, options.silos, options.reading)
    for violation in found[:_LINES]:
        print(violation)
    if found:
        more = ""
        if len(found) > _LINES:
            more = f", of which {_LINES} are shown"
        raise UserError(
            f"{counted(len(found), 'violation')} of the schema {options.reading.schema}{more}: "
            "correct the data, or "
            "the schema"
        )
    say(f"the data meet the schema {options.reading.schema}")


def _launch(jobs: list[launch.LaunchedRun], as_json: bool) -> None:
    """Execute the runs and print the results."""
    with only_json(as_json) as tell:
        try:
            outcomes = launch.launch(jobs, console)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*(job.folder for job in jobs)) from None
        runs = []
        failed = []
        for end in outcomes:
            if not end.error:
                runs.append(summary.summarise(end.folder))
            elif len(outcomes) > 1:
                failed.append(f"{end.folder}: {end.error}")
            else:
                failed.append(end.error)
        if runs:
            tell([summary.as_record(run) for run in runs])
            console.print(drawing.comparison(runs))
            for run in runs:
                # accuracy says little of a rare class
                if line := summary.imbalance(run):
                    say(f"{run.folder}: {line}")
                if line := summary.divergence(run):
                    say(line)
            say("\n".join(f"run folder: {run.folder}" for run in runs))
    if failed:
        raise UserError("; ".join(failed))


@dataclass(frozen=True)
class ForgetOptions:
    """Repeat a run without one of its clients, bit for bit as if the client had never been there."""

    run: Positional[Path]
    """run folder; it stays as it is: delete it to forget the client there, too"""
    client: str
    """client to remove"""
    out: Path | None = None
    """new run folder; by default RUN-without-CLIENT"""
    release: Path | None = None
    """between machines: file by which the silo agrees; `ekiden silo release` makes it there"""
    json: bool = False
    """print JSON: an object as in `ekiden show --json`"""


@dataclass(frozen=True)
class JoinOptions:
    """Repeat a run with one more client, bit for bit as if the client had always been there."""

    run: Positional[Path]
    """run folder; it stays as it is"""
    client: str
    """client to add: one that `ekiden run --without` left out, or one of --data"""
    data: str = ""
    """data that have this client and those of the run, unchanged; by default the run's own"""
    out: Path | None = None
    """new run folder; by default RUN-with-CLIENT"""
    release: Path | None = None
    """as for `ekiden forget`"""
    json: bool = False
    """as for `ekiden forget`"""


@telling
def forget(options: ForgetOptions, tell: Callable[[Any], None]) -> None:
    """`ekiden forget RUN --client NAME`."""
    if _between_machines(options.run):
        # runs on one machine do not need it
        from ekiden.cli import coordinator

        coordinator.forget(options.run, options.client, options.out, options.release)
    else:
        if options.release:
            raise UserError("--release is for runs between machines: leave it out")
        _print(tell, options.run, reruns.forget(options.run, options.client, out=options.out))
    say(f"{options.run} still holds {options.client}: delete it to forget it there, too")


@telling
def join(options: JoinOptions, tell: Callable[[Any], None]) -> None:
    """`ekiden join RUN --client NAME [--data DATA]`."""
    if _between_machines(options.run):
        from ekiden.cli import coordinator

        if options.data:
            raise UserError(f"the silos of {options.run} have their own data: leave out --data")
        return coordinator.join(options.run, options.client, options.out, options.release)
    if options.release:
        raise UserError("--release is for runs between machines: leave it out")
    data = datasets.located(options.data) if options.data else None
    _print(tell, options.run, reruns.join(options.run, options.client, data, out=options.out))


def _between_machines(folder: Path) -> bool:
    return read_config(folder).get("on") == "flower"


def _print(tell: Callable[[Any], None], before: Path, result: Result) -> None:
    assert result.folder is not None, "it was made"
    tell(summary.as_record(summary.summarise(result.folder)))
    console.print(drawing.comparison([summary.summarise(before), summary.summarise(result.folder)]))
    say(f"run folder: {result.folder}")
