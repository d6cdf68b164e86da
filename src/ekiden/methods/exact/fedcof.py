"""FedCOF: a classifier of fixed features from class means alone, whose scatter gives the
covariances.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Count,
    Fed,
    OwnSamples,
    Positive,
    Size,
    State,
    Task,
    UserError,
    Weights,
    on_client,
)
from ekiden.methods.blocks.sums import WithoutModel, forms
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.fixed_features import (
    FeaturesOfClasses,
    Settled,
    features_of,
    with_rows,
)


class ClassMeans(NamedTuple):
    """What a client sends."""

    counts: Annotated[Tensor, OwnSamples]  # (G, K) int64, samples behind each mean
    # (G, K, D) float32, mean features of the samples of each class in each group; 0 without samples
    means: Tensor

    def checked(self, groups: int, classes: int, width: int) -> "ClassMeans":
        """Return these means, which another party sent."""
        wanted = [((groups, classes), torch.int64), ((groups, classes, width), torch.float32)]
        if forms(self) != wanted:
            raise UserError(
                "class means of other features: use the same method and data kind everywhere"
            )
        if (self.counts < 0).any() or not (self.means.abs() <= 128).all():
            raise UserError(
                "class means of negative counts, or that no features have: check the data"
            )
        return self


@dataclass(frozen=True, eq=False)
class MeanScatter:
    """What follows from all means, float64. Classes have N_c samples in m_c means."""

    counts: Tensor  # (K,) N_c
    sums: Tensor  # (D, K) Σ φ of each class
    rows: Tensor  # (D, any), whose products RRᵀ are Σ_c (N_c - 1) Σ̂_c

    @classmethod
    def of(cls, told: Sequence[ClassMeans]) -> "MeanScatter":
        """Return that of all clients' means: Σ̂_c = Σ_k n_kc (μ_kc - μ_c)(μ_kc - μ_c)ᵀ / (m_c -
        1).
        """
        each = torch.cat([one.counts for one in told]).double()  # (any, K)
        means = torch.cat([one.means for one in told]).double()
        counts = each.sum(0)
        sums = torch.einsum("mk,mkd->dk", each, means)
        there = (each > 0).sum(0)
        if not (there > 1).any():
            raise UserError(
                "fedcof estimates variances from several means of a class: give more clients, or "
                "more groups"
            )
        free = (counts - 1).clamp(min=0)
        share = (free / (there - 1).clamp(min=1)).sqrt()
        middle = (sums / counts.clamp(min=1)).T
        apart = (means - middle) * (each.sqrt() * share)[..., None]
        return cls(counts, sums, apart[each > 0].T)

    def head(self, gamma: float, task: Task) -> Tensor:
        """Return (K, D + 1) weights and biases.

        Columns of G⁻¹B have length 1, with B = `sums` and G = Σ_c (N_c - 1)(Σ̂_c + γvI) + N μμᵀ, in
        which v is the mean variance of a feature within classes, as the Σ̂_c have it.
        """
        n = float(self.counts.sum())
        free = float((self.counts - 1).clamp(min=0).sum())
        width = len(self.sums)
        level = gamma * float(self.rows.square().sum()) / width
        if not level > 0:
            raise UserError(
                f"fedcof finds no variance in {n:.0f} samples of {free:.0f} freedoms: give more "
                "samples"
            )
        middle = self.sums.sum(1, keepdim=True) / n**0.5
        shift = torch.full((width,), level, dtype=torch.float64)
        found, _ = heads.thin_solve(shift, torch.cat([self.rows, middle], 1), self.sums)
        weight = (found / found.norm(dim=0).clamp(min=1e-30)).T
        products = self.sums.T @ weight.T
        spread = weight @ self.rows
        means = products / self.counts.clamp(min=1)[:, None]
        scatter = spread @ spread.T + products.T @ means
        m = heads.Moments.unscaled(n, scatter, products, self.counts, self.counts, products.sum(0))
        scored = heads.Head(
            torch.eye(len(weight), dtype=torch.float64), torch.where(self.counts > 0, 0.0, -1e9)
        )
        scored = heads.outputs(scored, m, task)
        return torch.column_stack([scored.weight @ weight, scored.bias])


@dataclass(frozen=True)
class FedCOF(FeaturesOfClasses):
    """Clients send class means of fixed features; how these differ between clients gives the
    covariances.

    Dipam Goswami, Simone Magistri, Kai Wang, Bartłomiej Twardowski, Andrew Bagdanov, Joost van de
    Weijer: Covariances for Free: Exploiting Mean Distributions for Training-free Federated
    Learning. NeurIPS 2025. https://arxiv.org/abs/2412.14326 (Algorithm 1).

    If a client's samples of a class are drawn independently, the mean of n of them has the
    covariance Σ_c/n. So the scatter of the means estimates Σ_c without bias, and no matrix travels.
    The classifier is ridge regression without the covariance between classes: W = G⁻¹B, with
    columns of length 1.

    Departures from the paper: written after its abstract and the authors' code. The features are
    FedGram's, whole numbers from -127 to 127, so γ counts in their mean variance; in the code it is
    added as it is. A client may send several means of a class. A temperature turns the scores into
    probabilities. Classes without samples get none.
    """

    groups: Count = 1
    """G, means of a class that a client sends: it divides its samples of the class into so many
    groups"""
    gamma: Positive = 1.0
    """γ, multiple of the identity added to each class covariance, in mean variances of a feature
    within classes"""

    def run(self, fed: Fed, s: WithoutModel) -> Iterator[State]:
        """Yield one state."""
        if s.step == 0:
            settled = fed.call(self.settle, fed.order(self.order)[0], INITIAL)
            told = fed.get(fed.call_all(self.describe, INITIAL, settled))
            network = fed.network(fed.get(INITIAL))
            features = features_of(network)
            features.adopt(fed.get(settled))
            scatter = MeanScatter.of(
                [one.checked(self.groups, fed.layout.classes, features.width) for one in told]
            )
            self.check_classes(scatter.counts, fed.task)
            yield s.next(model=with_rows(network, scatter.head(self.gamma, fed.task)))

    @on_client(gives="summary")
    def describe(self, client: Client, model: Weights, settled: Settled) -> ClassMeans:
        """Return the class means of the client's own samples, each of `min_active` samples or
        more.
        """
        phi, y = self.held(client, self.adopted(client, model, settled))
        counts = torch.zeros(self.groups, client.classes, dtype=torch.int64)
        means = torch.zeros(self.groups, client.classes, phi.shape[1])
        for c in range(client.classes):
            own = phi[y == c].double()
            if len(own):
                groups = max(1, min(self.groups, len(own) // max(1, self.min_active)))
                for g in range(groups):
                    some = own[g::groups]
                    counts[g, c] = len(some)
                    means[g, c] = some.mean(0)
        return ClassMeans(counts, means)

    def cost(self, clients: int, model: Size) -> int:
        """N·(S + G·K·(4D + 8)). S is what is settled about the features, see FedGram."""
        return clients * self.handed_on(model)

    def told(self, width: int, classes: int, task: Task) -> int:
        """Return the bytes of a client's means."""
        return self.groups * classes * (4 * width + 8)
