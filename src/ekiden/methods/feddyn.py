"""FedDyn: dynamic regularisation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ekiden.base.checks import Count, Fraction, NonNegative
from ekiden.engine.federation import Fed
from ekiden.engine.method import INITIAL, Method, Model, State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.rounds import (
    Proximal,
    at_server,
    last_iterate,
    local_training,
    participants,
    sample,
)
from ekiden.training.weights import Weights, mean


@dataclass(frozen=True)
class Dynamic(State):
    """The state with the server's.

    Attributes:
        cloud: the model that clients start from, outside the hull of theirs.
        h: the server's memory, None for zero.
    """

    cloud: Model = INITIAL
    h: Tensor | None = None


@dataclass(frozen=True)
class FedDyn(Method):
    """Federated averaging whose local losses are tilted so that their minima agree with the global one in the limit.

    Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul Whatmough, Venkatesh Saligrama:
    Federated Learning Based on Dynamic Regularization. ICLR 2021. https://arxiv.org/abs/2111.04263
    (local loss L_i(w) - ⟨λ_i, w⟩ + α/2 ‖w - w^r‖²).

    Departures from the paper: λ_i stays at its client, where the authors' code keeps it at the server and sends it;
    their code also divides α by a client's relative size, the paper does not and neither does this. The result is by
    default the mean of the clients' models, which that code reports too, not the model broadcast.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs a round"""
    alpha: NonNegative = 0.01
    """α, weight of the regulariser; 0 is FedAvg with uniform weights"""
    participation: Fraction = 1.0
    """c, part of the clients drawn for each round, at least one"""
    lr_decay: Fraction = 1.0
    """factor on the local learning rate, once a round"""
    result: Literal["mean", "cloud"] = "mean"
    """the model that is evaluated and kept: mean of the clients' models, or the one broadcast, mean - h/α"""

    private: ClassVar[Any] = Tensor
    skips: ClassVar[bool] = True  # a round has fewer replies

    selection = last_iterate

    def start(self) -> Dynamic:
        """No memory yet."""
        return Dynamic()

    def run(self, fed: Fed, s: Dynamic) -> Iterator[State]:
        """One round a step; h is divided by all N clients, the mean by those who answered."""
        while s.step < self.rounds:
            start = at_server(fed, s.cloud)
            asked = [fed.call(self.train, k, start, s.step) for k in sample(fed, self.participation)]
            models = fed.get(asked, at_least=1)
            middle = cloud = mean(models)
            h = s.h
            if self.alpha:
                moved = (middle.params - start.params) * len(models)
                h = (0 if h is None else h) - self.alpha / len(fed.clients) * moved
                cloud = middle.with_params(middle.params - h / self.alpha)
            s = s.next(model=middle if self.result == "mean" else cloud, cloud=cloud, h=h)
            yield s

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """E epochs on the regularised loss; then λ_i ← λ_i - α(w_i - w^r)."""
        memory = torch.zeros_like(model.params) if client.state is None else client.state
        trained = client.fit(
            model,
            epochs=self.epochs,
            penalty=Proximal(self.alpha, model.params, -memory) if self.alpha else None,
            training=local_training(client, self.lr_decay, round),
        )
        if self.alpha:
            client.state = memory - self.alpha * (trained.params - model.params)
        return trained

    def steps(self, clients: int) -> int:
        """T rounds."""
        return self.rounds

    def cost(self, clients: int, model: int) -> int:
        """T·m·2M: only models move."""
        return self.rounds * participants(clients, self.participation) * 2 * model
