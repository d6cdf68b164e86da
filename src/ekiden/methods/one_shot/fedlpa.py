"""FedLPA: the mean of the product of the clients' layer-wise posteriors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from ekiden.authoring import Count, Positive, Size, Weights
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import Init
from ekiden.methods.one_shot.average import FisherMethod, Informed
from ekiden.methods.one_shot.blocks.curvature import (
    Labels,
    Passes,
    halves,
    note_averaged,
    shares,
    size_of_factors,
    unpacked,
)

# relative residual at which the linear system counts as solved: below float32's rounding of models
_TOLERANCE = 1e-8
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FedLPA(FisherMethod):
    """One-shot aggregation of posteriors from a Laplace approximation for each layer at each
    client.

    Xiang Liu, Liangxi Liu, Feiyang Ye, Yunheng Shen, Xia Li, Linshan Jiang, Jialin Li: FedLPA:
    One-shot Federated Learning with Layer-Wise Posterior Aggregation. NeurIPS 2024.
    https://arxiv.org/abs/2310.00339. Layer by layer the server solves Σ p_k B_k W A_k = Σ p_k B_k
    W_k A_k, where A_k ⊗ B_k is client k's empirical Fisher information with √λ·I added to both
    factors.

    Departures from the paper: written from its abstract and the authors' code; the text could not
    be obtained. The system is solved by conjugate gradients, preconditioned with the Kronecker
    product of the mean factors, until the residual is 1e-8 of the right side. The code starts from
    the solution with mean factors, takes 10,000 plain gradient steps on the mean squared residual,
    and prints the one of both solutions that is better on test data (`solve = "mean-factors"` gives
    the first). Factors are measured in evaluation mode. Of a symmetric matrix only the lower half
    travels. Normalisation layers and all other layers are averaged. Local training ends with the
    epoch that --select names, by default the best on validation data.
    """

    epochs: Count = 200
    """E, epochs at each client"""
    damping: Positive = 0.001
    """λ; its root is added to the diagonals of A_k and B_k"""
    solve: Literal["system", "mean-factors"] = "system"
    """the linear system, or (Σ p_k B_k)⁻¹ (Σ p_k B_k W_k A_k) (Σ p_k A_k)⁻¹"""
    iterations: Count = 1000
    """most conjugate gradient steps in each layer"""
    fisher: Labels = "given"
    """labels of the squared gradients: all, weighted by the model's probabilities; one that is
    sampled from them; or the given label"""
    weighting: Literal["uniform", "samples"] = "samples"
    """p_k: 1/N, or n_k/n"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""

    def layers(self, layout: Layout) -> Sequence[Layer]:
        """Return the linear and convolutional layers."""
        return layout.dense

    def measured(self, passes: Passes) -> list[Tensor]:
        """Return the halves of A and B for each layer."""
        return halves(passes)

    def merge(self, sent: Sequence[Informed], layout: Layout) -> Weights:
        """Solve each linear or convolutional layer's system; average all other layers."""
        note_averaged("FedLPA", layout)
        models = [s.trained for s in sent]
        mean = self.average.aggregate(models, layout)
        share = torch.tensor(shares(models)).double()[:, None, None]
        factors = [unpacked(s.parts(2 * len(layout.dense)), layout.dense) for s in sent]
        params = mean.params.clone()
        for i, layer in enumerate(layout.dense):
            a = torch.stack([damped(f[i].inputs, self.damping) for f in factors])
            b = torch.stack([damped(f[i].outputs, self.damping) for f in factors])
            rows = torch.stack([layer.matrix(m.model.params) for m in models]).double()
            middle = layer.matrix(mean.params).double()
            layer.put(params, self.solved(a, share * b, share, rows, middle).float())
        return mean.with_params(params)

    def solved(self, a: Tensor, b: Tensor, share: Tensor, rows: Tensor, mean: Tensor) -> Tensor:
        """W (o, d) of one layer, from A_k (N, d, d), p_k B_k (N, o, o), p_k (N, 1, 1), W_k (N, o,
        d) and their mean.
        """
        left = torch.linalg.inv(b.sum(0))
        right = torch.linalg.inv((share * a).sum(0))
        if self.solve == "mean-factors":
            by_means: Tensor = (
                left @ (b @ rows @ a).sum(0) @ right
            )  # (Σ p_k B_k)⁻¹ (Σ p_k B_k W_k A_k) (Σ p_k A_k)⁻¹
            return by_means
        # Σ p_k B_k X A_k = Σ p_k B_k (W_k - mean) A_k for X = W - mean, so that equal models stay
        # as they are.
        target = (b @ (rows - mean) @ a).sum(0)
        change = conjugate(
            lambda x: (b @ x @ a).sum(0), lambda x: left @ x @ right, target, self.iterations
        )
        return mean + change

    def cost(self, clients: int, model: Size) -> int:
        """N·(M + 4·Σ (d(d + 1) + o(o + 1))/2); and 8·N for n_k.

        Layers have d inputs, a bias counting as one, and o outputs.
        """
        return self.average.cost(clients, model) + clients * 4 * size_of_factors(model.layout)


def damped(factor: Tensor, damping: float) -> Tensor:
    """A + √λ·I."""
    return factor + sqrt(damping) * torch.eye(len(factor), dtype=factor.dtype)


def conjugate(system: Map, precondition: Map, target: Tensor, iterations: int) -> Tensor:
    """X with system(x) = target, by preconditioned conjugate gradients from 0.

    Stops early where rounding has made the system or the preconditioner indefinite.
    """
    x = torch.zeros_like(target)
    residual = target.clone()
    towards = precondition(residual)
    direction = towards
    gain = float((residual * towards).sum())
    enough = _TOLERANCE * float(target.norm())
    for _ in range(iterations):
        image = system(direction)
        curvature = float((direction * image).sum())
        if float(residual.norm()) <= enough or curvature <= 0 or gain <= 0:
            break
        x = x + gain / curvature * direction
        residual = residual - gain / curvature * image
        towards = precondition(residual)
        gain, before = float((residual * towards).sum()), gain
        direction = towards + gain / before * direction
    return x
