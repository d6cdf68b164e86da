"""Conjugate directions of the sums of silos: penalties, residuals, and what others may send."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ekiden import UserError
from ekiden.methods.exact.blocks.fixed_features import ShortColumns
from ekiden.methods.exact.blocks.gaussian_heads import GRID
from ekiden.methods.exact.blocks.krylov import (
    PENALTY,
    HeldAnswers,
    Labels,
    Multiplied,
    OpeningSums,
    Preconditioner,
    Problem,
    Span,
    next_directions,
)
from tests.methods.krylov_runs import honest


def test_lambda_is_that_of_the_validation_samples() -> None:
    """By brute force: the squared error of each value on validation samples themselves."""
    span, targets, held, held_targets = example(validation=80)
    mean, z = targets.mean(0), held[0]

    def error(share: float) -> float:
        c = span.solve(share).weight.T
        return float((held_targets - mean - z @ span.stretched @ c).square().sum())

    assert span.solve().penalty == min(GRID[::-1], key=error)
    few, *_ = example(validation=20)
    assert few.solve().penalty == PENALTY


def example(validation: int) -> tuple[Span, Tensor, tuple[Tensor], Tensor]:
    """Noisy data of 30 features, two laps of two directions."""
    draw = torch.Generator().manual_seed(1)
    phi = (20 * torch.randn(200 + validation, 30, generator=draw, dtype=torch.float64)).round()
    y = 0.02 * phi[:, :2] + torch.randn(len(phi), 2, generator=draw, dtype=torch.float64)
    train, val, of, of_val = phi[:200], phi[200:], y[:200], y[200:]
    sums = torch.cat([train.T @ of, train.sum(0)[:, None], train.square().sum(0)[:, None]], 1)
    problem = Problem.of(sums, Labels.of(of))
    u = torch.randint(-127, 128, (30, 4), generator=draw).double()
    f = val @ u
    held = [HeldAnswers(f[:, :2].T @ f[:, :2], f[:, :2].T @ of_val, f[:, :2].sum(0))]
    held.append(HeldAnswers(f[:, 2:].T @ f, f[:, 2:].T @ of_val, f[:, 2:].sum(0)))
    span = Span(problem, u, train.T @ (train @ u), held, Labels.of(of_val))
    return span, of, ((val - problem.mean) * problem.scale,), of_val


def test_the_residual_is_the_gradient() -> None:
    span, targets, *_ = example(validation=0)
    head = span.solve(0.1)
    draw = torch.Generator().manual_seed(1)
    phi = (20 * torch.randn(200, 30, generator=draw, dtype=torch.float64)).round()
    z = (phi - span.problem.mean) * span.problem.scale
    w = span.stretched @ head.weight.T
    expected = z.T @ (targets - targets.mean(0) - z @ w) - 0.1 * 200 * w
    assert torch.allclose(span.residual(head), expected, atol=1e-6)
    assert float((span.stretched.T @ expected).abs().max()) < 1e-5  # nothing is left in the span


@pytest.mark.parametrize("rows", [10, 60])
def test_the_preconditioner_is_the_inverse_that_it_says(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    own, y = torch.randn(rows, 30, generator=draw), torch.eye(3)[torch.arange(rows) % 3]
    phi = torch.cat([own, torch.randn(90 - rows, 30, generator=draw)]).double()
    of = torch.eye(3, dtype=torch.float64)[torch.arange(90) % 3]
    problem = Problem.of(
        torch.cat([phi.T @ of, phi.sum(0)[:, None], phi.square().sum(0)[:, None]], 1), Labels.of(of)
    )
    found = Preconditioner(own, y, problem, 0.2, lambda make: make())(problem.products)
    z = own.double() * problem.scale
    means = torch.stack([z[k::3].mean(0) for k in range(3)])
    within = z - means[torch.arange(rows) % 3]
    classes = torch.stack(
        [((phi - problem.mean) * problem.scale)[k::3].sum(0) / 30**0.5 for k in range(3)]
    )
    p = (
        90 / rows * within.T @ within
        + classes.T @ classes
        + 0.2 * 90 * torch.eye(30, dtype=torch.float64)
    )
    assert torch.allclose(
        found.double(), torch.linalg.solve(p, problem.products), rtol=1e-3, atol=1e-5
    )


def test_new_directions_leave_out_the_old_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 40, 3, generator=draw, dtype=torch.float64)
    scale = torch.rand(40, generator=draw, dtype=torch.float64) + 0.5
    u = next_directions(old @ torch.ones(3, 3, dtype=torch.float64) + new, old, scale, 2)
    assert (u.shape, u.dtype, int(u.abs().max())) == ((40, 2), torch.int8, 127)
    v = u.double() / scale[:, None]
    assert float((old.T @ v).abs().max()) < 0.02 * float(old.norm() * v.norm())


def sums() -> tuple[OpeningSums, Multiplied]:
    labels = Labels.of(torch.eye(3))
    held = HeldAnswers(torch.eye(2).double(), torch.zeros(2, 3).double(), torch.zeros(2).double())
    return OpeningSums(ShortColumns.of(torch.ones(5, 5)), labels, labels), Multiplied(
        ShortColumns.of(torch.ones(5, 2)), held
    )


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda o, m: o._replace(sums=ShortColumns.of(torch.ones(6, 5))).checked(5, 3),
        lambda o, m: o._replace(sums=o.sums._replace(counts=o.sums.counts.int())).checked(5, 3),
        lambda o, m: o._replace(sums=o.sums._replace(units=o.sums.units * float("nan"))).checked(
            5, 3
        ),
        lambda o, m: o._replace(sums=o.sums._replace(units=-o.sums.units)).checked(5, 3),
        lambda o, m: o._replace(labels=o.labels._replace(samples=-1)).checked(5, 3),
        lambda o, m: o._replace(labels=o.labels._replace(powers=-o.labels.powers)).checked(5, 3),
        lambda o, m: o._replace(held=o.held._replace(targets=torch.ones(2).double())).checked(5, 3),
        lambda o, m: o._replace(
            held=o.held._replace(targets=torch.full((3,), float("inf")).double())
        ).checked(5, 3),
        lambda o, m: m._replace(held=m.held._replace(inner=torch.ones(2, 4).double())).checked(m),
        lambda o, m: m._replace(
            held=m.held._replace(total=torch.full((2,), float("nan")).double())
        ).checked(m),
        lambda o, m: m._replace(sums=ShortColumns.of(torch.ones(5, 3))).checked(m),
    ],
)
def test_what_another_silo_sends_is_checked(
    spoilt: Callable[[OpeningSums, Multiplied], object],
) -> None:
    opening, multiplied = sums()
    assert opening.checked(5, 3) == opening
    assert multiplied.checked(multiplied) == multiplied
    with pytest.raises(UserError, match="the sums received"):
        spoilt(opening, multiplied)


def units(sums: ShortColumns, factor: float) -> ShortColumns:
    return sums._replace(units=sums.units * factor)


@pytest.mark.parametrize(
    "spoilt",
    {
        "huge sums": lambda o, m: (o._replace(sums=units(o.sums, 1e36)), m),
        "sums a hundred times too large": lambda o, m: (o._replace(sums=units(o.sums, 100)), m),
        "negative squares": lambda o, m: (
            o._replace(sums=o.sums._replace(counts=-o.sums.counts)),
            m,
        ),
        "int16's least": lambda o, m: (
            o._replace(sums=o.sums._replace(counts=torch.full_like(o.sums.counts, -(2**15)))),
            m,
        ),
        "no samples": lambda o, m: (o._replace(labels=o.labels._replace(samples=0)), m),
        "samples beyond any float": lambda o, m: (
            o._replace(labels=o.labels._replace(samples=10**400)),
            m,
        ),
        "held samples without labels": lambda o, m: (
            o._replace(held=o.held._replace(samples=100)),
            m,
        ),
        "negative targets": lambda o, m: (
            o._replace(held=o.held._replace(targets=-o.held.targets)),
            m,
        ),
        "huge powers": lambda o, m: (
            o._replace(
                labels=o.labels._replace(
                    targets=o.labels.targets * 1e300, powers=o.labels.powers * 1e300
                )
            ),
            m,
        ),
        "half a sample": lambda o, m: (
            o._replace(held=o.held._replace(targets=o.held.targets / 4, powers=o.held.powers / 4)),
            m,
        ),
        "huge products": lambda o, m: (o, m._replace(sums=units(m.sums, 1e30))),
        "products too large for the samples": lambda o, m: (o, m._replace(sums=units(m.sums, 1e6))),
        "huge held answers": lambda o, m: (
            o,
            m._replace(held=m.held._replace(inner=m.held.inner * 1e290)),
        ),
        "huge held products": lambda o, m: (
            o,
            m._replace(held=m.held._replace(products=m.held.products * 1e9)),
        ),
        "huge held totals": lambda o, m: (
            o,
            m._replace(held=m.held._replace(total=m.held.total * 1e9)),
        ),
    }.items(),
    ids=lambda named: named[0],
)
def test_sums_that_no_samples_have_are_refused(
    spoilt: tuple[str, Callable[[OpeningSums, Multiplied], tuple[OpeningSums, Multiplied]]],
) -> None:
    opening, multiplied = honest()
    opening.checked(5, 3, classes=True)
    multiplied.checked(multiplied).bounded(opening)
    other, another = spoilt[1](opening, multiplied)
    with pytest.raises(UserError, match="that no samples have: refused"):
        another.checked(multiplied).bounded(other.checked(5, 3, classes=True))


def test_numbers_to_predict_need_not_be_whole() -> None:
    y = torch.tensor([[0.3, -2.0], [1.2, 0.5], [-0.4, 0.25]])
    assert Labels.of(y).checked(2, ShortColumns.of(y)).samples == 3
    with pytest.raises(UserError, match="that no samples have"):
        Labels.of(y).checked(2, ShortColumns.of(y), classes=True)
