"""CriticalFL as published: a server that selects more clients while learning is in a critical
period.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    Client,
    Count,
    CountOrZero,
    Fed,
    Fraction,
    NonNegative,
    OwnSamples,
    Size,
    State,
    Weights,
    mean,
    on_client,
    require,
)
from ekiden.core.engine import wire
from ekiden.methods.blocks.rounds import ParallelMethod, at_server, participants
from ekiden.methods.gossip.criticalfl import CriticalPeriods, Learning, at_most, due, fit_watched
from ekiden.methods.gossip.dispfl import add_where, pack


class Upload(NamedTuple):
    """What a client sends back."""

    values: Tensor  # its parameters (P,), or in a critical round those that changed most
    # (⌈P/8⌉,) uint8, the positions of the values, one bit per parameter; None: all
    mask: Tensor | None
    rest: Weights  # no parameters; running statistics and counters
    n: Annotated[int, OwnSamples]  # number of its samples
    norm: float  # its federated gradient norm


@dataclass(frozen=True)
class Selection(State):
    """What the server knows about the periods of learning."""

    learning: Learning | None = None  # from the first round on; of norms that are clients' means
    sent: int = 0  # number of models that were sent back so far
    sparse: int = 0  # number of these of which only the largest changes were sent


@dataclass(frozen=True)
class CriticalFLServer(CriticalPeriods, ParallelMethod):
    """Federated averaging that draws more clients while their gradient norms grow, and few
    afterwards.

    Yan, Wang, Yuan, Li: CriticalFL: A Critical Learning Periods Augmented Client Selection
    Framework for Efficient Federated Learning. KDD 2023. https://doi.org/10.1145/3580305.3599293

    Departures from the paper: what its text does not say follows the authors' code (the window of
    norms, the first checks that always count as critical, the number of clients that doubles and
    halves). A mask says which coordinates are sent, not whether they differ from 0. A coordinate
    that no client sent keeps its value; the code sets it to 0. Norms are taken before any clipping.
    The host is FedAvg. As in the code, checks come before even rounds, and a round uploads the
    largest changes if the last check was critical or there was none yet.
    """

    rounds: Count = 200
    """T, rounds"""
    epochs: Count = 3
    """E, local epochs per round"""
    participation: Fraction = 0.125
    """M_min / N, smallest share of the clients that is drawn; at least one client"""
    cap: Fraction = 0.75
    """M_max / N, largest share of the clients that is drawn; at least one client"""
    upload: Fraction = 0.2
    """share of the parameters that is sent back in critical rounds: those that changed most. 1:
    complete models"""
    delta: NonNegative = 0.01
    """δ, relative growth of the norm above which a period is critical"""
    window: Count = 10
    """number of checks over which norms are averaged"""
    forced: CountOrZero = 5
    """number of first checks that count as critical, whatever the norms"""
    every: Count = 2
    """rounds between checks; the first check is before round 2"""
    lr_decay: Fraction = 1.0
    """factor of the local learning rate after each round"""

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a cap below the least number of clients drawn."""
        least = participants(len(clients), self.participation)
        most = self.most(len(clients))
        require(
            least <= most, "participation", self.participation, f"at most --cap, {most} clients"
        )

    def run(self, fed: Fed, s: Selection) -> Iterator[State]:
        least = participants(len(fed.clients), self.participation)
        while s.step < self.rounds:
            model = at_server(fed, s.model)
            learning = s.learning or Learning(least)
            sparse = learning.critical and self.upload < 1
            chosen = fed.sample(learning.number)
            uploads = fed.get(
                [fed.call(self.train, k, model, sparse, s.step) for k in chosen], at_least=1
            )
            if due(s.step + 1, self.every):
                norm = sum(u.norm for u in uploads) / len(uploads)
                learning = learning.checked(norm, self, least, self.most(len(fed.clients)))
            sent = s.sent + len(chosen)
            parts = s.sparse + sparse * len(chosen)
            s = s.next(model=merge(model, uploads), learning=learning, sent=sent, sparse=parts)
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, sparse: bool, round: int) -> Upload:
        """Train for E epochs; also return η times the mean over epochs of the sum of squared
        gradient norms.
        """
        trained, norm = fit_watched(client, model, self.epochs, self.training(client, round))
        rest = trained.with_params(trained.params[:0])
        if not sparse:
            return Upload(trained.params, None, rest, client.n, norm)
        mask = largest(trained.params - model.params, self.sent(len(model.params)))
        return Upload(trained.params[mask], pack(mask), rest, client.n, norm)

    def sent(self, parameters: int) -> int:
        """Return how many values a client sends back in a critical round."""
        return max(1, round(self.upload * parameters))

    def most(self, clients: int) -> int:
        """M_max."""
        return at_most(self.cap, clients)

    def cost(self, clients: int, model: Size) -> int:
        """At most T·M_max·(2M + 16), or what the largest changes take if that is more; `moved` is
        the actual number.
        """
        most = self.rounds * self.most(clients)
        complete = self.moved(Selection(sent=most), clients, model)
        sparse = self.moved(Selection(sent=most, sparse=most), clients, model)
        return max(complete, sparse)

    def moved(self, end: Selection, clients: int, model: Size) -> int:
        """M down each time; M up or, in critical rounds, the values, a bit for each parameter and
        the statistics.
        """
        network = model.network.weights()
        rest = wire.size((network.buffers, network.counters))
        part = 4 * self.sent(len(network.params)) + ceil(len(network.params) / 8) + rest
        return end.sent * (2 * model + 16) + end.sparse * (part - model)


def largest(change: Tensor, count: int) -> Tensor:
    """Return (P,) bool, True at the `count` largest of these changes."""
    mask = torch.zeros_like(change, dtype=torch.bool)
    mask[change.abs().argsort(descending=True, stable=True)[:count]] = True
    return mask


def merge(model: Weights, uploads: Sequence[Upload]) -> Weights:
    """Return for each coordinate the mean over the clients that sent it, weighted by samples, or
    else the old value.
    """
    total = torch.zeros_like(model.params)
    count = torch.zeros_like(model.params)
    for upload in uploads:
        add_where(upload.mask, upload.values, upload.n, total, count)
    rest = mean([u.rest for u in uploads], [float(u.n) for u in uploads])
    return rest.with_params(torch.where(count > 0, total / count.clamp(min=1), model.params))
