"""Averages and distances of models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ekiden import UserError
from ekiden.core.training.weights import Weights, distance, mean
from tests.methods.toys import weights


def test_mean_of_parameters_statistics_and_counters() -> None:
    a = Weights(torch.tensor([0.0, 4.0]), torch.tensor([1.0]), torch.tensor([3]))
    b = Weights(torch.tensor([2.0, 0.0]), torch.tensor([5.0]), torch.tensor([7]))
    average = mean([a, b], [1, 3])
    assert average.params.tolist() == [1.5, 1.0]
    assert average.buffers.tolist() == [4.0]
    assert average.counters.tolist() == [7]
    assert a.params.tolist() == [0.0, 4.0], "inputs stay as they are"


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), st.data())
def test_mean_equals_the_sum_in_float64(values: list[float], data: st.DataObject) -> None:
    share = st.integers(0, 5)
    shares = data.draw(st.lists(share, min_size=len(values), max_size=len(values)).filter(any))
    expected = sum(v * w for v, w in zip(values, shares, strict=True)) / sum(shares)
    average = mean([weights(v) for v in values], [float(s) for s in shares])
    assert float(average.params) == pytest.approx(expected, abs=2e-3)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 7))
def test_equal_models_average_to_themselves_bit_for_bit(value: float, n: int) -> None:
    assert torch.equal(mean([weights(value)] * n).params, weights(value).params)


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -0.5], [1.0]])
def test_mean_refuses_bad_weights(shares: list[float]) -> None:
    with pytest.raises(UserError, match="weight"):
        mean([weights(1.0), weights(2.0)], shares)


def test_mean_refuses_models_of_different_shape() -> None:
    with pytest.raises(UserError, match="same network"):
        mean([weights(1.0), weights(2.0, 3.0)])
    with pytest.raises(UserError, match="same network"):
        mean([weights(1.0), replace(weights(1.0), counters=torch.tensor([3]))])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_model_of_weight_zero_has_no_part_in_the_mean(place: int) -> None:
    models, shares = [weights(1.0), weights(4.0)], [1.0, 2.0]
    models.insert(place, weights(float("nan")))
    shares.insert(place, 0.0)
    assert mean(models, shares).params.tolist() == [3.0]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_distance(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiden.core.training.weights.piece", lambda flat: chunk)
    a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(distance(a, b), (a - b).pow(2).sum())


def test_is_finite() -> None:
    assert weights(1.0, 2.0).is_finite()
    assert not weights(1.0, float("nan")).is_finite()
    assert not Weights(
        torch.zeros(1), torch.tensor([float("inf")]), torch.zeros(0, dtype=torch.int64)
    ).is_finite()
