"""FedDC: local drift decoupling and correction."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.base.checks import Count, Fraction, NonNegative
from ekiden.engine.federation import Fed
from ekiden.engine.method import INITIAL, Method, Model, State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.rounds import (
    Corrected,
    Proximal,
    at_server,
    last_iterate,
    local_training,
    mean_size,
    participants,
    sample,
    with_sizes,
)
from ekiden.training.weights import Weights, mean


class Memory(NamedTuple):
    """What a client keeps: its drift h_i and its gradient memory g_i."""

    drift: Tensor
    gradient: Tensor


class Update(NamedTuple):
    """What a client sends back: its model θ_i, and the change of its gradient memory times its relative size."""

    model: Weights
    change: Weights | None


@dataclass(frozen=True)
class Drifting(State):
    """The state with the server's.

    Attributes:
        cloud: the model that clients start from.
        drift: mean of all h_i, None for zero.
        gradient: g, None for zero.
        sizes: numbers of samples of the clients met so far.
    """

    cloud: Model = INITIAL
    drift: Tensor | None = None
    gradient: Tensor | None = None
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FedDC(Method):
    """Federated averaging whose clients learn how far they drift, and are held near the global model less that drift.

    Liang Gao, Huazhu Fu, Li Li, Yingwen Chen, Ming Xu, Cheng-Zhong Xu: FedDC: Federated Learning with Non-IID Data via
    Local Drift Decoupling and Correction. CVPR 2022. https://arxiv.org/abs/2203.11751
    (local loss L_i(θ) + α_i/2 ‖θ + h_i - w^r‖² + ⟨θ, g/ω_i - g_i⟩).

    Departures from the paper: g_i is the mean over the local steps of the gradient without the correction; for plain
    SGD that is the authors' g_i - g/ω_i + (w^r - θ_i)/(K·η) with the K and η of this client and round, to rounding, and
    it holds with momentum and Adam too. Gradient memories travel in the shape of a model. The result is by default the
    mean of the clients' models, which their code reports too, not the model broadcast. n/N is the mean over the clients
    met so far, each of which says once how many samples it has: in full participation that is the paper's.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs a round: K steps"""
    alpha: NonNegative = 0.01
    """α, weight of the penalty; divided by a client's relative size ω_i = n_i·N/n"""
    gradient_correction: bool = True
    """use the term g/ω_i - g_i; False as in the code of FedDisco, which computes it only"""
    participation: Fraction = 1.0
    """c, part of the clients drawn for each round, at least one"""
    lr_decay: Fraction = 1.0
    """factor on the local learning rate, once a round"""
    result: Literal["mean", "cloud"] = "mean"
    """the model that is evaluated and kept: mean of the clients' models, or the one broadcast, mean + mean drift"""

    private: ClassVar[Any] = Memory
    skips: ClassVar[bool] = True  # a round has fewer replies

    selection = last_iterate

    def start(self) -> Drifting:
        """No drift yet."""
        return Drifting()

    def run(self, fed: Fed, s: Drifting) -> Iterator[State]:
        """One round a step; drift and g are divided by all N clients, the mean by those who answered."""
        while s.step < self.rounds:
            chosen = sample(fed, self.participation)
            sizes = with_sizes(fed, self.count, chosen, s.sizes)
            size = mean_size(sizes)
            start = at_server(fed, s.cloud)
            zero = torch.zeros_like(start.params)
            gradient = zero if s.gradient is None else s.gradient
            sent = start.with_params(gradient) if self.gradient_correction else None
            asked = [fed.call(self.train, k, start, sent, size, s.step) for k in chosen]
            updates = fed.get(asked, at_least=1)
            middle = mean([u.model for u in updates])
            part = len(updates) / len(fed.clients)
            drift = (zero if s.drift is None else s.drift) + part * (middle.params - start.params)
            for change in (u.change for u in updates if u.change is not None):
                gradient = gradient + change.params / len(fed.clients)
            cloud = middle.with_params(middle.params + drift)
            model = middle if self.result == "mean" else cloud
            s = s.next(model=model, cloud=cloud, drift=drift, gradient=gradient, sizes=sizes)
            yield s

    @on_client
    def count(self, client: Client) -> int:
        """n_i."""
        return client.n

    @on_client
    def train(self, client: Client, model: Weights, gradient: Weights | None, size: float, round: int) -> Update:
        """K steps on the corrected loss; then h_i and g_i."""
        zero = torch.zeros_like(model.params)
        own = Memory(zero, zero) if client.state is None else client.state
        relative = client.n / size
        training = local_training(client, self.lr_decay, round)
        pull = Proximal(self.alpha / relative, model.params - own.drift)
        if gradient is None:
            trained = client.fit(model, epochs=self.epochs, penalty=pull, training=training)
            client.state = Memory(own.drift + trained.params - model.params, zero)
            return Update(trained, None)
        corrected = Corrected(gradient.params / relative - own.gradient, training.l2, training.clip_norm, pull)
        trained = client.fit(model, epochs=self.epochs, penalty=corrected, training=training)
        client.state = Memory(own.drift + trained.params - model.params, corrected.mean())
        return Update(trained, model.with_params(relative * (client.state.gradient - own.gradient)))

    def steps(self, clients: int) -> int:
        """T rounds."""
        return self.rounds

    def cost(self, clients: int, model: int) -> int:
        """T·m·4M + 8·min(N, T·m): model and gradient memory down and up; 2M in place of 4M without the correction."""
        return self.traffic(clients, model) + 8 * min(clients, self.rounds * participants(clients, self.participation))

    def moved(self, end: Drifting, clients: int, model: int) -> int:
        """As `cost`; who says how many samples it has depends on who was drawn."""
        return self.traffic(clients, model) + 8 * len(end.sizes)

    def traffic(self, clients: int, model: int) -> int:
        """Bytes of all rounds."""
        each = (4 if self.gradient_correction else 2) * model
        return self.rounds * participants(clients, self.participation) * each
