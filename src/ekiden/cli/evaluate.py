"""`ekiden evaluate`."""

import json
import sys
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

from rich.table import Table
from tyro.conf import Positional

from ekiden import data as datasets
from ekiden.base import outside
from ekiden.base.errors import UserError
from ekiden.cli.console import console
from ekiden.data.tasks import Metric
from ekiden.data.tasks.base import measured
from ekiden.engine.folder import read_config
from ekiden.engine.modules import read_model
from ekiden.engine.parties import check_same_data
from ekiden.runs import summary
from ekiden.runs.plan import judge, stored


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure the model of a run on its own or other test data: in all, per client, per domain, per class."""

    run: Positional[Path]
    """run folder"""
    data: str = ""
    """another data set, folder or Parquet file with the same classes; by default the run's own"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    metric: str = ""
    """another headline metric than the run's, by its name, or FILE.py:NAME; naming one measures all"""
    json: bool = False
    """print JSON instead of tables"""


def evaluate(options: EvaluateOptions) -> None:
    """`ekiden evaluate RUN [--data ...]`."""
    outside.trust(options.metric)
    plan = stored(options.run)
    if options.metric:
        plan = replace(plan, metric=outside.located(options.metric))
    own = plan.federation()
    if not options.data:
        check_same_data(read_config(options.run), plan.method, own, options.run)
    other = plan.other(options.data, own.dataset) if options.data else None
    data = own if other is None else datasets.split(other, datasets.Iid(), 1, seed=0)
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
    test = judge(plan, own, data)
    name = f"personal/{options.client}.safetensors" if options.client else "model.safetensors"
    build = test.own if options.client else test.build
    model, full = read_model(options.run, name, build), test.task.measures_all or None
    scores = test.scores(model, personal=bool(options.client), full=full)
    headline, everything = test.task.headline, scores.metrics() if test.task.measures_all else {}
    groups = {"client": test.by_client(scores) if other is None else {}}
    groups |= {"domain": test.by_domain(scores), "class": test.by_class(scores)}
    run = summary.summarise(options.run)
    if run.metrics and not run.finished:
        steps = plan.whole.steps(len(run.config["clients"]))
        line = f"the run stopped after step {run.last['step']} of {steps}: this is its model so far"
        print(line, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        value = scores.score()
        found = {headline.name: None if isnan(value) else value, "samples": len(scores)}
        print(json.dumps({**found, **({"metrics": everything} if everything else {}), **groups}))
        return
    kind = "validation samples (the run's --tune)" if plan.tune and other is None else "test samples"
    told = other is None and headline.name == "accuracy"
    guess = f" (always the commonest class: {100 * test.majority:.2f} %)" if told else ""
    console.print(f"{headline.name} {headline.shown(scores.score())}{headline.unit} on {len(scores)} {kind}{guess}")
    if others := [m for m in measured(test.task) if m.name in everything and m.name != headline.name]:
        console.print(", ".join(f"{m.name} {m.shown(everything[m.name])}{m.unit}" for m in others), soft_wrap=True)
    for group, rows in groups.items():
        if rows:
            console.print(_values(group, rows, headline))


def _values(kind: str, rows: dict[str, tuple[int, float]], metric: Metric) -> Table:
    table = Table()
    table.add_column(kind)
    table.add_column("samples", justify="right")
    table.add_column(f"{metric.name}{metric.unit}", justify="right")
    for name, (n, value) in rows.items():
        table.add_row(name, str(n), "-" if isnan(value) else metric.shown(value))
    return table
