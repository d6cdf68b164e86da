"""Turn a model's outputs into the columns of a table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.data.kinds import Tokens, texts
from ekiden.data.tasks import LanguageModelling, MultiLabel, Regression
from ekiden.data.tasks.base import IGNORED
from ekiden.results.model import LoadedModel


@dataclass(frozen=True)
class Answers:
    """Run a model and name its outputs.

    Attributes:
        model: the model.
    """

    model: LoadedModel

    def __call__(self, x: Tensor) -> dict[str, Any]:
        """Return columns for samples (b, ...).

        classification: `prediction`, the class by name, and `probability_NAME` of each. multi-label: `prediction`, the
        labels with a probability of 1/2 or more, separated by semicolons, and `probability_NAME` of each. regression:
        `prediction`, in the unit of the targets, or `prediction_NAME` of each of several. language-modelling: see
        `_of_texts`.
        """
        with torch.inference_mode():
            outputs = self.model(x).float()
            if isinstance(self.model.task, LanguageModelling):
                return self._of_texts(x, outputs)
            answers = self.model.task.answers(outputs, full=True)
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

    def _of_texts(self, x: Tensor, outputs: Tensor) -> dict[str, Any]:
        """Return how well the model predicts texts (b, L), given its outputs (b, L, K).

        `tokens` is the number of predicted tokens, all except the first; `loss` is the mean over them of -ln p;
        `perplexity` is exp of that. A text of one token has neither loss nor perplexity. `prediction` is the most
        probable next token, if the tokenizer can name it.
        """
        tokens, task = self.model.inputs, self.model.task
        assert isinstance(tokens, Tokens)
        y = x.masked_fill(x == tokens.pad, IGNORED)
        counted = task.units(y)
        assert counted is not None
        loss = task.loss(outputs, y).masked_fill(counted == 0, torch.nan)
        last = (tokens.lengths(x) - 1).clamp(min=0)
        following = texts.decode(outputs[torch.arange(len(x)), last].argmax(-1).tolist(), tokens)
        columns: dict[str, Any] = {"tokens": counted.numpy(), "loss": _gaps(loss), "perplexity": _gaps(loss.exp())}
        return columns | ({} if following is None else {"prediction": following})


def _gaps(values: Tensor) -> list[float | None]:
    """Return the numbers; None for NaN."""
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124  (NaN)
