"""SLOT-Align: a classifier of fixed features that optimal transport has moved to the clients'
common distribution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Fed,
    Range,
    Size,
    State,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.training.gram import AnySums, Sums
from ekiden.methods.blocks.sums import WithoutModel
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.fixed_features import (
    FeaturesOfClasses,
    Settled,
    features_of,
    size_of_sums,
    sums_of,
    with_rows,
)

# Least eigenvalue of a covariance, in mean variances
_FLOOR = 1e-8
# Change of the barycentre, in its norm, at which it is taken as found
_CLOSE = 1e-6
_MOST = 200  # steps to the barycentre


class Described(NamedTuple):
    """What a client sends."""

    sums: AnySums  # over its samples, of each class
    shrink: float  # α_k, Ledoit-Wolf's share of the identity in its covariance

    def checked(self, width: int, classes: int) -> Self:
        """Return this, which another party sent."""
        if not isinstance(self.sums, Sums) or tuple(self.sums.classes.shape) != (classes, width):
            raise UserError("sums of other features: use the same method and data kind everywhere")
        if not 0 <= self.shrink <= 1:
            raise UserError(
                f"a client shrinks its covariance by {self.shrink}, not a number from 0 to 1: "
                "refused"
            )
        return self


@dataclass(frozen=True, eq=False)
class Gaussian:
    """What a client's features follow, float64."""

    n: int
    mean: Tensor  # (D,) μ_k
    scatter: Tensor  # (D, D) Σ (φ - μ_k)(φ - μ_k)ᵀ over its samples
    covariance: Tensor  # (D, D) Σ_k, shrunk
    counts: Tensor  # (K,) samples of each class
    classes: Tensor  # (K, D) Σ (φ - μ_k) over the samples of each class

    @classmethod
    def of(cls, told: Described) -> "Gaussian":
        """Return that of a client."""
        sums = told.sums
        n = told.sums.samples
        assert isinstance(sums, Sums)
        classes = sums.classes.cpu().double()
        counts = sums.counts.cpu().double()
        if n < 1:
            raise UserError("a client sent sums of no samples: leave it out")
        total = classes.sum(0)
        scatter = sums.matrix().cpu() - torch.outer(total, total) / n
        level = float(scatter.diagonal().mean()) / n
        if not level > 0:
            raise UserError(
                "the samples of a client all have the same features: leave this client out"
            )
        mean = total / n
        covariance = (1 - told.shrink) * scatter / n
        covariance.diagonal().add_((told.shrink + _FLOOR) * level)
        return cls(n, mean, scatter, covariance, counts, classes - torch.outer(counts, mean))


@dataclass(frozen=True, eq=False)
class Alignment:
    """The barycentre of the clients' Gaussians and each client's map to it, T_k(φ) = μ_b + A_k (φ -
    μ_k).
    """

    mean: Tensor  # (D,) μ_b
    maps: tuple[Tensor, ...]  # (D, D) A_k of each client

    @classmethod
    def of(cls, clients: Sequence[Gaussian]) -> "Alignment":
        """Return the Bures-Wasserstein barycentre, in which client k has the weight n_k/n.

        Its covariance is the fixed point Σ = Σ_k w_k (Σ^½ Σ_k Σ^½)^½. We iterate Σ <- GΣG, where G
        is the mean of the maps from Σ to the Σ_k (Álvarez-Esteban et al. 2016,
        https://doi.org/10.1016/j.jmaa.2016.04.045): it has the same fixed point, and reaches it in
        one step where the Σ_k commute.
        """
        n = sum(c.n for c in clients)
        share = [c.n / n for c in clients]
        middle = _weighed(share, [c.covariance for c in clients])
        for _ in range(_MOST):
            root, inverse = _roots(middle)
            crossed = [_roots(root @ c.covariance @ root) for c in clients]
            inside = _weighed(share, [half for half, _ in crossed])
            found = inverse @ inside @ inside @ inverse
            if float((found - middle).norm() / middle.norm()) <= _CLOSE:
                break
            middle = (found + found.T) / 2
        mean = _weighed(share, [c.mean for c in clients])
        return cls(mean, tuple(root @ back @ root for _, back in crossed))

    def moments(self, clients: Sequence[Gaussian], tau: float) -> heads.Moments:
        """Return the moments of all clients' features after (1 - τ)φ + τ T_k(φ).

        The maps are affine, so they follow from those before. The mean of all stays μ_b.
        """
        counts = torch.stack([c.counts for c in clients]).sum(0)
        n = float(counts.sum())
        scatter = torch.zeros_like(self.maps[0])
        products = torch.zeros_like(clients[0].classes)
        for c, partial in zip(clients, self.partial(tau), strict=True):
            shift = (1 - tau) * (c.mean - self.mean)
            scatter += partial @ c.scatter @ partial.T + c.n * torch.outer(shift, shift)
            products += c.classes @ partial.T + torch.outer(c.counts, shift)
        variance = scatter.diagonal().clone()
        inverse = (n / variance.clamp(min=1e-30)).sqrt()
        scale = torch.where(variance > _FLOOR * variance.mean(), inverse, 0.0)
        scatter = scatter * torch.outer(scale, scale)
        products = products * scale
        return heads.Moments(
            n, self.mean, scale, scatter, products.sum(0), products, counts, counts
        )

    def partial(self, tau: float) -> list[Tensor]:
        """Return (1 - τ)I + τA_k of each client."""
        eye = torch.eye(len(self.mean), dtype=torch.float64)
        return [(1 - tau) * eye + tau * a for a in self.maps]

    def own(self, clients: Sequence[Gaussian], rows: Tensor, tau: float) -> list[Tensor]:
        """Return the classifier (K, D + 1) of aligned features after each client's map; float32."""
        weight = rows[:, :-1]
        bias = rows[:, -1]
        found = []
        for c, partial in zip(clients, self.partial(tau), strict=True):
            # τ(μ_b - A_k μ_k)
            offset = (1 - tau) * c.mean + tau * self.mean - partial @ c.mean
            moved = torch.column_stack([weight @ partial, bias + weight @ offset])
            found.append(moved.float())
        return found


def ledoit_wolf(phi: Tensor) -> float:
    """Return the share α of tr(S)/D·I that shrinks the covariance S of features (n, D) best.

    Olivier Ledoit, Michael Wolf: A well-conditioned estimator for large-dimensional covariance
    matrices. Journal of Multivariate Analysis 2004. https://doi.org/10.1016/S0047-259X(03)00096-4
    (α = b²/d²).
    """
    rows = phi.double() - phi.double().mean(0)
    n, width = rows.shape
    covariance = rows.T @ rows / n
    square = float(covariance.square().sum())
    # D·d²
    apart = square - float(covariance.diagonal().sum()) ** 2 / width
    # D·b²
    error = (float(rows.square().sum(1).square().mean()) - square) / n
    return min(max(error, 0.0) / apart, 1.0) if apart > 0 else 1.0


def _weighed(shares: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([w * part for w, part in zip(shares, parts, strict=True)]).sum(0)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a symmetric positive matrix (D, D), and its inverse."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    roots = values.clamp(min=float(values[-1]) * 1e-15).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


@dataclass(frozen=True)
class SLOTAlign(FeaturesOfClasses):
    """Features of each client are moved to the clients' barycentre by an affine map, then one
    classifier fits all.

    Daniele Berardini, Vito Paolo Pastore, Vittorio Murino: Distribution Alignment for One-Shot
    Federated Learning via Optimal Transport. ICML 2026. https://arxiv.org/abs/2606.16655.

    A client's features count as a Gaussian, with Ledoit-Wolf's covariance. The reference is the
    Bures-Wasserstein barycentre of all. Each client's map to it is a closed form, of which a share
    τ is applied, in training and in tests. So every client has a model of its own: the common
    classifier after its map.

    Departures from the paper: written after its abstract and the authors' code. Clients send once:
    the maps are affine, so the moments of aligned features follow from those before, and the server
    solves for the classifier, where the code trains one by O-FedAvg in a second upload. Heads are
    FedGram's; cgs is that of FedCGS, with which the paper combines its maps. Features are FedGram's
    whole numbers. No PCA.
    """

    traits = Traits(weighs=False, one_model=False)

    tau: Annotated[float, Range(least=0, most=1)] = 0.4
    """τ, how far features are moved: 0, not at all; 1, to the barycentre"""
    head: Literal["ridge", "lda", "cgs"] = "lda"
    """the classifier of aligned features, as in FedGram: ridge regression, or discriminant analysis
    with the covariance within classes or of all samples"""
    shrink: Annotated[float, Range(least=0, below=1)] = 0.05
    """α, how far lda and cgs shrink the covariance of aligned features to a multiple of the
    identity"""

    def run(self, fed: Fed, s: WithoutModel) -> Iterator[State]:
        """Yield one state."""
        if s.step == 0:
            settled = fed.call(self.settle, fed.order(self.order)[0], INITIAL)
            placed = fed.call_all(self.place, INITIAL, settled)
            asked = [fed.call(self.describe, ref.owner, ref) for ref in placed]
            width = features_of(fed.network(fed.get(INITIAL))).width
            told = [Gaussian.of(one.checked(width, fed.layout.classes)) for one in fed.get(asked)]
            self.check_classes(torch.stack([one.counts for one in told]).sum(0), fed.task)
            alignment = Alignment.of(told)
            m = alignment.moments(told, self.tau)
            head = heads.outputs(heads.fitted(self.head, m, self.shrink), m, fed.task)
            own = alignment.own(told, m.rows(head), self.tau)
            pairs = zip(placed, own, strict=True)
            personal = tuple(fed.call(self.finish, ref.owner, ref, rows) for ref, rows in pairs)
            yield s.next(personal=personal)

    @on_client(gives="nothing")
    def place(self, client: Client, model: Weights, settled: Settled) -> Weights:
        """Return the network with the features that the first client settled; it stays at the
        client.
        """
        network = client.network(model)
        features_of(network).adopt(self.adopted(client, model, settled).tell())
        return with_rows(network, torch.zeros(client.classes, features_of(network).width + 1))

    @on_client(gives="summary")
    def describe(self, client: Client, model: Weights) -> Described:
        """Return the sums over the client's own samples, and how far their covariance is shrunk."""
        phi, y = self.held(client, features_of(client.network(model)))
        if not len(phi):
            raise UserError(
                f"{client.name} has no samples for sums: give a smaller --min-active, or leave it "
                "out"
            )
        sums = sums_of(iter([(phi, y)]), client.task, client.classes, phi.shape[1], phi.device)
        return Described(sums, ledoit_wolf(phi))

    @on_client(gives="nothing")
    def finish(self, client: Client, model: Weights, head: Tensor) -> Weights:
        """Return the network with the client's own classifier (K, D + 1)."""
        return with_rows(client.network(model), head)

    def cost(self, clients: int, model: Size) -> int:
        """N·(2D(D + 1) + 4KD + 8K + 8 + 4K(D + 1)) + (N - 1)·S. S is what is settled about
        features, see FedGram.
        """
        features = features_of(model.network.module)
        classes = model.layout.classes
        each = self.told(features.width, classes, model.task) + 4 * classes * (features.width + 1)
        return clients * each + (clients - 1) * features.told_bytes()

    def told(self, width: int, classes: int, task: Task) -> int:
        """Return the bytes that a client sends."""
        return size_of_sums(task, classes, width) + 8
