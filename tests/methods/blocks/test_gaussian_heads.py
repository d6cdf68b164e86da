"""Heads from sums: against plain numpy on the samples themselves, cross-validation against samples
left out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.training.gram import Sums, measure
from ekiden.methods.exact.blocks import gaussian_heads as heads

Array = NDArray[np.float64]
N, D, K = 120, 9, 3


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """Features of three overlapping classes; the last never changes."""
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(K, (N,), generator=draw)
    x = 18 * torch.randn(N, D, generator=draw) @ torch.randn(D, D, generator=draw) / 3
    x += 20 * torch.nn.functional.one_hot(y, D)
    x[:, -1] = 5
    return x.round().clamp(-127, 127), y


def totals(x: Tensor, y: Tensor, classes: int = K) -> Sums:
    return measure([(x, y)], classes, x.shape[1])


def z_of(x: Tensor) -> Array:
    """Standardised by population moments; 0 where nothing changes."""
    a = x.double().numpy()
    spread = a.std(0)
    result: Array = np.where(spread > 0, (a - a.mean(0)) / np.where(spread > 0, spread, 1), 0)
    return result


def scores(head: heads.Head, m: heads.Moments, x: Tensor) -> Array:
    rows = m.rows(head)
    result: Array = (x.double() @ rows[:, :-1].T + rows[:, -1]).numpy()
    return result


def ridge_on(z: Array, y: Array, penalty: float) -> tuple[Array, Array]:
    """W and b of penalised least squares with an unpenalised constant, by augmented normal
    equations."""
    one = np.hstack([z, np.ones((len(z), 1))])
    ruler = np.diag([penalty] * z.shape[1] + [0.0])
    w: Array = np.linalg.solve(one.T @ one + ruler, one.T @ y)
    return w[:-1], w[-1]


def one_hot(y: Tensor) -> Array:
    rows: Array = np.eye(K)[y.numpy()]
    return rows


@pytest.mark.parametrize("share", [1e-3, 0.1, 10.0])
def test_ridge_is_that_of_the_samples(samples: tuple[Tensor, Tensor], share: float) -> None:
    x, y = samples
    m = heads.moments(totals(x, y))
    w, b = ridge_on(z_of(x), one_hot(y), share * N)
    assert np.allclose(scores(heads.ridge(m, share), m, x), z_of(x) @ w + b, atol=1e-10)


def gcv(z: Array, y: Array, share: float) -> tuple[float, float]:
    """The error n·RSS/(n - df)² and df, by the hat matrix."""
    one = np.hstack([z, np.ones((len(z), 1))])
    ruler = np.diag([share * len(z)] * z.shape[1] + [0.0])
    hat = one @ np.linalg.solve(one.T @ one + ruler, one.T)
    rest, freedom = np.square(y - hat @ y).sum(), np.trace(hat)
    return len(z) * rest / (len(z) - freedom) ** 2, freedom


def test_the_penalty_is_that_of_generalised_cross_validation(
    samples: tuple[Tensor, Tensor],
) -> None:
    x, y = samples
    errors = [gcv(z_of(x), one_hot(y), share)[0] for share in heads.GRID]
    best = int(np.argmin(errors))
    assert 0 < best < len(errors) - 1, "the least is inside the grid"
    head = heads.ridge(heads.moments(totals(x, y)))
    assert head.penalty == heads.GRID[best]
    assert head.freedom * N == pytest.approx(
        gcv(z_of(x), one_hot(y), heads.GRID[best])[1], rel=1e-9
    )


def test_copies_of_samples_do_not_undo_the_penalty() -> None:
    """100 noisy samples in 150 dimensions, five of them twice: without penalty the copies predict
    each other."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (100,), generator=draw)
    x = (25 * torch.randn(100, 150, generator=draw) + 12 * y[:, None]).round().clamp(-127, 127)
    x, y = torch.cat([x, x[:5]]), torch.cat([y, y[:5]])
    head = heads.ridge(heads.moments(totals(x, y, 2)))
    errors = [gcv(z_of(x), np.eye(2)[y.numpy()], share)[0] for share in heads.GRID]
    assert int(np.argmin(errors)) == 0, "the least is at the end of the grid"
    assert head.penalty > 0.01


def test_generalised_cross_validation_is_near_leaving_out_each_sample(
    samples: tuple[Tensor, Tensor],
) -> None:
    """Brute force: fit without a sample, predict it. GCV replaces each leverage by the mean one."""
    x, y = samples
    z, labels = z_of(x), one_hot(y)
    for share in (0.01, 1.0):
        left_out = 0.0
        for i in range(N):
            rest = np.arange(N) != i
            w, b = ridge_on(z[rest], labels[rest], share * N)
            left_out += float(np.square(labels[i] - z[i] @ w - b).sum())
        assert gcv(z, labels, share)[0] == pytest.approx(left_out / N, rel=0.03)


@pytest.mark.parametrize("shrink", [0.05, 0.5])
@pytest.mark.parametrize("kind", ["lda", "cgs", "bayes"])
def test_discriminants_are_log_densities(
    samples: tuple[Tensor, Tensor], kind: heads.Kind, shrink: float
) -> None:
    x, y = samples
    z, labels, alive = z_of(x), y.numpy(), D - 1
    means = np.array([z[labels == c].mean(0) for c in range(K)])
    rest = z - means[labels]
    covariance = z.T @ z / (N - 1) if kind == "cgs" else rest.T @ rest / (N - K)
    if kind == "bayes":
        covariance = np.diag(np.diag(covariance))
    shrunk = (1 - shrink) * covariance + shrink * np.trace(covariance) / D * np.eye(D)
    expected = np.zeros((N, K))
    for c in range(K):
        away = z - means[c]
        inverse = np.linalg.inv(shrunk[:alive, :alive])
        distance = np.einsum("ni,ij,nj->n", away[:, :alive], inverse, away[:, :alive])
        expected[:, c] = np.log((labels == c).mean()) - distance / 2
    m = heads.moments(totals(x, y))
    found = scores(heads.fitted(kind, m, shrink), m, x)
    assert np.allclose(
        found - found.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=1e-5
    )


@pytest.mark.parametrize("unit", [400, 1500, 6000])
def test_rounded_sums_get_nearly_the_best_penalty(unit: int) -> None:
    draw = torch.Generator().manual_seed(2)
    mixing = torch.randn(60, 60, generator=draw) * 0.98 ** torch.arange(60)
    true = torch.randn(60, 3, generator=draw) / 8

    def sampled(n: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(n, 60, generator=draw) @ mixing
        y = (z @ true + 3 * torch.randn(n, 3, generator=draw)).argmax(1)
        return (z * 2).round().clamp(-127, 127), y

    x, y = sampled(1500)
    exact = heads.moments(totals(x, y))
    fresh, labels = sampled(20_000)

    def error(head: heads.Head) -> float:
        wanted = torch.nn.functional.one_hot(labels, 3).double()
        return float((torch.from_numpy(scores(head, exact, fresh)) - wanted).square().mean())

    noise = unit * (8 / 12) ** 0.5
    deviation = noise * float(exact.scale.square().mean())
    e = deviation * torch.randn(60, 60, generator=draw, dtype=torch.float64).triu(1)
    noisy = replace(exact, scatter=exact.scatter + e + e.T, noise=deviation)
    best = min(error(heads.ridge(noisy, share)) for share in heads.GRID)
    assert error(heads.ridge(noisy)) < 1.01 * best
    assert error(heads.ridge(replace(noisy, noise=0.0))) > 2 * best


def test_least_squares_and_discriminants_agree_on_two_classes(
    samples: tuple[Tensor, Tensor],
) -> None:
    """Without penalty the direction of ridge regression is Fisher's (Hastie et al., Elements,
    exercise 4.2)."""
    x, y = samples
    m = heads.moments(totals(x[y < 2], y[y < 2], 2))
    a, b = heads.ridge(m, 1e-9), heads.fitted("lda", m, 0.0)
    one, other = (h.weight[1] - h.weight[0] for h in (a, b))
    assert float(torch.cosine_similarity(one, other, 0)) > 1 - 1e-8


def test_the_nearest_mean(samples: tuple[Tensor, Tensor]) -> None:
    x, y = samples
    z, labels = z_of(x), y.numpy()
    means = np.array([z[labels == c].mean(0) for c in range(K)])
    nearest = np.square(z[:, None] - means[None]).sum(2).argmin(1)
    m = heads.moments(totals(x, y))
    assert (scores(heads.ncm(m), m, x).argmax(1) == nearest).all()


def test_a_class_without_samples_is_never_answered(samples: tuple[Tensor, Tensor]) -> None:
    x, y = samples
    m = heads.moments(totals(x, y, 5))
    for head in (
        heads.ridge(m),
        heads.fitted("lda", m, 0.05),
        heads.fitted("cgs", m, 0.05),
        heads.fitted("bayes", m, 0.05),
        heads.ncm(m),
    ):
        found = scores(heads.calibrated(head, m), m, x)
        assert np.isfinite(found).all()
        assert (found.argmax(1) < K).all()


@pytest.mark.parametrize("spread", [3.0, 40.0])
def test_probabilities_are_as_right_as_they_say(spread: float) -> None:
    """Whatever the scale of the scores: fitted on 600 samples, the log-loss on others is near that
    of the best T."""
    draw = torch.Generator().manual_seed(4)
    y = torch.randint(K, (4600,), generator=draw)
    x = (
        (spread * (torch.randn(4600, 6, generator=draw) + torch.eye(K, 6)[y] * 1.5))
        .round()
        .clamp(-127, 127)
    )
    m = heads.moments(totals(x[:600], y[:600]))
    for head in (heads.ridge(m), heads.fitted("lda", m, 0.05), heads.ncm(m)):
        raw, labels = torch.from_numpy(scores(heads.calibrated(head, m), m, x[600:])), y[600:]
        losses = [
            float(torch.nn.functional.cross_entropy(raw * t, labels))
            for t in (0.5, 0.7, 1.0, 1.4, 2.0)
        ]
        assert losses[2] < min(losses) * 1.03
        confidence, right = (
            raw.softmax(1).max(1).values.mean(),
            (raw.argmax(1) == labels).double().mean(),
        )
        assert float(confidence) == pytest.approx(float(right), abs=0.04)


def test_separable_classes_keep_finite_scores() -> None:
    x, y = torch.tensor([[100.0], [100.0], [-100.0]]), torch.tensor([0, 0, 1])
    m = heads.moments(totals(x, y, 2))
    for head in (heads.ridge(m), heads.fitted("lda", m, 0.0), heads.ncm(m)):
        found = scores(heads.calibrated(head, m), m, x)
        assert np.abs(found).max() < 100
        assert (found.argmax(1) == y.numpy()).all()


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(UserError, match="no samples"):
        heads.moments(measure([], 3, 4))
