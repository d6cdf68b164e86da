"""SPFL: sequential updates with parallel aggregation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ekiden.core.federation import Fed
from ekiden.core.method import Method, Model, Ref, State, on_client
from ekiden.core.worker import Client
from ekiden.errors import UserError
from ekiden.learning.glam import GLAM
from ekiden.learning.training import require
from ekiden.learning.weights import Weights, mean
from ekiden.methods._rounds import at_server, local_training, participants, require_rounds, sample

Order = Literal["latin", "random", "fixed"]


@dataclass(frozen=True)
class Chains(State):
    """The state with the round under way.

    Attributes:
        sequences: the clients of each chain, in order.
        ends: the model at the end of each chain so far; none before the first hop.
    """

    sequences: tuple[tuple[str, ...], ...] = ()
    ends: tuple[Model, ...] = ()


@dataclass(frozen=True)
class SPFL(Method):
    """Several chains of clients side by side, each a pass of sequential learning; the server averages their ends.

    SPFL: Sequential updates with Parallel aggregation for Enhanced Federated Learning under Category and Domain Shifts.
    NeurIPS 2025. https://openreview.net/forum?id=IHZngJNasX (with its loss GLAM).

    Departures from the paper: it does not say how chains are ordered; by default a random order is drawn each round
    and chain j starts at its j-th client, so that at every position each client trains one model. Its minus before the
    alignment with the previous model is taken as a slip; that model is the one received. The host is FedAvg.
    """

    rounds: int = 15
    """R, rounds"""
    epochs: int = 5
    """E, epochs at each visit: K steps"""
    chains: int = 0
    """S, chains a round; 0: as many as clients take part"""
    length: int = 0
    """L, clients in a chain; 0: all that take part"""
    order: Order = "latin"
    """order of the chains: latin (shifts of an order drawn each round), fixed (shifts of the given order), random (each
    chain its own, of all clients)"""
    tau: float = 1.0
    """τ, weight of GLAM's alignment with the received model"""
    rho: float = 1.0
    """ρ, weight of GLAM's alignment with the global model; without τ and ρ there is no GLAM"""
    participation: float = 1.0
    """c, part of the clients drawn for each round, at least one"""
    lr_decay: float = 1.0
    """factor on the local learning rate, once a round"""

    private: ClassVar[Any] = Weights  # the global model of the round

    def __post_init__(self) -> None:
        require_rounds(self.rounds, self.epochs, self.participation, self.lr_decay)
        for name in ("chains", "length", "tau", "rho"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        if self.order == "random" and self.length:
            raise UserError("--order random makes chains of all clients: leave --length 0, or use --order latin")

    def check(self, clients: Sequence[str]) -> None:
        """No more chains and no longer ones than clients take part."""
        m = participants(len(clients), self.participation)
        for name in ("chains", "length"):
            require(getattr(self, name) <= m, name, getattr(self, name), f"at most {m}, the clients of a round")

    def start(self) -> Chains:
        """No round under way."""
        return Chains()

    def run(self, fed: Fed, s: Chains) -> Iterator[State]:
        """One hop of all chains a step; after the last of a round the server averages."""
        _, length = self.shape(len(fed.clients))
        while s.step < self.steps(len(fed.clients)):
            round, position = divmod(s.step, length)
            model = at_server(fed, s.model)
            if position == 0:
                s = replace(s, sequences=self.sequences(fed), ends=(model,) * self.shape(len(fed.clients))[0])
            seen = {client for sequence in s.sequences for client in sequence[:position]}
            ends: list[Ref[Weights]] = []
            for sequence, end in zip(s.sequences, s.ends, strict=True):
                client = sequence[position]
                reference = model if (self.tau or self.rho) and client not in seen else None
                ends.append(fed.call(self.train, client, end, reference, round))
                seen.add(client)
            if position == length - 1:
                s = s.next(model=mean(fed.get(ends, at_least=1)), ends=())
            else:
                s = s.next(ends=tuple(ends))
            yield s

    @on_client
    def train(self, client: Client, model: Weights, reference: Weights | None, round: int) -> Weights:
        """A visit. The global model comes with the first of a round; the client keeps it for the others."""
        training = local_training(client, self.lr_decay, round)
        if not (self.tau or self.rho):
            return client.fit(model, epochs=self.epochs, training=training)
        if reference is not None:
            client.state = reference
        glam = GLAM(client.network(client.state), client.network(model), self.tau, self.rho)
        return client.fit(model, epochs=self.epochs, training=training, objective=glam, extra_passes=2)

    def sequences(self, fed: Fed) -> tuple[tuple[str, ...], ...]:
        """The chains of this round."""
        chosen, generator = sample(fed, self.participation), fed.generator("order")
        chains, length = self.shape(len(fed.clients))

        def shuffled() -> tuple[str, ...]:
            return tuple(chosen[i] for i in torch.randperm(len(chosen), generator=generator).tolist())

        if self.order == "random":
            return tuple(shuffled() for _ in range(chains))
        order = (chosen if self.order == "fixed" else shuffled()) * 2
        return tuple(order[j : j + length] for j in range(chains))

    def shape(self, clients: int) -> tuple[int, int]:
        """S and L for so many clients."""
        m = participants(clients, self.participation)
        return self.chains or m, self.length or m

    def steps(self, clients: int) -> int:
        """R·L hops."""
        return self.rounds * self.shape(clients)[1]

    def cost(self, clients: int, model: int) -> int:
        """R·S(L + 1)·M, and with GLAM the global model once a round to each client visited: R·N(N + 2)·M in full."""
        m, (chains, length) = participants(clients, self.participation), self.shape(clients)
        visited = min(m, chains + length - 1) if self.tau or self.rho else 0
        return self.rounds * (chains * (length + 1) + visited) * model
