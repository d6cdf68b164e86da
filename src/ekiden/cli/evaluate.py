"""`ekiden evaluate`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from tyro.conf import Positional

from ekiden import data as datasets
from ekiden.base.errors import UserError
from ekiden.cli.console import console, parse
from ekiden.engine.folder import read_config
from ekiden.engine.modules import read_model
from ekiden.engine.parties import check_same_data
from ekiden.experiments import summary
from ekiden.experiments.plan import judge, stored


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure the model of a run on its own or other test data: in all, per client, per domain, per class."""

    run: Positional[Path]
    """run folder"""
    data: str = ""
    """another data set, folder or Parquet file with the same classes; by default the run's own"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    json: bool = False
    """print JSON instead of tables"""


def evaluate(args: Sequence[str]) -> None:
    """`ekiden evaluate RUN [--data ...]`."""
    options = parse(EvaluateOptions, args, "ekiden evaluate")
    plan = stored(options.run)
    own = plan.federation()
    if not options.data:
        check_same_data(read_config(options.run), plan.method, own, options.run)
    other = datasets.load(options.data, size=own.dataset.shape[-1]) if options.data else None
    data = own if other is None else datasets.split(other, datasets.Iid(), 1, seed=0)
    if len(data.dataset.classes) != len(own.dataset.classes):
        raise UserError(
            f"{options.data} has {len(data.dataset.classes)} classes, the model was trained on "
            f"{len(own.dataset.classes)}: evaluate on data with the same classes"
        )
    test = judge(plan, own, data)
    name = f"personal/{options.client}.safetensors" if options.client else "model.safetensors"
    build = test.own if options.client else test.build
    scores = test.scores(read_model(options.run, name, build), personal=bool(options.client))
    groups = {"client": test.by_client(scores) if other is None else {}}
    groups |= {"domain": test.by_domain(scores), "class": test.by_class(scores)}
    run = summary.summarise(options.run)
    if run.metrics and not run.finished:
        steps = plan.whole.steps(len(run.config["clients"]))
        line = f"the run stopped after step {run.last['step']} of {steps}: this is its model so far"
        print(line, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps({"accuracy": scores.accuracy(), "samples": len(scores.right), **groups}))
        return
    kind = "validation samples (the run's --tune)" if plan.tune and other is None else "test samples"
    console.print(f"accuracy {100 * scores.accuracy():.2f} % on {len(scores.right)} {kind}")
    for group, rows in groups.items():
        if rows:
            console.print(_accuracies(group, rows))


def _accuracies(kind: str, rows: dict[str, tuple[int, float]]) -> Table:
    table = Table()
    table.add_column(kind)
    table.add_column("samples", justify="right")
    table.add_column("accuracy %", justify="right")
    for name, (n, accuracy) in rows.items():
        table.add_row(name, str(n), f"{100 * accuracy:.2f}" if n else "-")
    return table
