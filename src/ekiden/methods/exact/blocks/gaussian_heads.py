"""Linear heads in closed form, from the sums that clients add up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import Task, UserError
from ekiden.core.tasks import Classification, MultiLabel
from ekiden.core.training.gram import AnySums, NoisySums, Sums

# Values of λ/n that are tried: 10^-6 to 10, four per decade
GRID = tuple(10 ** (power / 4) for power in range(-24, 5))
# to 10^4, which keeps the head that is the target
_FAR = tuple(10 ** (power / 4) for power in range(5, 17))
# λ in noise of differential privacy: with 1, half of the noise's largest eigenvalue
_DAMPING = 1.0
_DRAWS = 4_000_000  # most numbers drawn for a temperature
Kind = Literal["ridge", "lda", "cgs", "bayes", "ncm"]


class Head(NamedTuple):
    """A linear head of standardised features z: scores = weight z + bias."""

    weight: Tensor  # (K, D) float64
    bias: Tensor  # (K,) float64
    penalty: float = 0.0  # λ/n of ridge regression; 0 for other heads
    freedom: float = 0.0  # df/n, its effective parameters for each sample; 0 for other heads


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of the features z = (φ - μ)/σ and targets y, float64; z is 0 if φ never changes.

    The targets of classification are one-hot. Then `targets` and `powers` are the numbers of
    samples of each class, and `products` the sums over the samples of each class.
    """

    n: float  # number of samples
    mean: Tensor  # (D,) μ
    scale: Tensor  # (D,) 1/σ, or 0
    scatter: Tensor  # (D, D) Σ zzᵀ
    total: Tensor  # (D,) Σ z
    products: Tensor  # (K, D) Σ yzᵀ
    targets: Tensor  # (K,) Σ y
    powers: Tensor  # (K,) Σ y²
    noise: float = 0.0  # standard deviation of the errors that rounding left in Σ zzᵀ
    # λ/n that follows from the noise of differential privacy; 0 without it. Features are then
    # centred: the mean of each
    # sample's features was subtracted from them.
    rule: float = 0.0

    @classmethod
    def unscaled(
        cls,
        n: float,
        scatter: Tensor,
        products: Tensor,
        targets: Tensor,
        powers: Tensor,
        total: Tensor,
    ) -> "Moments":
        """Return the moments of features that are not standardised."""
        zeros = torch.zeros_like(total)
        ones = torch.ones_like(total)
        return cls(n, zeros, ones, scatter, total, products, targets, powers)

    def around(self, centre: Tensor) -> "Moments":
        """Return these moments, of φ - c, as those of φ; `rule` says that φ stays centred."""
        return replace(self, mean=self.mean + centre.double().cpu())

    @property
    def spread(self) -> float:
        """Σ ‖y - ȳ‖²."""
        return float(self.powers.sum()) - float(self.targets.square().sum()) / self.n

    @property
    def means(self) -> Tensor:
        """(K, D), the mean z of each class; for a class without samples it is 0, the mean of
        all.
        """
        return self.products / self.targets.clamp(min=1)[:, None]

    @property
    def within(self) -> Tensor:
        """(D, D) Σ (z - m)(z - m)ᵀ, where m is the mean of the sample's class."""
        return self.scatter - self.products.T @ self.means

    def rows(self, head: Head) -> Tensor:
        """Return (K, D + 1) weights and biases that give the scores of `head` for features φ before
        standardisation.
        """
        weight = head.weight * self.scale
        if self.rule:
            weight = weight - weight.mean(1, keepdim=True)
        return torch.column_stack([weight, head.bias - weight @ self.mean])


def moments(sums: AnySums, unit: int = 1) -> Moments:
    """Return the moments that follow from `sums`, on the CPU.

    n²·covariance = n·Σ φφᵀ - Σφ Σφᵀ is a difference of whole numbers, exact up to 747,000 samples.

    Args:
        sums: sums over all samples.
        unit: the whole number that stands for 1 in targets; see `Task.unit`.
    """
    if isinstance(sums, NoisySums):
        return _noisy_moments(sums)
    features, products, targets, powers = _doubles(sums, unit)
    n = float(sums.samples)
    # n²·covariance
    scatter = n * sums.matrix().cpu() - torch.outer(features, features)
    variance = scatter.diagonal().clone()
    scale = torch.where(variance > 0, n / variance.clamp(min=1).sqrt(), 0.0)
    # Σ zzᵀ of standardised features
    scatter *= torch.outer(scale, scale) / n
    mean = features / n
    products = (products - torch.outer(targets, mean)) * scale
    total = products.sum(0) if isinstance(sums, Sums) else torch.zeros_like(mean)
    noise = sums.error * float(scale.square().mean())
    return Moments(n, mean, scale, scatter, total, products, targets, powers, noise)


def _noisy_moments(sums: NoisySums) -> Moments:
    """Return the moments of noisy sums, in the features' own scale: their variances are too noisy
    to divide by.

    λ is what the noise adds to Σ φφᵀ in its largest direction, about 2σ√D, times `_DAMPING`.
    """
    n = max(float(sums.counts.sum()), 1.0)
    counts = sums.counts.cpu().double().clamp(min=0)
    classes = sums.classes.cpu().double()
    total = classes.sum(0)
    mean = total / n
    scatter = sums.matrix().cpu() - torch.outer(total, mean)
    products = classes - torch.outer(counts, mean)
    rule = _DAMPING * sums.gram_noise * (sums.parts * len(mean)) ** 0.5 / n
    scale = torch.ones_like(mean)
    return Moments(n, mean, scale, scatter, products.sum(0), products, counts, counts, rule=rule)


def moments_around(sums: AnySums, mean: Tensor, scale: Tensor, unit: int = 1) -> Moments:
    """Return the moments from `sums` for features standardised by another mean and scale (D,), on
    the CPU.
    """
    features, products, targets, powers = _doubles(sums, unit)
    mean = mean.double()
    scale = scale.double()
    cross = torch.outer(features, mean)
    # Σ (φ - μ)(φ - μ)ᵀ
    scatter = sums.matrix().cpu() - cross - cross.T + sums.samples * torch.outer(mean, mean)
    scatter *= torch.outer(scale, scale)
    products = (products - torch.outer(targets, mean)) * scale
    total = products.sum(0) if isinstance(sums, Sums) else (features - sums.samples * mean) * scale
    return Moments(float(sums.samples), mean, scale, scatter, total, products, targets, powers)


def _doubles(sums: AnySums, unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Σ φ, Σ yφᵀ, Σ y and Σ y², float64 on the CPU."""
    if not sums.samples:
        raise UserError("there are no samples behind these sums: no classifier can be made")
    if isinstance(sums, Sums):
        counts = sums.counts.cpu().double()
        classes = sums.classes.cpu().double()
        return classes.sum(0), classes, counts, counts
    parts = (sums.features, sums.products, sums.targets, sums.powers)
    features, products, targets, powers = (part.cpu().double() for part in parts)
    return features, products / unit, targets / unit, powers / unit**2


def ridge(m: Moments, penalty: float = 0.0) -> Head:
    """Ridge regression of targets y on z; the constant is not penalised. The targets of
    classification are one-hot.

    Minimises Σ ‖y - W z - b‖² + λ‖W‖². Without a given penalty, λ/n is the value of `GRID` with the
    least error of generalised cross-validation, n·RSS/(n - df)², among those with df ≤ n/2. (If
    there are nearly as many free parameters as samples, copies of samples predict each other, and
    the error falls to 0.) All of this follows from the totals. With Σ zzᵀ = V diag(e) Vᵀ and B = Σ
    zyᵀ:

        RSS = Σ ‖y - ȳ‖² - Σ_i ‖(VᵀB)_i‖² (e_i + 2λ)/(e_i + λ)²,   df = 1 + Σ_i e_i/(e_i + λ)

    If products were rounded, Σ zzᵀ has errors E with variance s², and the weights fit them too. With
    M = (Σ zzᵀ + λI)⁻¹, to first order in E, that makes RSS too small by

        -E[tr(WEWᵀ)] = 2s² (tr(M) ‖W‖² + tr(WMWᵀ))

    Args:
        m: moments of all samples.
        penalty: λ/n; 0 means by cross-validation, or by the noise of differential privacy.
    """
    grid = _grid(penalty or m.rule)
    weight, chosen, freedom = _solved(m.scatter, m.products.T, m.spread, m.n, grid, m.noise)
    return Head(weight, m.targets / m.n, chosen, freedom)


def personal_ridge(m: Moments, towards: Head) -> Head:
    """Ridge regression of targets y on z towards another head W₀; the constant is not penalised.

    Minimises Σ ‖y - W z - b‖² + λ‖W - W₀‖², which is ridge regression of the residuals y - W₀ z.
    λ/n is chosen as in `ridge`, from values up to 10^4.

    Args:
        m: moments of one client's samples, standardised as `towards` expects.
        towards: W₀.
    """
    total = m.total
    shares = m.targets / m.n
    middle = total / m.n
    scatter = m.scatter - m.n * torch.outer(middle, middle)
    # Σ (z - z̄)(y - ȳ)ᵀ, (D, K)
    cross = m.products.T - torch.outer(total, shares)
    # Σ (z - z̄)(W₀ z - W₀ z̄)ᵀ
    answered = scatter @ towards.weight.T
    spread = m.spread + float((towards.weight.T * (answered - 2 * cross)).sum())
    change, chosen, freedom = _solved(scatter, cross - answered, spread, m.n, (*GRID, *_FAR))
    weight = towards.weight + change
    return Head(weight, shares - weight @ middle, chosen, freedom)


def _solved(
    scatter: Tensor,
    cross: Tensor,
    spread: float,
    n: float,
    grid: Sequence[float],
    noise: float = 0.0,
) -> tuple[Tensor, float, float]:
    """Return weights (K, D) of ridge regression, the λ/n of `grid` with the least GCV error, and
    df/n.

    Args:
        scatter: (D, D) Σ zzᵀ of centred features.
        cross: (D, K) Σ zyᵀ.
        spread: Σ ‖y - ȳ‖².
        n: number of samples.
        grid: values of λ/n.
        noise: s, standard deviation of errors in `scatter`.
    """
    values, vectors = torch.linalg.eigh(scatter)
    values = values.clamp(min=0)
    # VᵀB, (D, K)
    turned = vectors.T @ cross
    power = turned.square().sum(1)

    def residual(share: float) -> tuple[float, float]:
        shrunk = values + share * n
        explained = power * (values + 2 * share * n) / shrunk.square()
        rest = max(spread - float(explained.sum()), 0.0)
        if noise:
            weights = power / shrunk.square()
            fitted = (1 / shrunk).sum() * weights.sum() + (weights / shrunk).sum()
            rest += 2 * noise**2 * float(fitted)
        return rest, 1 + float((values / shrunk).sum())

    chosen = _least_gcv(residual, n, grid)
    weight = (vectors @ (turned / (values + chosen * n)[:, None])).T
    return weight, chosen, residual(chosen)[1] / n


def _least_gcv(
    residual: Callable[[float], tuple[float, float]], n: float, grid: Sequence[float]
) -> float:
    """Return the λ/n of `grid` with the least GCV error, given RSS and df of each."""

    def error(share: float) -> float:
        rest, freedom = residual(share)
        if freedom > n / 2:
            return float("inf")
        return rest / (1 - freedom / n) ** 2

    return min(grid[::-1], key=error)


def _grid(penalty: float) -> tuple[float, ...]:
    """Return the λ/n that are tried: the one given, or `GRID`."""
    if penalty:
        return (penalty,)
    return GRID


def thin_ridge(
    diagonal: Tensor, rows: Tensor, m: Moments, penalty: float = 0.0
) -> tuple[Head, Moments]:
    """Return what `ridge` gives if Σ zzᵀ is diag(d) + RRᵀ, with D·r² operations instead of D³, and
    moments of scores.

    Args:
        diagonal: (D,) d >= 0.
        rows: (D, r) R.
        m: moments of all samples; its scatter is not read.
        penalty: λ/n; 0 means by cross-validation.
    """
    cross = m.products.T

    def solved(share: float) -> tuple[Tensor, float, float]:
        level = share * m.n
        found, trace = thin_solve(diagonal + level, rows, cross)
        rest = m.spread - float((found * cross).sum()) - level * float(found.square().sum())
        return found, max(rest, 0.0), 1 + len(diagonal) - level * trace

    chosen = _least_gcv(lambda share: solved(share)[1:], m.n, _grid(penalty))
    weight, _, freedom = solved(chosen)
    head = Head(weight.T, m.targets / m.n, chosen, freedom / m.n)
    turned = weight.T @ rows
    return head, answers(head, m, (weight.T * diagonal) @ weight + turned @ turned.T)


def thin_solve(diagonal: Tensor, rows: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Return (diag(d) + RRᵀ)⁻¹ B and the trace of the inverse.

    By the Woodbury identity: with E = 1/d the inverse is E - ER (I + RᵀER)⁻¹ RᵀE.

    Args:
        diagonal: (D,) d > 0.
        rows: (D, r) R.
        right: (D, any) B.
    """
    inverse = 1 / diagonal
    # ER
    scaled = inverse[:, None] * rows
    eye = torch.eye(rows.shape[1], dtype=torch.float64)
    core = torch.linalg.cholesky(eye + rows.T @ scaled)
    found = inverse[:, None] * right
    found = found - scaled @ torch.cholesky_solve(rows.T @ found, core)
    turned = torch.linalg.solve_triangular(core, scaled.T, upper=False)
    return found, float(inverse.sum() - turned.square().sum())


def answers(head: Head, m: Moments, scatter: Tensor) -> Moments:
    """Return the moments of the scores W z without bias, given their `scatter` (K, K)."""
    products = m.products @ head.weight.T
    return Moments.unscaled(m.n, scatter, products, m.targets, m.powers, head.weight @ m.total)


def ncm(m: Moments) -> Head:
    """Return the nearest class mean: scores are -½‖z - m_c‖² without the part that all classes
    share.
    """
    means = m.means
    bias = -means.square().sum(1) / 2
    return Head(means, torch.where(m.targets > 0, bias, -1e9))


def _gaussian(m: Moments, covariance: Tensor, shrink: float) -> Head:
    """Return scores log N(z; m_c, Σ) + log n_c/n without what all classes share; no samples count
    as half a sample.
    """
    level = float(covariance.diagonal().mean())
    # (1 - α) Σ + α tr(Σ)/D I; 1e-9 keeps it invertible where all features are constant
    shrunk = (1 - shrink) * covariance + (shrink * level + 1e-9) * torch.eye(
        len(covariance), dtype=torch.float64
    )
    weight = torch.linalg.solve(shrunk, m.means.T).T  # (K, D) Σ⁻¹ m_c
    priors = (m.targets.clamp(min=0.5) / m.n).log()
    return Head(weight, priors - (weight * m.means).sum(1) / 2)


def fitted(kind: Kind, m: Moments, shrink: float, penalty: float = 0.0) -> Head:
    """Return the head of this kind.

    Three are Gaussians with priors n_c/n and one covariance Σ, shrunk to (1 - α) Σ + α tr(Σ)/D I:
    lda, linear discriminant analysis, with the covariance within classes; bayes, Gaussian naive
    Bayes, with the variances within classes alone; cgs, the head of FedCGS, with the covariance of
    all samples around their common mean.
    """
    # unbiased
    covariance = m.within / max(m.n - float((m.targets > 0).sum()), 1.0)
    match kind:
        case "ridge":
            return ridge(m, penalty)
        case "ncm":
            return ncm(m)
        case "bayes":
            covariance = covariance.diagonal().diag()
        case "cgs":
            covariance = m.scatter / max(m.n - 1, 1.0)
    return _gaussian(m, covariance, shrink)


def outputs(head: Head, m: Moments, task: Task) -> Head:
    """Return the head whose scores are what a network of this task gives: logits of classes or
    labels, or numbers.
    """
    if isinstance(task, Classification):
        return calibrated(head, m)
    if isinstance(task, MultiLabel):
        return label_logits(head, m)
    return head


def label_logits(head: Head, m: Moments) -> Head:
    """Turn the scores of each label into logits; scores of samples with and without the label are
    taken as Gaussians.

    Both Gaussians have the variance within; means and variance follow from the totals, corrected as
    in `calibrated`. Their log-likelihood ratio is linear in the score. No logit of a mean is larger
    than that of one error in n + 2 samples. Targets are 1 and -1.
    """
    with_ = (m.n + m.targets) / 2
    without = (m.n - m.targets) / 2
    # mean scores of the samples with and without the label, from Σ z of them
    first = (head.weight * ((m.total + m.products) / 2)).sum(1) / with_.clamp(min=1)
    second = (head.weight * ((m.total - m.products) / 2)).sum(1) / without.clamp(min=1)
    power = ((head.weight @ m.scatter) * head.weight).sum(1)
    within = power - with_ * first.square() - without * second.square()
    variance = within.clamp(min=0) / m.n
    larger = 1 / (1 - min(head.freedom, 0.9))
    first = 1 - (1 - first - head.bias) * larger
    second = -1 + (second + head.bias + 1) * larger
    gap = (first - second).clamp(min=0)
    # ratio of two Gaussians with one variance: slope (m₁ - m₀)/σ², zero at their middle
    most = 2 * log(m.n + 2) / gap.clamp(min=1e-12)
    slope = torch.minimum(gap / (variance * larger**2).clamp(min=1e-12), most)
    slope = torch.where((with_ > 0) & (without > 0), slope, 0.0)
    odds = ((with_ + 0.5) / (without + 0.5)).log()
    middle = (first + second) / 2
    bias = odds + slope * (head.bias - middle)
    return head._replace(weight=head.weight * slope[:, None], bias=bias)


def calibrated(head: Head, m: Moments) -> Head:
    """Return the head with scores divided by a temperature T, so that their softmax gives
    probabilities.

    T minimises the cross-entropy of draws with the moments of the scores, which follow from the
    totals: a Gaussian for each class, around the mean scores of its samples, with the scores'
    covariance within classes. Scores of ridge regression were fitted to the same samples. So they
    are first corrected as in generalised cross-validation: the residual of a sample that is left
    out is 1/(1 - df/n) times as large. Labels count as wrong once in n + 2 times. The draws are
    always the same, so that equal sums give equal bits.
    """
    labels = (m.targets > 0).nonzero().flatten()
    classes = len(m.targets)
    shares = m.targets[labels] / m.n
    wrong = 1 / (m.n + 2)
    centres = m.means @ head.weight.T + head.bias
    spread = head.weight @ (m.within / m.n) @ head.weight.T
    if head.freedom:
        larger = 1 / (1 - min(head.freedom, 0.9))
        truth = torch.eye(classes, dtype=torch.float64)
        centres = truth + (centres - truth) * larger
        spread = spread * larger**2
    values, vectors = torch.linalg.eigh(spread)
    draws = max(8, min(512, _DRAWS // (classes * len(labels))))
    drawn = torch.randn(
        draws, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    scores = (
        centres[labels, None] + drawn * values.clamp(min=0).sqrt() @ vectors.T
    )  # (classes present, draws, K)
    own = labels[:, None, None].expand(-1, draws, 1)

    def cross_entropy(power: float) -> float:
        logs = (scores * 10**power).log_softmax(2)
        right = logs.gather(2, own)[..., 0].mean(1)
        any_ = logs[..., labels].mean((1, 2))
        return -float(shares @ ((1 - wrong) * right + wrong * any_))

    factor = 10 ** _least(cross_entropy, -8.0, 8.0)
    return head._replace(weight=head.weight * factor, bias=head.bias * factor)


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum is least, to a hundredth."""
    while high - low > 0.01:
        left = low + (high - low) / 3
        right = high - (high - low) / 3
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return (low + high) / 2
