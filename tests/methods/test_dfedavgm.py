"""DFedAvgM: exact numbers on quadratics, and what gossip does to any models."""

from math import cos, pi
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import State
from ekiden.core.training.weights import Weights, mean
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DFedAvgM, Local
from ekiden.methods.gossip import topology
from tests.methods.toys import Table, rounds, two_quadratics, weights


def zeros(n: int) -> State:
    return State(model=None, personal=(weights(0.0),) * n)


def mixed(models: list[Weights], matrix: Tensor) -> list[Weights]:
    """One exchange."""
    return cast(list[Weights], list(DFedAvgM().exchanged(cast(Fed, Table(models)), models, matrix)))


def mixed_numbers(values: list[float], matrix: Tensor) -> list[float]:
    return [float(m.params) for m in mixed([weights(v) for v in values], matrix)]


def test_without_momentum_it_is_federated_averaging() -> None:
    (one,) = rounds(DFedAvgM(epochs=2, theta=0.0), two_quadratics(), zeros(2))
    assert [w for (w,) in one] == pytest.approx([-0.085] * 2)


def test_learning_rate_decays_by_rounds() -> None:
    client = cast(Client, two_quadratics()[0])
    assert float(
        DFedAvgM(epochs=1, lr_decay=0.5).train(client, weights(0.0), 2).params
    ) == pytest.approx(0.025)


def test_unequal_weights_conserve_the_mean() -> None:
    matrix = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    assert mixed_numbers([0.386, -0.698], matrix) == pytest.approx([0.115, -0.427])


@pytest.mark.parametrize(
    "graph", ["ring", "torus", "star", "exponential", "erdos_renyi:0.4:3", "matching", "one_peer"]
)
def test_one_exchange_conserves_the_mean(graph: str) -> None:
    generator = torch.Generator().manual_seed(3)
    models = [weights(*torch.randn(5, generator=generator).tolist()) for _ in range(12)]
    after = mixed(models, topology.mixing(graph, 12, 0, generator))
    torch.testing.assert_close(mean(after).params, mean(models).params)
    assert not torch.allclose(after[0].params, models[0].params)


def test_complete_graph_gives_everyone_the_same_uniform_mean() -> None:
    generator = torch.Generator().manual_seed(3)
    models = [weights(*torch.randn(5, generator=generator).tolist()) for _ in range(7)]
    after = mixed(models, topology.mixing("complete", 7))
    assert all(torch.equal(m.params, after[0].params) for m in after)
    torch.testing.assert_close(after[0].params, torch.stack([m.params for m in models]).mean(0))


def test_ring_of_eight_agrees_at_the_rate_of_its_spectral_gap() -> None:
    matrix = topology.mixing("ring", 8)
    rate = topology.contraction("ring", 8, 1) ** 2
    assert rate == pytest.approx(0.804738**2, abs=1e-6)
    values = [cos(2 * pi * i / 8) for i in range(8)]  # the slowest mode
    for _ in range(5):
        after = mixed_numbers(values, matrix)
        assert sum(v * v for v in after) == pytest.approx(
            rate * sum(v * v for v in values), rel=1e-5
        )
        values = after


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "training": Training(lr=0.05, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    } | changes


def test_one_round_with_all_is_the_mean_of_local_models(blobs: FederatedData) -> None:
    ours = run(DFedAvgM(epochs=2, heavy_ball=False), blobs, Tiny, **settings())
    alone = run(Local(epochs=2), blobs, Tiny, **settings())
    expected = mean(alone.personal)
    for m in ours.personal:
        torch.testing.assert_close(m.params, expected.params)
        torch.testing.assert_close(m.buffers, expected.buffers)
    assert ours.metrics[-1]["consensus"] == 0
    assert alone.metrics[-1]["consensus"] > 0.01


def test_models_travel_along_the_edges_only_and_never_to_the_server(blobs: FederatedData) -> None:
    result = run(DFedAvgM(rounds=2, epochs=1, topology="ring"), blobs, Tiny, **settings())
    names = [c.name for c in blobs.clients]
    ring = {(names[i], names[(i + d) % 4]) for i in range(4) for d in (1, 3)}
    for step in (0, 1):
        assert {(row.source, row.target) for row in result.ledger if row.step == step} == ring
    assert len(result.ledger) == 16
    assert result.metrics[-1]["consensus"] > 0


@pytest.mark.parametrize(
    "graph", ["star", "exponential", "peers:2", "matching", "one_peer", "erdos_renyi:0.6:1"]
)
def test_declared_cost_on_every_graph(blobs: FederatedData, graph: str) -> None:
    method = DFedAvgM(rounds=2, epochs=1, topology=graph)
    result = run(method, blobs, Tiny, **settings())
    assert result.bytes == method.cost(4, result.ledger[0].bytes)
    assert result.bytes > 0


@pytest.mark.parametrize(
    ("graph", "message"), [("peers:4", "at most 3"), ("erdos_renyi:0", "groups")]
)
def test_refuses_a_graph_that_does_not_fit_before_training(
    blobs: FederatedData, graph: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(DFedAvgM(topology=graph), blobs, Tiny, **settings())


def test_a_client_that_does_not_answer_stops_the_round_by_name(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="client-2 did not answer"):
        run(
            DFedAvgM(rounds=2, epochs=1),
            blobs,
            Tiny,
            absent=lambda step, c: (step, c) == (1, "client-2"),
            **settings(),
        )
