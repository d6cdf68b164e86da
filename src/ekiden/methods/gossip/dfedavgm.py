"""DFedAvgM: decentralised federated averaging with momentum."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ekiden.authoring import (
    BelowOne,
    Client,
    Count,
    Fed,
    Fraction,
    State,
    Weights,
    on_client,
)
from ekiden.methods.blocks.rounds import every_round, own_models, training_of
from ekiden.methods.gossip.topology import MixingMethod, sends


@dataclass(frozen=True)
class DFedAvgM(MixingMethod):
    """Decentralised averaging: each client trains with heavy-ball momentum, then averages with its
    neighbours.

    Tao Sun, Dongsheng Li, Bao Wang: Decentralized Federated Averaging. IEEE Transactions on Pattern
    Analysis and Machine Intelligence 45(4), 2023. https://arxiv.org/abs/2104.11375

    Momentum starts at zero in every round. The result is one model per client, as it is after the
    last exchange.

    Departures from the paper: local training is counted in epochs; the variant with quantised
    messages is left out; statistics of normalisation layers are averaged like parameters. `topology
    = "peers:K"`, which other papers use in their comparisons, gives weights whose columns need not
    sum to 1, as the paper's theory requires. `heavy_ball = False` trains as --optimizer says;
    FedELMY's authors ran it like this, with Adam, in one round. Local training ends with the epoch
    that --select names, by default the best on validation data.
    """

    rounds: Count = 1
    """T, rounds of training and exchange"""
    epochs: Count = 200
    """E, epochs at each client per round"""
    topology: str = "complete"
    """graph of W: complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching
    or one_peer"""
    heavy_ball: bool = True
    """train with SGD and momentum θ, whatever --optimizer and --momentum say"""
    theta: BelowOne = 0.9
    """θ, momentum of the heavy ball"""
    lr_decay: Fraction = 1.0
    """factor of the learning rate η after each round"""

    fits = every_round

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after each round: train, then x_i = Σ_l w_il z_l over the neighbours
        l.
        """
        while s.step < self.rounds:
            trained = fed.call_each(self.train, own_models(fed, s), s.step)
            s = s.next(personal=self.mixed(fed, s, trained))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """Train the client's model."""
        training = training_of(client, self.lr_decay, round)
        if self.heavy_ball:
            training = replace(training, optimizer="sgd", momentum=self.theta)
        return client.fit(model, epochs=self.epochs, training=training)

    def cost(self, clients: int, model: int) -> int:
        """M along each edge, in both directions, in each round: T·N(N-1)·M for the complete
        graph.
        """
        return sends(self.topology, clients, self.rounds) * model
