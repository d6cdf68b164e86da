"""Tasks by their names and as plain values."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ekiden.base.errors import UserError, unknown
from ekiden.data.tasks.base import Metric, Task
from ekiden.data.tasks.classification import Classification
from ekiden.data.tasks.language import LanguageModelling
from ekiden.data.tasks.multilabel import MultiLabel
from ekiden.data.tasks.regression import Regression
from ekiden.data.tasks.segmentation import Segmentation

KINDS: Mapping[str, type[Task]] = {
    kind.kind: kind for kind in (Classification, MultiLabel, Regression, Segmentation, LanguageModelling)
}
"""All tasks by their names on the command line."""


def named(kind: str) -> Task:
    """The task of this name, with its defaults.

    Raises:
        UserError: there is none.
    """
    if kind not in KINDS:
        raise unknown("task", kind, tuple(KINDS))
    return KINDS[kind]()


def recorded(task: Task) -> dict[str, Any]:
    """A task as plain values; of a metric of the user's own, the name."""
    values = {key: value for key, value in asdict(task).items() if key != "metric"}
    metric = task.metric.name if isinstance(task.metric, Metric) else task.metric
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"kind": task.kind, **({"metric": metric} if metric else {}), **lists}


def task_of(values: Mapping[str, Any]) -> Task:
    """The task that `recorded` wrote. A metric of the user's own is not in it: then the task's first is the headline.

    Raises:
        UserError: they are no task of this version.
    """
    try:
        kind = KINDS[values["kind"]]
        fields = {key: value for key, value in values.items() if key != "kind"}
        if fields.get("metric") not in {m.name for m in kind.metrics}:
            fields.pop("metric", None)
        return kind(**fields)
    except (KeyError, TypeError) as error:
        raise UserError(f"the task cannot be read ({error}): use the Ekiden that wrote it") from None
