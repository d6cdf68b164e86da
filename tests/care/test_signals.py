"""Signals that are clipped, marked or overlapping windows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ekiden.data import from_tensors
from tests.readers.told import said

pytestmark = pytest.mark.usefixtures("no_data")

Change = Callable[[Any], Any]


def waves(seed: int, n: int = 40) -> Any:
    rng = np.random.default_rng(seed)
    phase, speed = rng.uniform(0, 6, (n, 2, 1)), rng.uniform(0.08, 0.12, (n, 2, 1))
    return np.float32(np.sin(phase + speed * np.arange(100)) + rng.normal(0, 0.1, (n, 2, 100)))


def marked(x: Any) -> Any:
    x[3:9, 1, 20:25] = -32768 / 200
    return x


def windows(x: Any) -> Any:
    long = x.transpose(1, 0, 2).reshape(2, -1)
    return np.stack([long[:, 50 * k : 50 * k + 100] for k in range(40)])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x: x, ""),
        (
            lambda x: x.clip(-0.5, 0.5),
            "are at the end of their range (0.5 in channel 0, -0.5 in channel 0",
        ),
        (marked, "have values far from all others (-163.8 in channel 1)"),
        (windows, "overlap with those that follow them, so parts of the test are in training"),
    ],
)
def test_clipped_marked_and_overlapping_signals_are_named(change: Change, line: str) -> None:
    found = said(lambda: from_tensors((change(waves(0)), np.arange(40) % 2)))
    assert line in found if line else not found
