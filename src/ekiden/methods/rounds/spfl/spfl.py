"""SPFL: sequential updates with parallel aggregation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Count,
    CountOrZero,
    Fed,
    Fraction,
    Method,
    Model,
    NonNegative,
    Objective,
    Ref,
    Size,
    State,
    Traits,
    UserError,
    Weights,
    mean,
    on_client,
    require,
)
from ekiden.data.tasks import Need
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.glam import alignment
from ekiden.methods.rounds.spfl.host import ClientRound, Closing, Host, ServerRound, Vectors, host_named

Order = Literal["latin", "random", "fixed"]


@dataclass(frozen=True)
class Chains(State):
    """The state within a round."""

    cloud: Model = INITIAL  # the model with which the round started, w^r
    sequences: tuple[tuple[str, ...], ...] = ()  # the clients of each chain, in order
    ends: tuple[Model, ...] = ()  # the last model of each chain so far; empty before the first hop
    memory: tuple[Tensor, ...] = ()  # vectors of the host's server
    # numbers of samples of the clients that have taken part so far, if the host needs them
    sizes: dict[str, int] = field(default_factory=dict)


class Opening(NamedTuple):
    """What the first visit of a round receives: w^r if it is needed, and what the host's server sends."""

    start: Weights | None
    sent: Vectors


class KeptInChains(NamedTuple):
    """What a client keeps."""

    opening: Opening = Opening(None, ())  # of this round
    memory: Vectors = ()  # the host's, from the rounds before
    learned: Vectors = ()  # mean of what this round's visits gave so far
    visits: int = 0  # number of these visits
    own: Weights | None = None  # the model of its last visit, if GLAM aligns with it
    earlier: Weights | None = None  # the same from the previous round


@dataclass(frozen=True)
class SPFL(Method):
    """Several chains of clients side by side, each a pass of sequential learning; the server averages their ends.

    SPFL: Sequential updates with Parallel aggregation for Enhanced Federated Learning under Category and Domain Shifts.
    NeurIPS 2025. https://openreview.net/forum?id=IHZngJNasX (with its loss GLAM).

    Departures from the paper: it does not say how chains are ordered. By default a random order is drawn each round and
    chain j starts at its j-th client, so that at every position each client trains one model. The minus sign before the
    alignment with the previous model is taken as a misprint. The paper does not say either how hosts with a memory are
    plugged in. Here control variates, drifts and memories stay fixed during a round and change once, by the mean over
    its visits. If a client is missing inside a chain, the run stops and can be resumed; the chain does not skip the
    client.
    """

    host: str = "fedavg"
    """host, the parallel method plugged in: fedavg, fedprox, scaffold, fednova, feddyn, feddc, moon or feddisco; its
    settings follow a colon, as in fedprox:mu=0.1 or moon:mu=5,temperature=0.5 (all are in docs/methods/spfl.md)"""
    rounds: Count = 15
    """R, rounds"""
    epochs: Count = 5
    """E, epochs at each visit: K steps"""
    chains: CountOrZero = 0
    """S, chains per round; 0: one for each client that takes part"""
    length: CountOrZero = 0
    """L, clients in a chain; 0: all that take part"""
    chain_order: Order = "latin"
    """order of the chains: latin (shifts of an order drawn each round), fixed (shifts of the given order), random (each
    chain its own, of all clients)"""
    align_previous: NonNegative = 1.0
    """τ, weight of GLAM's alignment with the previous model"""
    align_global: NonNegative = 1.0
    """ρ, weight of GLAM's alignment with the global model; with τ = ρ = 0 there is no GLAM"""
    previous: Literal["received", "own"] = "received"
    """w_p, GLAM's previous model: the one received from the chain, or the client's own model of the previous round"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""

    traits = Traits(private=KeptInChains)

    selection = shared.last_iterate

    def __post_init__(self) -> None:
        if self.chain_order == "random" and self.length:
            raise UserError(
                "--chain-order=random makes chains of all clients: leave --length=0, or use --chain-order=latin"
            )
        host_named(self.host)

    @property
    def needs(self) -> frozenset[Need]:
        """Need what the host needs."""
        needs: frozenset[Need] = host_named(self.host).method.needs
        return needs

    def check(self, clients: Sequence[str]) -> None:
        """Refuse more chains, or longer chains, than there are participating clients."""
        m = shared.participants(len(clients), self.participation)
        for name, number in (("chains", self.chains), ("length", self.length)):
            require(number <= m, name, number, f"at most {m}, the clients of a round")

    def start(self) -> Chains:
        """Start before the first round."""
        return Chains()

    def run(self, fed: Fed, s: Chains) -> Iterator[State]:
        """Yield the state after each hop of all chains; after a round's last hop the server averages."""
        host, length = host_named(self.host), self.shape(len(fed.clients))[1]
        while s.step < self.steps(len(fed.clients)):
            round, position = divmod(s.step, length)
            start = shared.at_server(fed, s.cloud)
            if position == 0:
                s = self.opened(fed, s, start)
            seen = {client for sequence in s.sequences for client in sequence[:position]}
            ends: list[Ref[Weights]] = []
            for sequence, end in zip(s.sequences, s.ends, strict=True):
                client = sequence[position]
                opening = self.opening(host, start, s) if client not in seen else None
                ends.append(fed.call(self.train, client, end, opening, shared.mean_size(s.sizes), round))
                seen.add(client)
            s = self.merged(fed, s, ends, round) if position == length - 1 else s.next(ends=tuple(ends))
            yield s

    def opened(self, fed: Fed, s: Chains, start: Weights) -> Chains:
        """Return the state with the chains of a new round; clients that are new report their numbers of samples."""
        sequences = self.sequences(fed)
        s = replace(s, sequences=sequences, ends=(start,) * len(sequences))
        if not host_named(self.host).counts:
            return s
        return replace(s, sizes=shared.with_sizes(fed, self.count, visited(sequences), s.sizes))

    def opening(self, host: Host[Any], start: Weights, s: Chains) -> Opening | None:
        """Return what a client receives with its first visit of a round; nothing if it is not needed."""
        if not (self.glam or host.needs_start or host.closes):
            return None
        return Opening(start if self.needs_start(host) else None, host.opening(start, s.memory))

    def merged(self, fed: Fed, s: Chains, ends: Sequence[Ref[Weights]], round: int) -> Chains:
        """Return the state after a round: every client visited closes it, and the host's server combines the ends."""
        host, n = host_named(self.host), len(fed.clients)
        told = visited(s.sequences) if host.closes else ()
        closing = {k: fed.call(self.close, k, shared.mean_size(s.sizes), round) for k in told}
        came = shared.arrived(fed, dict(enumerate(ends)))
        chains = [s.sequences[j] for j in came]
        closings = shared.arrived(fed, closing)
        start = shared.at_server(fed, s.cloud)
        after = host.merge(ServerRound(start, list(came.values()), chains, closings, n, s.memory))
        return s.next(model=after.model, cloud=after.start, memory=after.memory, ends=())

    @on_client
    def count(self, client: Client) -> int:
        """n_i."""
        return client.n

    @on_client
    def train(self, client: Client, model: Weights, opening: Opening | None, size: float, round: int) -> Weights:
        """Train at a visit. What the server sends comes with a round's first visit; the client keeps it."""
        host, kept = host_named(self.host), client.state or KeptInChains()
        if opening is not None:
            kept = KeptInChains(opening, kept.memory, earlier=kept.own)
        at = self.at(client, kept, size, round)
        trained, learned = host.train(at, model, self.alignment(client, model, kept))
        if kept.visits:
            learned = tuple(mean([old, new], [kept.visits, 1]) for old, new in zip(kept.learned, learned, strict=True))
        own = trained if self.previous == "own" and self.align_previous else None
        if self.glam or host.needs_start or host.closes:
            client.state = kept._replace(learned=learned, visits=kept.visits + 1, own=own)
        return trained

    @on_client
    def close(self, client: Client, size: float, round: int) -> Closing:
        """End a round: apply what its visits gave."""
        kept = client.state
        memory, closing = host_named(self.host).close(self.at(client, kept, size, round), kept.learned)
        client.state = KeptInChains(memory=memory, own=kept.own)
        return closing

    def at(self, client: Client, kept: KeptInChains, size: float, round: int) -> ClientRound:
        """Return what is available to a host."""
        training, (start, sent) = shared.local_training(client, self.lr_decay, round), kept.opening
        return ClientRound(client, training, self.epochs, start, sent, kept.memory, size)

    def alignment(self, client: Client, model: Weights, kept: KeptInChains) -> Objective:
        """Return GLAM, or only the loss of the labels."""
        previous = model if self.previous == "received" else kept.earlier
        return alignment(client, kept.opening.start, previous, self.align_previous, self.align_global)

    @property
    def glam(self) -> bool:
        """Return whether GLAM is used."""
        return bool(self.align_previous or self.align_global)

    def needs_start(self, host: Host[Any]) -> bool:
        """Return whether the local loss refers to w^r: in GLAM's global term, or in the host's."""
        return bool(self.align_global) or host.needs_start

    def sequences(self, fed: Fed) -> tuple[tuple[str, ...], ...]:
        """Return the chains of this round."""
        chosen, generator = shared.sample(fed, self.participation), fed.generator("order")
        chains, length = self.shape(len(fed.clients))

        def shuffled() -> tuple[str, ...]:
            return tuple(chosen[i] for i in torch.randperm(len(chosen), generator=generator).tolist())

        if self.chain_order == "random":
            return tuple(shuffled() for _ in range(chains))
        order = (chosen if self.chain_order == "fixed" else shuffled()) * 2
        return tuple(order[j : j + length] for j in range(chains))

    def shape(self, clients: int) -> tuple[int, int]:
        """Return S and L for this number of clients."""
        m = shared.participants(clients, self.participation)
        return self.chains or m, self.length or m

    def steps(self, clients: int) -> int:
        """Return R·L hops."""
        return self.rounds * self.shape(clients)[1]

    def cost(self, clients: int, model: int) -> int:
        """R·S(L + 1)·M along the chains, and what the loss and the host send once a round to and from each client.

        With GLAM and FedAvg, in full, R·N(N + 2)·M.
        """
        counted = min(clients, self.rounds * self.met(clients)) if host_named(self.host).counts else 0
        return self.traffic(clients, model) + 8 * counted

    def moved(self, end: Chains, clients: int, model: Size) -> int:
        """As `cost`; which clients report their numbers of samples depends on the draws."""
        return self.traffic(clients, model) + 8 * len(end.sizes)

    def traffic(self, clients: int, model: int) -> int:
        """Return the bytes of all rounds."""
        host, (chains, length) = host_named(self.host), self.shape(clients)
        vectors = self.needs_start(host) + host.sent + host.changes
        each = vectors * model + 8 * host.numbers
        return self.rounds * (chains * (length + 1) * model + self.met(clients) * each)

    def met(self, clients: int) -> int:
        """Return the clients that the chains of a round visit."""
        return min(shared.participants(clients, self.participation), sum(self.shape(clients)) - 1)


def visited(sequences: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return all clients in these chains, each once."""
    return tuple(dict.fromkeys(client for sequence in sequences for client in sequence))
