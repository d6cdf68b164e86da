"""Class statistics against what PyTorch and scikit-learn compute from the samples."""

from typing import Any

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor
from torch.distributions import MultivariateNormal

from ekiden import UserError
from ekiden.core.engine import wire
from ekiden.methods.chain import fedtasuki
from ekiden.methods.chain.fedtasuki import ClassMoments, measure, rank, size

K, A = 4, 5


def samples(n: int, seed: int = 0, classes: int = K) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    mix = torch.randn(A, A, generator=generator)
    return torch.randn(n, A, generator=generator) @ mix + 3 * torch.randn(
        K, A, generator=generator
    )[y], y


def assert_same(a: ClassMoments, b: ClassMoments, rtol: float = 1e-9) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


def test_means_and_covariance_are_those_of_each_class() -> None:
    x, y = samples(40)
    known = measure(x, y, K)
    assert known.counts.tolist() == [10] * K
    for k in range(K):
        torch.testing.assert_close(known.means[k], x[y == k].double().mean(0))
    within = sum(torch.cov(x[y == k].T.double(), correction=0) for k in range(K)) / K
    torch.testing.assert_close(known.covariance, torch.as_tensor(within))


def test_merging_is_measuring_all_at_once() -> None:
    (x, y), (u, v) = samples(41, 1), samples(30, 2, classes=2)
    whole = measure(torch.cat([x, u]), torch.cat([y, v]), K)
    assert_same(measure(x, y, K).merged(measure(u, v, K)), whole)
    assert_same(measure(u, v, K).merged(measure(x, y, K)), whole)


def test_whole_rank_loses_rounding_only() -> None:
    known = measure(*samples(50), K)
    assert_same(known.compressed(A).moments(K, A), known, rtol=1e-5)


def test_low_rank_keeps_all_variances_and_the_leading_directions() -> None:
    known = measure(*samples(50), K)
    rough = known.compressed(2).moments(K, A)
    torch.testing.assert_close(
        rough.covariance.diagonal(), known.covariance.diagonal(), rtol=1e-5, atol=1e-6
    )
    values, vectors = torch.linalg.eigh(known.covariance)
    leading = vectors[:, -2:] * values[-2:] @ vectors[:, -2:].T
    off = ~torch.eye(A, dtype=torch.bool)
    torch.testing.assert_close(rough.covariance[off], leading[off], rtol=1e-4, atol=1e-5)


def test_moves_with_a_linear_map_of_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedtasuki, "_RIDGE", 0.0)
    (x, y), (own, _) = samples(80), samples(30, 3)
    change, shift = (
        torch.eye(A) + 0.3 * torch.randn(A, A, generator=torch.Generator().manual_seed(4)),
        torch.ones(A),
    )
    moved = measure(x, y, K).moved(own, own @ change + shift)
    assert_same(moved, measure(x @ change + shift, y, K), rtol=1e-4)


def test_what_own_samples_do_not_show_does_not_move() -> None:
    known = measure(*samples(80), K)
    assert_same(known.moved(torch.zeros(9, A), torch.zeros(9, A)), known)
    line = torch.zeros(9, A)
    line[:, 0] = torch.arange(9.0)
    moved = known.moved(line, 2 * line)
    torch.testing.assert_close(moved.means[:, 1:], known.means[:, 1:])
    torch.testing.assert_close(moved.means[:, 0], 2 * known.means[:, 0], rtol=0.02, atol=0.02)


def test_a_class_without_samples_stays_without() -> None:
    known = measure(*samples(30, classes=2), K)
    moved = known.moved(torch.randn(9, A), torch.randn(9, A))
    assert (moved.means[2:] == 0).all()
    assert moved.counts.tolist() == known.counts.tolist()


def test_classifier_gives_the_posterior_of_the_gaussians() -> None:
    x, y = samples(200)
    rare = torch.cat([torch.nonzero(y != 0)[:, 0], torch.nonzero(y == 0)[:7, 0]])
    known = measure(x[rare], y[rare], K)
    rows = known.classifier()
    logits = x.double() @ rows[:, :-1].T + rows[:, -1]
    covariance = known.covariance + 0.05 * known.covariance.diagonal().mean() * torch.eye(
        A, dtype=torch.float64
    )
    gaussians: list[Any] = [MultivariateNormal(m, covariance) for m in known.means]
    joint = [g.log_prob(x.double()) for g in gaussians]
    expected = (torch.stack(joint, 1) + known.counts.log()).softmax(1)
    torch.testing.assert_close(logits.softmax(1), expected, rtol=1e-5, atol=1e-7)


def test_classifier_answers_as_scikit_learn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedtasuki, "_SHRINK", 0.0)
    x, y = samples(200)
    rows = measure(x, y, K).classifier()
    ours = (x.double() @ rows[:, :-1].T + rows[:, -1]).argmax(1)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy()).predict(x.numpy())
    assert ours.tolist() == theirs.tolist()


def test_a_class_that_nobody_has_is_not_chosen_near_others() -> None:
    x, y = samples(90, classes=3)
    rows = measure(x, y, K).classifier()
    assert torch.isfinite(rows).all()
    assert ((x.double() @ rows[:, :-1].T + rows[:, -1]).argmax(1) != 3).float().mean() > 0.98


def test_one_sample_and_features_that_never_change_give_finite_numbers() -> None:
    known = measure(torch.zeros(1, A), torch.zeros(1, dtype=torch.long), K)
    known = (
        known.moved(torch.zeros(1, A), torch.zeros(1, A)).merged(known).compressed(A).moments(K, A)
    )
    assert torch.isfinite(known.classifier()).all()


@pytest.mark.parametrize("r", [0, 3, A])
def test_size(r: int) -> None:
    assert wire.size(measure(*samples(20), K).compressed(r)) == size(K, A, r)


@pytest.mark.parametrize("model", [1000, 4321, 10**6])
def test_rank_is_what_fits(model: int) -> None:
    r = rank(K, A, 20 * model)
    assert size(K, A, r) <= model
    assert r == A or size(K, A, r + 1) > model
    assert rank(K, A, 100) < 0


@pytest.mark.parametrize(("classes", "features"), [(K + 1, A), (K, A - 1)])
def test_refuses_those_of_another_network(classes: int, features: int) -> None:
    known = measure(*samples(20), K).compressed(2)
    with pytest.raises(UserError, match="same model"):
        known.moments(classes, features)
    with pytest.raises(UserError, match="same model"):
        known._replace(factor=known.factor[1:]).moments(K, A)
