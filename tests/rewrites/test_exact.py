"""FedGram's Gaussian heads and FedCOF from their papers' formulas, by NumPy on features.

Rewrites of the other exact methods lie with their tests in `tests/methods`: ridge regression and
personal heads in `test_fedgram.py`, FedKrylov, DeepAFL and FedRAN in theirs."""

from typing import Literal

import numpy as np
import pytest
import torch

from ekiden.core.models.split import as_split
from ekiden.methods import FedCOF, FedGram
from tests.rewrites.plain import CLASSES, SILOS, Vector, data, library


@pytest.mark.parametrize("head", ["lda", "cgs", "bayes", "ncm"])
def test_heads_of_fedgram(head: Literal["lda", "cgs", "bayes", "ncm"]) -> None:
    """Scores φᵀΣ⁻¹μ_c - ½ μ_cᵀΣ⁻¹μ_c + log n_c/n of GH-OFL 2026 and FedCGS 2025, and -½ ‖φ - μ_c‖²
    of FedNCM 2023.

    Features are standardised. Σ is divided by n - K within classes and by n - 1 for all samples,
    and shrunk towards the mean of its diagonal. Scores are compared up to the temperature."""
    shrink = 0.2
    network = as_split(library(FedGram(width=5, head=head, shrink=shrink)).model)
    x, y = (np.concatenate(part) for part in zip(*SILOS, strict=True))
    with torch.no_grad():
        features = network.features(torch.tensor(x, dtype=torch.float32))
        found = network.head(features).double().numpy()
    phi: Vector = features.double().numpy()
    phi = (phi - phi.mean(0)) / phi.std(0)
    means = np.stack([phi[y == c].mean(0) for c in range(CLASSES)])
    within = (phi - means[y]).T @ (phi - means[y]) / (len(y) - CLASSES)
    sigma = {
        "lda": within,
        "cgs": phi.T @ phi / (len(y) - 1),
        "bayes": np.diag(np.diag(within)),
        "ncm": np.eye(phi.shape[1]),
    }[head]
    if head != "ncm":
        sigma = (1 - shrink) * sigma + shrink * np.trace(sigma) / len(sigma) * np.eye(len(sigma))
    weights = np.linalg.solve(sigma, means.T)
    scores = phi @ weights - (means.T * weights).sum(0) / 2
    if head != "ncm":
        scores = scores + np.log(np.bincount(y) / len(y))
    scores, found = (s - s.mean(1, keepdims=True) for s in (scores, found))
    factor = (found * scores).sum() / (scores**2).sum()
    assert factor > 0
    np.testing.assert_allclose(found, factor * scores, atol=1e-4 * factor)


@pytest.mark.parametrize("groups", [1, 2])
def test_fedcof(groups: int) -> None:
    """Goswami et al. 2025 and their code: W = G⁻¹B with rows of length 1, G = Σ_c (N_c - 1)(Σ̂_c +
    γI) + N μμᵀ.

    Σ̂_c = Σ n_kc (μ_kc - μ_c)(μ_kc - μ_c)ᵀ / (m_c - 1) of m_c means. γ counts in mean variances,
    which is the library's own, as are several means of a client. Scores are compared up to the
    temperature."""
    gamma, silos = 0.3, data()
    network = as_split(library(FedCOF(width=5, gamma=gamma, groups=groups), silos).model)
    counts, means = np.zeros(CLASSES), [list[tuple[int, Vector]]() for _ in range(CLASSES)]
    with torch.no_grad():
        parts = [network.features(silo.train.x).double().numpy() for silo in silos.clients]
        found = (
            network.head(torch.tensor(np.concatenate(parts), dtype=torch.float32)).double().numpy()
        )
    for phi, silo in zip(parts, silos.clients, strict=True):
        for c in range(CLASSES):
            own = phi[silo.train.y.numpy() == c]
            for part in (own[g::groups] for g in range(min(groups, len(own)))):
                counts[c] += len(part)
                means[c].append((len(part), part.mean(0)))
    middles = [sum(n * mu for n, mu in means[c]) / counts[c] for c in range(CLASSES)]
    inside = []
    for c in range(CLASSES):
        scatter = sum(n * np.outer(mu - middles[c], mu - middles[c]) for n, mu in means[c])
        inside.append(scatter / max(len(means[c]) - 1, 1))
    free = counts - 1
    unit = sum(free[c] * np.trace(inside[c]) for c in range(CLASSES)) / free.sum() / 5
    middle = sum(counts[c] * middles[c] for c in range(CLASSES)) / counts.sum()
    gram = counts.sum() * np.outer(middle, middle)
    for c in range(CLASSES):
        gram += free[c] * (inside[c] + gamma * unit * np.eye(5))
    weight = np.linalg.solve(gram, np.stack([counts[c] * middles[c] for c in range(CLASSES)]).T).T
    scores = np.concatenate(parts) @ (weight / np.linalg.norm(weight, axis=1, keepdims=True)).T
    factor = (found * scores).sum() / (scores**2).sum()
    assert factor > 0
    np.testing.assert_allclose(found, factor * scores, atol=1e-4 * np.abs(found).max())
