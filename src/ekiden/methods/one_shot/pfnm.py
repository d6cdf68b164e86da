"""PFNM: probabilistic federated neural matching."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from ekiden.authoring import (
    CLASSES,
    Count,
    CountOrZero,
    Fed,
    Positive,
    Size,
    Traits,
    Weights,
)
from ekiden.core.training.network import Elastic, Form, Network, assemble, matrices
from ekiden.methods.blocks.combining import Init, OneShot, Trained
from ekiden.methods.one_shot.blocks.matching import MatchingMethod, class_shares, match


@dataclass(frozen=True)
class PFNM(MatchingMethod, OneShot):
    """One-shot: hidden units of all models are matched to global units, whose number is inferred.

    Mikhail Yurochkin, Mayank Agarwal, Soumya Ghosh, Kristjan Greenewald, Trong Nghia Hoang, Yasaman
    Khazaeni: Bayesian Nonparametric Federated Learning of Neural Networks. ICML 2019.
    https://arxiv.org/abs/1905.12022.

    A unit is one vector: its bias and its outgoing weights (in the first layer its incoming ones
    too). Global units are a Beta-Bernoulli process with Gaussian values; those of a client are
    noisy copies of some of them. From the last hidden layer to the first, each client's units are
    assigned in turn, given the others'.

    Departures from the paper: written after the released code. `sigma` and `sigma0` are variances,
    as there. One round; γ, σ and σ0 are fixed, where the code picks the best on the test set.
    Convolutions are supported, too: a weight becomes a kernel, or the positions of a flattened
    channel. BatchNorm is folded into the layer before it, and the result has none. A single model
    stays as it is. Every unit of a layer is assigned, also with more than 700 of them. Local
    training ends with the epoch that --select names, by default the best on validation data.
    """

    epochs: Count = 10
    """E, epochs at each client"""
    gamma: Positive = 1.0
    """γ, mass of the process: with a larger value more units remain separate"""
    sigma: Positive = 1.0
    """σ², variance of a client's units around the global ones"""
    sigma0: Positive = 1.0
    """σ0², variance of the global units"""
    sweeps: CountOrZero = 5
    """it, how often every client's units are matched again"""
    bias: float = 0.1
    """prior mean of biases; the prior mean of weights is 0"""
    init: Init = "different"
    """initial models: the same for all clients, or a different one for each"""

    traits = Traits(needs=CLASSES)

    def joined(self, fed: Fed, sent: Sequence[Trained]) -> Weights:
        """Match the models' units and merge them."""
        elastics = [Elastic(fed.network(t.model)).cpu() for t in sent]
        models = [matrices(Network(e)) for e in elastics]
        shares = class_shares(torch.stack([t.counts for t in sent]))
        merged = self.merge(models, elastics[0].forms, shares, fed.generator("order"))
        return assemble(elastics[0], merged).weights()

    def merge(
        self,
        models: Sequence[Sequence[Tensor]],
        forms: Sequence[Form],
        shares: Tensor,
        generator: Generator,
    ) -> list[Tensor]:
        """Return the layers of the global model, as matrices.

        Args:
            models: of each client, its layers.
            forms: how these are made up.
            shares: (N, K) of the samples of each class, those of each client.
            generator: draws the orders.
        """
        if len(models) == 1:
            return list(models[0])
        # the layer that reads the units, with its outputs in global order, and their precisions
        above = [m[-1].double() for m in models]
        precise = list(shares.double() / self.sigma)
        merged = [self.output_bias([forms[-1].split(layer)[1] for layer in above], shares)]
        for i in reversed(range(len(forms) - 1)):
            rows = []
            precisions = []
            for model, reader, known in zip(models, above, precise, strict=True):
                own = model[i].double()
                if i:
                    own = forms[i].split(own)[1]
                # what reads a unit: a row of outgoing weights for each unit
                out = forms[i + 1].split(reader)[0].transpose(0, 1).flatten(1)
                rows.append(torch.cat([own, out], 1))
                even = torch.full((own.shape[1],), 1 / self.sigma, dtype=torch.float64)
                # (D,): 1/σ² for what a unit reads; for what reads it, the precision of the output
                # that it feeds
                precisions.append(torch.cat([even, known.repeat_interleave(forms[i + 1].fan)]))
            bias = int(forms[i].bias)
            prior = self.prior(own.shape[1] - bias, bias, out.shape[1])
            units, atoms = match(rows, precisions, prior, self, generator)
            mine = atoms[:, : own.shape[1]]
            outgoing = atoms[:, own.shape[1] :]
            blocks = outgoing.reshape(len(atoms), -1, forms[i + 1].fan)
            incoming = blocks.transpose(0, 1).flatten(1)
            merged[0] = torch.cat([incoming, merged[0]], 1)
            merged.insert(0, mine)
            above = []
            for model, places in zip(models, units, strict=True):
                own = model[i].double()
                rest = own.new_zeros(len(atoms), own.shape[1])
                above.append(rest.index_copy(0, places, own))
            known = torch.full((len(atoms),), 1 / self.sigma, dtype=torch.float64)
            precise = [known] * len(models)
        return merged

    def output_bias(self, biases: Sequence[Tensor], shares: Tensor) -> Tensor:
        """Return (K, 1) the classifier's biases, each class by its shares (N, K); (K, 0) without
        biases.
        """
        weights = shares.double()[:, :, None] / self.sigma
        total = (weights * torch.stack(list(biases))).sum(0) + self.bias / self.sigma0
        return total / (weights.sum(0) + 1 / self.sigma0)

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return the network with the widths from the matching, without BatchNorm."""
        return Elastic(network)

    def cost(self, clients: int, model: Size) -> int:
        """N·(M + 4·K): models and class counts."""
        return clients * (model + 4 * model.layout.classes)
