"""OT fusion: exact numbers, the same function under permutation, different widths, bad input."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.models import catalogue
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Layout, Weights, mean
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import OTFusion
from ekiden.methods.blocks.combining import Trained
from ekiden.methods.one_shot.ot_fusion import activations, align, check_chain, costs, transport


def by_weights(number: int, ours: Tensor, theirs: Tensor) -> Tensor:
    return transport(ours, theirs, normalise=True, squared=False)


def shuffled(module: nn.Module, seed: int = 3) -> nn.Module:
    """The same function with its hidden units in another order."""
    network = Network(copy.deepcopy(module))
    generator = torch.Generator().manual_seed(seed)

    def permutation(number: int, ours: Tensor, theirs: Tensor) -> Tensor:
        return torch.eye(len(ours))[torch.randperm(len(ours), generator=generator)]

    model = network.weights()
    network.load(align(model, model, network.layout, permutation)[0])
    return network.module


def two_layers(first: list[list[float]], second: list[list[float]]) -> tuple[Weights, Layout]:
    module = nn.Sequential(*(nn.Linear(len(w[0]), len(w), bias=False) for w in (first, second)))
    for layer, w in zip(module, (first, second), strict=True):
        layer.weight.data = torch.tensor(w)
    network = Network(module)
    return network.weights(), network.layout


def test_permuted_neurons() -> None:
    b, layout = two_layers([[1.0, 0], [0, 1], [1, 1]], [[1.0, 2, 3], [4, 5, 6]])
    a, _ = two_layers([[1.0, 1], [1, 0], [0, 1]], [[3.0, 1, 2], [6, 4, 5]])
    ours, theirs = (layout.dense[0].matrix(m.params) for m in (a, b))
    expected = [[0.765367, 0.765367, 0], [0, 1.414214, 0.765367], [1.414214, 0, 0.765367]]
    torch.testing.assert_close(
        costs(ours, theirs, True, False), torch.tensor(expected).double(), atol=1e-6, rtol=0
    )
    plan = transport(ours, theirs, True, False)
    assert plan.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    aligned, inputs = align(a, b, layout, by_weights)
    assert torch.equal(aligned.params, b.params)
    assert inputs[0] is None
    assert torch.equal(mean([aligned, b]).params, b.params)
    first = layout.dense[0].matrix(mean([a, b]).params)
    assert first.tolist() == [[1.0, 0.5], [0.5, 0.5], [0.5, 1.0]]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("squared", [True, False])
def test_swap(normalise: bool, squared: bool) -> None:
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    assert transport(a, b, normalise, squared).tolist() == [[0, 1], [1, 0]]
    expected = torch.tensor(
        [[0.894427, 0], [0, 0.894427]] if normalise else [[4.472136, 4], [0, 0.894427]]
    ).double()
    torch.testing.assert_close(
        costs(a, b, normalise, squared), expected ** (2 if squared else 1), atol=1e-5, rtol=0
    )


def test_scale_matters_only_without_normalisation() -> None:
    a, b = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 2.1], [1.0, 0.0]])
    assert transport(a, b, True, False).tolist() == [[0, 1], [1, 0]]
    near, far = torch.tensor([[1.0], [10.0]]), torch.tensor([[9.0], [2.0]])
    assert transport(near, far, True, False).tolist() == [[1, 0], [0, 1]]  # all the same: identity
    assert transport(near, far, False, False).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("units", [100, 400])
def test_units_in_another_order_are_found(units: int) -> None:
    rows = torch.randn(units, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.randperm(units, generator=torch.Generator().manual_seed(1))
    assert torch.equal(transport(rows[order], rows, True, False), torch.eye(units).double()[order])


def test_sinkhorn_approaches_the_exact_transport() -> None:
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    exact = transport(rows[order], rows, True, False)
    far, near = (
        float((transport(rows[order], rows, True, False, reg) - exact).abs().max())
        for reg in (1.0, 0.01)
    )
    assert far > 0.3
    assert near < 1e-6
    uneven = transport(rows[:7], rows, True, False, sinkhorn=0.1)
    torch.testing.assert_close(uneven.sum(0), torch.ones(12).double())
    assert float(uneven.min()) >= 0


@pytest.mark.parametrize("rows", [torch.zeros(5, 3), torch.ones(5, 3), torch.eye(5)])
def test_of_equally_good_plans_the_identity(rows: Tensor) -> None:
    assert torch.equal(transport(rows, rows, True, False), torch.eye(5))


def test_unequal_widths_share_mass() -> None:
    plan = transport(
        torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([[0.5], [5.0]]), False, False
    )
    torch.testing.assert_close(plan.sum(0), torch.ones(2))
    torch.testing.assert_close(plan, torch.tensor([[2 / 3, 0], [1 / 3, 1 / 3], [0, 2 / 3]]))


def test_not_a_number_is_refused() -> None:
    with pytest.raises(UserError, match="NaN"):
        transport(torch.tensor([[float("nan")]]), torch.ones(1, 1), True, False)


NETWORKS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (Tiny, (4,)),
    (lambda: catalogue.build("mlp", (30,), 5), (30,)),
    (lambda: catalogue.build("lenet", (3, 32, 32), 7), (3, 32, 32)),
]


@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=["bn", "mlp", "conv"])
def test_aligning_keeps_the_function(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    a, b = Network(make().eval()), Network(make().eval())
    for buffer in (a.buffers, b.buffers):
        buffer.uniform_(0.5, 2)
    x = torch.randn(8, *shape)
    before = a.module(x)
    a.load(align(a.weights(), b.weights(), a.layout, by_weights)[0])
    torch.testing.assert_close(a.module(x), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=["bn", "mlp", "conv"])
def test_permuting_hidden_units_leaves_the_fused_function(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = make().eval()
    other = shuffled(module)
    a, b = Network(other), Network(module)
    assert not torch.equal(a.params, b.params)
    x = torch.randn(8, *shape)
    expected = module(x)
    fused = mean([b.weights(), align(a.weights(), b.weights(), a.layout, by_weights)[0]])
    assert not torch.allclose(
        module_of(make, mean([a.weights(), b.weights()]))(x), expected, atol=1e-3
    )
    torch.testing.assert_close(module_of(make, fused)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["model", "target"])
@pytest.mark.parametrize("alignment", ["weights", "activations"])
@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=["bn", "mlp", "conv"])
def test_the_fused_function_does_not_depend_on_the_order_of_hidden_units(
    make: Callable[[], nn.Module], shape: tuple[int, ...], alignment: str, which: str
) -> None:
    torch.manual_seed(4)
    a, b = make().eval(), make().eval()  # two models that have nothing to do with one another
    x, probe = torch.randn(8, *shape), torch.randn(20, *shape)

    def fused(model: nn.Module, target: nn.Module) -> Tensor:
        one, other = Network(copy.deepcopy(model)), Network(copy.deepcopy(target))
        by = [activations(n.module, n.layout, probe) for n in (one, other)]

        def by_activations(number: int, ours: Tensor, theirs: Tensor) -> Tensor:
            return transport(by[0][number], by[1][number], False, False)

        matching = by_weights if alignment == "weights" else by_activations
        moved, _ = align(one.weights(), other.weights(), one.layout, matching)
        result: Tensor = module_of(make, mean([other.weights(), moved]))(x)
        return result

    expected = fused(a, b)
    found = fused(shuffled(a), b) if which == "model" else fused(a, shuffled(b))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain = module_of(
        make, mean([Network(shuffled(a)).weights(), Network(copy.deepcopy(b)).weights()])
    )(x)
    assert not torch.allclose(plain, expected, atol=1e-3)


def module_of(make: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    network = Network(make().eval())
    network.load(weights)
    return network.module


def test_activations_find_the_same_permutation() -> None:
    module = catalogue.build("lenet", (3, 32, 32), 7).eval()
    a, b = Network(shuffled(module)), Network(module)
    x = torch.randn(5, 3, 32, 32)
    ours, theirs = activations(a.module, a.layout, x), activations(b.module, b.layout, x)

    def by_activations(number: int, rows: Tensor, goal: Tensor) -> Tensor:
        return transport(ours[number], theirs[number], False, False)

    for matching in (by_activations, by_weights):
        aligned, _ = align(a.weights(), b.weights(), a.layout, matching)
        assert torch.equal(aligned.params, b.params)


@pytest.mark.parametrize("head", ["mean", "class-wise"])
def test_identical_models_fuse_to_themselves(head: str) -> None:
    network = Network(Tiny())
    model = network.weights()
    aligned = [align(model, model, network.layout, by_weights)[0] for _ in range(3)]
    sent = [Trained(m, torch.tensor([5, 5, 5])) for m in aligned]
    result = OTFusion(combine_heads=head).average.aggregate(sent, network.layout)  # type: ignore[arg-type]
    assert torch.equal(result.params, model.params)
    assert torch.equal(result.buffers, model.buffers)


class Shortcut(nn.Module):
    """Layers whose widths fit one another, with an addition around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(x + self.b(x).relu())  # type: ignore[no-any-return]


def test_networks_with_shortcuts_are_refused() -> None:
    check_chain(Tiny().eval(), (4,))
    with pytest.raises(UserError, match="shortcuts"):
        check_chain(Shortcut(), (4,))
    with pytest.raises(UserError, match="average"):
        check_chain(catalogue.build("resnet18", (3, 8, 8), 4).eval(), (3, 8, 8))


class Centred(nn.Module):
    """Subtracts a mean that it updates, and has a frozen first layer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 3.0))
        self.a, self.b, self.c = (
            nn.Linear(4, 4).requires_grad_(False),
            nn.Linear(4, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x - self.mean)).relu())  # type: ignore[no-any-return]


def test_values_outside_the_layers_that_move_stay() -> None:
    network = Network(Centred().eval())
    check_chain(network.module, (4,))
    result, _ = align(network.weights(), network.weights(), network.layout, by_weights)
    assert torch.equal(result.buffers, network.buffers)


@pytest.mark.parametrize("alignment", ["weights", "activations"])
def test_runs_and_refuses_a_target_that_is_not_there(blobs: FederatedData, alignment: str) -> None:
    settings = {"training": Training(lr=0.01, batch_size=16), "hardware": Hardware(threads=1)}
    result = run(OTFusion(epochs=30, alignment=alignment, reference=2), blobs, Tiny, **settings)  # type: ignore[arg-type]
    assert result.accuracy > 0.4
    with pytest.raises(UserError, match="reference"):
        run(OTFusion(reference=4), blobs, Tiny, **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="shortcuts"):
        run(OTFusion(), blobs, Shortcut, **settings)  # type: ignore[arg-type]


def test_passes_for_activations_count(blobs: FederatedData) -> None:
    settings = {"training": Training(lr=0.01, batch_size=16), "hardware": Hardware(threads=1)}
    plain, probed = (
        run(OTFusion(epochs=1, alignment=alignment, samples=50), blobs, Tiny, **settings).metrics[  # type: ignore[arg-type]
            -1
        ]
        for alignment in ("weights", "activations")
    )
    assert probed["forward"] - plain["forward"] == 4 * 2 * 50
    assert probed["backward"] == plain["backward"]


def test_one_client_keeps_its_model(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    a, b = (
        run(OTFusion(epochs=2, alignment=alignment), alone, Tiny, hardware=Hardware(threads=1))
        for alignment in ("weights", "activations")
    )
    assert a.weights is not None
    assert b.weights is not None
    assert torch.equal(a.weights.params, b.weights.params)
