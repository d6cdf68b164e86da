"""FedNova: exact numbers, accumulation vectors, and the cases in which it is FedAvg."""

import pytest
import torch

from ekiden import FederatedData, Training, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedNova
from ekiden.methods.blocks.rounds import accumulation
from tests.methods.rounds import linear, play, values
from tests.methods.test_fedavg import SETTINGS


@pytest.mark.parametrize(
    ("steps", "momentum", "a"), [(1, 0.9, 1), (2, 0.9, 2.9), (5, 0.9, 13.1441), (7, 0.0, 7)]
)
def test_accumulation(steps: int, momentum: float, a: float) -> None:
    assert accumulation(steps, momentum) == pytest.approx(a, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_accumulation_has_a_closed_form(momentum: float) -> None:
    for steps in range(1, 51):
        closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        assert accumulation(steps, momentum) == pytest.approx(closed, rel=1e-9)


def test_accumulation_under_a_pull() -> None:
    assert [accumulation(t, 0.0, 0.1) for t in (1, 2, 3)] == pytest.approx(
        [1, 1.9, 2.71], abs=1e-12
    )
    assert accumulation(3, 0.0, 0.1) == pytest.approx((1 - 0.9**3) / 0.1, abs=1e-12)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.7), (0.9, 0.7)])
def test_linear_losses_are_normalised_exactly(momentum: float, mu: float) -> None:
    training = Training(optimizer="sgd", lr=0.1, weight_decay=0.0, momentum=momentum)
    slopes, speeds, n = (1.0, -3.0, 0.5), (2, 7, 1), (1, 2, 5)
    toys = [
        linear(s, speed=v, n=k, training=training)
        for s, v, k in zip(slopes, speeds, n, strict=True)
    ]
    a = [accumulation(v, momentum, 0.1 * mu) for v in speeds]
    p = [k / 8 for k in n]
    effective = sum(x * y for x, y in zip(p, a, strict=True))
    direction = sum(x * s for x, s in zip(p, slopes, strict=True))  # d_i = s_i
    seen = values(play(FedNova(rounds=1, epochs=1, mu=mu), toys, start=2.0))
    assert seen == pytest.approx([2 - 0.1 * effective * direction], abs=1e-12)


def test_server_momentum_on_a_constant_change() -> None:
    seen = values(play(FedNova(rounds=3, epochs=1, server_momentum=0.5), [linear(2.0)]))
    assert seen == pytest.approx([-0.2, -0.2 * 2.5, -0.2 * 4.25], abs=1e-12)
    plain = values(play(FedNova(rounds=3, epochs=1), [linear(2.0)]))
    assert plain == pytest.approx([-0.2, -0.4, -0.6], abs=1e-12)


def test_equal_steps_on_real_data_are_fedavg(blobs: FederatedData) -> None:
    whole = Training(
        optimizer="sgd", lr=0.05, momentum=0.9, batch_size=1000
    )  # one step an epoch at every client
    a, b = (
        run(kind(rounds=2, epochs=3), blobs, Tiny, **(SETTINGS | {"training": whole})).weights
        for kind in (FedNova, FedAvg)
    )
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.buffers, b.buffers, rtol=1e-5, atol=1e-6)


def test_momentum_at_the_server_follows_the_decay_of_the_learning_rate() -> None:
    """u ← γu + change/η, w ← w - ηu, on the loss w: η = 0.1, 0.05, γ = 0.5."""
    method = FedNova(rounds=2, epochs=1, lr_decay=0.5, server_momentum=0.5)
    assert values(play(method, [linear(1.0)])) == pytest.approx(
        [-0.1, -0.1 - 0.05 * 1.5], abs=1e-12
    )
