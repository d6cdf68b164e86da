"""A model's outputs as the columns of a table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.tasks import Classification, MultiLabel, Regression
from ekiden.results.model import LoadedModel


@dataclass(frozen=True)
class Answers:
    """Asks a model.

    Attributes:
        model: which.
    """

    model: LoadedModel

    def __post_init__(self) -> None:
        """Refuse a task whose answers are no row of a table.

        Raises:
            UserError: says which, and how to go on.
        """
        if not isinstance(self.model.task, Classification | MultiLabel | Regression):
            raise UserError(
                f"{self.model.task.kind} gives no table of predictions: use ekiden.load_model(run) in Python"
            )

    def __call__(self, x: Tensor) -> dict[str, Any]:
        """Return columns for samples (b, ...).

        classification: `prediction`, the class by name, and `probability_NAME` of each. multi-label: `prediction`, the
        labels with a probability of 1/2 or more, separated by semicolons, and `probability_NAME` of each. regression:
        `prediction`, in the unit of the targets, or `prediction_NAME` of each of several.
        """
        with torch.inference_mode():
            answers = self.model.task.answers(self.model(x).float(), full=True)
        names = self.model.classes
        if isinstance(self.model.task, Regression):
            called = ["prediction"] if len(names) == 1 else [f"prediction_{name}" for name in names]
            return {name: answers[:, k].numpy() for k, name in enumerate(called)}
        columns = {f"probability_{name}": answers[:, k].numpy() for k, name in enumerate(names)}
        if isinstance(self.model.task, MultiLabel):
            there = (answers >= 0.5).tolist()
            return {
                "prediction": [";".join(n for n, yes in zip(names, row, strict=True) if yes) for row in there]
            } | columns
        return {"prediction": np.array(names, dtype=object)[answers.argmax(1).numpy()].tolist(), **columns}
