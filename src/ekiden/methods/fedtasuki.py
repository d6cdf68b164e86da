"""FedTasuki: one-shot sequential learning that distils from the received model, weighed by sample counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.core.federation import Fed, in_order
from ekiden.core.method import INITIAL, Method, State, on_client
from ekiden.core.worker import Client
from ekiden.learning.augment import Augment
from ekiden.learning.fit import Forward
from ekiden.learning.training import Training, require
from ekiden.learning.weights import Weights

Form = Literal["both", "kl"]


class Handoff(NamedTuple):
    """What a client hands to the next one: a model, and N, the number of training samples behind it."""

    model: Weights
    seen: int


@dataclass(frozen=True)
class FedTasuki(Method):
    """One-shot sequential learning that distils from the received model, weighed by sample counts.

    This library's own method, 2026; no claim of novelty is made. Its parts are known one by one: distilling from the
    model before (Zhizhong Li, Derek Hoiem: Learning without Forgetting. ECCV 2016. https://arxiv.org/abs/1606.09282),
    leaving out the true class (Gihun Lee, Minchan Jeong, Yongjin Shin, Sangmin Bae, Se-Young Yun: Preservation of the
    Global Knowledge by Not-True Distillation in Federated Learning. NeurIPS 2022. https://arxiv.org/abs/2106.03097),
    and averaging the last iterates.

    The loss over all samples so far is N times the mean over those of earlier clients plus n times the mean over the
    client's own. The former are out of reach; matching the received function stands for them, each counted once:
    cross-entropy + (N / n)·D. Since earlier clients' samples differ from one's own, a part of each batch can be
    scrambled and only distilled (`widen`): the two functions then agree on more than one's own data. What is handed
    on is the mean of the iterates over the last part of the steps.

    Departures from the paper: there is none; docs/methods/fedtasuki.md holds derivation and results. The first client
    has nothing to distil from and trains plainly. From the second pass on the received model has seen everybody, so
    N is what all others hold: the total less the client's own n.
    """

    epochs: int = 150
    """E, epochs at each client; with the teacher's passes 3 cost as much as 4 plain ones"""
    form: Form = "both"
    """D: KL(q || p), the student's answers p brought to the teacher's q; or half of it and half of the same without
    the true class"""
    weight: Literal["counts", "one", "hop"] = "counts"
    """λ, weight of D: N/n; to compare with: 1, or the number of other clients behind the received model"""
    widen: float = 0.0
    """part of each batch that is only distilled, its images turned, moved, mirrored, and cut together"""
    average: bool = True
    """hand on the mean of the last iterates (--tail of the steps); else what --select says"""
    temperature: float = 1.0
    """τ, softens p and q; D is multiplied by τ²"""
    rounds: int = 1
    """T, passes over all clients (shots); 1: one-shot"""
    order: str = "given"
    """order of the clients: given, reversed, random (drawn anew each round), or names separated by commas"""

    skips: ClassVar[bool] = True  # a hop is left out

    def __post_init__(self) -> None:
        require(self.epochs > 0, "epochs", self.epochs, "1 or more")
        require(self.temperature > 0, "temperature", self.temperature, "greater than 0")
        require(self.rounds > 0, "rounds", self.rounds, "1 or more")
        require(0 <= self.widen < 1, "widen", self.widen, "at least 0 and below 1")

    def check(self, clients: Sequence[str]) -> None:
        """The order must name them."""
        in_order(self.order, clients)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """One hop a step."""
        last = len(fed.clients) - 1
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            if s.model == INITIAL:
                s = s.next(model=fed.call(self.train, client, s.model))
            else:
                s = s.next(model=fed.call(self.distil, client, s.model, min(s.step, last), round > 0))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Handoff:
        """Plain training at the first client."""
        return Handoff(client.fit(model, epochs=self.epochs, training=self.training(client)), client.n)

    @on_client
    def distil(self, client: Client, received: Handoff, others: int, again: bool) -> Handoff:
        """Training on own data that holds on to what `others` clients taught; `again`: this one was among them."""
        seen = received.seen if again else received.seen + client.n
        factor = {"counts": (seen - client.n) / client.n, "one": 1.0, "hop": float(others)}[self.weight]
        model = client.fit(
            received.model,
            epochs=self.epochs,
            objective=Distillation(client.network(received.model), factor, self.form, self.temperature, self.widen),
            extra_passes=1,
            training=self.training(client),
        )
        return Handoff(model, seen)

    def training(self, client: Client) -> Training:
        """How to train: a client's own validation data would choose the epoch that forgets most."""
        return replace(client.training, select="tail") if self.average else client.training

    def steps(self, clients: int) -> int:
        """T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """(T·N - 1)·(M + 8): a model and a count."""
        return (self.rounds * clients - 1) * (model + 8)


@dataclass(frozen=True)
class Distillation:
    """The objective ℓ + λ τ² D of a mini-batch; the teacher sees the same augmented inputs, in evaluation mode.

    The last part of the batch, `widen` of it, is scrambled: it has no label, so it counts in D alone, and whole.
    """

    teacher: nn.Module
    factor: float  # λ
    form: Form
    temperature: float = 1.0  # τ
    widen: float = 0.0

    def __call__(self, forward: Forward, x: Tensor, y: Tensor) -> Tensor:
        """The loss of inputs x (b, ...) with labels y (b,)."""
        own = len(x) - int(self.widen * len(x))
        if own < len(x):
            x = x.clone()  # unlike concatenation, keeps the memory layout
            x[own:] = scrambled(x[own:])
            y = y[:own]
        with torch.no_grad():
            target = self.teacher(x).float() / self.temperature
        logits = forward(x).float()
        soft = logits / self.temperature
        d = own * divergence(soft[:own], target[:own], y, self.form)
        if own < len(x):
            d = d + (len(x) - own) * kl(soft[own:], target[own:])
        return F.cross_entropy(logits[:own], y) + self.factor * self.temperature**2 * d / len(x)


def divergence(logits: Tensor, target: Tensor, y: Tensor, form: Form) -> Tensor:
    """D, the mean over the batch, of the student's logits (b, K) from the teacher's."""
    whole = kl(logits, target)
    return whole if form == "kl" else (whole + kl(without(logits, y), without(target, y))) / 2


def kl(logits: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) of q, the teacher's answers, from p, the student's."""
    return F.kl_div(logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True)


def without(logits: Tensor, y: Tensor) -> Tensor:
    """Logits that give the true class no probability; finite, so that 0·log 0 is 0."""
    return logits.scatter(1, y[:, None], -1e9)


def scrambled(x: Tensor) -> Tensor:
    """Inputs (b, ...) far from any client's data, made of these.

    Images (b, C, H, W) are turned by any angle, mirrored and moved by up to a quarter of their height; then a rectangle
    in a corner of each stays, all around it comes from another one. In other samples each number comes from one of two.
    """
    other = torch.randperm(len(x))
    if x.ndim != 4:
        return torch.where((torch.rand(x.shape) < 0.5).to(x.device), x, x[other])
    x = Augment(crop=x.shape[2] // 4, flip=True, rotation=180)(x)
    corner = torch.ones(len(x), 1, 1, 1, dtype=torch.bool)
    for axis in (2, 3):
        line = torch.arange(x.shape[axis]).view((-1, 1) if axis == 2 else (1, -1))
        start = torch.randint(x.shape[axis], (len(x), 1, 1, 1))
        corner = corner & ((line < start) ^ (torch.rand(len(x), 1, 1, 1) < 0.5))
    return torch.where(corner.to(x.device), x, x[other])
