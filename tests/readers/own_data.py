"""Tables and texts as users have them, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq

from ekiden.data import FederatedData, load, split

Rows = dict[str, list[Any]]


def patients(n: int = 60, seed: int = 0) -> Rows:
    """A table with numbers, a gap, categories, groups, and labels of every kind."""
    rng = np.random.default_rng(seed)
    age = rng.normal(60, 10, n)
    sex = rng.choice(["female", "male"], n)
    dose: list[float | None] = list(rng.normal(5, 1, n))
    dose[:: max(n // 12, 1)] = [None] * len(dose[:: max(n // 12, 1)])
    return {
        "age": age.tolist(),
        "sex": sex.tolist(),
        "dose": dose,
        "ward": [["north", "south", "east"][k % 3] for k in range(n)],
        "died": np.where(age + 5 * (sex == "male") > 62, "yes", "no").tolist(),
        "days": (1000 - 10 * age).round(1).tolist(),
        "cough": (age > 60).astype(int).tolist(),
        "fever": (age > 65).astype(int).tolist(),
    }


LABELS = ("died", "days", "cough", "fever")


def others(*labels: str) -> list[str]:
    """Columns that hold labels of other things."""
    return [name for name in LABELS if name not in labels]


def clinic(rows: Rows, **more: Any) -> FederatedData:
    """Divided by ward, to predict who dies."""
    made = load(rows, label_column="died", group_column="ward", drop_columns=others("died"), **more)
    return split(made, "natural")


def parquet(path: Path, rows: Mapping[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), path)
    return str(path)


def sentences(n: int = 60) -> Rows:
    good, bad = (
        ("a fine and happy film", "I love it"),
        ("a dull, sad film", "I hate it, really, and would not see it"),
    )
    return {
        "text": [
            (good if k % 2 else bad)[k // 2 % 2] + f" again {k}" * (1 + k % 5) for k in range(n)
        ],
        "label": ["good" if k % 2 else "bad" for k in range(n)],
        "site": [f"site {k % 3}" for k in range(n)],
    }


def bad(rows: Rows, **changes: Any) -> Rows:
    """With some columns changed; None removes one."""
    return {k: v for k, v in (rows | changes).items() if v is not None}


def csv(path: Path, rows: Rows, delimiter: str = ",") -> str:
    """Write a table as text; an empty cell for None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, index=False, sep=delimiter)
    return str(path)
