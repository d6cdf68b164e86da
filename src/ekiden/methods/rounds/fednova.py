"""FedNova: averaging of normalised changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    BelowOne,
    Client,
    Count,
    Fed,
    Fraction,
    NonNegative,
    Positive,
    Size,
    State,
    Training,
    Weights,
    mean,
    on_client,
)
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.rounds import ModelSums, SummingMethod


class Progress(NamedTuple):
    """What a client sends back: its model and weight, and a_i, how far its steps go on a constant
    gradient.
    """

    reply: shared.Reply
    a: float


@dataclass(frozen=True)
class ServerMomentum(State):
    """The state with the server's momentum."""

    momentum: Tensor | None = None


@dataclass(frozen=True)
class FedNova(SummingMethod):
    """Federated averaging that corrects each client's change for its number of local steps.

    Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, Vincent Poor: Tackling the Objective
    Inconsistency Problem in Heterogeneous Federated Optimization. NeurIPS 2020.
    https://arxiv.org/abs/2007.07481 (w - τ_eff Σ p_i Δ_i / a_i with τ_eff = Σ p_i a_i).

    Departures from the paper: clients send their model and a_i, and the server divides. a_i counts
    the steps that were actually made, including momentum and proximal term. For Adam it has no
    closed form, so there it is the number of steps. Running statistics are averaged plainly. With a
    proximal term the authors' code uses τ_eff = Σ p_i τ_i; here it is Σ p_i a_i throughout.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round: τ_i steps"""
    mu: NonNegative = 0.0
    """μ, weight of a proximal term as in FedProx"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    weighting: shared.Weighting = "samples"
    """p_i, weights of the average: numbers of samples, or uniform"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    server_momentum: BelowOne = 0.0
    """γ, momentum of the server"""
    secure: bool = False
    """add up models in fixed point, so that between machines masks hide all but their sum"""

    fits = shared.every_round

    def run(self, fed: Fed, s: ServerMomentum) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            w = shared.at_server(fed, s.model)
            chosen = self.drawn(fed)
            if self.secure:
                sums = fed.sum(self.add, chosen, w, s.step, len(chosen), at="server")
                # Σ p_i Δ_i / a_i, and τ_eff
                change = sums.mean(w)
                effective = float(sums.vector(torch.zeros(1))) / sums.total
                target = change.with_params(w.params + effective * change.params)
            else:
                replies = shared.arrived(
                    fed, {k: fed.call(self.train, k, w, s.step) for k in chosen}
                )
                target = normalised(w, [reply for reply in replies.values() if reply.a])
            # the authors' buffer is in units of the local learning rate, which decays
            momentum = self.server_momentum * self.lr_decay
            new, buffer = shared.momentum_step(w, target, self.server_lr, momentum, s.momentum)
            s = s.next(model=new, momentum=buffer)
            yield s

    @on_client(gives=shared.alone)
    def train(self, client: Client, model: Weights, round: int) -> Progress:
        """Train for E epochs from the global model, whatever number of steps that is."""
        training = self.training(client, round)
        near = shared.Proximal(self.mu, model.params) if self.mu else None
        trained = client.fit(model, epochs=self.epochs, penalty=near, training=training)
        a = progress(client, self.epochs, training, self.mu)
        return Progress(shared.Reply.of(client, trained, self.weighting), a)

    def part(self, clients: int, start: Weights, reply: Progress) -> ModelSums:
        """Return (w_i - w) / a_i, and p_i a_i; a client that made no step counts nothing."""
        (trained, weight, _), a = reply
        if not a:
            weight = 0.0
        change = trained.with_params((trained.params - start.params) / (a or 1.0))
        further = torch.tensor([weight * a], dtype=torch.float64)
        return ModelSums.of(clients, change, weight, further)

    def cost(self, clients: int, model: Size) -> int:
        """T·m·(2M + 16): the model down and up, a weight and a_i up; 8 bytes a value up if
        secure.
        """
        return self.replies(clients) * (model + self.uploaded(model, model + 16, numbers=1))


def progress(client: Client, epochs: int, training: Training, mu: float) -> float:
    """Return a_i, how far τ_i local steps go on a constant gradient, in units of the learning
    rate.
    """
    # Adam has no closed form: τ_i itself
    if training.adaptive:
        return shared.accumulation(client.steps(epochs), 0.0, 0.0)
    return shared.accumulation(client.steps(epochs), training.momentum, training.lr * mu)


def normalised(model: Weights, replies: Sequence[Progress]) -> Weights:
    """Return the model w + τ_eff Σ p_i (w_i - w) / a_i, with averaged running statistics."""
    plain = mean([r.reply.model for r in replies], [r.reply.weight for r in replies])
    total = sum(r.reply.weight for r in replies)
    shares = [r.reply.weight / total for r in replies]
    effective = sum(p * r.a for p, r in zip(shares, replies, strict=True))
    params = model.params.clone()
    for p, r in zip(shares, replies, strict=True):
        params.add_(r.reply.model.params - model.params, alpha=effective * p / r.a)
    return plain.with_params(params)
