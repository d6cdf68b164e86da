"""FedELMY: one-shot sequential federated learning with a pool of diverse models at each client."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ekiden.core.federation import Fed, in_order
from ekiden.core.method import INITIAL, Method, State, on_client
from ekiden.core.worker import Client
from ekiden.learning.fit import Penalty
from ekiden.learning.training import require
from ekiden.learning.weights import Weights, distance, mean

_BLOCK = 1 << 16
Measure = Literal["l2", "squared_l2", "l1", "cosine"]


@dataclass(frozen=True)
class FedELMY(Method):
    """One-shot sequential federated learning with a pool of diverse models at each client.

    Naibo Wang, Yuchen Deng, Wenjie Feng, Shichen Fan, Jianwei Yin, See-Kiong Ng: One-Shot Sequential Federated
    Learning for Non-IID Data by Enhancing Local Model Diversity. ACM Multimedia 2024.
    https://arxiv.org/abs/2404.12130 (Algorithm 1; with `rounds` > 1 Algorithm 2; loss ℓ - α d1 + β d2).

    Each client trains S models one after the other, each from the mean of its pool and held apart from the pool
    (d1) and near the received model (d2), and hands on the mean of the pool.

    Departures from the paper: none with `form = "paper"`, the text (each distance brought to one order of magnitude
    below the loss), which measures no worse on PACS and better on digits. `form = "released"` computes the distances as
    the authors' code does: squared, the start point counted as a member of the pool, one divisor for both, taken from
    d2. Gradients of both are in closed form.
    """

    models: int = 5
    """S, models trained at each client"""
    epochs: int = 200
    """E_local, epochs of each model"""
    warmup: int = 30
    """E_w, epochs before the first pool, at the first client"""
    alpha: float = 1.0
    """α, weight of d1, the distance from the pool"""
    beta: float = 1.0
    """β, weight of d2, the distance from the received model"""
    rounds: int = 1
    """T, passes over all clients (shots)"""
    order: str = "given"
    """order of the clients: given, reversed, random (drawn anew each round), or names separated by commas"""
    form: Literal["paper", "released"] = "paper"
    """distances and their scale as in the text, or as in the authors' code"""
    measure: Measure = "l2"
    """distance of two models in the paper's form (Fig. 8); the released form is squared_l2 throughout"""
    average_start: bool = True
    """count the received model as a member of the pool that is averaged"""

    skips: ClassVar[bool] = True  # a hop is left out

    def __post_init__(self) -> None:
        for name in ("models", "epochs", "rounds"):
            require(getattr(self, name) > 0, name, getattr(self, name), "1 or more")
        for name in ("warmup", "alpha", "beta"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")

    def check(self, clients: Sequence[str]) -> None:
        """The order must name them."""
        in_order(self.order, clients)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """One hop a step."""
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            model = s.model
            if s.model == INITIAL and self.warmup:
                model = fed.call(self.warm_up, client, model)
            s = s.next(model=fed.call(self.extend_pool, client, model))
            yield s

    @on_client
    def warm_up(self, client: Client, model: Weights) -> Weights:
        """Algorithm 1, before the first pool: plain training."""
        return client.fit(model, epochs=self.warmup)

    @on_client
    def extend_pool(self, client: Client, model: Weights) -> Weights:
        """Algorithm 1, at each client: S models, each trained from the mean of those before."""
        pool = [model]
        for _ in range(self.models):
            start = mean(pool)
            pool.append(client.fit(start, epochs=self.epochs, penalty=self.diversity(pool, start)))
        return mean(pool if self.average_start else pool[1:])

    def diversity(self, pool: list[Weights], start: Weights) -> Penalty | None:
        """The penalty -α d1 + β d2 for the next model."""
        if not (self.alpha or self.beta):
            return None
        if self.form == "released":
            if len(pool) == 1 and self.alpha == self.beta:
                return None  # the two pulls cancel
            return Released(pool[0].params, start.params, self.alpha, self.beta)
        return Paper([m.params for m in pool], self.measure, self.alpha, self.beta)

    def steps(self, clients: int) -> int:
        """T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """(T·N - 1)·M: only the mean of a pool leaves a client."""
        return (self.rounds * clients - 1) * model


@dataclass(frozen=True)
class Released:
    """The authors' code: squared distances over a, the start point counted as a member of the pool.

    With it the mean of the pool is the start point θ_s, so d1 = ‖θ - θ_s‖² + constant and the pool need not be
    walked: the gradient is (2/a)·[β(θ - θ_0) - α(θ - θ_s)], whatever S is.
    """

    received: Tensor  # θ_0
    start: Tensor  # θ_s
    alpha: float
    beta: float

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add the gradient at `params`; a is a constant in it."""
        factor = 2 / float(released_divisor(loss, distance(params, self.received)))
        if self.alpha != self.beta:
            grad.add_(params, alpha=factor * (self.beta - self.alpha))
        grad.add_(self.start, alpha=factor * self.alpha)
        grad.sub_(self.received, alpha=factor * self.beta)


def released_divisor(loss: Tensor, d2: Tensor) -> Tensor:
    """A = 10^(o(d2) - o(ℓ) + 1), but 1 where that is below 1 or d2 = 0; o is the order of magnitude."""
    exponent = magnitude(d2) - magnitude(loss) + 1
    return torch.where(d2 > 0, 10 ** exponent.clamp(min=0), torch.ones_like(exponent))


def magnitude(x: Tensor) -> Tensor:
    """o(x) = floor(log10 x), in float64: 1000 is of order 3."""
    return torch.floor(torch.log10(x.double().clamp(min=1e-300)))


@dataclass(frozen=True)
class Paper:
    """The text: d1 the mean distance from the pool, d2 that from the received model.

    Each is brought to one order of magnitude below the loss: ℓ = 6.02, d = 45 gives 0.45.
    """

    pool: list[Tensor]  # θ_0, θ_1, ...
    measure: Measure
    alpha: float
    beta: float

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add the gradient at `params`; the scales are constants in it."""
        euclidean = self.measure in ("l2", "squared_l2")
        # What fits into one block is computed once, for distances and gradient.
        blocks = [*self.differences(params)] if euclidean and len(params) <= _BLOCK else None
        if euclidean:
            d = self.squares(blocks or self.differences(params))
        else:
            d = torch.stack([measure(params, m, self.measure) for m in self.pool])
        d = d.sqrt() if self.measure == "l2" else d
        s1, s2 = paper_scale(loss, torch.stack((d.mean(), d[0])))
        scales = (-self.alpha / len(self.pool) * s1).repeat(len(d))
        scales[0] += self.beta * s2
        if euclidean:
            factors = scales / d.clamp(min=1e-12) if self.measure == "l2" else 2 * scales
            for place, difference in blocks or self.differences(params):
                grad[place] += factors.to(grad.dtype) @ difference
        else:
            for member, scale in zip(self.pool, scales.tolist(), strict=True):
                add_gradient(params, member, self.measure, scale, grad)

    def squares(self, blocks: Iterable[tuple[slice, Tensor]]) -> Tensor:
        """(S,) squared distances from the pool."""
        return torch.stack([torch.linalg.vector_norm(d, dim=1) ** 2 for _, d in blocks]).sum(0)

    def differences(self, params: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """θ - θ_t of all members (S, block), block by block, so that no second pool is in memory."""
        for start in range(0, len(params), _BLOCK):
            place = slice(start, start + _BLOCK)
            yield place, params[place] - self.block(place)

    def block(self, place: slice) -> Tensor:
        """A part of all members; of networks that fit into one block, stacked once."""
        return self.whole if len(self.pool[0]) <= _BLOCK else torch.stack([m[place] for m in self.pool])

    @cached_property
    def whole(self) -> Tensor:
        """(S, P) the pool of a small network."""
        return torch.stack(self.pool)


def paper_scale(loss: Tensor, d: Tensor) -> Tensor:
    """What brings d to one order of magnitude below ℓ; 0 where d = 0."""
    return torch.where(d > 0, 10 ** (magnitude(loss) - magnitude(d) - 1), torch.zeros_like(d, dtype=torch.float64))


def measure(a: Tensor, b: Tensor, kind: Measure) -> Tensor:
    """Distance of two (P,) vectors, l1 or cosine."""
    if kind == "l1":
        return (a - b).abs().sum()
    return 1 - torch.cosine_similarity(a, b, dim=0)


def add_gradient(params: Tensor, other: Tensor, kind: Measure, scale: float, grad: Tensor) -> None:
    """Add scale · ∇ measure(params, other) to `grad`; where it has no gradient (equal models), nothing."""
    if kind == "l1":
        grad.add_((params - other).sign_(), alpha=scale)
        return
    norm, norm_other = max(float(params.norm()), 1e-12), max(float(other.norm()), 1e-12)
    cosine = float(params.dot(other)) / (norm * norm_other)
    grad.add_(params, alpha=scale * cosine / norm**2).sub_(other, alpha=scale / (norm * norm_other))
