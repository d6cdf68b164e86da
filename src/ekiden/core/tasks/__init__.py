"""Tasks: what the labels mean, the loss that training minimises, and what is measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.tasks.base import Metric, Need, Scores, Task, own_metric
from ekiden.core.tasks.labels import (
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    ScaledTask,
    Segmentation,
    Survival,
)

__all__ = [
    "KINDS",
    "Classification",
    "LanguageModelling",
    "Metric",
    "MultiLabel",
    "Need",
    "Regression",
    "ScaledTask",
    "Scores",
    "Segmentation",
    "Survival",
    "Task",
    "balanced",
    "inferred",
    "named",
    "names_of",
    "own_metric",
    "recorded",
    "scaled",
    "task_of",
    "task_of_terms",
    "terms",
]

KINDS: Mapping[str, type[Task]] = {
    kind.kind: kind
    for kind in (Classification, MultiLabel, Regression, Survival, Segmentation, LanguageModelling)
}
"""All tasks by their command-line names."""


def named(kind: str) -> Task:
    """Return the task of this name, with its defaults."""
    if kind not in KINDS:
        raise unknown("task", kind, tuple(KINDS))
    return KINDS[kind]()


def inferred(y: Tensor, x: Tensor) -> Task:
    """Infer the task from the labels; Classification if they look like no other task.

    Whole numbers are classes, and other numbers are targets of a regression. Rows of 0 and 1 are
    several labels for each sample, of which any number may be 1. Whole numbers (n, H, W) are the
    classes of the pixels of images. Whole numbers (n, L) that are the inputs themselves are tokens
    to predict.

    Args:
        y: the labels as given.
        x: the inputs (n, ...).
    """
    whole = not y.is_floating_point() and not y.is_complex()
    if (
        y.ndim == 2
        and y.shape[1] > 1
        and bool(((y == 0) | (y == 1)).all())
        and not bool((y.sum(1) == 1).all())
    ):
        return MultiLabel()
    if not whole and y.ndim in (1, 2) and not bool((y == y.round()).all()):
        return Regression()
    if whole and y.ndim == 3 and y.dtype != torch.bool:
        return Segmentation()
    tokens = not x.is_floating_point() and not x.is_complex()
    if whole and y.ndim == 2 and x.shape == y.shape and tokens:
        return LanguageModelling()
    return Classification()


def scaled(task: Task, y: Tensor) -> Task:
    """Return `task` with what follows from the training labels: the scale of the targets, if none
    is given yet.

    The scale of a target that does not vary is 1.
    """
    if not isinstance(task, ScaledTask) or (task.mean, task.std) != ((0.0,), (1.0,)):
        return task
    rows = task.measured(y)
    std = rows.std(0, correction=0)
    return replace(
        task, mean=tuple(rows.mean(0).tolist()), std=tuple(torch.where(std > 0, std, 1.0).tolist())
    )


def balanced(task: Task, counts: Mapping[str, int], classes: Sequence[str]) -> Task:
    """Return `task` with the weight n / (K·n_k) of each class, as `--class-weights balanced` means
    it.

    Args:
        task: what the labels mean.
        counts: n_k, the training samples of all clients in each class, by its name.
        classes: the names of the K classes.

    Raises:
        UserError: the task is not a classification, or a class has no samples.
    """
    if not isinstance(task, Classification):
        raise UserError(
            f"--class-weights=balanced is for classes, the task is {task.kind}: leave it out"
        )
    each = [counts.get(name, 0) for name in classes]
    if 0 in each:
        raise UserError(
            "--class-weights=balanced needs training samples of each class, and none of "
            f"{classes[each.index(0)]!r} is counted (silos "
            "count classes of min_count samples or more): leave it out"
        )
    return replace(task, weights=tuple(sum(each) / (len(each) * n) for n in each))


def names_of(task: Task, y: Tensor, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of labels, targets or classes of pixels: those given, or numbers.

    Args:
        task: any task except classification.
        y: all labels.
        given: the names, if the user gave some.
    """
    if isinstance(task, LanguageModelling) and given is None:
        return ()
    if isinstance(task, Segmentation | LanguageModelling):
        count = max(int(y.max()), 0) + 1
        exact = False
    else:
        count = y.shape[1] if y.ndim == 2 and not isinstance(task, Survival) else 1
        exact = True
    if given is None:
        if isinstance(task, ScaledTask) and count == 1:
            return ("target",)
        return tuple(map(str, range(count)))
    if len(given) < count or (exact and len(given) != count):
        raise UserError(
            f"{len(given)} names are given by classes=, but the labels need {count}: name each"
        )
    return tuple(given)


def recorded(task: Task) -> dict[str, Any]:
    """Return a task as plain values; they hold only the name of a user's own metric."""
    metric = task.metric.name if isinstance(task.metric, Metric) else task.metric
    values = plain(replace(task, metric=metric))
    given = {name: value for name, value in values.items() if value not in ("", [])}
    if metric and task.headline not in task.metrics:
        given["higher"] = task.headline.higher
    return {"kind": task.kind, **given}


def task_of(values: Mapping[str, Any]) -> Task:
    """Return the task that `recorded` wrote. It has no metric of the user's own, but the task's
    first.
    """
    try:
        given = dict(values)
        kind = KINDS[given.pop("kind")]
        given.pop("higher", None)
        metric = given.get("metric", "")
        if metric not in kind.by_name() and not outside.is_file(metric):
            given.pop("metric", None)
        return kind(**given)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"the task cannot be read ({error}): use the version of Ekiden that wrote it"
        ) from None


def terms(task: Task) -> str:
    """Return what parties must agree on, as text; "" for classification with its usual metric."""
    if task == Classification():
        return ""
    if task.headline not in task.metrics:
        raise UserError(
            f"the metric {task.headline.name!r} is your own, which other parties do not have: "
            f"choose one of {', '.join(task.by_name())}"
        )
    return json.dumps(recorded(task), sort_keys=True)


def task_of_terms(text: str) -> Task:
    """Return the task in a text that `terms` wrote; nothing that the text names is read or
    executed.
    """
    try:
        values = json.loads(text) if text else {"kind": Classification.kind}
        known = KINDS[values["kind"]].by_name()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"the task cannot be read ({type(error).__name__}): use the same Ekiden at all parties"
        ) from None
    if (metric := values.get("metric", "")) and metric not in known:
        raise UserError(
            f"{values['kind']} has no metric {str(metric)[:40]!r}: use the same Ekiden at all "
            "parties"
        )
    return task_of(values)
