"""How slips, marks of missing values and what programs left in texts are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.data import load
from tests.care.rows import N, hospital, lines, rows, small_table
from tests.readers.told import drawn, said


@pytest.mark.parametrize(
    ("rare", "common", "named"),
    [
        ("benigm", "benign", True),
        ("tumour", "tumor", True),
        ("normals", "normal", True),
        ("atypical", "typical", False),
        ("grade_a", "grade_b", False),
        ("stage1", "stage2", False),
        ("cat", "car", False),
        ("stage-II", "stage-I", False),
    ],
)
def test_classes_that_differ_by_one_letter_are_named(rare: str, common: str, named: bool) -> None:
    v = np.random.default_rng(0).normal(size=200)
    labels = [rare if k % 10 == 0 else common if k % 2 else "other" for k in range(200)]
    said = lines({"v": v, "label": labels})
    assert [f"class {rare!r} is nearly {common!r}" in line for line in said] == [True] * named
    assert not lines({"v": v, "label": [[rare, common][k % 2] for k in range(200)]})


pytestmark = pytest.mark.usefixtures("no_data")


def table(cell: Callable[[int], object], header: str = "c,v,label") -> str:
    values = np.random.default_rng(0).normal(size=N)
    return (
        "\n".join([header, *(f"{cell(k)},{v},{'pq'[k % 2]}" for k, v in enumerate(values))]) + "\n"
    )


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
        (["yes", "no", "no", "unknown"] * 15, "'unknown'"),
    ],
)
def test_classes_that_mark_missing_values_are_named(labels: list[Any], marks: str) -> None:
    assert f"class {marks} of the table seems to mark missing values" in said(
        lambda: load(drawn(label=labels))
    )
    assert not said(lambda: load(drawn(label=np.arange(60) % 10)))


def test_a_subject_with_most_rows_is_named() -> None:
    who = np.where(np.arange(120) % 4, np.arange(120) // 3, 0)
    found = said(lambda: load(drawn(120, who=who), subject_column="who"))
    assert "subject '0' of the table seems to mark missing values" in found
    assert not said(lambda: load(drawn(120, who=np.arange(120) // 3), subject_column="who"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("b'a word {k}'", "are values as Python or JSON writes them"),
        ("['a', 'word {k}']", "are values as Python or JSON writes them"),
        ("a word\\u00e9 {k}", "hold escapes of a program"),
        ("a%20word {k}", "hold escapes of a program"),
        ("{k}", "are numbers without a word"),
        ("see [1], {k} % of 20 [text] are {{fine}} at C:\\new", ""),
    ],
)
def test_texts_that_a_program_wrote_are_named(text: str, line: str) -> None:
    found = said(
        lambda: load(
            {"text": [text.format(k=k) for k in range(40)], "label": [0, 1] * 20},
            text_column="text",
        )
    )
    assert line in found if line else not found


def test_a_subject_called_unknown_and_a_far_time_are_named() -> None:
    table = drawn(who=[f"p{k % 9}" if k % 3 else "Unknown" for k in range(60)])
    assert "subject 'Unknown'" in said(lambda: load(table, subject_column="who"))
    days = [f"2024-01-{1 + k % 28:02}" for k in range(59)] + ["9999-12-31"]
    assert "holds 9999-12-31 in 1 row" in said(lambda: load(drawn(when=days), time_column="when"))


def test_labels_that_mark_missing_ones_are_named() -> None:
    rows, weight = hospital(0), np.random.default_rng(1).normal(78, 12, 120)
    found = said(lambda: load(rows | {"weight": weight, "label": np.arange(120) % 4 - 1}))
    assert "class '-1' of the table seems to mark missing values" in found
    assert not said(lambda: load(rows | {"weight": weight, "label": np.arange(120) % 3 - 1}))
    assert not said(lambda: load(rows | {"month": np.random.default_rng(0).integers(-6, 6, 120)}))
    hot = {f"c{k}": (np.arange(120) % 3 == k).astype(int) for k in range(3)}
    found = said(lambda: load({"age": rows["age"]} | hot, label_column=[*hot]))
    assert "each row of the table has exactly one of the labels 'c0', 'c1', 'c2'" in found


def texts(of: Callable[[int], str], n: int = 40, **columns: Any) -> Any:
    return {"text": [of(k) for k in range(n)], "label": ["p", "q"] * (n // 2), **columns}


def test_ordinary_texts_and_weights_of_people_are_no_doubt() -> None:
    plain = texts(lambda k: f"müde & a < b, b > {k}; naïve, Köln")
    assert not said(lambda: load(plain, text_column="text"))
    assert not said(lambda: load(small_table(weight=np.random.default_rng(5).normal(75, 9, 60))))
