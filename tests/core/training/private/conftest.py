"""A few samples at three silos."""

import pytest
import torch

import ekiden
from ekiden.core.data.samples import FederatedData


@pytest.fixture(scope="module")
def few() -> FederatedData:
    torch.manual_seed(0)
    x, y = torch.randn(90, 3), torch.arange(90) % 2
    x[:, 0] += 4 * y
    return ekiden.federate([(x[i::3], y[i::3]) for i in range(3)])
