"""FedKrylov: what clients hand on and keep; ridge regression in the span of the directions, and the
next ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import Ref, UserError
from ekiden.methods.blocks.sums import WithoutModel, forms
from ekiden.methods.exact.blocks.fixed_features import Settled, ShortColumns
from ekiden.methods.exact.blocks.gaussian_heads import GRID, Head, Moments

_MOST = 2**15 - 1
_OTHER = "the sums received are of other features: use the same method and data kind everywhere"
_NOT_FINITE = "the sums received hold numbers that are negative or not finite: refused"
_IMPOSSIBLE = "the sums received hold numbers that no samples have: refused"
_REACH = 254.0  # most |φ̃|
_SLACK = 2.0  # sums are rounded at each hop
_SAMPLES = 2**53
_TARGET = 2.0**20  # most |y|
_MOST_DIRECTION = 127
_ENTRY = 1e30  # more than any sum of these features


class WholeColumns(NamedTuple):
    """A matrix of whole numbers, which add up exactly."""

    values: Tensor  # (D, C) int64

    def matrix(self) -> Tensor:
        """(D, C) float64."""
        return self.values.double()

    def plus(self, other: "WholeColumns") -> "WholeColumns":
        """Return the sum of both."""
        return WholeColumns(self.values + other.values)


Columns = ShortColumns | WholeColumns


def _added(mine: Columns, other: Columns) -> Columns:
    if type(mine) is not type(other):
        raise UserError(_OTHER)
    return mine.plus(other)  # type: ignore[arg-type]


def _checked(sums: Columns, width: int, columns: int) -> Tensor:
    """Return the matrix of columns that another party sent."""
    if isinstance(sums, WholeColumns):
        if forms(sums) != [((width, columns), torch.int64)]:
            raise UserError(_OTHER)
        return sums.matrix()
    short = [((width, columns), torch.int16), ((columns,), torch.float32)]
    if forms(sums) != short:
        raise UserError(_OTHER)
    if not (torch.isfinite(sums.units) & (sums.units >= 0)).all():
        raise UserError(_NOT_FINITE)
    if (sums.units > _ENTRY).any() or (sums.counts < -_MOST).any():
        raise UserError(_IMPOSSIBLE)
    return sums.matrix()


def answer_step(width: int) -> int:
    """In what answers of validation samples are counted if sums are whole: at most 2^21 steps, so
    that they fit.
    """
    return 1 << max(0, int(_REACH * _MOST_DIRECTION * width).bit_length() - 21)


def _check_doubles(
    tensors: tuple[Tensor, ...], shapes: tuple[tuple[int, ...], ...], columns: Columns
) -> None:
    """Refuse what is not float64, or int64 next to whole columns; has other shapes, or is not
    finite.
    """
    kind = torch.float64
    if isinstance(columns, WholeColumns):
        kind = torch.int64
    if forms(tensors) != [(shape, kind) for shape in shapes]:
        raise UserError(_OTHER)
    if not all(torch.isfinite(t).all() for t in tensors):
        raise UserError(_NOT_FINITE)


class Labels(NamedTuple):
    """Sums over the targets y (K,) of some samples; float64, or int64 if targets are counted in
    steps.
    """

    samples: int  # their number
    targets: Tensor  # (K,) Σ y
    powers: Tensor  # (K,) Σ y²

    @classmethod
    def of(cls, y: Tensor) -> "Labels":
        """Return the sums over targets (n, K)."""
        y = y.double()
        return cls(len(y), y.sum(0), y.square().sum(0))

    def plus(self, other: "Labels") -> "Labels":
        """Return the sums over the samples of both."""
        return Labels(
            self.samples + other.samples, self.targets + other.targets, self.powers + other.powers
        )

    def real(self, unit: float) -> "Labels":
        """Return the sums as float64 on the CPU, of targets that are counted in 1/unit."""
        return Labels(
            self.samples, self.targets.cpu().double() / unit, self.powers.cpu().double() / unit**2
        )

    def checked(self, outputs: int, columns: Columns, *, classes: bool = False) -> "Labels":
        """Return these sums, which another party sent.

        Args:
            outputs: K.
            columns: the sums of features next to them.
            classes: whether targets are 0 or 1, and one of them is 1.
        """
        _check_doubles((self.targets, self.powers), ((outputs,), (outputs,)), columns)
        if self.samples < 0 or (self.powers < 0).any():
            raise UserError(_NOT_FINITE)
        n = float(min(self.samples, _SAMPLES))
        fits = self.samples <= _SAMPLES and bool((self.powers <= n * _TARGET**2).all())
        targets = self.targets.cpu().double()
        powers = self.powers.cpu().double()
        if not fits or (targets.square() > n * powers * (1 + 1e-6)).any():
            raise UserError(_IMPOSSIBLE)
        # A device may round sums a little.
        far = max(
            float((targets - powers).abs().max()),
            float((targets - targets.round()).abs().max()),
            abs(float(targets.sum()) - n),
        )
        if classes and far > 1e-3 + 1e-6 * n:
            raise UserError(_IMPOSSIBLE)
        return self


class Chosen(NamedTuple):
    """What the first client decides about the features."""

    settled: Settled  # their values; see `WholeFeatures.tell`
    centre: Tensor  # (D,) int8, c̃, its mean features, rounded; φ̃ = φ - c̃


class OpeningSums(NamedTuple):
    """What a client hands on in the first lap."""

    # (D, K + 2): Σ φ̃yᵀ, Σ φ̃ and Σ φ̃² over the training samples of all clients so far
    sums: Columns
    labels: Labels  # of the same samples
    held: Labels  # of the validation samples of all clients so far

    def plus(self, other: "OpeningSums") -> "OpeningSums":
        """Return the sums over the samples of both."""
        return OpeningSums(
            _added(self.sums, other.sums),
            self.labels.plus(other.labels),
            self.held.plus(other.held),
        )

    def checked(self, width: int, outputs: int, classes: bool = False) -> "OpeningSums":
        """Return these sums, which another party sent.

        Args:
            width: D.
            outputs: K.
            classes: whether targets are 0 or 1, and one of them is 1.
        """
        labels = self.labels.checked(outputs, self.sums, classes=classes)
        n = float(labels.samples)
        matrix = _checked(self.sums, width, outputs + 2)
        most = torch.cat(
            [
                (n * labels.powers.cpu().double()).sqrt() * _REACH,
                torch.tensor([n * _REACH, n * _REACH**2]),
            ]
        )
        above = matrix.abs() > _SLACK * most.to(matrix)
        if above.any() or (matrix[:, -1] < 0).any():
            raise UserError(_IMPOSSIBLE)
        return OpeningSums(
            self.sums, labels, self.held.checked(outputs, self.sums, classes=classes)
        )


class HeldAnswers(NamedTuple):
    """Sums over validation samples with answers f_t = U_tᵀφ̃ to the directions so far, of which U
    is the last.

    They are float64, or int64 if answers are counted in `answer_step`.
    """

    inner: Tensor  # (R, t·R) Σ f fᵢᵀ with all directions so far, i = 1 to t
    products: Tensor  # (R, K) Σ f yᵀ
    total: Tensor  # (R,) Σ f

    def plus(self, other: "HeldAnswers") -> "HeldAnswers":
        """Return the sums over the samples of both."""
        return HeldAnswers(*(a + b for a, b in zip(self, other, strict=True)))


class Multiplied(NamedTuple):
    """What a client hands on in a later lap."""

    sums: Columns  # (D, R) Σ φ̃φ̃ᵀU over the training samples of all clients so far
    held: HeldAnswers  # of their validation samples

    def plus(self, other: "Multiplied") -> "Multiplied":
        """Return the sums over the samples of both."""
        return Multiplied(_added(self.sums, other.sums), self.held.plus(other.held))

    def checked(self, own: "Multiplied") -> "Multiplied":
        """Return these sums, which another party sent."""
        _checked(self.sums, *own.sums.matrix().shape)
        _check_doubles(tuple(self.held), tuple(tuple(t.shape) for t in own.held), own.sums)
        return self

    def answers(self, unit: float) -> HeldAnswers:
        """Return the sums over validation samples as float64 on the CPU; targets are counted in
        1/unit.
        """
        step = 1
        if isinstance(self.sums, WholeColumns):
            step = answer_step(len(self.sums.values))
        inner, products, total = (t.cpu().double() for t in self.held)
        return HeldAnswers(inner * step**2, products * (step / unit), total * step)

    def bounded(self, opening: OpeningSums) -> "Multiplied":
        """Return these sums of the samples that `opening` counts."""
        width = len(self.sums.matrix())
        # Most |f|, the answer to a direction
        answer = _REACH * _MOST_DIRECTION * width
        n = _SLACK * opening.labels.samples
        held = _SLACK * opening.held.samples
        # Most |y|
        target = max([0.0, *opening.held.powers.tolist()]) ** 0.5
        limits = (held * answer**2, held * answer * target, held * answer)
        if float(self.sums.matrix().abs().max()) > n * answer * _REACH or any(
            float(part.abs().max()) > limit
            for part, limit in zip(self.answers(1), limits, strict=True)
        ):
            raise UserError(_IMPOSSIBLE)
        return self


class Kept(NamedTuple):
    """What a client keeps between laps; only the first one keeps totals."""

    chosen: Chosen  # what the first client decided about the features
    directions: tuple[Tensor, ...] = ()  # (D, R) int8, U of each lap
    opening: OpeningSums | None = None  # the totals of the first lap
    laps: tuple[Multiplied, ...] = ()  # the totals of the later ones


@dataclass(frozen=True)
class Lapping(WithoutModel):
    """The state with what is handed on."""

    chosen: Ref[Chosen] | None = None
    opening: Ref[OpeningSums] | None = None
    direction: Ref[Tensor] | None = None
    multiplied: Ref[Multiplied] | None = None


PENALTY = 0.03  # λ/n without validation samples
# Validation samples from which λ is chosen by them
_ENOUGH = 50
# Directions shorter than this share of the longest are left out
_TINY = 1e-10


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
        products = sums[:, :-2]
        total = sums[:, -2]
        squares = sums[:, -1]
        mean = total / n
        variance = squares / n - mean.square()
        # A feature that hardly varies would be noise of the 16 bits.
        scale = torch.where(
            variance > 1e-3 * variance.mean(), variance.clamp(min=1e-12).rsqrt(), 0.0
        )
        return cls(
            mean, scale, (products - torch.outer(mean, labels.targets)) * scale[:, None], labels
        )


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
        return self.directions.T @ self.images - self.problem.labels.samples * torch.outer(
            self.shift, self.shift
        )

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
        labels = self.problem.labels
        return _moments(labels, self.gram, torch.zeros_like(self.shift), self.products)

    @cached_property
    def validation(self) -> Moments:
        """Moments of the answers g of validation samples, or of training samples if there are few
        of the others.
        """
        labels = self.held_labels
        a = self.shift
        if labels.samples < _ENOUGH:
            return self.training
        total = torch.cat([part.total for part in self.held])
        products = torch.cat([part.products for part in self.held])
        inner = torch.zeros(len(a), len(a), dtype=torch.float64)
        for part in self.held:
            rows, columns = part.inner.shape
            inner[columns - rows : columns, :columns] = part.inner
        inner = inner.tril() + inner.tril(-1).T
        cross = torch.outer(total, a)
        inner += labels.samples * torch.outer(a, a) - cross - cross.T
        return _moments(
            labels, inner, total - labels.samples * a, products - torch.outer(a, labels.targets)
        )

    def solve(self, penalty: float = 0.0) -> Head:
        """Return ridge regression of y on g, whose norm is that of V C: scores are Cᵀg + ȳ.

        Minimises Σ ‖y - ȳ - Cᵀg‖² + λ‖VC‖².

        Args:
            penalty: λ/n; 0: the value of `GRID` with the least squared error on validation samples,
                or `PENALTY`.
        """
        n = self.problem.labels.samples
        mean = self.problem.labels.targets / n
        lengths, turn = torch.linalg.eigh(self.stretched.T @ self.stretched)
        some = lengths > _TINY * lengths[-1]
        # V·basis is orthonormal
        basis = turn[:, some] / lengths[some].sqrt()
        values, vectors = torch.linalg.eigh(basis.T @ self.gram @ basis)
        basis = basis @ vectors
        values = values.clamp(min=0)
        turned = basis.T @ self.products
        # Of rounded sums
        noise = torch.linalg.matrix_norm(basis.T @ (self._product - self._product.T) @ basis, 2)

        def weights(share: float) -> Tensor:
            shrunk = (values + share * n).clamp(min=float(noise))
            found: Tensor = basis @ (turned / shrunk[:, None])
            return found

        def error(share: float) -> float:
            m = self.validation
            c = weights(share)
            cross = m.products.T - torch.outer(m.total, mean)
            return float((c * (m.scatter @ c - 2 * cross)).sum())

        if not penalty:
            penalty = PENALTY if self.held_labels.samples < _ENOUGH else min(GRID[::-1], key=error)
        return Head(weights(penalty).T, mean, penalty)

    def residual(self, head: Head) -> Tensor:
        """(D, K) b - (H + λI)VC of a head from `solve`: the gradient of the regression, up to its
        factor.
        """
        c = head.weight.T
        n = self.problem.labels.samples
        scale = self.problem.scale[:, None]
        # HV, from Σ φ̃φ̃ᵀU
        images = (self.images - n * torch.outer(self.problem.mean, self.shift)) * scale
        return self.problem.products - images @ c - head.penalty * n * (self.stretched @ c)


def _moments(labels: Labels, scatter: Tensor, total: Tensor, products: Tensor) -> Moments:
    n = float(labels.samples)
    return Moments.unscaled(n, scatter, products.T, labels.targets, labels.powers, total)


class Preconditioner:
    """(P + δnI)⁻¹, where P approximates H = Σ zzᵀ over all samples by those of one client.

    P = n/m·Σ wwᵀ over m samples of this client, w being what the targets do not explain of z there,
    and the part of H that the targets explain at all clients, Σ_k b_k b_kᵀ/Σ y_k². For classes
    these are the covariance within classes at one client and the exact covariance between them.
    """

    def __init__(
        self,
        own: Tensor,
        y: Tensor,
        problem: Problem,
        damping: float,
        factor: Callable[[Callable[[], Tensor]], Tensor],
    ) -> None:
        """Prepare.

        Args:
            own: (m, D) float32, φ̃ of the client's samples.
            y: (m, K) their targets.
            problem: of all samples.
            damping: δ.
            factor: calls its argument, which gives the Cholesky factor, or returns what that gave
                before.
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
        """The factor in float32; in float64 where rounding in float32 makes the matrix
        indefinite.
        """
        for kind in (torch.float32, torch.float64):
            rows = self._rows.to(kind)
            product = rows @ rows.T if self._wide else rows.T @ rows
            product.diagonal().add_(self._level)
            factor, failed = torch.linalg.cholesky_ex(product)
            if not int(failed):
                found: Tensor = factor
                return found
        raise UserError(
            "the second moments of the first client are too uneven to solve with: raise --damping, "
            "or let another client begin (--order)"
        )

    def __call__(self, residual: Tensor) -> Tensor:
        """(D, K), (P + δnI)⁻¹ times `residual`."""
        r = residual.to(self._factor)
        if not self._wide:
            return torch.cholesky_solve(r, self._factor)
        rows = self._rows.to(self._factor)
        return (r - rows.T @ torch.cholesky_solve(rows @ r, self._factor)) / self._level


def next_directions(step: Tensor, span: Tensor | None, scale: Tensor, count: int) -> Tensor:
    """Return (D, R) int8: directions U = V/σ of which V spans most of `step`, apart from what
    `span` has.

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
