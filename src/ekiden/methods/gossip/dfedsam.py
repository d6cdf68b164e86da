"""DFedSAM: decentralised federated learning with sharpness-aware local steps and several gossip
steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    Fraction,
    NonNegative,
    State,
    Weights,
    on_client,
)
from ekiden.methods.blocks.rounds import own_models, training_of
from ekiden.methods.gossip.topology import MixingMethod, sends


@dataclass(frozen=True)
class DFedSAM(MixingMethod):
    """Decentralised averaging of models trained towards flat minima: sharpness-aware steps, then Q
    gossip steps.

    Yifan Shi, Li Shen, Kang Wei, Yan Sun, Bo Yuan, Xueqian Wang, Dacheng Tao: Improving the Model
    Consistency of Decentralized Federated Learning. ICML 2023. https://arxiv.org/abs/2302.04083
    (DFedSAM; with `gossip_steps` > 1 DFedSAM-MGS).

    The result is one model per client, as it is after the last exchange.

    Departures from the paper: local training is counted in epochs, and --momentum may be added to
    its gradients, from zero in each round; statistics of normalisation layers are averaged like
    parameters and updated only in the first of the two passes. One round over the complete graph is
    the one-shot form that FedELMY compares with; there Q > 1 changes nothing. Local training ends
    with the epoch that --select names, by default the best on validation data.
    """

    rounds: Count = 1
    """T, rounds of training and exchange"""
    epochs: Count = 200
    """E, epochs at each client per round"""
    topology: str = "complete"
    """graph of W: complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching
    or one_peer"""
    gossip_steps: Count = 1
    """Q, exchanges after each training"""
    radius: NonNegative = 0.01
    """ρ, radius of the ascent step, whatever --rho says"""
    lr_decay: Fraction = 1.0
    """factor of the learning rate η after each round"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after each round: train, then Q exchanges over the same graph: x = W^Q
        z.
        """
        while s.step < self.rounds:
            trained = fed.call_each(self.train, own_models(fed, s), s.step)
            s = s.next(personal=self.mixed(fed, s, trained, self.gossip_steps))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights, round: int) -> Weights:
        """Train with the gradient at w + ρ g / ‖g‖ and the step from w."""
        sam = replace(training_of(client, self.lr_decay, round), optimizer="sam", rho=self.radius)
        return client.fit(model, epochs=self.epochs, training=sam)

    def cost(self, clients: int, model: int) -> int:
        """Q times M along each edge, in both directions, in each round."""
        return self.gossip_steps * sends(self.topology, clients, self.rounds) * model
