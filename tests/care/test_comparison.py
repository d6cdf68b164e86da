"""How columns in another unit, or that do not vary, are named."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ekiden
from ekiden.care.comparison import compare_sums
from ekiden.core.base.errors import DataWarning
from ekiden.data import load
from ekiden.readers.moments import ColumnMoments, ColumnSums
from tests.care.rows import N, Rows, rows, silos
from tests.readers.told import drawn, said


def compared(silos: dict[str, Any]) -> str:
    """Return what is said about one column, given its values at each silo."""
    told = [
        ColumnSums({"v": ColumnMoments.of(v * 1.0, "v")}, {"v": 0}, {}, silo=silo)
        for silo, v in silos.items()
    ]
    return "".join(compare_sums(told))


def hospitals(silos: int = 3, rows: int = 60) -> list[Any]:
    made = []
    for k in range(silos):
        rng = np.random.default_rng(k)
        made.append(
            {
                "height": rng.normal(170, 10, rows),
                "weight": rng.normal(75, 12, rows),
                "sex": rng.choice(["f", "m"], rows),
                "label": ["p", "q"] * (rows // 2),
            }
        )
    return made


@pytest.mark.parametrize(
    ("silos", "factor", "line"),
    [
        (
            3,
            0.01,
            r"column 'height' of client-1 differs from other silos \(mean 1.69.* ± 0.0.*; mean 1.*",
        ),
        (4, 10, r"column 'height' of client-1 differs from other silos \("),
        (3, 1000, r"\(mean 1.69.*e\+05 "),
        (
            2,
            0.01,
            r"column 'height' differs between silos: client-0 \(mean 1.*\), client-1 \(mean 1.*\)",
        ),
    ],
)
def test_a_silo_in_another_unit_is_named(silos: int, factor: float, line: str) -> None:
    parts = hospitals(silos)
    parts[1]["height"] = parts[1]["height"] * factor
    with pytest.warns(DataWarning, match=line) as seen:
        ekiden.federate(parts)
    assert len(seen) == 1
    assert "weight" not in str(seen[0].message)


def test_fahrenheit_is_many_deviations_away_and_hospitals_that_differ_are_not_named() -> None:
    parts = hospitals()
    for k, part in enumerate(parts):
        part["height"] = part["height"] + 8 * k  # other people, the same unit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.federate(parts)
    for part in parts:
        part["temperature"] = np.random.default_rng(0).normal(37, 0.5, 60)
    parts[2]["temperature"] = parts[2]["temperature"] * 9 / 5 + 32
    with pytest.warns(DataWarning, match=r"'temperature' of client-2 differs .*mean 98"):
        ekiden.federate(parts)


@given(
    st.integers(3, 8),
    st.integers(0, 7),
    st.sampled_from((0.001, 0.01, 0.1, 10, 100, 1000)),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_one_silo_in_another_unit_is_the_only_one_named(
    silos: int, odd: int, factor: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    each = {}
    for k in range(silos):
        values = rng.normal(rng.uniform(40, 60), rng.uniform(8, 12), 100) * (
            factor if k == odd % silos else 1
        )
        each[f"s{k}"] = values
    line = compared(each)
    assert f"of s{odd % silos} differs from other silos (" in line
    assert line.count("differs") == 1


def test_the_order_of_columns_does_not_matter() -> None:
    parts = hospitals(2)
    other: Any = {name: parts[1][name] for name in ("weight", "label", "sex", "height")}
    one, two = ekiden.federate(parts), ekiden.federate([parts[0], other])
    assert one.dataset.inputs == two.dataset.inputs
    assert one.dataset.train.x.equal(two.dataset.train.x)


def test_a_partition_of_one_table_is_not_a_difference_of_units() -> None:
    table = {name: np.concatenate([part[name] for part in hospitals()]) for name in hospitals()[0]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.split(ekiden.load(table), "dirichlet:0.1", 4)


pytestmark = pytest.mark.usefixtures("no_data")


def test_a_column_that_is_empty_at_one_silo_is_named_with_it() -> None:
    empty: Rows = {"c": [None] * N, "d": [None] * N}
    filled: Rows = {"c": np.arange(N) % 7, "d": ["x", "y"] * (N // 2)}
    line = (
        "column 'c' has no values, or too few, at s1; column 'd' has no values, or too few, at s1"
    )
    assert line in silos(filled, empty)
    together = pandas.concat(
        [pandas.DataFrame(rows(N, k, w=f"s{k}", **p)) for k, p in enumerate((filled, empty))]
    )
    assert line in said(lambda: ekiden.split(load(together, group_column="w"), "natural"))
    assert "no values" not in silos(filled, filled)


def test_a_column_that_is_empty_in_the_test_part_is_named(tmp_path: Path) -> None:
    for part, cell in (("train", 1.5), ("test", None)):
        values = np.random.default_rng(0).normal(size=N) if cell else [None] * N
        pandas.DataFrame(rows(N, len(part), c=values)).to_csv(tmp_path / f"{part}.csv", index=False)
    assert "column 'c' has no values, or too few, at the test part" in said(lambda: load(tmp_path))


def test_codes_that_begin_at_0_and_at_1_are_named() -> None:
    zero, one = {"sex": np.arange(N) % 2}, {"sex": 1 + np.arange(N) // 2 % 2}
    assert "column 'sex' of s1 differs from other silos (1 or 2; 0 or 1 at s0)" in silos(
        zero, one, zero
    )
    assert "'sex'" not in silos(zero, {"sex": np.arange(N) // 3 % 2})
    assert "or 1" not in silos(zero, {"sex": np.linspace(0.1, 1.9, N)})


def test_categories_that_no_other_silo_has_are_named() -> None:
    short, long = {"sex": ["m", "f"] * (N // 2)}, {"sex": ["male", "female"] * (N // 2)}
    assert (
        "silo s0 shares no category of column 'sex' with others (it has 'f', 'm'; others"
        in silos(short, long)
    )
    assert "shares no" not in silos(short, short)


@pytest.mark.parametrize(
    ("mean", "factor", "shown"), [(75, 2.2046, "16"), (170, 1 / 2.54, "6"), (50, 12, "5")]
)
def test_small_factors_are_named_if_values_are_far_from_zero(
    mean: float, factor: float, shown: str
) -> None:
    rng = np.random.default_rng(0)
    values = {
        f"s{k}": rng.normal(mean, mean / 8, 400) * (factor if k == 1 else 1) for k in range(3)
    }
    assert f"of s1 differs from other silos (mean {shown}" in compared(values)


def test_a_table_in_another_unit_than_training_is_named() -> None:
    dataset = ekiden.federate([rows(N, k, h=170 + np.arange(N) % 9) for k in (0, 1)]).dataset
    for values, line in (
        (1.7, "has the median 1.7, and training 17"),
        (np.nan, "has no value: all rows count as"),
    ):
        assert line in said(lambda v=values: dataset.inputs.encode(rows(N, h=np.full(N, v))))
    assert not said(lambda: dataset.inputs.encode(rows(N, h=170 + np.arange(N) % 9)))


@pytest.mark.parametrize(("flat", "varied"), [(0.0, np.arange(60) % 7), ("x", ["x", "y"] * 30)])
def test_a_column_with_one_value_at_one_silo_is_named(flat: Any, varied: Any) -> None:
    silos: list[Any] = [
        drawn(seed=0, c=[flat] * 60),
        drawn(seed=1, c=varied),
        drawn(seed=2, c=varied),
    ]
    value = "'x'" if flat == "x" else "0"
    assert f"column 'c' hardly varies at client-0 ({value}), but does at other silos" in said(
        lambda: ekiden.federate(silos)
    )
    assert not said(lambda: ekiden.federate(silos[1:]))


@pytest.mark.parametrize("share", [0.02, 0.025])
def test_a_count_that_is_rarely_above_0_is_no_doubt_about_the_silos_where_it_seldom_is(
    share: float,
) -> None:
    rng, n = np.random.default_rng(0), 600
    silos: list[Any] = [
        drawn(n, k, c=np.where(rng.random(n) < share, rng.integers(1, 5, n), 0)) for k in range(4)
    ]
    assert not said(lambda: ekiden.federate(silos))
    silos[0]["c"], silos[1]["c"] = np.zeros(n), rng.integers(0, 3, n)
    silos[2]["c"] = silos[3]["c"] = silos[1]["c"]
    assert "'c' hardly varies at client-0" in said(lambda: ekiden.federate(silos))
    for silo in silos[1:]:
        silo["c"] = rng.normal(size=n)  # filled in with their mean
    assert "'c' hardly varies at client-0" in said(lambda: ekiden.federate(silos))


def test_rows_that_a_partition_deals_out_are_not_compared_as_those_of_silos() -> None:
    label = np.arange(200) % 2
    whole = drawn(
        200,
        label=label,
        c=np.where(label, np.arange(200) % 7, 0),
        d=["x" if y else "y" for y in label],
    )
    source = ekiden.load(
        {**whole, "d": np.where(np.arange(200) % 9, whole["d"], "z")}, label_column="label"
    )
    assert "hardly varies" not in said(lambda: ekiden.split(source, "classes:1", 2))


def test_categories_that_are_too_rare_to_be_reported_do_not_make_a_column_constant() -> None:
    rare = ["x"] * 55 + ["y"] * 5
    silos: list[Any] = [drawn(seed=0, c=rare), drawn(seed=1, c=["x", "y"] * 30)]
    assert not said(lambda: ekiden.federate(silos))


@pytest.mark.parametrize("form", ["bytes", "floats", "embeddings"])
def test_arrays_of_a_silo_in_another_range_are_named(form: str) -> None:
    rng, labels = np.random.default_rng(0), np.arange(40) % 2

    def held(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = (
            rng.normal(size=(40, 4)) * factor
            if form == "embeddings"
            else rng.random((40, 1, 4, 4)) * factor
        )
        return torch.from_numpy(
            x.astype(np.uint8 if form == "bytes" else np.float32)
        ), torch.from_numpy(labels)

    usual, odd = (250, 2.9) if form == "bytes" else (1, 20)
    line = said(lambda: ekiden.federate([held(usual), held(usual), held(odd)]))
    assert "the input of client-2 differs from other silos (" in line
    assert "of client-1" not in line


def test_a_given_test_part_in_another_unit_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pandas.DataFrame(drawn(h=rng.normal(170, 10, 60))).to_csv(tmp_path / "train.csv", index=False)
    pandas.DataFrame(drawn(seed=1, h=rng.normal(1.7, 0.1, 60))).to_csv(
        tmp_path / "test.csv", index=False
    )
    line = said(lambda: load(tmp_path))
    assert "column 'h' differs between silos: the training part (mean 1" in line


def test_silos_that_differ_step_by_step_are_in_one_unit_and_a_gap_is_another() -> None:
    rng = np.random.default_rng(0)
    sizes = {f"s{k}": 2.0**k for k in range(8)}  # small and large ones

    def lines(each: dict[str, float]) -> str:
        return compared({s: m * rng.uniform(0.5, 1.5, 99) for s, m in each.items()})

    assert not lines(sizes)
    line = lines(sizes | {"odd": 1e6})
    assert "column 'v' of odd differs from other silos (" in line
    assert line.count("differs") == 1


def test_what_silos_have_by_nature_is_no_doubt_about_them() -> None:
    n = np.arange(60)
    schools: dict[str, Any] = {"boys": n * 0, "girls": n * 0 + 1, "men": n * 0}
    mixed: dict[str, Any] = {f"s{k}": (n + k) % 2 for k in range(5)}
    ones: dict[str, Any] = {"a": 1 + (n > 57), "b": 1 + (n > 10)}  # nearly all 1, and mostly 2
    for held in (schools | mixed, ones):
        assert not compared(held)


@pytest.mark.parametrize("squares", [1e-320, 1e-300, 1e300])
def test_sums_at_the_ends_of_floats_are_compared(squares: float) -> None:
    held = {"a": ColumnMoments(100, 1.0, 9.0), "b": ColumnMoments(100, 1.1, 9.0)}
    held["odd"] = ColumnMoments(100, 0.0, squares)
    told = [ColumnSums({"v": m}, {"v": 0}, {}, silo=silo) for silo, m in held.items()]
    assert "column 'v' of odd differs" in "".join(compare_sums(told))
