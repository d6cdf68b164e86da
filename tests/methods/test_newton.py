"""Newton's steps: penalties and hard samples against scikit-learn, logistf and independent
rewrites."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from ekiden import UserError
from ekiden.methods.statistics.newton import (
    Coefficients,
    Derivatives,
    Family,
    Formula,
    Solution,
    derivatives,
    improved,
    solved,
    start,
)

Numbers = np.ndarray[Any, Any]
SEX2 = (
    "0000010:1 0001000:2 0001010:1 0001100:8 0001110:18 0010000:42 0010010:1 0011000:1 0011100:5 "
    "0011110:6 0101100:2 0101110:4 0110000:14 0110010:1 0111000:1 0111110:2 1000010:1 1001000:14 "
    "1001010:3 1001100:10 1001110:12 1001111:1 1010000:44 1010001:3 1011000:15 1011001:1 1011010:2 "
    "1011100:7 1011110:3 1101000:2 1101010:1 1101011:1 1101100:1 1101111:1 1110000:5 1111000:3"
)
"""The study of urinary tract infections in logistf: case, age, oc, vic, vicl, vis, dia, and how
many women."""
LOGISTF = (
    [-1.10598131, -0.06881673, 2.26887464, -2.11140817, -0.78831694, 3.09601166, 0.12025405],
    [0.4236601, 0.4437937, 0.5484159, 0.5430823, 0.4173676, 1.6750089, 0.4855415],
)
"""What logistf prints for it: coefficients and standard errors, the constant last."""


def with_constant(x: Numbers) -> torch.Tensor:
    return torch.tensor(np.c_[x, np.ones(len(x))])


def fit(
    family: Family, x: torch.Tensor, y: Numbers, laps: int = 25, silos: int = 3, **penalty: Any
) -> tuple[Solution, int]:
    """Return the solution of silos that hold every third sample each, and the laps until it
    converged."""
    names = [*(f"x{k}" for k in range(x.shape[1] - 1)), "constant"]
    formula = Formula(family, names, names, **penalty)
    outputs = int(y.max()) + 1 if family == "logistic" else 1
    at, needed = start(family, outputs, x.shape[1]), laps
    labels = torch.tensor(y)
    if family in ("linear", "poisson"):
        labels = labels[:, None]

    def totals(at: Coefficients) -> Derivatives:
        first, *others = (
            derivatives(family, x[k::silos], labels[k::silos], at) for k in range(silos)
        )
        for one in others:
            first = first.plus(one)
        return first

    for lap in range(laps - 1):
        at = improved(formula, at, totals(at))
        if at.final:
            needed = min(needed, lap + 1)
    return solved(formula, at, totals(at)), needed


def cohort(n: int = 150) -> tuple[Numbers, Numbers]:
    draw = np.random.default_rng(4)
    x = draw.normal(size=(n, 3))
    return (x - x.mean(0)) / x.std(0), draw.random(n)


def test_firths_penalty_gives_what_logistf_prints() -> None:
    """One column separates: among 8 women who use a diaphragm there is no control."""
    patterns = [text.split(":") for text in SEX2.split()]
    rows = np.array([[int(bit) for bit in bits] for bits, n in patterns for _ in range(int(n))])
    x, y = with_constant(rows[:, 1:].astype(float)), rows[:, 0]
    assert len(y) == 239
    found, _ = fit("logistic", x, y, firth=True)
    assert found.values[0].tolist() == pytest.approx(LOGISTF[0], abs=2e-6)
    assert found.covariance[0].diagonal().sqrt().tolist() == pytest.approx(LOGISTF[1], rel=2e-6)
    with pytest.raises(
        UserError, match="separate samples without error: 'x5'; give firth or ridge=1"
    ):
        fit("logistic", x, y)


def firth(
    likelihood: Callable[[Numbers], float], information: Callable[[Numbers], Numbers], size: int
) -> Numbers:
    """Return where the likelihood with Firth's penalty is largest, from its definition alone."""

    def loss(b: Numbers) -> float:
        return -likelihood(b) - float(np.linalg.slogdet(information(b))[1]) / 2

    found = minimize(
        loss, np.zeros(size), method="Nelder-Mead", options={"maxiter": 20000, "maxfev": 20000}
    )
    best: Numbers = minimize(
        loss, found.x, method="Powell", options={"xtol": 1e-10, "ftol": 1e-15}
    ).x
    return best


def test_firths_penalty_of_three_classes_is_its_definition() -> None:
    x, u = cohort(40)
    x = x[:, :1]
    y = (u + 0.2 * x[:, 0] > 0.4).astype(int) + (u + 0.3 * x[:, 0] > 0.9)
    rows = np.c_[x, np.ones(len(x))]

    def shares(b: Numbers) -> Numbers:
        e = np.exp(np.c_[np.zeros(len(x)), rows @ b.reshape(2, 2).T])
        p: Numbers = e / e.sum(1, keepdims=True)
        return p

    def information(b: Numbers) -> Numbers:
        total = np.zeros((4, 4))
        for row, p in zip(rows, shares(b)[:, 1:], strict=True):
            total += np.kron(np.diag(p) - np.outer(p, p), np.outer(row, row))
        return total

    wanted = firth(lambda b: float(np.log(shares(b)[np.arange(len(y)), y]).sum()), information, 4)
    found, _ = fit("logistic", with_constant(x), y, firth=True)
    assert found.values[0].numpy() == pytest.approx(wanted, abs=1e-5)


def test_firths_penalty_of_counts_and_of_times_is_its_definition() -> None:
    x, u = cohort(30)
    x = x[:, :2]
    rows, y = np.c_[x, np.ones(len(x))], np.floor(4 * u**3)

    def mean(b: Numbers) -> Numbers:
        found: Numbers = np.exp(rows @ b)
        return found

    wanted = firth(
        lambda b: float(y @ (rows @ b) - mean(b).sum()),
        lambda b: rows.T @ (mean(b)[:, None] * rows),
        3,
    )
    found, _ = fit("poisson", with_constant(x), y, firth=True)
    assert found.values[0].numpy() == pytest.approx(wanted, abs=1e-5)

    time, event = 1 + u, np.arange(len(u)) % 3 > 0  # no ties

    def at_risk(b: Numbers) -> list[tuple[Numbers, Numbers, Numbers]]:
        return [
            (x[k], x[time >= time[k]], np.exp(x[time >= time[k]] @ b))
            for k in np.flatnonzero(event)
        ]

    def likelihood(b: Numbers) -> float:
        return sum(float(own @ b - np.log(w.sum())) for own, _, w in at_risk(b))

    def information(b: Numbers) -> Numbers:
        return sum(np.cov(others.T, aweights=w, bias=True) for _, others, w in at_risk(b))  # type: ignore[return-value]

    wanted = firth(likelihood, information, 2)
    labels = np.c_[time, event].astype(float)
    found, _ = fit("cox", with_constant(x), labels, silos=1, firth=True)
    assert found.values[0, :2].numpy() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_ridge_is_that_of_scikit_learn(strength: float) -> None:
    x, u = cohort()
    y = (u < 1 / (1 + np.exp(2 - x[:, 0]))).astype(int)
    counts = np.floor(5 * u**2 * np.exp(x[:, 1] / 3))
    number = x[:, 2] + u
    models: list[tuple[Family, Numbers, Any]] = [
        ("logistic", y, LogisticRegression(C=1 / strength, tol=1e-12, max_iter=1000)),
        ("poisson", counts, PoissonRegressor(alpha=strength / len(y), tol=1e-12, max_iter=1000)),
        ("linear", number, Ridge(strength)),
    ]
    for family, labels, model in models:
        fitted = model.fit(x, labels)
        found, _ = fit(family, with_constant(x), labels, ridge=strength)
        wanted = [*np.ravel(fitted.coef_), *np.ravel(fitted.intercept_)]
        assert found.values[0].tolist() == pytest.approx(wanted, abs=2e-5), family


def test_ridge_takes_columns_that_follow_from_each_other_and_classes_that_separate() -> None:
    x, _ = cohort()
    twice = np.c_[x, x[:, 0]]
    y = (x[:, 0] > 0).astype(int)
    with pytest.raises(
        UserError, match="columns 'x0', 'x3' are linearly dependent; leave one of them out"
    ):
        fit("logistic", with_constant(twice), y)
    found, _ = fit("logistic", with_constant(twice), y, ridge=1.0)
    assert float(found.values[0, 0]) == pytest.approx(float(found.values[0, 3]))
    wanted = LogisticRegression(C=1.0, tol=1e-12).fit(twice, y).coef_[0]
    assert found.values[0, :4].numpy() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "skew"), [("logistic", 2.0), ("poisson", 0.5), ("poisson", 1.5), ("poisson", 3.0)]
)
def test_skewed_columns_converge_to_where_the_gradient_is_zero(family: Family, skew: float) -> None:
    """The farthest of 300 samples lies up to 17 deviations from the others."""
    draw = np.random.default_rng(0)
    column = np.exp(skew * draw.normal(size=300))
    x = with_constant(np.c_[(column - column.mean()) / column.std(), draw.normal(size=300)])
    eta = np.minimum(x.numpy() @ [1.0, 0.3, 0.5], 8)
    share = draw.random(300) < 1 / (1 + np.exp(-eta))
    y = share.astype(int) if family == "logistic" else draw.poisson(np.exp(eta)).astype(float)
    found, laps = fit(family, x, y, laps=30)
    eta = x.numpy() @ found.values[0].numpy()
    mean = 1 / (1 + np.exp(-eta)) if family == "logistic" else np.exp(eta)
    errors = found.covariance[0].diagonal().sqrt().numpy()
    assert np.abs(x.numpy().T @ (y - mean) * errors).max() < 1e-6
    assert laps <= 25


def test_a_step_too_far_is_halved_also_where_the_sums_have_no_room() -> None:
    x = torch.tensor([[0.0, 1], [0.1, 1], [0.2, 1], [0.1, 1], [9.0, 1]], dtype=torch.float64)
    y = torch.tensor([[1.0], [0], [2], [1], [400]], dtype=torch.float64)
    formula = Formula("poisson", ["x", "constant"], ["x", "constant"])
    at = improved(
        formula, start("poisson", 1, 2), derivatives("poisson", x, y, start("poisson", 1, 2))
    )
    far = at._replace(
        values=at.values + 500, step=torch.full_like(at.step, 500.0), likelihood=-(2**40)
    )
    for _ in range(10):
        after = improved(formula, far, derivatives("poisson", x, y, far))
        assert torch.equal(after.step, far.step / 2)
        assert torch.equal(after.values, far.values - far.step / 2)
        far = after
    for _ in range(30):
        far = improved(formula, far, derivatives("poisson", x, y, far))
    assert far.final
    mean = (x @ far.values[0]).exp()
    assert torch.allclose(x.T @ (y[:, 0] - mean), torch.zeros(2, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox"])
def test_a_likelihood_without_a_maximum_is_noticed_and_its_column_named(family: Family) -> None:
    """In 150 samples the third number is high for five of them only, and these have one answer."""
    x, u = cohort()
    x[:, 2] = np.where(np.arange(150) < 5, 5.0, -0.2)
    y: Numbers = (u < 0.4).astype(int if family == "logistic" else float)
    y[:5] = 0
    labels = np.c_[1 + u, y] if family == "cox" else y
    with pytest.raises(UserError, match="separate samples without error: 'x2'; give") as refusal:
        fit(family, with_constant(x), labels, laps=100, silos=1)
    assert "\n" not in str(refusal.value)
    found, _ = fit(family, with_constant(x), labels, laps=60, silos=1, firth=True)
    assert -5 < float(found.values[0, 2]) < 0


def test_an_indicator_that_a_class_lacks_is_found_in_the_first_sums() -> None:
    x, u = cohort()
    y = (u < 0.4).astype(int)
    x[:, 1] = (np.arange(150) % 4 == 0) & (y == 0)
    x[:, 2] = np.arange(150) % 3 == 0
    with pytest.raises(UserError, match=r"without error: 'x1'; give .*drop_columns=\['x1'\]"):
        fit("logistic", with_constant(x), y, laps=2)


def test_a_regression_that_has_not_converged_says_how_to_go_on() -> None:
    x, u = cohort()
    y = (u < 0.4).astype(int)
    with pytest.raises(
        UserError,
        match=r"has not converged .*standard errors.*: go on by `ekiden resume RUN --laps`",
    ):
        fit("logistic", with_constant(x), y, laps=3)
    few, laps = fit("logistic", with_constant(x), y, laps=8)
    many, _ = fit("logistic", with_constant(x), y, laps=20)
    assert laps < 8
    assert torch.allclose(few.values, many.values, rtol=0, atol=1e-12)
