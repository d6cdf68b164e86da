"""FedELMY in parallel: the mean of pools' means, and its reductions."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.client import Client
from ekiden.core.training.weights import mean
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, FedELMY, FedELMYParallel, Local
from ekiden.methods.blocks.combining import Init
from tests.methods.toys import Quadratic, weights


@pytest.mark.parametrize(
    ("models", "means", "result"), [(1, (2.0, 4.0), 3.0), (5, (10 / 3, 20 / 3), 5.0)]
)
def test_mean_of_the_pools_means(models: int, means: tuple[float, float], result: float) -> None:
    method = FedELMYParallel(models=models, warmup=0, alpha=0, beta=0, epochs=1)
    pools = [method.extend_pool(cast(Client, Quadratic([c])), weights(0.0)) for c in (4.0, 8.0)]
    assert [float(p.params) for p in pools] == pytest.approx(means)
    assert float(method.average(cast(Client, None), (pools[0], pools[1])).params) == pytest.approx(
        result
    )


def test_every_client_warms_up() -> None:
    method = FedELMYParallel(models=2, warmup=7, epochs=3)
    for client in (Quadratic([1.0], lr=0.1), Quadratic([2.0], lr=0.1)):
        method.extend_pool(cast(Client, client), method.warm_up(cast(Client, client), weights(0.0)))
        assert client.fits == [7, 3, 3]
        assert client.penalties[0] is None


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    }


def linear() -> nn.Module:
    """A network without dropout and statistics."""
    return nn.Sequential(nn.Linear(4, 3))


SMALL = {"models": 2, "epochs": 2, "warmup": 1}


def test_one_client_is_fedelmy(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    methods = FedELMYParallel(**SMALL, init="same"), FedELMY(**SMALL)  # type: ignore[arg-type]
    ours, chain = (run(method, alone, Tiny, **settings()) for method in methods)
    assert ours.weights is not None
    assert chain.weights is not None
    assert torch.equal(ours.weights.params, chain.weights.params)
    assert ours.bytes == 0


def test_clients_start_from_models_of_their_own(blobs: FederatedData) -> None:
    training = Training(lr=0.01, batch_size=1000)  # one batch: its order is nothing but rounding
    plain = {"models": 1, "alpha": 0, "beta": 0, "average_start": False}
    ours, average = (
        run(method, blobs, linear, **(settings() | {"training": training}))
        for method in (
            FedELMYParallel(epochs=3, warmup=0, **plain),  # type: ignore[arg-type]
            Average(epochs=3, init="different"),
        )
    )
    assert ours.weights is not None
    assert average.weights is not None
    torch.testing.assert_close(ours.weights.params, average.weights.params)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("init", ["same", "different"])
def test_the_pool_begins_with_the_start(blobs: FederatedData, init: Init, warmup: int) -> None:
    still = settings() | {"training": Training(lr=1e-30, batch_size=16)}
    ours = run(
        FedELMYParallel(models=3, epochs=1, warmup=warmup, init=init), blobs, linear, **still
    )
    starts = run(Average(epochs=1, init=init), blobs, linear, **still)
    assert ours.weights is not None
    assert starts.weights is not None
    torch.testing.assert_close(ours.weights.params, starts.weights.params)


def test_one_plain_model_each_is_the_mean_of_local_training(blobs: FederatedData) -> None:
    method = FedELMYParallel(
        models=1, epochs=2, warmup=0, alpha=0, beta=0, average_start=False, init="same"
    )
    ours, alone = (
        run(method, blobs, Tiny, **settings()),
        run(Local(epochs=2), blobs, Tiny, **settings()),
    )
    assert ours.weights is not None
    torch.testing.assert_close(ours.weights.params, mean(alone.personal).params)


def test_all_end_with_one_model_that_a_server_would_give_too(blobs: FederatedData) -> None:
    peers, server = (
        run(FedELMYParallel(**SMALL, server=s), blobs, Tiny, **settings())  # type: ignore[arg-type]
        for s in (False, True)
    )
    assert peers.weights is not None
    assert server.weights is not None
    assert all(
        torch.equal(m.params, server.weights.params) for m in (peers.weights, *peers.personal)
    )
    assert (len(peers.ledger), len(server.ledger)) == (12, 4)
    assert peers.bytes == 3 * server.bytes
    names = {c.name for c in blobs.clients}
    assert {row.target for row in peers.ledger} == names
    assert {row.target for row in server.ledger} == {"server"}


def test_messages() -> None:
    assert FedELMYParallel().cost(10, 1) == 90
    assert FedELMYParallel(server=True).cost(10, 1) == 10
