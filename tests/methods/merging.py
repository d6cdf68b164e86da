"""Models, data and Fisher information for the tests of the methods that merge layers."""

import numpy as np
import torch
from torch import Tensor, nn

from ekiden.core.training.network import Network
from ekiden.core.training.weights import Layout, Weights
from ekiden.methods.blocks.combining import Trained

Array = np.ndarray


class TwoLayers(nn.Module):
    """3-2-2 with a bias in the first layer only, and a normalisation, which methods average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def layout() -> Layout:
    return Network(TwoLayers()).layout


def models(count: int) -> list[Weights]:
    """Random ones."""
    found, draw = [], torch.Generator().manual_seed(5)
    for _ in range(count):
        w = Network(TwoLayers()).weights()
        found.append(
            Weights(
                torch.randn(w.params.shape, generator=draw),
                torch.rand(w.buffers.shape, generator=draw),
                w.counters,
            )
        )
    return found


def trained(model: Weights, n: int | None = None) -> Trained:
    return Trained(model, torch.tensor([] if n is None else [n]))


def semidefinite(size: int, seed: int, rank: int | None = None) -> Tensor:
    """A random symmetric matrix with eigenvalues of 0 or more, as float32 holds it."""
    x = torch.randn(
        size, size if rank is None else rank, generator=torch.Generator().manual_seed(seed)
    )
    return (x @ x.T).double()


def matrix(model: Weights, index: int) -> Array:
    """The rows of dense layer `index` (0 or 1) with its bias, read off by hand."""
    p = model.params.double().numpy()
    return np.column_stack([p[:6].reshape(2, 3), p[6:8]]) if index == 0 else p[12:].reshape(2, 2)
