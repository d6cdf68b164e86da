"""Random Fourier features: the kernel that they approximate, whole numbers that are the same in any
batch, refusals."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.methods.exact.blocks.whole_features import AMPLITUDE, EXACT, RandomFourier

SCALING = ((0.0,), (1.0,))


def samples(n: int = 200, inputs: int = 6) -> Tensor:
    """Of different means and spreads."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(n, inputs, generator=draw) * torch.arange(1.0, inputs + 1) + 5


def settled(
    width: int, bandwidth: float = 1.0, *, direct: bool = False, x: Tensor | None = None
) -> RandomFourier:
    x = samples() if x is None else x
    torch.manual_seed(0)
    features = RandomFourier(x.shape[1], width, bandwidth=bandwidth, direct=direct)
    features.settle(x, SCALING, torch.Generator())
    return features


@pytest.mark.parametrize("bandwidth", [0.3, 1.0, 3.0])
def test_products_tend_to_the_gaussian_kernel(bandwidth: float) -> None:
    x = samples()
    z = ((x - x.mean(0)) / x.std(0, correction=0)).double().clamp(-4, 4)
    apart = torch.cdist(z, z)
    sigma = bandwidth * apart[np.triu_indices(len(x), 1)].median()
    kernel = (-(apart**2) / (2 * sigma**2)).exp()
    errors = []
    for width in (500, 8000):
        phi = settled(width, bandwidth)(x).double()
        errors.append(
            float((2 * phi @ phi.T / (AMPLITUDE**2 * width) - kernel).square().mean().sqrt())
        )
    assert errors[1] < 0.015
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25), (
        "the error falls with the root of the width"
    )


def test_they_are_whole_numbers_and_the_same_one_by_one() -> None:
    features, x = settled(300, direct=True), samples()
    phi = features(x)
    assert torch.equal(phi, torch.cat([features(row[None]) for row in x]))
    assert torch.equal(phi, phi.round())
    assert phi[:, 6:].abs().max() == AMPLITUDE
    assert torch.equal(phi[:, :6], features.whole(x))
    u, weight = features.whole(x).long(), features.linear.weight.long()
    assert int((u.abs() @ weight.abs().T).max()) < 2**24, (
        "products are exact in float32, in any order"
    )
    period = int(features.get_buffer("period"))
    turns = ((u @ weight.T) % period).double() / period + features.get_buffer(
        "offset"
    ).double() / 2**16
    assert np.array_equal(
        phi[:, 6:].numpy(), np.round(AMPLITUDE * np.cos(2 * np.pi * turns.numpy()))
    )


def test_no_value_lies_half_way() -> None:
    """Cosines of rational angles are rational only at 0, ±1/2 and ±1: whole numbers of 1/126."""
    assert {AMPLITUDE * value % 1 for value in (0, 0.5, 1)} == {0}


def test_what_is_settled_makes_the_same_features_elsewhere() -> None:
    one, other = settled(40), settled(40, x=samples()[:2] * 3)
    assert not torch.equal(one(samples()), other(samples()))
    other.adopt(one.tell())
    assert torch.equal(one(samples()), other(samples()))
    assert one.told_bytes() == 8 * 6 + 4


def test_a_bandwidth_beyond_any_distance_gives_the_largest_period() -> None:
    assert int(settled(10, 1e308).get_buffer("period")) == EXACT


def test_one_sample_settles_features_too() -> None:
    x = samples()[:1]
    features = settled(20, x=x)
    usual = (2 * 6) ** 0.5 * 127 / 4
    period = 2 * np.pi * float(features.get_buffer("fineness")) * usual
    assert float(features.get_buffer("period")) == round(period)


@pytest.mark.parametrize("period", [1.0, 2.5, -7.0, float("inf"), 2.0**24])
def test_foreign_periods_are_refused(period: float) -> None:
    features = settled(20)
    centre, scale, _ = features.tell()
    with pytest.raises(UserError, match="refused"):
        features.adopt((centre, scale, torch.tensor([period])))


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(UserError, match="at most 100000 numbers"):
        RandomFourier(100_001, 2)
