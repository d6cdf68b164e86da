"""Fisher merging: an average of models in which each weight counts as much as its client's data
determine it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ekiden.authoring import Count, Positive, Size, Weights
from ekiden.core.training.weights import Layout
from ekiden.methods.blocks.combining import Init
from ekiden.methods.one_shot.average import FisherMethod, Informed, told_diagonal
from ekiden.methods.one_shot.blocks.curvature import Labels, shares


@dataclass(frozen=True)
class FisherMerging(FisherMethod):
    """One-shot averaging in which each weight is weighted by the clients' Fisher information about
    it.

    Michael Matena, Colin Raffel: Merging Models with Fisher-Weighted Averaging. NeurIPS 2022.
    https://arxiv.org/abs/2111.09832. W = Σ p_k F_k W_k / Σ p_k F_k for each weight, F_k being the
    diagonal of the Fisher information of client k's model on its data: the mode of the product of
    the clients' Laplace approximations.

    Departures from the paper: the models come from one round of federated training. p_k = n_k/n;
    the product of posteriors has this factor if F_k is a mean over samples. The paper searches the
    coefficients on validation data. Every F_k is at least `floor`; in the authors' code only that
    of a target model is, and a federation has no target model. They divide each F_k by its norm;
    here this is off by default (`normalise`), as in the experiments of FedFisher. Running
    statistics of normalisation layers, which have no Fisher information, are averaged. Local
    training ends with the epoch that --select names, by default the best on validation data.
    """

    epochs: Count = 200
    """E, epochs at each client"""
    fisher: Labels = "expected"
    """labels of the squared gradients: all, weighted by the model's probabilities; one that is
    sampled from them; or the given label"""
    floor: Positive = 1e-6
    """least F_k of a weight; weights that no client has more information about are averaged"""
    normalise: bool = False
    """divide each F_k by its norm, so that models that are sure of all their answers count as much
    as others"""
    weighting: Literal["uniform", "samples"] = "samples"
    """p_k: 1/N, or n_k/n"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""

    def merge(self, sent: Sequence[Informed], layout: Layout) -> Weights:
        """Return Σ p_k F_k W_k / Σ p_k F_k."""
        models = [s.trained for s in sent]
        result = self.average.aggregate(models, layout)
        params = result.params.clone()
        total = torch.zeros(len(result.params), dtype=torch.float64)
        for s, p in zip(sent, shares(models), strict=True):
            fisher = told_diagonal(s).double().clamp(min=self.floor)
            factor = p
            if self.normalise:
                factor /= float(fisher.norm())
            fisher *= factor
            total += fisher
            # a running mean, so that equal models stay as they are
            params.lerp_(s.trained.model.params, (fisher / total).float())
        return result.with_params(params)

    def cost(self, clients: int, model: Size) -> int:
        """N·(M + 4·P), P trainable parameters; and 8·N for n_k."""
        return self.average.cost(clients, model) + clients * 4 * len(model.network.params)
