"""CriticalFL: exact sequences of the detector, the norm, and what is sent."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size, State
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import CriticalFL, DFedAvgM
from ekiden.methods.gossip.criticalfl import CountedModel, Periods, Squares, due, resize
from tests.methods.toys import Silo, Table, rounds, weights


def sequence(
    method: CriticalFL, norms: Sequence[float], least: int = 16, most: int = 96
) -> tuple[list[int], list[bool]]:
    """M and the flags after each check."""
    count, capped, counts, flags = least, False, [], []
    for r in range(1, len(norms) + 1):
        flags.append(method.is_critical(norms[:r]))
        count = resize(count, flags[-1], capped, least, most)
        capped |= count >= most
        counts.append(count)
    return counts, flags


@pytest.mark.parametrize("norms", [[1.0] * 14, [0.9**k for k in range(14)]])
def test_ten_forced_checks_are_those_of_the_authors_window_of_zeros(norms: list[float]) -> None:
    counts, flags = sequence(CriticalFL(forced=10), norms)
    assert counts == [32, 64, 96, 96, 96, 96, 96, 96, 96, 96, 48, 24, 16, 16]
    assert flags == [True] * 10 + [False] * 4


def test_empty_window_calls_only_the_forced_checks_critical() -> None:
    counts, flags = sequence(CriticalFL(), [1.0] * 9)
    assert counts == [32, 64, 96, 96, 96, 48, 24, 16, 16]
    assert flags == [True] * 5 + [False] * 4


@pytest.mark.parametrize(("growth", "critical"), [(1.02, True), (1.0, False), (0.5, False)])
def test_growth_above_delta_is_critical(growth: float, critical: bool) -> None:
    assert CriticalFL(forced=0, window=1).is_critical([1.0, growth]) is critical


def test_no_doubling_after_the_cap_was_reached() -> None:
    assert resize(16, True, True, 16, 96) == 16
    assert resize(16, True, False, 16, 96) == 32
    assert resize(3, False, False, 1, 9) == 2
    assert resize(1, False, False, 1, 9) == 1


def test_norm_of_two_batches() -> None:
    squares = Squares()
    for gradient in ([3.0, 4.0], [0.0, 1.0]):
        grad = torch.tensor(gradient)
        squares(torch.zeros(2), grad, torch.tensor(1.0))
        assert grad.tolist() == gradient
    assert 0.1 * squares.sum == pytest.approx(2.6)


def test_norm_of_local_training() -> None:
    silo = Silo(1, lambda w: 0.5 * (w - 1).pow(2).sum())
    CriticalFL(epochs=2).train(cast(Client, silo), weights(0.0), 0)
    assert silo.state == pytest.approx(0.1 * (1 + 0.81) / 2)
    assert CriticalFL().norm(cast(Client, silo)) == silo.state


def test_models_count_by_their_samples() -> None:
    mixed = CriticalFL().mix(
        cast(Client, None), [CountedModel(weights(1.0, 0.0), 1), CountedModel(weights(3.0, 5.0), 3)]
    )
    assert mixed.params.tolist() == [2.5, 3.75], (
        "models are whole: a zero counts, where a masked mean would give 5"
    )


def test_with_all_peers_it_is_plain_averaging() -> None:
    def silos() -> list[Silo]:
        return [Silo(1, lambda w, c=c: 0.5 * (w - c).pow(2).sum()) for c in (1.0, -2.0, 4.0)]  # type: ignore[misc]

    start = (weights(0.0),) * 3
    ours = rounds(
        CriticalFL(rounds=3, epochs=2, peers=2, cap=1.0), silos(), Periods(personal=start)
    )
    plain = rounds(DFedAvgM(rounds=3, epochs=2, theta=0.0), silos(), State(personal=start))
    for a, b in zip(ours, plain, strict=True):
        assert [w for (w,) in a] == pytest.approx([w for (w,) in b])


@pytest.mark.parametrize(
    ("every", "checked"), [(1, [2, 3, 4, 5, 6, 7]), (2, [2, 4, 6]), (3, [3, 6]), (7, [7]), (8, [])]
)
def test_checks_come_before_even_rounds_and_never_before_the_first(
    every: int, checked: list[int]
) -> None:
    assert [r + 1 for r in range(7) if due(r, every)] == checked


@pytest.mark.parametrize(
    ("number", "checks", "peers"),
    [(1, 0, [2]), (5, 2, [2, 4, 4, 6, 6]), (6, 3, [2, 4, 4, 6, 6, 6])],
)
def test_peers_of_each_round(number: int, checks: int, peers: list[int]) -> None:
    """N = 9, N_com = 2, cap 0.75·8 = 6; the norms of the last round are not asked for."""
    silos = [Silo(1, lambda w: 0.5 * w.pow(2).sum()) for _ in range(9)]
    fed, method = Table(silos), CriticalFL(rounds=number, epochs=1, peers=2)
    start = Periods(personal=(weights(1.0),) * 9)
    states = [cast(Periods, s) for s in method.run(cast(Any, fed), start)]
    sent = [0, *(s.sent for s in states)]
    assert [(b - a) // 9 for a, b in pairwise(sent)] == peers
    assert {len(one.norms) for one in states[-1].learning} == {checks}


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.05, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    }


def test_more_peers_in_critical_rounds_and_their_bytes(blobs: FederatedData) -> None:
    method = CriticalFL(rounds=4, epochs=1, peers=1, every=1, forced=1, delta=100.0, cap=0.7)
    result = run(method, blobs, Tiny, **settings())
    state, size = result.state, Size.of(Network(Tiny()), (4,))
    assert isinstance(state, Periods)
    assert state.sent == 4 * (1 + 2 + 1 + 1)
    assert [one.number for one in state.learning] == [1] * 4
    before = [one.norms for one in state.learning]
    assert all(len(norms) == 3 and min(norms) > 0 for norms in before), "before rounds 2, 3, 4"
    assert result.bytes == method.moved(state, 4, size) == 20 * (size + 8) + 3 * 4 * 8
    assert sum(row.bytes for row in result.ledger if row.target == "server") == 3 * 4 * 8
    half = run(method, blobs, Tiny, stop_after=2, **settings())
    assert isinstance(half.state, Periods)
    assert half.bytes == method.moved(half.state, 4, size) == 12 * (size + 8) + 2 * 4 * 8


def test_refuses_more_peers_than_the_cap(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="peers 3 is out of range: it must be at most 2"):
        run(CriticalFL(peers=3), blobs, Tiny, **settings())


def test_two_clients_hear_each_other_and_one_is_told_that_it_needs_another() -> None:
    CriticalFL(peers=1).check(["a", "b"])
    with pytest.raises(UserError, match="peers 5 is out of range: it must be at most 1"):
        CriticalFL().check(["a", "b"])
    with pytest.raises(UserError, match="two clients or more"):
        CriticalFL(peers=1).check(["a"])
