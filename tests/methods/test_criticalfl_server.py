"""CriticalFL with a server: how many it draws, what is sent back, and how it is merged."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch

from ekiden import FederatedData, Training, UserError, run
from ekiden.core.engine.method import Size, State
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import CriticalFLServer, FedAvg
from ekiden.methods.gossip.criticalfl import Learning
from ekiden.methods.gossip.criticalfl_server import Selection, Upload, largest, merge
from ekiden.methods.gossip.dispfl import pack
from tests.methods.rounds import linear, play, quadratic, toy_q, values, weights
from tests.methods.test_fedavg import SETTINGS, same

SIZE = Size.of(Network(Tiny()), (4,))


def upload(values: list[float], mask: list[bool] | None, n: int) -> Upload:
    kept = values if mask is None else [v for v, m in zip(values, mask, strict=True) if m]
    packed = None if mask is None else pack(torch.tensor(mask))
    return Upload(torch.tensor(kept, dtype=torch.float64), packed, weights(), n, 1.0)


def test_masked_mean() -> None:
    uploads = [upload([1, 0], [True, False], 1), upload([3, 5], [True, True], 3)]
    assert merge(weights(9.0, 9.0), uploads).params.tolist() == [2.5, 5.0]


def test_zero_is_a_value_and_what_nobody_sent_stays() -> None:
    assert merge(
        weights(9.0, 9.0), [upload([2, 0], None, 1), upload([4, 4], None, 1)]
    ).params.tolist() == [3, 2]
    one = [upload([2, 0], [True, False], 1)]
    assert merge(weights(9.0, 9.0), one).params.tolist() == [2, 9]
    with pytest.raises(UserError, match="mask does not fit"):
        merge(weights(9.0, 9.0), [one[0]._replace(values=torch.ones(2))])


def learning(states: Iterable[State]) -> list[Learning]:
    return [s.learning for s in states if isinstance(s, Selection) and s.learning is not None]


def test_largest_changes() -> None:
    assert largest(torch.tensor([0.1, -3.0, 2.0, 0.0]), 2).tolist() == [False, True, True, False]
    assert largest(torch.zeros(4), 2).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("forced", "counts"),
    [
        (10, [32, 64, 96, 96, 96, 96, 96, 96, 96, 96, 48, 24, 16, 16]),
        (5, [32, 64, 96, 96, 96, 48, 24, 16, 16]),
    ],
)
def test_numbers_of_clients_with_constant_norms(forced: int, counts: list[int]) -> None:
    method = CriticalFLServer(rounds=len(counts) + 1, epochs=1, every=1, forced=forced, upload=1.0)
    drawn = [one.number for one in learning(play(method, [linear(1.0) for _ in range(128)]))]
    assert drawn[: len(counts)] == counts


def test_schedule_of_the_authors() -> None:
    """N = 128, M_min = 16: checks come before rounds 2, 4 and 6, and the first five are critical
    whatever the norms."""
    method = CriticalFLServer(rounds=6, epochs=1)
    states = [
        s for s in play(method, [quadratic(1, i) for i in range(128)]) if isinstance(s, Selection)
    ]
    drawn = [0, *(s.sent for s in states)]
    assert [b - a for a, b in pairwise(drawn)] == [16, 32, 32, 64, 64, 96]
    assert states[-1].sent == states[-1].sparse, (
        "critical from the start: all uploads are of the largest changes"
    )


def test_mean_norm_of_those_drawn() -> None:
    # η = 0.1, one epoch of one step: 0.1·g², of the slopes -1 and 2 at w = 0
    (s,) = play(CriticalFLServer(rounds=1, epochs=1, every=1, participation=1.0, cap=1.0), toy_q())
    (one,) = learning([s])
    assert list(one.norms) == pytest.approx([0.1 * (1 + 4) / 2])
    assert one.critical


def test_checks_come_every_second_round() -> None:
    toys = [quadratic(1, i) for i in range(8)]
    states = list(play(CriticalFLServer(rounds=6, epochs=1, upload=1.0), toys))
    assert [len(one.norms) for one in learning(states)] == [1, 1, 2, 2, 3, 3]
    assert [one.number for one in learning(states)] == [2, 2, 4, 4, 6, 6]


def test_whole_uploads_of_everybody_are_fedavg(blobs: FederatedData) -> None:
    method = CriticalFLServer(rounds=3, epochs=2, participation=1.0, cap=1.0, upload=1.0)
    sgd = SETTINGS | {"training": Training(optimizer="sgd", lr=0.05, batch_size=16)}
    a = run(method, blobs, Tiny, **sgd).weights
    b = run(FedAvg(rounds=3, epochs=2), blobs, Tiny, **sgd).weights
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.buffers, b.buffers)
    toys = play(
        CriticalFLServer(rounds=3, epochs=2, participation=1.0, cap=1.0, upload=1.0), toy_q()
    )
    assert values(toys) == pytest.approx(
        values(play(FedAvg(rounds=3, epochs=2), toy_q())), abs=1e-12
    )


def test_critical_rounds_send_less_and_are_counted(blobs: FederatedData, tmp_path: Any) -> None:
    method = CriticalFLServer(
        rounds=6, epochs=1, every=1, forced=2, delta=100.0, participation=0.25
    )
    result = run(method, blobs, Tiny, **SETTINGS)
    end = result.state
    assert isinstance(end, Selection)
    assert (end.sparse, end.sent - end.sparse) == (1 + 2 + 3, 2 + 1 + 1)
    assert result.bytes == method.moved(end, 4, SIZE) < 10 * (2 * SIZE + 16)
    run(method, blobs, Tiny, folder=tmp_path, stop_after=2, **SETTINGS)
    assert same(run(method, blobs, Tiny, folder=tmp_path, **SETTINGS).weights, result.weights)


def test_a_critical_round_keeps_what_changed_little(blobs: FederatedData) -> None:
    method = CriticalFLServer(rounds=2, epochs=1, every=1, participation=0.25, upload=0.1)
    models = [run(method, blobs, Tiny, stop_after=steps, **SETTINGS).weights for steps in (1, 2)]
    before, after = (m.params for m in models if m is not None)
    moved = int((before != after).sum())
    assert 0 < moved <= 2 * method.sent(len(before)) < len(before)


def test_refuses_a_cap_below_those_drawn_at_least(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match=r"participation 1.* at most cap, 3 clients"):
        run(CriticalFLServer(participation=1.0), blobs, Tiny, **SETTINGS)


def test_a_single_client_is_drawn_each_time(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    result = run(CriticalFLServer(rounds=3, epochs=1), alone, Tiny, **SETTINGS)
    assert (result.state.sent, result.state.sparse) == (3, 3)  # type: ignore[attr-defined]
