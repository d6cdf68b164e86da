"""Rows to read, and what is said while they are read."""

import warnings
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import load

Table: TypeAlias = Any  # columns by their names
N = 40


def drawn(n: int = 60, seed: int = 0, **columns: Any) -> dict[str, Any]:
    """Return the columns of a table with a label."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "label": rng.integers(0, 2, n),
        **columns,
    }


def said(read: Any) -> str:
    """Return all that is said while data are read."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read()
    return "\n".join(str(one.message) for one in seen if issubclass(one.category, DataWarning))


def rows(count: int = N, seed: int = 0, **columns: Any) -> Table:
    return drawn(count, seed, **columns)


def cells(folder: Path, text: str, **how: Any) -> str:
    """Return what is said while a text file is read, or the error."""
    (folder / "t.csv").write_bytes(text.encode())
    try:
        return said(lambda: load(folder / "t.csv", **how))
    except UserError as error:
        return str(error)


def pictures(n: int = 20, height: int = 6, width: int = 6) -> Any:
    return torch.randint(0, 255, (n, 3, height, width), dtype=torch.uint8)
