"""FedDisco: averaging with weights that know how skewed each client's labels are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    CLASSES,
    Client,
    Count,
    Fed,
    Fraction,
    NonNegative,
    OwnSamples,
    Positive,
    Size,
    State,
    UserError,
    Weights,
    mean,
    on_client,
)
from ekiden.core.base.sums import fixed, real
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.rounds import ModelSums, SecureMethod
from ekiden.methods.blocks.sums import WholeSums

Measure = Literal["kl", "l1", "l2", "cosine"]


class Skewed(NamedTuple):
    """What a client sends back: its model, n_k, and d_k, how far its labels are from uniform."""

    model: Weights
    n: Annotated[int, OwnSamples]
    discrepancy: float


@dataclass(frozen=True)
class LabelSums(WholeSums):
    """What clients add up about their labels, if masks hide what each has."""

    samples: int  # Σ n_k
    distances: int  # Σ d_k, in fixed point
    clients: int  # number of clients

    def means(self) -> tuple[float, float]:
        """Return the means of n_k and d_k."""
        if min(self.samples, self.clients) < 1 or self.distances < 0:
            raise UserError(
                "sums of labels are not those of any samples: use the same version of Ekiden "
                "everywhere"
            )
        return self.samples / self.clients, float(real(torch.tensor(self.distances))) / self.clients


@dataclass(frozen=True)
class Labelled(State):
    """The state with sums over all clients, if the run is secure."""

    labels: LabelSums | None = None  # the sums, from the first round on


@dataclass(frozen=True)
class FedDisco(SecureMethod):
    """Federated averaging that gives less weight to clients whose labels are far from the target
    distribution.

    Rui Ye, Mingkai Xu, Jianyu Wang, Chenxin Xu, Siheng Chen, Yanfeng Wang: FedDisco: Federated
    Learning with Discrepancy-Aware Collaboration. ICML 2023. https://arxiv.org/abs/2305.19229 (p_k
    ∝ max(n_k - a·d_k + b, 0)).

    Departures from the paper: the target distribution is uniform. n_k and d_k go with every reply,
    16 bytes, and are normalised over those who answered. Where all weights would be 0, numbers of
    samples are used. The host is FedAvg. With `secure`, both are normalised over all clients, from
    one sum before the first round; weights that are all 0 end the run.
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
    """d_k, distance between the distribution of the labels and the uniform one; kl is divided by
    its sum over the clients, as in the authors' code"""
    participation: Fraction = 1.0
    """c, share of the clients drawn for each round; at least one client"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    secure: bool = False
    """add up models in fixed point, so that between machines masks hide all but their sum"""

    regroups = False  # the sums of labels are the same in each step
    traits = replace(SecureMethod.traits, needs=CLASSES)

    def run(self, fed: Fed, s: Labelled) -> Iterator[State]:
        while s.step < self.rounds:
            w = shared.at_server(fed, s.model)
            chosen = self.drawn(fed)
            if self.secure:
                labels = s.labels or fed.sum(self.tell, fed.clients, len(fed.clients), at="server")
                s = replace(s, labels=labels)
                means = labels.means()
                target = fed.sum(
                    self.add, chosen, w, s.step, *means, len(chosen), at="server"
                ).mean(w)
            else:
                asked = {k: fed.call(self.train, k, w, s.step) for k in chosen}
                sent = shared.arrived(fed, asked).values()
                models, n, d = zip(*sent, strict=True)
                p = disco_weights(n, normalised_distances(d, self.discrepancy), self.a, self.b)
                target = mean(models, p)
            s = s.next(model=shared.server_step(w, target, self.server_lr))
            yield s

    @on_client(gives=shared.alone)
    def train(self, client: Client, model: Weights, round: int) -> Skewed:
        """Train for E epochs from the global model; the discrepancy does not change this."""
        trained = client.fit(model, epochs=self.epochs, training=self.training(client, round))
        return Skewed(trained, client.n, discrepancy(client.class_counts(), self.discrepancy))

    @on_client(gives=shared.together)
    def tell(self, client: Client, clients: int, before: LabelSums | None) -> LabelSums:
        """Add n_k and d_k to the sums."""
        far = torch.tensor(
            discrepancy(client.class_counts(), self.discrepancy), dtype=torch.float64
        )
        own = LabelSums(client.n, int(fixed(far, clients, "discrepancies of labels")), 1)
        return client.added(before, own, clients)

    @on_client(gives=shared.together)
    def add(
        self,
        client: Client,
        model: Weights,
        round: int,
        samples: float,
        far: float,
        clients: int,
        before: ModelSums | None,
    ) -> ModelSums:
        """Train like `train`, and add the result to the sum, with weight max(n_k - a·d_k + b,
        0).
        """
        trained, n, d = self.train(client, model, round)
        if self.discrepancy == "kl":
            d = d / far / clients if far else 0.0
        weight = max(n / samples / clients - self.a * d + self.b, 0.0)
        own = ModelSums.of(clients, trained, weight)
        return client.added(before, own, (model, round, samples, far, clients))

    def cost(self, clients: int, model: Size) -> int:
        """T·m·(2M + 16): the model down and up, two numbers up. If secure, T·m·M down, 8 bytes a
        value up, and 24N.
        """
        labels = 0
        if self.secure:
            labels = 24 * clients
        return self.replies(clients) * (model + self.uploaded(model, model + 16)) + labels


def discrepancy(counts: Tensor, measure: Measure) -> float:
    """Return d_k, the distance of these labels' distribution (classes,) from the uniform one."""
    labels = counts.double() / counts.sum()
    target = torch.full_like(labels, 1 / len(labels))
    if measure == "kl":
        return float(torch.xlogy(labels, labels / target).sum())
    if measure == "cosine":
        return 1 - float(torch.cosine_similarity(labels, target, dim=0))
    return float(torch.linalg.vector_norm(labels - target, ord=1 if measure == "l1" else 2))


def normalised_distances(distances: Sequence[float], measure: Measure) -> list[float]:
    """Return the distances as the authors' code uses them: kl divided by its sum, the others
    unchanged.
    """
    total = sum(distances) if measure == "kl" else 1.0
    return [d / total if total else 0.0 for d in distances]


def disco_weights(
    samples: Sequence[float], distances: Sequence[float], a: float, b: float
) -> list[float]:
    """Return p_k ∝ max(n_k - a·d_k + b, 0) with relative n_k; p_k = n_k if all are 0."""
    relative = [n / sum(samples) for n in samples]
    raw = [max(n - a * d + b, 0.0) for n, d in zip(relative, distances, strict=True)]
    return [u / sum(raw) for u in raw] if sum(raw) > 0 else relative
