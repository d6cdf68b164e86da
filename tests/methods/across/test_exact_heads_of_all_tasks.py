"""FedGram and the closing lap on regression and several labels: against scikit-learn and numpy on
pooled data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor

import ekiden
from ekiden import FederatedData, Hardware, Training, UserError, federate, load_model, run
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import of_method
from ekiden.core.models.split import as_split
from ekiden.core.tasks import MultiLabel, Regression, Task
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedGram, FedSeq
from ekiden.methods.exact.blocks.gaussian_heads import GRID
from ekiden.methods.exact.closing import with_lap
from ekiden.runs.result import Result

Array = np.ndarray[Any, Any]
METHOD = FedGram(width=24)
CUTS = [60, 90, 200, 230]  # the rows from which clients begin


def diabetes() -> tuple[Tensor, Tensor]:
    """442 patients, 10 measurements; the progression of the disease, and what it has over the mean
    blood pressure."""
    bunch = load_diabetes()
    x, y = torch.tensor(20 * bunch.data).float(), torch.tensor(bunch.target).float()
    return x, torch.stack([y, y - 50 * x[:, 3]], 1)


def marked(n: int = 600) -> tuple[Tensor, Tensor]:
    """Four noisy numbers: whether the first is large, whether the second is small, a rare one, and
    one nobody has."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=draw)
    seen = x + 0.8 * torch.randn(n, 4, generator=draw)
    y = torch.stack([x[:, 0] > 0.3, x[:, 1] < -0.8, x[:, 2] > 1.8, x[:, 2] > 99], 1)
    return seen, y.float()


def silos(kind: str, order: Tensor | None = None, cuts: list[int] = CUTS) -> FederatedData:
    """The first 60 rows are the first client's, the others are divided freely; half of its rows are
    also test data."""
    x, y = diabetes() if kind == "regression" else marked()
    rest = torch.arange(cuts[0], len(x)) if order is None else order
    rows = torch.cat([torch.arange(cuts[0]), rest])
    parts = torch.tensor_split(rows, cuts)
    # The scale of targets is that of all, whoever holds them.
    task: Task = MultiLabel()
    if kind == "regression":
        task = Regression(mean=tuple(y.mean(0).tolist()), std=tuple(y.std(0).tolist()))
    held = [(x[r], y[r]) for r in parts]
    return federate(held, tests=[(x[:30], y[:30])] * len(held), val_fraction=0.0, task=task)


class Net(Tiny):
    """With as many outputs as asked for."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Linear(inputs, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


NETS = {"regression": Net(2, 10), "multi-label": Net(4, 4)}


def go(
    kind: str, method: Method = METHOD, data: FederatedData | None = None, **options: Any
) -> Result:
    training = Training(lr=0.01, batch_size=50)
    return run(
        method,
        data or silos(kind),
        NETS[kind],
        training=training,
        hardware=Hardware(threads=1),
        seed=3,
        **options,
    )


def bits(result: Result) -> list[list[float]]:
    assert result.weights is not None
    return [part.tolist() for part in vars(result.weights).values()]


def inside(result: Result, x: Tensor) -> tuple[Array, Array]:
    split = as_split(result.model)
    with torch.no_grad():
        features = split.features(x)
        return features.double().numpy(), split.head(features).double().numpy()


def standardised(features: Array) -> Array:
    spread = features.std(0)
    out: Array = (features - features.mean(0))[:, spread > 0] / spread[spread > 0]
    return out


def fitted(z: Array, targets: Array) -> tuple[Array, Ridge]:
    """Scikit-learn's ridge regression with the λ/n of least GCV error, by the hat matrix written
    out."""
    one, n = np.hstack([z, np.ones((len(z), 1))]), len(z)

    def error(share: float) -> float:
        hat = one @ np.linalg.solve(one.T @ one + np.diag([share * n] * z.shape[1] + [0.0]), one.T)
        freedom = np.trace(hat)
        rest = np.square(targets - hat @ targets).sum()
        return float(n * rest / (n - freedom) ** 2) if freedom <= n / 2 else float("inf")

    chosen = Ridge(alpha=min(GRID, key=error) * n).fit(z, targets)
    return chosen.predict(z), chosen


def test_regression_is_ridge_of_scikit_learn_on_pooled_data() -> None:
    result, (x, y) = go("regression"), diabetes()
    features, found = inside(result, x)
    task = silos("regression").dataset.task
    targets = task.targets(y, 2).double().numpy()
    wanted, _ = fitted(standardised(features), targets)
    assert np.abs(found - wanted).max() < 1e-3  # targets are counted in 1/4096 of a deviation
    answers = task.answers(torch.tensor(found), full=True).numpy()
    test = np.sqrt(np.square(answers[:30] - y[:30].numpy()).mean(0)).mean()
    assert result.metrics[-1]["rmse"] == pytest.approx(test, rel=1e-3)
    assert 1 - np.square(found - targets).sum() / np.square(targets).sum() > 0.4


def test_labels_are_ridge_of_scikit_learn_and_logits_of_their_scores() -> None:
    """Scores are linear in scikit-learn's, label by label; the logits are nearly as good as a
    logistic fit of these.

    Two Gaussians of one variance say less of the rare label, but more than how rare it is.
    """
    result, (x, y) = go("multi-label"), marked()
    features, found = inside(result, x)
    wanted, _ = fitted(standardised(features), 2 * y.double().numpy() - 1)
    for label in range(3):
        slope, shift = np.polyfit(wanted[:, label], found[:, label], 1)
        assert slope > 0
        assert np.allclose(
            found[:, label], slope * wanted[:, label] + shift, atol=1e-3 * np.abs(found).max()
        )
        best = LogisticRegression(C=1e6).fit(wanted[:, [label]], y[:, label].numpy())
        losses = [
            torch.nn.functional.binary_cross_entropy_with_logits(
                torch.tensor(logits), y[:, label].double()
            )
            for logits in (found[:, label], best.decision_function(wanted[:, [label]]))
        ]
        share = float(y[:, label].mean())
        guess = -share * np.log(share) - (1 - share) * np.log(1 - share)
        assert losses[0] < (losses[1] + 0.02 if label < 2 else 0.8 * guess), label
    assert np.all(found[:, 3] == found[0, 3]), "of a label that nobody has nothing is known"
    assert found[0, 3] == pytest.approx(np.log(0.5 / 600.5), rel=1e-4)
    assert result.metrics[-1]["auroc"] > 0.8


@pytest.mark.filterwarnings("ignore:no training sample has the label")
@pytest.mark.parametrize("kind", ["regression", "multi-label"])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_bits_in_any_order_and_division(kind: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y = diabetes() if kind == "regression" else marked()
    rest = 60 + (
        torch.randperm(len(x) - 60, generator=draw) if seed % 2 else y[60:, 0].argsort(stable=True)
    )
    cuts = [
        60,
        *(60 + torch.randperm(len(x) - 62, generator=draw)[: 1 + seed].sort().values + 1).tolist(),
    ]
    method = replace(METHOD, topology="star" if seed % 3 == 0 else "chain")
    assert bits(go(kind, method, silos(kind, rest, cuts))) == bits(
        go(kind, data=silos(kind, cuts=[60]))
    )


@pytest.mark.parametrize("kind", ["regression", "multi-label"])
@pytest.mark.parametrize("shape", ["chain", "star"])
def test_bytes_are_those_of_the_formula(kind: str, shape: Any) -> None:
    method = FedGram(bytes="3kB", topology=shape)
    task, inputs, outputs = silos(kind).dataset.task, *((10, 2) if kind == "regression" else (4, 4))
    network = Network(of_method(lambda: NETS[kind], method, (inputs,), outputs, 3, task)())
    width = network.layout.head.inputs - 1

    def handed(d: int) -> int:
        return 2 * d * (d + 1) + 8 * (outputs + 1) * d + 16 * outputs + 8 + 4 * d + 8 * inputs

    assert handed(width) <= 3000 < handed(width + 1)
    result = go(kind, method)
    hops = 4 if shape == "chain" else 5
    units = width - inputs if 2 * inputs <= width else width
    assert result.bytes == hops * (handed(width) - 4 * (width - units))
    assert method.cost(5, Size.of(network, (inputs,), task)) == result.bytes


def test_a_client_leaves_a_regression_and_the_model_is_loaded(tmp_path: Path) -> None:
    data = silos("regression")
    whole = go("regression", folder=tmp_path / "run")
    loaded = load_model(tmp_path / "run", network=NETS["regression"])
    x, _ = diabetes()
    with torch.no_grad():
        assert torch.equal(loaded(x), whole.model(x))
    without = ekiden.forget(tmp_path / "run", "client-2", data, network=NETS["regression"])
    assert bits(without) == bits(go("regression", data=data.without("client-2")))
    assert bits(without) != bits(whole)


def test_personal_heads_of_a_regression() -> None:
    """Two clients with opposite signs of the effect: the head of all serves neither."""
    x, y = diabetes()
    y = y[:, :1].clone()
    half = len(x) // 2
    y[half:] = 300 - y[half:]
    task = Regression(mean=(150.0,), std=(77.0,))
    data = federate([(x[:half], y[:half]), (x[half:], y[half:])], val_fraction=0.0, task=task)
    result = run(
        replace(METHOD, personal=True), data, Net(1, 10), hardware=Hardware(threads=1), seed=3
    )
    common, own = (result.metrics[-2]["client_mean"], result.metrics[-1]["client_mean"])
    assert own < common - 10, "rmse"


@pytest.mark.parametrize("method", [FedSeq(epochs=2), FedAvg(rounds=2, epochs=1)])
def test_the_closing_lap_of_a_regression(method: Method) -> None:
    before, after, (x, y) = go("regression", method), go("regression", with_lap(method)), diabetes()
    targets = silos("regression").dataset.task.targets(y, 2).double().numpy()
    with torch.no_grad():
        h, found = before.model.features(x).double().numpy(), after.model(x).double().numpy()  # type: ignore[operator]
    wanted, _ = fitted(standardised(h), targets)
    assert np.abs(found - wanted).max() < 5e-3
    with torch.no_grad():
        trained = before.model(x).double().numpy()
    # On the samples it was solved from, least squares beats every trained head; on others either
    # may win.
    assert np.square(found - targets).sum() < np.square(trained - targets).sum()
    network = Network(NETS["regression"])
    model = Size.of(network, (10,), silos("regression").dataset.task)
    assert after.bytes == with_lap(method).moved(after.state, 5, model)


def test_the_closing_lap_of_labels() -> None:
    method = FedSeq(epochs=2)
    before, after, (x, y) = go("multi-label", method), go("multi-label", with_lap(method)), marked()
    with torch.no_grad():
        h, found = before.model.features(x).double().numpy(), after.model(x).double().numpy()  # type: ignore[operator]
    wanted, _ = fitted(standardised(h), 2 * y.double().numpy() - 1)
    for label in range(3):
        assert np.corrcoef(wanted[:, label], found[:, label])[0, 1] > 1 - 1e-5
    assert after.metrics[-1]["loss"] < before.metrics[-1]["loss"]


def test_what_cannot_be_summed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs one class for each sample"):
        go("regression", replace(METHOD, head="lda"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    x, y = diabetes()
    far = y.clone()
    far[3] = 1e6
    data = federate(
        [(x, far)], val_fraction=0.0, task=Regression(mean=(0.0, 0.0), std=(100.0, 100.0))
    )
    with pytest.raises(UserError, match="a target is more than 1048576 steps"):
        go("regression", data=data)
