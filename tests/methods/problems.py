"""One small real problem of each task: data of four clients, and a network that fits."""

import codecs
import contextlib
import io
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

from ekiden.core.base.errors import DataWarning
from ekiden.core.models.split import SplitNetwork
from ekiden.data import FederatedData, federate

WINDOW = 16  # letters in a text


class Problem(NamedTuple):
    """Data, and what makes the network."""

    data: FederatedData
    build: Callable[[], nn.Module]


def digits(number: int = 300) -> tuple[Tensor, Tensor]:
    """Pixels (n, 8, 8) from 0 to 1, and the digits (n,)."""
    bunch = load_digits()
    return torch.tensor(bunch.images[:number] / 16, dtype=torch.float32), torch.tensor(
        bunch.target[:number]
    )


def divided(x: Tensor, y: Tensor, task: str | None = None) -> FederatedData:
    """Every third sample is for testing, the others go to four clients."""
    rows = torch.arange(len(x))
    train, test = rows[rows % 3 > 0], rows[rows % 3 == 0]
    silos = [(x[part], y[part]) for part in (train[k::4] for k in range(4))]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DataWarning
        )  # dark pixels at the edge look like marks of missing values
        return federate(silos, (x[test], y[test]), val_fraction=0.2, task=task)


def vectors(inputs: int, outputs: int) -> nn.Module:
    """A perceptron."""
    return SplitNetwork(
        nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()),
        nn.Linear(16, outputs),
    )


class Causal(nn.Module):
    """The letters so far, of which each place sees three."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 16)
        self.mix = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(b, L, 32) of letters (b, L)."""
        seen = nn.functional.pad(self.embedding(x), (0, 0, 2, 0))
        length = x.shape[1]
        near = torch.cat([seen[:, k : k + length] for k in range(3)], dim=2)
        return self.mix(near).relu()  # type: ignore[no-any-return]


def classification() -> Problem:
    """Which digit it is."""
    x, y = digits()
    return Problem(divided(x.flatten(1), y), lambda: vectors(64, 10))


def multi_label() -> Problem:
    """Whether a digit is even, has a closed loop, and is 5 or more."""
    x, y = digits()
    attributes = torch.stack([y % 2 == 0, torch.isin(y, torch.tensor([0, 6, 8, 9])), y >= 5], dim=1)
    return Problem(divided(x.flatten(1), attributes), lambda: vectors(64, 3))


def regression() -> Problem:
    """How far diabetes has gone after a year."""
    bunch = load_diabetes()
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (bunch.data, bunch.target))
    return Problem(divided(x / x.std(0), y, "regression"), lambda: vectors(10, 1))


def survival() -> Problem:
    """How soon diabetes goes far."""
    bunch = load_diabetes()
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (bunch.data, bunch.target))
    return Problem(
        divided(x / x.std(0), torch.stack([400 - y, (y > 80).float()], 1), "survival"),
        lambda: vectors(10, 1),
    )


def segmentation() -> Problem:
    """Which pixels are ink, seen through a blur."""
    x, _ = digits()
    blurred = nn.functional.avg_pool2d(x[:, None], 3, stride=1, padding=1)

    def network() -> nn.Module:
        return SplitNetwork(
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()), nn.Conv2d(8, 2, 1)
        )

    return Problem(divided(blurred, (x > 0.5).long()), network)


def language() -> Problem:
    """The letters of the Zen of Python."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = codecs.decode(this.s, "rot13").lower()
    known = sorted(set(text))
    letters = torch.tensor([known.index(letter) + 1 for letter in text])  # 0 fills up
    windows = letters.unfold(0, WINDOW, WINDOW // 2)
    return Problem(
        divided(windows, windows),
        lambda: SplitNetwork(Causal(len(known) + 1), nn.Linear(32, len(known) + 1)),
    )


@cache
def problems() -> dict[str, Problem]:
    """One of each task, by its name."""
    found = {}
    for make in (classification, multi_label, regression, survival, segmentation, language):
        problem = make()
        found[problem.data.dataset.task.kind] = problem
    return found
