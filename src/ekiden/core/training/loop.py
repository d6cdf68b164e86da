"""A training loop of the user's own, which clients run in place of `fit`."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ekiden.core.base import outside
from ekiden.core.base.errors import PrivateError, UserError
from ekiden.core.base.settings import Loop, Training, seeded
from ekiden.core.data.samples import Subset
from ekiden.core.training import frozen
from ekiden.core.training.fit import Bench, Diverged, Work, shuffled
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights

L = TypeVar("L", bound=Loop)


def train(loop: L) -> L:
    """Mark a function as a training loop: what a client does in place of Ekiden's own.

    It is called with the network, an `nn.Module` that holds the received model, and a `DataLoader`
    of inputs (b, ...) and labels (b, ...) on the network's device. One pass over the loader is all
    that the method asks for: its epochs, each in an order of its own. It returns the trained
    network. What it draws from torch, NumPy and `random` follows from the run's seed.

    Args:
        loop: (network, loader) -> network.
    """
    loop.__trains__ = True  # type: ignore[attr-defined]
    return loop


def name_of(loop: str | Loop) -> str:
    """Return the name of a loop: PATH.py:NAME, or MODULE:NAME of one that no single file gives."""
    if isinstance(loop, str):
        return loop
    return outside.reference(loop) or f"{loop.__module__}:{loop.__qualname__}"


def check_training(training: Training) -> None:
    """Refuse settings of Ekiden's own loop next to another loop, which knows nothing of them."""
    kept = ("loop", "batch_size", "max_steps", "augment", "mean", "std")
    for name, usual in vars(Training()).items():
        given = getattr(training, name)
        if name not in kept and given not in (usual, "last"):
            raise UserError(
                f"--{name.replace('_', '-')}={given} is for Ekiden's own loop, and "
                f"{name_of(training.loop)} trains instead: leave it out, and set it there"
            )


def load(loop: str | Loop) -> Loop:
    """Return the function of a loop.

    Raises:
        UserError: it is not there, may not run, or is not marked as a loop.
    """
    found: Loop = outside.load(loop) if isinstance(loop, str) else loop
    if not getattr(found, "__trains__", False):
        raise UserError(f"{name_of(loop)} is not a training loop: mark it by @ekiden.train")
    return found


def fit(bench: Bench, start: Weights, samples: Subset, *, epochs: int, seed: int) -> Weights:
    """Train from `start` by the loop in `bench.training`; the same arguments give the same bits if
    the loop's do.

    Raises:
        UserError: the loop fails, or returns something else than the trained network.
    """
    training = bench.training
    name = name_of(training.loop)
    if bench.hardware.precision != "float32":
        raise UserError(f"--precision is for Ekiden's own loop, and {name} trains: leave it out")
    loop = load(training.loop)
    network = Network(frozen.copied(bench.network.module), bench.feed.device)
    network.load(start)
    with _drawing_from(seed):
        drawn = []
        for _ in range(epochs):
            for rows in shuffled(len(samples), training.batch_size):
                drawn.append(rows.tolist())
        steps = training.steps(len(samples), epochs)
        held: Any = _Samples(bench, samples)
        loader: DataLoader[Any] = DataLoader(held, batch_sampler=drawn[:steps])
        try:
            trained = loop(network.module.train(), loader)
            # into the run's own network: a loop may have moved the tensors of the one it was given
            bench.network.module.load_state_dict(trained.state_dict())
        except UserError:
            raise
        except Exception as error:
            # the text may hold a sample's value
            fails = outside.failure(outside.source(loop) or Path(name), error)
            raise PrivateError(
                f"{bench.where}: {fails}", f"{outside.short(name)} fails; its own log says why"
            ) from error
    result = bench.network.weights()
    if not bool(torch.isfinite(result.params.sum())):
        raise Diverged(f"{bench.where}: {name} gave weights that are NaN or infinite")
    return result


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Let torch, NumPy and `random` draw from `seed`, and afterwards go on where they were."""
    before = random.getstate()
    numbers = np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with seeded(seed):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)


class _Samples:
    """A client's training samples; each that is read counts as one that goes forward and back."""

    def __init__(self, bench: Bench, samples: Subset) -> None:
        self._bench = bench
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several at once, as a `DataLoader` asks for them."""
        x, y = self._bench.feed.batch(self._samples, torch.tensor(rows), train=True)
        self._bench.work.add(Work(len(rows), len(rows)))
        return list(zip(x, y, strict=True))
