"""What SPFL asks of a parallel method that it plugs into; `_hosts` has the eight.

Control variates, drifts and memories are frozen while a round lasts. What its visits give is averaged at the client,
and takes effect once, when the round is closed: applied at every visit, a correction would count several times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ekiden.base.checks import Checked
from ekiden.base.settings import Training
from ekiden.data.tasks import Need
from ekiden.engine.worker import Client
from ekiden.training.fit import Objective, Penalty
from ekiden.training.weights import Weights, mean

Vectors = tuple[Weights, ...]
"""Vectors in the shape of a model."""


class Closing(NamedTuple):
    """What a client sends at the end of a round: changes of its memory, and numbers."""

    changes: Vectors = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Local:
    """What a client has at hand in a round.

    Attributes:
        client: itself.
        training: how to train in this round.
        epochs: E of a local.
        start: w^r, where the host or GLAM needs it.
        sent: what the host's server sent with it.
        memory: what the client kept of the rounds before.
        size: mean number of samples of a client, where the host needs it.
    """

    client: Client
    training: Training
    epochs: int
    start: Weights | None
    sent: Vectors
    memory: Vectors
    size: float

    @property
    def origin(self) -> Weights:
        """w^r."""
        assert self.start is not None
        return self.start

    def kept(self, number: int) -> Tensor | float:
        """A vector of the memory, 0 before the first round."""
        return self.memory[number].params if self.memory else 0.0


@dataclass(frozen=True)
class Round:
    """What the server has at the end of a round.

    Attributes:
        start: w^r.
        ends: the model at the end of each chain that came back.
        chains: the clients of each of these.
        closings: what they sent, those who answered.
        clients: N.
        memory: the server's own vectors; none before the first round.
    """

    start: Weights
    ends: Sequence[Weights]
    chains: Sequence[Sequence[str]]
    closings: Mapping[str, Closing]
    clients: int
    memory: tuple[Tensor, ...]

    def kept(self, number: int) -> Tensor:
        """A vector of the memory, 0 before the first round."""
        return self.memory[number] if self.memory else torch.zeros_like(self.start.params)

    @property
    def answered(self) -> float:
        """Part of all clients that closed the round."""
        return len(self.closings) / self.clients

    @property
    def middle(self) -> Weights:
        """Mean of the ends: every full chain has seen all samples."""
        return mean(self.ends)


class After(NamedTuple):
    """What the server makes of a round: the model, what the next round starts from, and its memory."""

    model: Weights
    start: Weights
    memory: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Host(Checked):
    """A parallel method as SPFL needs it; by default FedAvg."""

    _flag: ClassVar[str] = "--host {}"
    counts: ClassVar[bool] = False  # clients are asked for their number of samples
    keeps: ClassVar[bool] = False  # something stays at clients from round to round
    sent: ClassVar[int] = 0  # vectors that go with w^r
    changes: ClassVar[int] = 0  # vectors that a client sends when a round is closed
    numbers: ClassVar[int] = 0  # numbers likewise

    @property
    def needs(self) -> frozenset[Need]:
        """See `Method.needs`."""
        return frozenset()

    def penalty(self, local: Local, model: Weights) -> Penalty | None:
        """What the local loss has in addition to that of the labels, in closed form, from `model` on."""
        return None

    def objective(self, local: Local, base: Objective) -> Objective:
        """The local loss around `base`."""
        return base

    def learned(self, local: Local, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """What a visit gives for the memory; the mean of a round's visits goes to `close`."""
        return ()

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """The memory after a round in which `learned` was the mean of the visits, and what the server is told."""
        return (), Closing()

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """What the server sends with w^r."""
        return ()

    def merge(self, r: Round) -> After:
        """The server's step."""
        return After(r.middle, r.middle)

    @property
    def needs_start(self) -> bool:
        """Whether the local loss refers to w^r."""
        return False

    @property
    def closes(self) -> bool:
        """Whether a round ends with a word to every client visited."""
        return bool(self.keeps or self.changes or self.numbers)
