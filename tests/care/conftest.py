"""The fixtures of the readers; and random numbers that begin alike."""

import pytest
import torch

from tests.readers.conftest import digits, no_data, real  # noqa: F401


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
