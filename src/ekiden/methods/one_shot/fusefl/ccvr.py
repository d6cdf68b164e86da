"""Calibrating a classifier on samples of class Gaussians (CCVR).

Mi Luo, Fei Chen, Dapeng Hu, Yifan Zhang, Jian Liang, Jiashi Feng: No Fear of Heterogeneity: Classifier Calibration for
Federated Learning with Non-IID Data. NeurIPS 2021. https://arxiv.org/abs/2106.05001
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import OwnSamples, UserError


@dataclass(frozen=True, eq=False)
class ClassGaussians:
    """Mean and covariance of the features of each class."""

    counts: Annotated[Tensor, OwnSamples]  # (K,) int32, samples
    means: Tensor  # (K, A) float32; zeros for a class without samples
    covariances: Tensor  # (K, A(A + 1)/2) float32, upper triangles of (1/n) Σ (h - μ)(h - μ)ᵀ

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        size = self.means.shape[-1]
        shapes = [(len(self.counts),), (len(self.counts), size), (len(self.counts), size * (size + 1) // 2)]
        if [tuple(t.shape) for t in (self.counts, self.means, self.covariances)] != shapes:
            raise UserError("class Gaussians do not fit together: use the same method and model everywhere")
        finite = torch.isfinite(self.means.sum() + self.covariances.sum())
        if not bool(finite) or bool((self.counts < 0).any()):
            raise UserError("class Gaussians of negative counts or of values that are not finite: check the data")


def measure(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> ClassGaussians:
    """Return the Gaussians of features (b, A) with labels (b,)."""
    parts = list(batches)
    h, y = torch.cat([part[0] for part in parts]).double(), torch.cat([part[1] for part in parts])
    upper = tuple(torch.triu_indices(h.shape[1], h.shape[1], device=h.device))
    counts, means, covariances = [], [], []
    for c in range(classes):
        own = h[y == c]
        n = max(len(own), 1)
        means.append(own.sum(0) / n)
        centred = own - means[-1]
        counts.append(len(own))
        covariances.append((centred.T @ centred / n)[upper])
    return ClassGaussians(
        torch.tensor(counts, dtype=torch.int32), torch.stack(means).float(), torch.stack(covariances).float()
    )


def pooled(parts: Sequence[ClassGaussians], c: int) -> tuple[int, Tensor, Tensor]:
    """Return number, mean (A,) and unbiased covariance (A, A) of class c over all parts, float64."""
    weights = torch.stack([p.counts[c] for p in parts]).double()
    n = weights.sum().clamp(min=1)
    means = torch.stack([p.means[c] for p in parts]).double()
    mean = weights @ means / n
    away = means - mean
    size = means.shape[1]
    within = torch.zeros(size, size, dtype=torch.float64)
    rows, columns = torch.triu_indices(size, size)
    packed = weights @ torch.stack([p.covariances[c] for p in parts]).double()
    within[rows, columns] = within[columns, rows] = packed
    # Σ n_k Σ_k + Σ n_k (μ_k - μ)(μ_k - μ)ᵀ: the scatter within clients and that of their means
    return int(weights.sum()), mean, (within + (away * weights[:, None]).T @ away) / (n - 1).clamp(min=1)


def drawn(parts: Sequence[ClassGaussians], each: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `each` features (m, A) of every class that a client has; return them with their classes (m,)."""
    features, labels = [], []
    for c in range(len(parts[0].counts)):
        n, mean, covariance = pooled(parts, c)
        if n:
            scales, axes = torch.linalg.eigh(covariance)
            noise = torch.randn(each, len(mean), generator=generator, dtype=torch.float64)
            features.append(mean + noise * scales.clamp(min=0).sqrt() @ axes.T)
            labels.append(torch.full((each,), c))
    return torch.cat(features).float(), torch.cat(labels)


def calibrate(head: nn.Module, x: Tensor, y: Tensor, lr: float, generator: torch.Generator, batch: int = 128) -> None:
    """Make one shuffled pass of plain SGD on the cross-entropy of `head` at features (m, A) of classes (m,)."""
    params = list(head.parameters())
    for rows in torch.split(torch.randperm(len(x), generator=generator), batch):
        with torch.enable_grad():
            slopes = torch.autograd.grad(F.cross_entropy(head(x[rows]), y[rows]), params)
        with torch.no_grad():
            for param, slope in zip(params, slopes, strict=True):
                param.sub_(slope, alpha=lr)
