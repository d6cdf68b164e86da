"""Rows of silos in which something may be wrong, and what is said while they are read."""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import ekiden
from ekiden.core.base.errors import DataWarning
from tests.readers.told import drawn, said

Rows: TypeAlias = Any
"""columns by their names"""

N = 40


def rows(count: int = N, seed: int = 0, **columns: Any) -> Rows:
    return drawn(count, seed, **columns)


def silos(*parts: Rows, **how: Any) -> str:
    """Return what is said while these rows of silos are read."""
    tables: Rows = {f"s{k}": rows(N, k, **part) for k, part in enumerate(parts)}
    return said(lambda: ekiden.federate(tables, **how))


def visits(patients: int = 30, each: int = 10, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients), each)
    return {
        "patient": who,
        "v": rng.normal(size=len(who)),
        "label": [["p", "q"][k // 3 % 2] for k in who],
        "ward": [f"w{k % 3}" for k in who],
    }


def _said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if issubclass(w.category, DataWarning)]


def lines(rows: Any, **columns: Any) -> list[str]:
    """Load rows, and return what was said about them."""
    return _said(lambda: ekiden.load(rows, **columns))


def hospital(seed: int, n: int = 120) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    sick = rng.integers(0, 2, n)
    return {
        "age": rng.normal(60, 8, n) + 12 * sick,
        "upper": np.round(rng.normal(130, 12, n), 1),
        "lower": np.round(rng.normal(80, 8, n), 1),
        "ward": np.where(rng.random(n) < 0.3 + 0.4 * sick, "a", "b"),
        "label": np.where(sick == 1, "sick", "well"),
        "sex": np.arange(n) % 6 // 5,
        "score": 1 + np.arange(n) % 5,
    }


def small_table(n: int = 60, **columns: Any) -> Any:
    rng = np.random.default_rng(len(columns))
    return {
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "label": ["p", "q"] * (n // 2),
        **columns,
    }
