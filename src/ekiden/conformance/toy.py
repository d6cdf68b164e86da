"""Data and a network with which a run takes a fraction of a second, with every place in which state can hide."""

from functools import cache

import torch
from torch import Tensor, nn

from ekiden.data.samples import FederatedData
from ekiden.data.sources import federate


@cache
def blobs(least: int = 40) -> FederatedData:
    """Return four silos of 40 to 70 points each (or from `least` on) in three Gaussian classes, in different shares."""
    generator = torch.Generator().manual_seed(7)
    centres = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])

    def draw(n: int, classes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
        return centres[y] + torch.randn(n, 4, generator=generator), y

    mixes = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    return federate([draw(least + 10 * i, mix) for i, mix in enumerate(mixes)], test=draw(60, (0, 1, 2)))


class Tiny(nn.Module):
    """A network of 4 inputs with BatchNorm and dropout, every place in which state can hide."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]
