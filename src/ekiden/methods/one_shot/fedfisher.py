"""FedFisher: the server goes down the quadratic that the clients' Fisher information makes of their
losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ekiden.authoring import Count, Positive, Size, Weights
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import Init
from ekiden.methods.one_shot.average import FisherMethod, Informed, told_diagonal
from ekiden.methods.one_shot.blocks.curvature import (
    Factors,
    Labels,
    Passes,
    halves,
    note_averaged,
    shares,
    size_of_factors,
    unpacked,
)

# β1, β2, ε of the authors' Adam
_MOMENTUM = 0.9
_SQUARES = 0.99
_EPSILON = 0.01
Gradient = Callable[
    [Tensor], Tensor
]  # Σ p_k F_k (W - W_k) at W = average + (the argument), both (P,)


@dataclass(frozen=True)
class FedFisher(FisherMethod):
    """One-shot aggregation by gradient descent on the sum of second-order approximations of the
    clients' losses.

    Divyansh Jhunjhunwala, Shiqiang Wang, Gauri Joshi: FedFisher: Leveraging Fisher Information for
    One-Shot Federated Learning. AISTATS 2024. https://arxiv.org/abs/2403.12329. Near its model W_k
    client k's loss grows like ½(W - W_k)ᵀF_k(W - W_k). The server minimises Σ p_k of these with
    Adam from the average of the models, with a diagonal or a Kronecker-factored (K-FAC) Fisher
    information F_k.

    Departures from the paper: written from its abstract and the authors' code; the text could not
    be obtained. The code keeps the iterate that is best on 500 samples of all clients' training
    data, evaluated at the server every 100 iterations. A federation has no such data, so the result
    is the last iterate, and `iterations` limits how far it goes. As in the code, Adam's moments are
    sums, Σ 0.9^j g and Σ 0.99^j g², without bias correction, and ε is 0.01. Models and factors
    travel completely, in float32; the code rounds them and cuts their rank until they have the
    bytes of one model. Of a symmetric matrix only the lower half travels. With K-FAC, normalisation
    layers and all other layers, which the code's networks do not have, are averaged. Local training
    ends with the epoch that --select names, by default the best on validation data.
    """

    epochs: Count = 30
    """E, epochs at each client"""
    curvature: Literal["kfac", "diagonal"] = "kfac"
    """F_k: A ⊗ B for each linear and convolutional layer, or a diagonal for all layers"""
    fisher: Labels = "expected"
    """labels of the squared gradients: all, weighted by the model's probabilities; one that is
    sampled from them; or the given label"""
    iterations: Count = 2000
    """T, steps of Adam at the server"""
    server_lr: Positive = 0.01
    """η, step size of Adam at the server"""
    weighting: Literal["uniform", "samples"] = "samples"
    """p_k: 1/N, or n_k/n"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""

    def layers(self, layout: Layout) -> Sequence[Layer]:
        """Return all that have parameters, or the linear and convolutional ones."""
        if self.curvature == "diagonal":
            return super().layers(layout)
        return layout.dense

    def measured(self, passes: Passes) -> list[Tensor]:
        """Return the diagonal (P,), or the halves of A and B for each layer."""
        if self.curvature == "diagonal":
            return super().measured(passes)
        return halves(passes)

    def merge(self, sent: Sequence[Informed], layout: Layout) -> Weights:
        """Minimise the quadratic with Adam, from the average."""
        models = [s.trained for s in sent]
        mean = self.average.aggregate(models, layout)
        p = shares(models)
        away = [m.model.params - mean.params for m in models]
        if self.curvature == "diagonal":
            gradient = along_diagonals(list(map(told_diagonal, sent)), away, p)
        else:
            note_averaged("FedFisher", layout)
            factors = [unpacked(s.parts(2 * len(layout.dense)), layout.dense) for s in sent]
            gradient = along_factors(factors, away, p, layout.dense)
        change = self.descend(gradient, torch.zeros_like(mean.params))
        return mean.with_params(mean.params + change)

    def descend(self, gradient: Gradient, change: Tensor) -> Tensor:
        """The authors' Adam: sums instead of running means, so no correction of their bias."""
        first = torch.zeros_like(change)
        second = torch.zeros_like(change)
        for _ in range(self.iterations):
            g = gradient(change)
            first.mul_(_MOMENTUM).add_(g)
            second.mul_(_SQUARES).addcmul_(g, g)
            root = (second + _EPSILON).sqrt_()
            if self.curvature == "diagonal":
                root = second.sqrt().add_(_EPSILON)
            change = change.addcdiv(first, root, value=-self.server_lr)
        return change

    def cost(self, clients: int, model: Size) -> int:
        """N·(M + 4·P) with P parameters, or N·(M + 4·Σ (d(d + 1) + o(o + 1))/2); and 8·N for n_k.

        Layers have d inputs, a bias counting as one, and o outputs.
        """
        entries = size_of_factors(model.layout)
        if self.curvature == "diagonal":
            entries = len(model.network.params)
        return self.average.cost(clients, model) + clients * 4 * entries


def along_diagonals(
    fishers: Sequence[Tensor], away: Sequence[Tensor], p: Sequence[float]
) -> Gradient:
    """Return the gradient with diagonals F_k (P,), for models that lie `away` from the average."""
    total = torch.stack([share * f for f, share in zip(fishers, p, strict=True)]).sum(0)
    pull = torch.stack([share * f * a for f, a, share in zip(fishers, away, p, strict=True)]).sum(0)
    # the gradient of ½ Σ_k p_k (δ - a_k)ᵀ F_k (δ - a_k), where a_k = w_k - mean
    return lambda change: total * change - pull


def along_factors(
    factors: Sequence[Sequence[Factors]],
    away: Sequence[Tensor],
    p: Sequence[float],
    layers: Sequence[Layer],
) -> Gradient:
    """Return the gradient with factors of each client and layer; zero for all other parameters."""
    share = torch.tensor(p)[:, None, None]
    inputs = []
    outputs = []
    for of_layer in zip(*factors, strict=True):
        inputs.append(torch.stack([f.inputs for f in of_layer]).float())
        outputs.append(torch.stack([f.outputs for f in of_layer]).float() * share)
    pull = torch.zeros_like(away[0])
    for a, b, layer in zip(inputs, outputs, layers, strict=True):
        rows = torch.stack([layer.matrix(x) for x in away])
        layer.put(pull, (b @ rows @ a).sum(0))

    def gradient(change: Tensor) -> Tensor:
        found = -pull
        for a, b, layer in zip(inputs, outputs, layers, strict=True):
            # p_k F_k δ = p_k B_k δ A_k, with p_k in B_k
            layer.put(found, layer.matrix(found) + (b @ layer.matrix(change) @ a).sum(0))
        return found

    return gradient
