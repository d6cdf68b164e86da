"""SPFL: sequential updates with parallel aggregation, and the parallel methods that it plugs into
its chains.

In such a method's own rounds a client is visited once; in chains, several times. Its memory stays
fixed during a round and changes once at the end, by the mean over the visits: a correction that is
applied at every visit would count several times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args, get_type_hints

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
    Penalty,
    Ref,
    Size,
    State,
    Training,
    Traits,
    UserError,
    Weights,
    mean,
    on_client,
    require,
)
from ekiden.core.base.errors import unknown
from ekiden.core.tasks import Need
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.glam import alignment
from ekiden.methods.blocks.rounds import Corrected, Proximal, Reply
from ekiden.methods.rounds.fedavg import FedAvg
from ekiden.methods.rounds.feddc import FedDC
from ekiden.methods.rounds.feddisco import (
    FedDisco,
    disco_weights,
    discrepancy,
    normalised_distances,
)
from ekiden.methods.rounds.feddyn import FedDyn
from ekiden.methods.rounds.fednova import FedNova, Progress, normalised, progress
from ekiden.methods.rounds.fedprox import FedProx
from ekiden.methods.rounds.moon import MOON
from ekiden.methods.rounds.scaffold import SCAFFOLD

M = TypeVar("M", bound=Method)
P = TypeVar("P", FedProx, FedNova)
Anchor = Literal["received", "global"]
"""The model that a proximal term stays near: the one that a visit starts from, or the round's
global model."""
Vectors = tuple[Weights, ...]  # Vectors in the shape of a model


class Closing(NamedTuple):
    """What a client sends at the end of a round: changes of its memory, and numbers."""

    changes: Vectors = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class ClientRound:
    """What is available to a client in a round."""

    client: Client
    training: Training  # how to train in this round
    epochs: int  # E, epochs of a visit
    start: Weights | None  # w^r, if it is needed
    sent: Vectors = ()  # vectors that came with it
    memory: Vectors = ()  # what the client kept from earlier rounds
    size: float = 0.0  # mean number of samples of a client, if it is needed

    @property
    def origin(self) -> Weights:
        """Return w^r."""
        assert self.start is not None
        return self.start

    def kept(self, number: int) -> Tensor | float:
        """Return a vector of the memory, 0 before the first round."""
        return self.memory[number].params if self.memory else 0.0


@dataclass(frozen=True)
class ServerRound:
    """What is available to the server at the end of a round."""

    start: Weights  # w^r
    ends: Sequence[Weights]  # the model at the end of each chain that came back
    chains: Sequence[Sequence[str]]  # the clients of each of these chains
    closings: Mapping[str, Closing]  # what these clients sent, of those that answered
    clients: int  # N, number of clients
    memory: tuple[Tensor, ...] = ()  # the server's own vectors; none before the first round

    def kept(self, number: int) -> Tensor:
        """Return a vector of the memory, 0 before the first round."""
        return vector_of(self.memory, number, self.start)

    def along(self, values: Mapping[str, float]) -> list[float]:
        """Return for each chain the mean over those of its clients that closed the round; 0 for
        none.

        It also represents clients that trained but dropped out before the round ended.
        """
        means = []
        for chain in self.chains:
            known = [values[client] for client in chain if client in values]
            means.append(sum(known) / max(len(known), 1))
        return means

    def changed(self, number: int) -> Tensor:
        """Return a vector of the memory with 1/N of each change that clients sent: if it is a mean
        over all clients, it stays one.
        """
        vector = self.kept(number)
        for closing in self.closings.values():
            vector = vector + closing.changes[0].params / self.clients
        return vector


def vector_of(memory: Sequence[Tensor], number: int, like: Weights) -> Tensor:
    """Return a vector of the server's memory, 0 before the first round."""
    if not memory:
        return torch.zeros_like(like.params)
    return memory[number]


class After(NamedTuple):
    """The result of a round at the server: the model, what the next round starts from, and the
    server's memory.
    """

    model: Weights
    start: Weights
    memory: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Host(Generic[M]):
    """A parallel method in chains; by default as FedAvg, with equal weights."""

    # its hyperparameters; rounds, epochs, participation and the server's rates are not used
    method: M
    # the model that its proximal term stays near, if the method leaves it open
    anchor: Anchor = "global"

    settings: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters of the method that have a meaning in chains."""
    anchored: ClassVar[Anchor | None] = None
    """The default anchor of a host that has a choice. Without chains, received and global model are
    the same."""
    sent: ClassVar[int] = 0
    """Vectors that go with w^r."""
    changes: ClassVar[int] = 0
    """Vectors that a client sends at the end of a round."""
    numbers: ClassVar[int] = 0
    """Numbers that a client sends at the end of a round."""
    keeps: ClassVar[bool] = False
    """Whether a client keeps something between rounds."""
    counts: ClassVar[bool] = False
    """Whether clients are asked once for their number of samples."""

    @property
    def closes(self) -> bool:
        """Return whether every client visited gets a message at the end of a round."""
        return bool(self.keeps or self.changes or self.numbers)

    @property
    def needs_start(self) -> bool:
        """Return whether the local loss refers to w^r."""
        return self.anchored is not None and self.anchor == "global"

    def train(self, at: ClientRound, model: Weights, base: Objective) -> tuple[Weights, Vectors]:
        """Train from `model` with a loss built around `base`; return also what the visit gives for
        the memory.
        """
        penalty = self.penalty(at, model)
        objective = self.objective(at, base)
        trained = at.client.fit(
            model, epochs=at.epochs, penalty=penalty, objective=objective, training=at.training
        )
        return trained, self.learned(model, trained, penalty)

    def penalty(self, at: ClientRound, model: Weights) -> Penalty | None:
        """Return what is added to the loss in closed form, at a visit that starts from `model`."""
        return None

    def objective(self, at: ClientRound, base: Objective) -> Objective:
        """Return the local loss around `base`."""
        return base

    def learned(self, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return what a visit contributes to the memory; `close` gets the mean over a round's
        visits.
        """
        return ()

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Return the memory after a round, given the mean of `learned` over its visits, and what
        the server gets.
        """
        return (), Closing()

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """Return what the server sends with w^r."""
        return ()

    def merge(self, r: ServerRound) -> After:
        """Compute the server's step."""
        middle = mean(r.ends)
        return After(middle, middle)

    def near(self, at: ClientRound, model: Weights) -> Tensor:
        """Return the anchor at a visit that starts from `model`."""
        return (at.origin if self.anchor == "global" else model).params


class InProximal(Host[P]):
    """FedProx, and other methods with a proximal term, whose centre is the round's global model:
    that damps a chain.
    """

    settings = ("mu",)

    @property
    def needs_start(self) -> bool:
        """Return whether there is a proximal term, whose centre is w^r."""
        return self.method.mu > 0

    def penalty(self, at: ClientRound, model: Weights) -> Penalty | None:
        """Return (μ/2)‖w - w^r‖²."""
        if not self.method.mu:
            return None
        return Proximal(self.method.mu, at.origin.params)


class InSCAFFOLD(Host[SCAFFOLD]):
    """SCAFFOLD: c and c_i change once a round."""

    sent = 1
    changes = 1
    keeps = True

    def penalty(self, at: ClientRound, model: Weights) -> Penalty:
        """Return c - c_i, which is added to each gradient."""
        slope = at.sent[0].params - at.kept(0)
        return Corrected(slope, at.training.l2, at.training.clip_norm)

    def learned(self, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return the mean gradient over the steps."""
        assert isinstance(penalty, Corrected)
        return (model.with_params(penalty.mean()),)

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """c_i⁺ is the mean gradient; its change travels."""
        return learned, Closing((learned[0].with_params(learned[0].params - at.kept(0)),))

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """Send the server's control variate c."""
        return (start.with_params(vector_of(memory, 0, start)),)

    def merge(self, r: ServerRound) -> After:
        """Change c by 1/N of what clients send, so that it is always the mean of all c_i."""
        middle = mean(r.ends)
        return After(middle, middle, (r.changed(0),))


class InFedNova(InProximal[FedNova]):
    """FedNova: a_j of a chain is the sum over its clients. With full chains this is FedAvg."""

    numbers = 1

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Send a_i."""
        a_i = progress(at.client, at.epochs, at.training, self.method.mu)
        return (), Closing((), (a_i,))

    def merge(self, r: ServerRound) -> After:
        """Return w^r + τ_eff Σ p_j (end_j - w^r) / a_j."""
        a = r.along({client: closing.numbers[0] for client, closing in r.closings.items()})
        parts = zip(r.ends, r.chains, a, strict=True)
        # `along` gives the mean over a chain's clients, and their steps add up
        new = normalised(
            r.start,
            [Progress(Reply(end, 1.0), len(chain) * a_j) for end, chain, a_j in parts if a_j],
        )
        return After(new, new)


class InFedDyn(Host[FedDyn]):
    """FedDyn: λ_i changes by the mean displacement of the client's visits."""

    settings = ("alpha",)
    anchored = "received"
    keeps = True

    def penalty(self, at: ClientRound, model: Weights) -> Penalty | None:
        """-⟨λ_i, w⟩ + (α/2)‖w - anchor‖²."""
        if not self.method.alpha:
            return None
        slope = -at.memory[0].params if at.memory else None
        return Proximal(self.method.alpha, self.near(at, model), slope)

    def learned(self, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return w_out - w_in."""
        return (trained.with_params(trained.params - model.params),)

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """λ_i ← λ_i - α · displacement."""
        (moved,) = learned
        slope = at.kept(0) - self.method.alpha * moved.params
        return (moved.with_params(slope),), Closing()

    def merge(self, r: ServerRound) -> After:
        """Update h by the displacements of those who answered, divided by all N; broadcast the mean
        minus h/α.
        """
        middle = mean(r.ends)
        alpha = self.method.alpha
        if not alpha:
            return After(middle, middle)
        moved = (middle.params - r.start.params) * len(r.closings)
        h = r.kept(0) - alpha / r.clients * moved
        return After(middle, middle.with_params(middle.params - h / alpha), (h,))


class InFedDC(Host[FedDC]):
    """FedDC: drift and gradient memory change once a round."""

    settings = ("alpha",)
    anchored = "global"
    sent = 1
    changes = 1
    keeps = True
    counts = True

    def penalty(self, at: ClientRound, model: Weights) -> Penalty:
        """(α/2ω_i)‖w + h_i - anchor‖² + ⟨g/ω_i - g_i, w⟩."""
        relative = at.client.n / at.size
        pull = Proximal(self.method.alpha / relative, self.near(at, model) - at.kept(0))
        slope = at.sent[0].params / relative - at.kept(1)
        return Corrected(slope, at.training.l2, at.training.clip_norm, pull)

    def learned(self, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return w_out - w_in and the mean gradient."""
        assert isinstance(penalty, Corrected)
        return trained.with_params(trained.params - model.params), model.with_params(penalty.mean())

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Add the displacement to h_i and set g_i to the mean gradient, whose change travels."""
        moved, gradient = learned
        change = at.client.n / at.size * (gradient.params - at.kept(1))
        memory = (moved.with_params(at.kept(0) + moved.params), gradient)
        return memory, Closing((gradient.with_params(change),))

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """Send the gradient memory g."""
        return (start.with_params(vector_of(memory, 1, start)),)

    def merge(self, r: ServerRound) -> After:
        """Update the mean of all h_i and g with those who answered, divided by all N; broadcast the
        mean + the drift.

        After chains of L clients the drift grows by 1/L of how far they went. That is exact where
        all clients have equally many visits, in chains that come back; else an estimate.
        """
        middle = mean(r.ends)
        answered = len(r.closings) / r.clients
        drift = r.kept(0) + answered / len(r.chains[0]) * (middle.params - r.start.params)
        return After(middle, middle.with_params(middle.params + drift), (drift, r.changed(1)))


class InMOON(Host[MOON]):
    """MOON: a client keeps the mean of the models of its visits."""

    settings = ("mu", "temperature")
    keeps = True

    @property
    def needs_start(self) -> bool:
        """Need w^r for the positive of the contrast."""
        return self.method.mu > 0

    def objective(self, at: ClientRound, base: Objective) -> Objective:
        """Return ℓ + μ ℓ_con."""
        return self.method.contrast(at.client, at.start, at.memory, base)

    def learned(self, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return the model."""
        return (trained,)

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Keep the model from which the next rounds' representations are pushed away."""
        return (*at.memory, *learned)[-self.method.earlier_models :], Closing()


class InFedDisco(Host[FedDisco]):
    """FedDisco: each chain has the mean weight of its clients. With full chains this is FedAvg."""

    settings = ("a", "b", "discrepancy")
    numbers = 2

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Send n_k and d_k."""
        client = at.client
        return (), Closing(
            (), (float(client.n), discrepancy(client.class_counts(), self.method.discrepancy))
        )

    def merge(self, r: ServerRound) -> After:
        """Average the ends by the weights of their chains."""
        n, d = zip(*(closing.numbers for closing in r.closings.values()), strict=True)
        weights = disco_weights(
            n, normalised_distances(d, self.method.discrepancy), self.method.a, self.method.b
        )
        along = r.along(dict(zip(r.closings, weights, strict=True)))
        if not any(along):
            return super().merge(r)
        middle = mean(r.ends, along)
        return After(middle, middle)


HOSTS: Mapping[type[Method], type[Host[Any]]] = {
    FedAvg: Host,
    FedProx: InProximal,
    SCAFFOLD: InSCAFFOLD,
    FedNova: InFedNova,
    FedDyn: InFedDyn,
    FedDC: InFedDC,
    MOON: InMOON,
    FedDisco: InFedDisco,
}
"""The methods that SPFL plugs into its chains, and how."""


@cache
def host_named(text: str) -> Host[Any]:
    """Return the host that `text` describes: a name, and after a colon settings, as in
    "moon:mu=5,temperature=0.5".
    """
    name, _, given = text.partition(":")
    known = {kind.title(): kind for kind in HOSTS}
    if name not in known:
        raise unknown("host", name, known)
    kind = known[name]
    values = dict[str, Any]()
    host = HOSTS[kind]
    hints = {
        setting: hint for setting, hint in get_type_hints(kind).items() if setting in host.settings
    }
    if host.anchored is not None:
        hints["anchor"] = Anchor
    for part in filter(None, given.split(",")):
        setting, _, value = part.partition("=")
        if setting not in hints:
            raise unknown(f"setting of host {name}", setting, hints)
        values[setting] = _value(setting, hints[setting], value)
    anchor = values.pop("anchor", host.anchored or "global")
    try:
        return host(kind(**values), anchor)
    except UserError as error:
        raise UserError(f"--host {text}: {str(error).removeprefix('--')}") from None


def _value(setting: str, hint: Any, text: str) -> float | str:
    if hint is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(
                f"host {setting} must be a number, not {text!r}: write {setting}=0.1"
            ) from None
    if text not in get_args(hint):
        raise unknown(f"value of host {setting}", text, get_args(hint))
    return text


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
    """What the first visit of a round receives: w^r if it is needed, and what the host's server
    sends.
    """

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
    """Several chains of clients side by side, each a pass of sequential learning; the server
    averages their ends.

    SPFL: Sequential updates with Parallel aggregation for Enhanced Federated Learning under
    Category and Domain Shifts. NeurIPS 2025. https://openreview.net/forum?id=IHZngJNasX (with its
    loss GLAM).

    Departures from the paper: it does not say how chains are ordered. By default a random order is
    drawn each round and chain j starts at its j-th client, so that at every position each client
    trains one model. The minus sign before the alignment with the previous model is taken as a
    misprint. The paper does not say either how hosts with a memory are plugged in. Here control
    variates, drifts and memories stay fixed during a round and change once, by the mean over its
    visits. If a client is missing inside a chain, the run stops and can be resumed; the chain does
    not skip the client. Epochs, rates, τ and ρ are not published either, and there is no official
    code; the defaults are proposals.
    """

    host: str = "fedavg"
    """host, the parallel method plugged in: fedavg, fedprox, scaffold, fednova, feddyn, feddc, moon
    or feddisco; its settings follow a colon, as in fedprox:mu=0.1 or moon:mu=5,temperature=0.5 (all
    are in docs/methods/spfl.md)"""
    rounds: Count = 15
    """R, rounds"""
    epochs: Count = 5
    """E, epochs at each visit: K steps"""
    chains: CountOrZero = 0
    """S, chains per round; 0: one for each client that takes part"""
    length: CountOrZero = 0
    """L, clients in a chain; 0: all that take part"""
    chain_order: Order = "latin"
    """order of the chains: latin (shifts of an order drawn each round), fixed (shifts of the given
    order), random (each chain its own, of all clients)"""
    align_previous: NonNegative = 1.0
    """τ, weight of GLAM's alignment with the previous model"""
    align_global: NonNegative = 1.0
    """ρ, weight of GLAM's alignment with the global model; with τ = ρ = 0 there is no GLAM"""
    previous: Literal["received", "own"] = "received"
    """w_p, GLAM's previous model: the one received from the chain, or the client's own model of the
    previous round"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""

    traits = Traits(private=KeptInChains)

    selection = shared.last_iterate

    def __post_init__(self) -> None:
        if self.chain_order == "random" and self.length:
            raise UserError(
                "--chain-order=random makes chains of all clients: leave --length=0, or use "
                "--chain-order=latin"
            )
        host_named(self.host)

    @property
    def plugged(self) -> Host[Any]:
        """The host."""
        return host_named(self.host)

    @property
    def needs(self) -> frozenset[Need]:
        """Need what the host needs."""
        needs: frozenset[Need] = self.plugged.method.needs
        return needs

    def check(self, clients: Sequence[str]) -> None:
        """Refuse more chains, or longer chains, than there are participating clients."""
        m = shared.participants(len(clients), self.participation)
        for name, number in (("chains", self.chains), ("length", self.length)):
            require(number <= m, name, number, f"at most {m}, the clients of a round")

    def run(self, fed: Fed, s: Chains) -> Iterator[State]:
        """Yield the state after each hop of all chains; after a round's last hop the server
        averages.
        """
        host = self.plugged
        length = self.shape(len(fed.clients))[1]
        while s.step < self.steps(len(fed.clients)):
            round, position = divmod(s.step, length)
            start = shared.at_server(fed, s.cloud)
            if position == 0:
                s = self.opened(fed, s, start)
            seen = {client for sequence in s.sequences for client in sequence[:position]}
            ends: list[Ref[Weights]] = []
            for sequence, end in zip(s.sequences, s.ends, strict=True):
                client = sequence[position]
                opening = None
                if client not in seen:
                    opening = self.opening(host, start, s)
                    seen.add(client)
                size = shared.mean_size(s.sizes)
                ends.append(fed.call(self.train, client, end, opening, size, round))
            if position == length - 1:
                yield (s := self.merged(fed, s, ends, round))
            else:
                yield (s := s.next(ends=tuple(ends)))

    def opened(self, fed: Fed, s: Chains, start: Weights) -> Chains:
        """Return the state with the chains of a new round; clients that are new report their
        numbers of samples.
        """
        sequences = self.sequences(fed)
        s = replace(s, sequences=sequences, ends=(start,) * len(sequences))
        if not self.plugged.counts:
            return s
        return replace(s, sizes=shared.with_sizes(fed, self.count, visited(sequences), s.sizes))

    def opening(self, host: Host[Any], start: Weights, s: Chains) -> Opening | None:
        """Return what a client receives with its first visit of a round; nothing if it is not
        needed.
        """
        if not self.keeps(host):
            return None
        return Opening(start if self.needs_start(host) else None, host.opening(start, s.memory))

    def merged(self, fed: Fed, s: Chains, ends: Sequence[Ref[Weights]], round: int) -> Chains:
        """Return the state after a round: every client visited closes it, and the host's server
        combines the ends.
        """
        host = self.plugged
        n = len(fed.clients)
        closing = {}
        if host.closes:
            for k in visited(s.sequences):
                closing[k] = fed.call(self.close, k, shared.mean_size(s.sizes), round)
        came = shared.arrived(fed, dict(enumerate(ends)))
        chains = [s.sequences[j] for j in came]
        closings = shared.arrived(fed, closing)
        start = shared.at_server(fed, s.cloud)
        after = host.merge(ServerRound(start, list(came.values()), chains, closings, n, s.memory))
        return s.next(model=after.model, cloud=after.start, memory=after.memory, ends=())

    @on_client(gives="model")
    def count(self, client: Client) -> int:
        """n_i."""
        return client.n

    @on_client(gives="model")
    def train(
        self, client: Client, model: Weights, opening: Opening | None, size: float, round: int
    ) -> Weights:
        """Train at a visit. What the server sends comes with a round's first visit; the client
        keeps it.
        """
        host = self.plugged
        kept = client.state or KeptInChains()
        if opening is not None:
            kept = KeptInChains(opening, kept.memory, earlier=kept.own)
        at = self.at(client, kept, size, round)
        trained, learned = host.train(at, model, self.alignment(client, model, kept))
        if kept.visits:
            learned = tuple(
                mean([old, new], [kept.visits, 1])
                for old, new in zip(kept.learned, learned, strict=True)
            )
        if self.keeps(host):
            own = trained if self.previous == "own" and self.align_previous else None
            client.state = kept._replace(learned=learned, visits=kept.visits + 1, own=own)
        return trained

    @on_client(gives="model")
    def close(self, client: Client, size: float, round: int) -> Closing:
        """End a round: apply what its visits gave."""
        kept = client.state
        memory, closing = self.plugged.close(self.at(client, kept, size, round), kept.learned)
        client.state = KeptInChains(memory=memory, own=kept.own)
        return closing

    def at(self, client: Client, kept: KeptInChains, size: float, round: int) -> ClientRound:
        """Return what is available to a host."""
        training = shared.local_training(client, self.lr_decay, round)
        start, sent = kept.opening
        return ClientRound(client, training, self.epochs, start, sent, kept.memory, size)

    def alignment(self, client: Client, model: Weights, kept: KeptInChains) -> Objective:
        """Return GLAM, or only the loss of the labels."""
        previous = model if self.previous == "received" else kept.earlier
        return alignment(
            client, kept.opening.start, previous, self.align_previous, self.align_global
        )

    def keeps(self, host: Host[Any]) -> bool:
        """Return whether clients keep something: for GLAM, for the local loss, or for the host."""
        return bool(self.align_previous or self.needs_start(host) or host.closes)

    def needs_start(self, host: Host[Any]) -> bool:
        """Return whether the local loss refers to w^r: in GLAM's global term, or in the host's."""
        return bool(self.align_global) or host.needs_start

    def sequences(self, fed: Fed) -> tuple[tuple[str, ...], ...]:
        """Return the chains of this round."""
        chosen = shared.sample(fed, self.participation)
        generator = fed.generator("order")
        chains, length = self.shape(len(fed.clients))

        def shuffled() -> tuple[str, ...]:
            return tuple(
                chosen[i] for i in torch.randperm(len(chosen), generator=generator).tolist()
            )

        if self.chain_order == "random":
            return tuple(shuffled() for _ in range(chains))
        order = chosen
        if self.chain_order == "latin":
            order = shuffled()
        return tuple((order * 2)[j : j + length] for j in range(chains))

    def shape(self, clients: int) -> tuple[int, int]:
        """Return S and L for this number of clients."""
        m = shared.participants(clients, self.participation)
        return self.chains or m, self.length or m

    def steps(self, clients: int) -> int:
        """Return R·L hops."""
        return self.rounds * self.shape(clients)[1]

    def cost(self, clients: int, model: int) -> int:
        """R·S(L + 1)·M along the chains, and what the loss and the host send once a round to and
        from each client.

        With GLAM and FedAvg, in full, R·N(N + 2)·M.
        """
        total = self.traffic(clients, model)
        if self.plugged.counts:
            total += 8 * min(clients, self.rounds * self.met(clients))
        return total

    def moved(self, end: Chains, clients: int, model: Size) -> int:
        """As `cost`; which clients report their numbers of samples depends on the draws."""
        return self.traffic(clients, model) + 8 * len(end.sizes)

    def traffic(self, clients: int, model: int) -> int:
        """Return the bytes of all rounds."""
        host = self.plugged
        chains, length = self.shape(clients)
        vectors = self.needs_start(host) + host.sent + host.changes
        each = vectors * model + 8 * host.numbers
        return self.rounds * (chains * (length + 1) * model + self.met(clients) * each)

    def met(self, clients: int) -> int:
        """Return the clients that the chains of a round visit."""
        return min(shared.participants(clients, self.participation), sum(self.shape(clients)) - 1)


def visited(sequences: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return all clients in these chains, each once."""
    return tuple(dict.fromkeys(client for sequence in sequences for client in sequence))
