"""FedRAN: its parts by hand, runs against a rewrite from the equations and against ridge
regression, and refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden import FederatedData, Hardware, UserError, federate, run
from ekiden.core.models.split import as_split
from ekiden.core.tasks import Classification
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedRAN
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.fixed_features import features_of
from ekiden.methods.exact.fedran import Scatter, SketchedScatter, largest
from ekiden.runs.result import Result

Array = NDArray[np.float64]
METHOD = FedRAN(width=24, ridge=0.01, rank=0.25)
CUTS = (60, 130, 135)


def points(n: int = 200) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    y = torch.randint(3, (n,), generator=draw)
    return 2 * torch.eye(4)[y] + torch.randn(n, 4, generator=draw), y


def silos() -> FederatedData:
    """Four clients, one of which has few samples."""
    x, y = points()
    held = list(zip(torch.tensor_split(x, CUTS), torch.tensor_split(y, CUTS), strict=True))
    return federate(
        held, tests=[(x[::10], y[::10])] * len(held), val_fraction=0.0, classes=["a", "b", "c"]
    )


def go(method: FedRAN = METHOD, **options: Any) -> Result:
    return run(method, silos(), Tiny, hardware=Hardware(threads=1), seed=3, **options)


def test_the_largest_directions_by_hand() -> None:
    rows = torch.tensor([[3.0, 0, 0], [0, 0, 5], [0, 0, 0]], dtype=torch.float64)
    found = largest(rows, 2)
    assert found.abs().tolist() == [[0, 3], [5, 0], [0, 0]]
    assert largest(rows[:, :1], 3).abs().tolist() == [[3, 0, 0], [0, 0, 0], [0, 0, 0]]
    wide = torch.cat([rows, torch.zeros(3, 4)], 1)
    assert largest(wide, 2).abs().tolist() == [[0, 3], [5, 0], [0, 0]], "by the Gram matrix"


def test_scatters_add_up_by_hand() -> None:
    """Class 0 has 0 and 2 at one client, and 5 at the other: 1 and 5 are √(2/3)·4 apart."""
    one = Scatter.of(torch.tensor([[0.0], [2.0]], dtype=torch.float64), torch.tensor([0, 0]), 2)
    other = Scatter.of(torch.tensor([[5.0], [7.0]], dtype=torch.float64), torch.tensor([0, 1]), 2)
    assert (one.means.tolist(), one.squares.tolist()) == ([[1, 0]], [2])
    both = one.plus(other)
    assert both.counts.tolist() == [3, 1]
    assert both.means[0].tolist() == pytest.approx([7 / 3, 7])
    assert both.squares.tolist() == pytest.approx([2 + 16 * 2 / 3])
    assert sorted(both.rows.abs()[0].tolist()) == pytest.approx([0, 0, 0, 1, 1, 4 * (2 / 3) ** 0.5])


def test_scatters_are_those_of_all_samples() -> None:
    x, y = (part[:40] for part in points())
    x = x.double()
    whole = Scatter.of(x, y, 3)
    parts = [Scatter.of(x[rows], y[rows], 3) for rows in (slice(0, 7), slice(7, 8), slice(8, 40))]
    for found in (parts[0].plus(parts[1]).plus(parts[2]), parts[2].plus(parts[0]).plus(parts[1])):
        assert torch.allclose(found.rows @ found.rows.T, whole.rows @ whole.rows.T)
        assert torch.allclose(found.means, whole.means)
        assert torch.allclose(found.squares, whole.squares)


@pytest.mark.parametrize("penalty", [0.0, 0.02])
def test_regression_without_the_gram_matrix_is_ridge_regression(penalty: float) -> None:
    """With 5 columns for 40 features it is not formed; what the columns lack is on its diagonal."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(60, 40, generator=draw, dtype=torch.float64) * torch.linspace(1, 3, 40)
    y = torch.arange(60) % 3
    x[y == 1] += 1
    whole = Scatter.of(x, y, 3)
    thin = replace(whole, rows=largest(whole.rows, 5))
    gram = thin.rows @ thin.rows.T
    gram.diagonal().copy_(whole.squares)
    mean = x.mean(0)
    apart = whole.means - mean[:, None]
    gram += (apart * whole.counts) @ apart.T
    scale = (60 / gram.diagonal()).sqrt()
    products = (apart * whole.counts).T * scale
    m = heads.Moments(
        60,
        mean,
        scale,
        gram * scale.outer(scale),
        products.sum(0),
        products,
        whole.counts,
        whole.counts,
    )
    expected = heads.outputs(heads.ridge(m, penalty), m, Classification())
    found = thin.head(penalty, Classification())
    assert torch.allclose(found, m.rows(expected), rtol=1e-6, atol=1e-8)


def rounded(matrix: Array, most: int) -> Array:
    unit = np.float32(np.abs(matrix).max(0) / most).astype(float)
    found: Array = np.round(matrix / np.where(unit > 0, unit, 1)).clip(-most, most) * unit
    return found


def merged(first: Array, second: Array, rank: int) -> Array:
    """The paper's merge: QR of both parts side by side, the decomposition of R, and its largest
    directions."""
    q, r = np.linalg.qr(np.concatenate([first, second], 1))
    u, s, _ = np.linalg.svd(r)
    k = min(rank, len(s))
    return np.pad((q @ u[:, :k]) * s[:k], ((0, 0), (0, rank - k)))


def rewritten(phi: Array, y: NDArray[np.int64], topology: str, rank: int, share: float) -> Array:
    """Scores (n, K) of ridge regression on merged directions, up to the temperature."""
    one = np.eye(3)[y]
    parts = list(zip(np.split(phi, CUTS), np.split(one, CUTS), strict=True))
    counts, means, sketch, squares = (
        np.zeros(3),
        np.zeros((phi.shape[1], 3)),
        np.zeros((phi.shape[1], rank)),
        np.zeros(phi.shape[1]),
    )
    for i, (of, labels) in enumerate(parts):
        own = labels.sum(0)
        centres = (labels / np.maximum(own, 1)).T @ of
        inside = (of - labels @ centres).T
        own_squares: Any = (inside**2).sum(1)
        if topology == "star":
            inside, centres = (
                rounded(merged(inside[:, :0], inside, rank), 127),
                rounded(centres.T, 2**15 - 1).T,
            )
            own_squares = np.float32(own_squares)
        apart = np.sqrt(own * counts / np.maximum(own + counts, 1)) * (centres.T - means)
        means = (means * counts + centres.T * own) / np.maximum(counts + own, 1)
        counts, squares = counts + own, squares + own_squares + (apart**2).sum(1)
        sketch = np.concatenate([sketch, inside, apart], 1)
        if topology == "chain" and i < len(parts) - 1:
            sketch, means = (
                rounded(merged(sketch[:, :0], sketch, rank), 127),
                rounded(means, 2**15 - 1),
            )
            squares = squares.astype(np.float32).astype(float)
    mean = means @ counts / len(phi)
    gram = sketch @ sketch.T
    gram[np.diag_indices(len(gram))] = squares
    for c in range(3):
        gram += counts[c] * np.outer(means[:, c] - mean, means[:, c] - mean)
    scale = np.sqrt(len(phi) / gram.diagonal())
    z = (phi - mean) * scale
    products = (means - mean[:, None]) * counts * scale[:, None]
    weight = np.linalg.solve(
        gram * np.outer(scale, scale) + share * len(phi) * np.eye(len(gram)), products
    )
    found: Array = z @ weight + counts / len(phi)
    return found


@pytest.mark.parametrize("topology", ["chain", "star"])
def test_a_run_is_the_rewrite(topology: Any) -> None:
    result = go(replace(METHOD, topology=topology))
    x, y = points()
    with torch.no_grad():
        split = as_split(result.model)
        phi = features_of(result.model)(x)
        found = split.head(phi).double().numpy()
    expected = rewritten(phi.double().numpy(), y.numpy(), topology, 6, 0.01)
    factor = (found * expected).sum() / (expected**2).sum()
    assert factor > 0
    assert found == pytest.approx(factor * expected, abs=2e-5 * np.abs(found).max())


def gap(rank: float) -> float:
    """How far scores are from those of ridge regression on all samples, standardised."""
    result = go(replace(METHOD, rank=rank))
    x, y = points()
    with torch.no_grad():
        phi = features_of(result.model)(x).double()
        found = as_split(result.model).head(phi.float()).double()
    z = (phi - phi.mean(0)) / phi.std(0, correction=0)
    one = torch.eye(3, dtype=torch.float64)[y]
    penalty = 0.01 * len(z) * torch.eye(z.shape[1], dtype=torch.float64)
    expected = z @ torch.linalg.solve(z.T @ z + penalty, z.T @ (one - one.mean(0))) + one.mean(0)
    return float((found / found.norm() - expected / expected.norm()).norm())


def test_with_all_directions_it_is_ridge_regression_on_all_samples() -> None:
    gaps = [gap(rank) for rank in (0.1, 0.5, 1.0)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.02, "directions have 8 bits"


def test_what_is_refused() -> None:
    told = Scatter.of(torch.rand(9, 4, dtype=torch.float64), torch.arange(9) % 3, 3).told(2)
    assert told.checked(4, 3, 2) is told
    wrong: list[SketchedScatter] = [
        told._replace(counts=-told.counts),
        told._replace(squares=told.squares * float("nan")),
        told._replace(squares=told.squares[:3]),
        told._replace(sketch=told.means),
        told._replace(means=told.means._replace(units=told.means.units * 1e6)),
        told._replace(sketch=told.sketch._replace(units=-told.sketch.units)),
    ]
    for summary in wrong:
        with pytest.raises(UserError, match="the summary received is of other features"):
            summary.checked(4, 3, 2)
