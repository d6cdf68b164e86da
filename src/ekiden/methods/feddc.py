"""FedDC: local drift decoupling and correction."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.base.checks import Count, Fraction, NonNegative
from ekiden.engine.federation import Fed
from ekiden.engine.method import INITIAL, Model, State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.parallel import (
    After,
    Anchor,
    ClientRound,
    Closing,
    Exchange,
    ParallelMethod,
    ServerRound,
    Vectors,
    displacement,
    visit,
)
from ekiden.methods.blocks.rounds import (
    Corrected,
    Proximal,
    arrived,
    at_server,
    local_training,
    mean_size,
    participants,
    sample,
    with_sizes,
)
from ekiden.training.objective import Penalty
from ekiden.training.weights import Weights


class Memory(NamedTuple):
    """What a client keeps: its drift h_i and its gradient memory g_i."""

    drift: Tensor
    gradient: Tensor


class DriftingReply(NamedTuple):
    """What a client sends back: its model θ_i, and the change of its gradient memory times its relative size."""

    model: Weights
    change: Weights | None


@dataclass(frozen=True)
class Drifting(State):
    """The state with the server's model and memory.

    Attributes:
        cloud: the model from which clients start.
        drift: mean of all h_i, None for zero.
        gradient: g, None for zero.
        sizes: numbers of samples of the clients that have taken part so far.
    """

    cloud: Model = INITIAL
    drift: Tensor | None = None
    gradient: Tensor | None = None
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FedDC(ParallelMethod):
    """Federated averaging whose clients learn how far they drift and stay near the global model minus that drift.

    Liang Gao, Huazhu Fu, Li Li, Yingwen Chen, Ming Xu, Cheng-Zhong Xu: FedDC: Federated Learning with Non-IID Data via
    Local Drift Decoupling and Correction. CVPR 2022. https://arxiv.org/abs/2203.11751
    (local loss L_i(θ) + α_i/2 ‖θ + h_i - w^r‖² + ⟨θ, g/ω_i - g_i⟩).

    Departures from the paper: g_i is the mean over the local steps of the gradient without the correction. For plain
    SGD that is the authors' g_i - g/ω_i + (w^r - θ_i)/(K·η) with the K and η of this client and round, up to rounding;
    it also holds with momentum and Adam. Gradient memories travel in the shape of a model. By default the result is the
    mean of the clients' models, which their code also reports, and not the model that is broadcast. n/N is the mean
    over the clients that have taken part so far, each of which reports its number of samples once; with full
    participation that is the paper's.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round: K steps"""
    alpha: NonNegative = 0.01
    """α, weight of the penalty; divided by a client's relative size ω_i = n_i·N/n"""
    gradient_correction: bool = True
    """use the term g/ω_i - g_i; FedDisco's code computes it without using it, which is False here"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    result: Literal["mean", "cloud"] = "mean"
    """the model that is evaluated and kept: the mean of the clients' models, or the broadcast model, mean + mean
    drift"""

    traits = replace(ParallelMethod.traits, private=Memory)
    exchange: ClassVar[Exchange] = Exchange(sent=1, changes=1, keeps=True, counts=True)
    host_settings: ClassVar[tuple[str, ...]] = ("alpha",)
    host_anchor: ClassVar[Anchor | None] = "global"

    def start(self) -> Drifting:
        """Start with zero drift."""
        return Drifting()

    def run(self, fed: Fed, s: Drifting) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            chosen = sample(fed, self.participation)
            sizes = with_sizes(fed, self.count, chosen, s.sizes)
            size = mean_size(sizes)
            start = at_server(fed, s.cloud)
            memory = () if s.drift is None or s.gradient is None else (s.drift, s.gradient)
            sent = self.opening(start, memory)[0] if self.gradient_correction else None
            updates = arrived(fed, {k: fed.call(self.train, k, start, sent, size, s.step) for k in chosen})
            ends = [u.model for u in updates.values()]
            closings = {k: Closing(() if u.change is None else (u.change,)) for k, u in updates.items()}
            after = self.merge(ServerRound(start, ends, [[k] for k in updates], closings, len(fed.clients), memory))
            model, (drift, gradient) = after.model if self.result == "mean" else after.start, after.memory
            s = s.next(model=model, cloud=after.start, drift=drift, gradient=gradient, sizes=sizes)
            yield s

    @on_client
    def count(self, client: Client) -> int:
        """n_i."""
        return client.n

    @on_client
    def train(self, client: Client, model: Weights, gradient: Weights | None, size: float, round: int) -> DriftingReply:
        """Take K steps on the corrected loss, then update h_i and g_i."""
        own = tuple(model.with_params(part) for part in client.state or ())
        training = local_training(client, self.lr_decay, round)
        sent = () if gradient is None else (gradient,)
        at = ClientRound(client, training, self.epochs, model, sent, own, size)
        trained, learned = visit(self, at, model)
        (_, slope), closing = self.close(at, learned)
        # The drift in `close` is the same except for rounding.
        client.state = Memory(at.kept(0) + trained.params - model.params, slope.params)
        return DriftingReply(trained, closing.changes[0] if self.gradient_correction else None)

    def penalty(self, at: ClientRound, model: Weights) -> Penalty:
        """(α/2ω_i)‖w + h_i - anchor‖² + ⟨g/ω_i - g_i, w⟩."""
        relative = at.client.n / at.size
        pull = Proximal(self.alpha / relative, at.anchored(model) - at.kept(0))
        if not self.gradient_correction:
            return pull
        slope = at.sent[0].params / relative - at.kept(1)
        return Corrected(slope, at.training.l2, at.training.clip_norm, pull)

    def needs_start(self, anchor: Anchor) -> bool:
        """Return whether the anchor is w^r."""
        return anchor == "global"

    def learned(self, at: ClientRound, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return w_out - w_in and the mean gradient, zero if it is not used."""
        gradient = penalty.mean() if isinstance(penalty, Corrected) else torch.zeros_like(model.params)
        return displacement(model, trained), model.with_params(gradient)

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Add the displacement to h_i and set g_i to the mean gradient, whose change travels."""
        moved, gradient = learned
        change = at.client.n / at.size * (gradient.params - at.kept(1))
        memory = (moved.with_params(at.kept(0) + moved.params), gradient)
        return memory, Closing((gradient.with_params(change),))

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """Send the gradient memory g."""
        return (start.with_params(memory[1] if memory else torch.zeros_like(start.params)),)

    def merge(self, r: ServerRound) -> After:
        """Update the mean of all h_i and g with those who answered, divided by all N; broadcast the mean + the drift.

        After chains of L clients the drift grows by 1/L of how far they went. That is exact where all clients have
        equally many visits, in chains that come back; else an estimate.
        """
        middle, gradient = r.middle, r.kept(1)
        for change in (vector for closing in r.closings.values() for vector in closing.changes):
            gradient = gradient + change.params / r.clients
        drift = r.kept(0) + r.answered / len(r.chains[0]) * (middle.params - r.start.params)
        return After(middle, middle.with_params(middle.params + drift), (drift, gradient))

    def cost(self, clients: int, model: int) -> int:
        """T·m·4M + 8·min(N, T·m): model and gradient memory down and up; 2M instead of 4M without the correction."""
        return self.traffic(clients, model) + 8 * min(clients, self.rounds * participants(clients, self.participation))

    def moved(self, end: Drifting, clients: int, model: int) -> int:
        """As `cost`; which clients report their numbers of samples depends on the draws."""
        return self.traffic(clients, model) + 8 * len(end.sizes)

    def traffic(self, clients: int, model: int) -> int:
        """Return the bytes of all rounds."""
        each = (4 if self.gradient_correction else 2) * model
        return self.rounds * participants(clients, self.participation) * each
