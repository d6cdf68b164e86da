"""What a run gave: its models and numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ekiden.base.errors import UserError
from ekiden.engine.drive import Row
from ekiden.engine.federation import Transfer
from ekiden.engine.method import State
from ekiden.engine.modules import as_module
from ekiden.training.weights import Weights


@dataclass(frozen=True)
class Result:
    """What a run gave, or has given so far.

    Attributes:
        state: the last state.
        weights: the global model, or None where the method has only personal ones.
        personal: one model per client, where the method personalises.
        metrics: one row a step, see `ekiden.engine.evaluation.TestSet`.
        ledger: every transfer.
        folder: the run folder, if there is one.
        build: makes a network that `weights` fits.
    """

    state: State
    weights: Weights | None
    personal: tuple[Weights, ...]
    metrics: tuple[Row, ...]
    ledger: tuple[Transfer, ...]
    folder: Path | None
    build: Callable[[], nn.Module]

    @property
    def model(self) -> nn.Module:
        """The global model as a module, in evaluation mode.

        Raises:
            UserError: the method has only personal models.
        """
        if self.weights is None:
            raise UserError("this method gives no global model: take `personal`, one model per client")
        return as_module(self.build, self.weights)

    @property
    def accuracy(self) -> float:
        """Accuracy on the union of all clients' test data after the last step.

        Raises:
            UserError: that step was not measured.
        """
        if not self.metrics or "accuracy" not in self.metrics[-1]:
            raise UserError("models were not measured after this step: lower evaluate_every, or finish the run")
        return float(self.metrics[-1]["accuracy"])

    @property
    def diverged(self) -> bool:
        """Whether the models are far worse than guessing at the end; see `ekiden.engine.evaluation.diverged`."""
        return bool(self.metrics and self.metrics[-1].get("diverged"))

    @property
    def bytes(self) -> int:
        """Bytes that the method moved."""
        return sum(row.bytes for row in self.ledger)
