"""What a method of parallel rounds defines once, for its own rounds and for the chains of SPFL.

This is how a client trains (`penalty`, `objective`), what it remembers (`learned`, `close`), what the server sends with
the model (`opening`) and how it combines the results (`merge`). In the method's own rounds a client is visited once; in
chains, several times. Its memory stays fixed during a round and changes once at the end, by the mean over the visits: a
correction that is applied at every visit would count several times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.base.settings import Training
from ekiden.engine.method import Method, Traits
from ekiden.engine.worker import Client
from ekiden.methods.blocks.rounds import last_iterate
from ekiden.training.objective import Objective, Penalty
from ekiden.training.weights import Weights, mean

Anchor = Literal["received", "global"]
"""The model that a proximal term stays near: the one that a visit starts from, or the round's global model."""
Vectors = tuple[Weights, ...]
"""Vectors in the shape of a model."""


class Exchange(NamedTuple):
    """What travels in a round, and what stays at a client, in addition to models.

    Attributes:
        sent: vectors that go with w^r.
        changes: vectors that a client sends at the end of a round.
        numbers: numbers that a client sends at the end of a round.
        keeps: whether a client keeps something between rounds.
        counts: whether clients are asked once for their number of samples.
    """

    sent: int = 0
    changes: int = 0
    numbers: int = 0
    keeps: bool = False
    counts: bool = False

    @property
    def closes(self) -> bool:
        """Return whether every client visited gets a message at the end of a round."""
        return bool(self.keeps or self.changes or self.numbers)


class Closing(NamedTuple):
    """What a client sends at the end of a round: changes of its memory, and numbers."""

    changes: Vectors = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class ClientRound:
    """What is available to a client in a round.

    Attributes:
        client: the client.
        training: how to train in this round.
        epochs: E, epochs of a visit.
        start: w^r, if it is needed.
        sent: vectors that came with it.
        memory: what the client kept from earlier rounds.
        size: mean number of samples of a client, if it is needed.
        anchor: the model that a proximal term stays near, if the method leaves it open.
    """

    client: Client
    training: Training
    epochs: int
    start: Weights | None
    sent: Vectors = ()
    memory: Vectors = ()
    size: float = 0.0
    anchor: Anchor = "global"

    @property
    def origin(self) -> Weights:
        """Return w^r."""
        assert self.start is not None
        return self.start

    def kept(self, number: int) -> Tensor | float:
        """Return a vector of the memory, 0 before the first round."""
        return self.memory[number].params if self.memory else 0.0

    def anchored(self, received: Weights) -> Tensor:
        """Return the anchor at a visit that starts from `received`."""
        return (self.origin if self.anchor == "global" else received).params


@dataclass(frozen=True)
class ServerRound:
    """What is available to the server at the end of a round.

    Attributes:
        start: w^r.
        ends: the model at the end of each chain that came back.
        chains: the clients of each of these chains; one client each in a method's own rounds.
        closings: what these clients sent, of those that answered.
        clients: N, number of clients.
        memory: the server's own vectors; none before the first round.
        weights: weights of the chains in the average; uniform by default.
    """

    start: Weights
    ends: Sequence[Weights]
    chains: Sequence[Sequence[str]]
    closings: Mapping[str, Closing]
    clients: int
    memory: tuple[Tensor, ...] = ()
    weights: Sequence[float] | None = None

    def kept(self, number: int) -> Tensor:
        """Return a vector of the memory, 0 before the first round."""
        return self.memory[number] if self.memory else torch.zeros_like(self.start.params)

    @property
    def answered(self) -> float:
        """Return the share of all clients that closed the round."""
        return len(self.closings) / self.clients

    @property
    def middle(self) -> Weights:
        """Return the mean of the ends."""
        return mean(self.ends, self.weights)


class After(NamedTuple):
    """The result of a round at the server: the model, what the next round starts from, and the server's memory."""

    model: Weights
    start: Weights
    memory: tuple[Tensor, ...] = ()


class ParallelMethod(Method):
    """A method whose clients train side by side from one model; by default as FedAvg, with equal weights."""

    rounds: int
    traits = Traits(skips=True)  # a round has fewer replies

    exchange: ClassVar[Exchange] = Exchange()
    """What a round needs in addition to models."""

    host_settings: ClassVar[tuple[str, ...]] = ()
    """Fields that also have a meaning in SPFL's chains."""

    host_anchor: ClassVar[Anchor | None] = None
    """The default anchor in SPFL's chains, for hosts that have a choice. Without chains, received and global model are
    the same."""

    selection = last_iterate

    def steps(self, clients: int) -> int:
        """Return the number of rounds."""
        return self.rounds

    def needs_start(self, anchor: Anchor) -> bool:
        """Return whether the local loss refers to w^r."""
        return False

    def penalty(self, at: ClientRound, model: Weights) -> Penalty | None:
        """Return what is added to the objective in closed form, at a visit that starts from `model`."""
        return None

    def objective(self, at: ClientRound, base: Objective) -> Objective:
        """Return the local loss around `base`."""
        return base

    def learned(self, at: ClientRound, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return what a visit contributes to the memory; `close` gets the mean over a round's visits."""
        return ()

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Return the memory after a round, given the mean of `learned` over its visits, and what the server gets."""
        return (), Closing()

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """Return what the server sends with w^r."""
        return ()

    def merge(self, r: ServerRound) -> After:
        """Compute the server's step."""
        return After(r.middle, r.middle)


def visit(
    method: ParallelMethod, at: ClientRound, model: Weights, base: Objective | None = None
) -> tuple[Weights, Vectors]:
    """Train from `model` as the method says.

    Args:
        method: says how.
        at: what the client has in this round.
        model: where training starts.
        base: the loss that the method's own is built around; None: that of the task.

    Returns:
        The trained model, and what the visit gives for the client's memory.
    """
    penalty = method.penalty(at, model)
    objective = method.objective(at, base or at.client.loss)
    trained = at.client.fit(model, epochs=at.epochs, penalty=penalty, objective=objective, training=at.training)
    return trained, method.learned(at, model, trained, penalty)


def displacement(model: Weights, trained: Weights) -> Weights:
    """w_out - w_in of a visit."""
    return trained.with_params(trained.params - model.params)


def mean_along(values: Mapping[str, float], chain: Sequence[str]) -> float:
    """Mean over a chain's clients that closed the round; 0 for none.

    It also represents clients that trained but dropped out before the round ended.
    """
    known = [values[client] for client in chain if client in values]
    return sum(known) / len(known) if known else 0.0
