"""UA-PDFL: personalised decentralised learning that compares clients by what they make of one
constant input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    NUMBERS,
    Client,
    Count,
    Fed,
    Forward,
    Fraction,
    NonNegative,
    Objective,
    Ref,
    Size,
    State,
    Weights,
    Work,
    mean,
    on_client,
)
from ekiden.methods.blocks.rounds import PersonalMethod, own_models, training_of
from ekiden.methods.gossip import topology

Divergence = Literal["jeffreys", "js"]


class Units(NamedTuple):
    """What a client computes from the unit input."""

    unit: Tensor  # I (C,), probabilities
    aux: Tensor  # I^Aux (A,), the output of its extractor
    n: int  # |D|


class Choice(NamedTuple):
    """What a client wants from its peers this round."""

    similar: list[bool]  # peers whose heads it wants
    adopt: int  # the peer whose complete model it takes, as a position among the peers; -1: none


class Heard(NamedTuple):
    """What a client keeps of this round's representations."""

    aux: Tensor  # I_avg^Aux (A,)
    n: list[int]  # |D_j| of the peers


@dataclass(frozen=True)
class Branches(State):
    """What has moved so far because of the clients' choices."""

    models: int = 0  # number of complete models taken from peers
    bases: int = 0  # number of extractors
    heads: int = 0  # number of heads of peers that were near


@dataclass(frozen=True)
class UAPDFL(PersonalMethod):
    """Unit representations decide whom a client averages with: whose complete model it takes, or
    whose head.

    Hangyu Zhu, Yuxiang Fan, Zhenping Xie: UA-PDFL: A Personalized Approach for Decentralized
    Federated Learning. Neurocomputing (preprint 2024). https://arxiv.org/abs/2412.11674 (Algorithm
    2)

    Each round a client draws peers and compares their networks' outputs for a constant input with
    its own. If all are near, it takes one peer's complete model (client-wise dropout). Otherwise it
    averages all extractors, and only the heads of those that are near (layer-wise personalisation).
    Training keeps its extractor's output for the constant input near the peers' mean.

    Departures from the paper: the auxiliary penalty is computed with the current weights in each
    step (a stored value, as printed, has no gradient) and is the mean over the extractor's outputs,
    as in the authors' code. The unit input consists of ones after normalisation. Extractor and head
    are the declared parts of the model. The optimiser restarts each round. The printed divergence
    is half of Jeffreys' but is called Jensen-Shannon. Its toy values for like and unlike clients,
    0.02 and 0.61, fit Jensen-Shannon, which is at most ln 2 = 0.693. Half of Jeffreys' has no
    bound: it is 13.8 if each of two clients gives the other's class a probability of 1e-6. So
    Jensen-Shannon is the default. Threshold, μ and epochs are not published; divergence and
    threshold were compared on validation data (experiments/ua-pdfl-threshold.toml). In the paper's
    CNN both fully connected layers are personal, as in `cnn_ua_pdfl`; in the library's other
    networks only the last one is. Local training ends with the epoch that --select names, by
    default the best on validation data. The authors' code (commit 794321d) computes the penalty on
    the training batch, makes only the last layer personal, keeps momentum, and starts each client
    from its own model. Widths (32, 64, 128) of `cnn_ua_pdfl` are assumed.
    """

    rounds: Count = 150
    """R, rounds of exchange and training"""
    epochs: Count = 5
    """E, epochs at each client per round"""
    peers: Count = 5
    """N_com, peers that each client draws each round"""
    threshold: NonNegative = 0.1
    """th_I, largest divergence at which a peer counts as near"""
    mu: NonNegative = 0.1
    """μ, weight of the auxiliary penalty"""
    divergence: Divergence = "js"
    """divergence: jensen-shannon, as the paper calls it and as its toy values suggest; or jeffreys,
    half the sum of both Kullback-Leibler divergences, as its formula is printed"""
    dropout: bool = True
    """take one peer's model if all peers are near"""
    personal_heads: bool = True
    """average heads with near peers only; otherwise with all"""
    average_aux: bool = True
    """average the auxiliary penalty over its A entries, as the authors' code does; off: sum over
    them"""
    lr_decay: Fraction = 0.95
    """factor of the learning rate η after each round"""

    traits = replace(
        PersonalMethod.traits, private=Heard, splits_model=True, needs=CLASSES | NUMBERS
    )

    def check(self, clients: Sequence[str]) -> None:
        """Refuse more peers than there are other clients."""
        topology.check(f"peers:{self.peers}", len(clients))

    def run(self, fed: Fed, s: Branches) -> Iterator[State]:
        """Yield the state after each round. The server learns who is near whom, but sees no
        model.
        """
        names = fed.clients
        while s.step < self.rounds:
            mine = own_models(fed, s)
            edges = topology.adjacency(
                f"peers:{self.peers}", len(names), s.step, fed.generator("peers")
            )
            near = [row.nonzero().flatten().tolist() for row in edges]
            units = fed.call_each(self.represent, mine)
            asked = []
            for i, name in enumerate(names):
                others = [units[j] for j in near[i]]
                asked.append(fed.call(self.compare, name, units[i], others))
            choices = fed.get(asked)
            bases: dict[int, Ref[Weights]] = {}
            heads: dict[int, Ref[Weights]] = {}
            models: list[Ref[Weights]] = []
            for i, choice in enumerate(choices):
                # before the first training all have the initial model, so any mean is that
                if not s.personal or choice.adopt >= 0:
                    adopted = mine[near[i][choice.adopt]] if s.personal else INITIAL
                    models.append(fed.call(self.adopt, names[i], adopted, s.step))
                    continue
                similar = [j for j, is_near in zip(near[i], choice.similar, strict=True) if is_near]
                for j in near[i]:
                    bases[j] = bases.get(j) or fed.call(self.base, names[j], mine[j])
                for j in similar:
                    heads[j] = heads.get(j) or fed.call(self.head, names[j], mine[j])
                flags = tuple(choice.similar)
                parts = [bases[j] for j in near[i]], [heads[j] for j in similar]
                models.append(fed.call(self.combine, names[i], mine[i], *parts, flags, s.step))
            # nothing moved in the first round: everybody has the initial model
            moving = choices if s.personal else []
            stay = [c for c in moving if c.adopt < 0]
            s = s.next(
                personal=tuple(models),
                models=s.models + len(moving) - len(stay),
                bases=s.bases + self.peers * len(stay),
                heads=s.heads + sum(sum(c.similar) for c in stay),
            )
            yield s

    @on_client(gives="model")
    def represent(self, client: Client, model: Weights) -> Units:
        """Return I and I^Aux of the model."""
        with torch.no_grad():
            aux, logits = client.probe(client.unit(), model)
        return Units(logits[0].softmax(0), aux[0], client.n)

    @on_client(gives="model")
    def compare(self, client: Client, mine: Units, peers: list[Units]) -> Choice:
        """Decide which peers are near, and whether to take a peer's complete model."""
        aux = torch.stack([u.aux for u in (mine, *peers)])
        client.state = Heard(aux.mean(0), [u.n for u in peers])
        apart = [divergence(mine.unit, u.unit, self.divergence) for u in peers]
        similar = [d < self.threshold or not self.personal_heads for d in apart]
        if self.dropout and all(d <= self.threshold for d in apart):
            draw = client.generator("adopt")
            return Choice(similar, int(torch.randint(len(peers), (), generator=draw)))
        return Choice(similar, -1)

    @on_client(gives="model")
    def base(self, client: Client, model: Weights) -> Weights:
        """The extractor."""
        return (~client.head).of(model)

    @on_client(gives="model")
    def head(self, client: Client, model: Weights) -> Weights:
        """The classifier."""
        return client.head.of(model)

    @on_client(gives="model")
    def adopt(self, client: Client, model: Weights, round: int) -> Weights:
        """Train from a peer's model."""
        return self.train(client, model, round)

    @on_client(gives="model")
    def combine(
        self,
        client: Client,
        model: Weights,
        bases: list[Weights],
        heads: list[Weights],
        similar: tuple[bool, ...],
        round: int,
    ) -> Weights:
        """Train from the average of all extractors and of the heads of those near, by numbers of
        samples.
        """
        head = client.head
        n = cast(Heard, client.state).n
        near = [k for k, is_near in zip(n, similar, strict=True) if is_near]
        base = mean([(~head).of(model), *bases], [client.n, *n])
        own = mean([head.of(model), *heads], [client.n, *near])
        return self.train(client, head.put(own, (~head).put(base, model)), round)

    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """Train on ℓ + μ‖g(X_unit) - I_avg^Aux‖²."""
        training = training_of(client, self.lr_decay, round)
        if not self.mu:
            return client.fit(model, epochs=self.epochs, training=training)
        objective = HeldNear(
            client, client.unit(), cast(Heard, client.state).aux, self.mu, self.average_aux
        )
        return client.fit(model, epochs=self.epochs, objective=objective, training=training)

    def cost(self, clients: int, model: Size) -> int:
        """At most this: nobody takes a whole model, and all peers are near; `moved` says what it
        was.

        Per client and round N_com·(4C + 4A + 8) for the representations and |D|, N_com + 8 for its
        choice, then, from the second round on, N_com·M. Taking a whole model costs M.
        """
        edges = (self.rounds - 1) * clients * self.peers
        return self.moved(Branches(step=self.rounds, bases=edges, heads=edges), clients, model)

    def moved(self, end: Branches, clients: int, model: Size) -> int:
        """The same with the actual choices: M for each model, M_g for each extractor, M_h for each
        head.
        """
        aux, logits = model.network.probe(torch.ones(1, *model.shape))
        units = 4 * logits.numel() + 4 * aux.numel() + 8
        talk = self.peers * units + self.peers + 8
        sent = end.models * model + end.bases * (model - model.head) + end.heads * model.head
        return end.step * clients * talk + sent


@dataclass(frozen=True)
class HeldNear(Objective):
    """ℓ + μ‖g(X_unit) - I_avg^Aux‖², g being the extractor of the model in training."""

    client: Client
    unit: Tensor
    target: Tensor
    mu: float
    average: bool

    def further(self, batch: int) -> Work:
        """Count the pass of the unit input."""
        return Work(1, 1)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a mini-batch."""
        aux, _ = self.client.probe(self.unit)
        return self.client.loss(forward, x, y) + self.mu * auxiliary(
            aux[0], self.target, average=self.average
        )


def auxiliary(aux: Tensor, target: Tensor, *, average: bool) -> Tensor:
    """‖I^Aux - I_avg^Aux‖², or that divided by the number of entries."""
    squared = (aux - target).pow(2)
    return squared.mean() if average else squared.sum()


def divergence(p: Tensor, q: Tensor, kind: Divergence) -> float:
    """Return how far two distributions (C,) are apart, in nats.

    Args:
        p: a distribution.
        q: another one.
        kind: "jeffreys", half the sum of both Kullback-Leibler divergences: no bound, and infinite
            where one has mass and the other has none; "js", the Jensen-Shannon divergence: at most
            ln 2.
    """
    p = p.double()
    q = q.double()
    if kind == "js":
        middle = (p + q) / 2
        return float((relative_entropy(p, middle) + relative_entropy(q, middle)) / 2)
    return float((relative_entropy(p, q) + relative_entropy(q, p)) / 2)


def relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum()
