"""RegMean: pooled least squares, explicit inverses, unseen directions, reductions, bytes, bad
input."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Size
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, RegMean
from ekiden.methods.one_shot.average import Informed
from ekiden.methods.one_shot.blocks.curvature import half, moments
from ekiden.methods.one_shot.regmean import active, shrunk, solved
from tests.methods.merging import TwoLayers, layout, matrix, models, semidefinite, trained

SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16),
    "hardware": Hardware(threads=1),
}
SIZES = (4, 2)


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(o, d + 1) weights and biases."""
    rows: np.ndarray = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0].T
    return rows


def fitted(x: np.ndarray, y: np.ndarray) -> Informed:
    """A client whose linear model is the least squares solution on its own data."""
    rows = torch.tensor(least_squares(x, y), dtype=torch.float32)
    network = Network(nn.Linear(x.shape[1], y.shape[1]))
    network.layout.dense[0].put(network.params, rows)
    samples = torch.tensor(x, dtype=torch.float32)
    grams = moments(network.module, network.layout.dense, [(samples, torch.zeros(len(x)))])
    return Informed(trained(network.weights(), len(x)), [half(g) for g in grams])


def test_a_linear_model_is_the_pooled_least_squares_solution() -> None:
    draw = np.random.default_rng(1)
    data = [
        (draw.normal(size=(n, 5)) * (1 + k), draw.normal(size=(n, 3)) + k)
        for k, n in enumerate((9, 20, 40))
    ]
    linear = Network(nn.Linear(5, 3)).layout
    found = RegMean(alpha=1).merge([fitted(x, y) for x, y in data], linear)
    pooled = least_squares(
        np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data])
    )
    np.testing.assert_allclose(linear.dense[0].matrix(found.params), pooled, rtol=1e-4, atol=1e-5)


def test_equal_inputs_give_the_average() -> None:
    grams = [half(semidefinite(size, size)) for size in SIZES]
    sent = [Informed(trained(m), grams) for m in models(3)]
    found = RegMean(weighting="uniform").merge(sent, layout())
    expected = Average().aggregate([s.trained for s in sent], layout())
    torch.testing.assert_close(found.params, expected.params, rtol=1e-5, atol=1e-6)


def test_where_no_client_has_inputs_the_average_stays() -> None:
    """Inputs 0 and 1 are never seen; of input 2 and the bias only (1, 1) is."""
    seen = torch.zeros(4, 4).double()
    seen[2:, 2:] = 1
    one, two = models(2)
    sent = [
        Informed(trained(m), [half(g), half(torch.zeros(2, 2))])
        for m, g in ((one, seen), (two, 3 * seen))
    ]
    found = RegMean(alpha=1, weighting="uniform").merge(sent, layout())
    a, b = matrix(one, 0), matrix(two, 0)
    expected = (a + b) / 2
    sums = a[:, 2:].sum(1) / 4 + b[:, 2:].sum(1) * 3 / 4 - expected[:, 2:].sum(1)
    expected[:, 2:] += sums[:, None] / 2
    np.testing.assert_allclose(matrix(found, 0), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matrix(found, 1), (matrix(one, 1) + matrix(two, 1)) / 2, rtol=1e-6)


def test_inputs_of_very_different_scales_are_all_solved_for() -> None:
    scale = torch.tensor([1e-4, 1.0, 1e4]).double()
    gram, right = semidefinite(3, 1) * scale[:, None] * scale, torch.ones(2, 3).double()
    torch.testing.assert_close(solved(gram, right) @ gram, right, rtol=1e-6, atol=1e-6)


def test_shrunk() -> None:
    assert shrunk(torch.tensor([[4.0, 2.0], [2.0, 8.0]]), 0.5).tolist() == [[4.0, 1.0], [1.0, 8.0]]


def test_equal_models_and_one_client_stay_as_they_are(blobs: FederatedData) -> None:
    (model,) = models(1)
    sent = [
        Informed(trained(model, 2 + k), [half(semidefinite(s, k + s)) for s in SIZES])
        for k in range(5)
    ]
    assert torch.equal(RegMean().merge(sent, layout()).params, model.params)
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    merged, averaged = (
        run(m, alone, Tiny, **SETTINGS) for m in (RegMean(epochs=2), Average(epochs=2))
    )
    assert merged.weights is not None
    assert averaged.weights is not None
    assert torch.equal(merged.weights.params, averaged.weights.params)


def test_factors_of_adapters_rest_in_turn() -> None:
    """LoRM: in the first round A rests and B reads 2 numbers; in the second A reads 4. The head has
    d = 3."""
    module = Adapted()
    network = Network(module)
    names = [[layer.name[:6] for layer in active(network.layout, round)] for round in range(3)]
    assert names == [["lora_B", "head"], ["lora_A", "head"], ["lora_B", "head"]]
    model = 4 * len(network.params)
    assert RegMean(weighting="uniform").cost(1, Size.of(network)) == model + 4 * (3 + 6)
    assert RegMean(weighting="uniform", rounds=2).cost(1, Size.of(network)) == 3 * model + 4 * (
        3 + 6 + 10 + 6
    )
    with pytest.raises(UserError, match="another factor A"):
        RegMean(init="different").check_network(Size.of(network, (4,)))
    with pytest.raises(UserError, match="for one round"):
        RegMean(init="different", rounds=2)


class Adapted(nn.Module):
    """Adapters of rank 2, named as by peft, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lora_B["default"](self.lora_A["default"](x)))  # type: ignore[no-any-return]


class TwoLayersOfFour(TwoLayers):
    """4-2-3: d = 5 with a bias, and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 2), nn.Linear(2, 3, bias=False)


def test_averaged_layers_are_named_and_wrong_sizes_refused(
    blobs: FederatedData, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ekiden"):
        run(RegMean(epochs=1), blobs, TwoLayersOfFour, **SETTINGS)
    assert "RegMean averages layers that it cannot treat: norm" in caplog.text
    with pytest.raises(UserError, match="do not fit"):
        RegMean().merge(
            [Informed(trained(models(1)[0], 2), [torch.zeros(3), torch.zeros(3)])], layout()
        )
    with pytest.raises(UserError, match="1 tensors came with a model, not 2"):
        RegMean().merge([Informed(trained(models(1)[0], 2), [torch.zeros(3)])], layout())
    with pytest.raises(UserError, match="alpha"):
        RegMean(alpha=1.1)
