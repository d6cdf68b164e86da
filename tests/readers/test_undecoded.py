"""Times of samples: dates and numbers, from files and frames."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.readers.cells import Cells, Writing


def _read(values: Any) -> list[Any]:
    table = pa.table({"when": pa.array(values)})
    found = Cells(table, "a.csv", Writing(), ["when"]).time("when")
    assert found is not None
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "values",
    [
        ["2024-01-31", "2023-12-01"],
        ["2024-01-31 10:30:00", "2023-12-01 00:00:00"],
        ["2024-01-31T10:30:00Z", "2023-12-01T00:00:00Z"],
        np.array(["2024-01-31", "2023-12-01"], dtype="datetime64[ns]"),
        pa.array([19753, 19692], type=pa.date32()),
        pa.array(["2024", "2023"]).cast(pa.int64()),
        [2.5, -1.0],
    ],
)
def test_dates_and_numbers_keep_their_order(values: Any) -> None:
    later, earlier = _read(values)
    assert later > earlier


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            ["2024-01-31", "31.01.2024"],
            r"dates, but also text|text \('31.01.2024' in row 1.*\), but dates are expected",
        ),
        (
            ["2024-01-31", "soon"],
            r"text \('soon' in row 1.*\), but dates are expected",
        ),
        (["2024-01-31", None], "no value in row 1"),
        ([1.0, float("nan")], "no value in row 1"),
    ],
)
def test_what_is_not_a_time_is_refused_with_its_row(values: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        _read(values)


def test_subject_and_time_reach_the_samples_and_are_no_features(tmp_path: Path) -> None:
    rows = {
        "patient": [f"0{k // 3}" for k in range(60)],
        "when": [f"2024-01-{1 + k % 28:02d}" for k in range(60)],
        "age": [1.5 * k for k in range(60)],
        "label": ["ab"[k // 3 % 2] for k in range(60)],
    }
    data = ekiden.load(rows, subject_column="patient", time_column="when")
    assert data.inputs.numeric == ("age",)  # type: ignore[attr-defined]
    for part in (data.train, data.test):
        assert part.subject is not None
        assert part.time is not None
        assert len(part.subject) == len(part.time) == len(part)
    np.savez(
        tmp_path / "a.npz",
        x=np.zeros((60, 2), np.float32),
        y=np.arange(60) % 2,
        patient=np.arange(60) // 3.0,
    )
    arrays = ekiden.load(str(tmp_path / "a.npz"), subject_column="patient").train
    assert arrays.subject is not None
    with pytest.raises(UserError, match="no array 'device'"):
        ekiden.load(str(tmp_path / "a.npz"), subject_column="device")


def test_one_column_has_one_meaning() -> None:
    with pytest.raises(UserError, match="'p' cannot be two things"):
        ekiden.load({"p": ["a"], "label": ["b"]}, subject_column="p", group_column="p")


def test_silos_give_times_of_one_kind() -> None:
    dates: Any = {"when": ["2024-01-31"] * 20, "v": [1.0] * 20, "label": ["a", "b"] * 10}
    numbers: Any = {**dates, "when": [3.0] * 20}
    with pytest.raises(UserError, match="dates, those of silo client-1 numbers"):
        ekiden.federate([dates, numbers], time_column="when")
