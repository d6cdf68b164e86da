"""Times of samples: dates and numbers, from files and frames."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.data import Samples


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


def test_silos_give_times_of_one_kind() -> None:
    dates: Any = {"when": ["2024-01-31"] * 20, "v": [1.0] * 20, "label": ["a", "b"] * 10}
    numbers: Any = {**dates, "when": [3.0] * 20}
    with pytest.raises(UserError, match="dates, those of silo client-1 numbers"):
        ekiden.federate([dates, numbers], time_column="when")
    with pytest.raises(UserError, match="silo client-1 are dates, those of silo client-0 numbers"):
        ekiden.federate([numbers, dates], time_column="when")


def test_whole_numbers_and_others_are_both_times() -> None:
    x, y = torch.zeros(20, 2), torch.arange(20) % 2
    whole = Samples(x, y, time=torch.arange(20))
    parts = Samples(x, y, time=torch.arange(20) + 0.5)
    fed = ekiden.federate([whole, parts])
    assert fed.dataset.train.time is not None
    assert sorted(fed.dataset.train.time.tolist()) == [k / 2 for k in range(32)]


def test_categories_of_dates_are_times() -> None:
    rows: Any = {
        "when": ["2024-01-31", "2024-02-01"] * 10,
        "v": range(20),
        "label": ["a", "b"] * 10,
    }
    text = ekiden.load(pandas.DataFrame(rows), time_column="when")
    frame = pandas.DataFrame(rows).astype({"when": "category"})
    categories = ekiden.load(frame, time_column="when")
    assert text.train.time is not None
    assert categories.train.time is not None
    assert torch.equal(categories.train.time, text.train.time)
    names = frame.assign(when=["early", "late"] * 10).astype({"when": "category"})
    with pytest.raises(UserError, match=r"'when' of the table holds text .*numbers are expected"):
        ekiden.load(names, time_column="when")
