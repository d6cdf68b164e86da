"""FedKrylov: against exact ridge regression, its parts against plain formulas, bytes, and what a
client refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, UserError, federate, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size
from ekiden.core.engine.setup import of_method
from ekiden.core.models.split import as_split
from ekiden.core.tasks import Classification, MultiLabel, Regression, Task
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram, FedKrylov
from ekiden.methods.exact.blocks.fixed_features import features_of
from ekiden.methods.exact.blocks.krylov import (
    Labels,
    Preconditioner,
    Problem,
    WholeColumns,
)
from ekiden.methods.exact.blocks.whole_features import RandomReLU
from ekiden.runs.result import Result
from tests.methods.krylov_runs import honest

METHOD = FedKrylov(width=24, laps=14, ridge=0.01)  # 13 laps of two directions: all of 24 dimensions


def points(n: int = 300) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    y = torch.randint(3, (n,), generator=draw)
    return 2 * torch.eye(4)[y] + torch.randn(n, 4, generator=draw), y


def silos(
    cuts: tuple[int, ...] = (60, 130, 135, 240), val: float = 0.0, skewed: bool = False
) -> FederatedData:
    """Clients that hold consecutive points, ordered by class if `skewed`; all share a test set."""
    x, y = points()
    if skewed:
        order = y.argsort(stable=True)
        x, y = x[order], y[order]
    held = list(zip(torch.tensor_split(x, cuts), torch.tensor_split(y, cuts), strict=True))
    return federate(
        held, tests=[(x[::10], y[::10])] * len(held), val_fraction=val, classes=["a", "b", "c"]
    )


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
    z = (phi - phi.mean(0)) * torch.where(
        spread.square() > 1e-3 * spread.square().mean(), 1 / spread, 0
    )
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


@pytest.mark.filterwarnings(
    "ignore:(.* the same as the label|each row of all silos has exactly one)"
)
@pytest.mark.parametrize("kind", ["regression", "several labels"])
def test_other_tasks(kind: str) -> None:
    x, y = points()
    numbers = (
        torch.stack([x[:, 0] + 0.1 * x[:, 1], x[:, 2]], 1)
        if kind == "regression"
        else torch.eye(3)[y]
    )
    task: Task = (
        Regression(mean=(1.0, 0.5), std=(2.0, 1.5)) if kind == "regression" else MultiLabel()
    )
    held = [(x[i::3], numbers[i::3]) for i in range(3)]
    data = federate(held, tests=held, val_fraction=0.0, task=task)
    result = run(
        METHOD, data, lambda: Outputs(numbers.shape[1]), hardware=Hardware(threads=1), seed=3
    )
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
    a, b = (
        scores(go(silos(), replace(METHOD, order=order)), x) for order in ("given", ",".join(names))
    )
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
    with pytest.raises(UserError, match=r"has no room for a feature: give .*B or more"):
        go(silos(), FedKrylov(bytes="100B"))


def test_the_same_bytes_hold_more_features_than_the_gram_matrix() -> None:
    widths = [
        features_of(go(silos(), method).model).width
        for method in (FedGram(bytes="100kB"), FedKrylov(bytes="100kB"))
    ]
    assert widths[1] > 5 * widths[0]


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [1e-3, 1e-6, 1e-12])
def test_a_small_lambda_does_not_enlarge_rounding_errors(ridge: float) -> None:
    """With many laps the span has directions in which the rounded sums tell nothing."""
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(5))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    held = [(x[i::3], y[i::3]) for i in range(3)]
    data = federate(held, tests=[(x, y)] * 3, classes=["a", "b", "c"], val_fraction=0.0)
    result = go(data, FedKrylov(width=400, laps=60, ridge=ridge))
    both = torch.stack(
        [scores(result, x).flatten(), exact(result, x, torch.eye(3).double()[y], ridge).flatten()]
    )
    assert float(torch.corrcoef(both)[0, 1]) > 0.999


def test_a_first_client_unlike_the_others_is_solved_with_in_float64() -> None:
    """Its features are hundreds of standard deviations of all clients from their mean."""
    draw = torch.Generator().manual_seed(0)
    own = 1e3 * torch.randn(3, 40, generator=draw).repeat(20, 1) + 1e-3 * torch.randn(
        60, 40, generator=draw
    )
    labels = Labels(
        10**6, torch.full((3,), 10**6 / 3).double(), torch.full((3,), 10**6 / 3).double()
    )
    products = torch.randn(40, 3, generator=draw).double()
    problem = Problem(torch.zeros(40).double(), torch.ones(40).double(), products, labels)
    solver = Preconditioner(
        own, torch.eye(3)[torch.arange(60) // 20], problem, 1e-3, lambda make: make()
    )
    found = solver(problem.products)
    assert found.dtype == torch.float64, "float32 fails here"
    rows = solver._rows.double()
    exact = torch.linalg.solve(rows.T @ rows + 1e3 * torch.eye(40).double(), problem.products)
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", ["scale", "gain"])
def test_scales_that_are_not_positive_are_refused(name: str) -> None:
    features = RandomReLU(4, 12)
    told = list(features.tell())
    told[list(features.settled).index(name)] = -told[list(features.settled).index(name)]
    with pytest.raises(UserError, match=f"a {name} that is not positive: refused"):
        features.adopt(told)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedKrylov(width=5), r"width 5 is too small for features of this kind: give 8 or more"),
        (
            FedKrylov(bytes="100B", dictionary="first"),
            r"bytes 100B \(100 bytes\) has no room for 8 features, the fewest possible: give 724B "
            r"or more",
        ),
    ],
    ids=["width", "bytes"],
)
def test_the_least_that_one_filter_needs_is_named(method: FedKrylov, says: str) -> None:
    x = torch.randint(256, (30, 3, 16, 16), dtype=torch.uint8)
    data = federate([(x, torch.arange(30) % 3)] * 2, classes=["a", "b", "c"])
    with pytest.raises(UserError, match=says):
        go(data, method)
    go(data, FedKrylov(width=8, laps=2))
    go(data, FedKrylov(bytes="724B", dictionary="first"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"laps": 1}, "laps"),
        ({"damping": 0.0}, "damping"),
        ({"damping": 1e-7}, "damping"),
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
    with pytest.raises(UserError, match="bilinear is for patches"):
        go(silos(), FedKrylov(width=24, bilinear=True))


WHOLE = replace(METHOD, sums="whole")


def test_sums_leave_out_classes_with_few_validation_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others take their own parts away: a class of one validation sample would show its answers
    to directions."""
    given: list[Any] = []
    added = Client.added

    def noted(self: Client, before: Any, own: Any, *more: Any) -> Any:
        given.append(own)
        return added(self, before, own, *more)

    monkeypatch.setattr(Client, "added", noted)
    for k, most_at_risk in ((0, True), (4, False)):
        given.clear()
        go(silos(val=0.1), replace(WHOLE, laps=2, min_active=k))
        opened = [own.held.targets for own in given if hasattr(own.held, "targets")]
        assert len(opened) == 5
        alone = [bool(((counts > 0) & (counts < 4)).any()) for counts in opened]
        assert any(alone) == most_at_risk
        answers = [own.held for own in given if hasattr(own.held, "products")]
        for counts, held in zip(opened, answers, strict=True):
            assert not bool(held.products[:, counts == 0].any())


def test_whole_sums_have_the_same_bits_in_any_order_of_the_others() -> None:
    names = ["client-0", "client-3", "client-1", "client-4", "client-2"]
    one, other = (
        go(silos(val=0.3), replace(WHOLE, order=order)).weights
        for order in ("given", ",".join(names))
    )
    assert one is not None
    assert other is not None
    assert torch.equal(one.params, other.params)


@pytest.mark.parametrize("val", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_whole_sums_give_what_rounded_ones_give(val: float) -> None:
    x, y = points()
    short, whole = (go(silos(val=val), replace(method, ridge=0.0)) for method in (METHOD, WHOLE))
    both = torch.stack([scores(result, x).flatten() for result in (short, whole)])
    assert float(torch.corrcoef(both)[0, 1]) > 0.9999
    expected = exact(whole, x, torch.eye(3, dtype=torch.float64)[y], 0.01)
    found = scores(go(silos(), WHOLE), x)
    assert float(torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]) > 0.99


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_whole_sums_of_numbers_to_predict() -> None:
    x, _ = points()
    numbers = torch.stack([x[:, 0] + 0.1 * x[:, 1], x[:, 2]], 1)
    task = Regression(mean=(1.0, 0.5), std=(2.0, 1.5))
    held = [(x[i::3], numbers[i::3]) for i in range(3)]
    for val in (0.0, 0.3):
        data = federate(held, tests=held, val_fraction=val, task=task)
        short, whole = (
            scores(run(method, data, lambda: Outputs(2), hardware=Hardware(threads=1), seed=3), x)
            for method in (METHOD, WHOLE)
        )
        assert float((short - whole).abs().max()) < 0.03


def test_whole_sums_take_the_bytes_of_the_formula_and_are_checked() -> None:
    method = FedKrylov(bytes="20kB", laps=3, features="random", sums="whole")
    result = go(silos(), method)
    size = Size.of(Network(of_method(Tiny, method, (4,), 3, 3, Classification())()), (4,))
    assert 4 * 19_000 < result.bytes == method.cost(5, size) <= 4 * 20_000
    opening, _ = honest()
    whole = opening._replace(
        sums=WholeColumns(opening.sums.matrix().long()), labels=counts(3), held=counts(3)
    )
    whole.checked(5, 3, classes=True)
    for spoilt in (
        whole._replace(labels=opening.labels),
        whole._replace(sums=WholeColumns(whole.sums.matrix())),
        whole._replace(sums=WholeColumns(100 * whole.sums.matrix().long())),
        whole._replace(labels=whole.labels._replace(targets=-whole.labels.targets)),
    ):
        with pytest.raises(UserError, match="the sums received"):
            spoilt.checked(5, 3, classes=True)
    with pytest.raises(UserError, match="the sums received are of other features"):
        whole.plus(opening)


def counts(classes: int) -> Labels:
    """Twelve samples, as many of each class."""
    each = torch.full((classes,), 12 // classes)
    return Labels(12, each, each)
