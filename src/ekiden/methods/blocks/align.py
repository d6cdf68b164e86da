"""Bring Gaussian features of different domains together by optimal transport to their barycentre.

As in SLOT-Align (ICML 2026, https://arxiv.org/abs/2606.16655), read in a public note only. The fixed point: Pedro C.
Álvarez-Esteban, E. del Barrio, J.A. Cuesta-Albertos, C. Matrán: A fixed-point approach to barycenters in Wasserstein
space. J. Math. Anal. Appl. 2016. https://arxiv.org/abs/1511.05355 (equation 7). The shrinkage: Olivier Ledoit, Michael
Wolf: A well-conditioned estimator for large-dimensional covariance matrices. J. Multivar. Anal. 2004.
https://doi.org/10.1016/S0047-259X(03)00096-4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import UserError
from ekiden.methods.blocks.mixtures import square_roots


class Gaussian(NamedTuple):
    """The first two moments of a domain's features, float64.

    Attributes:
        mean: (A,).
        covariance: (A, A), positive definite.
    """

    mean: Tensor
    covariance: Tensor


class Affine(NamedTuple):
    """z ↦ A z + b.

    Attributes:
        matrix: A, (A, A).
        offset: b, (A,).
    """

    matrix: Tensor
    offset: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Return the images of features (n, A)."""
        return features @ self.matrix.T.to(features) + self.offset.to(features)

    def partial(self, tau: float) -> "Affine":
        """Return the map (1 - τ) z + τ (A z + b)."""
        return Affine(torch.eye(len(self.matrix)).to(self.matrix).lerp(self.matrix, tau), tau * self.offset)


def ledoit_wolf(features: Tensor) -> Gaussian:
    """Return mean and covariance of features (n, A), shrunk towards a multiple of the identity as by Ledoit and Wolf.

    With two samples the shrinkage is zero: the covariance stays singular.
    """
    x = features.double()
    n, dim = x.shape
    mean = x.mean(0)
    x = x - mean
    sample = x.T @ x / n
    middle = sample.diagonal().mean()
    if n < 2 or not middle > 0:
        raise UserError(f"there is no covariance of {n} equal samples: leave this domain out")
    target = middle * torch.eye(dim).to(x)
    spread = (sample - target).square().sum()
    noise = (x.square().sum(1).square().sum() / n - sample.square().sum()) / n  # mean ‖x xᵀ - S‖² / n
    share = float((noise / spread).clamp(0, 1)) if spread > 0 else 1.0
    return Gaussian(mean, sample.lerp(target, share))


def barycentre(
    parts: Sequence[Gaussian], weights: Sequence[float], *, iterations: int = 200, tolerance: float = 1e-12
) -> Gaussian:
    """Return the Gaussian with the least weighted sum of squared Wasserstein distances to `parts`.

    Σ ← Σ^-½ (Σ_k w_k (Σ^½ Σ_k Σ^½)^½)² Σ^-½, starting from the weighted mean, until the relative change of Σ is below
    `tolerance` or all iterations are used up.
    """
    if len(parts) != len(weights) or any(w < 0 for w in weights) or not sum(weights) > 0:
        raise UserError("a barycentre needs a weight of 0 or more for each domain, not all 0")
    w = torch.tensor(list(weights), dtype=torch.float64).to(parts[0].mean)
    w = w / w.sum()
    mean = torch.einsum("k,ki->i", w, torch.stack([p.mean for p in parts]))
    covariances = torch.stack([regular(p.covariance) for p in parts])
    current = torch.einsum("k,kij->ij", w, covariances)
    for _ in range(iterations):
        root = square_roots(current)
        joint = torch.einsum("k,kij->ij", w, square_roots(root @ covariances @ root))
        half = torch.linalg.solve(root, joint)
        step = half @ half.T
        change = (step - current).norm() / current.norm()
        current = (step + step.T) / 2
        if change < tolerance:
            break
    return Gaussian(mean, current)


def transport(source: Gaussian, target: Gaussian) -> Affine:
    """Return the optimal map from one Gaussian to another: A = Σ_t^½ (Σ_t^½ Σ_s Σ_t^½)^-½ Σ_t^½, b = μ_t - A μ_s."""
    root = square_roots(regular(target.covariance))
    matrix = root @ torch.linalg.solve(square_roots(root @ regular(source.covariance) @ root), root)
    matrix = (matrix + matrix.T) / 2
    return Affine(matrix, target.mean - matrix @ source.mean)


def regular(covariance: Tensor) -> Tensor:
    """Return `covariance` (A, A) if it is positive definite."""
    values = torch.linalg.eigvalsh(covariance)
    if not bool(values[0] > 1e-14 * values[-1]):
        raise UserError("a covariance is singular: shrink it, and leave out domains of one or two samples")
    return covariance
