"""Rows to read, and what is said while they are read."""

import warnings
from typing import Any

import numpy as np

from ekiden.core.base.errors import DataWarning


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
