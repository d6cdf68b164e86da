"""A method that uses all that a transport must carry: private state, gossip, own payload types,
server rounds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Method, State, Traits, on_client
from ekiden.core.engine.wire import Ref
from ekiden.core.training.weights import Weights, mean


class Report(NamedTuple):
    """A payload of several parts."""

    model: Weights
    counts: Tensor
    named: dict[str, list[float]]


@dataclass(frozen=True)
class Memory:
    """What a client keeps."""

    visits: int
    model: Weights


@dataclass(frozen=True)
class Kept(State):
    """The server keeps the clients' last reports where they are."""

    reports: tuple[Ref[Report], ...] = ()


@dataclass(frozen=True)
class Toy(Method):
    """Rounds with private state, and gossip between neighbours."""

    rounds: int = 2
    epochs: int = 1

    traits = Traits(private=Memory)

    def start(self) -> Kept:
        return Kept()

    def run(self, fed: Fed, s: Kept) -> Iterator[Kept]:
        while s.step < self.rounds:
            before = s.reports
            reports = tuple(
                fed.call(
                    self.train,
                    name,
                    s.model,
                    [before[i - 1]] if before else [],
                    torch.tensor([float(i)]),
                )
                for i, name in enumerate(fed.clients)
            )
            again = [
                fed.call(self.look, name, report)
                for name, report in zip(fed.clients, reports, strict=True)
            ]
            models = fed.get(again)
            s = s.next(model=mean(models), reports=reports)
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, others: list[Report], shift: Tensor) -> Report:
        memory = client.state or Memory(0, model)
        start = mean([model, memory.model, *(o.model for o in others)])
        trained = client.fit(start, epochs=self.epochs)
        client.state = Memory(memory.visits + 1, trained)
        moved = trained.with_params(trained.params + shift * 1e-3)
        return Report(
            moved,
            client.data.train.class_counts(client.classes),
            {client.name: [float(memory.visits)]},
        )

    @on_client(gives="model")
    def look(self, client: Client, report: Report) -> Weights:
        client.state = Memory(client.state.visits * 10, client.state.model)
        return report.model.with_params(report.model.params * (1 + client.state.visits / 1000))

    def steps(self, clients: int) -> int:
        return self.rounds

    def cost(self, clients: int, model: int) -> int:
        return 0
