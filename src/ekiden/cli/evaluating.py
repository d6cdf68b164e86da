"""The command line of evaluation: `ekiden evaluate`, on data here or at silos."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.table import Table as RichTable

from ekiden.cli.console import console, print_json, say
from ekiden.clinic.answers import between_silos, figures_of, subgroups_of
from ekiden.clinic.figures import Figures
from ekiden.clinic.ranked import Wanted
from ekiden.clinic.recalibration import Recalibration, keep_subgroups, model_in
from ekiden.clinic.subgroups import Division, cell, check_divisions, divisions
from ekiden.core.base import outside
from ekiden.core.base.checks import Positional, made, reading
from ekiden.core.base.errors import UserError, counted
from ekiden.core.data.samples import FederatedData, said_in
from ekiden.core.engine.evaluation import TestSet, of_imbalanced
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.setup import read_model
from ekiden.core.tasks import Metric, Task, recorded
from ekiden.core.tasks.base import measured
from ekiden.core.training.weights import Weights
from ekiden.lab.drawing import table_of
from ekiden.readers.kinds import Inputs
from ekiden.runs import summary
from ekiden.runs.config import inputs_of, not_finished, task_in
from ekiden.runs.loading import open_models
from ekiden.runs.measuring import Part, silos_in
from ekiden.runs.plan import in_memory
from ekiden.runs.result import Result

Place: TypeAlias = Literal["here", "flower"]
_GUESS = "always the commonest class"
# classes whose shares are printed
_MOST_NAMED = 20


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure the model of a run on its own or other test data: in all, per client, per domain, per
    class.
    """

    run: Positional[Path]
    """run folder; its config.json and model.safetensors are enough"""
    data: str = ""
    """another data set, folder or file with the same classes; by default the run's own. With --on
    flower: which data set of the silos, if their files name several"""
    part: Part = "all"
    """rows of --data that are measured: all, or `test`, the fifth that a run on them would hold out; if
    it has a test part of its own, that is measured"""
    label_column: tuple[str, ...] = ()
    """column of labels in the tables of --data, or several columns; by default as in the run, if it
    knows them"""
    column: str = ""
    """column of the tables of --data that holds the images, texts or arrays; by default as in the
    run"""
    weights: Path | None = None
    """safetensors file with other weights for the run's network"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    metric: str = ""
    """another headline metric than the run's, by its name, or FILE.py:NAME"""
    threshold: float | None = None
    """for two classes: also show this threshold of the second class's probability"""
    sensitivity: float = 0.95
    """for two classes: also show the highest threshold with this sensitivity"""
    by: tuple[str, ...] = ()
    """columns that divide the test samples into subgroups, with the bounds of numbers: --by sex
    age:40:65; `domain` is the data's domains, `client` the silos. With --on flower: those that the
    silos' files allow. `ekiden report` shows the table, too"""
    calibrate: Literal["", "platt", "temperature"] = ""
    """for two classes: fit a recalibration to validation data and keep it in the run folder with the
    threshold (--threshold, by default Youden's); `predict`, `export` and `card`
    then use both"""
    on: Place = "here"
    """where the test data are: `flower` measures the model at silos, also at others than those that
    trained it"""
    federation: Path | None = None
    """with --on flower: folder that `ekiden federation init` made; by default the run's
    SuperLink"""
    clients: str = ""
    """with --on flower: names of the silos, separated by commas; by default those of the
    federation, or of the run"""
    evaluate_dp: str = ""
    """with --on flower: noise on what silos report, epsilon=2,delta=1e-5 (see docs/evaluation.md), or
    exact; by default as in the run"""
    json: bool = False
    """print JSON: the metric by its name, `loss`, `samples`, and samples and value by `client`,
    `domain` and `class`; with --metric all `metrics`; with --by `groups`, {column: {subgroup:
    {metric: value}}}, and `subgroups`, the figures from silos' counts, with the `threshold` of
    their sensitivity, `untold` samples in subgroups too small to show, and `shares`, the
    figures that tables show in percent"""


def evaluate(options: EvaluateOptions) -> None:
    """`ekiden evaluate RUN [--data ...]`."""
    _check_weights(options)
    if options.on == "flower":
        return _on_silos(options)
    if options.federation or options.clients or options.evaluate_dp:
        raise UserError("--federation, --clients and --evaluate-dp are for silos: add --on flower")
    if options.calibrate and (options.data or options.client):
        raise UserError(
            "--calibrate is for the run's global model and own validation data: leave out --data, "
            "--client"
        )
    if options.by and (options.calibrate or options.client):
        raise UserError(
            "--by is for test samples and the global model: leave out --calibrate and --client"
        )
    config = read_config(options.run)
    if not options.data and (why := in_memory(config)):
        raise UserError(
            f"{options.run}: {why}: measure it in Python, by ekiden.evaluate("
            f"{str(options.run)!r}, silos), or on other data, by --data or --on flower; `ekiden "
            "show` has what it measured itself"
        )
    _evaluate_here(options, config)


def _evaluate_here(options: EvaluateOptions, config: Mapping[str, Any]) -> None:
    """Measure a run's model on data of this machine."""
    by = divisions(options.by, said_in(config).get("reading", {}).get("group_column", ""))
    run, data = _opened(options, config, by)
    test = run.judge(data)
    scores = test.scores(_model(options, run, test), personal=bool(options.client), full=True)
    headline = test.task.headline
    wanted = Wanted(options.threshold, options.sensitivity)
    parts = [scores.at(client.test.rows) for client in data.clients]
    told = figures_of(test, scores, wanted)
    apart = between_silos(test, parts)
    if options.threshold is not None and not told.thresholds:
        raise UserError(
            "--threshold is for two classes, and none follows from these data: leave it out"
        )
    if options.calibrate:
        _calibrate(options, told)
    table: dict[str, Any] = {}
    if by:
        table = subgroups_of(test, scores, by, wanted)
        if not options.data and not options.weights:
            keep_subgroups(options.run, table["subgroups"])
    groups = {"client": {}, "domain": test.by_domain(scores), "class": test.by_class(scores)}
    if not options.data:
        groups["client"] = test.by_client(scores)
    so_far = summary.summarise(options.run)
    if so_far.metrics and not so_far.finished and not options.weights:
        _print_beside(options, not_finished(config, so_far.last["step"]))
    given = len(data.dataset.test)
    if data.dataset.train is not data.dataset.test:
        given += len(data.dataset.train)
    if options.json:
        found = {
            headline.name: scores.score(),
            "loss": scores.mean_loss(),
            "samples": len(scores),
            "rows": given,
        }
        more = {"metrics": scores.metrics(), "figures": told.to_json(), "heterogeneity": apart}
        print_json({**found, **more, **table, **groups}, one_line=True)
        return
    of = "test samples"
    if options.data:
        of = f"of {given} rows"
    elif said_in(config).get("tune"):
        of = "validation samples (the run's --tune)"
    elif options.calibrate:
        of = "validation samples"
    console.print(f"{headline.said(scores.score())} on {len(scores)} {of}")
    _show_figures(told, test.task, data.dataset.classes)
    _show_between(apart, test.task)
    if by:
        show_subgroups(table["subgroups"], table["groups"])
    _show_groups(groups, table.get("groups", {}), headline)


def _show_groups(
    groups: Mapping[str, dict[str, tuple[int, float]]], shown: Mapping[str, Any], headline: Metric
) -> None:
    """Print the headline metric by client, domain and class, and its mean over clients. Leave out
    what tables of subgroups have shown.
    """
    for group, rows in groups.items():
        if rows and group not in shown:
            console.print(_values(group, rows, headline))
    if each := [value for _, value in groups["client"].values() if not isnan(value)]:
        mean = headline.said(sum(each) / len(each))
        console.print(f"mean over {counted(len(each), 'client')}: {mean}")


def _opened(
    options: EvaluateOptions, config: Mapping[str, Any], by: Sequence[Division]
) -> tuple[Result, FederatedData]:
    """Return a run with the metric that is asked for, and the data on which it is measured."""
    run = open_models(options.run)
    task = task_in(config)
    metric = options.metric
    # it is of the classes alone: `_check_calibrate` refuses other tasks
    ranked = options.calibrate and task.kind == "classification"
    if ranked and not config["recipe"]["metric"]:
        metric = metric or "auroc"
    if metric:
        task = replace(task, metric=outside.located(metric))
        run = replace(run, config={**run.config, "task": recorded(task)})
    if options.data:
        columns = _columns(options, inputs_of(config))
        data = silos_in(options.data, config, columns, options.part)
    else:
        data = run.data()
    if options.calibrate:
        _check_calibrate(task, data.dataset.classes)
        data = data.for_tuning()
    if by:
        check_divisions(by, data.dataset)
    return run, data


def _model(options: EvaluateOptions, run: Result, test: TestSet) -> Weights:
    """Return the model that is measured."""
    if options.client:
        return run.personal_model(options.client)
    if options.weights:
        return read_model(options.run, str(options.weights.absolute()), test.build, own=False)
    return read_model(options.run, "model.safetensors", test.build)


def _check_weights(options: EvaluateOptions) -> None:
    """Refuse what another file's values do not have."""
    if options.weights is None:
        return
    if options.client or options.calibrate:
        raise UserError("--weights has no personal models: leave out --client and --calibrate")
    if not options.weights.is_file():
        raise UserError(
            f"{options.weights} is not a file: give a safetensors file with values of the run's "
            "network"
        )


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
        f"recalibrated on {how.samples} validation samples ({how.form}): logit {how.slope:.4g}·z "
        f"{how.intercept:+.4g}; "
        f"threshold {how.threshold:.4g} ({how.rule}); kept in {options.run}, the figures are of "
        "the model before it"
    )
    _print_beside(options, line)


def _print_beside(options: EvaluateOptions, line: str) -> None:
    """Print a line that is not part of the JSON."""
    out = sys.stdout
    if options.json:
        out = sys.stderr
    print(line, file=out)


def _show_between(found: Mapping[str, Any], task: Task) -> None:
    """Print how figures differ between silos, if that is known."""
    if not found:
        return
    table = RichTable(
        "between silos", "silos", "mean", "95 % interval", "deviation", "95 % of new silos"
    )
    for metric in task.metrics:
        if (one := found.get(metric.name)) is None:
            continue
        ends = [" to ".join(map(metric.shown, one[what])) for what in ("interval", "prediction")]
        mean = metric.shown(one["mean"])
        deviation = metric.shown(one["deviation"])
        table.add_row(
            metric.name + metric.unit, str(one["silos"]), mean, ends[0], deviation, ends[1]
        )
    console.print(table)


def _show_figures(found: Figures, task: Task, classes: Sequence[object]) -> None:
    """Print figures with their intervals, and thresholds.

    Where accuracy says little, because most samples are of one class, ranks come first.
    """
    about = {"majority": found.majority or 0.0, "metrics": found.values}
    if line := of_imbalanced({**about, "confusion": found.confusion}, task, classes):
        say(line)
    error = "error by bins"
    if found.noise:
        error = "noise (deviation)"
    table = RichTable("figure", "value", "95 % interval", error)
    known = {metric.name: (metric.shown, metric.unit, metric.scale) for metric in measured(task)}
    names = [name for name in known if name in found.values]
    if line:
        names.sort(key=lambda name: name not in ("auroc", "average_precision"))
    for name in dict.fromkeys([*names, *found.values]):
        if name == "loss":
            continue
        text, unit, scale = known.get(name, ("{:.4g}".format, "", 1))
        interval = found.intervals.get(name)
        bins = found.errors.get(name)
        ends = off = ""
        if interval:
            ends = f"{text(interval[0])} to {text(interval[1])}"
        # less is an error of rounding
        if bins and bins >= 1e-6:
            off = f"below {scale * bins:.2g}"
        if name in found.noise:
            off = f"{scale * found.noise[name]:.2g}"
        table.add_row(name + unit, text(found.values[name]), ends, off)
    console.print(table)
    if found.majority is not None:
        say(f"{_GUESS} of the training samples: {100 * found.majority:.2f} % accuracy")
    if found.prevalence and len(classes) == len(found.prevalence) <= _MOST_NAMED:
        shares = (
            f"{name} {100 * share:.2f} %"
            for name, share in zip(classes, found.prevalence, strict=True)
        )
        say(f"share of test samples: {', '.join(shares)}")
    if found.thresholds:
        _show_thresholds(found)


def _show_thresholds(found: Figures) -> None:
    """Print what thresholds of two classes give."""
    rates = ("sensitivity %", "interval", "specificity %", "interval", "PPV %", "NPV %")
    table = RichTable("threshold", "at", *rates)
    for one in found.thresholds:
        within = {name: f"{100 * a:.1f} to {100 * b:.1f}" for name, (a, b) in one.intervals.items()}
        table.add_row(
            one.rule,
            f"{one.threshold:.4g}",
            _per_cent(one.sensitivity),
            within.get("sensitivity", ""),
            _per_cent(one.specificity),
            within.get("specificity", ""),
            _per_cent(one.predictive),
            _per_cent(one.negative_predictive),
        )
    console.print(table)


def _per_cent(share: float | None) -> str:
    """Return a share as text; a dash if it is not defined."""
    if share is None:
        return "-"
    return f"{100 * share:.1f}"


def show_subgroups(found: Mapping[str, Any], exact: Mapping[str, Any] = {}) -> None:
    """Print a table of subgroups for each column, with exact metrics by column and subgroup if they
    are known.
    """
    if "threshold" in found:
        console.print(
            f"sensitivity and specificity at {found['threshold']:.4g}; gaps are from the column's "
            "others"
        )
    for column, rows in found["groups"].items():
        names: Mapping[str, bool] = found.get("shares", {})
        counts = ["samples"]
        if any("positives" in row for row in rows.values()):
            counts.append("positives")
        heads = [f"{name} %" if share else name for name, share in names.items()]
        table = RichTable(column, *counts, *heads)
        for subgroup, row in rows.items():
            known = exact.get(column, {}).get(subgroup, {})
            cells = [_cell(row, name, known, share=share) for name, share in names.items()]
            table.add_row(subgroup, *(str(row.get(name, "")) for name in counts), *cells)
        console.print(table)
    for column, left in found.get("untold", {}).items():
        say(f"{column}: {left} samples are in small subgroups, which are left out")


def _cell(row: Mapping[str, Any], name: str, exact: Mapping[str, float], *, share: bool) -> str:
    """Return a figure of a subgroup as `cell` does, and the exact value if that differs."""
    text = cell(row, name, share=share)
    told = row["values"].get(name)
    # half of the last digit that is shown
    if told is not None and abs(exact.get(name, told) - told) >= 5e-4:
        shown = f"{exact[name]:.3f}"
        if share:
            shown = _per_cent(exact[name])
        text += f"\nexact {shown}"
    return text


def _on_silos(options: EvaluateOptions) -> None:
    """Measure a run's model at silos."""
    # it needs the extra flower
    from ekiden.cli import coordinator
    from ekiden.silos.coordinator.remote_plan import Measuring

    for name in ("label_column", "column", "client", "metric"):
        if getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')} is for data here, silos have their own: leave it out"
            )
    if (options.threshold, options.sensitivity) != (None, 0.95) and not options.calibrate:
        raise UserError(
            "silos report the usual thresholds: leave out --threshold and --sensitivity"
        )
    config = read_config(options.run)
    task = task_in(config)
    if options.calibrate:
        _check_calibrate(task, config["classes"])
    if options.by and options.calibrate:
        raise UserError(
            "--by is for test samples, --calibrate for validation samples: leave out one"
        )
    by = tuple(one.text() for one in divisions(options.by))
    asked = Measuring(
        str(options.run.absolute()),
        bool(options.calibrate),
        by,
        coordinator.absolute(options.weights),
    )
    about = (options.federation, options.clients, options.data, options.evaluate_dp)
    row = coordinator.evaluate(asked, *about)
    if by and not options.weights and "subgroups" in row:
        keep_subgroups(options.run, row["subgroups"])
    with reading("what silos reported", "the same Ekiden at all parties"):
        found = made(Figures, row["figures"])
    if options.calibrate:
        _calibrate(options, found)
    if options.json:
        print_json(row, one_line=True)
        return
    _show_figures(found, task, config["classes"])
    _show_between(row.get("heterogeneity", {}), task)
    if "subgroups" in row:
        show_subgroups(row["subgroups"])
    means = row["silo_means"]
    shown = [m.said(means[m.name]) for m in task.metrics if m.name in means]
    say(f"mean over {found.silos} silos: {', '.join(shown)}")


def _columns(options: EvaluateOptions, inputs: Inputs) -> dict[str, Any]:
    """Return what the user says about the columns of --data, as fields of `Reading`."""
    found: dict[str, Any] = {}
    if options.label_column:
        found["label_column"] = options.label_column
    if not options.column:
        return found
    named = {"images": "image_column", "tokens": "text_column", "arrays": "array_column"}.get(
        inputs.kind
    )
    if named is None:
        raise UserError(
            "--column names one column of images, texts or arrays, the model takes rows: leave it "
            "out"
        )
    return found | {named: options.column}


def _values(group: str, rows: dict[str, tuple[int, float]], metric: Metric) -> RichTable:
    value = f"{metric.name}{metric.unit}"
    table = table_of(group, "samples", value, right=("samples", value))
    for name, (n, score) in rows.items():
        table.add_row(name, str(n), metric.shown(score))
    return table
