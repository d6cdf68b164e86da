"""SFedKD: a chain in many rounds, taught by complementary models of the round before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    Client,
    Count,
    Fed,
    Forward,
    Fraction,
    NonNegative,
    Objective,
    OwnSamples,
    Positive,
    Ref,
    Size,
    State,
    Task,
    Traits,
    Weights,
    on_client,
    require,
)
from ekiden.methods.blocks.distillation import kl, other_classes, without
from ekiden.methods.blocks.rounds import OrderedMethod, participants


class OwnCounts(NamedTuple):
    """The class counts (K,) int64 of a client."""

    of: Annotated[Tensor, OwnSamples]


@dataclass(frozen=True)
class Taught(State):
    """The state with what the choice of teachers needs."""

    counts: Tensor | None = None  # (N, K) class counts of all clients
    trained: tuple[Ref[Weights], ...] = ()  # the models trained in this round so far
    teachers: tuple[Ref[Weights], ...] = ()  # the models chosen from the previous round
    sent: int = 0  # number of models that have moved


@dataclass(frozen=True)
class SFedKD(OrderedMethod):
    """Sequential federated learning whose clients also distil from a few models of the previous
    round.

    Haotian Xu, Jinrui Zhou, Xichong Zhang, Mingjun Xiao, He Sun, Yin Xu: SFedKD: Sequential
    Federated Learning with Discrepancy-Aware Multi-Teacher Knowledge Distillation. 2025.
    https://arxiv.org/abs/2507.08508. The two parts of the distillation: Borui Zhao, Quan Cui,
    Renjie Song, Yiyu Qiu, Jiajun Liang: Decoupled Knowledge Distillation. CVPR 2022.
    https://arxiv.org/abs/2203.08679 (equation 7).

    In each round a model goes through a random sequence of clients. From the second round on the
    server chooses teachers among the models of the previous round, by a greedy search: the class
    distributions of their clients together should be as close to uniform as possible. The loss is ℓ
    + τ² Σ_t (α a_t TCKD_t + β b_t NCKD_t). TCKD compares the probabilities of the true class and of
    all others together, NCKD those of the other classes among each other. With d_t in [0, 1], half
    the L1 distance of the class distributions of teacher and student, a_t is 1 - d_t and b_t is
    d_t, each normalised over the teachers. So a teacher that has seen the same classes teaches the
    true class, and one that has seen other classes teaches those.

    Departures from the paper: only its abstract and summaries of it could be read. The direction
    and the form of a_t and b_t, the L1 distance, the loss's weights and all default values are
    inferred. Class counts, not distributions, are sent, once, by all clients. Local training ends
    with the epoch that --select names.
    """

    rounds: Count = 10
    """T, rounds; the first has no teachers"""
    epochs: Count = 10
    """E, epochs at each client per round"""
    teachers: Count = 3
    """number of teachers, at most the number of clients in a round"""
    target_weight: NonNegative = 1.0
    """α, weight of the part about the true class; α = β = 0 is FedSeq"""
    others_weight: NonNegative = 1.0
    """β, weight of the part about the other classes"""
    temperature: Positive = 1.0
    """τ, softens the answers; the loss is multiplied by τ²"""
    participation: Fraction = 1.0
    """c, share of the clients in a round's sequence; at least one client"""
    order: str = "random"
    """order of the clients: random (a new one in each round), given, reversed, or names separated
    by commas"""

    traits = Traits(needs=CLASSES)

    def __post_init__(self) -> None:
        """Refuse a fixed order that would leave the same clients out in every round."""
        fair = self.participation == 1 or self.order == "random"
        require(fair, "participation", self.participation, "1, unless --order=random")

    def run(self, fed: Fed, s: Taught) -> Iterator[State]:
        m = participants(len(fed.clients), self.participation)
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, m)
            if round and not hop:
                s = replace(s, teachers=self.chosen(fed, s), trained=())
            client = fed.order(self.order, round)[hop]
            target, others = self.shares(fed, s, client)
            model = fed.call(self.train, client, s.model, s.teachers, target, others)
            counts = s.counts
            if self.distils and s.step == 0:
                counts = torch.stack([c.of for c in fed.get(fed.call_all(self.count))])
            trained = (*s.trained, model) if self.distils and round < self.rounds - 1 else ()
            used = [
                ref for ref in (s.model, *s.teachers) if isinstance(ref, Ref) and ref != INITIAL
            ]
            sent = s.sent + sum(ref.owner != client for ref in used)
            s = s.next(model=model, counts=counts, trained=trained, sent=sent)
            yield s

    def chosen(self, fed: Fed, s: Taught) -> tuple[Ref[Weights], ...]:
        """Choose the teachers of a round from the models of the previous round."""
        if s.counts is None:
            return ()
        rows = [fed.clients.index(ref.owner) for ref in s.trained]
        return tuple(
            s.trained[i] for i in complementary(distributions(s.counts)[rows], self.teachers)
        )

    def shares(
        self, fed: Fed, s: Taught, student: str
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return a_t and b_t of the teachers."""
        if s.counts is None or not s.teachers:
            return (), ()
        teachers = [fed.clients.index(t.owner) for t in s.teachers]
        d = discrepancies(s.counts, teachers, fed.clients.index(student))
        return normalised(1 - d), normalised(d)

    @on_client(gives="model")
    def count(self, client: Client) -> OwnCounts:
        """Return the number of samples of each class at the client."""
        return OwnCounts(client.class_counts())

    @on_client(gives="model")
    def train(
        self,
        client: Client,
        model: Weights,
        teachers: tuple[Weights, ...],
        target: tuple[float, ...],
        others: tuple[float, ...],
    ) -> Weights:
        """Train from the received model; a_t and b_t of the teachers are `target` and `others`."""
        if not teachers:
            return client.fit(model, epochs=self.epochs)
        networks = tuple(client.network(teacher) for teacher in teachers)
        a = tuple(self.target_weight * share for share in target)
        b = tuple(self.others_weight * share for share in others)
        return client.fit(
            model,
            epochs=self.epochs,
            objective=Lesson(client.task, networks, a, b, self.temperature),
        )

    @property
    def distils(self) -> bool:
        """Return whether any round has teachers."""
        return self.rounds > 1 and (self.target_weight > 0 or self.others_weight > 0)

    def steps(self, clients: int) -> int:
        """Return T·m hops."""
        return self.rounds * participants(clients, self.participation)

    def cost(self, clients: int, model: Size) -> int:
        """(T·m - 1)·M of the chain, (T - 1)·m·k·M of k teachers, and 8·N·K of class counts.

        Less where a client is the last of a round and the first of the next, or has been a teacher
        itself.
        """
        m = participants(clients, self.participation)
        taught = (self.rounds - 1) * m * min(self.teachers, m) if self.distils else 0
        return (self.rounds * m - 1 + taught) * model + self.counted(clients, model)

    def moved(self, end: Taught, clients: int, model: Size) -> int:
        """Return the bytes of the models that actually moved, and of the counts."""
        return end.sent * model + self.counted(clients, model)

    def counted(self, clients: int, model: Size) -> int:
        """Return the bytes of all clients' class counts."""
        return 8 * clients * model.layout.classes if self.distils else 0


@dataclass(frozen=True)
class Lesson(Objective):
    """ℓ + τ² Σ_t (α_t TCKD_t + β_t NCKD_t), for teachers that see the same inputs."""

    task: Task
    networks: tuple[Forward, ...]
    target: tuple[float, ...]  # α_t
    others: tuple[float, ...]  # β_t
    temperature: float
    fixed = True

    @property
    def teachers(self) -> tuple[Forward, ...]:
        """The frozen models of other clients."""
        return self.networks

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of inputs x (b, ...) with labels y (b,); each teacher's answers are (b,
        K).
        """
        logits = forward(x).float()
        soft = logits / self.temperature
        loss = self.task.mean_loss(logits, y)
        for given, alpha, beta in zip(answers, self.target, self.others, strict=True):
            taught = given / self.temperature
            parts = alpha * target_class(soft, taught, y) + beta * other_classes(soft, taught, y)
            loss = loss + self.temperature**2 * parts
        return loss


def target_class(logits: Tensor, taught: Tensor, y: Tensor) -> Tensor:
    """Return TCKD: KL of the teacher's (p_y, 1 - p_y) from the student's, a mean over the batch;
    logits (b, K).
    """
    return kl(two_classes(logits, y), two_classes(taught, y))


def two_classes(logits: Tensor, y: Tensor) -> Tensor:
    """Return logits (b, 2) of the true class and of all others together."""
    own = torch.zeros_like(logits, dtype=torch.bool).scatter(1, y[:, None], True)
    # not `gather`, whose gradient adds in no fixed order on a GPU
    true = logits.masked_fill(~own, 0).sum(1)
    return torch.stack([true, without(logits, y).logsumexp(1)], 1)


def distributions(counts: Tensor) -> Tensor:
    """Return the shares (..., K) of the classes in counts (..., K)."""
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def complementary(shares: Tensor, k: int) -> list[int]:
    """Choose up to k rows of distributions (m, K) one by one, so that their mean is closest to
    uniform in L1.
    """
    found: list[int] = []
    total = torch.zeros_like(shares[0])
    for _ in range(min(k, len(shares))):
        means = (total + shares) / (len(found) + 1)
        gaps = (means - 1 / shares.shape[1]).abs().sum(1)
        # each client teaches once
        gaps[found] = torch.inf
        found.append(int(gaps.argmin()))
        total = total + shares[found[-1]]
    return found


def discrepancies(counts: Tensor, rows: Sequence[int], student: int) -> Tensor:
    """Return d_t: half the L1 distance of the class distributions of clients `rows` from the
    student's.
    """
    p = distributions(counts)
    return (p[list(rows)] - p[student]).abs().sum(1) / 2


def normalised(weights: Tensor) -> tuple[float, ...]:
    """Return the weights divided by their sum; uniform if all are 0."""
    total = float(weights.sum())
    if not total > 0:
        return (1 / len(weights),) * len(weights)
    return tuple((weights / total).tolist())
