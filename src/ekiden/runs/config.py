"""What the configuration of a run and its rows of metrics say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ekiden.clinic.regressions import Coefficient, coefficients
from ekiden.core.base.errors import UserError
from ekiden.core.engine.drive import Row
from ekiden.core.tasks import Metric, Task, task_of
from ekiden.readers.kinds import Inputs, Tokens, from_json


def inputs_of(about: Mapping[str, Any]) -> Inputs:
    """Return the kind of a run's samples."""
    inputs = from_json(about["inputs"])
    network = str(about["network"])
    if isinstance(inputs, Tokens) and inputs.tokenizer == "model" and network.startswith("hf:"):
        # as each silo has its own
        return replace(inputs, tokenizer=network.removeprefix("hf:"))
    return inputs


def data_name(config: Mapping[str, Any]) -> str:
    """Return the name of a run's data set, without the folders of a file."""
    name = str(config["dataset"])
    if Path(name).is_absolute():
        return Path(name).name
    return name


def task_in(about: Mapping[str, Any]) -> Task:
    """Return what a run's labels mean."""
    return task_of(about["task"])


def not_finished(config: Mapping[str, Any], step: int) -> str:
    """Return a line about a run that stopped before its end; empty for other runs."""
    if step >= config["steps"]:
        return ""
    return f"the run stopped after step {step} of {config['steps']}: this is its model so far"


def last_measured(metrics: Iterable[Row]) -> Row:
    """Return the last row whose models were measured; an empty one if none was."""
    # not every step is measured
    return next((row for row in reversed([*metrics]) if "loss" in row), {})


def coefficients_in(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Coefficient, ...]:
    """Return the table of a regression from its run's configuration and the tensors of its
    model.
    """
    if "covariance" not in tensors:
        raise UserError(
            f"{config['recipe']['method']} estimates no coefficients with errors: run glm"
        )
    family = config["recipe"]["hyperparameters"]["family"]
    return coefficients(
        tensors, family, task_in(config), inputs_of(config), tuple(map(str, config["classes"]))
    )


def by_group(
    row: Row, clients: Iterable[str], metric: Metric
) -> dict[str, dict[str, float | None]]:
    """Return a metric by client, and by what else divides the samples of a row of metrics."""
    found = {"client": dict(zip(clients, row.get("clients") or (), strict=False))}
    for kind, each in row.get("groups", {}).items():
        found[kind] = {name: values.get(metric.name) for name, values in each.items()}
    return found


def flat(row: Row, clients: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of a row of metrics by name: those of clients, and what the method noted,
    too.
    """
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
    each = zip(clients, row.get("clients", ()), strict=False)
    metric = row.get("metric", "accuracy")
    found = {f"client_{metric}_{name}": value for name, value in each}
    for name, value in row.get("notes", {}).items():
        if isinstance(value, dict):
            found |= {f"{name} {key}": one for key, one in value.items()}
        else:
            found[name] = value
    return numbers | {name: value for name, value in found.items() if value is not None}
