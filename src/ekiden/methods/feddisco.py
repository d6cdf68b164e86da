"""FedDisco: averaging with weights that know how skewed each client's labels are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.base.checks import Count, Fraction, NonNegative, Positive
from ekiden.engine.federation import Fed
from ekiden.engine.method import CLASSES, OwnSamples, State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.parallel import (
    After,
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
    arrived,
    at_server,
    local_training,
    participants,
    sample,
    server_step,
)
from ekiden.training.weights import Weights, mean

Measure = Literal["kl", "l1", "l2", "cosine"]


class Skewed(NamedTuple):
    """What a client sends back: its model, n_k, and d_k, how far its labels are from uniform."""

    model: Weights
    n: Annotated[int, OwnSamples]
    discrepancy: float


@dataclass(frozen=True)
class FedDisco(ParallelMethod):
    """Federated averaging that gives less weight to clients whose labels are far from the target distribution.

    Rui Ye, Mingkai Xu, Jianyu Wang, Chenxin Xu, Siheng Chen, Yanfeng Wang: FedDisco: Federated Learning with
    Discrepancy-Aware Collaboration. ICML 2023. https://arxiv.org/abs/2305.19229 (p_k ∝ max(n_k - a·d_k + b, 0)).

    Departures from the paper: the target distribution is uniform. n_k and d_k go with every reply, 16 bytes, and are
    normalised over those who answered. Where all weights would be 0, numbers of samples are used. The host is FedAvg.
    """

    rounds: Count = 100
    """T, rounds"""
    epochs: Count = 10
    """E, local epochs per round"""
    a: NonNegative = 0.5
    """a, weight of the discrepancy"""
    b: float = 0.1
    """b, added to each weight; with m clients per round instead of 10, scale it like 1/m"""
    discrepancy: Measure = "kl"
    """d_k, distance between the distribution of the labels and the uniform one; kl is divided by its sum over the
    clients, as in the authors' code"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""

    exchange: ClassVar[Exchange] = Exchange(numbers=2)
    host_settings: ClassVar[tuple[str, ...]] = ("a", "b", "discrepancy")
    traits = replace(ParallelMethod.traits, needs=CLASSES)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            model = at_server(fed, s.model)
            replies = arrived(fed, {k: fed.call(self.train, k, model, s.step) for k in sample(fed, self.participation)})
            ends = [r.model for r in replies.values()]
            closings = {k: Closing((), (float(r.n), r.discrepancy)) for k, r in replies.items()}
            after = self.merge(ServerRound(model, ends, [[k] for k in replies], closings, len(fed.clients)))
            s = s.next(model=server_step(model, after.model, self.server_lr))
            yield s

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Skewed:
        """Train for E epochs from the global model; the discrepancy does not change this."""
        at = ClientRound(client, local_training(client, self.lr_decay, round), self.epochs, model)
        trained, learned = visit(self, at, model)
        _, closing = self.close(at, learned)
        return Skewed(trained, client.n, closing.numbers[1])

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """Return n_k and d_k."""
        client = at.client
        return (), Closing((), (float(client.n), discrepancy(client.class_counts(), self.discrepancy)))

    def merge(self, r: ServerRound) -> After:
        """Average the ends, each chain with the mean weight of its clients. With full chains this is FedAvg."""
        n, d = zip(*(closing.numbers for closing in r.closings.values()), strict=True)
        weights = disco_weights(n, normalised(d, self.discrepancy), self.a, self.b)
        p = dict(zip(r.closings, weights, strict=True))
        along = [mean_along(p, chain) for chain in r.chains]
        middle = mean(r.ends, along if any(along) else None)
        return After(middle, middle)

    def cost(self, clients: int, model: int) -> int:
        """T·m·(2M + 16): the model down and up, two numbers up."""
        return self.rounds * participants(clients, self.participation) * (2 * model + 16)


def discrepancy(counts: Tensor, measure: Measure) -> float:
    """Return d_k, the distance of these labels' distribution (classes,) from the uniform one."""
    labels = counts.double() / counts.sum()
    target = torch.full_like(labels, 1 / len(labels))
    if measure == "kl":
        return float(torch.xlogy(labels, labels / target).sum())
    if measure == "cosine":
        return 1 - float(torch.cosine_similarity(labels, target, dim=0))
    return float(torch.linalg.vector_norm(labels - target, ord=1 if measure == "l1" else 2))


def normalised(distances: Sequence[float], measure: Measure) -> list[float]:
    """Return the distances as the authors' code uses them: kl divided by its sum, the others unchanged."""
    total = sum(distances) if measure == "kl" else 1.0
    return [d / total if total else 0.0 for d in distances]


def disco_weights(samples: Sequence[float], distances: Sequence[float], a: float, b: float) -> list[float]:
    """Return p_k ∝ max(n_k - a·d_k + b, 0) with relative n_k; p_k = n_k if all are 0."""
    shares = [n / sum(samples) for n in samples]
    raw = [max(n - a * d + b, 0.0) for n, d in zip(shares, distances, strict=True)]
    return [u / sum(raw) for u in raw] if sum(raw) > 0 else shares
