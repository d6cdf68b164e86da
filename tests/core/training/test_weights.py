"""Averages and distances of models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ekiden import UserError
from ekiden.core.models import catalogue
from ekiden.core.training.network import Network, fresh
from ekiden.core.training.weights import Weights, distance, mean
from ekiden.lab.conformance.small_runs import Tiny
from tests.methods.toys import weights


def test_mean_of_parameters_statistics_and_counters() -> None:
    a = Weights(torch.tensor([0.0, 4.0]), torch.tensor([1.0]), torch.tensor([3]))
    b = Weights(torch.tensor([2.0, 0.0]), torch.tensor([5.0]), torch.tensor([7]))
    average = mean([a, b], [1, 3])
    assert average.params.tolist() == [1.5, 1.0]
    assert average.buffers.tolist() == [4.0]
    assert average.counters.tolist() == [7]
    assert a.params.tolist() == [0.0, 4.0], "inputs stay as they are"


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), st.data())
def test_mean_equals_the_sum_in_float64(values: list[float], data: st.DataObject) -> None:
    share = st.integers(0, 5)
    shares = data.draw(st.lists(share, min_size=len(values), max_size=len(values)).filter(any))
    expected = sum(v * w for v, w in zip(values, shares, strict=True)) / sum(shares)
    average = mean([weights(v) for v in values], [float(s) for s in shares])
    assert float(average.params) == pytest.approx(expected, abs=2e-3)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 7))
def test_equal_models_average_to_themselves_bit_for_bit(value: float, n: int) -> None:
    assert torch.equal(mean([weights(value)] * n).params, weights(value).params)


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -0.5], [1.0]])
def test_mean_refuses_bad_weights(shares: list[float]) -> None:
    with pytest.raises(UserError, match="weight"):
        mean([weights(1.0), weights(2.0)], shares)


def test_mean_refuses_models_of_different_shape() -> None:
    with pytest.raises(UserError, match="same network"):
        mean([weights(1.0), weights(2.0, 3.0)])
    with pytest.raises(UserError, match="same network"):
        mean([weights(1.0), replace(weights(1.0), counters=torch.tensor([3]))])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_model_of_weight_zero_has_no_part_in_the_mean(place: int) -> None:
    models, shares = [weights(1.0), weights(4.0)], [1.0, 2.0]
    models.insert(place, weights(float("nan")))
    shares.insert(place, 0.0)
    assert mean(models, shares).params.tolist() == [3.0]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_distance(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiden.core.training.weights.piece", lambda flat: chunk)
    a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(distance(a, b), (a - b).pow(2).sum())


def test_is_finite() -> None:
    assert weights(1.0, 2.0).is_finite()
    assert not weights(1.0, float("nan")).is_finite()
    assert not Weights(
        torch.zeros(1), torch.tensor([float("inf")]), torch.zeros(0, dtype=torch.int64)
    ).is_finite()


def test_parts_are_the_tensors_of_the_module() -> None:
    network = Network(Tiny())
    state = network.module.state_dict()
    for part in network.layout.params:
        assert torch.equal(part.of(network.params), state[part.name])
    for part in network.layout.buffers:
        assert torch.equal(part.of(network.buffers), state[part.name])


def test_layers_and_their_kinds() -> None:
    layout = Network(Tiny()).layout
    assert [(layer.name, layer.kind, layer.width) for layer in layout.layers] == [
        ("features.0", "linear", 8),
        ("features.1", "norm", 8),
        ("head", "linear", 3),
    ]
    assert [p.name for p in layout.layers[1].statistics] == [
        "features.1.running_mean",
        "features.1.running_var",
    ]
    assert [layer.inputs for layer in layout.dense] == [5, 9]
    assert (layout.head.name, layout.classes) == ("head", 3)


def test_every_parameter_belongs_to_one_layer() -> None:
    network = Network(catalogue.build("resnet18", (3, 32, 32), 10))
    parts = [part for layer in network.layout.layers for part in layer.params]
    assert sorted(parts, key=lambda p: p.start) == list(network.layout.params)
    assert sum(layer.kind == "conv" for layer in network.layout.layers) == 20


def test_frozen_and_shared_parameters() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    frozen = nn.Linear(3, 3).requires_grad_(False)
    network = Network(nn.Sequential(first, frozen, second))
    assert [(layer.name, len(layer.params)) for layer in network.layout.layers] == [
        ("0", 2),
        ("2", 1),
    ]
    assert network.layout.layers[1].kind == "other"


def test_matrix_and_put_are_inverse() -> None:
    network = Network(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 5, bias=False)))
    params = torch.zeros_like(network.params)
    for layer in network.layout.layers:
        matrix = layer.matrix(network.params)
        assert matrix.shape == (layer.width, layer.inputs)
        layer.put(params, matrix)
    assert torch.equal(params, network.params)


def test_fresh_values_depend_on_the_seed_only() -> None:
    module = Tiny()
    a, b, c = (Network(fresh(module, seed)).params for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, Network(module).params)


@pytest.mark.parametrize(
    "name", sorted({*catalogue.fitting((3, 64, 64))} - {"scattering"})
)  # which draws nothing but its head
def test_fresh_values_are_drawn_as_the_network_draws_its_own(name: str) -> None:
    module = catalogue.build(name, (3, 64, 64), 10)
    again = fresh(module, 1)
    for built, drawn in zip(
        *([p.detach() for p in m.parameters()] for m in (module, again)), strict=True
    ):
        if built.numel() >= 400 and built.std() > 0:
            assert float(drawn.std()) == pytest.approx(float(built.std()), rel=0.2)
            assert not torch.equal(built, drawn)


def test_frozen_layers_are_not_drawn_anew() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    module[:2].requires_grad_(False)
    before = {name: torch.full_like(value, 7) for name, value in module.state_dict().items()}
    module.load_state_dict(before)
    after = fresh(module, 1).state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "2.weight",
        "2.bias",
    }
