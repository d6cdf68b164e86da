"""Flat vectors under a module."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ekiden import UserError
from ekiden.core.training.network import Network, blank, compute_aligned
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from tests.methods.toys import weights


def test_views_cover_everything_and_nothing_twice() -> None:
    module = Tiny()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    network = Network(module)
    assert all(
        torch.equal(value, before[name]) for name, value in network.module.state_dict().items()
    )
    assert len(network.params) == sum(p.numel() for p in module.parameters())
    assert len(network.buffers) == 16
    assert len(network.counters) == 1
    network.params.fill_(2.0)
    assert all(bool((p == 2).all()) for p in network.module.parameters())


def test_backward_fills_the_flat_gradient() -> None:
    torch.manual_seed(0)
    network, twin = Network(Tiny()), Tiny()
    twin.load_state_dict(network.module.state_dict())
    x = torch.randn(5, 4)
    for module in (network.module, twin):
        module.eval()
        module(x).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert torch.equal(network.grad, expected)


def test_statistics_ride_along() -> None:
    network = Network(Tiny())
    before = network.weights()
    network.module.train()(torch.randn(8, 4) + 3)
    after = network.weights()
    assert not torch.equal(before.buffers, after.buffers)
    assert after.counters.tolist() == [1]
    network.load(before)
    assert torch.equal(network.weights().buffers, before.buffers)


def test_frozen_parameters_are_not_trained_but_travel() -> None:
    module = Tiny()
    module.head.requires_grad_(False)
    network = Network(module)
    assert len(network.params) == 4 * 8 + 8 + 16
    assert len(network.buffers) == 16 + 8 * 3 + 3


def test_shared_parameters_count_once() -> None:
    layer = nn.Linear(4, 4)
    assert len(Network(nn.Sequential(layer, nn.ReLU(), layer)).params) == 20


@pytest.mark.parametrize(
    ("module", "message"),
    [(nn.Flatten(), "no trainable parameter"), (nn.Linear(2, 2).double(), "float32|float64")],
)
def test_refuses_what_it_cannot_hold(module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Network(module)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_refuses_buffers_that_would_not_travel(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(3, dtype=dtype))
    with pytest.raises(UserError, match="register it as int64"):
        Network(module)
    module.register_buffer("seen", torch.zeros(3, dtype=dtype), persistent=False)
    assert len(Network(module).counters) == 0


def test_refuses_weights_of_another_network() -> None:
    with pytest.raises(UserError, match="do not fit"):
        Network(Tiny()).load(weights(1.0, 2.0))
    own = Network(Tiny()).weights()
    with pytest.raises(UserError, match="do not fit"):
        Network(Tiny()).load(Weights(own.params, own.buffers, torch.empty(0, dtype=torch.int64)))


def test_a_blank_network_holds_loaded_values_and_shows_those_that_were_not() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))

    full, empty = Network(build()), Network(blank(build))
    assert empty.layout == full.layout
    assert torch.isnan(empty.params).all()
    assert torch.isnan(empty.buffers).all()
    empty.load(full.weights())
    x = torch.randn(5, 3, 3, 3)
    assert torch.equal(empty.module.eval()(x), full.module.eval()(x))


class Biased(nn.Module):
    """Has a tensor of its own, which no layer of PyTorch would draw again."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.requires_grad_()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = network[0].weight
    return network


@pytest.mark.parametrize(
    "build", [lambda: Biased(scale=torch.ones(2)), tied], ids=["own tensor", "tied"]
)
def test_a_network_with_values_of_its_own_is_not_blank(build: Callable[[], nn.Module]) -> None:
    module = blank(build)
    assert not any(torch.isnan(t).any() for t in (*module.parameters(), *module.buffers()))


class Scaled(nn.Module):
    """One scalar before a network, so that all its tensors begin at no multiple of 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.first, self.norm, self.last = nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x * self.scale)))
        return out


def test_layers_compute_with_tensors_at_addresses_that_a_gpu_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    network, x = Network(Scaled()), torch.randn(8, 4)
    linear, seen = torch.nn.functional.linear, list[int]()

    def noted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seen.extend([weight.data_ptr() % 16, bias.data_ptr() % 16])
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    network.module(x).square().sum().backward()
    assert all(seen)
    names, before = list(network.module.state_dict()), network.grad.clone()
    compute_aligned(network.module)
    for _ in range(2):
        seen.clear()
        network.grad.zero_()
        network.module(x).square().sum().backward()
        assert seen == [0] * 4
        assert torch.equal(network.grad, before)
    network.params.add_(1)
    assert torch.equal(network.module.get_parameter("first.weight").flatten(), network.params[1:41])
    assert list(network.module.state_dict()) == names
