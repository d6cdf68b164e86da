"""FedKrylov: ridge regression in the span of the directions so far, and the next directions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ekiden.authoring import UserError
from ekiden.methods.exact.blocks.gaussian_heads import GRID, Head, Moments
from ekiden.methods.exact.fedkrylov.payloads import HeldAnswers, Labels

PENALTY = 0.03
"""λ/n without validation samples"""
_ENOUGH = 50  # validation samples from which λ is chosen by them
_TINY = 1e-10  # directions shorter than this share of the longest are left out


@dataclass(frozen=True, eq=False)
class Problem:
    """Ridge regression of targets y on z = (φ̃ - μ)/σ, as the first lap tells it; float64."""

    mean: Tensor  # (D,) μ, counted from c̃
    scale: Tensor  # (D,) 1/σ, or 0
    products: Tensor  # (D, K) b = Σ zyᵀ
    labels: Labels  # of all training samples

    @classmethod
    def of(cls, sums: Tensor, labels: Labels) -> "Problem":
        """Return the problem behind the sums of `OpeningSums`."""
        n = labels.samples
        products, total, squares = sums[:, :-2], sums[:, -2], sums[:, -1]
        mean = total / n
        variance = squares / n - mean.square()
        # A feature that hardly varies would be noise of the 16 bits.
        scale = torch.where(variance > 1e-3 * variance.mean(), variance.clamp(min=1e-12).rsqrt(), 0.0)
        return cls(mean, scale, (products - torch.outer(mean, labels.targets)) * scale[:, None], labels)


@dataclass(frozen=True, eq=False)
class Span:
    """All that is known about the span of the directions V = σU in the space of z."""

    problem: Problem  # the regression
    directions: Tensor  # (D, m) U of all laps, side by side
    images: Tensor  # (D, m) Σ φ̃φ̃ᵀU
    held: Sequence[HeldAnswers]  # sums of each lap over validation samples
    held_labels: Labels  # of these samples

    @cached_property
    def shift(self) -> Tensor:
        """(m,) Uᵀμ."""
        return self.directions.T @ self.problem.mean

    @cached_property
    def gram(self) -> Tensor:
        """(m, m) VᵀHV with H = Σ zzᵀ."""
        return (self._product + self._product.T) / 2

    @cached_property
    def _product(self) -> Tensor:
        """(m, m) VᵀHV, which would be symmetric if the sums were not rounded."""
        return self.directions.T @ self.images - self.problem.labels.samples * torch.outer(self.shift, self.shift)

    @cached_property
    def products(self) -> Tensor:
        """(m, K) Vᵀb."""
        return self.stretched.T @ self.problem.products

    @cached_property
    def stretched(self) -> Tensor:
        """(D, m) V."""
        scale = self.problem.scale
        return self.directions * torch.where(scale > 0, 1 / scale.clamp(min=1e-30), 0.0)[:, None]

    @cached_property
    def training(self) -> Moments:
        """Moments of the answers g = Vᵀz of training samples."""
        labels, m = self.problem.labels, len(self.shift)
        return _moments(labels, self.gram, torch.zeros(m, dtype=torch.float64), self.products)

    @cached_property
    def validation(self) -> Moments:
        """Moments of the answers g of validation samples, or of training samples if there are few of the others."""
        labels, a = self.held_labels, self.shift
        if labels.samples < _ENOUGH:
            return self.training
        total = torch.cat([part.total for part in self.held])
        products = torch.cat([part.products for part in self.held])
        inner = torch.zeros(len(a), len(a), dtype=torch.float64)
        for part in self.held:
            rows, columns = part.inner.shape
            inner[columns - rows : columns, :columns] = part.inner
        inner = inner.tril() + inner.tril(-1).T
        inner += labels.samples * torch.outer(a, a) - torch.outer(total, a) - torch.outer(a, total)
        return _moments(labels, inner, total - labels.samples * a, products - torch.outer(a, labels.targets))

    def solve(self, penalty: float = 0.0) -> Head:
        """Return ridge regression of y on g, whose norm is that of V C: scores are Cᵀg + ȳ.

        Minimises Σ ‖y - ȳ - Cᵀg‖² + λ‖VC‖².

        Args:
            penalty: λ/n; 0: the value of `GRID` with the least squared error on validation samples, or `PENALTY`.
        """
        n, mean = self.problem.labels.samples, self.problem.labels.targets / self.problem.labels.samples
        lengths, turn = torch.linalg.eigh(self.stretched.T @ self.stretched)
        some = lengths > _TINY * lengths[-1]
        basis = turn[:, some] / lengths[some].sqrt()  # V·basis is orthonormal
        values, vectors = torch.linalg.eigh(basis.T @ self.gram @ basis)
        basis, values = basis @ vectors, values.clamp(min=0)
        turned = basis.T @ self.products
        noise = torch.linalg.matrix_norm(basis.T @ (self._product - self._product.T) @ basis, 2)  # of rounded sums

        def weights(share: float) -> Tensor:
            found: Tensor = basis @ (turned / (values + share * n).clamp(min=float(noise))[:, None])
            return found

        def error(share: float) -> float:
            m, c = self.validation, weights(share)
            cross = m.products.T - torch.outer(m.total, mean)
            return float((c * (m.scatter @ c - 2 * cross)).sum())

        if not penalty:
            penalty = PENALTY if self.held_labels.samples < _ENOUGH else min(GRID[::-1], key=error)
        return Head(weights(penalty).T, mean, penalty)

    def residual(self, head: Head) -> Tensor:
        """(D, K) b - (H + λI)VC of a head from `solve`: the gradient of the regression, up to its factor."""
        c, n, scale = head.weight.T, self.problem.labels.samples, self.problem.scale[:, None]
        images = (self.images - n * torch.outer(self.problem.mean, self.shift)) * scale  # HV
        return self.problem.products - images @ c - head.penalty * n * (self.stretched @ c)


def _moments(labels: Labels, scatter: Tensor, total: Tensor, products: Tensor) -> Moments:
    m = len(total)
    zeros, ones = torch.zeros(m, dtype=torch.float64), torch.ones(m, dtype=torch.float64)
    return Moments(float(labels.samples), zeros, ones, scatter, total, products.T, labels.targets, labels.powers)


class Preconditioner:
    """(P + δnI)⁻¹, where P approximates H = Σ zzᵀ over all samples by those of one client.

    P = n/m·Σ wwᵀ over m samples of this client, w being what the targets do not explain of z there, and the part of H
    that the targets explain at all clients, Σ_k b_k b_kᵀ/Σ y_k². For classes these are the covariance within
    classes at one client and the exact covariance between them.
    """

    def __init__(
        self, own: Tensor, y: Tensor, problem: Problem, damping: float, factor: Callable[[Callable[[], Tensor]], Tensor]
    ) -> None:
        """Prepare.

        Args:
            own: (m, D) float32, φ̃ of the client's samples.
            y: (m, K) their targets.
            problem: of all samples.
            damping: δ.
            factor: calls its argument, which gives the Cholesky factor, or returns what that gave before.
        """
        n = problem.labels.samples
        one = torch.cat([torch.ones(len(y), 1), y], 1)
        rows = own - one @ (torch.linalg.pinv(one.double()).float() @ own)
        rows *= problem.scale.float() * (n / len(rows)) ** 0.5
        between = problem.products / problem.labels.powers.clamp(min=1e-9).sqrt()
        self._rows = torch.cat([rows, between.T.float()])
        self._level = damping * n
        self._wide = self._rows.shape[0] < self._rows.shape[1]
        self._factor = factor(self._cholesky)

    def _cholesky(self) -> Tensor:
        """The factor in float32; in float64 where rounding in float32 makes the matrix indefinite."""
        for kind in (torch.float32, torch.float64):
            rows = self._rows.to(kind)
            product = rows @ rows.T if self._wide else rows.T @ rows
            product.diagonal().add_(self._level)
            factor, failed = torch.linalg.cholesky_ex(product)
            if not int(failed):
                found: Tensor = factor
                return found
        raise UserError(
            "the second moments of the first client are too uneven to solve with: raise --damping, or let another "
            "client begin (--order)"
        )

    def __call__(self, residual: Tensor) -> Tensor:
        """(D, K), (P + δnI)⁻¹ times `residual`."""
        r = residual.to(self._factor)
        if not self._wide:
            return torch.cholesky_solve(r, self._factor)
        rows = self._rows.to(self._factor)
        return (r - rows.T @ torch.cholesky_solve(rows @ r, self._factor)) / self._level


def next_directions(step: Tensor, span: Tensor | None, scale: Tensor, count: int) -> Tensor:
    """Return (D, R) int8: directions U = V/σ of which V spans most of `step`, apart from what `span` has.

    Args:
        step: (D, K) how the solution should change.
        span: (D, m) V of earlier laps.
        scale: (D,) 1/σ.
        count: R.
    """
    step = step.double()
    if span is not None:
        step = step - span @ torch.linalg.lstsq(span, step, driver="gelsd").solution
    left = torch.linalg.svd(step, full_matrices=False).U[:, :count]
    u = left * scale[:, None]
    top = u.abs().amax(0).clamp(min=1e-30)
    directions: Tensor = (u / top * 127).round().to(torch.int8)
    return directions
