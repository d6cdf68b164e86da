"""Gaussian mixtures of each class's features: fit them, pack them, draw from them."""

import warnings
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ekiden.authoring import UserError

Covariance = Literal["spherical", "diagonal", "full"]
FLOOR = 1e-6
"""Added to all variances, as scikit-learn does."""


class Mixtures(NamedTuple):
    """A mixture of at most G Gaussians over A features for each of K classes; zeros if there are fewer."""

    weights: Tensor  # (K, G) π; all zero for a class without samples
    means: Tensor  # (K, G, A) μ
    covariances: Tensor  # Σ, as (K, G, 1) variances, (K, G, A) diagonals, or (K, G, A(A + 1)/2) lower triangles by rows

    def draw(self, counts: Tensor, classes: int, features: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw `counts` (K,) features of the classes: (n, A) float32 and labels (n,), on the CPU."""
        self._check(counts, classes, features)
        drawn, labels = [torch.empty(0, features)], [torch.empty(0, dtype=torch.int64)]
        for c, n in enumerate(counts.tolist()):
            if not n:
                continue
            chosen = torch.multinomial(self.weights[c].double(), n, replacement=True, generator=generator)
            noise = torch.randn(n, features, generator=generator, dtype=torch.float64)
            spread = self.covariances[c].double()
            if spread.shape[1] in (1, features):
                noise = noise * spread.sqrt()[chosen]
            else:
                noise = torch.einsum("nij,nj->ni", square_roots(unpacked(spread, features))[chosen], noise)
            drawn.append((self.means[c].double()[chosen] + noise).float())
            labels.append(torch.full((n,), c))
        return torch.cat(drawn), torch.cat(labels)

    def _check(self, counts: Tensor, classes: int, features: int) -> None:
        of = (classes, *self.means.shape[1:2])
        shapes = [tuple(part.shape) for part in (counts, *self)]
        if shapes not in [[(classes,), of, (*of, features), (*of, size)] for size in _sizes(features)]:
            raise UserError(
                f"counts and mixtures of shapes {shapes} do not fit this network of {classes} classes and {features} "
                "features: use the same model at every client"
            )
        shares = self.weights.double().sum(1)[counts > 0]
        variances = self.covariances if self.covariances.shape[2] in (1, features) else self.weights
        if any(bool((part < 0).any()) for part in (counts, self.weights, variances)) or not bool((shares > 0).all()):
            raise UserError("mixtures with a negative count, weight or variance, or samples without weight: refused")


def fit(
    features: Tensor, labels: Tensor, classes: int, mixtures: int, covariance: Covariance, seed: int, dtype: torch.dtype
) -> Mixtures:
    """Fit a mixture to the features (n, A) of each class by EM from k-means++ seeds (scikit-learn), in float64.

    A class with fewer samples than `mixtures` gets as many Gaussians as samples.
    """
    dim = features.shape[1]
    weights, means = torch.zeros(classes, mixtures), torch.zeros(classes, mixtures, dim)
    spread = torch.zeros(classes, mixtures, size_of_covariance(covariance, dim))
    for c in sorted(set(labels.tolist())):
        own = features[labels == c].double().cpu()
        g = min(mixtures, len(own))
        found = _em(own, g, covariance, seed + c)
        weights[c, :g], means[c, :g], spread[c, :g] = found
    sent = Mixtures(weights.to(dtype), means.to(dtype), spread.to(dtype))
    if not all(bool(part.isfinite().all()) for part in sent):
        raise UserError("features or their variances are too large for 16-bit numbers: use --no-half")
    return sent


def _em(x: Tensor, mixtures: int, covariance: Covariance, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (g,), means (g, A) and packed covariances (g, ...) for the samples x (n, A) of one class."""
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415  (it takes a second)
    from sklearn.mixture import GaussianMixture  # noqa: PLC0415

    model = GaussianMixture(
        mixtures,
        covariance_type="diag" if covariance == "diagonal" else covariance,
        reg_covar=FLOOR,
        init_params="k-means++",
        random_state=seed % 2**32,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the result of 100 iterations is good enough to send
            model.fit((x if len(x) > 1 else x.repeat(2, 1)).numpy())  # scikit-learn wants two samples
    except ValueError as error:
        raise UserError(f"no mixture of {mixtures} {covariance} Gaussians fits {len(x)} samples ({error})") from None
    weights, means, found = (torch.from_numpy(v) for v in (model.weights_, model.means_, model.covariances_))
    return weights, means, packed(found) if covariance == "full" else found.view(mixtures, -1)


def size_of_covariance(covariance: Covariance, features: int) -> int:
    """Return the number of entries in a packed covariance: 1, A or A(A + 1)/2."""
    return _sizes(features)[("spherical", "diagonal", "full").index(covariance)]


def _sizes(features: int) -> tuple[int, int, int]:
    return 1, features, features * (features + 1) // 2


def packed(matrices: Tensor) -> Tensor:
    """Return the lower triangles (..., A(A + 1)/2) of symmetric matrices (..., A, A), row by row."""
    rows, columns = torch.tril_indices(*matrices.shape[-2:])
    return matrices[..., rows, columns]


def unpacked(triangles: Tensor, features: int) -> Tensor:
    """The reverse of `packed`."""
    rows, columns = torch.tril_indices(features, features)
    matrices = triangles.new_zeros(*triangles.shape[:-1], features, features)
    matrices[..., rows, columns] = triangles
    matrices[..., columns, rows] = triangles
    return matrices


def square_roots(matrices: Tensor) -> Tensor:
    """Return the symmetric square roots of matrices (..., A, A); negative eigenvalues (of 16-bit rounding) become 0."""
    values, vectors = torch.linalg.eigh(matrices)
    roots: Tensor = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
    return roots
