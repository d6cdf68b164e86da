"""A model card: what was trained, on how much data of which silos, how, how good it is, and what is
not known.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ekiden.clinic.recalibration import kept_subgroups, recalibration_in
from ekiden.core.base import outside
from ekiden.core.base.errors import counted, listed
from ekiden.core.data.samples import said_in
from ekiden.core.engine.method import Method
from ekiden.core.tasks import Classification, MultiLabel, Regression, Survival
from ekiden.core.training.private.promise import condition, spent_epsilon
from ekiden.methods import known
from ekiden.readers.kinds import Table
from ekiden.runs.config import flat, inputs_of, last_measured, not_finished, task_in
from ekiden.runs.loaded_model import LoadedModel
from ekiden.runs.result import Result
from ekiden.runs.summary import chosen_model, partition, size, trained

# silos that are listed individually
_MOST = 100


def card(result: Result) -> str:
    """Return the card of a run in Markdown. Of the data it has only counts, shapes, and names of
    classes and silos.
    """
    config = result.config
    task = task_in(config)
    name = outside.short(config["recipe"]["method"])
    data = _short(config["dataset"])
    lines = [
        f"# {config['recipe']['method'] if '/' not in config['recipe']['method'] else name}: "
        f"{task.kind} of {data}",
        "",
    ]
    lines += [_summary(result), ""]
    if line := not_finished(config, result.state.step):
        lines += [f"**Not finished:** {line}.", ""]
    if result.diverged:
        lines += ["**Diverged:** the models are far worse than guessing.", ""]
    sections = (
        ("What it takes and gives", _model(config)),
        ("Training data", _data(config)),
        ("Training", _training(result)),
        ("Communication", _communication(result)),
        ("Measured", _measured(result)),
        ("Coefficients", _coefficients(result)),
        ("Baseline hazard", _baseline(result)),
        ("Limits, and what is not known", _limits(result)),
    )
    for title, content in sections:
        if content:
            lines += [f"## {title}", "", *content, ""]
    return "\n".join(lines)


def usage(model: LoadedModel, takes: str) -> str:
    """Return how an exported folder is used in plain PyTorch."""
    raw = [f"torch.zeros(1, {', '.join(map(str, model.shape))}, dtype={model.inputs.dtype})"]
    if isinstance(model.inputs, Table):
        raw = []
        if numbers := len(model.inputs.numeric):
            raw.append(f"torch.zeros(1, {numbers}, dtype=torch.float64)")
        if codes := len(model.inputs.categorical):
            raw.append(f"torch.zeros(1, {codes}, dtype=torch.int64)")
    return f"""
## Use

`model.pt2` is the whole model, scaling included, without any of its Python code. Open it only if you trust where it
comes from: PyTorch may unpickle parts of such files.

```python
import torch

model = torch.export.load("model.pt2").module()
outputs = model({", ".join(raw)})
```

It takes {takes}.

`model.safetensors` holds the parameters of the network by name, `config.json` the classes and the scaling; this
network takes scaled samples. These two files contain no code.
"""


def _summary(result: Result) -> str:
    last = last_measured(result.metrics)
    method = result.config["recipe"]["method"]
    kind = known(method)
    about = outside.summary_of(kind) if kind else ""
    text = f"Trained by `{outside.short(method)}` over {len(result.clients)} silos whose data stayed where they were. "
    text += about
    value = last.get(result.headline)
    # AUROC of one class is not defined, and silos count no scores of very many classes
    if value is not None:
        text += f" On the silos' test data: {result.headline} {value:.4f}."
    return text


def _model(config: Mapping[str, Any]) -> list[str]:
    task = task_in(config)
    given = config["input"]
    own = config.get("architecture", {}).get("class")
    kind = known(config["recipe"]["method"])
    name = config["network"] or own or config["recipe"]["model"]
    if kind and chosen_model(config) == "auto" and kind.own_network is not Method.own_network:
        # the network by name is only what the method begins with
        name = kind.title()
    name = outside.short(name)
    if name.startswith("hf:/"):
        name = f"hf:{_short(name)}"
    network = f"`{name}`"
    if not config["network"]:
        network += ", given from Python"
    rows = [
        f"- Network: {network}, {size(config['model_bytes'])} of parameters.",
        f"- Takes: {inputs_of(config).takes(given['shape'])}",
    ]
    if any(given["mean"]) or {*given["std"]} != {1}:
        rows.append(
            f"- Scaling: mean {_numbers(given['mean'])}, standard deviation "
            f"{_numbers(given['std'])}."
        )
    gives: dict[type, str] = {
        Classification: "one of the classes",
        MultiLabel: "any of the labels",
        Regression: "the numbers",
        Survival: "the logarithm of the relative hazard, for the time",
    }
    shown = listed(config["classes"], _MOST)
    return [*rows, f"- Gives {gives.get(type(task), task.kind)}: {shown}."]


def _data(config: Mapping[str, Any]) -> list[str]:
    # a silo may tell no counts
    clients = {name: counts for name, counts in config["clients"].items() if counts}
    lines = [f"- Data set: {_short(config['dataset'])}."]
    if "partition" in said_in(config):
        lines.append(f"- Divided among silos: {partition(config)}.")
    if not clients:
        return [*lines, "- Samples of each silo: not known here."]
    lines += ["", "| silo | training | validation | test |", "|---|---:|---:|---:|"]
    for name in [*clients][:_MOST]:
        lines.append(f"| {_cell(name)} | {' | '.join(map(str, clients[name]))} |")
    if len(clients) > _MOST:
        lines.append(f"| {len(clients) - _MOST} more | | | |")
    total = map(sum, zip(*clients.values(), strict=True))
    return [*lines, f"| all | {' | '.join(map(str, total))} |"]


def _training(result: Result) -> list[str]:
    config = result.config
    settings = {
        **config["recipe"]["hyperparameters"],
        **trained(config, last_measured(result.metrics)),
        "seed": config["recipe"]["seed"],
    }
    settings |= {"dp": config["recipe"].get("dp", "")}
    lines = [f"{result.state.step} of {config['steps']} steps."]
    for made in config.get("revisions", []):
        for what, who in made.items():
            lines[0] += f" {what} {who}."
    lines += ["", "| setting | value |", "|---|---|"]
    for name, value in settings.items():
        if value not in ([], (), ""):
            lines.append(f"| {name} | {_cell(value)} |")
    return lines


def _communication(result: Result) -> list[str]:
    moved = [row for row in result.ledger if not row.missing]
    between = sum(row.bytes for row in moved if "server" not in (row.source, row.target))
    lines = [
        f"- {size(result.bytes)} in {counted(len(moved), 'transfer')}; {size(between)} of it from "
        "silo to silo.",
        f"- One model is {size(result.config['model_bytes'])}.",
    ]
    if absent := len(result.ledger) - len(moved):
        lines.append(f"- Absent {counted(absent, 'time')}.")
    return lines


def _measured(result: Result) -> list[str]:
    last = last_measured(result.metrics)
    if not last:
        return ["Not measured."]
    names = ("accuracy", "majority", "loss", result.headline, *last.get("metrics", {}))
    names += ("global_accuracy", "client_mean", "client_std", "client_worst", "client_decile")
    numbers = flat(last, result.clients) | last.get("metrics", {})
    where = "test data"
    if said_in(result.config).get("tune"):
        where = "validation data, which chose the settings"
    if result.personal_only:
        where += "; mean of the silos' own models"
    lines = [
        f"After step {last['step']}, on the union of all silos' {where}:",
        "",
        "| metric | value |",
        "|---|---:|",
    ]
    shown = {"majority": "accuracy of always giving the commonest class"}
    for name in dict.fromkeys(names):
        if name in numbers:
            words = shown.get(name, name.replace("_", " "))
            lines.append(f"| {words} | {numbers[name]:.4f} |")
    lines += _figures(last.get("figures", {}))
    if how := recalibration_in(result.config):
        lines += [
            "",
            "These figures are of the model as it was trained. Afterwards it was recalibrated on "
            f"{how.samples} "
            f"validation samples ({how.form}): its logit z became {how.slope:.4g}·z "
            f"{how.intercept:+.4g}. From a "
            f"probability of {how.threshold:.4g} on ({how.rule}) a sample is "
            f"{result.config['classes'][1]}. "
            "`load_model`, `predict` and `export` use both.",
        ]
    if each := last.get("clients"):
        lines += ["", f"| silo | {result.headline} on its test data |", "|---|---:|"]
        for name, value in zip(result.clients[:_MOST], each, strict=False):
            lines.append(f"| {_cell(name)} | {'-' if value is None else f'{value:.4f}'} |")
    return lines


def _figures(found: Mapping[str, Any]) -> list[str]:
    """Return intervals and thresholds from figures as a row of metrics has them; nothing without
    them.
    """
    lines: list[str] = []
    if intervals := found.get("intervals"):
        lines += ["", "| metric, from counts | value | 95 % interval |", "|---|---:|---:|"]
        for name, (low, high) in intervals.items():
            lines.append(
                f"| {name.replace('_', ' ')} | {found['values'][name]:.4f} | {low:.4f} to "
                f"{high:.4f} |"
            )
    if thresholds := found.get("thresholds"):
        lines += [
            "",
            "| threshold | at | sensitivity | 95 % interval | specificity | 95 % interval |",
        ]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        for one in thresholds:
            cells = [one["rule"], f"{one['threshold']:.4g}"]
            for name in ("sensitivity", "specificity"):
                interval = "-"
                # counts with noise have none
                if name in one["intervals"]:
                    low, high = one["intervals"][name]
                    interval = f"{low:.3f} to {high:.3f}"
                cells += [f"{one[name]:.3f}", interval]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            "Thresholds were chosen on these test data, so their sensitivity and specificity are "
            "optimistic.",
        ]
    return lines


def _coefficients(result: Result) -> list[str]:
    """Return the table of a regression; nothing for other models."""
    if "family" not in result.config["recipe"]["hyperparameters"] or result.weights is None:
        return []
    lines = [
        "| output | column | estimate | standard error | p | 95 % interval |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in result.coefficients:
        if one.estimate is None:
            continue
        line = f"| {_cell(one.output)} | {_cell(one.column)} | {one.estimate:.4g} | "
        if one.error is None:
            line += "- | - | - |"
        else:
            line += f"{one.error:.4g} | {one.p:.3g} | {one.low:.4g} to {one.high:.4g} |"
        lines.append(line)
    return lines


def _baseline(result: Result) -> list[str]:
    """Return the cumulative hazard of a Cox regression; nothing for other models."""
    if result.config["recipe"]["hyperparameters"].get("family") != "cox" or result.weights is None:
        return []
    if (found := result.load_model().baseline) is None:
        return []
    lines = ["| time | cumulative hazard |", "|---:|---:|"]
    for time, value in zip(found.times, found.hazard, strict=True):
        lines.append(f"| {time:g} | {value:.6g} |")
    return [
        *lines,
        "",
        "Of all silos together, where the model gives z = 0. A share exp(-hazard·exp(z)) has not "
        "had the event yet.",
    ]


def _limits(result: Result) -> list[str]:
    config = result.config
    lines = []
    unmeasured = "fairness between groups of people, robustness"
    if result.folder and (groups := kept_subgroups(result.folder).get("groups")):
        columns = ", ".join(map(_cell, groups))
        lines.append(
            f"- It was also measured for subgroups ({columns}): `ekiden report` shows where it "
            "fails."
        )
        unmeasured = "robustness"
    lines += [
        "- The numbers above are for test data of the same silos. The model was not measured on "
        "data of other silos.",
        "- This is one run with one seed: it does not show how much another seed would change.",
        f"- Not measured: {unmeasured} against changed or hostile inputs, calibration unless it "
        "is named above.",
        f"- Data stayed at the silos, models did not. {_privacy(config)}",
        "- Where the data come from, their licence, and whether people agreed to this use: not "
        "known here.",
    ]
    if config.get("on") != "flower":
        lines.append("- The silos were simulated on one machine.")
    worst = last_measured(result.metrics).get("client_worst")
    if worst is not None:
        lines.append(
            f"- The lowest {result.headline} of a silo is {worst:.4f}: look at the table of silos."
        )
    return lines


def _privacy(config: Mapping[str, Any]) -> str:
    """Say what is promised about single training samples."""
    if found := config.get("privacy"):
        return (
            "Differential privacy of each training sample: epsilon = "
            f"{spent_epsilon(found['epsilon'])} at delta = {found['delta']:g}, for each silo and "
            f"the whole run{condition(found)}. It is for samples, not for people with several, and "
            "not for validation and test data."
        )
    return "What a model reveals about its training samples was not measured; no differential privacy was applied."


def _short(name: str) -> str:
    """Return a name without folders, because folders say something about a machine."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(map("{:g}".format, values))


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value)
    return _short(value).replace("|", "\\|")
