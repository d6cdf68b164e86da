"""FedPer: a shared extractor, a classifier for each client."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    Fraction,
    OwnSamples,
    Size,
    State,
    Weights,
    mean,
    on_client,
)
from ekiden.methods.blocks.rounds import every_round, own_models, training_of
from ekiden.methods.gossip.topology import GossipMethod, sends

BY_SERVER = "server"


class Share(NamedTuple):
    """What a client shows: its extractor, and how many samples it was trained on."""

    base: Weights
    n: Annotated[int, OwnSamples]


@dataclass(frozen=True)
class FedPer(GossipMethod):
    """Personalisation layers: clients average their extractors and keep their classifiers.

    Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh, Sunav Choudhary: Federated
    Learning with Personalization Layers. Preprint, 2019. https://arxiv.org/abs/1912.00818

    Both parts are trained jointly. The result is one model per client: the new extractor with the
    client's own head.

    Departures from the paper: the personal layers are the model's declared head, not its last K
    blocks. All clients take part in every round, and all heads start alike. A server is not needed:
    over the complete graph every client computes the average that a server would, with the same
    bits. `topology = "server"` is the paper's exchange, and `"peers:5"` the one in which UA-PDFL's
    authors compare with it. Statistics of normalisation layers go with their part. Local training
    ends with the epoch that --select names, by default the best on validation data.
    """

    rounds: Count = 150
    """R, rounds of training and exchange"""
    epochs: Count = 5
    """E, epochs at each client per round"""
    topology: str = "complete"
    """who averages with whom: server (all, through a server), complete, ring, torus, star,
    exponential, erdos_renyi:P[:SEED], peers:K, matching or one_peer"""
    lr_decay: Fraction = 1.0
    """factor of the learning rate η after each round"""

    fits = every_round
    traits = replace(GossipMethod.traits, splits_model=True)

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a graph that does not fit the clients or is not connected."""
        if self.topology != BY_SERVER:
            super().check(clients)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            trained = fed.call_each(self.train, own_models(fed, s), s.step)
            shares = fed.call_each(self.share, trained)
            if self.topology == BY_SERVER:
                base = average(fed.get(shares))
                mixed = fed.call_each(self.take, trained, base)
            else:
                mixed = ()
                for k, w, circle in zip(fed.clients, trained, self.circles(fed, s), strict=True):
                    mixed += (fed.call(self.mix, k, w, [shares[j] for j in circle]),)
            s = s.next(personal=mixed)
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """Train extractor and head together."""
        training = training_of(client, self.lr_decay, round)
        return client.fit(model, epochs=self.epochs, training=training)

    @on_client(gives="model")
    def share(self, client: Client, model: Weights) -> Share:
        """Return the part that others see."""
        return Share((~client.head).of(model), client.n)

    @on_client(gives="model")
    def mix(self, client: Client, model: Weights, shares: list[Share]) -> Weights:
        """Return the average extractor with the client's own head."""
        return (~client.head).put(average(shares), model)

    @on_client(gives="model")
    def take(self, client: Client, model: Weights, base: Weights) -> Weights:
        """Return the server's extractor with the client's own head."""
        return (~client.head).put(base, model)

    def cost(self, clients: int, model: Size) -> int:
        """M_g, the extractor's part of M, and 8 bytes for n along each edge; with a server
        R·N·(2·M_g + 8).
        """
        base = model - model.head
        if self.topology == BY_SERVER:
            return self.rounds * clients * (2 * base + 8)
        return sends(self.topology, clients, self.rounds) * (base + 8)


def average(shares: Sequence[Share]) -> Weights:
    """Return Σ n_j g_j / Σ n_j."""
    return mean([s.base for s in shares], [float(s.n) for s in shares])
