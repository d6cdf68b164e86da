"""DeepAFL: Δ against a brute-force solve, a whole run against plain numpy, ridge, partitions,
bytes, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Size
from ekiden.core.models.split import SplitNetwork
from ekiden.core.training.network import Network
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DeepAFL
from ekiden.methods.one_shot.deepafl import LeastSquaresSums, Residual, sandwiched
from ekiden.runs.result import Result

SETTINGS: dict[str, Any] = {"training": Training(batch_size=16), "hardware": Hardware(threads=1)}


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


@pytest.mark.parametrize(("n", "f", "d", "k"), [(30, 5, 4, 3), (7, 9, 6, 2), (20, 3, 2, 5)])
@pytest.mark.parametrize("ridge", [0.05, 3.0])
def test_delta_minimises_the_sandwiched_objective(
    n: int, f: int, d: int, k: int, ridge: float
) -> None:
    """Row-wise, vec(F Δ W) = (F ⊗ Wᵀ) vec(Δ): one ridge regression of f·d unknowns."""
    features, residual, w = drawn(n, f), drawn(n, k), drawn(d, k)
    gain = sandwiched(features.T @ features, features.T @ residual, w, ridge)
    design = np.kron(features.numpy(), w.numpy().T)
    target = residual.numpy().reshape(-1)
    expected = np.linalg.solve(
        design.T @ design + ridge * np.eye(f * d), design.T @ target
    ).reshape(f, d)
    np.testing.assert_allclose((gain @ w.T).numpy(), expected, atol=1e-9)


def test_delta_where_the_classifier_is_zero_is_zero() -> None:
    gain = sandwiched(
        drawn(4, 4) @ drawn(4, 4).T, drawn(4, 3), torch.zeros(5, 3, dtype=torch.float64), 0.1
    )
    assert torch.equal(
        gain @ torch.zeros(3, 5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.float64)
    )


def pooled(data: FederatedData) -> tuple[Tensor, Tensor]:
    """All training samples as the network takes them."""
    rows = torch.cat([c.train.rows for c in data.clients])
    mean, std = (
        torch.tensor(t, dtype=torch.float32) for t in (data.dataset.mean, data.dataset.std)
    )
    assert mean.numel() <= 1
    x = data.dataset.train.x[rows].float()
    return (x - mean) / std if mean.numel() else x, data.dataset.train.y[rows]


def layers_of(result: Result) -> nn.Sequential:
    head = result.model.get_submodule("head")
    assert isinstance(head, nn.Sequential)
    return head


def values(layer: nn.Module) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()


def test_a_run_is_what_the_equations_give_on_all_samples(blobs: FederatedData) -> None:
    """The code's formulas on pooled data: eigendecompositions of W Wᵀ and FᵀF, as the authors write
    them."""
    method = DeepAFL(
        layers=2, width=12, random_features=9, activation="tanh", ridge=0.7, sandwich=0.3
    )
    result = run(method, blobs, Tiny, **SETTINGS)
    head = layers_of(result)
    x, labels = pooled(blobs)
    with torch.no_grad():
        h = result.model.get_submodule("features")(x).double().numpy()
    y = np.eye(3)[labels.numpy()]
    r, b = values(head[1])
    z = np.tanh(h @ r.T + b)
    for t in range(3):
        w = np.linalg.solve(z.T @ z + 0.7 * np.eye(12), z.T @ y)
        if t == 2:
            break
        residual = head[3 + t]
        assert isinstance(residual, Residual)
        r, b = values(residual.random)
        f = np.tanh(z @ r.T + b)
        sw, u = np.linalg.eigh(w @ w.T)
        sf, v = np.linalg.eigh(f.T @ f)
        inner = u.T @ (w @ (y - z @ w).T @ f) @ v / (0.3 + np.outer(sw, sf))
        delta = (u @ inner @ v.T).T
        np.testing.assert_allclose(
            residual.delta.weight.detach().numpy(), delta.T, rtol=1e-3, atol=1e-4
        )
        z = z + f @ delta
    last = head[-1]
    assert isinstance(last, nn.Linear)
    np.testing.assert_allclose(last.weight.detach().numpy(), w.T, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        np.testing.assert_allclose(result.model(x).numpy(), z @ w, atol=1e-4)


def test_the_loss_on_training_data_falls_with_each_layer(blobs: FederatedData) -> None:
    """Δ = 0 is a candidate of each layer; the next ridge regression starts from what the layer
    gives."""
    x, labels = pooled(blobs)
    y = F.one_hot(labels, 3).float()
    errors = []
    for layers in (0, 1, 2, 3):
        result = run(
            DeepAFL(layers=layers, width=16, random_features=16, ridge=1e-3),
            blobs,
            Tiny,
            **SETTINGS,
        )
        with torch.no_grad():
            errors.append(float((result.model(x) - y).pow(2).sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.95 * errors[0]


def test_without_layers_it_is_ridge_regression(blobs: FederatedData) -> None:
    result = run(
        DeepAFL(layers=0, width=10, features="inputs", ridge=2.0, scale=3.0),
        blobs,
        Tiny,
        **SETTINGS,
    )
    x, labels = pooled(blobs)
    head = layers_of(result)
    r, b = values(head[1])
    z = np.tanh(x.double().numpy() @ r.T + b)
    w = np.linalg.solve(z.T @ z + 2 * np.eye(10), z.T @ np.eye(3)[labels.numpy()])
    last = head[-1]
    assert isinstance(last, nn.Linear)
    np.testing.assert_allclose(last.weight.detach().numpy(), w.T, atol=1e-5)
    assert np.abs(r).max() > 3 * 0.9 * 4**-0.5, "three times torch's own range"
    assert np.abs(b).max() <= 4**-0.5
    assert result.metrics[-1]["backward"] == 0


@pytest.mark.filterwarnings("ignore:silo .* shares no class")
def test_the_partition_does_not_matter() -> None:
    x, y = drawn(60, 4).float(), torch.arange(60) % 3
    halves = [(x[y < 1], y[y < 1]), (x[y >= 1], y[y >= 1])]
    parts = [(x[i::5], y[i::5]) for i in range(5)]
    method = DeepAFL(layers=2, width=20, random_features=10)
    heads = []
    for split in ([(x, y)], halves, parts):
        data = federate(split, test=(x, y), val_fraction=0)
        result = run(method, data, Tiny, **SETTINGS)
        assert result.weights is not None
        heads.append(result.weights.params)
    torch.testing.assert_close(heads[1], heads[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(heads[2], heads[0], atol=2e-6, rtol=1e-5)


def test_bytes_by_hand(blobs: FederatedData) -> None:
    """D = 5, F = 7, K = 3, T = 1: triangles of 15 and 28; z: 15 + 15, f: 28 + 21; down W 15 and G
    21; float64."""
    result = run(DeepAFL(layers=1, width=5, random_features=7), blobs, Tiny, **SETTINGS)
    assert [row["bytes"] for row in result.metrics] == [
        4 * 8 * 30,
        4 * 8 * (30 + 15 + 49),
        4 * 8 * (30 + 15 + 49 + 21 + 30),
    ]
    assert result.metrics[-1]["forward"] == 3 * sum(len(c.train) for c in blobs.clients)


def test_networks_without_a_linear_classifier_are_refused() -> None:
    method = DeepAFL()
    with pytest.raises(UserError, match=r"nn\.Linear"):
        method.check_network(Size.of(Network(SplitNetwork(nn.Flatten(), nn.Conv1d(1, 3, 1))), (4,)))
    pooling = SplitNetwork(nn.Identity(), nn.Sequential(nn.AdaptiveAvgPool1d(2), nn.Linear(2, 3)))
    with pytest.raises(UserError, match="begin with"):
        method.check_network(Size.of(Network(pooling), (4,)))
    method.check_network(Size.of(Network(Tiny()), (4,)))


def test_sums_of_another_shape_or_type_are_refused() -> None:
    one = LeastSquaresSums(torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(UserError, match="fit together"):
        LeastSquaresSums(torch.zeros(5, dtype=torch.int64), one.products)
    with pytest.raises(UserError, match="different shape"):
        one.plus(LeastSquaresSums(one.squares, torch.zeros(2, 4, dtype=torch.int64)))
    with pytest.raises(UserError, match="int64"):
        LeastSquaresSums(torch.zeros(3), one.products)


def test_a_run_stops_without_a_client_whose_layers_would_be_missing(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="client-1 did not answer"):
        run(
            DeepAFL(layers=1, width=8, random_features=4),
            blobs,
            Tiny,
            absent=lambda step, client: (step, client) == (1, "client-1"),
            **SETTINGS,
        )
