"""Real data sets where there are any, and small ones made on the spot."""

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from ekiden.data import Dataset, load


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EKIDEN_DATA", raising=False)


@pytest.fixture
def real() -> Callable[[str], Dataset]:
    """Load a real data set from `$EKIDEN_DATA`, or skip the test."""

    def get(name: str) -> Dataset:
        root = os.environ.get("EKIDEN_DATA")
        if root is None or not (Path(root) / name / "train.parquet").is_file():
            pytest.skip(f"EKIDEN_DATA holds no {name}")
        return load(name)

    return get


@pytest.fixture(scope="session")
def digits() -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EKIDEN_DATA", raising=False)
        return load("digits")


def png(pixels: NDArray[np.uint8], mode: str | None = None) -> bytes:
    """Lossless file of (H, W) or (H, W, 3) pixels."""
    out = BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(out, format="png")
    return out.getvalue()


def noise(n: int, shape: tuple[int, ...] = (4, 4, 3), seed: int = 0) -> list[NDArray[np.uint8]]:
    """n images of random pixels."""
    return list(np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8))


def write(path: Path, columns: dict[str, object], metadata: dict[str, str] | None = None) -> Path:
    """A Parquet file of these columns."""
    table = pa.table(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, path)
    return path


def write_images(path: Path, n: int = 10, classes: int = 2, seed: int = 0) -> Path:
    """A Parquet file of n images with labels 0, 1, ..., classes - 1 in turn."""
    return write(
        path,
        {"image": [png(p) for p in noise(n, seed=seed)], "label": [i % classes for i in range(n)]},
    )


def write_folder(root: Path, names: dict[str, int], seed: int = 0) -> Path:
    """Folders (`cat`, `photo/cat`) with this many images each."""
    for number, (name, n) in enumerate(names.items()):
        (root / name).mkdir(parents=True)
        for i, pixels in enumerate(noise(n, seed=seed + number)):
            (root / name / f"{i:03}.png").write_bytes(png(pixels))
    return root
