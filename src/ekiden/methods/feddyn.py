"""FedDyn: dynamic regularisation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from ekiden.base.checks import Count, Fraction, NonNegative
from ekiden.engine.federation import Fed
from ekiden.engine.method import INITIAL, Model, State, on_client
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
    displacement,
    visit,
)
from ekiden.methods.blocks.rounds import (
    Proximal,
    arrived,
    at_server,
    local_training,
    participants,
    sample,
)
from ekiden.training.objective import Penalty
from ekiden.training.weights import Weights


@dataclass(frozen=True)
class Dynamic(State):
    """The state with the server's model and memory.

    Attributes:
        cloud: the model from which clients start; it lies outside the hull of their models.
        h: the server's memory, None for zero.
    """

    cloud: Model = INITIAL
    h: Tensor | None = None


@dataclass(frozen=True)
class FedDyn(ParallelMethod):
    """Federated averaging whose local losses are tilted so that in the limit their minima agree with the global one.

    Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul Whatmough, Venkatesh Saligrama:
    Federated Learning Based on Dynamic Regularization. ICLR 2021. https://arxiv.org/abs/2111.04263
    (local loss L_i(w) - ⟨λ_i, w⟩ + α/2 ‖w - w^r‖²).

    Departures from the paper: λ_i stays at its client, where the authors' code keeps it at the server and sends it.
    Their code also divides α by a client's relative size; the paper and this method do not. By default the result is
    the mean of the clients' models, which that code also reports, and not the model that is broadcast.
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
    """the model that is evaluated and kept: the mean of the clients' models, or the broadcast model, mean - h/α"""

    traits = replace(ParallelMethod.traits, private=Tensor)
    exchange: ClassVar[Exchange] = Exchange(keeps=True)
    host_settings: ClassVar[tuple[str, ...]] = ("alpha",)
    host_anchor: ClassVar[Anchor | None] = "received"

    def start(self) -> Dynamic:
        """Start with zero memory."""
        return Dynamic()

    def run(self, fed: Fed, s: Dynamic) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            start = at_server(fed, s.cloud)
            models = arrived(fed, {k: fed.call(self.train, k, start, s.step) for k in sample(fed, self.participation)})
            closings = dict.fromkeys(models, Closing())
            memory = () if s.h is None else (s.h,)
            after = self.merge(
                ServerRound(start, list(models.values()), [[k] for k in models], closings, len(fed.clients), memory)
            )
            model = after.model if self.result == "mean" else after.start
            s = s.next(model=model, cloud=after.start, h=after.memory[0] if after.memory else None)
            yield s

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """Train for E epochs on the regularised loss, then update λ_i."""
        own = () if client.state is None else (model.with_params(client.state),)
        at = ClientRound(client, local_training(client, self.lr_decay, round), self.epochs, model, memory=own)
        trained, learned = visit(self, at, model)
        if self.alpha:
            (new,), _ = self.close(at, learned)
            client.state = new.params
        return trained

    def penalty(self, at: ClientRound, model: Weights) -> Penalty | None:
        """-⟨λ_i, w⟩ + (α/2)‖w - anchor‖²."""
        slope = -at.memory[0].params if at.memory else None
        return Proximal(self.alpha, at.anchored(model), slope) if self.alpha else None

    def needs_start(self, anchor: Anchor) -> bool:
        """Return whether the anchor is w^r."""
        return anchor == "global"

    def learned(self, at: ClientRound, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return w_out - w_in."""
        return (displacement(model, trained),)

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """λ_i ← λ_i - α · displacement."""
        return (learned[0].with_params(at.kept(0) - self.alpha * learned[0].params),), Closing()

    def merge(self, r: ServerRound) -> After:
        """Update h by the displacements of those who answered, divided by all N; broadcast the mean minus h/α."""
        middle = r.middle
        if not self.alpha:
            return After(middle, middle)
        moved = (middle.params - r.start.params) * len(r.closings)
        h = r.kept(0) - self.alpha / r.clients * moved
        return After(middle, middle.with_params(middle.params - h / self.alpha), (h,))

    def cost(self, clients: int, model: int) -> int:
        """T·m·2M: only models move."""
        return self.rounds * participants(clients, self.participation) * 2 * model
