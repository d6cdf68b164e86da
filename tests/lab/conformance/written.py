"""A method that keeps the contract, and what changes it."""

from pathlib import Path

from ekiden.core.base import outside

GOOD = '''
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from ekiden.authoring import Client, Count, Fed, Method, Size, State, Traits, Weights, mean, on_client

memory = {}


@dataclass(frozen=True)
class Mine(Method):
    """Each client trains the model that it receives and hands it on."""

    epochs: Count = 20
    """E, epochs at each client"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < len(fed.clients):
            s = s.next(model=fed.call(self.train, fed.clients[s.step], s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        return client.fit(model, epochs=self.epochs)

    def steps(self, clients: int) -> int:
        return clients

    def cost(self, clients: int, model: Size) -> int:
        return (clients - 1) * model
'''


def written(folder: Path, changes: dict[str, str]) -> str:
    """The name of the method with these changes."""
    text = GOOD
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    name = f"{folder / 'mine.py'}:Mine"
    outside.trust(name)
    return name
