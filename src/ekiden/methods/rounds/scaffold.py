"""SCAFFOLD: control variates against client drift."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    Fraction,
    Positive,
    Size,
    State,
    Weights,
    on_client,
)
from ekiden.methods.blocks import rounds as shared
from ekiden.methods.blocks.rounds import ModelSums, SecureMethod


@dataclass(frozen=True)
class Controlled(State):
    """The state with the server's control variate c, None for zero."""

    control: Tensor | None = None


@dataclass(frozen=True)
class SCAFFOLD(SecureMethod):
    """Federated averaging whose clients correct each gradient by c - c_i, the drift that their data
    cause.

    Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank Reddi, Sebastian Stich, Ananda
    Theertha Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML 2020.
    https://arxiv.org/abs/1910.06378 (control variates of option II).

    Departures from the paper: c_i⁺ is the mean of the gradients over the local steps. For plain SGD
    that is option II, c_i - c + (w^r - y)/(K·η), up to rounding. It also holds with momentum or
    Adam, where the displacement would need another divisor. Control variates travel in the shape of
    a model, with its running statistics. A limit on the gradient's norm applies to the corrected
    gradient, and c_i⁺ is computed from the limited gradient, as the displacement is.
    """

    rounds: Count = 100
    """T (R in the paper), rounds"""
    epochs: Count = 5
    """E, local epochs per round: K steps"""
    participation: Fraction = 1.0
    """S/N, share of the clients drawn for each round; at least one client"""
    weighting: shared.Weighting = "uniform"
    """p_i, weights of the average: uniform, or numbers of samples; control variates are averaged
    uniformly"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""
    server_lr: Positive = 1.0
    """η_g, learning rate of the server"""
    secure: bool = False
    """add up models in fixed point, so that between machines masks hide all but their sum"""

    fits = shared.every_round
    traits = replace(SecureMethod.traits, private=Tensor)

    def run(self, fed: Fed, s: Controlled) -> Iterator[State]:
        """Yield the state after each round."""
        while s.step < self.rounds:
            x = shared.at_server(fed, s.model)
            c = shared.or_zero(s.control, x.params)
            chosen = self.drawn(fed)
            middle = self.middle(fed, chosen, c, x, x.with_params(c), s.step)
            model = shared.server_step(x, middle.model, self.server_lr)
            s = s.next(model=model, control=middle.vector)
            yield s

    @on_client(gives=shared.alone)
    def train(self, client: Client, model: Weights, control: Weights, round: int) -> shared.Reply:
        """Take K steps along g - c_i + c, then update c_i; y and c_i⁺ - c_i travel."""
        c = control.params
        c_i = shared.or_zero(client.state, c)
        training = self.training(client, round)
        corrected = shared.Corrected(c - c_i, training.l2, training.clip_norm)
        y = client.fit(model, epochs=self.epochs, penalty=corrected, training=training)
        # c_i⁺, option II
        client.state = corrected.mean()
        change = model.with_params(client.state - c_i)
        return shared.Reply.of(client, y, self.weighting, change)

    @on_client(gives=shared.together)
    def add(
        self,
        client: Client,
        model: Weights,
        control: Weights,
        round: int,
        clients: int,
        before: ModelSums | None,
    ) -> ModelSums:
        """Train like `train`, and add the result to the sums."""
        own = self.part(clients, model, self.train(client, model, control, round))
        return client.added(before, own, (model, control, round, clients))

    def cost(self, clients: int, model: Size) -> int:
        """T·m·(4M + 8): model and control variate down and up, a weight up; 8 bytes a value up if
        secure.
        """
        up = self.uploaded(model, 2 * model + 8, vectors=1)
        return self.replies(clients) * (2 * model + up)
