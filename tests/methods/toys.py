"""Clients whose losses are quadratics: what methods do to them can be worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ekiden.learning.fit import Penalty
from ekiden.learning.weights import Weights


def weights(*values: float) -> Weights:
    """A model of these parameters and no buffers."""
    return Weights(torch.tensor(values), torch.empty(0), torch.empty(0, dtype=torch.int64))


@dataclass
class Quadratic:
    """Stands for a client: loss ½‖θ - c‖², `epochs` full-batch gradient steps of size η; η = 0 jumps to c."""

    centre: Sequence[float]
    lr: float = 0.0
    loss: float = 6.02
    fits: list[int] = field(default_factory=list)
    penalties: list[Penalty | None] = field(default_factory=list)

    def fit(self, model: Weights, *, epochs: int, penalty: Penalty | None = None) -> Weights:
        """Gradient descent on the quadratic, plus the penalty's gradient."""
        self.fits.append(epochs)
        self.penalties.append(penalty)
        centre = torch.tensor(self.centre)
        if not epochs:
            return model
        if not self.lr:
            return model.with_params(centre)
        params: Tensor = model.params.clone()
        for _ in range(epochs):
            gradient = params - centre
            if penalty:
                penalty(params, gradient, torch.tensor(self.loss))
            params = params - self.lr * gradient
        return model.with_params(params)
