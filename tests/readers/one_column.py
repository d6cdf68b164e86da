"""Tables with one feature."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.data import Dataset, load


def column(cells: list[Any], **options: Any) -> Dataset:
    """A table with one feature."""
    return load({"v": cells, "label": ["ab"[k % 2] for k in range(len(cells))]}, **options)


def read(data: Dataset) -> list[float]:
    """The numbers of the first column, sorted."""
    return sorted(torch.cat([data.train.x, data.test.x])[:, 0].tolist())


def refuses(line: str, make: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=line):
        make()


def drawn(mean: float, std: float, n: int = 90, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame(
        {"v": mean + std * rng.normal(size=n), "label": [("a", "b")[k % 2] for k in range(n)]}
    )


def labelled(label: list[Any]) -> pandas.DataFrame:
    return pandas.DataFrame({"v": np.arange(len(label)) / 3, "label": label})
