"""FedELMY: one-shot sequential federated learning with a pool of diverse models at each client."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ekiden.authoring import (
    INITIAL,
    Client,
    Count,
    CountOrZero,
    Fed,
    Method,
    NonNegative,
    Penalty,
    State,
    Traits,
    Weights,
    mean,
    on_client,
)
from ekiden.engine.federation import in_order
from ekiden.methods.blocks.glam import Passing, alignment, transfers
from ekiden.methods.chain.fedelmy.diversity import Measure, Paper, Released


@dataclass(frozen=True)
class FedELMY(Method):
    """One-shot sequential federated learning with a pool of diverse models at each client.

    Naibo Wang, Yuchen Deng, Wenjie Feng, Shichen Fan, Jianwei Yin, See-Kiong Ng: One-Shot Sequential Federated
    Learning for Non-IID Data by Enhancing Local Model Diversity. ACM Multimedia 2024.
    https://arxiv.org/abs/2404.12130 (Algorithm 1; with `rounds` > 1 Algorithm 2; loss ℓ - α d1 + β d2).

    Each client trains S models one after the other. Each model starts from the mean of the client's pool, is pushed
    away from the pool (d1) and kept near the received model (d2). The client hands on the mean of the pool.

    Departures from the paper: `order` is the given one and not redrawn each round, as in the authors' code. Otherwise
    `form = "paper"` follows the text (each distance is scaled to one order of magnitude below the loss); it measures no
    worse on PACS and better on digits. `form = "released"` computes the distances as the authors' code does: squared,
    with the start point as a member of the pool, and with one divisor for both, taken from d2. Gradients of both
    distances are in closed form. Beyond the paper: GLAM, the loss of SPFL.
    """

    models: Count = 5
    """S, models trained at each client"""
    epochs: Count = 200
    """E_local, epochs of each model"""
    warmup: CountOrZero = 30
    """E_w, epochs before the first pool, at the first client"""
    alpha: NonNegative = 1.0
    """α, weight of d1, the distance from the pool"""
    beta: NonNegative = 1.0
    """β, weight of d2, the distance from the received model"""
    rounds: Count = 1
    """T, passes over all clients (shots)"""
    order: str = "given"
    """order of the clients: given, reversed, random (redrawn each round), or names separated by commas"""
    form: Literal["paper", "released"] = "paper"
    """distances and their scale: as in the text, or as in the authors' code"""
    measure: Measure = "l2"
    """distance between two models in the paper's form (its Fig. 8 or 9, by version); the released form always uses
    squared_l2"""
    average_start: bool = True
    """count the received model as a member of the pool that is averaged"""
    align_previous: NonNegative = 0.0
    """τ, weight of GLAM's alignment with the received model (see SPFL)"""
    align_global: NonNegative = 0.0
    """ρ, weight of GLAM's alignment with the model that the round began with"""

    traits = Traits(skips=True)  # a hop is left out

    def check(self, clients: Sequence[str]) -> None:
        """Refuse an order that does not name the clients."""
        in_order(self.order, clients)

    def start(self) -> Passing:
        """Start before the first pass."""
        return Passing()

    def run(self, fed: Fed, s: Passing) -> Iterator[State]:
        """Yield the state after each hop."""
        while s.step < self.steps(len(fed.clients)):
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            model = s.model
            if s.model == INITIAL and self.warmup:
                model = fed.call(self.warm_up, client, model)
            if self.align_global:
                s = s.in_pass(round)
            origin = s.origin if self.align_global and s.origin != model else None
            s = s.next(model=fed.call(self.extend_pool, client, model, origin))
            yield s

    @on_client
    def warm_up(self, client: Client, model: Weights) -> Weights:
        """Train on the plain loss before the first pool (Algorithm 1)."""
        return client.fit(model, epochs=self.warmup)

    @on_client
    def extend_pool(self, client: Client, model: Weights, origin: Weights | None = None) -> Weights:
        """Train S models, each from the mean of those before (Algorithm 1, at each client)."""
        pool, origin = [model], model if origin is None else origin  # the first client of a round receives it
        objective = alignment(client, origin, model, self.align_previous, self.align_global)
        for _ in range(self.models):
            start = mean(pool)
            penalty = self.diversity(pool, start)
            pool.append(client.fit(start, epochs=self.epochs, penalty=penalty, objective=objective))
        return mean(pool if self.average_start else pool[1:])

    def diversity(self, pool: list[Weights], start: Weights) -> Penalty | None:
        """Return the penalty -α d1 + β d2 for the next model."""
        if not (self.alpha or self.beta):
            return None
        if self.form == "released":
            if len(pool) == 1 and self.alpha == self.beta:
                return None  # the two pulls cancel
            return Released(pool[0].params, start.params, self.alpha, self.beta)
        return Paper([m.params for m in pool], start.params, self.measure, self.alpha, self.beta)

    def steps(self, clients: int) -> int:
        """Return T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """(T·N - 1)·M: only the mean of a pool leaves a client; with ρ (T - 1)(N - 2)·M more.

        Less where a client is the last of a pass and the first of the next.
        """
        return transfers(clients, self.rounds, self.align_global) * model
