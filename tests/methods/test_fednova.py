"""FedNova: exact numbers, accumulation vectors, and the cases in which it is FedAvg."""

from typing import Any

import pytest
import torch

from ekiden import FederatedData, Training, run
from ekiden.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedNova
from ekiden.methods.blocks.rounds import Reply, accumulation
from ekiden.methods.rounds.fednova import Progress, normalised
from tests.methods.rounds import Toy, linear, play, quadratic, toy_q, values, weights
from tests.methods.test_fedavg import SETTINGS


def unequal(lr: float = 0.1) -> list[Toy]:
    """One and three steps a round."""
    training = Training(optimizer="sgd", lr=lr, weight_decay=0.0)
    return [quadratic(1, 1, training=training), quadratic(2, -1, speed=3, training=training)]


def test_one_round_of_unequal_steps() -> None:
    assert values(play(FedNova(rounds=1, epochs=1), unequal())) == pytest.approx([-0.0626666666667], abs=1e-12)
    assert values(play(FedAvg(rounds=1, epochs=1), unequal())) == pytest.approx([-0.194], abs=1e-12)


def test_what_clients_send() -> None:
    method, toys = FedNova(epochs=1), unequal()
    replies: list[Progress] = [FedNova.train(method, toy, weights(0.0), 0) for toy in toys]  # type: ignore[arg-type]
    assert [float(r.reply.model.params) for r in replies] == pytest.approx([0.1, -0.488], abs=1e-12)
    assert [r.a for r in replies] == [1.0, 3.0]


@pytest.mark.slow
def test_finds_the_optimum_that_steps_do_not_weight() -> None:
    # fixed points: (w - 1) + c (w + 1) = 0 with c = (1 - 0.98³) / 0.03, and without the division by the steps 3c
    c = (1 - 0.98**3) / 0.03
    nova = values(play(FedNova(rounds=1000, epochs=1), unequal(0.01)))
    assert nova[-1] == pytest.approx((1 - c) / (1 + c), abs=1e-9) == pytest.approx(-1 / 3, abs=1e-2)
    avg = values(play(FedAvg(rounds=1000, epochs=1), unequal(0.01)))
    assert avg[-1] == pytest.approx((1 - 3 * c) / (1 + 3 * c), abs=1e-9) == pytest.approx(-0.71, abs=1e-2)


@pytest.mark.parametrize(("steps", "momentum", "a"), [(1, 0.9, 1), (2, 0.9, 2.9), (5, 0.9, 13.1441), (7, 0.0, 7)])
def test_accumulation(steps: int, momentum: float, a: float) -> None:
    assert accumulation(steps, momentum) == pytest.approx(a, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_accumulation_has_a_closed_form(momentum: float) -> None:
    for steps in range(1, 51):
        closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        assert accumulation(steps, momentum) == pytest.approx(closed, rel=1e-9)


def test_accumulation_under_a_pull() -> None:
    assert [accumulation(t, 0.0, 0.1) for t in (1, 2, 3)] == pytest.approx([1, 1.9, 2.71], abs=1e-12)
    assert accumulation(3, 0.0, 0.1) == pytest.approx((1 - 0.9**3) / 0.1, abs=1e-12)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.7), (0.9, 0.7)])
def test_linear_losses_are_normalised_exactly(momentum: float, mu: float) -> None:
    training = Training(optimizer="sgd", lr=0.1, weight_decay=0.0, momentum=momentum)
    slopes, speeds, n = (1.0, -3.0, 0.5), (2, 7, 1), (1, 2, 5)
    toys = [linear(s, speed=v, n=k, training=training) for s, v, k in zip(slopes, speeds, n, strict=True)]
    a = [accumulation(v, momentum, 0.1 * mu) for v in speeds]
    p = [k / 8 for k in n]
    effective = sum(x * y for x, y in zip(p, a, strict=True))
    direction = sum(x * s for x, s in zip(p, slopes, strict=True))  # d_i = s_i
    seen = values(play(FedNova(rounds=1, epochs=1, mu=mu), toys, start=2.0))
    assert seen == pytest.approx([2 - 0.1 * effective * direction], abs=1e-12)


def test_one_client_is_its_own_local_model() -> None:
    method, toy = FedNova(rounds=3, epochs=2), unequal()[1]
    assert values(play(method, [toy])) == pytest.approx(values(play(FedAvg(rounds=3, epochs=2), [toy])), abs=1e-12)


def test_server_momentum_on_a_constant_change() -> None:
    seen = values(play(FedNova(rounds=3, epochs=1, server_momentum=0.5), [linear(2.0)]))
    assert seen == pytest.approx([-0.2, -0.2 * 2.5, -0.2 * 4.25], abs=1e-12)
    plain = values(play(FedNova(rounds=3, epochs=1), [linear(2.0)]))
    assert plain == pytest.approx([-0.2, -0.4, -0.6], abs=1e-12)


def test_two_halves_of_a_client_are_that_client() -> None:
    start = weights(0.0)
    one = [Progress(Reply(weights(0.1), 4), 1.0), Progress(Reply(weights(-0.488), 2), 3.0)]
    two = [Progress(Reply(weights(0.1), 2), 1.0)] * 2 + one[1:]
    torch.testing.assert_close(normalised(start, one).params, normalised(start, two).params, rtol=0, atol=1e-12)


def test_equal_steps_are_fedavg() -> None:
    settings: dict[str, Any] = {"rounds": 5, "epochs": 3}
    assert values(play(FedNova(**settings), toy_q())) == pytest.approx(
        values(play(FedAvg(**settings), toy_q())), abs=1e-12
    )


def test_equal_steps_on_real_data_are_fedavg(blobs: FederatedData) -> None:
    whole = Training(optimizer="sgd", lr=0.05, momentum=0.9, batch_size=1000)  # one step an epoch at every client
    a, b = (
        run(kind(rounds=2, epochs=3), blobs, Tiny, **(SETTINGS | {"training": whole})).weights
        for kind in (FedNova, FedAvg)
    )
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.buffers, b.buffers, rtol=1e-5, atol=1e-6)


def test_counts_the_steps_really_made(blobs: FederatedData) -> None:
    training = Training(optimizer="sgd", lr=0.05, momentum=0.9, batch_size=16)
    a, b = (
        run(kind(rounds=1, epochs=1), blobs, Tiny, **(SETTINGS | {"training": training})).weights
        for kind in (FedNova, FedAvg)
    )
    assert a is not None
    assert b is not None
    assert not torch.allclose(a.params, b.params, atol=1e-5)


def test_momentum_at_the_server_follows_the_decay_of_the_learning_rate() -> None:
    """u ← γu + change/η, w ← w - ηu, on the loss w: η = 0.1, 0.05, γ = 0.5."""
    method = FedNova(rounds=2, epochs=1, lr_decay=0.5, server_momentum=0.5)
    assert values(play(method, [linear(1.0)])) == pytest.approx([-0.1, -0.1 - 0.05 * 1.5], abs=1e-12)
