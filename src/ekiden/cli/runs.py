"""The command line of runs: `ekiden run`, `resume`, `evaluate`, `show`, `compare`, `data`, `forget` and `join`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import tyro
from rich.table import Table
from tyro.conf import Positional

from ekiden import data as datasets
from ekiden.base import outside
from ekiden.base.checks import Checked, Count, CountOrZero, Positive, made, reading
from ekiden.base.errors import UserError, counted
from ekiden.base.files import disk_error, is_held
from ekiden.cli.console import console, no_run, only_json, print_json, say
from ekiden.cli.flags import Boxes, parse, parse_some
from ekiden.commands import follow
from ekiden.data import Reading, study
from ekiden.data.holdings import located_silo
from ekiden.data.kinds import Inputs
from ekiden.data.tasks import Metric, Task, recorded
from ekiden.data.tasks.base import measured
from ekiden.engine.figures import Figures, Wanted
from ekiden.engine.folder import read_config
from ekiden.engine.method import Method
from ekiden.engine.networks import read_model
from ekiden.engine.setup import check_same_data
from ekiden.methods import METHODS, SORTS, method_named
from ekiden.recipe import Recipe
from ekiden.results import tracking
from ekiden.results.recalibration import Recalibration, model_in
from ekiden.results.result import Result, inputs_of, task_in
from ekiden.runs import launch, settings, summary
from ekiden.runs.plan import Plan, TaskName, in_memory, judge, stored
from ekiden.serving import reruns
from ekiden.serving.loading import open_run
from ekiden.tables.sweep import refuse_records, summaries

M = TypeVar("M", bound=Method)
Place: TypeAlias = Literal["here", "flower"]
_MOST_NAMED = 20  # classes whose shares are printed


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
    MLFLOW_TRACKING_URI says), wandb, trackio"""
    on: str = "here"
    """where the clients are: here, simulated; ray, or ray:ADDRESS: simulated on a Ray cluster, see docs/clusters.md; or
    flower: real silos, see --on flower --help"""
    json: bool = False
    """print the results as JSON, and all else to standard error; see docs/json.md"""
    config: Path | None = None
    """TOML file with settings by their names, METHOD too; flags override it"""
    print_config: bool = False
    """print all settings as such a file, and run nothing"""


@dataclass(frozen=True)
class _First:
    """The flags that decide which other flags exist, or their defaults."""

    on: str = "here"
    config: Path | None = None


# The flags in the order of the help, after the method's own flags.
_BOXES: Boxes = (
    (
        "data",
        "Samples, and who holds them.",
        ("data", "silos", "partition", "clients", "data_seed", "without", "val_fraction", "size", "task", "metric"),
    ),
    ("columns", "", ("reading",)),
    ("network", "What is trained.", ("model", "pretrained", "train")),
    ("training", "", ("training",)),
    ("privacy", "", ("dp",)),
    ("hardware", "", ("hardware",)),
    (
        "run",
        "The run as a whole: seeds, folder, what is measured.",
        (
            *("config", "print_config", "seeds", "out", "track", "on", "json", "seed", "workers", "evaluate_every"),
            *("tune", "keep_trained", "evaluate_on"),
        ),
    ),
)


def run_options(default: Plan[Any], args: Sequence[str]) -> RunOptions[Any]:
    """Read the flags of `ekiden run METHOD`; flags that are not given have the values of `default`."""
    kind = type(default.recipe.method)
    own: type[RunOptions[Any]] = RunOptions[kind]  # type: ignore[valid-type]
    about = f"Train by {kind.title()}. Its own flags come first."
    return parse(own, args, f"ekiden run {kind.title()}", RunOptions(default), about, _BOXES)


@dataclass(frozen=True)
class ResumeOptions:
    """Continue interrupted runs; they end as if nothing had happened."""

    runs: Positional[tuple[Path, ...]]
    """run folders"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics as the run goes on: tensorboard, mlflow, wandb or trackio"""
    on: str = "here"
    """where the clients of simulated runs are: here, ray or ray:ADDRESS"""
    json: bool = False
    """print the results as JSON, and all else to standard error; see docs/json.md"""


@dataclass(frozen=True)
class ShowOptions:
    """Show what a run folder holds: what was run, every step, what moved."""

    run: Positional[Path]
    """run folder"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""


@dataclass(frozen=True)
class LogOptions:
    """Print a line for each step of a run: what was measured, what moved."""

    run: Positional[Path]
    """run folder"""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """wait for steps to come, until the run ends or stops"""
    json: bool = False
    """print each row of metrics.jsonl as it is; see docs/json.md"""


@dataclass(frozen=True)
class CompareOptions:
    """Show runs side by side; those that differ only in the seed as mean ± standard deviation."""

    runs: Positional[tuple[Path, ...]]
    """run folders, sweep folders, and files that `ekiden sweep --records` made"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""


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
    table_one: bool = False
    """show means and shares of all columns at each silo instead of who holds what; for tables"""
    times: tuple[Positive, ...] = ()
    """with --table-one of --task survival: times at which survival is shown, in ascending order"""
    task: TaskName = "auto"
    """what the labels mean (see docs/tasks.md); by default inferred from their values"""
    draw: Path | None = None
    """PNG file to draw to; by default who-holds-what.png in this folder"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""
    draft_schema: Path | None = None
    """new TOML file for a draft of the study's schema, from these data; `--schema` with it then checks data"""


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
    for arg in args:
        outside.trust(arg)
    named = "" if not args or args[0].startswith("-") else args[0]
    prog = f"ekiden run {method_named(named).title() if named else 'METHOD'}"
    rest = args[1:] if named else args
    first = parse_some(_First, rest, prog)
    if not named and first.config is None:
        raise UserError(f"METHOD is missing, which comes first: choose one of {names}")
    if first.on == "flower":
        from ekiden.cli import silos as cli_silos  # noqa: PLC0415  (most commands do not need it)

        if first.config:
            raise UserError("--config is for runs on this machine: leave it out")
        return cli_silos.run(method_named(named), rest)
    launch.transport_of(first.on)
    default = settings.read(first.config, named) if first.config else Plan(Recipe(method_named(named)()))
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
    if options.print_config:
        return print(settings.written(plan), end="")
    name = f"{kind.title()}-{_stem(plan)}"
    seeds = options.seeds or (plan.recipe.seed,)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))} names one twice: give each once")
    tracking.check(options.track, options.out)
    folders = [launch.free_folder(options.out, f"{name}-seed{s}") for s in seeds]
    plans = [replace(plan, recipe=replace(plan.recipe, seed=seed)) for seed in seeds]
    jobs = [launch.LaunchedRun(one, folder) for one, folder in zip(plans, folders, strict=True)]
    _launch([replace(job, track=options.track, on=options.on) for job in jobs], options.json)


def _stem(plan: Plan[Any]) -> str:
    """Return the name of the data for the name of a run folder."""
    return Path(plan.data).stem if not plan.silos else Path(plan.silos[0]).stem if len(plan.silos) == 1 else "silos"


def resume(options: ResumeOptions) -> None:
    """`ekiden resume RUN...`."""
    from ekiden.cli import silos as cli_silos  # noqa: PLC0415  (most commands do not need it)

    if not options.runs:
        raise UserError("name the run folders to resume")
    launch.transport_of(options.on)
    here = [folder for folder in options.runs if not cli_silos.resume(folder, options.track)]
    if here:
        tracking.check(options.track, here[0])
        jobs = [launch.LaunchedRun(stored(folder), folder, track=options.track, on=options.on) for folder in here]
        _launch(jobs, options.json)


def show(options: ShowOptions) -> None:
    """`ekiden show RUN`."""
    refuse_records(options.run)
    if options.json:
        return print_json(summary.as_record(summary.summarise(options.run)))
    for number, part in enumerate(summary.shown(options.run)):
        console.print(part, style="" if number else "bold", highlight=False)


def log(options: LogOptions) -> None:
    """`ekiden log RUN [-f]`."""
    refuse_records(options.run)
    run = summary.summarise(options.run)
    for row in follow(options.run, wait=options.follow):
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        metric = summary.metric_named(run.config, str(row.get("metric", "accuracy")))
        value = tracking.measured(metric, row)
        loss = f"loss {row['loss']:.4g}" if "loss" in row else ""
        parts = [f"step {row['step']} of {run.config['steps']}", value, loss, f"{summary.size(row['bytes'])} moved"]
        say(", ".join(filter(None, parts)))
    run = summary.summarise(options.run)
    if not run.finished and not options.json:
        say("not finished: " + ("a process works on it" if is_held(options.run / "lock") else summary.going_on(run)))


def compare(options: CompareOptions) -> None:
    """`ekiden compare RUN...`."""
    runs = summaries(options.runs)
    if not runs:
        raise no_run("compare", options.runs)
    if options.json:
        return print_json(summary.compared(runs))
    console.print(summary.comparison(runs))


def data(options: DataOptions) -> None:
    """`ekiden data NAME [flags]`."""
    outside.trust(options.data)
    outside.trust(options.reading.sample_kind)
    file = options.draw or Path("who-holds-what.png")
    if file.suffix != ".png":
        raise UserError(f"--draw {file}: the picture is a PNG file: give a name that ends in .png")
    plan: Plan[Any] = Plan(
        Recipe(METHODS[0](), seed=options.seed),
        options.data,
        options.partition,
        options.clients,
        options.size,
        silos=options.silos,
        reading=options.reading,
        task=options.task,
    )
    if options.draft_schema:
        return _draft(options, options.draft_schema.expanduser())
    if options.reading.schema:
        _check(options)
    federation = plan.federation()
    if options.table_one:
        told = study.cohort_sums(federation, options.times)
        lines, survival = study.table_one(told), study.survival(told)
        if options.json:
            more = {"survival": survival.to_json()} if survival else {}
            return print_json({"lines": [line.to_json() for line in lines], **more})
        return console.print(study.cohort_drawn(lines), *([survival.drawn()] if survival else []))
    described = datasets.description(federation)
    if options.json:
        return print_json(described.to_json())
    console.print(str(described), soft_wrap=True, highlight=False)
    console.print(datasets.table(federation))
    if options.draw is None and find_spec("matplotlib") is None:
        console.print('not drawn, which needs matplotlib: pip install "ekiden[report]"', soft_wrap=True)
        return
    datasets.draw(federation, file)
    console.print(f"drawn to {file}")


def _draft(options: DataOptions, file: Path) -> None:
    """Write a draft of the study's schema."""
    if file.exists():
        raise UserError(f"{file} is there already: check data against it with --schema {file}, or name another file")
    text = study.draft(options.data, options.silos, options.reading)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, file) from None
    console.print(
        f"wrote {file}, a draft of the study's schema. It stays here; it has ranges and names of categories of these "
        f"data. Edit it; `ekiden data` with --schema {file} then checks data against it",
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


def _launch(jobs: list[launch.LaunchedRun], as_json: bool) -> None:
    """Execute the runs and print the results."""
    with only_json(as_json) as tell:
        _executed(jobs, tell)


def _executed(jobs: list[launch.LaunchedRun], tell: Callable[[Any], None]) -> None:
    outcomes = launch.launch(jobs, console)
    done = [o.folder for o in outcomes if not o.error]
    if done:
        runs = [summary.summarise(folder) for folder in done]
        tell([summary.as_record(run) for run in runs])
        console.print(summary.comparison(runs))
        for line in filter(None, map(summary.divergence, runs)):
            console.print(line, soft_wrap=True, highlight=False)
        console.print("\n".join(f"run folder: {folder}" for folder in done), soft_wrap=True)
    failed = [o for o in outcomes if o.error]
    if failed:
        raise UserError("; ".join(f"{o.folder}: {o.error}" if len(outcomes) > 1 else o.error for o in failed))


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure the model of a run on its own or other test data: in all, per client, per domain, per class."""

    run: Positional[Path]
    """run folder"""
    data: str = ""
    """another data set, folder or file with the same classes; by default the run's own"""
    label_column: tuple[str, ...] = ()
    """column of labels in the tables of --data, or several columns; by default as in the run, if it knows them"""
    column: str = ""
    """column of the tables of --data that holds the images, texts or arrays; by default as in the run"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    metric: str = ""
    """another headline metric than the run's, by its name, or FILE.py:NAME; naming one measures all"""
    threshold: float | None = None
    """of two classes: also show this threshold of the second class's probability"""
    sensitivity: float = 0.95
    """of two classes: also show the highest threshold with this sensitivity"""
    calibrate: Literal["", "platt", "temperature"] = ""
    """of two classes: fit a recalibration to validation data, by counts, and keep it in the run folder with the
    threshold (--threshold, by default Youden's); `predict`, `export` and `card` then use both"""
    on: Place = "here"
    """where the test data are: `flower` measures the model at silos, also at others than those that trained it"""
    federation: Path | None = None
    """with --on flower: folder that `ekiden federation init` made; by default the run's SuperLink"""
    clients: str = ""
    """with --on flower: names of the silos, separated by commas; by default those of the federation, or of the run"""
    json: bool = False
    """print JSON instead of tables"""


def evaluate(options: EvaluateOptions) -> None:
    """`ekiden evaluate RUN [--data ...]`."""
    if options.on == "flower":
        return _on_silos(options)
    return _evaluate_here(options)


def _config(options: EvaluateOptions) -> dict[str, Any]:
    """Return the configuration of the run, once the flags are checked."""
    if options.federation or options.clients:
        raise UserError("--federation and --clients are for silos: add --on flower")
    if options.calibrate and (options.data or options.client):
        raise UserError("--calibrate is for the run's global model and own validation data: leave out --data, --client")
    outside.trust(options.metric)
    return read_config(options.run)


def _evaluate_here(options: EvaluateOptions) -> None:
    """Measure a run's model on data of this machine."""
    config = _config(options)
    if in_memory(config) and options.data:
        return _on_other_data(options)
    if not config.get("on") and (why := in_memory(config)):
        return _as_measured(options, why)
    plan, own, data = _planned(options, config)
    test = judge(plan, own, data)
    name = f"personal/{options.client}.safetensors" if options.client else "model.safetensors"
    build = test.own if options.client else test.build
    model, full = read_model(options.run, name, build), test.task.measures_all or None
    scores = test.scores(model, personal=bool(options.client), full=full)
    headline, everything = test.task.headline, scores.metrics() if test.task.measures_all else {}
    wanted = Wanted(options.threshold, options.sensitivity)
    parts = [scores.at(client.test.rows) for client in data.clients]
    told = test.figures(scores, wanted, parts) if test.task.measures_all else None
    if options.calibrate and told:
        _calibrate(options, told)
    groups = {"client": {} if options.data else test.by_client(scores)}
    groups |= {"domain": test.by_domain(scores), "class": test.by_class(scores)}
    run = summary.summarise(options.run)
    if run.metrics and not run.finished:
        steps = plan.recipe.method.steps(len(run.config["clients"]))
        line = f"the run stopped after step {run.last['step']} of {steps}: this is its model so far"
        print(line, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        value = scores.score()
        found = {headline.name: None if isnan(value) else value, "samples": len(scores)}
        more = {"metrics": everything, "figures": told.to_json()} if told else {}
        print(json.dumps({**found, **more, **groups}))
        return
    tuned = "validation samples (the run's --tune)" if plan.tune and not options.data else "test samples"
    of = "validation samples" if options.calibrate else tuned
    known = not options.data and headline.name == "accuracy"
    guess = f" (always the commonest class: {100 * test.majority:.2f} %)" if known else ""
    console.print(f"{headline.name} {headline.shown(scores.score())}{headline.unit} on {len(scores)} {of}{guess}")
    if others := [m for m in measured(test.task) if m.name in everything and m.name != headline.name]:
        console.print(", ".join(f"{m.name} {m.shown(everything[m.name])}{m.unit}" for m in others), soft_wrap=True)
    if told:
        _show_figures(told, test.task, data.dataset.classes)
    for group, rows in groups.items():
        if rows:
            console.print(_values(group, rows, headline))


def _planned(
    options: EvaluateOptions, config: Mapping[str, Any]
) -> tuple[Plan[Method], datasets.FederatedData, datasets.FederatedData]:
    """Return the plan of a run, its own data, and the data on which its model is measured."""
    plan = stored(options.run)
    if metric := options.metric or ("" if plan.recipe.metric or not options.calibrate else "auroc"):
        plan = replace(plan, recipe=replace(plan.recipe, metric=metric))
    own = plan.federation()
    if not options.data:
        check_same_data(config, plan.recipe.method, own, options.run)
    reading = replace(plan.reading, **_columns(options, own.dataset.inputs))
    other = replace(plan, reading=reading).other(options.data, own.dataset) if options.data else None
    data = own if other is None else datasets.split(other, datasets.Iid(), 1, seed=0)
    if options.calibrate:
        _check_calibrate(data.dataset.task, data.dataset.classes)
        data = own.for_tuning()
    if data.dataset.task.kind != own.dataset.task.kind:
        raise UserError(
            f"the labels of {options.data} are of {data.dataset.task.kind}, the model was trained for "
            f"{own.dataset.task.kind}: evaluate on data with such labels"
        )
    if len(data.dataset.classes) != len(own.dataset.classes):
        raise UserError(
            f"{options.data} has {len(data.dataset.classes)} classes, the model was trained on "
            f"{len(own.dataset.classes)}: evaluate on data with the same classes"
        )
    return plan, own, data


def _check_calibrate(task: Task, classes: Sequence[object]) -> None:
    """Refuse to recalibrate what cannot be."""
    if task.kind != "classification" or len(classes) != 2:
        raise UserError("--calibrate is for two classes: leave it out")


def _calibrate(options: EvaluateOptions, found: Figures) -> None:
    """Fit a recalibration, keep it, and say it."""
    assert options.calibrate
    how = Recalibration.fitted(options.calibrate, found, options.threshold, model_in(options.run))
    how.write(options.run)
    line = (
        f"recalibrated on {how.samples} validation samples ({how.form}): logit {how.slope:.4g}·z {how.intercept:+.4g}; "
        f"threshold {how.threshold:.4g} ({how.rule}); kept in {options.run}, the figures are of the model before it"
    )
    print(line, file=sys.stderr if options.json else sys.stdout)


def _show_figures(found: Figures, task: Task, classes: Sequence[object]) -> None:
    """Print figures with their intervals, and thresholds."""
    table = Table("figure", "value", "95 % interval", "error by bins")
    for metric in task.metrics:
        if metric.name not in found.values:
            continue
        interval, error = found.intervals.get(metric.name), found.errors.get(metric.name)
        ends = f"{metric.shown(interval[0])} to {metric.shown(interval[1])}" if interval else ""
        off = f"below {metric.scale * error:.2g}" if error and error >= 1e-6 else ""
        table.add_row(metric.name + metric.unit, metric.shown(found.values[metric.name]), ends, off)
    console.print(table)
    if found.prevalence and len(classes) == len(found.prevalence) <= _MOST_NAMED:
        shares = (f"{name} {100 * share:.2f} %" for name, share in zip(classes, found.prevalence, strict=True))
        console.print(f"share of test samples: {', '.join(shares)}", soft_wrap=True)
    if found.thresholds:
        table = Table("threshold", "at", "sensitivity %", "interval", "specificity %", "interval", "PPV %", "NPV %")
        for one in found.thresholds:
            within = {name: f"{100 * a:.1f} to {100 * b:.1f}" for name, (a, b) in one.intervals.items()}
            values = [f"{100 * v:.1f}" if v is not None else "-" for v in (one.predictive, one.negative_predictive)]
            table.add_row(
                *(one.rule, f"{one.threshold:.4g}", f"{100 * one.sensitivity:.1f}", within["sensitivity"]),
                *(f"{100 * one.specificity:.1f}", within["specificity"], *values),
            )
        console.print(table)


def _on_silos(options: EvaluateOptions) -> None:
    """Measure a run's model at silos."""
    from ekiden.cli import silos  # noqa: PLC0415  (it needs the extra flower)

    for name in ("data", "label_column", "column", "client", "metric"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} is for data here, silos have their own: leave it out")
    if (options.threshold, options.sensitivity) != (None, 0.95) and not options.calibrate:
        raise UserError("silos report the usual thresholds: leave out --threshold and --sensitivity")
    config = read_config(options.run)
    task = task_in(config)
    if options.calibrate:
        _check_calibrate(task, config["classes"])
    row = silos.evaluate(options.run, options.federation, options.clients, validation=bool(options.calibrate))
    with reading("what silos reported", "the same Ekiden at all parties"):
        found = made(Figures, row["figures"])
    if options.calibrate:
        _calibrate(options, found)
    if options.json:
        print(json.dumps(row))
        return
    _show_figures(found, task, config["classes"])
    if guess := row.get("majority"):
        console.print(f"always the commonest class: {100 * guess:.2f} % accuracy")
    means = row["silo_means"]
    shown = [f"{m.name} {m.shown(means[m.name])}{m.unit}" for m in task.metrics if m.name in means]
    console.print(f"mean over {found.silos} silos: {', '.join(shown)}", soft_wrap=True)


def _as_measured(options: EvaluateOptions, why: str) -> None:
    """Print what a run measured at its end, if its own data or network were made in Python."""
    given = options.calibrate or options.client or options.metric or options.column or options.label_column
    again = f"to measure again, ekiden.evaluate({str(options.run)!r}, silos) in Python, or other data by --data"
    run = summary.summarise(options.run)
    if given or not run.finished or "loss" not in run.last:
        raise UserError(f"{options.run}: {why}; {again}")
    metric, row = summary.headline(run), run.last
    groups = {"client": dict(zip(run.config["clients"], row.get("clients", ()), strict=False))}
    for kind, values in row.get("groups", {}).items():
        groups[kind] = {name: one.get(metric.name) for name, one in values.items()}
    if options.json:
        counts = {name: sizes[2] for name, sizes in run.config["clients"].items()}
        print(json.dumps({metric.name: row[metric.name], "samples": sum(counts.values()), **groups}))
        return
    console.print(f"{metric.name} {metric.shown(row[metric.name])}{metric.unit} at the end of the run")
    for kind, found in groups.items():
        table = Table()
        table.add_column(kind)
        table.add_column(f"{metric.name}{metric.unit}", justify="right")
        for name, value in found.items():
            table.add_row(name, "-" if value is None else metric.shown(value))
        console.print(table)
    console.print(f"{why}: {again}", soft_wrap=True, highlight=False)


def _on_other_data(options: EvaluateOptions) -> None:
    """Measure a run whose own data are not here: made from Python, or over silos."""
    if options.client:
        raise UserError("measure a personal model of this run from Python: ekiden.load_model(RUN, client=NAME)")
    run = open_run(options.run)
    task = task_in(run.config)
    if options.metric:
        task = replace(task, metric=outside.located(options.metric))
        run = replace(run, config={**run.config, "task": recorded(task)})
    row = run.evaluate(options.data, **_columns(options, inputs_of(run.config)))
    found = {"loss": row["loss"]} | {m.name: row[m.name] for m in measured(task) if m.name in row}
    found |= row.get("metrics", {})
    if options.json:
        print(json.dumps(found))
        return
    shown = {m.name: f"{m.name} {m.shown(found[m.name])}{m.unit}" for m in measured(task) if m.name in found}
    first = shown.pop(task.headline.name, "")
    console.print(", ".join([first, *shown.values(), f"loss {row['loss']:.4f}"]), soft_wrap=True)


def _columns(options: EvaluateOptions, inputs: Inputs) -> dict[str, Any]:
    """Return what the user says about the columns of --data, as fields of `Reading`."""
    found: dict[str, Any] = {"label_column": options.label_column} if options.label_column else {}
    if not options.column:
        return found
    named = {"images": "image_column", "tokens": "text_column", "arrays": "array_column"}.get(inputs.kind)
    if named is None:
        raise UserError("--column names one column of images, texts or arrays, the model takes rows: leave it out")
    return found | {named: options.column}


def _values(group: str, rows: dict[str, tuple[int, float]], metric: Metric) -> Table:
    table = Table()
    table.add_column(group)
    table.add_column("samples", justify="right")
    table.add_column(f"{metric.name}{metric.unit}", justify="right")
    for name, (n, value) in rows.items():
        table.add_row(name, str(n), "-" if isnan(value) else metric.shown(value))
    return table


@dataclass(frozen=True)
class ForgetOptions:
    """Make a run again without one of its clients; the new run has the bits of one that never had it."""

    run: Positional[Path]
    """run folder; it stays as it is: delete it to forget the client there, too"""
    client: str
    """whom to forget"""
    out: Path | None = None
    """new run folder; by default RUN-without-CLIENT"""
    release: Path | None = None
    """between machines, for methods with secure sums: file in which the silo that leaves agrees to that; `ekiden silo
    release` makes it there"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""


@dataclass(frozen=True)
class JoinOptions:
    """Make a run again with one more client; the new run has the bits of one that always had it."""

    run: Positional[Path]
    """run folder; it stays as it is"""
    client: str
    """who joins: a client that `ekiden run --without` left out, or one of --data"""
    data: str = ""
    """data that have this client and those of the run, unchanged; by default the run's own"""
    out: Path | None = None
    """new run folder; by default RUN-with-CLIENT"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""


def forget(options: ForgetOptions) -> None:
    """`ekiden forget RUN --client NAME`."""
    with only_json(options.json) as tell:
        _forget(options, tell)


def _forget(options: ForgetOptions, tell: Callable[[Any], None]) -> None:
    if _between_machines(options.run):
        from ekiden.cli import silos  # noqa: PLC0415  (runs on one machine do not need it)

        silos.forget(options.run, options.client, options.out, options.release)
    else:
        if options.release:
            raise UserError("--release is for runs between machines: leave it out")
        _print(tell, options.run, reruns.forget(options.run, options.client, out=options.out))
    console.print(f"{options.run} still holds {options.client}: delete it to forget it there, too", soft_wrap=True)


def join(options: JoinOptions) -> None:
    """`ekiden join RUN --client NAME [--data DATA]`."""
    with only_json(options.json) as tell:
        _join(options, tell)


def _join(options: JoinOptions, tell: Callable[[Any], None]) -> None:
    if _between_machines(options.run):
        from ekiden.cli import silos  # noqa: PLC0415

        if options.data:
            raise UserError(f"the silos of {options.run} have their own data: leave out --data")
        return silos.join(options.run, options.client, options.out)
    outside.trust(options.data)
    data = datasets.located(options.data) if options.data else None
    _print(tell, options.run, reruns.join(options.run, options.client, data, out=options.out))


def _between_machines(folder: Path) -> bool:
    return read_config(folder).get("on") == "flower"


def _print(tell: Callable[[Any], None], before: Path, result: Result) -> None:
    assert result.folder is not None, "it was made"
    tell(summary.as_record(summary.summarise(result.folder)))
    console.print(summary.comparison([summary.summarise(before), summary.summarise(result.folder)]))
    console.print(f"run folder: {result.folder}", soft_wrap=True)
