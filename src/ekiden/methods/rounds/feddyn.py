"""FedDyn: dynamic regularisation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

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
from ekiden.methods.blocks.rounds import EqualReply, SummingMethod


@dataclass(frozen=True)
class Dynamic(State):
    """The state with the server's model and memory."""

    # the model from which clients start; it lies outside the hull of their models
    cloud: Model = INITIAL
    h: Tensor | None = None  # the server's memory, None for zero


@dataclass(frozen=True)
class FedDyn(SummingMethod):
    """Federated averaging whose local losses are tilted so that in the limit their minima agree
    with the global one.

    Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul Whatmough, Venkatesh
    Saligrama: Federated Learning Based on Dynamic Regularization. ICLR 2021.
    https://arxiv.org/abs/2111.04263 (local loss L_i(w) - ⟨λ_i, w⟩ + α/2 ‖w - w^r‖²).

    Departures from the paper: λ_i stays at its client, where the authors' code keeps it at the
    server and sends it. Their code also divides α by a client's relative size; the paper and this
    method do not. By default the result is the mean of the clients' models, which that code also
    reports, and not the model that is broadcast.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round"""
    alpha: NonNegative = 0.01
    """α, weight of the regulariser; 0 is FedAvg with uniform weights"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    result: Literal["mean", "cloud"] = "mean"
    """the model that is evaluated and kept: the mean of the clients' models, or the broadcast
    model, mean - h/α"""
    secure: bool = False
    """add up models in fixed point, so that between machines masks hide all but their sum"""

    fits = shared.every_round
    traits = replace(SummingMethod.traits, private=Tensor)

    def run(self, fed: Fed, s: Dynamic) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            w = shared.at_server(fed, s.cloud)
            chosen = self.drawn(fed)
            middle, answered, _ = self.middle(fed, chosen, w.params, w, s.step)
            cloud = middle
            h = None
            # h ← h - α/N Σ (w_i - w) over those who answered, by all N; then w = mean - h/α
            if self.alpha:
                h = shared.or_zero(s.h, w.params)
                h = h - self.alpha / len(fed.clients) * ((middle.params - w.params) * answered)
                cloud = middle.with_params(middle.params - h / self.alpha)
            s = s.next(model=middle if self.result == "mean" else cloud, cloud=cloud, h=h)
            yield s

    @on_client(gives=shared.alone)
    def train(self, client: Client, model: Weights, round: int) -> EqualReply:
        """Train for E epochs on L_i(w) - ⟨λ_i, w⟩ + (α/2)‖w - w^r‖², then update λ_i."""
        training = self.training(client, round)
        if not self.alpha:
            return EqualReply(client.fit(model, epochs=self.epochs, training=training))
        slope = None if client.state is None else -client.state
        near = shared.Proximal(self.alpha, model.params, slope)
        trained = client.fit(model, epochs=self.epochs, penalty=near, training=training)
        before = shared.or_zero(client.state, model.params)
        # λ_i ← λ_i - α (w_i - w^r)
        client.state = before - self.alpha * (trained.params - model.params)
        return EqualReply(trained)

    def cost(self, clients: int, model: Size) -> int:
        """T·m·2M: only models move; 8 bytes a value up if secure."""
        return self.replies(clients) * (model + self.uploaded(model, model))
