"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ekiden.data import FederatedData, federate
from tests.warm import warm_processes

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache of data sets for all processes of a session, none of the user's."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EKIDEN_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Worker processes start at once; see `tests.warm`."""
    with warm_processes():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run side by side: one thread each."""
    torch.set_num_threads(1)


def make_blobs(least: int = 40) -> FederatedData:
    """Four silos of 40 to 70 points each (or from `least` on) in three Gaussian classes, of different mix."""
    generator = torch.Generator().manual_seed(7)
    centres = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])

    def draw(n: int, classes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
        return centres[y] + torch.randn(n, 4, generator=generator), y

    mixes = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    return federate([draw(least + 10 * i, mix) for i, mix in enumerate(mixes)], test=draw(60, (0, 1, 2)))


@pytest.fixture(scope="session")
def blobs() -> FederatedData:
    """The silos of `make_blobs`, the same for all tests."""
    return make_blobs()


@pytest.fixture(scope="session")
def few() -> FederatedData:
    """The same with 12 to 42 points, for what is slow: two mini-batches of 16 at some clients, one at others."""
    return make_blobs(12)


class Tiny(nn.Module):
    """A network of 4 inputs with BatchNorm and dropout: everything that state can hide in."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


@pytest.fixture
def data_home() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is missing."""
    home = os.environ.get("EKIDEN_DATA", "")
    if not home or not Path(home).is_dir():
        pytest.skip("EKIDEN_DATA does not name a folder of data sets")
    return Path(home)
