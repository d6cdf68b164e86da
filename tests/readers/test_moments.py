"""Moments and counts that silos tell, wherever their values lie."""

import json
from fractions import Fraction
from math import sqrt
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ekiden.core.base.errors import UserError
from ekiden.data import ClientData, Subset, federate, from_tensors, load, split
from ekiden.readers.kinds import Table
from ekiden.readers.moments import ColumnMoments, ColumnSums
from tests.readers.one_column import drawn
from tests.readers.own_data import others, patients

pytestmark = pytest.mark.usefixtures("no_data")

NUMBERS = st.floats(-1e100, 1e100, allow_subnormal=False)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=8), min_size=1, max_size=5), st.randoms())
def test_moments_of_parts_are_those_of_all_values_in_any_order(
    parts: list[list[float]], random: Random
) -> None:
    told = [ColumnMoments.of(np.array(part), "it") for part in parts]
    whole = ColumnMoments.together(told)
    values = [Fraction(value) for part in parts for value in part]
    mean = sum(values, Fraction()) / len(values)
    squares = sum(((value - mean) ** 2 for value in values), Fraction())
    largest = float(max(map(abs, values)))
    assert whole.count == len(values)
    assert abs(whole.mean - mean) <= 1e-15 * 4 * largest
    assert abs(sqrt(whole.squares) - sqrt(squares)) <= 1e-7 * sqrt(squares) + 1e-14 * largest
    random.shuffle(told)
    assert ColumnMoments.together(told) == whole  # the same bits


@given(NUMBERS, st.integers(1, 50), st.integers(1, 50))
def test_a_constant_has_no_deviation(value: float, first: int, second: int) -> None:
    parts = [ColumnMoments.of(np.full(n, value), "it") for n in (first, second)]
    assert ColumnMoments.together(parts) == ColumnMoments(first + second, value, 0.0)
    assert ColumnMoments.together(parts).deviation == 0


def test_rounding_errors_are_no_deviation() -> None:
    assert ColumnMoments.of(np.array([0.3, 0.1 + 0.2] * 20), "it").deviation == 0
    assert ColumnMoments.of(np.array([1.0, 1 + 1e-9] * 20), "it").deviation == pytest.approx(5e-10)


def test_a_number_to_predict_that_does_not_vary_is_refused() -> None:
    parts = [drawn(5, 1, seed=seed).assign(label=2.5) for seed in range(2)]
    with pytest.raises(UserError, match=r"the label 'label' is 2\.5 in all training rows"):
        federate(parts)
    x = torch.randn(40, 2)
    with pytest.raises(UserError, match=r"the label 'target' is 2\.5 in all training rows"):
        from_tensors((x, torch.full((40,), 2.5)))


def test_numbers_too_large_to_be_squared_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"column 'v' holds -1e\+200: no number may be above 1e\+140"
    ):
        federate([drawn(5, 1).assign(v=-1e200), drawn(5, 1)])


ONE = {"count": 3, "mean": 1.0, "squares": 1.0}
BROKEN: dict[str, Any] = {
    "the former format": {"values": {"v": [3, 1.0, 2.0]}, "missing": {"v": 0}, "categories": {}},
    "no number": {"moments": {"v": {"count": 3, "mean": float("nan"), "squares": 1.0}}},
    "infinity": {"moments": {"v": {"count": 3, "mean": 1.0, "squares": float("inf")}}},
    "negative squares": {"moments": {"v": {"count": 3, "mean": 1.0, "squares": -1.0}}},
    "a negative count": {"moments": {"v": {"count": -3, "mean": 1.0, "squares": 1.0}}},
    "a negative count of missing values": {
        "moments": {"v": {"count": 3, "mean": 1.0, "squares": 1.0}},
        "missing": {"v": -1},
    },
    "a target among the columns": {
        "moments": {"v": ONE, "target: y": ONE},
        "missing": {"v": 0, "target: y": 0},
    },
    "a column without a count of missing values": {
        "moments": {"v": ONE, "w": ONE},
        "missing": {"v": 0},
    },
    "a column of numbers and of categories": {
        "moments": {"v": ONE},
        "categories": {"v": {"a": 3}},
    },
}


@pytest.mark.parametrize("values", BROKEN.values(), ids=list(BROKEN))
def test_sums_that_no_rows_have_are_refused(values: dict[str, Any]) -> None:
    text = json.dumps({"missing": {"v": 0}, "categories": {}, "dates": [], "marks": []} | values)
    with pytest.raises(UserError, match="here holds no sums of a table"):
        ColumnSums.from_json(text, "here")


def test_a_value_far_from_all_others_is_told_by_mean_and_deviation() -> None:
    """Nothing hides it but the operator, who reads the file before: see docs/security.md."""
    rest = np.random.default_rng(0).normal(50, 10, 99)
    told = ColumnMoments.of(np.append(rest, 1050.0), "a column")
    guess = told.mean + np.sqrt(told.squares * 99 / 100)
    assert abs(guess - 1050) < 0.01 * 1050


def test_sums_are_what_is_told_and_add_up() -> None:
    from ekiden.readers.moments import ColumnSums, told_by
    from ekiden.readers.scaling import agree

    raw = load(
        patients(),
        label_column="died",
        group_column="ward",
        drop_columns=others("died"),
        min_count=2,
    )
    whole = split(raw, "iid", 1, val_fraction=0.0)
    parts = split(raw, "natural", val_fraction=0.0)
    assert isinstance(raw.inputs, Table)
    # Clients of a data set that is not scaled yet.
    unscaled = [Subset(raw.train, client.train.rows) for client in parts.clients]
    told = [told_by(ClientData(str(k), s, s, s), raw) for k, s in enumerate(unscaled)]
    assert sum(t.moments["age"].count for t in told) == len(raw.train)
    assert [ColumnSums.from_json(t.to_json(), "here") for t in told] == told
    one = whole.dataset.inputs
    assert isinstance(one, Table)
    again = agree(raw.inputs, ColumnSums.together(told))
    assert again.centre == pytest.approx(one.centre)
    assert again.scale == pytest.approx(one.scale)
