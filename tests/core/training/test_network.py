"""Flat vectors under a module, and networks of any width."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ekiden import UserError
from ekiden.core.engine.method import Size
from ekiden.core.models import catalogue
from ekiden.core.training.network import (
    Elastic,
    Network,
    adapted,
    assemble,
    blank,
    check,
    compute_aligned,
    folded,
    matrices,
    on_meta,
)
from ekiden.core.training.weights import Part, Weights
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

    full, empty = Network(build()), Network(blank(build, on_meta(build)))
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
    module = blank(build, on_meta(build))
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


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def trained(module: nn.Module) -> nn.Module:
    """As after training: values of all kinds, including BatchNorm's statistics."""
    network, draw = Network(module), torch.Generator().manual_seed(5)
    network.params.copy_(torch.randn(network.params.shape, generator=draw) / 3)
    network.buffers.uniform_(0.5, 2, generator=draw)
    return network.module.eval()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 6, bias=False),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


@pytest.mark.parametrize(("make", "shape"), [(Tiny, (4,)), (convolutions, (2, 8, 8))])
def test_folding_keeps_the_function_of_inference(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = trained(make())
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(5, *shape)
    result = folded(module.requires_grad_(False))
    assert not any("Norm" in type(m).__name__ for m in result.modules())
    assert all(p.requires_grad for p in result.parameters())
    torch.testing.assert_close(result(x), module(x), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())  # a copy


def test_forms_and_sizes() -> None:
    elastic = Elastic(convolutions())
    assert elastic.widths.tolist() == [4, 5, 6]
    # 2 channels of 3x3; kernels of 9; 4 positions of each flattened channel; biases come from the
    # norms
    assert [tuple(f) for f in elastic.forms] == [(18, True), (9, True), (4, False), (1, True)]
    assert elastic.sizes([4, 5, 6]) == [4 * 19, 5 * 37, 6 * 20, 3 * 7]
    assert sum(elastic.sizes([4, 5, 6])) == sum(p.numel() for p in elastic.parameters())
    elastic.adapt([7, 3, 9])
    assert elastic.sizes([7, 3, 9]) == [p.numel() for p in matrices(Network(elastic))]
    assert elastic(torch.zeros(1, 2, 8, 8)).shape == (1, 3)
    assert elastic.layers[1].extra_repr().startswith("7, 3, ")


def test_inputs_at_other_places() -> None:
    _, _, flattened, last = Elastic(convolutions()).forms
    matrix = torch.tensor([[1.0, 2, 10], [3, 4, 20]])
    placed = last.spread(matrix, torch.tensor([0, 2]), 3)
    assert placed.tolist() == [[1, 0, 2, 10], [3, 0, 4, 20]]
    blocks = flattened.spread(torch.arange(8.0)[None], torch.tensor([1, 0]), 3)
    assert blocks.tolist() == [[4, 5, 6, 7, 0, 1, 2, 3, 0, 0, 0, 0]]
    weights, bias = last.split(matrix)
    assert weights[:, :, 0].tolist() == [[1, 2], [3, 4]]
    assert bias.tolist() == [[10], [20]]
    assert flattened.split(torch.arange(8.0)[None])[1].shape == (1, 0)


def test_weights_say_what_they_fit() -> None:
    elastic = Elastic(trained(Tiny()))
    first, last = matrices(Network(copy.deepcopy(elastic)))
    rows = torch.cat([first, torch.zeros(3, 5)])
    wide = assemble(elastic, [rows, elastic.forms[1].spread(last, torch.arange(8), 11)])
    model, logits = wide.weights(), wide.module(X)
    assert model.counters.tolist() == [11]
    torch.testing.assert_close(logits, trained(Tiny())(X), atol=1e-5, rtol=1e-5)
    again = Network(adapted(Elastic(Tiny()), model))
    again.load(model)
    assert torch.equal(again.module(X), logits)
    loaded = Elastic(Tiny())
    loaded.load_state_dict(wide.module.state_dict())
    assert torch.equal(loaded(X), logits)
    plain = Tiny()
    assert adapted(plain, model) is plain


@pytest.mark.parametrize("widths", [[9], [0], [-8], [8, 8], [], [10**12]])
def test_weights_that_lie_are_refused(widths: list[int]) -> None:
    model = Network(Elastic(Tiny())).weights()
    with pytest.raises(UserError, match="another network"):
        adapted(
            Elastic(Tiny()),
            Weights(model.params, model.buffers, torch.tensor(widths, dtype=torch.int64)),
        )
    values = Elastic(Tiny()).state_dict() | {"widths": torch.tensor(widths, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match="widths"):
        Elastic(Tiny()).load_state_dict(values)
    with pytest.raises(RuntimeError, match="Missing"):
        Elastic(Tiny()).load_state_dict(Tiny().state_dict())


class Shortcut(nn.Module):
    """Layers whose widths fit one another, with an addition around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(x + self.b(x).relu())  # type: ignore[no-any-return]


class Backwards(nn.Module):
    """Its BatchNorm comes after the activation function, so that it cannot be folded into the layer
    before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x).relu()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (Shortcut(), (4,), "shortcuts"),
        (Backwards(), (4,), "shortcuts"),
        (nn.Linear(4, 3), (4,), "no hidden layer"),
        (nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3)), (4,), "are frozen"),
        (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (4,), "of a kind"),
        (nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)), (4,), "of a kind"),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 3)), (4,), "of a kind"),
        (nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3)), (4,), "of a kind"),
        (
            nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 3)),
            (4,),
            "wider",
        ),
        (catalogue.build("resnet18", (3, 8, 8), 4), (3, 8, 8), "use average"),
        (catalogue.build("resnet18_gn", (3, 8, 8), 4), (3, 8, 8), "use average"),
    ],
)
def test_what_cannot_be_matched_is_refused(
    module: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        check(module.eval(), shape)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Tiny(), (4,)),
        (convolutions(), (2, 8, 8)),
        *(
            (catalogue.build(name, (3, 18, 18), 5), (3, 18, 18))
            for name in ("mlp_ma_echo", "lenet", "cnn_ma_echo")
        ),
        (catalogue.build("vgg11", (3, 32, 32), 5), (3, 32, 32)),
    ],
)
def test_the_networks_of_the_papers_can_be_matched(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    check(module.eval(), shape)


class Sandwich(nn.Module):
    """A classifier in the middle of the parameter list, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.head = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.last = nn.BatchNorm1d(3)


def test_entries_of_the_head_wherever_they_lie() -> None:
    head = Network(Sandwich()).head
    assert head.params.tolist() == [False] * 9 + [True] * 12 + [False] * 6
    assert head.buffers.tolist() == [True] * 4 + [False] * 6
    assert head.counters.tolist() == [True, False]


def test_parts_are_taken_and_put_back() -> None:
    network = Network(Sandwich())
    model, head = network.weights(), network.head
    other = Weights(model.params + 1, model.buffers + 1, model.counters + 1)
    merged = head.put(head.of(other), model)
    assert torch.equal(merged.params[head.params], other.params[head.params])
    assert torch.equal(merged.params[~head.params], model.params[~head.params])
    whole = (~head).put((~head).of(other), merged)
    for name in ("params", "buffers", "counters"):
        assert torch.equal(getattr(whole, name), getattr(other, name))


def test_refuses_values_of_another_part() -> None:
    network = Network(Sandwich())
    with pytest.raises(UserError, match="another part"):
        network.head.put((~network.head).of(network.weights()), network.weights())


@pytest.mark.parametrize("name", catalogue.fitting((3, 32, 32)))
def test_every_network_of_the_library_declares_its_head(name: str) -> None:
    network = Network(catalogue.build(name, (3, 32, 32), 10))
    assert int(network.head.params.sum()) == sum(
        p.numel() for p in network.module.get_submodule("head").parameters()
    )
    assert 0 < int(network.head.params.sum()) <= len(network.params)
    assert (int(network.head.params.sum()) < len(network.params)) == (name != "linear"), (
        "which is a head alone"
    )
    assert sum(torch.Size(shape).numel() for shape in network.shapes) == len(network.params)


def test_the_head_of_resnet18_is_as_large_as_the_papers() -> None:
    network = Network(catalogue.build("resnet18", (3, 32, 32), 10))
    assert (int(network.head.params.sum()), len(network.params)) == (5130, 11_173_962)
    assert Size.of(network) == 44_734_408


def test_refuses_a_model_without_a_declared_head() -> None:
    with pytest.raises(UserError, match="name that part `head`"):
        _ = Network(nn.Sequential(nn.Linear(4, 3))).head


def test_a_head_may_be_empty() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(4, 3), nn.Identity()

    head: Part = Network(Bare()).head
    assert not head.params.any()
