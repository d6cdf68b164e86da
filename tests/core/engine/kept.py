"""A method whose clients count in private, and runs of it that are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Method, State, Traits, on_client
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny


def model(value: float) -> Weights:
    return Weights(torch.full((3,), value), torch.empty(0), torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Counting(Method):
    """Rounds over all clients; each client counts in private how often it was asked."""

    epochs: int = 1
    rounds: int = 2

    traits = Traits(private=int)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.steps(len(fed.clients)):
            s = s.next(model=fed.call(self.train, fed.clients[s.step % len(fed.clients)], s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        client.state = (client.state or 0) + 1
        trained = client.fit(model, epochs=self.epochs)
        return trained.with_params(trained.params + client.state)

    def steps(self, clients: int) -> int:
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        return (self.rounds * clients - 1) * model


def go(method: Method, data: FederatedData, folder: Path | None, **kwargs: Any) -> Any:
    training, hardware = Training(lr=0.01, batch_size=16), Hardware(threads=1)
    return run(method, data, Tiny, training=training, hardware=hardware, folder=folder, **kwargs)


def outcome(folder: Path) -> list[bytes]:
    return [
        (folder / name).read_bytes()
        for name in ("metrics.jsonl", "ledger.jsonl", "model.safetensors")
    ]


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
