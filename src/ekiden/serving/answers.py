"""A model's outputs as the columns of a table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.serving.model import LoadedModel


@dataclass(frozen=True)
class Answers:
    """Asks a model.

    Attributes:
        model: which.
    """

    model: LoadedModel

    def __call__(self, x: Tensor) -> dict[str, Any]:
        """Return columns for samples (b, ...): the class by name, and the probability of each."""
        with torch.inference_mode():
            outputs = self.model(x)
        names = np.array(self.model.classes, dtype=object)
        probabilities = outputs.softmax(1)
        columns = {f"probability_{name}": probabilities[:, k].numpy() for k, name in enumerate(names)}
        return {"prediction": names[outputs.argmax(1).numpy()].tolist(), **columns}
