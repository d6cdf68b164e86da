"""FedProx: exact numbers, and the cases in which it is FedAvg."""

import pytest
import torch

from ekiden import FederatedData, UserError, run
from ekiden.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedProx
from ekiden.methods.blocks.rounds import Proximal
from tests.methods.rounds import play, toy_q, values
from tests.methods.test_fedavg import SETTINGS, same


def test_two_rounds_and_the_fixed_point() -> None:
    seen = values(play(FedProx(rounds=200, epochs=2, mu=1), toy_q()))
    assert seen[:2] == pytest.approx([-0.08, -0.1392], abs=1e-12)
    assert seen[-1] == pytest.approx(-4 / 13, abs=1e-12)


def test_clients_of_the_first_two_rounds() -> None:
    for toy, ends in zip(toy_q(), ((0.18, 0.1144), (-0.34, -0.3928)), strict=True):
        for start, end in zip((0.0, -0.08), ends, strict=True):
            assert values(play(FedProx(rounds=1, epochs=2, mu=1), [toy], start)) == pytest.approx([end], abs=1e-12)


def test_the_factor_one_half() -> None:
    without = values(play(FedProx(rounds=1, epochs=2, mu=2), toy_q()))  # what μ = 1 gives where the ½ is left out
    assert without == pytest.approx([-0.075], abs=1e-12)


def test_the_first_step_feels_no_pull() -> None:
    toys = toy_q()
    assert values(play(FedProx(rounds=3, epochs=1, mu=1), toys)) == values(play(FedAvg(rounds=3, epochs=1), toys))


@pytest.mark.parametrize("a", [1.0, 2.0])
def test_closed_form_of_many_steps(a: float) -> None:
    toy = toy_q()[0 if a == 1 else 1]
    b, mu, steps, eta, start = (1.0 if a == 1 else -1.0), 0.7, 9, 0.1, 0.4
    end = start - (1 - (1 - eta * (a + mu)) ** steps) * a * (start - b) / (a + mu)
    assert values(play(FedProx(rounds=1, epochs=steps, mu=mu), [toy], start)) == pytest.approx([end], abs=1e-12)


def test_gradient_is_exactly_zero_at_the_centre() -> None:
    theta = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    grad = torch.full_like(theta, 1e-3)
    Proximal(0.3, theta.clone())(theta, grad, torch.tensor(1.0))
    assert torch.equal(grad, torch.full_like(theta, 1e-3))


def test_without_mu_it_is_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a, b, c = (
        run(method, blobs, Tiny, **SETTINGS).weights
        for method in (FedProx(rounds=2, epochs=2, mu=0), FedAvg(rounds=2, epochs=2), FedProx(rounds=2, epochs=2, mu=1))
    )
    assert same(a, b)
    assert not same(b, c)


def test_refuses_a_negative_mu() -> None:
    with pytest.raises(UserError, match="mu"):
        FedProx(mu=-1)
