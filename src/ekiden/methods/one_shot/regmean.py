"""RegMean: layer by layer, the weights whose outputs are nearest to those of every client's model on its own data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import INITIAL, Client, Count, Fed, Range, Size, State, Weights, on_client
from ekiden.methods.blocks.one_shot import Init, OneShot, Trained
from ekiden.methods.one_shot.average import Average
from ekiden.methods.one_shot.blocks.curvature import half, length, moments, note_averaged, refuse, shares, whole
from ekiden.training.weights import Layout

_UNSEEN = 1e-6
"""relative eigenvalue of the scaled Gram matrix below which a direction is rounding error"""


class WithGrams(NamedTuple):
    """What a client sends.

    Attributes:
        trained: its model, and n_k if the average needs it.
        grams: the lower half of G = XᵀX of each linear and convolutional layer, a mean over samples.
    """

    trained: Trained
    grams: list[Tensor]


@dataclass(frozen=True)
class RegMean(OneShot):
    """One-shot merging of each linear layer by least squares on the inputs that the clients' models see.

    Xisen Jin, Xiang Ren, Daniel Preotiuc-Pietro, Pengxiang Cheng: Dataless Knowledge Fusion by Merging Weights of
    Language Models. ICLR 2023. https://arxiv.org/abs/2212.09849. W = (Σ G_k)⁻¹ Σ G_k W_k with G_k = X_kᵀX_k, whose
    entries off the diagonal are multiplied by α: the least squares solution for the outputs of all models.

    Departures from the paper: the models come from one round of federated training. Convolutions are treated as linear
    layers over patches, and a bias as the weight of one more input, which is constant 1; the paper averages both. The
    classifier is merged like any layer, since all clients have the same classes. Directions in which no client has
    inputs stay at the average of the models instead of zero (pseudo-inverse) or a singular system. Normalisation layers
    and all others are averaged. Local training ends with the epoch that --select names, by default the best on
    validation data.
    """

    epochs: Count = 200
    """E, epochs at each client"""
    alpha: Annotated[float, Range(least=0, most=1)] = 0.9
    """α, factor of the off-diagonal entries of G_k; 0 gives a weighted average, 1 plain least squares"""
    weighting: Literal["uniform", "samples"] = "samples"
    """p_k, factor of G_k as a mean over samples: 1/N, or n_k/n as in the sum over all samples"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""

    def check_network(self, model: Size) -> None:
        """Refuse a network if the inputs of a linear or convolutional layer cannot be measured."""
        refuse(model.network, model.shape, model.layout.dense)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield one state: train and measure at all clients, merge."""
        if s.step == 0:
            note_averaged("RegMean", fed.layout)
            sent = fed.get([fed.call(self.train, k, INITIAL) for k in fed.clients])
            s = s.next(model=self.merge(sent, fed.layout))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> WithGrams:
        """Train on the plain loss, then make one forward pass for the Gram matrices."""
        trained = self.average.train(client, model)
        found = moments(client.network(trained.model), client.layout.dense, client.batches())
        return WithGrams(trained, [half(gram) for gram in found])

    def merge(self, sent: Sequence[WithGrams], layout: Layout) -> Weights:
        """Return W = M + (Σ p_k G_k)⁻¹ Σ p_k G_k (W_k - M) for each layer, M being the average."""
        models = [s.trained for s in sent]
        mean = self.average.aggregate(models, layout)
        params = mean.params.clone()
        for i, layer in enumerate(layout.dense):
            centre = layer.matrix(mean.params).double()
            total, pull = torch.zeros(layer.inputs, layer.inputs, dtype=torch.float64), torch.zeros_like(centre)
            for s, p in zip(sent, shares(models), strict=True):
                gram = p * shrunk(whole(s.grams[i], layer.inputs), self.alpha)
                total += gram
                pull += (layer.matrix(s.trained.model.params) - centre) @ gram
            # from M instead of 0, so that what no client's inputs show stays at the average
            layer.put(params, (centre + solved(total, pull)).float())
        return mean.with_params(params)

    @property
    def average(self) -> Average:
        """The local training, and the average of all other layers."""
        return Average(epochs=self.epochs, weighting=self.weighting, init=self.init)

    def cost(self, clients: int, model: Size) -> int:
        """N·(M + 4·Σ d(d + 1)/2), d inputs of each layer, its bias counting as one; and 8·N for n_k."""
        numbers = sum(length(layer.inputs) for layer in model.layout.dense)
        return self.average.cost(clients, model) + clients * 4 * numbers


def shrunk(gram: Tensor, alpha: float) -> Tensor:
    """Return G with its off-diagonal entries multiplied by α."""
    return alpha * gram + (1 - alpha) * gram.diagonal().diag()


def solved(gram: Tensor, right: Tensor) -> Tensor:
    """Return X (o, d) of least norm with X·G = `right`; G (d, d) may be singular. Inputs are first scaled alike."""
    scale = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 0, 1 / scale, 0.0)
    # X = R S (S G S)⁺ S with S = diag(G)^-½: so the inputs' units do not decide the rank
    inverse = torch.linalg.pinv(gram * scale[:, None] * scale, rtol=_UNSEEN, hermitian=True)
    found: Tensor = (right * scale) @ inverse * scale
    return found
