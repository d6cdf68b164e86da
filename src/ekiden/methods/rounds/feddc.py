"""FedDC: local drift decoupling and correction."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Count,
    Fed,
    Fraction,
    Model,
    NonNegative,
    Size,
    State,
    Weights,
    on_client,
)
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.rounds import EqualReply, ModelSums, SecureMethod


class Memory(NamedTuple):
    """What a client keeps: its drift h_i and its gradient memory g_i."""

    drift: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Drifting(State):
    """The state with the server's model and memory."""

    cloud: Model = INITIAL  # the model from which clients start
    drift: Tensor | None = None  # mean of all h_i, None for zero
    gradient: Tensor | None = None  # g, None for zero
    # numbers of samples of the clients that have taken part so far
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FedDC(SecureMethod):
    """Federated averaging whose clients learn how far they drift and stay near the global model
    minus that drift.

    Liang Gao, Huazhu Fu, Li Li, Yingwen Chen, Ming Xu, Cheng-Zhong Xu: FedDC: Federated Learning
    with Non-IID Data via Local Drift Decoupling and Correction. CVPR 2022.
    https://arxiv.org/abs/2203.11751 (local loss L_i(θ) + α_i/2 ‖θ + h_i - w^r‖² + ⟨θ, g/ω_i -
    g_i⟩).

    Departures from the paper: g_i is the mean over the local steps of the gradient without the
    correction. For plain SGD that is the authors' g_i - g/ω_i + (w^r - θ_i)/(K·η) with the K and η
    of this client and round, up to rounding; it also holds with momentum and Adam. Gradient
    memories travel in the shape of a model. By default the result is the mean of the clients'
    models, which their code also reports, and not the model that is broadcast. n/N is the mean over
    the clients that have taken part so far, each of which reports its number of samples once; with
    full participation that is the paper's.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round: K steps"""
    alpha: NonNegative = 0.01
    """α, weight of the penalty; divided by a client's relative size ω_i = n_i·N/n"""
    gradient_correction: bool = True
    """use the term g/ω_i - g_i; FedDisco's code computes it without using it, which is False
    here"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    result: Literal["mean", "cloud"] = "mean"
    """the model that is evaluated and kept: the mean of the clients' models, or the broadcast
    model, mean + mean drift"""
    secure: bool = False
    """add up models in fixed point, so that between machines masks hide all but their sum"""

    fits = shared.every_round
    traits = replace(SecureMethod.traits, private=Memory)

    def run(self, fed: Fed, s: Drifting) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            chosen = self.drawn(fed)
            sizes = shared.with_sizes(fed, self.count, chosen, s.sizes)
            w = shared.at_server(fed, s.cloud)
            g = shared.or_zero(s.gradient, w.params)
            h = shared.or_zero(s.drift, w.params)
            sent = w.with_params(g) if self.gradient_correction else None
            size = shared.mean_size(sizes)
            middle, answered, g = self.middle(fed, chosen, g, w, sent, size, s.step)
            # so h stays the mean of all N drifts h_i
            h = h + answered / len(fed.clients) * (middle.params - w.params)
            cloud = middle.with_params(middle.params + h)
            model = middle if self.result == "mean" else cloud
            s = s.next(model=model, cloud=cloud, drift=h, gradient=g, sizes=sizes)
            yield s

    @on_client(gives="model")
    def count(self, client: Client) -> int:
        """n_i."""
        return client.n

    @on_client(gives=shared.alone)
    def train(
        self, client: Client, model: Weights, gradient: Weights | None, size: float, round: int
    ) -> EqualReply:
        """Take K steps on L_i(w) + (α/2ω_i)‖w + h_i - w^r‖² + ⟨w, g/ω_i - g_i⟩, then update h_i and
        g_i.
        """
        training = self.training(client, round)
        zero = torch.zeros_like(model.params)
        h_i, g_i = client.state or Memory(zero, zero)
        # ω_i, the size relative to the mean
        relative = client.n / size
        near = shared.Proximal(self.alpha / relative, model.params - h_i)
        corrected = None
        if gradient is not None:
            corrected = shared.Corrected(
                gradient.params / relative - g_i, training.l2, training.clip_norm, near
            )
        trained = client.fit(
            model, epochs=self.epochs, penalty=corrected or near, training=training
        )
        new = corrected.mean() if corrected else zero
        client.state = Memory(h_i + trained.params - model.params, new)
        return EqualReply(
            trained, None if gradient is None else model.with_params(relative * (new - g_i))
        )

    @on_client(gives=shared.together)
    def add(
        self,
        client: Client,
        model: Weights,
        gradient: Weights | None,
        size: float,
        round: int,
        clients: int,
        before: ModelSums | None,
    ) -> ModelSums:
        """Train like `train`, and add the result to the sums."""
        own = self.part(clients, model, self.train(client, model, gradient, size, round))
        return client.added(before, own, (model, gradient, size, round, clients))

    def cost(self, clients: int, model: Size) -> int:
        """T·m·4M + 8·min(N, T·m): model and gradient memory down and up; 2M instead of 4M without
        the correction.

        If secure, 8 bytes a value up.
        """
        return self.traffic(clients, model) + 8 * min(clients, self.replies(clients))

    def moved(self, end: Drifting, clients: int, model: Size) -> int:
        """As `cost`; which clients report their numbers of samples depends on the draws."""
        return self.traffic(clients, model) + 8 * len(end.sizes)

    def traffic(self, clients: int, model: Size) -> int:
        """Return the bytes of all rounds."""
        vectors = int(self.gradient_correction)
        down = (1 + vectors) * model
        return self.replies(clients) * (down + self.uploaded(model, down, vectors))
