"""What a client of a task has: what it remembers, and what can be learned about the network."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.data.augment import Augment
from ekiden.core.engine import client as client_module
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import INITIAL, Method, State, on_client
from ekiden.core.engine.transport import Transport
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, FedSeq


def client_of(made: Worker, name: str, data: FederatedData) -> Client:
    held = {c.name: c for c in data.clients}[name]
    return Client(made.bench("here"), held, None, 0, "key", remembered=made._remembered)


def counting(calls: list[int]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        calls.append(1)
        return torch.arange(4)

    return make


def test_made_once_for_each_client_and_name(blobs: FederatedData) -> None:
    made = Worker(
        Setup(FedSeq(), Tiny, blobs.dataset, hardware=Hardware(threads=1)),
        {c.name: c for c in blobs.clients},
    )
    calls: list[int] = []
    names = [c.name for c in blobs.clients[:2]]
    for _ in range(3):
        for name in names:
            for what in ("a", "b"):
                assert torch.equal(
                    client_of(made, name, blobs).remember(what, counting(calls)), torch.arange(4)
                )
    assert len(calls) == 4


def test_what_does_not_fit_is_made_each_time(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REMEMBERED", 40)  # one of 32 bytes
    made = Worker(
        Setup(FedSeq(), Tiny, blobs.dataset, hardware=Hardware(threads=1)),
        {c.name: c for c in blobs.clients},
    )
    calls: list[int] = []
    client = client_of(made, blobs.clients[0].name, blobs)
    for _ in range(2):
        for what in ("a", "b"):
            client.remember(what, counting(calls))
    assert len(calls) == 3
    assert len(made._remembered) == 1


def fed(data: FederatedData, setup: bool = True, training: Training | None = None) -> Fed:
    agreed = Setup(Average(), Tiny, data.dataset, training or Training()) if setup else None
    return Fed(["a"], cast(Transport, None), 0, lambda row: None, agreed)


def test_the_server_knows_the_network(blobs: FederatedData) -> None:
    server, model = fed(blobs), Network(Tiny()).weights()
    assert server.layout == Network(Tiny()).layout
    assert server.shape == (4,)
    network = server.network(model)
    assert not network.training
    assert torch.equal(network.state_dict()["head.bias"], server.layout.params[-1].of(model.params))


def test_the_server_feeds_samples_of_its_own_as_clients_do(blobs: FederatedData) -> None:
    images = torch.rand(5, 1, 6, 6, requires_grad=True)
    dataset = replace(blobs.dataset, mean=(0.5,), std=(0.25,), augment=Augment(crop=1, flip=True))
    server = fed(replace(blobs, dataset=dataset))
    fed_twice = [server.feed(images, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*fed_twice)
    assert float(fed_twice[0].detach().min()) == -2.0  # the black frame
    fed_twice[0].sum().backward()  # type: ignore[no-untyped-call]
    assert images.grad is not None
    assert float(images.grad.max()) == 4.0


def test_the_servers_samples_follow_the_training_settings(blobs: FederatedData) -> None:
    """As for a client: what the run asks for overrides what the data set has."""
    images = torch.rand(5, 1, 6, 6)
    augmented = replace(blobs.dataset, mean=(0.1,), std=(0.2,), augment=Augment(crop=1, flip=True))
    server = fed(
        replace(blobs, dataset=augmented),
        training=Training(mean=(0.5,), std=(0.25,), augment=False),
    )
    assert torch.equal(server.feed(images, torch.Generator()), (images - 0.5) / 0.25)


def test_a_federation_without_a_setup_says_so(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="network is not known"):
        _ = fed(blobs, setup=False).layout


class Seen(NamedTuple):
    counts: Tensor
    labels: Tensor
    inputs: Tensor
    sizes: list[int]
    fresh: Weights
    again: Weights


@dataclass(frozen=True)
class Probe(Method):
    """Reports what a client has."""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        seen = fed.get([fed.call(self.look, k, INITIAL) for k in fed.clients])
        for k, part in zip(fed.clients, seen, strict=True):
            assert part.counts.tolist() == torch.bincount(part.labels, minlength=3).tolist(), k
            assert max(part.sizes) <= 128
            assert torch.equal(part.fresh.params, part.again.params)
        assert not torch.equal(seen[0].fresh.params, seen[1].fresh.params)
        assert not torch.equal(seen[0].fresh.params, fed.get(INITIAL).params)
        yield s.next()

    @on_client
    def look(self, client: Client, model: Weights) -> Seen:
        assert client.layout.classes == 3
        batches = list(client.batches())
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        assert sorted(map(tuple, x.tolist())) == sorted(map(tuple, client.data.train.x.tolist()))
        assert not torch.equal(x, client.data.train.x)
        return Seen(
            client.class_counts(),
            y,
            x,
            [len(y) for _, y in batches],
            client.fresh(),
            client.fresh(),
        )

    def steps(self, clients: int) -> int:
        return 1

    def cost(self, clients: int, model: int) -> int:
        return 0


def test_what_a_client_has(blobs: FederatedData) -> None:
    settings: dict[str, Any] = {"hardware": Hardware(threads=1)}
    result = run(Probe(), blobs, Tiny, **settings)
    assert result.metrics[-1]["forward"] == sum(len(c.train) for c in blobs.clients)
