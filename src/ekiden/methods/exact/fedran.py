"""FedRAN: ridge regression on fixed features, from truncated decompositions of clients' Gram
matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ekiden.authoring import (
    INITIAL,
    Client,
    Fed,
    Fraction,
    NonNegative,
    OwnSamples,
    Ref,
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
    ShortColumns,
    features_of,
    with_rows,
)

_OTHER = "the summary received is of other features, or of no samples: use the same method and data kind everywhere"


class SketchedScatter(NamedTuple):
    """What travels about the features φ (D,) of some clients' samples."""

    counts: Annotated[Tensor, OwnSamples]  # (K,) int64, samples of each class
    means: ShortColumns  # (D, K), mean φ of each class
    # (D, r), U√S of the truncated decomposition USUᵀ of the scatter within classes
    sketch: ShortColumns
    squares: Tensor  # (D,) float32, the diagonal of that scatter

    def checked(self, width: int, classes: int, rank: int) -> "SketchedScatter":
        """Return this summary, which another party sent."""
        floats = (self.means.units, self.sketch.units, self.squares)
        if forms((self.counts, self.means.counts, self.sketch.counts, *floats)) != [
            ((classes,), torch.int64),
            ((width, classes), torch.int16),
            ((width, rank), torch.int8),
            ((classes,), torch.float32),
            ((rank,), torch.float32),
            ((width,), torch.float32),
        ]:
            raise UserError(_OTHER)
        if not all((torch.isfinite(part) & (part >= 0)).all() for part in floats):
            raise UserError(_OTHER)
        if (self.counts < 0).any() or float(self.means.matrix().abs().max()) > 128:
            raise UserError(_OTHER)
        return self


class Joint(NamedTuple):
    """The same in one chain's hand-off, over all clients so far, with what the first one
    decided.
    """

    settled: Settled
    summary: SketchedScatter


@dataclass(frozen=True, eq=False)
class Scatter:
    """Class means and scatter within classes of the features of some samples; float64."""

    counts: Tensor  # (K,) samples of each class
    means: Tensor  # (D, K)
    rows: Tensor  # (D, any), whose products RRᵀ are the scatter within classes, or its largest part
    squares: Tensor  # (D,) diagonal of the complete scatter

    @property
    def width(self) -> int:
        """D."""
        return len(self.squares)

    @classmethod
    def of(cls, phi: Tensor, y: Tensor, classes: int) -> "Scatter":
        """Return that of features (n, D) with labels (n,)."""
        counts = torch.bincount(y, minlength=classes).double()
        sums = torch.zeros(phi.shape[1], classes, dtype=torch.float64).index_add_(1, y, phi.T)
        means = sums / counts.clamp(min=1)
        rows = phi.T - means[:, y]
        return cls(counts, means, rows, rows.square().sum(1))

    @classmethod
    def read(cls, told: SketchedScatter) -> "Scatter":
        """Return what another party told."""
        counts = told.counts.cpu().double()
        means = told.means.matrix().cpu()
        rows = told.sketch.matrix().cpu()
        return cls(counts, means, rows, told.squares.cpu().double())

    def plus(self, other: "Scatter") -> "Scatter":
        """Return that of the samples of both: the class means differ, so a row for each class joins
        them.
        """
        counts = self.counts + other.counts
        share = other.counts / counts.clamp(min=1)
        gap = other.means - self.means
        between = gap * (self.counts * share).sqrt()
        squares = self.squares + other.squares + between.square().sum(1)
        rows = torch.cat([self.rows, other.rows, between], 1)
        return Scatter(counts, self.means + share * gap, rows, squares)

    def told(self, rank: int) -> SketchedScatter:
        """Return what travels: the `rank` largest directions, in 8 bits a number, and class means
        in 16.
        """
        means = ShortColumns.of(self.means)
        sketch = ShortColumns.of(largest(self.rows, rank), torch.int8)
        return SketchedScatter(self.counts.long(), means, sketch, self.squares.float())

    def head(self, penalty: float, task: Task) -> Tensor:
        """Return (K, D + 1) weights and biases of ridge regression on standardised features, as a
        network has them.

        What the rows lack of the scatter is put on the diagonal.
        """
        n = float(self.counts.sum())
        if not n:
            raise UserError("there are no samples behind this summary: no classifier can be made")
        mean = self.means @ self.counts / n
        apart = self.means - mean[:, None]
        rows = torch.cat([self.rows, apart * self.counts.sqrt()], 1)
        power = self.squares + (apart.square() * self.counts).sum(1)
        variance = power / n
        scale = torch.where(
            variance > 1e-6 * variance.mean(), variance.clamp(min=1e-12).rsqrt(), 0.0
        )
        rest = (power - rows.square().sum(1)).clamp(min=0) * scale.square()
        rows = rows * scale[:, None]
        products = (apart * self.counts).T * scale
        none = torch.zeros(0, 0, dtype=torch.float64)
        m = heads.Moments(n, mean, scale, none, products.sum(0), products, self.counts, self.counts)
        if rows.shape[1] * 2 < self.width:
            head, scores = heads.thin_ridge(rest, rows, m, penalty)
            factor = heads.outputs(
                head._replace(weight=torch.eye(len(self.counts)).double()), scores, task
            )
            return m.rows(factor._replace(weight=factor.weight @ head.weight))
        m = replace(m, scatter=rows @ rows.T + rest.diag())
        return m.rows(heads.outputs(heads.ridge(m, penalty), m, task))


def largest(rows: Tensor, rank: int) -> Tensor:
    """Return U√S (D, r) of the truncated decomposition of RRᵀ, R being `rows` (D, m); zeros if m or
    D is below r.
    """
    if rows.shape[1] > rows.shape[0]:
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        found = vectors.flip(1) * values.flip(0).clamp(min=0).sqrt()
    else:
        u, s, _ = torch.linalg.svd(rows, full_matrices=False)
        found = u * s
    out = torch.zeros(len(rows), rank, dtype=torch.float64)
    out[:, : min(rank, found.shape[1])] = found[:, :rank]
    return out


@dataclass(frozen=True)
class Sketching(WithoutModel):
    """The state with what the last client handed on."""

    joint: Ref[Joint] | None = None


@dataclass(frozen=True)
class FedRAN(FeaturesOfClasses):
    """Clients send truncated decompositions of the Gram matrix of many fixed features, which are
    merged and solved.

    Jebacyril Arockiaraj, Dhruv Parikh, Jayashree Adivarahan, Rajgopal Kannan, Viktor Prasanna:
    Accurate and Resource-Efficient Federated Continual Learning. 2026.
    https://arxiv.org/abs/2606.11480. Merging in a chain keeps the largest directions, as in Mina
    Ghashami, Edo Liberty, Jeff Phillips, David Woodruff: Frequent Directions. SIAM Journal on
    Computing 45, 2016. https://doi.org/10.1137/15M1009718.

    A Gram matrix FᵀF of D features has D²/2 numbers; its r largest directions U√S have rD.
    Summaries are merged by the decomposition of [U_1√S_1, U_2√S_2], and the classifier is ridge
    regression, (USUᵀ + λI)⁻¹Σ φyᵀ.

    Departures from the paper: only its abstract and summaries of it could be read; tasks that
    follow each other and labels of unlabelled samples are left out. The features are FedGram's.
    What is truncated is the scatter within classes. The part between classes follows from the class
    means, which travel anyway, so it is complete; when two summaries are merged, their class means
    add K directions. The diagonal travels, too, and what the directions lack of it is put back. So
    features are standardised as in FedGram, and λ is chosen by generalised cross-validation.
    Directions travel in 8 bits a number. The chain is ours.
    """

    topology: Literal["chain", "star"] = "chain"
    """who merges: each client adds its samples to what it received, or the server merges all
    summaries"""
    rank: Fraction = 0.125
    """r/D, directions that travel for each feature; with more, `bytes` leaves room for fewer
    features"""
    ridge: NonNegative = 0.0
    """λ/n of ridge regression; 0: by generalised cross-validation"""

    def run(self, fed: Fed, s: Sketching) -> Iterator[State]:
        """Yield the state after each hop; one state in a star."""
        order = fed.order(self.order)
        if self.topology == "star" and s.model is None:
            settled = fed.call(self.settle, order[0], INITIAL)
            told = fed.get(fed.call_all(self.describe, INITIAL, settled))
            model = fed.network(fed.get(INITIAL))
            width = features_of(model).width
            classes = fed.layout.classes
            scatters = (
                Scatter.read(one.checked(width, classes, self.directions(width))) for one in told
            )
            yield s.next(
                model=self.solved(model, fed.get(settled), reduce(Scatter.plus, scatters), fed.task)
            )
        while self.topology == "chain" and s.step < len(order):
            client = order[s.step]
            if s.step < len(order) - 1:
                s = s.next(joint=fed.call(self.join, client, INITIAL, s.joint))
            else:
                s = s.next(model=fed.call(self.finish, client, INITIAL, s.joint), joint=None)
            yield s

    @on_client(gives="summary")
    def describe(self, client: Client, model: Weights, settled: Settled) -> SketchedScatter:
        """Return the summary of the client's own samples."""
        scatter = self.scatter(client, model, settled)
        return scatter.told(self.directions(scatter.width))

    @on_client(gives="summary")
    def join(self, client: Client, model: Weights, received: Joint | None) -> Joint:
        """Merge the client's samples with the summary received; the first client settles the
        features.
        """
        settled, scatter = self.joined(client, model, received)
        return Joint(settled, scatter.told(self.directions(scatter.width)))

    @on_client(gives="model")
    def finish(self, client: Client, model: Weights, received: Joint | None) -> Weights:
        """Return the network with the classifier of all samples."""
        settled, scatter = self.joined(client, model, received)
        return self.solved(client.network(model), settled, scatter, client.task)

    def joined(
        self, client: Client, model: Weights, received: Joint | None
    ) -> tuple[Settled, Scatter]:
        """Return the features, and the scatter of the client's samples and of those before."""
        if received is None:
            settled = self.settled_by(client, model).tell()
            return settled, self.scatter(client, model, settled)
        own = self.scatter(client, model, received.settled)
        summary = received.summary.checked(own.width, client.classes, self.directions(own.width))
        return received.settled, Scatter.read(summary).plus(own)

    def scatter(self, client: Client, model: Weights, settled: Settled) -> Scatter:
        """Return that of the client's own samples."""
        features = self.adopted(client, model, settled)
        phi, y = self.held(client, features)
        return Scatter.of(phi.double(), y, client.classes)

    def solved(self, network: nn.Module, settled: Settled, scatter: Scatter, task: Task) -> Weights:
        """Return `network` with the features and ridge regression on them, as weights."""
        features_of(network).adopt(settled)
        self.check_classes(scatter.counts, task)
        return with_rows(network, scatter.head(self.ridge, task))

    def steps(self, clients: int) -> int:
        """N hops, or 1 in a star."""
        return 1 if self.topology == "star" else clients

    def cost(self, clients: int, model: Size) -> int:
        """(N - 1)·(S + D(r + 2K + 4) + 4r + 12K), in a star N times that.

        S is what is settled about the features, see FedGram.
        """
        sends = clients if self.topology == "star" else clients - 1
        return sends * self.handed_on(model)

    def told(self, width: int, classes: int, task: Task) -> int:
        """Return the bytes of a summary."""
        rank = self.directions(width)
        return width * (rank + 2 * classes + 4) + 4 * rank + 12 * classes

    def directions(self, width: int) -> int:
        """r, of D features."""
        return max(1, round(self.rank * width))
