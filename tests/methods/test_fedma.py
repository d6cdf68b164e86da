"""FedMA: exact numbers of the classifier and of padding, permuted channels, frozen layers, bytes,
rounds, bad input."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Size, payload_types
from ekiden.core.engine.store import Store
from ekiden.core.models import catalogue
from ekiden.core.training.network import Elastic, Form, Network, assemble, matrices
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import PFNM, Average, FedMA
from ekiden.methods.one_shot.fedma import KeptLayers, class_mean, own_units
from ekiden.runs.result import Result

SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16),
    "hardware": Hardware(threads=1),
}


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def lenet() -> nn.Module:
    """LeNet with three channels first."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def wide(hidden: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 5), nn.ReLU(), nn.Linear(5, 3)
    )


def merged(method: FedMA, modules: list[nn.Module], counts: Tensor) -> nn.Module:
    elastics = [Elastic(m) for m in modules]
    layers = method.merge(
        [matrices(Network(e)) for e in elastics], elastics[0].forms, counts, draw()
    )
    return assemble(elastics[0], layers).module


def test_the_classifier_is_averaged_by_samples_of_each_class() -> None:
    heads = [torch.tensor([[1.0], [1]]), torch.tensor([[5.0], [9]])]
    assert class_mean(heads, torch.tensor([[30, 0], [10, 20]])).tolist() == [[2], [9]]
    assert class_mean(heads, torch.tensor([[30, 0], [10, 0]])).tolist() == [
        [2],
        [5],
    ]  # nobody has class 1


def test_permuted_channels_are_found_and_the_next_layer_follows() -> None:
    a = Elastic(lenet())
    b, order = copy.deepcopy(a), torch.tensor([2, 0, 1])
    first, second, *_ = b.layers
    assert first.bias is not None
    first.weight.data, first.bias.data = first.weight[order].data, first.bias[order].data
    second.weight.data = second.weight[:, order].data
    one, other = matrices(Network(copy.deepcopy(a))), matrices(Network(copy.deepcopy(b)))
    units, atoms = FedMA(gamma=1, sweeps=0).match([one[0], other[0]], a.forms[0], draw())
    assert [u.tolist() for u in units] == [[0, 1, 2], [2, 0, 1]]
    assert atoms.shape == (3, 10)
    inputs = [a.forms[1].spread(m[1], u, 3) for m, u in zip((one, other), units, strict=True)]
    assert torch.equal(inputs[0], inputs[1])
    x = torch.randn(4, 1, 10, 10, generator=draw())
    with torch.no_grad():
        result = merged(FedMA(sigma=1e-7), [a.network, b.network], torch.ones(2, 3))
        torch.testing.assert_close(result(x), a(x), atol=1e-4, rtol=1e-3)


def test_one_unit_shrinks() -> None:
    row = torch.tensor([[3.0, -6.0]])
    units, atoms = FedMA().match([row, row], Form(2, False), draw())
    assert [u.tolist() for u in units] == [[0], [0]]
    torch.testing.assert_close(atoms, (row * 2 / 3).double())
    _, atoms = FedMA(bias=0.4).match([row, row], Form(1, True), draw())
    torch.testing.assert_close(atoms, torch.tensor([[2.0, (-12 + 0.4) / 3]]).double())


def test_inputs_that_a_client_lacks_are_zero() -> None:
    placed = Form(1, True).spread(torch.tensor([[1.0, 2, 9], [3, 4, 8]]), torch.tensor([0, 2]), 3)
    assert placed[:, 1].tolist() == [0, 0]
    assert placed[:, [0, 2, 3]].tolist() == [[1, 2, 9], [3, 4, 8]]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Tiny, (4,)), (lenet, (1, 10, 10)), (lambda: catalogue.build("mlp_ma_echo", (7,), 3), (7,))],
)
def test_equal_models_are_that_model_where_the_prior_is_weak(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = make().eval()
    x = torch.randn(8, *shape, generator=draw())
    with torch.no_grad():
        result = merged(FedMA(sigma=1e-7), [module] * 3, torch.ones(3, 3))
        torch.testing.assert_close(result(x), module(x), atol=1e-4, rtol=1e-3)


def test_a_client_finds_its_own_units_again() -> None:
    forms = [Form(4, True), Form(2, False), Form(1, True)]
    own = [torch.randn(3, 5), torch.randn(2, 6), torch.randn(3, 3)]
    units = [torch.tensor([4, 0, 2]), torch.tensor([1, 3])]

    def among_others(layer: Tensor, places: Tensor, width: int) -> Tensor:
        return torch.ones(width, layer.shape[1]).index_copy(0, places, layer)

    layers = [
        among_others(own[0], units[0], 6),
        among_others(forms[1].spread(own[1], units[0], 6), units[1], 4),
        forms[2].spread(own[2], units[1], 4),
    ]
    found = own_units(KeptLayers([*layers[:2], torch.zeros(3, 5)], units), forms, layers[2])
    assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))


def test_matched_layers_are_frozen(blobs: FederatedData, tmp_path: Path) -> None:
    method = FedMA(epochs=3, retrain_epochs=2, gamma=50)
    result = run(method, blobs, wide, folder=tmp_path / "run", **SETTINGS)
    assert isinstance(result.model, Elastic)
    final = matrices(Network(copy.deepcopy(result.model)))
    for client in blobs.clients:
        folder = tmp_path / "run" / "clients" / client.name
        state = Store(folder, lambda task: payload_types(method, task)[1], KeptLayers, 1).private
        assert [len(u) for u in state.units] == [8, 5]
        for mine, ours in zip(state.layers[:-1], final, strict=False):
            assert torch.equal(mine, ours)
        assert state.layers[-1].shape == final[-1].shape
        assert not torch.equal(state.layers[-1], final[-1])


def bytes_by_hand(result: Result, own: list[int], inputs: int, classes: int) -> int:
    """For a perceptron with biases: what each client sends and gets in one round."""
    assert isinstance(result.model, Elastic)
    reads: list[int] = [inputs, *result.model.widths.tolist()]
    up = sum(4 * n * (d + 1) for n, d in zip([*own, classes], reads, strict=True))
    down = sum(4 * g * (d + 1) + 4 * n for g, d, n in zip(reads[1:], reads, own, strict=False))
    return up + down + 4 * classes


@pytest.mark.parametrize("gamma", [1e-3, 7.0, 1e9])
def test_bytes_of_the_layer_wise_form(blobs: FederatedData, gamma: float) -> None:
    method = FedMA(epochs=2, retrain_epochs=1, gamma=gamma)
    result = run(method, blobs, wide, **SETTINGS)
    assert result.bytes == 4 * bytes_by_hand(result, [8, 5], 4, 3)
    size = Size.of(Network(wide()), (4,))
    assert result.bytes == method.moved(result.state, 4, size)  # type: ignore[arg-type]
    assert result.bytes <= method.cost(4, size)
    if gamma == 1e9:
        assert isinstance(result.model, Elastic)
        assert int(result.model.widths[0]) > 8


def test_one_shot(blobs: FederatedData) -> None:
    method = FedMA(epochs=30, retrain_epochs=0, sigma=0.1)
    result = run(method, blobs, Tiny, **SETTINGS)
    assert result.accuracy > 0.45
    size = Size.of(Network(Tiny()), (4,))
    assert result.bytes == method.cost(4, size) == 4 * (size + 4 * 3)


@pytest.mark.slow
def test_retraining_learns_what_matching_loses(blobs: FederatedData) -> None:
    before, after = (
        run(FedMA(epochs=30, retrain_epochs=e), blobs, lambda: wide(16), **SETTINGS).accuracy
        for e in (0, 30)
    )
    assert after > before + 0.05
    assert after > 0.7


@pytest.mark.filterwarnings("ignore:silo .* shares no class")
@pytest.mark.filterwarnings("ignore:.* test rows are of classes without a training row")
def test_clients_with_one_sample_or_one_class_take_part() -> None:
    generator = draw()
    silos = [
        (
            torch.randn(n, 4, generator=generator),
            torch.full((n,), c) if c < 2 else torch.arange(n) % 2,
        )
        for n, c in ((20, 2), (1, 1), (9, 0))
    ]  # nobody has the last class
    data = federate(
        [*silos, (torch.randn(2, 4), torch.tensor([0, 0]))],
        test=(torch.randn(3, 4), torch.arange(3)),
    )
    for method in (
        FedMA(epochs=2, retrain_epochs=1, rounds=2),
        FedMA(epochs=2, retrain_epochs=0),
        PFNM(epochs=2),
    ):
        result = run(method, data, Tiny, **SETTINGS)
        assert result.weights is not None
        assert result.weights.is_finite()


def test_convolutions_over_rounds() -> None:
    generator = draw()
    y = torch.arange(40) % 3
    x = torch.rand(40, 1, 10, 10, generator=generator) / 2 + y[:, None, None, None] / 4
    data = federate([(x[:20], y[:20]), (x[20:], y[20:])], test=(x, y))
    result = run(FedMA(rounds=2, epochs=3, retrain_epochs=2), data, lenet, **SETTINGS)
    assert isinstance(result.model, Elastic)
    state: Any = result.state
    assert [len(w) for w in state.widths] == [3, 3]
    assert list(state.widths[-1]) == result.model.widths.tolist()
    size = Size.of(Network(lenet()), (1, 10, 10))
    assert result.bytes == FedMA().moved(result.state, 2, size)  # type: ignore[arg-type]


def test_one_client_keeps_its_model(blobs: FederatedData) -> None:
    alone, x = FederatedData(blobs.dataset, blobs.clients[:1]), blobs.dataset.test.x
    result = run(FedMA(epochs=2, retrain_epochs=0, init="same"), alone, Tiny, **SETTINGS)
    same = run(Average(epochs=2), alone, Tiny, **SETTINGS)
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), same.model(x), atol=1e-5, rtol=1e-5)
    again = run(FedMA(epochs=2, retrain_epochs=1), alone, Tiny, **SETTINGS)
    assert isinstance(again.model, Elastic)
    assert again.model.widths.tolist() == [8]


def test_what_is_refused(blobs: FederatedData) -> None:
    ranges = ({"rounds": 0}, {"epochs": 0}, {"retrain_epochs": -1}, {"gamma": 0}, {"sigma": 0})
    for changes in ranges:
        with pytest.raises(UserError, match=f"{next(iter(changes))} "):
            FedMA(**changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="rounds 2"):
        FedMA(rounds=2, retrain_epochs=0)
    with pytest.raises(UserError, match="use average"):
        run(FedMA(epochs=1), blobs, lambda: nn.Linear(4, 3), **SETTINGS)
    narrow = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 5), nn.Linear(5, 3))
    with pytest.raises(UserError, match="different shape"):
        merged(FedMA(), [wide(), narrow], torch.ones(2, 3))
    result = merged(FedMA(), [wide(), wide(3)], torch.ones(2, 3))  # of different width
    assert isinstance(result, Elastic)
    assert int(result.widths[0]) >= 8
