"""The base classes of tasks, and what a model scored on one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan, nan
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked
from ekiden.core.base.errors import UserError, first_line, unknown

IGNORED = -100
"""The label of pixels and tokens that do not count, as in PyTorch."""

_ROW = frozenset(
    {
        "step",
        "loss",
        "bytes",
        "forward",
        "backward",
        "notes",
        "parameters",
        "consensus",
        "diverged",
        "majority",
        "clients",
        "metric",
        "metrics",
        "groups",
        "confusion",
    }
)
"""Names of other entries in a row of metrics."""

Need = Literal["classes", "vectors", "numbers", "continuous"]
"""What a method may need of the data in addition to a loss:

classes: one class for each sample; vectors: one vector of outputs for each sample, so that labels
can be drawn and least squares solved; numbers: inputs that are numbers (images, features, signals,
rows of a table) and can be averaged. Tokens cannot; continuous: numbers of one kind, which can also
change places. Rows of a table with categories cannot. """


@dataclass(frozen=True)
class Metric:
    """A number that says how well a model does.

    Attributes:
        name: its name in `metrics.jsonl` and for `--metric`.
        counted: computes it from what was counted of the answers; NaN if it is not defined.
        higher: whether a higher value is better.
        share: whether it is between 0 and 1, so that it is shown in percent.
        full: whether it needs the probabilities of the classes, not only the answers.
        each: its value for each class, label, or target, (K,), NaN if undefined; None if there is
            no such value.
        divides: whether tables of subgroups show it.
        least: the least that it can be.
        most: the most that it can be.
    """

    name: str
    counted: Callable[..., float]
    higher: bool = True
    share: bool = True
    full: bool = True
    each: Callable[[Any], NDArray[np.float64]] | None = None
    divides: bool = False
    least: float = 0.0
    most: float = 1.0

    def measure(self, scores: "Scores") -> float:
        """Return its value for samples; NaN if it is not defined, as for none."""
        if len(scores):
            return self.counted(scores.counts)
        return nan

    def signed(self, value: float) -> float:
        """Return `value` with the sign for which more is better."""
        if self.higher:
            return value
        return -value

    def shown(self, value: float | None) -> str:
        """Return `value` as tables print it, in percent if it is a share; a dash if it is not
        defined.
        """
        if value is None or isnan(value):
            return "-"
        if self.share:
            return f"{100 * value:.2f}"
        return f"{value:.4g}"

    def said(self, value: float | None) -> str:
        """Return name, value and unit, as lines print them."""
        shown = self.shown(value)
        if shown == "-":
            return f"{self.name} {shown}"
        return f"{self.name} {shown}{self.unit}"

    @property
    def scale(self) -> int:
        """Factor of values that are shown: 100 for shares, 1 for others."""
        if self.share:
            return 100
        return 1

    @property
    def unit(self) -> str:
        """Unit after the name in a heading: " %" or nothing."""
        if self.share:
            return " %"
        return ""


def better(score: float, best: float) -> bool:
    """Return whether a score beats the best one so far, of epochs, rounds or settings; more is better.

    One that is not defined (NaN) beats no other, and any takes its place.
    """
    return isnan(best) or score > best


@dataclass(frozen=True)
class Task(Checked, ABC):
    """What the labels of a data set mean. K is the number of outputs.

    A task is one of the final classes of this package, whose docstrings give the shapes of labels
    and outputs. All are frozen, compare by value, and become JSON by `recorded`.
    """

    kind: ClassVar[str]
    """Its name on the command line and in `config.json`."""
    offers: ClassVar[frozenset[Need]]
    """What methods can rely on, for any inputs; see `Method.needs`."""
    metrics: ClassVar[tuple[Metric, ...]]
    """All metrics; the first is the headline unless `metric` names another."""

    counter: ClassVar[Any]
    """What counts the answers: a class of `ekiden.core.tasks.counts`."""

    unit: ClassVar[int] = 1
    """The whole number that stands for 1 in `targets` in exact sums."""

    metric: str | Metric = field(default="", kw_only=True)
    """The headline metric by its name, or the user's own: a `Metric`, or PATH.py:NAME of a function
    or of a `Metric`. Empty means the task's first metric."""

    @abstractmethod
    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """Check labels, and return them with the type and shape in which `Samples.y` holds them.

        Args:
            y: the labels as given.
            n: the number of samples.
            what: their name in messages.

        Raises:
            UserError: they are not labels of this task.
        """

    def check_samples(self, x: Tensor, y: Tensor, what: str) -> None:
        """Refuse encoded samples `x` (n, ...) whose shape does not go with their labels `y`; `what`
        names them.
        """

    @abstractmethod
    def outputs(self, names: Sequence[str]) -> int:
        """Return K, the number of outputs that the network needs, for the names in
        `Dataset.classes`.
        """

    @abstractmethod
    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of the network's outputs for a batch `x` with labels `y`."""

    @abstractmethod
    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss () of a batch, which training minimises; differentiable."""

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss (b,) of each sample; 0 if none of its labels counts."""

    @abstractmethod
    def units(self, y: Tensor) -> Tensor | None:
        """Return how many labels of each sample count (b,), the weight of its loss; None if each
        has one label.
        """

    @abstractmethod
    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """Return the model's answers (b, ...) from its outputs.

        Args:
            outputs: the network's outputs, float32.
            full: with probabilities, if there are any; otherwise only what the headline metric
                needs.
        """

    @abstractmethod
    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """Return the share of right answers of each sample (b,); None if answers are not right or
        wrong.
        """

    @abstractmethod
    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the mean distance () of outputs from a teacher's, which distillation minimises;
        differentiable.
        """

    def targets(self, y: Tensor, outputs: int) -> Tensor:
        """Return the targets (b, K) of least squares, for tasks with one vector of outputs for each
        sample.
        """
        raise self._no_vectors()

    def drawn(self, n: int, outputs: int, generator: torch.Generator) -> Tensor:
        """Draw labels (n, ...) on the CPU, for tasks with one vector of outputs for each sample."""
        raise self._no_vectors()

    def _no_vectors(self) -> UserError:
        return UserError(
            f"{self.kind} has no vector of outputs for each sample: let the method say `traits = "
            "Traits(needs=VECTORS`"
        )

    @abstractmethod
    def guess(self, outputs: int) -> float:
        """Return the loss of guessing."""

    @abstractmethod
    def strata(self, y: Tensor) -> Tensor:
        """Return a group (n,) int64 for each label; parts of the data are drawn evenly from all
        groups.
        """

    @abstractmethod
    def counts(self, y: Tensor, outputs: int) -> Tensor:
        """Count the labels of each class, label or target (K,)."""

    @classmethod
    def by_name(cls) -> dict[str, Metric]:
        """Return the metrics by their names."""
        return {metric.name: metric for metric in cls.metrics}

    @cached_property
    def headline(self) -> Metric:
        """The metric that chooses the best epoch and that tables show.

        Raises:
            UserError: the task has no metric of this name.
        """
        known = self.by_name()
        own = _own_metric_of(self.metric)
        if own is not None:
            if own.name in known or own.name in _ROW or not own.name.isidentifier():
                raise UserError(
                    f"a metric of your own cannot be called {own.name!r}: write a function, def "
                    "NAME"
                )
            return own
        name = str(self.metric)
        if name and name not in known:
            raise unknown(f"metric of {self.kind}", name, tuple(known))
        if name:
            return known[name]
        return self.metrics[0]

    @property
    def measures_all(self) -> bool:
        """Whether a run ends with all metrics. A plain classification keeps what the headline needs."""
        return bool(self.metric) or self.kind != "classification"


class VectorTask(Task):
    """A task with one vector of outputs for each sample. All labels count."""

    def outputs(self, names: Sequence[str]) -> int:
        return len(names)

    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        return (len(y), outputs)

    def units(self, y: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Scores:
    """A model's answers to samples, and how good they are."""

    task: Task  # what the labels mean
    outputs: int  # K
    y: Tensor  # (n, ...) the labels
    answers: Tensor  # (n, ...) see `Task.answers`
    loss: Tensor  # (n,) loss of each sample

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def counts(self) -> Any:
        """What metrics follow from; see `ekiden.core.tasks.counts`."""
        return self.task.counter.of(self)

    def at(self, rows: Tensor | None) -> "Scores":
        """Return the scores of the samples in `rows`; without `rows`, of all."""
        if rows is None:
            return self
        return replace(self, y=self.y[rows], answers=self.answers[rows], loss=self.loss[rows])

    @staticmethod
    def joined(parts: Sequence["Scores"]) -> "Scores":
        """Return the scores of all parts together, in this order."""
        return replace(
            parts[0],
            y=torch.cat([part.y for part in parts]),
            answers=torch.cat([part.answers for part in parts]),
            loss=torch.cat([part.loss for part in parts]),
        )

    @property
    def right(self) -> Tensor:
        """Return the share of right answers of each sample (n,)."""
        right = self.task.right(self.answers, self.y)
        if right is None:
            raise UserError(f"{self.task.kind} has no accuracy: use {self.task.headline.name}")
        return right

    @property
    def chosen(self) -> Tensor:
        """The answered classes (n, ...)."""
        return chosen(self.answers, self.y)

    def accuracy(self, rows: Tensor | None = None) -> float:
        """Return the share of right answers, of all or of some rows; NaN if there are no rows."""
        return mean_right(self.at(rows))

    def goodness(self) -> float:
        """Return the share of right answers, R² for numbers, C-index for times: 1 is best.

        Methods may compare it with a threshold.
        """
        known = self.task.by_name()
        if "accuracy" in known:
            return mean_right(self)
        return (known.get("r2") or known["c_index"]).measure(self)

    def score(self, rows: Tensor | None = None) -> float:
        """Return the headline metric, of all or of some rows; NaN if it is not defined."""
        return self.task.headline.measure(self.at(rows))

    def mean_loss(self, rows: Tensor | None = None) -> float:
        """Return the mean loss, of all or of some rows; NaN if there are no rows."""
        scores = self.at(rows)
        units = self.task.units(scores.y)
        if not len(scores) or (units is not None and not units.any()):
            return nan
        loss = scores.loss.double()
        return float(loss.mean() if units is None else (loss * units).sum() / units.sum())

    def metrics(self, rows: Tensor | None = None) -> dict[str, float]:
        """Return all metrics of the task and the headline, except those not defined for these
        samples.
        """
        scores = self.at(rows)
        found = {}
        for metric in measured(self.task):
            value = metric.measure(scores)
            if not isnan(value):
                found[metric.name] = value
        return found

    def by_class(self) -> list[dict[str, float]]:
        """Return the metrics of each class, label or target, by their names, where defined."""
        found: list[dict[str, float]] = [{} for _ in range(self.outputs)]
        for metric in measured(self.task):
            if metric.each is not None and len(self):
                # without probabilities, metrics that need them have no values
                for one, value in zip(found, metric.each(self.counts).tolist(), strict=False):
                    if not isnan(value):
                        one[metric.name] = value
        return found

    def confusion(self) -> list[list[int]] | None:
        """Return (K, K) samples or pixels by label and answer; None if there are no classes or no
        samples.
        """
        if self.task.kind not in ("classification", "segmentation") or not len(self):
            return None
        rows: list[list[int]] = confusion(self)[:, : self.outputs].tolist()
        return rows


def chosen(answers: Tensor, y: Tensor) -> Tensor:
    """Return the answered classes (n, ...), from classes or probabilities, to labels `y`."""
    if answers.ndim > y.ndim:
        return answers.argmax(1)
    return answers


def confusion(s: Scores) -> Tensor:
    """Count samples (pixels) by true class (rows) and predicted class (columns, the last for none):
    (K, K + 1).
    """
    y = s.y.flatten()
    answers = s.chosen.flatten()
    counts = y != IGNORED
    places = y[counts] * (s.outputs + 1) + answers[counts].clamp(max=s.outputs)
    return torch.bincount(places, minlength=s.outputs * (s.outputs + 1)).view(
        s.outputs, s.outputs + 1
    )


def measured(task: Task) -> tuple[Metric, ...]:
    """Return all metrics of a task, with the user's own first."""
    return (task.headline, *(m for m in task.metrics if m.name != task.headline.name))


def mean_right(scores: Scores) -> float:
    """Return the share of right answers; NaN if there are no answers."""
    right = scores.right
    units = scores.task.units(scores.y)
    if units is None:
        if len(right):
            return float(right.sum()) / len(right)
        return nan
    total = float(units.sum())
    if total:
        return float((right.double() * units).sum()) / total
    return nan


class OwnMetric(Metric):
    """A metric of the user's own; `counted` takes answers and labels of samples."""

    def measure(self, scores: Scores) -> float:
        """Call the user's function."""
        if not len(scores):
            return nan
        try:
            return float(self.counted(scores.answers, scores.y))
        except Exception as error:
            given = f"it gets answers of shape {tuple(scores.answers.shape)} and labels of {tuple(scores.y.shape)}"
            raise UserError(
                f"the metric {self.name} failed: {first_line(error)}; {given}"
            ) from error


def _own_metric_of(metric: str | Metric) -> Metric | None:
    """Return the user's own metric; None if `metric` names one of the library."""
    if isinstance(metric, Metric):
        return metric
    if not outside.is_file(metric):
        return None
    found = outside.load(metric)
    if isinstance(found, Metric):
        return found
    if not callable(found):
        raise UserError(
            f"{metric} is not a metric: give a function (answers, labels) -> number, or a Metric"
        )
    return own_metric(found)


def own_metric(
    function: Callable[[Tensor, Tensor], Any], name: str = "", *, higher: bool = True
) -> Metric:
    """Make a metric of the user's function.

    Args:
        function: (answers, labels) -> number; see docs/tasks.md for the shapes. NaN if it is not
            defined.
        name: name of the metric; by default the function's.
        higher: whether a higher value is better.
    """
    name = name or getattr(function, "__name__", "own")
    return OwnMetric(name, function, higher=higher, share=False)
