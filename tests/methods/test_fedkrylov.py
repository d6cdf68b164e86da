"""FedKrylov: against exact ridge regression, its parts against plain formulas, bytes, and what a client refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ekiden import FederatedData, Hardware, UserError, federate, run
from ekiden.data.tasks import Classification, MultiLabel, Regression, Task
from ekiden.engine.method import Size
from ekiden.engine.networks import of_method
from ekiden.methods import FedGram, FedKrylov
from ekiden.methods.blocks.feature_room import features_of
from ekiden.methods.blocks.gaussian_heads import GRID
from ekiden.methods.fedkrylov.handed import HeldAnswers, Labels, Multiplied, OpeningSums, ShortColumns
from ekiden.methods.fedkrylov.solver import PENALTY, Preconditioner, Problem, Span, next_directions
from ekiden.models.split import as_split
from ekiden.results.result import Result
from ekiden.training.network import Network
from tests.conftest import Tiny

METHOD = FedKrylov(width=24, laps=14, ridge=0.01)  # 13 laps of two directions: all of 24 dimensions


def points(n: int = 300) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    y = torch.randint(3, (n,), generator=draw)
    return 2 * torch.eye(4)[y] + torch.randn(n, 4, generator=draw), y


def silos(cuts: tuple[int, ...] = (60, 130, 135, 240), val: float = 0.0, skewed: bool = False) -> FederatedData:
    """Clients that hold consecutive points, ordered by class if `skewed`; all share a test set."""
    x, y = points()
    if skewed:
        order = y.argsort(stable=True)
        x, y = x[order], y[order]
    held = list(zip(torch.tensor_split(x, cuts), torch.tensor_split(y, cuts), strict=True))
    return federate(held, tests=[(x[::10], y[::10])] * len(held), val_fraction=val, classes=["a", "b", "c"])


def go(data: FederatedData, method: FedKrylov | FedGram = METHOD, **options: Any) -> Result:
    return run(method, data, Tiny, hardware=Hardware(threads=1), seed=3, **options)


def scores(result: Result, x: Tensor) -> Tensor:
    with torch.no_grad():
        split = as_split(result.model)
        found: Tensor = split.head(split.features(x))
        return found.double()


def exact(result: Result, x: Tensor, y: Tensor, share: float) -> Tensor:
    """Ridge regression on the result's features of all samples, and its scores."""
    with torch.no_grad():
        phi: Tensor = features_of(result.model)(x).double()
    spread = phi.std(0, correction=0)
    z = (phi - phi.mean(0)) * torch.where(spread.square() > 1e-3 * spread.square().mean(), 1 / spread, 0)
    weight = torch.linalg.solve(
        z.T @ z + share * len(z) * torch.eye(z.shape[1], dtype=torch.float64), z.T @ (y - y.mean(0))
    )
    expected: Tensor = z @ weight + y.mean(0)
    return expected


@pytest.mark.parametrize("skewed", [False, True])
def test_with_enough_laps_it_is_ridge_regression_on_all_samples(skewed: bool) -> None:
    """Up to the temperature, which multiplies all scores, and the rounding of sums."""
    result = go(silos(skewed=skewed))
    x, y = points()
    expected = exact(result, x, torch.eye(3, dtype=torch.float64)[y], 0.01)
    found = scores(result, x)
    centred, wanted = found - found.mean(), expected - expected.mean()
    factor = float((centred * wanted).sum() / wanted.square().sum())
    assert factor > 0
    assert float((centred / factor - wanted).abs().max()) < 0.01 * float(wanted.abs().max())


def test_more_laps_are_closer() -> None:
    x, y = points()
    targets = torch.eye(3, dtype=torch.float64)[y]

    def gap(laps: int) -> float:
        result = go(silos(), replace(METHOD, laps=laps))
        found, expected = scores(result, x), exact(result, x, targets, 0.01)
        found, expected = found - found.mean(), expected - expected.mean()
        return float((found / found.norm() - expected / expected.norm()).norm())

    gaps = [gap(laps) for laps in (2, 4, 14)]
    assert gaps[0] > gaps[1] > gaps[2]


@pytest.mark.parametrize("kind", ["regression", "several labels"])
def test_other_tasks(kind: str) -> None:
    x, y = points()
    numbers = torch.stack([x[:, 0] + 0.1 * x[:, 1], x[:, 2]], 1) if kind == "regression" else torch.eye(3)[y]
    task: Task = Regression(mean=(1.0, 0.5), std=(2.0, 1.5)) if kind == "regression" else MultiLabel()
    held = [(x[i::3], numbers[i::3]) for i in range(3)]
    data = federate(held, tests=held, val_fraction=0.0, task=task)
    result = run(METHOD, data, lambda: Outputs(numbers.shape[1]), hardware=Hardware(threads=1), seed=3)
    targets = task.targets(numbers, numbers.shape[1]).double()
    expected, found = exact(result, x, targets, 0.01), scores(result, x)
    for k in range(targets.shape[1]):
        assert float(torch.corrcoef(torch.stack([found[:, k], expected[:, k]]))[0, 1]) > 0.9999
    if kind == "regression":
        assert float((found - expected).abs().max()) < 0.02


class Outputs(Tiny):
    """With as many outputs as asked for."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(self.head.in_features, outputs)


@pytest.mark.parametrize("cuts", [(1,), (), (298, 299)])
def test_one_client_and_clients_with_one_sample(cuts: tuple[int, ...]) -> None:
    result = go(silos(cuts), FedKrylov(width=24))
    assert result.accuracy > 0.6
    assert (result.bytes == 0) == (not cuts)


def test_a_first_client_with_one_class_is_enough() -> None:
    assert go(silos((40, 150), skewed=True), FedKrylov(width=24, laps=5)).accuracy > 0.8


def test_the_others_may_come_in_any_order() -> None:
    names = ["client-0", "client-3", "client-1", "client-4", "client-2"]
    x, _ = points()
    a, b = (scores(go(silos(), replace(METHOD, order=order)), x) for order in ("given", ",".join(names)))
    assert torch.equal(a.argmax(1), b.argmax(1))
    assert float((a - b).abs().max()) < 0.02 * float(a.abs().max())


@pytest.mark.parametrize("laps", [2, 5])
def test_a_run_moves_no_more_than_its_bytes(laps: int) -> None:
    method = FedKrylov(bytes="20kB", laps=laps, features="random")
    result = go(silos(), method)
    assert result.bytes <= 4 * 20_000
    size = Size.of(Network(of_method(Tiny, method, (4,), 3, 3, Classification())()), (4,))
    assert result.bytes == method.cost(5, size) > 4 * 19_000


def test_bytes_that_are_too_few_are_refused() -> None:
    with pytest.raises(UserError, match=r"has room for no feature: give .*B or more"):
        go(silos(), FedKrylov(bytes="100B"))


def test_the_same_bytes_hold_more_features_than_the_gram_matrix() -> None:
    widths = [
        features_of(go(silos(), method).model).width for method in (FedGram(bytes="100kB"), FedKrylov(bytes="100kB"))
    ]
    assert widths[1] > 5 * widths[0]


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
    problem = Problem.of(torch.cat([phi.T @ of, phi.sum(0)[:, None], phi.square().sum(0)[:, None]], 1), Labels.of(of))
    found = Preconditioner(own, y, problem, 0.2, lambda make: make())(problem.products)
    z = own.double() * problem.scale
    means = torch.stack([z[k::3].mean(0) for k in range(3)])
    within = z - means[torch.arange(rows) % 3]
    classes = torch.stack([((phi - problem.mean) * problem.scale)[k::3].sum(0) / 30**0.5 for k in range(3)])
    p = 90 / rows * within.T @ within + classes.T @ classes + 0.2 * 90 * torch.eye(30, dtype=torch.float64)
    assert torch.allclose(found.double(), torch.linalg.solve(p, problem.products), rtol=1e-3, atol=1e-5)


def test_new_directions_leave_out_the_old_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 40, 3, generator=draw, dtype=torch.float64)
    scale = torch.rand(40, generator=draw, dtype=torch.float64) + 0.5
    u = next_directions(old @ torch.ones(3, 3, dtype=torch.float64) + new, old, scale, 2)
    assert (u.shape, u.dtype, int(u.abs().max())) == ((40, 2), torch.int8, 127)
    v = u.double() / scale[:, None]
    assert float((old.T @ v).abs().max()) < 0.02 * float(old.norm() * v.norm())


@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e9]))
def test_columns_are_rounded_a_little(seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    matrices = [size * torch.randn(7, 3, generator=draw, dtype=torch.float64) for _ in range(2)]
    a, b = map(ShortColumns.of, matrices)
    for matrix, columns in zip(matrices, (a, b), strict=True):
        assert bool(((columns.matrix() - matrix).abs() <= matrix.abs().amax(0) / 65_000).all())
    both = matrices[0] + matrices[1]
    assert float((a.plus(b).matrix() - both).abs().max()) <= float(max(m.abs().max() for m in matrices)) / 10_000
    assert torch.equal(ShortColumns.of(torch.zeros(4, 2)).matrix(), torch.zeros(4, 2, dtype=torch.float64))


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
        lambda o, m: o._replace(sums=o.sums._replace(units=o.sums.units * float("nan"))).checked(5, 3),
        lambda o, m: o._replace(sums=o.sums._replace(units=-o.sums.units)).checked(5, 3),
        lambda o, m: o._replace(labels=o.labels._replace(samples=-1)).checked(5, 3),
        lambda o, m: o._replace(labels=o.labels._replace(powers=-o.labels.powers)).checked(5, 3),
        lambda o, m: o._replace(held=o.held._replace(targets=torch.ones(2).double())).checked(5, 3),
        lambda o, m: o._replace(held=o.held._replace(targets=torch.full((3,), float("inf")).double())).checked(5, 3),
        lambda o, m: m._replace(held=m.held._replace(inner=torch.ones(2, 4).double())).checked(m),
        lambda o, m: m._replace(held=m.held._replace(total=torch.full((2,), float("nan")).double())).checked(m),
        lambda o, m: m._replace(sums=ShortColumns.of(torch.ones(5, 3))).checked(m),
    ],
)
def test_what_another_silo_sends_is_checked(spoilt: Callable[[OpeningSums, Multiplied], object]) -> None:
    opening, multiplied = sums()
    assert opening.checked(5, 3) == opening
    assert multiplied.checked(multiplied) == multiplied
    with pytest.raises(UserError, match="the sums received"):
        spoilt(opening, multiplied)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"laps": 1}, "laps"),
        ({"damping": 0.0}, "damping"),
        ({"ridge": float("nan")}, "ridge"),
        ({"features": "waves"}, "waves"),
        ({"bytes": "a lot"}, "not a size"),
        ({"patch": "0"}, "not a size of patches"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        FedKrylov(**options)


def test_options_for_patches_are_refused_for_vectors() -> None:
    with pytest.raises(UserError, match="--bilinear is for patches"):
        go(silos(), FedKrylov(width=24, bilinear=True))
