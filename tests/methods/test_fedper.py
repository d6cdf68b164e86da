"""FedPer: exact numbers on a product, and reductions to plain averaging and to local training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Size, State
from ekiden.core.training.network import Network
from ekiden.core.training.weights import mean
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedPer, Local
from tests.methods.test_fedavg import SETTINGS, same
from tests.methods.toys import weights

START = State(model=None, personal=(weights(1.0, 0.5), weights(1.0, 0.5)))


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.05, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    }


class Headless(nn.Module):
    """All extractor."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = Tiny(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Bodiless(nn.Module):
    """All classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Tiny()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    """A network whose head does not learn."""
    module = Tiny()
    module.head.requires_grad_(False)
    return module


@pytest.mark.parametrize("network", [Headless, frozen])
def test_without_a_head_that_learns_it_is_federated_averaging(
    blobs: FederatedData, network: Callable[[], nn.Module]
) -> None:
    ours = run(FedPer(rounds=3, epochs=2), blobs, network, **SETTINGS)
    theirs = run(FedAvg(rounds=3, epochs=2), blobs, network, **SETTINGS)
    for m in ours.personal:
        assert same(m, theirs.weights)


def test_with_an_empty_head_a_round_is_the_mean_of_local_models(blobs: FederatedData) -> None:
    ours = run(FedPer(rounds=1, epochs=2), blobs, Headless, **settings())
    alone = run(Local(epochs=2), blobs, Headless, **settings())
    expected = mean(alone.personal, [len(c.train) for c in blobs.clients])
    for m in ours.personal:
        assert torch.equal(m.params, expected.params)
        assert torch.equal(m.buffers, expected.buffers)


def test_with_nothing_but_a_head_it_is_local_training(blobs: FederatedData) -> None:
    ours = run(FedPer(rounds=2, epochs=2), blobs, Bodiless, **settings())
    alone = run(Local(rounds=2, epochs=2), blobs, Bodiless, **settings())
    for a, b in zip(ours.personal, alone.personal, strict=True):
        assert torch.equal(a.params, b.params)
        assert torch.equal(a.buffers, b.buffers)
    assert ours.bytes == 2 * 12 * 8


def test_a_server_and_everybody_average_to_the_same_bits(blobs: FederatedData) -> None:
    peers, server = (
        run(FedPer(rounds=2, epochs=1, topology=t), blobs, Tiny, **settings())
        for t in ("complete", "server")
    )
    for a, b in zip(peers.personal, server.personal, strict=True):
        assert torch.equal(a.params, b.params)
    size = Size.of(Network(Tiny()))
    assert (
        server.bytes
        == FedPer(rounds=2, topology="server").cost(4, size)
        == 2 * 4 * (2 * (size - 4 * 27) + 8)
    )
    assert {row.target for row in peers.ledger} == {c.name for c in blobs.clients}


def test_heads_stay_different_and_extractors_equal(blobs: FederatedData) -> None:
    result = run(FedPer(rounds=2, epochs=1), blobs, Tiny, **settings())
    head = Network(Tiny()).head
    a, b = result.personal[:2]
    assert torch.equal((~head).of(a).params, (~head).of(b).params)
    assert not torch.equal(head.of(a).params, head.of(b).params)


def test_refuses_a_model_without_a_head_before_training(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="name that part `head`"):
        run(FedPer(), blobs, nn.Linear(4, 3), **settings())


def test_refuses_more_peers_than_there_are() -> None:
    with pytest.raises(UserError, match="at most 3"):
        FedPer(topology="peers:4").check("abcd")
