"""SPFL: exact numbers of its chains, what moves, and the cases in which it is FedAvg or FedSeq."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import FederatedData, Training, UserError, run
from ekiden.core.engine import wire
from ekiden.core.engine.federation import Fed
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import SPFL, FedAvg, FedSeq
from ekiden.methods.rounds.spfl import Chains, Order
from tests.methods.rounds import Table, play, quadratic, toy_q, values, weights
from tests.methods.test_fedavg import SETTINGS, same

PLAIN: dict[str, Any] = {"align_previous": 0.0, "align_global": 0.0}


def rounds_of(method: SPFL, toys: list[Any]) -> list[float]:
    """The global model after each round."""
    length = method.shape(len(toys))[1]
    return values(s for s in play(method, toys) if s.step % length == 0)


@pytest.mark.parametrize(
    ("epochs", "first", "second", "fixed", "alone"),
    [
        (1, -0.10, -0.172, -5 / 14, (-3 / 7, -2 / 7)),
        pytest.param(
            2, -0.17, -0.258128, -0.17 / 0.4816, (-0.49502, -0.21096), marks=pytest.mark.slow
        ),
    ],
)
def test_two_chains(
    epochs: int, first: float, second: float, fixed: float, alone: tuple[float, float]
) -> None:
    seen = rounds_of(SPFL(rounds=200, epochs=epochs, **PLAIN), toy_q())
    assert seen[:2] == pytest.approx([first, second], abs=1e-12)
    assert seen[-1] == pytest.approx(fixed, abs=1e-9)
    one = SPFL(rounds=200, epochs=epochs, chains=1, chain_order="fixed", **PLAIN)
    assert rounds_of(one, toy_q())[-1] == pytest.approx(alone[0], abs=1e-5)
    assert rounds_of(one, toy_q()[::-1])[-1] == pytest.approx(alone[1], abs=1e-5)


@pytest.mark.parametrize(
    ("epochs", "start", "ends"),
    [
        (1, 0.0, (-0.12, -0.08)),
        (1, -0.1, (-0.192, -0.152)),
        (2, 0.0, (-0.2384, -0.1016)),
        (2, -0.17, (-0.326528, -0.189728)),
    ],
)
def test_ends_of_the_chains(epochs: int, start: float, ends: tuple[float, float]) -> None:
    one = SPFL(rounds=1, epochs=epochs, chains=1, chain_order="fixed", **PLAIN)
    seen = [values(play(one, toys, start))[-1] for toys in (toy_q(), toy_q()[::-1])]
    assert seen == pytest.approx(ends, abs=1e-12)


def test_three_clients_and_their_orders() -> None:
    def toys() -> list[Any]:
        return [quadratic(a, b) for a, b in ((1, 1), (2, -1), (1, 3))]

    settings: dict[str, Any] = {"rounds": 1, "epochs": 1, **PLAIN}
    one = SPFL(chains=1, chain_order="fixed", **settings)
    shifts = [rounds_of(one, toys()[i:] + toys()[:i])[0] for i in range(3)]
    assert shifts == pytest.approx([0.192, 0.208, 0.096], abs=1e-12)
    assert rounds_of(SPFL(chain_order="fixed", **settings), toys()) == pytest.approx(
        [0.496 / 3], abs=1e-12
    )
    every = [rounds_of(one, list(order))[0] for order in itertools.permutations(toys())]
    assert sum(every) / 6 == pytest.approx(0.162, abs=1e-12)
    assert values(play(FedAvg(rounds=1, epochs=1), toys())) == pytest.approx([0.2 / 3], abs=1e-12)


def test_one_client_is_local_descent() -> None:
    assert rounds_of(SPFL(rounds=3, epochs=2, **PLAIN), toy_q()[:1]) == pytest.approx(
        [1 - 0.9**k for k in (2, 4, 6)]
    )


def chains(method: SPFL, clients: int, step: int = 0) -> tuple[tuple[str, ...], ...]:
    fed = Fed(
        [f"c{i}" for i in range(clients)], Table(method, {}, weights(0.0)), 1, lambda row: None
    )
    fed.begin(step)
    return method.sequences(fed)


def test_latin_chains_use_every_client_once_at_every_position() -> None:
    drawn = [chains(SPFL(), 6, step) for step in (0, 6, 12)]
    for sequences in drawn:
        assert all(len(set(sequence)) == 6 for sequence in sequences)
        assert all(len({sequence[k] for sequence in sequences}) == 6 for k in range(6))
    assert len(set(drawn)) == 3, "a fresh order each round"


@pytest.mark.parametrize("order", ["latin", "random", "fixed"])
def test_chains_of_some_clients(order: Order) -> None:
    sequences = chains(SPFL(chain_order=order, chains=2, participation=0.5), 8)
    assert len(sequences) == 2
    assert all(len(set(sequence)) == 4 for sequence in sequences)
    assert len({client for sequence in sequences for client in sequence}) == 4
    assert sequences[0] != sequences[1]


def test_transfers() -> None:
    assert SPFL(rounds=1).cost(10, 1) == 120
    assert SPFL(rounds=1, **PLAIN).cost(10, 1) == 110
    assert SPFL(rounds=1, align_global=0.0).cost(10, 1) == 110, "w^r is for the global term only"
    assert (
        4 * 15 * 120 * 11_689_512
        == SPFL(rounds=15).cost(10, 4 * 11_689_512)
        == round(4 * 21.0411216e9)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"chains": 2, "length": 2},
        {"chain_order": "random", "chains": 1},
        {"participation": 0.5},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {},
                PLAIN,
                {"chains": 2},
                {"length": 2},
                {"chain_order": "random"},
                {"align_global": 0.0, "chain_order": "fixed", "chains": 1},
            )
        ),
    ],
)
def test_moves_what_it_declares_and_resumes(
    changes: dict[str, Any], blobs: FederatedData, tmp_path: Path
) -> None:
    method = SPFL(rounds=2, epochs=1, **changes)
    whole = run(method, blobs, Tiny, **SETTINGS)
    assert whole.weights is not None
    assert whole.bytes == method.cost(4, wire.size(whole.weights))
    run(method, blobs, Tiny, folder=tmp_path, stop_after=method.steps(4) // 2 + 1, **SETTINGS)
    assert same(run(method, blobs, Tiny, folder=tmp_path, **SETTINGS).weights, whole.weights)


def test_chains_of_one_client_are_uniform_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a = run(
        SPFL(rounds=3, epochs=2, length=1, chain_order="fixed", **PLAIN), blobs, Tiny, **SETTINGS
    )
    b = run(FedAvg(rounds=3, epochs=2, weighting="uniform"), blobs, Tiny, **SETTINGS)
    assert same(a.weights, b.weights)


def test_the_order_of_such_chains_is_only_that_of_a_sum(blobs: FederatedData) -> None:
    sgd = SETTINGS | {"training": Training(optimizer="sgd", lr=0.05, batch_size=16)}
    a = run(
        SPFL(rounds=3, epochs=2, length=1, participation=0.5, **PLAIN), blobs, Tiny, **sgd
    ).weights
    b = run(
        FedAvg(rounds=3, epochs=2, participation=0.5, weighting="uniform"), blobs, Tiny, **sgd
    ).weights
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-4, atol=1e-5)


def test_one_chain_is_fedseq_bit_for_bit(blobs: FederatedData) -> None:
    a = run(
        SPFL(rounds=2, epochs=2, chains=1, chain_order="fixed", **PLAIN), blobs, Tiny, **SETTINGS
    )
    b = run(FedSeq(rounds=2, epochs=2), blobs, Tiny, **SETTINGS)
    assert same(a.weights, b.weights)


def test_alignment_changes_the_model_and_counts_its_passes(blobs: FederatedData) -> None:
    plain, glam = (
        run(SPFL(rounds=1, epochs=2, **changes), blobs, Tiny, **SETTINGS) for changes in (PLAIN, {})
    )
    assert not same(plain.weights, glam.weights)
    assert glam.metrics[-1]["forward"] == 2 * glam.metrics[-1]["backward"], (
        "two teachers answer once for two epochs"
    )
    assert (
        plain.metrics[-1]["forward"]
        == plain.metrics[-1]["backward"]
        == glam.metrics[-1]["backward"]
    )


def test_the_model_changes_at_the_end_of_a_round_only() -> None:
    seen = values(play(SPFL(rounds=2, epochs=1, **PLAIN), toy_q()))
    assert seen == pytest.approx([-0.10, -0.10, -0.172], abs=1e-12), (
        "nothing before the first round ends"
    )
    states = list(play(SPFL(rounds=1, epochs=1, **PLAIN), toy_q()))
    assert [len(s.ends) for s in states if isinstance(s, Chains)] == [2, 0]


def test_random_chains_are_of_all_clients() -> None:
    with pytest.raises(UserError, match="chain_order='random' makes chains of all"):
        SPFL(chain_order="random", length=2)


def test_refuses_more_chains_than_clients(blobs: FederatedData) -> None:
    for changes in ({"chains": 5}, {"length": 3, "participation": 0.5}):
        with pytest.raises(UserError, match=next(iter(changes))):
            run(SPFL(**changes), blobs, Tiny, **SETTINGS)
