"""What every task says, and what a model scored on it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ekiden.base import outside
from ekiden.base.checks import Checked
from ekiden.base.errors import UserError, unknown

IGNORED = -100
"""A label that does not count, where labels are per pixel or token; as in PyTorch."""

_ROW = frozenset(
    [
        *("step", "loss", "bytes", "forward", "backward", "notes", "parameters", "consensus", "diverged"),
        *("clients", "metric", "metrics", "groups", "confusion"),
    ]
)
"""What else a row of metrics holds."""

Need = Literal["classes", "vectors", "numbers"]
"""What a method may need of the data in addition to a loss:

classes: one class for each sample;
vectors: one vector of outputs for each sample, for which labels can be drawn and least squares solved;
numbers: inputs that are numbers (images, features, signals), which can be made, mixed and averaged; tokens are none.
"""


@dataclass(frozen=True)
class Metric:
    """A number that says how well a model does.

    Attributes:
        name: its name in `metrics.jsonl` and for `--metric`.
        measure: computes it; NaN where it is not defined for these samples.
        higher: whether a higher value is better.
        share: whether it goes from 0 to 1, so that it is shown in percent.
        full: whether it needs the probabilities of the classes and not only the answers.
        each: its value for each class, label, or target, (K,), NaN where undefined; None where that makes no sense.
    """

    name: str
    measure: Callable[["Scores"], float]
    higher: bool = True
    share: bool = True
    full: bool = True
    each: Callable[["Scores"], Tensor] | None = None

    def better(self, value: float) -> float:
        """`value`, turned so that more is better."""
        return value if self.higher else -value

    def shown(self, value: float) -> str:
        """`value` as tables print it, in percent where it is a share."""
        return f"{100 * value:.2f}" if self.share else f"{value:.4g}"

    @property
    def scale(self) -> int:
        """What values are multiplied by where they are shown: 100 of shares, 1 of others."""
        return 100 if self.share else 1

    @property
    def unit(self) -> str:
        """What follows the name in a heading: " %" or nothing."""
        return " %" if self.share else ""


@dataclass(frozen=True)
class Task(Checked, ABC):
    """What the labels of a data set mean. K is the number of outputs; labels and outputs have the shapes said here.

    A task is one of the final classes of this package; all are frozen, compare by value, and are JSON by `recorded`.
    """

    kind: ClassVar[str]
    """Its name on the command line and in `config.json`."""
    offers: ClassVar[frozenset[Need]]
    """What methods can rely on, whatever the inputs are; see `Method.needs`."""
    metrics: ClassVar[tuple[Metric, ...]]
    """All that can be measured; the first is the headline unless `metric` names another."""

    unit: ClassVar[int] = 1
    """What 1 in `targets` is counted as where exact sums need whole numbers."""

    metric: str | Metric = field(default="", kw_only=True)
    """The headline metric by its name, or one of the user's own: a `Metric`, or PATH.py:NAME of a function or of a
    `Metric`. Empty: the task's first."""

    @abstractmethod
    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """Check labels, and return them with the type and shape in which `Samples.y` holds them.

        Args:
            y: the labels as given.
            n: the number of samples.
            what: how messages call them.

        Raises:
            UserError: they are not labels of this task.
        """

    @abstractmethod
    def outputs(self, names: Sequence[str]) -> int:
        """K, the outputs that the network needs, for the names in `Dataset.classes`."""

    @abstractmethod
    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        """The shape of the network's outputs for a batch `x` with labels `y`."""

    @abstractmethod
    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss () of a batch, differentiable: what training minimises."""

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss (b,) of each sample; 0 where no label of it counts."""

    @abstractmethod
    def units(self, y: Tensor) -> Tensor | None:
        """How many labels of each sample count (b,), where it has several; the weights of its loss in a mean."""

    @abstractmethod
    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """What the model answers (b, ...), from its outputs.

        Args:
            outputs: of the network, float32.
            full: with probabilities where there are any; otherwise as little as the headline needs.
        """

    @abstractmethod
    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """The share of right answers of each sample (b,); None where answers are not right or wrong."""

    @abstractmethod
    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """The mean distance () of a batch's outputs from a teacher's, which distillation minimises, differentiable."""

    def targets(self, y: Tensor, outputs: int) -> Tensor:
        """What least squares brings the outputs to (b, K), where there is one vector of outputs for each sample."""
        raise self._no_vectors()

    def drawn(self, n: int, outputs: int, generator: torch.Generator) -> Tensor:
        """Labels (n, ...) at random, on the CPU, where there is one vector of outputs for each sample."""
        raise self._no_vectors()

    def _no_vectors(self) -> UserError:
        return UserError(f"{self.kind} has no vector of outputs for each sample: let the method say `needs = VECTORS`")

    @abstractmethod
    def guess(self, outputs: int) -> float:
        """The loss of guessing."""

    @abstractmethod
    def strata(self, y: Tensor) -> Tensor:
        """A group (n,) int64 for each label: parts of the data are drawn evenly from all groups."""

    @abstractmethod
    def counts(self, y: Tensor, outputs: int) -> Tensor:
        """How many labels there are for each class, label or target (K,)."""

    @cached_property
    def headline(self) -> Metric:
        """The metric that chooses the best epoch and that tables show.

        Raises:
            UserError: the task has no metric of this name.
        """
        known = {metric.name: metric for metric in self.metrics}
        own = _own_metric_of(self.metric)
        if own is not None:
            if own.name in known or own.name in _ROW or not own.name.isidentifier():
                raise UserError(f"a metric of your own cannot be called {own.name!r}: give it another name")
            return own
        name = str(self.metric)
        if name and name not in known:
            raise unknown(f"metric of {self.kind}", name, tuple(known))
        return known[name] if name else self.metrics[0]

    @property
    def measures_all(self) -> bool:
        """Whether a run ends with all metrics: not where it is a plain classification, as older runs are."""
        return bool(self.metric) or self.kind != "classification"


class VectorTask(Task):
    """A task with one vector of outputs for each sample, all of whose labels count."""

    def outputs(self, names: Sequence[str]) -> int:
        """See `Task`."""
        return len(names)

    def output_shape(self, x: Tensor, y: Tensor, outputs: int) -> tuple[int, ...]:
        """See `Task`."""
        return (len(y), outputs)

    def units(self, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return None


class PlacesTask(Task):
    """A task with one of K classes at each place of a sample; places with the label `IGNORED` do not count."""

    def guess(self, outputs: int) -> float:
        """Ln K."""
        return log(outputs)

    def counts(self, y: Tensor, outputs: int) -> Tensor:
        """See `Task`."""
        return torch.bincount(y[y != IGNORED], minlength=outputs)


@dataclass(frozen=True)
class Scores:
    """What a model answers to samples, and how good that is.

    Attributes:
        task: what the labels mean.
        outputs: K.
        y: (n, ...) the labels.
        answers: (n, ...) see `Task.answers`.
        loss: (n,) of each sample.
    """

    task: Task
    outputs: int
    y: Tensor
    answers: Tensor
    loss: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor | None) -> "Scores":
        """Those of some samples; all without `rows`."""
        if rows is None:
            return self
        return replace(self, y=self.y[rows], answers=self.answers[rows], loss=self.loss[rows])

    @staticmethod
    def joined(parts: Sequence["Scores"]) -> "Scores":
        """Those of all parts, in this order."""
        y, answers, loss = (
            torch.cat(values) for values in zip(*((p.y, p.answers, p.loss) for p in parts), strict=True)
        )
        return replace(parts[0], y=y, answers=answers, loss=loss)

    @property
    def right(self) -> Tensor:
        """The share of right answers of each sample (n,).

        Raises:
            UserError: the task has no right answers.
        """
        right = self.task.right(self.answers, self.y)
        if right is None:
            raise UserError(f"{self.task.kind} has no accuracy: use {self.task.headline.name}")
        return right

    def accuracy(self, rows: Tensor | None = None) -> float:
        """The share of right answers, in all or in some rows; NaN where there are none."""
        return mean_right(self.at(rows))

    def goodness(self) -> float:
        """The share of right answers; of numbers R²: 1 is best, and methods may compare it with a threshold."""
        if any(metric.name == "accuracy" for metric in self.task.metrics):
            return mean_right(self)
        found = {metric.name: metric for metric in self.task.metrics}["r2"]
        return found.measure(self) if len(self) else float("nan")

    def score(self, rows: Tensor | None = None) -> float:
        """The headline metric, of all or of some rows; NaN where it is not defined."""
        scores = self.at(rows)
        return self.task.headline.measure(scores) if len(scores) else float("nan")

    def mean_loss(self, rows: Tensor | None = None) -> float:
        """The mean loss, of all or of some rows; NaN where there are none."""
        scores = self.at(rows)
        units = self.task.units(scores.y)
        if not len(scores) or (units is not None and not units.any()):
            return float("nan")
        loss = scores.loss.double()
        return float(loss.mean() if units is None else (loss * units).sum() / units.sum())

    def metrics(self, rows: Tensor | None = None) -> dict[str, float]:
        """All metrics of the task and the headline; those not defined for these samples are left out."""
        scores = self.at(rows)
        found = {m.name: m.measure(scores) for m in measured(self.task)} if len(scores) else {}
        return {name: value for name, value in found.items() if value == value}  # noqa: PLR0124  (NaN)

    def by_class(self) -> list[dict[str, float]]:
        """The metrics of each class, label or target, by their names; NaN where undefined."""
        found = {m.name: m.each(self).tolist() for m in measured(self.task) if m.each is not None} if len(self) else {}
        return [{name: values[k] for name, values in found.items()} for k in range(self.outputs)]

    def confusion(self) -> list[list[int]] | None:
        """(K, K) samples or pixels by label and answer; None where the task has no classes, or without samples."""
        if self.task.kind not in ("classification", "segmentation") or not len(self):
            return None
        rows: list[list[int]] = confusion(self)[:, : self.outputs].tolist()
        return rows


def confusion(s: Scores) -> Tensor:
    """Count samples (pixels) by true class (rows) and predicted class (columns, the last for none): (K, K + 1)."""
    answers = s.answers.argmax(1) if s.task.kind == "classification" and s.answers.ndim == 2 else s.answers
    y, answers = s.y.flatten(), answers.flatten()
    counts = y != IGNORED
    places = y[counts] * (s.outputs + 1) + answers[counts].clamp(max=s.outputs)
    return torch.bincount(places, minlength=s.outputs * (s.outputs + 1)).view(s.outputs, s.outputs + 1)


def measured(task: Task) -> tuple[Metric, ...]:
    """All metrics of a task, with the user's own first."""
    return (task.headline, *(m for m in task.metrics if m.name != task.headline.name))


def mean_right(scores: Scores) -> float:
    """The share of right answers; NaN where there are none."""
    right, units = scores.right, scores.task.units(scores.y)
    if units is None:
        return float(right.sum()) / len(right) if len(right) else float("nan")
    total = float(units.sum())
    return float((right.double() * units).sum()) / total if total else float("nan")


@dataclass(frozen=True)
class _Own:
    """Calls a function of the user's own."""

    name: str
    function: Callable[[Tensor, Tensor], Any]

    def __call__(self, scores: Scores) -> float:
        try:
            return float(self.function(scores.answers, scores.y))
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"the metric {self.name} failed: {reason}") from error


def _own_metric_of(metric: str | Metric) -> Metric | None:
    """The metric of the user's own; None where `metric` is a name of the library's."""
    if isinstance(metric, Metric):
        return metric
    if not outside.is_file(metric):
        return None
    found = outside.load(metric)
    if not isinstance(found, Metric) and not callable(found):
        raise UserError(f"{metric} is not a metric: give a function (answers, labels) -> number, or a Metric")
    return found if isinstance(found, Metric) else own_metric(found)


def own_metric(function: Callable[[Tensor, Tensor], Any], name: str = "", *, higher: bool = True) -> Metric:
    """A metric of the user's own.

    Args:
        function: (answers, labels) -> number; see docs/tasks.md for the shapes. NaN where it is not defined.
        name: of the metric; by default the function's.
        higher: whether a higher value is better.
    """
    name = name or getattr(function, "__name__", "own")
    return Metric(name, _Own(name, function), higher=higher, share=False)
