"""Points of three classes at silos, and the features of a result."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ekiden import FederatedData, federate
from ekiden.core.engine.setup import of_method
from ekiden.core.models.split import as_split
from ekiden.core.tasks import Classification
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram
from ekiden.runs.result import Result

Samples = tuple[Tensor, Tensor]


def points(n: int = 300) -> Samples:
    draw = torch.Generator().manual_seed(11)
    y = torch.randint(3, (n,), generator=draw)
    return 2 * torch.eye(4)[y] + torch.randn(n, 4, generator=draw), y


def silos(parts: Sequence[Tensor], names: Sequence[str] | None = None) -> FederatedData:
    """Clients that train on these rows of the points, the one with rows 0 to 59 first; all share a
    test set."""
    x, y = points()
    held = [(x[rows], y[rows]) for rows in (torch.arange(60), *parts)]
    tests = [(x[:30], y[:30])] * len(held)
    return federate(held, tests=tests, val_fraction=0.0, names=names, classes=["a", "b", "c"])


def inside(result: Result, x: Tensor) -> tuple[Tensor, Tensor]:
    """The features and the scores of a result."""
    split = as_split(result.model)
    with torch.no_grad():
        features = split.features(x)
        return features, split.head(features)


def network(
    method: FedGram, build: Any = Tiny, shape: tuple[int, ...] = (4,), classes: int = 3
) -> Network:
    return Network(of_method(build, method, shape, classes, 0, Classification())())
