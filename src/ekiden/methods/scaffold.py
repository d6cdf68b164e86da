"""SCAFFOLD: control variates against client drift."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ekiden.base.checks import Count, Fraction, Positive
from ekiden.engine.federation import Fed
from ekiden.engine.method import Method, State, on_client
from ekiden.engine.worker import Client
from ekiden.methods.blocks.rounds import (
    Corrected,
    Reply,
    Weighting,
    at_server,
    average,
    last_iterate,
    local_training,
    participants,
    sample,
    sample_weight,
    server_step,
)
from ekiden.training.weights import Weights


class Update(NamedTuple):
    """What a client sends back: its model y and weight, and the change of its control variate, c_i⁺ - c_i."""

    reply: Reply
    change: Weights


@dataclass(frozen=True)
class Controlled(State):
    """The state with the server's control variate c, None for zero."""

    control: Tensor | None = None


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Federated averaging whose clients correct each gradient by c - c_i, the drift that their data cause.

    Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank Reddi, Sebastian Stich, Ananda Theertha Suresh:
    SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML 2020. https://arxiv.org/abs/1910.06378
    (control variates of option II).

    Departures from the paper: c_i⁺ is taken as the mean of the gradients over the local steps. For plain SGD that is
    option II, c_i - c + (w^r - y)/(K·η), to rounding; it holds as well with momentum or Adam, where the displacement
    would need another divisor. Control variates travel in the shape of a model, with its running statistics. A limit
    on the gradient's norm acts on the corrected gradient; c_i⁺ counts what it leaves, as the displacement does.
    """

    rounds: Count = 100
    """T (R in the paper), rounds"""
    epochs: Count = 5
    """E, local epochs a round: K steps"""
    participation: Fraction = 1.0
    """S/N, part of the clients drawn for each round, at least one"""
    weighting: Weighting = "uniform"
    """p_i, weights of the average: all the same, or numbers of samples; control variates are averaged uniformly"""
    lr_decay: Fraction = 1.0
    """factor on the local learning rate, once a round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""

    private: ClassVar[Any] = Tensor
    skips: ClassVar[bool] = True  # a round has fewer replies

    selection = last_iterate

    def start(self) -> Controlled:
        """Control variates start at exactly 0."""
        return Controlled()

    def run(self, fed: Fed, s: Controlled) -> Iterator[State]:
        """One round a step; c changes by 1/N of what clients send, so that c is the mean of all c_i at all times."""
        while s.step < self.rounds:
            model = at_server(fed, s.model)
            control = torch.zeros_like(model.params) if s.control is None else s.control
            sent = model.with_params(control)
            asked = [fed.call(self.train, k, model, sent, s.step) for k in sample(fed, self.participation)]
            updates = fed.get(asked, at_least=1)
            for update in updates:
                control = control + update.change.params / len(fed.clients)
            target = average([u.reply for u in updates])
            s = s.next(model=server_step(model, target, self.server_lr), control=control)
            yield s

    @on_client
    def train(self, client: Client, model: Weights, control: Weights, round: int) -> Update:
        """K steps along g - c_i + c; then the new c_i."""
        own = torch.zeros_like(model.params) if client.state is None else client.state
        training = local_training(client, self.lr_decay, round)
        corrected = Corrected(control.params - own, training.l2, training.clip_norm)
        trained = client.fit(model, epochs=self.epochs, penalty=corrected, training=training)
        client.state = corrected.mean()
        reply = Reply(trained, sample_weight(client, self.weighting))
        return Update(reply, model.with_params(client.state - own))

    def steps(self, clients: int) -> int:
        """T rounds."""
        return self.rounds

    def cost(self, clients: int, model: int) -> int:
        """T·m·(4M + 8): model and control variate down and up, a weight up."""
        return self.rounds * participants(clients, self.participation) * (4 * model + 8)
