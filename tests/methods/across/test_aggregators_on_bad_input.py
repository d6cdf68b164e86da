"""Every one-shot aggregator on clients that are hard to aggregate: a defined result, or one clear
error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Method
from ekiden.core.training.network import Network
from ekiden.data import federate
from ekiden.methods import (
    DENSE,
    Average,
    Ensemble,
    FedFisher,
    FedLPA,
    FedOV,
    FisherMerging,
    MAEcho,
    OTFusion,
    RegMean,
)
from ekiden.methods.blocks.combining import Trained
from ekiden.methods.one_shot.blocks.ensemble import copies, join
from ekiden.methods.one_shot.ma_echo import Contribution

pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
METHODS: list[Method] = [
    Average(epochs=2),
    Average(epochs=2, weighting="samples"),
    Average(epochs=2, combine_heads="class-wise", init="different"),
    Average(epochs=2, combine_heads="class-counts"),
    *(
        Ensemble(epochs=2, rule=rule)
        for rule in ("logits", "probabilities", "majority", "class-wise", "counts")
    ),
    OTFusion(epochs=2, combine_heads="class-wise"),
    OTFusion(epochs=2, alignment="activations", normalise=False, squared=True),
    OTFusion(epochs=2, sinkhorn=0.1),
    MAEcho(epochs=2, iterations=5),
    MAEcho(epochs=2, iterations=5, normalise=True, init="different", align=True, ranks="1"),
    MAEcho(epochs=2, iterations=5, weighting="qp", projector="closed", decentralised=True),
    MAEcho(
        epochs=2,
        iterations=5,
        form="paper",
        step=0.5,
        weighting="qp",
        normalise=True,
        origin="first",
    ),
    FisherMerging(epochs=2),
    FisherMerging(epochs=2, normalise=True, fisher="given", weighting="uniform"),
    RegMean(epochs=2),
    RegMean(epochs=2, alpha=1.0, init="different"),
    FedFisher(epochs=2, iterations=50),
    FedFisher(epochs=2, curvature="diagonal", iterations=50),
    FedLPA(epochs=2),
    FedLPA(epochs=2, solve="mean-factors", fisher="sampled"),
    DENSE(epochs=2, distill_epochs=1, steps_per_batch=2, distill_batch_size=4),
    FedOV(epochs=2),
    FedOV(epochs=2, voters=5, init="same"),
]


def points(n: int, *classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
    return torch.randn(n, 4, generator=generator) + 2 * torch.eye(4)[y], y


TEST = points(40, 0, 1, 2, 3)
ZEROS = (torch.zeros(9, 4), torch.arange(9) % 3)
CASES: dict[str, list[tuple[Tensor, Tensor]]] = {
    "one client": [points(30, 0, 1, 2, 3)],
    "one class each": [points(20, c) for c in range(4)],
    "a class nobody has": [points(20, 0, 1, 2), points(20, 1, 2)],
    "one sample of a class": [points(20, 0, 1, 2, 3), points(1, 2)],
    "inputs all zero": [ZEROS, points(20, 0, 1, 2, 3)],
    "inputs all alike": [(torch.ones(9, 4), ZEROS[1]), (torch.ones(20, 4), torch.arange(20) % 4)],
    "huge inputs": [(1e4 * x, y) for x, y in (points(20, 0, 1), points(20, 2, 3))],
}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


FAST = {
    "one class each": normed,
    "a class nobody has": normed,
    "one sample of a class": plain,
    "inputs all zero": plain,
    "huge inputs": normed,
}
"""cases, and the network with which they are fast; Sinkhorn's iteration, which takes a second, in
one of them"""


def fast(case: str, method: Method, make: Callable[[], nn.Module]) -> bool:
    return FAST.get(case) is make and (
        getattr(method, "sinkhorn", 0) == 0 or case == "inputs all zero"
    )


def named(method: Method) -> str:
    usual = vars(type(method)())
    chosen = [
        f"{k}={v}"
        for k, v in vars(method).items()
        if v != usual[k] and k not in ("epochs", "iterations")
    ]
    return " ".join([method.title(), *chosen])


@pytest.mark.filterwarnings("ignore:silo .* shares no class")
@pytest.mark.filterwarnings("ignore:.* test rows are of classes without a training row")
@pytest.mark.filterwarnings("ignore:training diverged")  # logits of huge inputs make a huge loss
@pytest.mark.parametrize(
    ("case", "method", "make"),
    [
        pytest.param(
            case,
            method,
            make,
            marks=[] if fast(case, method, make) else [pytest.mark.slow],
            id=f"{case}-{named(method)}-{make.__name__}",
        )
        for case in CASES
        for method in METHODS
        for make in (plain, normed)
    ],
)
def test_a_defined_result(case: str, method: Method, make: Callable[[], nn.Module]) -> None:
    data = federate(CASES[case], test=TEST, val_fraction=0)
    settings: dict[str, Any] = {
        "training": Training(lr=0.01, batch_size=8),
        "hardware": Hardware(threads=1),
    }
    result = run(method, data, make, evaluate_every=10**9, **settings)
    models = [result.weights] if result.weights is not None else result.personal
    assert models
    assert all(m.is_finite() for m in models)
    if result.weights is not None:
        answers = result.model(TEST[0])
        assert answers.shape == (40, 4)
        assert torch.isfinite(answers).all()


@pytest.mark.filterwarnings("ignore:.* test rows are of classes without a training row")
@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, DENSE)], ids=named)
def test_the_row_of_a_class_nobody_has_is_zero_where_rows_belong_to_owners(method: Method) -> None:
    data: FederatedData = federate(CASES["a class nobody has"], test=TEST, val_fraction=0)
    result = run(method, data, plain, training=Training(lr=0.01), hardware=Hardware(threads=1))
    owners = getattr(method, "combine_heads", "mean") != "mean" or getattr(method, "rule", "") in (
        "class-wise",
        "counts",
    )
    if result.weights is None:
        model = plain()
        network = Network(model)
        network.load(result.personal[0])
    else:
        model = result.model
    scores: Callable[[Tensor], Tensor] = getattr(model, "scores", model)
    assert owners == bool((scores(TEST[0])[:, 3] == 0).all())


def test_models_of_different_shape_are_refused_in_one_line() -> None:
    a, b = Network(plain()), Network(nn.Linear(4, 4))
    counts = torch.ones(4, dtype=torch.int64)
    models = [a.weights(), b.weights()]
    wrong: list[Callable[[], object]] = [
        lambda: Average().aggregate([Trained(m, counts) for m in models], a.layout),
        lambda: join(plain(), models, "logits", torch.ones(2, 4)),
        lambda: MAEcho().aggregate(
            [Contribution(m, [torch.eye(4)], counts > 1) for m in models], a.layout
        ),
        lambda: copies(plain(), models),  # FedOV and DENSE
    ]
    for attempt in wrong:
        with pytest.raises(UserError, match=r"shape|fit|different") as error:
            attempt()
        assert "\n" not in str(error.value)


def test_an_infeasible_bound_is_refused_before_anybody_trains() -> None:
    data = federate(CASES["one class each"], test=TEST)
    with pytest.raises(UserError, match=r"bound 0\.2 .* 1/N = 0\.25"):
        run(MAEcho(weighting="qp", bound=0.2), data, plain)
