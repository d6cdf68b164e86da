"""FedAvg: exact numbers, server optimisers, and what all methods of many rounds have in common."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import MOON, SCAFFOLD, FedAvg, FedDC, FedDisco, FedDyn, FedNova, FedProx
from ekiden.methods.blocks.rounds import participants
from tests.methods.rounds import linear, play, quadratic, toy_q, values
from tests.methods.rounds import weights as model

ALL = (FedAvg, FedProx, SCAFFOLD, FedNova, FedDyn, FedDC, MOON, FedDisco)
every_method = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.title())
SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16, select="last"),
    "hardware": Hardware(threads=1),
    "seed": 5,
}


def same(a: Weights | None, b: Weights | None) -> bool:
    assert a is not None
    assert b is not None
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_learning_rate_decays_once_a_round() -> None:
    toys = toy_q()
    list(play(FedAvg(rounds=3, epochs=4, lr_decay=0.5), toys))
    assert [t.lr for t in toys[0].trainings] == [0.1, 0.05, 0.025]
    assert {t.select for t in toys[0].trainings} == {"last"}


def test_server_learning_rate_scales_the_step() -> None:
    assert values(play(FedAvg(rounds=1, epochs=2, server_lr=0.5), toy_q())) == pytest.approx(
        [-0.0425], abs=1e-12
    )


def test_server_momentum_on_a_constant_change() -> None:
    # each round changes w by u = -0.1·2: steps u, (1 + β)u, (1 + β + β²)u
    seen = values(play(FedAvg(rounds=3, epochs=1, server_momentum=0.5), [linear(2.0)]))
    assert seen == pytest.approx([-0.2, -0.2 * 2.5, -0.2 * 4.25], abs=1e-12)


def test_server_adam() -> None:
    method = FedAvg(rounds=2, epochs=1, server_optimizer="adam", server_lr=0.3, server_momentum=0.9)
    seen = values(play(method, [linear(2.0)]))
    m1, v1 = 0.1 * -0.2, 0.01 * 0.04 + 0.99 * 1e-6
    w1 = 0.3 * m1 / (v1**0.5 + 1e-3)
    m2, v2 = 0.9 * m1 + 0.1 * -0.2, 0.99 * v1 + 0.01 * 0.04
    assert seen == pytest.approx([w1, w1 + 0.3 * m2 / (v2**0.5 + 1e-3)], abs=1e-12)


def test_server_state_survives_a_stop(blobs: FederatedData, tmp_path: Path) -> None:
    for changes in (
        {"server_momentum": 0.9},
        {"server_optimizer": "adam", "server_lr": 0.01, "server_momentum": 0.9},
    ):
        method = FedAvg(rounds=3, epochs=1, **changes)
        folder = tmp_path / str(len(changes))
        run(method, blobs, Tiny, folder=folder, stop_after=1, **SETTINGS)
        assert same(
            run(method, blobs, Tiny, folder=folder, **SETTINGS).weights,
            run(method, blobs, Tiny, **SETTINGS).weights,
        )


@pytest.mark.parametrize(
    ("clients", "part", "m"),
    [(10, 0.1, 1), (30, 0.1, 3), (1000, 0.01, 10), (7, 0.5, 4), (3, 0.01, 1), (4, 1.0, 4)],
)
def test_number_of_participants(clients: int, part: float, m: int) -> None:
    assert participants(clients, part) == m


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            k, marks=[] if k in (FedAvg, SCAFFOLD, MOON) else pytest.mark.slow, id=k.title()
        )
        for k in ALL
    ],
)
def test_partial_participation(kind: type[Any], blobs: FederatedData, tmp_path: Path) -> None:
    method: Method = kind(rounds=4, epochs=1, participation=0.5)
    whole = run(method, blobs, Tiny, **SETTINGS)
    trained = [
        {row.target for row in whole.ledger if row.step == r and row.task == "train"}
        for r in range(4)
    ]
    assert all(len(names) == 2 for names in trained)
    assert len({frozenset(names) for names in trained}) > 1, "drawn again each round"
    assert whole.weights is not None
    assert whole.bytes == method.cost(4, Size.of(Network(Tiny())))
    for step in (1, 2, 3):  # private states of clients that were not there in the round before
        folder = tmp_path / str(step)
        run(method, blobs, Tiny, folder=folder, stop_after=step, **SETTINGS)
        assert same(run(method, blobs, Tiny, folder=folder, **SETTINGS).weights, whole.weights)


@every_method
def test_goes_on_without_those_who_do_not_answer(kind: type[Any], blobs: FederatedData) -> None:
    method: Method = kind(rounds=2, epochs=1)
    away = {(0, "client-1"), (1, "client-3")}
    result = run(
        method, blobs, Tiny, absent=lambda step, client: (step, client) in away, **SETTINGS
    )
    assert result.weights is not None
    assert result.weights.is_finite()
    assert {(row.step, row.source) for row in result.ledger if row.missing} == away
    with pytest.raises(ClientMissing):
        run(method, blobs, Tiny, absent=lambda step, client: True, **SETTINGS)


def test_weights_are_those_of_who_answered(blobs: FederatedData) -> None:
    rest = FederatedData(blobs.dataset, blobs.clients[1:])
    method = FedAvg(rounds=1, epochs=1)
    absent = run(method, blobs, Tiny, absent=lambda step, client: client == "client-0", **SETTINGS)
    assert same(absent.weights, run(method, rest, Tiny, **SETTINGS).weights)


def test_a_thousand_clients_of_which_ten_train() -> None:
    toys = [quadratic(1, 1) for _ in range(1000)]
    assert values(play(FedAvg(rounds=2, epochs=1, participation=0.01), toys)) == pytest.approx(
        [0.1, 0.19]
    )
    assert sum(len(toy.trainings) for toy in toys) == 20
    assert sum(toy.state is not None for toy in toys) == 0


def test_running_statistics_are_averaged_too(blobs: FederatedData) -> None:
    one = run(FedAvg(rounds=1, epochs=1, server_lr=0.5), blobs, Tiny, **SETTINGS).weights
    full = run(FedAvg(rounds=1, epochs=1), blobs, Tiny, **SETTINGS).weights
    assert one is not None
    assert full is not None
    assert torch.equal(one.buffers, full.buffers)
    assert not torch.equal(one.params, full.params)
    assert model(1.0).params.dtype == torch.float64
