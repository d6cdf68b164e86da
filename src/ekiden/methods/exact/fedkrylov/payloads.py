"""FedKrylov: what clients hand on and keep, and where a run stands."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import Ref, State, UserError, Weights
from ekiden.methods.exact.blocks.fixed_features import Settled, ShortColumns

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
    if isinstance(mine, WholeColumns) and isinstance(other, WholeColumns):
        return mine.plus(other)
    if isinstance(mine, ShortColumns) and isinstance(other, ShortColumns):
        return mine.plus(other)
    raise UserError(_OTHER)


def _checked(sums: Columns, width: int, columns: int) -> Tensor:
    """Return the matrix of columns that another party sent."""
    if isinstance(sums, WholeColumns):
        if sums.values.shape != (width, columns) or sums.values.dtype != torch.int64:
            raise UserError(_OTHER)
        return sums.matrix()
    fits = sums.counts.shape == (width, columns) and sums.units.shape == (columns,)
    if not fits or (sums.counts.dtype, sums.units.dtype) != (torch.int16, torch.float32):
        raise UserError(_OTHER)
    if not bool((torch.isfinite(sums.units) & (sums.units >= 0)).all()):
        raise UserError(_NOT_FINITE)
    if bool((sums.units > _ENTRY).any()) or bool((sums.counts < -_MOST).any()):
        raise UserError(_IMPOSSIBLE)
    return sums.matrix()


def answer_step(width: int) -> int:
    """In what answers of validation samples are counted if sums are whole: at most 2^21 steps, so that they fit."""
    return 1 << max(0, int(_REACH * _MOST_DIRECTION * width).bit_length() - 21)


def _check_doubles(tensors: tuple[Tensor, ...], shapes: tuple[tuple[int, ...], ...], columns: Columns) -> None:
    """Refuse what is not float64, or int64 next to whole columns; has other shapes, or is not finite."""
    kind = torch.int64 if isinstance(columns, WholeColumns) else torch.float64
    if tuple(tuple(t.shape) for t in tensors) != shapes or any(t.dtype != kind for t in tensors):
        raise UserError(_OTHER)
    if not all(bool(torch.isfinite(t).all()) for t in tensors):
        raise UserError(_NOT_FINITE)


class Labels(NamedTuple):
    """Sums over the targets y (K,) of some samples; float64, or int64 if targets are counted in steps."""

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
        return Labels(self.samples + other.samples, self.targets + other.targets, self.powers + other.powers)

    def real(self, unit: float) -> "Labels":
        """Return the sums as float64 on the CPU, of targets that are counted in 1/unit."""
        return Labels(self.samples, self.targets.cpu().double() / unit, self.powers.cpu().double() / unit**2)

    def checked(self, outputs: int, columns: Columns, *, classes: bool = False) -> "Labels":
        """Return these sums, which another party sent.

        Args:
            outputs: K.
            columns: the sums of features next to them.
            classes: whether targets are 0 or 1, and one of them is 1.
        """
        _check_doubles((self.targets, self.powers), ((outputs,), (outputs,)), columns)
        if self.samples < 0 or bool((self.powers < 0).any()):
            raise UserError(_NOT_FINITE)
        n = float(min(self.samples, _SAMPLES))
        fits = self.samples <= _SAMPLES and bool((self.powers <= n * _TARGET**2).all())
        targets, powers = self.targets.cpu().double(), self.powers.cpu().double()
        if not fits or bool((targets.square() > n * powers * (1 + 1e-6)).any()):
            raise UserError(_IMPOSSIBLE)
        # A device may round sums a little.
        far = torch.stack([(targets - powers).abs().max(), (targets - targets.round()).abs().max()]).max()
        if classes and max(float(far), abs(float(targets.sum()) - n)) > 1e-3 + 1e-6 * n:
            raise UserError(_IMPOSSIBLE)
        return self


class Chosen(NamedTuple):
    """What the first client decides about the features."""

    settled: Settled  # their values; see `WholeFeatures.tell`
    centre: Tensor  # (D,) int8, c̃, its mean features, rounded; φ̃ = φ - c̃


class OpeningSums(NamedTuple):
    """What a client hands on in the first lap."""

    sums: Columns  # (D, K + 2): Σ φ̃yᵀ, Σ φ̃ and Σ φ̃² over the training samples of all clients so far
    labels: Labels  # of the same samples
    held: Labels  # of the validation samples of all clients so far

    def plus(self, other: "OpeningSums") -> "OpeningSums":
        """Return the sums over the samples of both."""
        return OpeningSums(_added(self.sums, other.sums), self.labels.plus(other.labels), self.held.plus(other.held))

    def checked(self, width: int, outputs: int, classes: bool = False) -> "OpeningSums":
        """Return these sums, which another party sent.

        Args:
            width: D.
            outputs: K.
            classes: whether targets are 0 or 1, and one of them is 1.
        """
        labels = self.labels.checked(outputs, self.sums, classes=classes)
        n, matrix = float(labels.samples), _checked(self.sums, width, outputs + 2)
        most = torch.cat(
            [(n * labels.powers.cpu().double()).sqrt() * _REACH, torch.tensor([n * _REACH, n * _REACH**2])]
        )
        if bool((matrix.abs() > _SLACK * most.to(matrix)).any()) or bool((matrix[:, -1] < 0).any()):
            raise UserError(_IMPOSSIBLE)
        return OpeningSums(self.sums, labels, self.held.checked(outputs, self.sums, classes=classes))


class HeldAnswers(NamedTuple):
    """Sums over validation samples with answers f_t = U_tᵀφ̃ to the directions so far, of which U is the last.

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
        """Return the sums over validation samples as float64 on the CPU; targets are counted in 1/unit."""
        step = answer_step(len(self.sums.matrix())) if isinstance(self.sums, WholeColumns) else 1
        inner, products, total = (t.cpu().double() for t in self.held)
        return HeldAnswers(inner * step**2, products * (step / unit), total * step)

    def bounded(self, opening: OpeningSums) -> "Multiplied":
        """Return these sums of the samples that `opening` counts."""
        width = len(self.sums.matrix())
        answer = _REACH * _MOST_DIRECTION * width  # most |f|
        n, held = _SLACK * opening.labels.samples, _SLACK * opening.held.samples
        target = float(opening.held.powers.double().max().sqrt()) if len(opening.held.powers) else 0.0  # most |y|
        limits = (held * answer**2, held * answer * target, held * answer)
        if float(self.sums.matrix().abs().max()) > n * answer * _REACH or any(
            float(part.abs().max()) > limit for part, limit in zip(self.answers(1), limits, strict=True)
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
class Lapping(State):
    """The state with what is handed on; there is no model before the last step."""

    model: Ref[Weights] | None = None
    chosen: Ref[Chosen] | None = None
    opening: Ref[OpeningSums] | None = None
    direction: Ref[Tensor] | None = None
    multiplied: Ref[Multiplied] | None = None
