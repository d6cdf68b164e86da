"""FedDC: exact numbers, and the cases in which it is FedProx or FedAvg."""

from typing import Any, cast

import pytest
import torch

from ekiden import FederatedData, Training, run
from ekiden.core.engine import wire
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size
from ekiden.core.engine.transport import Transfer
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedDC, FedProx
from ekiden.methods.rounds.feddc import Drifting
from tests.methods.rounds import play, quadratic, toy_q, values
from tests.methods.test_fedavg import SETTINGS
from tests.methods.toys import Silo, weights


def cloud(s: Any) -> float:
    assert isinstance(s, Drifting)
    assert isinstance(s.cloud, Weights)
    return float(s.cloud.params)


def test_round_one_is_fedprox() -> None:
    a = values(play(FedDC(rounds=1, epochs=4, alpha=0.5), toy_q()))
    assert a == pytest.approx(values(play(FedProx(rounds=1, epochs=4, mu=0.5), toy_q())), abs=1e-12)


def test_without_penalty_and_correction_only_the_start_differs_from_fedavg() -> None:
    method = FedDC(rounds=1, epochs=2, alpha=0, gradient_correction=False)
    toys = toy_q()
    (s,) = play(method, toys)
    assert values(iter([s])) == pytest.approx(
        values(play(FedAvg(rounds=1, epochs=2), toy_q())), abs=1e-12
    )
    drift = sum(float(t.state.drift) for t in toys) / 2
    assert cloud(s) == pytest.approx(values(iter([s]))[0] + drift, abs=1e-12)


def test_gradient_memory_is_the_authors_displacement_where_gradients_are_clipped() -> None:
    steep = Silo(1, lambda w: 500 * (w - 0.5).pow(2).sum(), clip_norm=10.0)
    model, gradient = weights(0.0), weights(0.7)
    reply = FedDC(epochs=2, alpha=0.1).train(cast(Client, steep), model, gradient, 1.0, 0)
    torch.testing.assert_close(
        reply.model.params, torch.tensor([0.0]), atol=1e-5, rtol=0
    )  # there and back
    torch.testing.assert_close(steep.state.gradient, -gradient.params, atol=1e-4, rtol=0)


def test_drift_is_the_mean_of_all_clients_under_partial_participation() -> None:
    toys = [quadratic(1 + 0.5 * i, 2 - i) for i in range(5)]
    for s in play(FedDC(rounds=20, epochs=2, alpha=0.5, participation=0.4), toys):
        assert isinstance(s, Drifting)
        known = [t.state for t in toys if t.state is not None]
        assert float(s.drift) == pytest.approx(sum(float(m.drift) for m in known) / 5, abs=1e-12)  # type: ignore[arg-type]
        assert float(s.gradient) == pytest.approx(  # type: ignore[arg-type]
            sum(float(m.gradient) for m in known) / 5, abs=1e-12
        )


@pytest.mark.parametrize("correction", [True, False])
def test_moves_what_it_declares_and_trains_with_momentum(
    correction: bool, blobs: FederatedData
) -> None:
    method = FedDC(rounds=3, epochs=2, alpha=0.1, gradient_correction=correction)
    sgd = Training(optimizer="sgd", lr=0.05, momentum=0.9, batch_size=16)
    result = run(method, blobs, Tiny, **(SETTINGS | {"training": sgd}))
    assert result.weights is not None
    assert torch.isfinite(result.weights.params).all()
    assert result.bytes == method.cost(4, Size(wire.size(result.weights)))
    assert result.accuracy > 0.5


def test_asks_only_those_drawn_and_each_once() -> None:
    ledger: list[Transfer] = []
    toys = [quadratic(1 + 0.1 * i, 2 - i, n=1 + i) for i in range(40)]
    method = FedDC(rounds=6, epochs=1, participation=0.1)
    end = list(play(method, toys, ledger=ledger))[-1]
    assert isinstance(end, Drifting)
    drawn = {row.source for row in ledger if row.task == "get"}
    assert len(drawn) < 40
    assert end.sizes == {name: 1 + int(name.split("-")[1]) for name in drawn}
    size = 8  # one float64
    assert (
        sum(row.bytes for row in ledger)
        == method.moved(end, 40, Size(size))
        <= method.cost(40, Size(size))
    )
