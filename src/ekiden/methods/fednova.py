"""FedNova: averaging of normalised changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ekiden.base.checks import BelowOne, Count, Fraction, NonNegative, Positive
from ekiden.engine.federation import Fed
from ekiden.engine.method import State, on_client
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
    mean_along,
    visit,
)
from ekiden.methods.blocks.rounds import (
    Proximal,
    Reply,
    Weighting,
    accumulation,
    arrived,
    at_server,
    average,
    local_training,
    momentum_step,
    participants,
    sample,
    sample_weight,
)
from ekiden.training.objective import Penalty
from ekiden.training.weights import Weights


class Progress(NamedTuple):
    """What a client sends back: its model and weight, and a_i, how far its steps go on a constant gradient."""

    reply: Reply
    a: float


@dataclass(frozen=True)
class ServerMomentum(State):
    """The state with the server's momentum."""

    momentum: Tensor | None = None


@dataclass(frozen=True)
class FedNova(ParallelMethod):
    """Federated averaging that corrects each client's change for its number of local steps.

    Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, Vincent Poor: Tackling the Objective Inconsistency Problem in
    Heterogeneous Federated Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481
    (w - τ_eff Σ p_i Δ_i / a_i with τ_eff = Σ p_i a_i).

    Departures from the paper: clients send their model and a_i, and the server divides. a_i counts the steps that were
    actually made, including momentum and proximal term. For Adam it has no closed form, so there it is the number of
    steps. Running statistics are averaged plainly.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 5
    """E, local epochs per round: τ_i steps"""
    mu: NonNegative = 0.0
    """μ, weight of a proximal term as in FedProx"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    weighting: Weighting = "samples"
    """p_i, weights of the average: numbers of samples, or uniform"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    server_momentum: BelowOne = 0.0
    """γ, momentum of the server"""

    exchange: ClassVar[Exchange] = Exchange(numbers=1)
    host_settings: ClassVar[tuple[str, ...]] = ("mu",)

    def start(self) -> ServerMomentum:
        """Start with zero momentum."""
        return ServerMomentum()

    def run(self, fed: Fed, s: ServerMomentum) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            model = at_server(fed, s.model)
            replies = arrived(fed, {k: fed.call(self.train, k, model, s.step) for k in sample(fed, self.participation)})
            ends, weights = zip(*(r.reply for r in replies.values()), strict=True)
            closings = {k: Closing((), (r.a,)) for k, r in replies.items()}
            chains = [[k] for k in replies]
            target = self.merge(ServerRound(model, ends, chains, closings, len(fed.clients), weights=weights)).model
            momentum = self.server_momentum * self.lr_decay  # the authors' buffer is in units of the local rate
            new, buffer = momentum_step(model, target, self.server_lr, momentum, s.momentum)
            s = s.next(model=new, momentum=buffer)
            yield s

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Progress:
        """Train for E epochs from the global model, whatever number of steps that is."""
        at = ClientRound(client, local_training(client, self.lr_decay, round), self.epochs, model)
        trained, learned = visit(self, at, model)
        _, closing = self.close(at, learned)
        return Progress(Reply(trained, sample_weight(client, self.weighting)), closing.numbers[0])

    def penalty(self, at: ClientRound, model: Weights) -> Penalty | None:
        """The proximal term, around the round's global model."""
        return Proximal(self.mu, at.origin.params) if self.mu else None

    def needs_start(self, anchor: Anchor) -> bool:
        """Return whether there is a proximal term, whose centre is w^r."""
        return self.mu > 0

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Return a_i."""
        training = at.training
        momentum = 0.0 if training.adaptive else training.momentum
        pull = 0.0 if training.adaptive else training.lr * self.mu
        return (), Closing((), (accumulation(at.client.steps(at.epochs), momentum, pull),))

    def merge(self, r: ServerRound) -> After:
        """Return w^r + τ_eff Σ p_j (end_j - w^r) / a_j, a_j being the sum along chain j. Full chains: FedAvg."""
        a = {client: closing.numbers[0] for client, closing in r.closings.items()}
        along = [len(chain) * mean_along(a, chain) for chain in r.chains]
        shares = r.weights or [1.0] * len(along)
        parts = zip(r.ends, shares, along, strict=True)
        new = normalised(r.start, [Progress(Reply(end, p), a_j) for end, p, a_j in parts if a_j])
        return After(new, new)

    def cost(self, clients: int, model: int) -> int:
        """T·m·(2M + 16): the model down and up, a weight and a_i up."""
        return self.rounds * participants(clients, self.participation) * (2 * model + 16)


def normalised(model: Weights, replies: Sequence[Progress]) -> Weights:
    """Return the model w + τ_eff Σ p_i (w_i - w) / a_i, with averaged running statistics."""
    plain = average([r.reply for r in replies])
    total = sum(r.reply.weight for r in replies)
    shares = [r.reply.weight / total for r in replies]
    effective = sum(p * r.a for p, r in zip(shares, replies, strict=True))
    params = model.params.clone()
    for p, r in zip(shares, replies, strict=True):
        params.add_(r.reply.model.params - model.params, alpha=effective * p / r.a)
    return plain.with_params(params)
