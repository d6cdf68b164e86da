"""What a run left: its state, its numbers and its models, in memory or in a run folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from ekiden.core.base.errors import UserError, unknown
from ekiden.core.data.samples import FederatedData
from ekiden.core.engine.drive import Row
from ekiden.core.engine.evaluation import Built
from ekiden.core.engine.folder import PassesOf
from ekiden.core.engine.method import State
from ekiden.core.engine.setup import as_module
from ekiden.core.engine.transport import Transfer
from ekiden.core.training.weights import Weights
from ekiden.runs.config import last_measured, task_in
from ekiden.runs.loaded_model import LoadedModel, wrapped

# The global model, if there is one, and the personal models
Models = tuple[Weights | None, tuple[Weights, ...]]


def _elsewhere() -> FederatedData:
    raise UserError("the run's data stayed at the silos: name test data to measure the models on")


@dataclass(frozen=True, repr=False, eq=False)
class RunRecord:
    """What a run left, final or so far: its state, its rows, its models.

    Attributes:
        state: the last state.
        metrics: one row a step, see `ekiden.core.engine.evaluation.TestSet`.
        ledger: every transfer.
        folder: the run folder, if there is one.
        build: makes a network that `weights` fits.
        config: the settings of the run, as in `config.json`.
        models: returns `weights` and `personal`.
        data: returns the run's own data.
        passes: what each task computed.
    """

    state: State
    metrics: tuple[Row, ...]
    ledger: tuple[Transfer, ...]
    folder: Path | None
    build: Built
    config: Mapping[str, Any]
    models: Callable[[], Models]
    data: Callable[[], FederatedData] = _elsewhere
    passes: PassesOf = field(default_factory=dict)

    @cached_property
    def _models(self) -> Models:
        return self.models()

    @property
    def last(self) -> Row:
        """The row of metrics of the last step; empty before the first."""
        return next(reversed(self.metrics), {})

    @property
    def weights(self) -> Weights | None:
        """The global model, or None if the method has only personal ones."""
        return self._models[0]

    @property
    def personal(self) -> tuple[Weights, ...]:
        """One model per client, if the method personalises."""
        return self._models[1]

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, in their order."""
        return tuple(self.config["clients"])

    @property
    def personal_only(self) -> bool:
        """Whether the clients have personal models and no global one; read from the metrics."""
        return "consensus" in self.last and "global_loss" not in self.last

    @property
    def headline(self) -> str:
        """The metric of a step's score: the task's own, or another if silos do not report enough
        for it.
        """
        usual = task_in(self.config).headline.name
        row = last_measured(self.metrics)
        return next(
            (name for name in (usual, str(row.get("metric")), "accuracy") if name in row), usual
        )

    @property
    def model(self) -> nn.Module:
        """The global model as a module, in evaluation mode. It takes normalised samples; see
        `load_model`.

        Raises:
            UserError: the method has only personal models.
        """
        if self.weights is None:
            raise UserError(
                "this method gives no global model: take `personal`, one model per client"
            )
        return as_module(self.build, self.weights)

    @property
    def accuracy(self) -> float:
        """Accuracy on the union of all clients' test data after the last step.

        Raises:
            UserError: that step was not measured, or the task has no accuracy.
        """
        if "accuracy" in self.last:
            return float(self.last["accuracy"])
        if "metric" in self.last:
            raise UserError(f"this task has no accuracy: take `score`, the {self.last['metric']}")
        raise UserError(
            "models were not measured after this step: lower evaluate_every, or finish the run"
        )

    @property
    def majority(self) -> float | None:
        """What always giving the commonest training label would score as accuracy on the same test
        data.

        None if the run has not ended, the task has no accuracy, or the silos do not report their
        labels.
        """
        found = self.last.get("majority")
        return None if found is None else float(found)

    @property
    def score(self) -> float:
        """The headline metric on the union of all clients' test data after the last step, see
        `ekiden.run`.

        Raises:
            UserError: that step was not measured, or the metric is not defined for these data.
        """
        value = self.last.get(self.headline)
        if value is None and self.headline in self.last:
            raise UserError(f"{self.headline} is not defined for the test data: look at `metrics`")
        if value is None:
            raise UserError(
                "models were not measured after this step: lower evaluate_every, or finish the run"
            )
        return float(value)

    @property
    def diverged(self) -> bool:
        """Whether the models are far worse than guessing at the end; see
        `ekiden.core.engine.evaluation.diverged`.
        """
        return bool(self.last.get("diverged"))

    @property
    def bytes(self) -> int:
        """Bytes that the method moved."""
        return sum(row.bytes for row in self.ledger)

    def load_model(self, *, client: str = "") -> LoadedModel:
        """Return the model as a module that takes raw samples; see `ekiden.load_model`.

        Args:
            client: name of a client, to get its personal model instead of the global one.

        Raises:
            UserError: there is no such model.
        """
        if not client:
            return wrapped(self.model, self.config)
        return wrapped(
            as_module(self.build.own, self.personal_model(client)),
            {**self.config, "recalibration": None},
        )

    def personal_model(self, client: str) -> Weights:
        """Return the personal model of a client."""
        if not self.personal:
            raise UserError("this method gives no personal models: leave out client")
        if client not in self.clients:
            raise unknown("client", client, self.clients)
        return self.personal[self.clients.index(client)]
