"""CriticalFL: hear more peers while learning is in a critical period."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    Client,
    Count,
    CountOrZero,
    Fed,
    Fraction,
    Method,
    NonNegative,
    OwnSamples,
    State,
    Training,
    UserError,
    Weights,
    mean,
    on_client,
    require,
)
from ekiden.methods.blocks.rounds import PersonalMethod, own_models, training_of


class CriticalPeriods(Method):
    """A method with the test of CriticalFL (KDD 2023, https://doi.org/10.1145/3580305.3599293)."""

    delta: float  # δ, relative growth of the windowed mean above which a period is critical
    window: int  # checks over which norms are averaged
    forced: int  # first checks that are critical in any case

    def is_critical(self, norms: Sequence[float]) -> bool:
        """Return whether the windowed mean of the norms has grown by more than δ since the previous
        check.
        """
        if len(norms) <= self.forced:
            return True
        now = norms[-self.window :]
        before = norms[:-1][-self.window :]
        if not before:
            return False
        last = sum(before) / len(before)
        return sum(now) / len(now) - last > self.delta * last


@dataclass(frozen=True)
class Squares:
    """Adds up squared gradient norms, and changes no gradient."""

    progress: dict[str, Tensor] = field(
        default_factory=lambda: {"sum": torch.zeros((), dtype=torch.float64)}
    )

    @property
    def sum(self) -> float:
        """Return the sum over all batches so far."""
        return float(self.progress["sum"])

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add one batch."""
        self.progress["sum"].add_(grad.dot(grad).double().cpu())


def fit_watched(
    client: Client, model: Weights, epochs: int, training: Training
) -> tuple[Weights, float]:
    """Train; return also η times the mean over epochs of the sum of squared gradient norms."""
    squares = Squares()
    trained = client.fit(model, epochs=epochs, training=training, penalty=squares)
    return trained, training.lr * squares.sum / epochs


def at_most(share: float, number: int) -> int:
    """Return so large a share of a number, and at least 1."""
    # 0.29·100 is a little less than 29 in floating point
    return max(1, int(share * number + 1e-9))


def due(round: int, every: int) -> bool:
    """Return whether there is a check before `round`, which counts from 0.

    As in the authors' code: before every second round, or every `every`-th, but not before the
    first of all, when there are no norms yet.
    """
    return round > 0 and (round + 1) % every == 0


def resize(number: int, critical: bool, capped: bool, least: int, most: int) -> int:
    """Double the number in a critical period, unless the cap was reached before; halve it
    otherwise.
    """
    if critical:
        return number if capped else min(most, 2 * number)
    return max(least, number - max(number // 2, 1))


class Learning(NamedTuple):
    """What the checks so far say about how one client learns, or all clients together."""

    number: int  # of peers, or of clients, in the next round
    norms: tuple[float, ...] = ()  # the gradient norm at each check
    # whether the next round is in a critical period, by the last check; True at the start
    critical: bool = True
    capped: bool = False  # whether the count has ever reached its largest value

    def checked(self, norm: float, method: CriticalPeriods, least: int, most: int) -> "Learning":
        """Return the same after one more check."""
        norms = (*self.norms, norm)
        critical = method.is_critical(norms)
        number = resize(self.number, critical, self.capped, least, most)
        return Learning(number, norms, critical, self.capped or number >= most)


class CountedModel(NamedTuple):
    """A model and the number of samples that it was trained on."""

    model: Weights
    n: Annotated[int, OwnSamples]


@dataclass(frozen=True)
class Periods(State):
    """What is known about every client's learning."""

    learning: tuple[Learning, ...] = ()  # of each client, from the first check on
    sent: int = 0  # number of models sent so far


@dataclass(frozen=True)
class CriticalFL(CriticalPeriods, PersonalMethod):
    """Clients average with more peers while their gradient norms grow, and with few afterwards.

    Yan, Wang, Yuan, Li: CriticalFL: A Critical Learning Periods Augmented Client Selection
    Framework for Efficient Federated Learning. KDD 2023. https://doi.org/10.1145/3580305.3599293

    Departures from the paper: in the paper a server selects more clients. Here, as in UA-PDFL's
    comparison, every client is its own server, watches its own norm and draws its own peers.
    Complete models travel in all rounds; the paper's critical uploads contain only the largest
    changes. Norms are taken before any clipping. How UA-PDFL's authors changed the number of peers
    is not published: here it doubles up to a cap and halves again, and is checked before even
    rounds, as in CriticalFL's code. The authors' server has the norms of the clients that it drew;
    here every client has only its own. Local training ends with the epoch that --select names, by
    default the best on validation data.
    """

    rounds: Count = 150
    """R, rounds of training and exchange"""
    epochs: Count = 5
    """E, epochs at each client per round"""
    peers: Count = 5
    """N_com, least number of peers of a client"""
    cap: Fraction = 0.75
    """largest number of a client's peers, as a share of all other clients; at least one"""
    delta: NonNegative = 0.01
    """δ, relative growth of the norm above which a period is critical"""
    window: Count = 10
    """number of checks over which norms are averaged"""
    forced: CountOrZero = 5
    """number of first checks that count as critical, whatever the norms"""
    every: Count = 2
    """rounds between checks; the first check is before round 2"""
    lr_decay: Fraction = 1.0
    """factor of the learning rate η after each round"""

    traits = replace(PersonalMethod.traits, private=float)

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a cap below the least number of peers."""
        if len(clients) < 2:
            raise UserError("criticalfl needs two clients or more: add some, or use local")
        most = self.most(len(clients))
        require(
            self.peers <= most,
            "peers",
            self.peers,
            f"at most {most}, --cap {self.cap:g} of the other clients",
        )

    def run(self, fed: Fed, s: Periods) -> Iterator[State]:
        """Yield the state after each round. The server learns norms, but sees no model."""
        n = len(fed.clients)
        while s.step < self.rounds:
            learning = s.learning or (Learning(self.peers),) * n
            trained = fed.call_each(self.train, own_models(fed, s), s.step)
            draw = fed.generator("peers")
            mixed = []
            for i, k in enumerate(fed.clients):
                drawn = torch.randperm(n - 1, generator=draw)[: learning[i].number]
                circle = sorted([i, *(drawn + (drawn >= i)).tolist()])
                mixed.append(fed.call(self.mix, k, [trained[j] for j in circle]))
            sent = s.sent + sum(one.number for one in learning)
            if s.step + 1 < self.rounds and due(s.step + 1, self.every):
                norms = fed.get(fed.call_all(self.norm))
                learning = tuple(
                    one.checked(norm, self, self.peers, self.most(n))
                    for one, norm in zip(learning, norms, strict=True)
                )
            s = s.next(personal=tuple(mixed), learning=learning, sent=sent)
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> CountedModel:
        """Train locally; keep η times the mean over epochs of the sum of squared gradient norms."""
        training = training_of(client, self.lr_decay, round)
        model, client.state = fit_watched(client, model, self.epochs, training)
        return CountedModel(model, client.n)

    @on_client(gives="model")
    def mix(self, client: Client, models: list[CountedModel]) -> Weights:
        """Return the average of the client's own model and its peers', weighted by numbers of
        samples.
        """
        return mean([m.model for m in models], [float(m.n) for m in models])

    @on_client(gives="model")
    def norm(self, client: Client) -> float:
        """The client's federated gradient norm of this round."""
        return float(client.state)

    def most(self, clients: int) -> int:
        """The largest number of peers."""
        return at_most(self.cap, clients - 1)

    def cost(self, clients: int, model: int) -> int:
        """At most R·N·cap·(M + 8), and 8 for each norm; `moved` gives the actual bytes."""
        sent = self.rounds * clients * self.most(clients)
        return self.moved(Periods(step=self.rounds, sent=sent), clients, model)

    def moved(self, end: Periods, clients: int, model: int) -> int:
        """M + 8 (the number of samples) for each model sent, and 8 for each norm."""
        checks = sum(due(round, self.every) for round in range(min(end.step + 1, self.rounds)))
        return end.sent * (model + 8) + checks * clients * 8
