"""FedGram's Gaussian heads from their papers' formulas, by NumPy on pooled features.

Rewrites of the other exact methods lie with their tests in `tests/methods`: ridge regression and personal heads in
`test_fedgram.py`, FedKrylov, DeepAFL and FedRAN in theirs.
"""

from typing import Literal

import numpy as np
import pytest
import torch

from ekiden.methods import FedGram
from ekiden.models.split import as_split
from tests.rewrites.plain import CLASSES, SILOS, Vector, library


@pytest.mark.parametrize("head", ["lda", "cgs", "bayes", "ncm"])
def test_heads_of_fedgram(head: Literal["lda", "cgs", "bayes", "ncm"]) -> None:
    """Scores φᵀΣ⁻¹μ_c - ½ μ_cᵀΣ⁻¹μ_c + log n_c/n of GH-OFL 2026 and FedCGS 2025, and -½ ‖φ - μ_c‖² of FedNCM 2023.

    Features are standardised. Σ is divided by n - K within classes and by n - 1 for all samples, and shrunk towards the
    mean of its diagonal. Scores are compared up to the temperature.
    """
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
