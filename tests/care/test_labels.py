"""How labels with one value, and codes of missing values among names, are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.data import load
from tests.care.rows import N, hospital, rows
from tests.readers.told import drawn, said

pytestmark = pytest.mark.usefixtures("no_data")


def images(folder: Path, *parts: str, classes: str = "ab") -> Path:
    """Write different images, below each part of a data set."""
    rng = np.random.default_rng(0)
    for part in parts or ("",):
        for name in classes:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for k in range(4):
                pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{k}.png")
    return folder


def test_one_class_is_said_when_data_are_read(tmp_path: Path) -> None:
    assert "are 'a': a model learns nothing from one class" in said(
        lambda: load(images(tmp_path, classes="a"))
    )
    x = torch.randn(N, 4)
    assert "are '0': a model learns" in said(
        lambda: ekiden.federate([(x + k, torch.zeros(N).long()) for k in (0, 1)])
    )


def test_categories_of_numbers_that_mark_missing_values_are_named() -> None:
    stage = ["1", "2", "3", "999"] * 10
    line = said(lambda: load(rows(N, stage=stage), categorical_columns="stage"))
    assert "category of column 'stage' '999' of the table seems to mark missing values" in line


def test_a_label_that_no_sample_has_is_named() -> None:
    table = rows(N, cough=np.arange(N) % 2, fever=[0] * N)
    del table["label"]
    assert "the label 'fever' of the table is the same in all rows" in said(
        lambda: load(table, label_column=["cough", "fever"])
    )


@pytest.mark.parametrize(
    ("labels", "marks"),
    [
        ([0, 1, 0, 1, -999] * 12, "'-999'"),
        ([0, 1, 0, 1, 9] * 12, "'9'"),
    ],
)
def test_classes_that_mark_missing_values_are_named(labels: list[Any], marks: str) -> None:
    assert f"class {marks} of the table seems to mark missing values" in said(
        lambda: load(drawn(label=labels))
    )
    assert not said(lambda: load(drawn(label=np.arange(60) % 10)))


def test_labels_that_mark_missing_ones_are_named() -> None:
    rows, weight = hospital(0), np.random.default_rng(1).normal(78, 12, 120)
    found = said(lambda: load(rows | {"weight": weight, "label": np.arange(120) % 4 - 1}))
    assert "class '-1' of the table seems to mark missing values" in found
    assert not said(lambda: load(rows | {"weight": weight, "label": np.arange(120) % 3 - 1}))
    assert not said(lambda: load(rows | {"month": np.random.default_rng(0).integers(-6, 6, 120)}))
