"""The accountant agrees with others, and the noise is the least that keeps a promise."""

import math
from typing import Any

import pytest

from ekiden.core.training.private.accountant import Spent, composed, epsilon_of_gaussian, noise_for


# (σ, q, steps, δ, ε): RdpAccountant and PLDAccountant of Google's dp-accounting 0.6.0,
# Poisson-sampled Gaussian
@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "renyi", "exact"),
    [
        (1.1, 0.01, 1000, 1e-5, 1.7118, 1.5154),
        (1.3, 250 / 60000, 14400, 1e-5, 1.9627, 1.7994),
        (4.0, 0.2, 500, 1e-6, 6.1490, 5.7442),
        (1.0, 1.0, 10, 1e-5, 19.0536, 17.8566),
        (0.7, 0.5, 20, 1e-5, 29.0740, 26.5718),
        (0.6, 0.05, 300, 1e-5, 21.1589, 18.7299),
    ],
)
def test_the_accountant_agrees_with_another(
    noise: float, rate: float, steps: int, delta: float, renyi: float, exact: float
) -> None:
    found = Spent(noise, rate, steps).epsilon(delta)
    if rate == 1:
        assert found == pytest.approx(exact, abs=1e-4)
    else:
        assert exact < found < renyi * 1.01
        assert found > renyi * 0.998  # not smaller: that would promise too much


def test_the_accountant_agrees_with_the_library_itself() -> None:
    library = pytest.importorskip(
        "dp_accounting", reason="dp-accounting is not installed: it needs attrs below 24"
    )
    rdp = pytest.importorskip("dp_accounting.rdp")
    for noise, rate, steps, delta in (
        (1.1, 0.01, 1000, 1e-5),
        (0.63, 0.0284, 105, 1e-5),
        (4.0, 1.0, 40, 1e-4),
    ):
        step = library.GaussianDpEvent(noise)
        one = step if rate == 1 else library.PoissonSampledDpEvent(rate, step)
        counted = rdp.RdpAccountant().compose(library.SelfComposedDpEvent(one, steps))
        assert Spent(noise, rate, steps).epsilon(delta) == pytest.approx(
            counted.get_epsilon(delta), rel=0.01
        )


@pytest.mark.parametrize("ratio", [0.01, 0.7, 3.0, 12.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
def test_the_epsilon_of_gaussian_noise_is_exact_and_rounded_up(ratio: float, delta: float) -> None:
    many = pytest.importorskip("mpmath")  # comes with PyTorch

    def exact(epsilon: float) -> Any:
        e, mu = many.mpf(epsilon), many.mpf(ratio)
        above, below = (
            many.erfc(-x / many.sqrt(2)) / 2 for x in (mu / 2 - e / mu, -mu / 2 - e / mu)
        )
        return above - many.exp(e) * below

    with many.workdps(150):
        found = epsilon_of_gaussian(ratio, delta)
        if found:
            assert exact(found) <= delta * (1 + 1e-6)
            assert exact(found * (1 - 1e-7)) > delta * (1 - 1e-6)
        assert found or exact(0) <= delta
        # gradients over full batches, and releases of one silo, compose like one of them
        assert Spent(2 / ratio, 1.0, 4).epsilon(delta) == pytest.approx(found, rel=1e-6)


def test_noise_is_the_least_that_keeps_the_promise() -> None:
    noise = noise_for(3.0, 1e-5, 0.05, 400)
    assert 2.98 < Spent(noise, 0.05, 400).epsilon(1e-5) <= 3
    assert Spent(noise * 0.99, 0.05, 400).epsilon(1e-5) > 3
    assert noise_for(3.0, 1e-5, 0.05, 0) == 0


def test_parts_compose_like_all_their_steps() -> None:
    parts = [Spent(1.5, 0.1, 20), Spent(1.5, 0.1, 30)]
    assert composed(parts, 1e-5) == pytest.approx(Spent(1.5, 0.1, 50).epsilon(1e-5))
    assert composed([*parts, Spent(0.0, 0.1, 1)], 1e-5) == math.inf
    assert composed([], 1e-5) == 0
