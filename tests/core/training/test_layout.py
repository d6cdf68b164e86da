"""Layout: where tensors are in flat vectors."""

import pytest
import torch
from torch import nn

from ekiden.core import models
from ekiden.core.training.network import Network, fresh
from ekiden.lab.conformance.small_runs import Tiny


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
    network = Network(models.build("resnet18", (3, 32, 32), 10))
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
    "name", sorted({*models.fitting((3, 64, 64))} - {"scattering"})
)  # which draws nothing but its head
def test_fresh_values_are_drawn_as_the_network_draws_its_own(name: str) -> None:
    module = models.build(name, (3, 64, 64), 10)
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
