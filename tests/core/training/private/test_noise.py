"""Noise is as wide as it says, and nobody repeats it without the key."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ekiden.core.training.private.accountant import epsilon_of_gaussian
from ekiden.core.training.private.noise import ROUNDED, Draw, Noise

KEY = bytes(range(32))


def test_discrete_noise_tells_no_more_than_gaussian_noise_of_a_variance_that_is_smaller_by_three() -> (
    None
):
    """δ of a discrete Gaussian, as a sum over whole numbers: Canonne, Kamath and Steinke 2020,
    Theorem 7."""
    numbers = np.arange(-600, 601)
    for variance in (16**2, 16**2 + 0.5, 30**2):
        for moved in (1, 5, 16, 40):
            weights = [np.exp(-((numbers - shift) ** 2) / (2 * variance)) for shift in (0, moved)]
            p, q = (each / each.sum() for each in weights)
            for delta in (1e-2, 1e-5, 1e-8):
                epsilon = epsilon_of_gaussian(moved / math.sqrt(variance - ROUNDED), delta)
                assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= delta


def test_samples_are_drawn_independently() -> None:
    sizes = np.array([len(Noise(KEY).chosen(step, 500, 0.1)) for step in range(400)])
    assert abs(sizes.mean() - 50) < 4 * (45 / 400) ** 0.5
    assert 0.75 < sizes.var() / 45 < 1.25
    assert len(Noise(KEY).chosen(0, 500, 1.0)) == 500


@pytest.mark.parametrize("sigma", [1, 3])
def test_small_noise_has_the_probabilities_of_a_discrete_gaussian(sigma: int) -> None:
    drawn = Draw(Noise(KEY)).gaussian(sigma, 20_000).numpy()
    inside = np.arange(-2 * sigma, 2 * sigma + 1)
    far = np.arange(-60 * sigma, 60 * sigma + 1)
    weights = np.exp(-(inside**2) / (2 * sigma**2))
    expected = weights / np.exp(-(far**2) / (2 * sigma**2)).sum()
    found = [int((drawn == k).sum()) for k in inside]
    rest = len(drawn) - sum(found)
    assert (
        chisquare(
            [*found, rest], [*(expected * len(drawn)), (1 - expected.sum()) * len(drawn)]
        ).pvalue
        > 1e-3
    )


def test_large_noise_is_as_wide_as_promised_and_nobody_repeats_it_without_the_key() -> None:
    sigma, count = 2**28, 20_000
    drawn = Draw(Noise(KEY)).gaussian(sigma, count)
    share = drawn.double() / sigma
    assert abs(float(share.mean())) < 4 / math.sqrt(count)
    assert abs(float(share.std()) - 1) < 4 / math.sqrt(2 * count)
    assert float((share.abs() > 3).double().mean()) == pytest.approx(0.0027, abs=0.0015)
    assert len(set((drawn % 16).tolist())) == 16  # to the last bit, not a multiple of anything
    assert torch.equal(drawn, Draw(Noise(KEY)).gaussian(sigma, count))
    draw = Draw(Noise(KEY))
    assert not torch.equal(draw.gaussian(5, 50), draw.gaussian(5, 50))
    assert not torch.equal(drawn[:9], Draw(Noise(bytes(32))).gaussian(sigma, 9))
    for wrong in (0, 2**28 + 1):
        with pytest.raises(ValueError, match="is not from"):
            draw.gaussian(wrong, 1)
