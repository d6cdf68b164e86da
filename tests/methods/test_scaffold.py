"""SCAFFOLD: exact numbers, its invariant, and the cases in which it is FedAvg."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Training, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.training import fit as fitting
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import SCAFFOLD, FedAvg
from ekiden.methods.blocks.rounds import Corrected
from ekiden.methods.rounds.scaffold import Controlled
from tests.methods.rounds import linear, play, quadratic
from tests.methods.test_fedavg import SETTINGS
from tests.methods.toys import Silo, weights


def control(state: Any) -> float:
    assert isinstance(state, Controlled)
    assert state.control is not None
    return float(state.control)


def test_server_control_is_the_mean_of_all_clients() -> None:
    toys = [quadratic(1 + 0.5 * i, 2 - i) for i in range(5)]
    for s in play(SCAFFOLD(rounds=30, epochs=3, participation=0.4), toys):
        own = [0.0 if toy.state is None else float(toy.state) for toy in toys]
        assert control(s) == pytest.approx(sum(own) / 5, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_control_is_the_gradient_of_a_linear_loss_with_any_momentum(momentum: float) -> None:
    training = Training(optimizer="sgd", lr=0.1, weight_decay=0.0, momentum=momentum)
    toys = [linear(1.5, training=training), linear(-4.0, training=training)]
    list(play(SCAFFOLD(rounds=2, epochs=5), toys))
    assert [float(t.state) for t in toys] == pytest.approx([1.5, -4.0], abs=1e-12)


@pytest.mark.parametrize("clip_norm", [0.05, 10.0])
def test_mean_gradient_is_option_two_where_gradients_are_clipped(clip_norm: float) -> None:
    clients = [
        Silo(1, loss, clip_norm=clip_norm)
        for loss in (lambda w: 500 * (w - 1).pow(2).sum(), lambda w: w.sum())
    ]
    model, control = weights(0.0), weights(0.3)
    for client in clients:
        own = torch.zeros(1)
        for step in range(3):
            reply = SCAFFOLD(epochs=2).train(cast(Client, client), model, control, step)
            own = own - control.params + (model.params - reply.model.params) / (2 * 0.1)
            torch.testing.assert_close(client.state, own, rtol=1e-4, atol=1e-4)
            model = reply.model


def test_first_round_on_real_data_is_uniform_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a = run(SCAFFOLD(rounds=1, epochs=2), blobs, Tiny, **SETTINGS).weights
    b = run(FedAvg(rounds=1, epochs=2, weighting="uniform"), blobs, Tiny, **SETTINGS).weights
    assert a is not None
    assert b is not None
    assert torch.equal(a.params, b.params)
    assert torch.equal(a.buffers, b.buffers)


class Memory:
    """A journal in memory that may stop the run."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.saved: dict[str, dict[str, Tensor]] = {}

    def load(self, key: str) -> dict[str, Tensor] | None:
        return self.saved.get(key)

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        self.saved[key] = {name: value.clone() for name, value in tensors.items()}
        if int(tensors["numbers"][0]) == self.stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_mean_gradient_survives_a_crash_within_a_fit(
    stop: int, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_SHARE_OF_SAVING", 0)
    worker = Worker(
        Setup(SCAFFOLD(), Tiny, blobs.dataset, SETTINGS["training"], SETTINGS["hardware"]), {}
    )
    start = worker.network.weights()

    def fit(journal: Memory | None) -> tuple[Tensor, Tensor]:
        bench = worker.bench("here")
        bench.journal = journal
        corrected = Corrected(torch.full_like(start.params, 0.01))
        result = fitting.fit(
            bench,
            start,
            blobs.clients[0].train,
            blobs.clients[0].val,
            epochs=3,
            seed=1,
            penalty=corrected,
        )
        return result.params, corrected.mean()

    journal = Memory(stop)
    with pytest.raises(KeyboardInterrupt):
        fit(journal)
    journal.stop = 10**9
    for a, b in zip(fit(journal), fit(None), strict=True):
        assert torch.equal(a, b)
