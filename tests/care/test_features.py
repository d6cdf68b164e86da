"""How columns that are hardly features, or that tell the label, are named."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import ekiden
from ekiden.core.base.errors import DataWarning
from ekiden.data import from_tensors, load
from tests.care.rows import N, Rows, _said, hospital, lines, rows, visits
from tests.readers.told import drawn, said


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("patient", np.repeat(np.arange(30), 10)),
        ("patientId", [f"A{k // 10}" for k in range(300)]),
        ("MRN", np.repeat(np.arange(30), 10).astype(float)),
        ("stay_id", [f"s{k}" for k in range(300)]),
        ("record no", np.arange(300)),
        ("row", np.arange(300)),
        ("name", [f"Ms {k}" for k in range(300)]),
    ],
)
def test_a_column_that_looks_like_an_id_is_named_before_it_is_a_feature(
    name: str, values: Any
) -> None:
    rows = {name: values} | {k: v for k, v in visits().items() if k != "patient"}
    (line,) = lines(rows, group_column="ward")
    assert f"{name!r} (" in line
    assert f"drop_columns={name!r}" in line
    assert not lines(rows, group_column="ward", drop_columns=[name])
    assert not any(
        "looks like" in said for said in lines(rows, group_column="ward", subject_column=name)
    )
    assert not lines(rows, group_column="ward", feature_columns=["v", name])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("age", np.random.default_rng(0).permutation(300) * 7),
        ("dose", np.random.default_rng(1).normal(size=300)),
        ("idle", np.arange(300) % 50),
        ("person", ["a", "b", "c"] * 100),
        ("visit", np.arange(300) % 12),
        ("ID", np.random.default_rng(1).normal(size=300)),
        ("seen", pandas.date_range("2020-01-01", periods=300)),
    ],
)
def test_measurements_and_categories_are_not_taken_for_ids(name: str, values: Any) -> None:
    rows = {name: values} | {k: v for k, v in visits().items() if k != "patient"}
    assert not lines(rows, group_column="ward")


def lines_of(seen: Any) -> str:
    return " ".join(str(one.message) for one in seen if one.category is DataWarning)


@pytest.mark.parametrize(
    ("label", "copy"),
    [
        (["no", "yes"] * 30, [1, 0] * 30),
        (["no", "yes"] * 30, ["alive", "dead"] * 30),
        (["a", "b", "c"] * 20, [3.5, 1.5, 2.5] * 20),
        ([0.5 * k for k in range(60)], [3 - 7.0 * k for k in range(60)]),
        ([float(k * k) / 3 for k in range(60)], [0.1 * k for k in range(60)]),
    ],
)
def test_a_copy_of_the_label_is_named(label: list[Any], copy: list[Any], tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    table = pandas.DataFrame(
        {"age": draw.normal(50, 9, 60), "twin": copy, "sex": ["f", "m", "f"] * 20, "label": label}
    )
    with pytest.warns(DataWarning) as seen:
        ekiden.load(table)
    assert (
        "column 'twin' of own data is the same as the label 'label', or a one-to-one function"
        in lines_of(seen)
    )
    assert "drop_columns" in lines_of(seen)
    assert "'age'" not in lines_of(seen)
    with pytest.warns(DataWarning, match=r"column 'twin' of own data is the same as the label"):
        ekiden.federate([table, table.sample(frac=1, random_state=0)])
    table.to_csv(tmp_path / "t.csv", index=False)
    for _ in range(2):  # also of the data set that is kept
        with pytest.warns(DataWarning, match=r"column 'twin' of .*t.csv is the same as the label"):
            ekiden.load(str(tmp_path / "t.csv"))


def test_a_gap_and_an_array_can_be_copies_of_the_label() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 80)
    x = np.stack([draw.normal(size=80), y * 2.0 + 1], axis=1).astype(np.float32)
    with pytest.warns(
        DataWarning, match=r"value 1 of the inputs of own data is the same as the label"
    ):
        from_tensors((x, y))
    gone = pandas.DataFrame(
        {"age": x[:, 0], "left": np.where(y, 5.0, np.nan), "label": np.where(y, "a", "b")}
    )
    with pytest.warns(DataWarning, match=r"column 'left' of own data is the same"):
        ekiden.load(gone)


def test_features_that_only_go_with_the_label_are_not_copies() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 3, 200)
    near = y.astype(float)
    near[7] = (near[7] + 1) % 3
    coarse = np.minimum(y, 1).astype(float)  # two classes share a value
    fine = y + draw.integers(0, 2, 200) / 10  # a class has two values
    table = pandas.DataFrame(
        {"near": near, "coarse": coarse, "fine": fine, "age": draw.normal(size=200), "label": y}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        ekiden.load(table)
        few = pandas.DataFrame(
            {"twin": [1.0, 2.0] * 5, "age": draw.normal(size=10), "label": ["a", "b"] * 5}
        )
        ekiden.load(few, min_count=1)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("several", [False, True])
def test_a_column_that_counts_rows_is_named(start: int, several: bool) -> None:
    draw = np.random.default_rng(0)
    counts = [draw.permutation(np.arange(start, start + 40)) for _ in range(2)]

    def said(change: Callable[[Any], Any]) -> list[str]:
        silos: list[Any] = [
            {"n": change(n), "v": draw.normal(size=40), "label": ["p", "q"] * 20} for n in counts
        ]
        return _said(lambda: ekiden.federate(silos) if several else ekiden.load(silos[0]))

    (line,) = said(lambda n: n)
    assert "column 'n' (40 different values) of" in line
    assert "looks like an id or a row number" in line
    assert "drop_columns='n'" in line
    assert not said(lambda n: n + 2)
    assert not said(lambda n: n * 2)


@pytest.mark.parametrize("majority", [0.5, 0.9])
def test_a_feature_that_nearly_tells_the_label_is_named(majority: float) -> None:
    draw = np.random.default_rng(0)
    y = (draw.random(2000) > majority).astype(int)
    wrong = y.copy()
    wrong[:3] = 1 - wrong[:3]  # 0.15 % of the rows
    often = np.where(np.arange(2000) % 50 == 0, 1 - y, y)
    rows = {
        "outcome": [f"o{k}" for k in wrong],
        "often": often,
        "v": draw.normal(size=2000),
        "label": y,
    }
    (line,) = lines(rows)
    assert line.startswith("column 'outcome' (99.8")
    assert "tells the label 'label' in nearly all" in line
    rare, other = (np.isin(np.arange(2000), ones).astype(int) for ones in (range(8), range(6, 14)))
    assert not lines(
        {"v": rows["v"], "w": other, "label": rare}
    )  # hardly better than the commonest class


def test_a_number_that_is_nearly_the_target_is_named() -> None:
    draw = np.random.default_rng(0)
    y = draw.normal(size=1000)
    (line,) = lines(
        {"a": np.where(np.arange(1000) < 3, 0, y), "b": y + draw.normal(size=1000), "label": y}
    )
    assert line.startswith("column 'a' (99.75 %)")


pytestmark = pytest.mark.usefixtures("no_data")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            {"sbp": np.where(np.arange(N) % 3 == 0, 0, 120 + np.arange(N) % 17)},
            "holds 0 in 14 rows, far from",
        ),
        ({"label": [0, 1, 1, -100] * 10}, "class '-100' of the table seems to mark missing values"),
    ],
)
def test_columns_that_are_not_what_they_seem_are_noticed(columns: Rows, line: str) -> None:
    assert line in said(lambda: load(rows(N, **columns)))


def test_a_gap_that_is_the_label_is_named() -> None:
    labels = np.arange(60) % 2
    days = np.where(labels, np.random.default_rng(0).integers(1, 90, 60), np.nan)
    assert "the gaps of column 'days'" in said(lambda: load(drawn(label=labels, days=days)))


def test_subjects_that_keep_nothing_together_are_named() -> None:
    rows = hospital(0)
    assert not said(lambda: load(rows | {"patient": np.arange(120)}, subject_column="patient"))
    found = said(lambda: load(rows | {"visit": np.arange(120)}, subject_column="visit"))
    assert "each row of the table has its own value in subject_column visit" in found
