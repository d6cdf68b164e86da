"""SCAFFOLD: control variates against client drift."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ekiden.base.checks import Count, Fraction, Positive
from ekiden.engine.federation import Fed
from ekiden.engine.method import State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.parallel import (
    After,
    ClientRound,
    Closing,
    Exchange,
    ParallelMethod,
    ServerRound,
    Vectors,
    visit,
)
from ekiden.methods.blocks.rounds import (
    Corrected,
    Reply,
    Weighting,
    arrived,
    at_server,
    local_training,
    participants,
    sample,
    sample_weight,
    server_step,
)
from ekiden.training.objective import Penalty
from ekiden.training.weights import Weights


class ControlledReply(NamedTuple):
    """What a client sends back: its model y and weight, and the change of its control variate, c_i⁺ - c_i."""

    reply: Reply
    change: Weights


@dataclass(frozen=True)
class Controlled(State):
    """The state with the server's control variate c, None for zero."""

    control: Tensor | None = None


@dataclass(frozen=True)
class SCAFFOLD(ParallelMethod):
    """Federated averaging whose clients correct each gradient by c - c_i, the drift that their data cause.

    Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank Reddi, Sebastian Stich, Ananda Theertha Suresh:
    SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML 2020. https://arxiv.org/abs/1910.06378
    (control variates of option II).

    Departures from the paper: c_i⁺ is the mean of the gradients over the local steps. For plain SGD that is option II,
    c_i - c + (w^r - y)/(K·η), up to rounding. It also holds with momentum or Adam, where the displacement would need
    another divisor. Control variates travel in the shape of a model, with its running statistics. A limit on the
    gradient's norm applies to the corrected gradient, and c_i⁺ is computed from the limited gradient, as the
    displacement is.
    """

    rounds: Count = 100
    """T (R in the paper), rounds"""
    epochs: Count = 5
    """E, local epochs per round: K steps"""
    participation: Fraction = 1.0
    """S/N, share of the clients drawn for each round; at least one client"""
    weighting: Weighting = "uniform"
    """p_i, weights of the average: uniform, or numbers of samples; control variates are averaged uniformly"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""

    traits = replace(ParallelMethod.traits, private=Tensor)
    exchange: ClassVar[Exchange] = Exchange(sent=1, changes=1, keeps=True)

    def start(self) -> Controlled:
        """Start with control variates of exactly 0."""
        return Controlled()

    def run(self, fed: Fed, s: Controlled) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            model = at_server(fed, s.model)
            memory = () if s.control is None else (s.control,)
            (sent,) = self.opening(model, memory)
            updates = arrived(
                fed, {k: fed.call(self.train, k, model, sent, s.step) for k in sample(fed, self.participation)}
            )
            ends, weights = zip(*(u.reply for u in updates.values()), strict=True)
            closings = {k: Closing((u.change,)) for k, u in updates.items()}
            after = self.merge(
                ServerRound(model, ends, [[k] for k in updates], closings, len(fed.clients), memory, weights)
            )
            s = s.next(model=after.model, control=after.memory[0])
            yield s

    @on_client
    def train(self, client: Client, model: Weights, control: Weights, round: int) -> ControlledReply:
        """Take K steps along g - c_i + c, then update c_i."""
        own = () if client.state is None else (model.with_params(client.state),)
        training = local_training(client, self.lr_decay, round)
        at = ClientRound(client, training, self.epochs, model, (control,), own)
        trained, learned = visit(self, at, model)
        (new,), closing = self.close(at, learned)
        client.state = new.params
        return ControlledReply(Reply(trained, sample_weight(client, self.weighting)), closing.changes[0])

    def penalty(self, at: ClientRound, model: Weights) -> Penalty:
        """C - c_i, added to each gradient."""
        return Corrected(at.sent[0].params - at.kept(0), at.training.l2, at.training.clip_norm)

    def learned(self, at: ClientRound, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """Return the mean gradient over the steps."""
        assert isinstance(penalty, Corrected)
        return (model.with_params(penalty.mean()),)

    def close(self, at: ClientRound, learned: Vectors) -> tuple[Vectors, Closing]:
        """c_i⁺ is the mean gradient; its change travels."""
        return learned, Closing((learned[0].with_params(learned[0].params - at.kept(0)),))

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """Send the server's control variate c."""
        return (start.with_params(memory[0] if memory else torch.zeros_like(start.params)),)

    def merge(self, r: ServerRound) -> After:
        """Change c by 1/N of what clients send, so that it is always the mean of all c_i."""
        control = r.kept(0)
        for closing in r.closings.values():
            control = control + closing.changes[0].params / r.clients
        model = server_step(r.start, r.middle, self.server_lr)
        return After(model, model, (control,))

    def cost(self, clients: int, model: int) -> int:
        """T·m·(4M + 8): model and control variate down and up, a weight up."""
        return self.rounds * participants(clients, self.participation) * (4 * model + 8)
