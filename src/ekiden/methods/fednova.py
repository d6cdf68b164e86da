"""FedNova: averaging of normalised changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ekiden.base.checks import BelowOne, Count, Fraction, NonNegative, Positive
from ekiden.engine.federation import Fed
from ekiden.engine.method import Method, State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.rounds import (
    Proximal,
    Reply,
    Weighting,
    accumulation,
    at_server,
    average,
    last_iterate,
    local_training,
    momentum_step,
    participants,
    sample,
    sample_weight,
)
from ekiden.training.weights import Weights


class Progress(NamedTuple):
    """What a client sends back: its model and weight, and a_i, how far its steps go on a constant gradient."""

    reply: Reply
    a: float


@dataclass(frozen=True)
class Server(State):
    """The state with the server's momentum."""

    momentum: Tensor | None = None


@dataclass(frozen=True)
class FedNova(Method):
    """Federated averaging that divides each client's change by what its number of local steps makes of it.

    Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, Vincent Poor: Tackling the Objective Inconsistency Problem in
    Heterogeneous Federated Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481
    (w - τ_eff Σ p_i Δ_i / a_i with τ_eff = Σ p_i a_i).

    Departures from the paper: clients send their model and a_i, and the server divides. a_i counts the steps really
    made, momentum and proximal term included; with Adam, for which it has no closed form, it is the number of steps.
    Running statistics are averaged plainly.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs a round: τ_i steps"""
    mu: NonNegative = 0.0
    """μ, weight of a proximal term as in FedProx"""
    participation: Fraction = 1.0
    """c, part of the clients drawn for each round, at least one"""
    weighting: Weighting = "samples"
    """p_i, weights of the average: numbers of samples, or all the same"""
    lr_decay: Fraction = 1.0
    """factor on the local learning rate, once a round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    server_momentum: BelowOne = 0.0
    """γ, momentum of the server"""

    skips: ClassVar[bool] = True  # a round has fewer replies

    selection = last_iterate

    def start(self) -> Server:
        """No momentum yet."""
        return Server()

    def run(self, fed: Fed, s: Server) -> Iterator[State]:
        """One round a step."""
        while s.step < self.rounds:
            model = at_server(fed, s.model)
            asked = [fed.call(self.train, k, model, s.step) for k in sample(fed, self.participation)]
            target = normalised(model, fed.get(asked, at_least=1))
            momentum = self.server_momentum * self.lr_decay  # the authors' buffer is in units of the local rate
            new, buffer = momentum_step(model, target, self.server_lr, momentum, s.momentum)
            s = s.next(model=new, momentum=buffer)
            yield s

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Progress:
        """E epochs from the global model, however many steps these are here."""
        training = local_training(client, self.lr_decay, round)
        penalty = Proximal(self.mu, model.params) if self.mu else None
        trained = client.fit(model, epochs=self.epochs, penalty=penalty, training=training)
        momentum = 0.0 if training.adaptive else training.momentum
        pull = 0.0 if training.adaptive else training.lr * self.mu
        a = accumulation(client.steps(self.epochs), momentum, pull)
        return Progress(Reply(trained, sample_weight(client, self.weighting)), a)

    def steps(self, clients: int) -> int:
        """T rounds."""
        return self.rounds

    def cost(self, clients: int, model: int) -> int:
        """T·m·(2M + 16): the model down and up, a weight and a_i up."""
        return self.rounds * participants(clients, self.participation) * (2 * model + 16)


def normalised(model: Weights, replies: Sequence[Progress]) -> Weights:
    """The new model w + τ_eff Σ p_i (w_i - w) / a_i, around averaged running statistics."""
    plain = average([r.reply for r in replies])
    total = sum(r.reply.weight for r in replies)
    shares = [r.reply.weight / total for r in replies]
    effective = sum(p * r.a for p, r in zip(shares, replies, strict=True))
    params = model.params.clone()
    for p, r in zip(shares, replies, strict=True):
        params.add_(r.reply.model.params - model.params, alpha=effective * p / r.a)
    return plain.with_params(params)
