"""PFNM: exact numbers of the merge, what it makes of equal models, widths, one client, bad
input."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import read_model
from ekiden.core.models import catalogue
from ekiden.core.training.network import Elastic, Form, Network, assemble, matrices
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import PFNM, Average
from ekiden.runs.loading import open_run
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
SETTINGS = {"training": Training(lr=0.01, batch_size=16), "hardware": Hardware(threads=1)}
EVEN = torch.full((2, 3), 0.5)


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


def merged(method: PFNM, modules: list[nn.Module], shares: Tensor) -> nn.Module:
    """The network that `method` makes from these."""
    elastics = [Elastic(m) for m in modules]
    layers = method.merge(
        [matrices(Network(e)) for e in elastics], elastics[0].forms, shares, draw()
    )
    return assemble(elastics[0], layers).module


def test_bias_of_the_output() -> None:
    biases = [torch.tensor([[1.0], [0]]), torch.tensor([[3.0], [2]])]
    result = PFNM().output_bias([b.double() for b in biases], torch.tensor([[0.25, 1], [0.75, 0]]))
    torch.testing.assert_close(result, torch.tensor([[1.3], [0.05]]).double())
    assert PFNM().output_bias([torch.empty(3, 0)] * 2, EVEN).shape == (3, 0)


def test_equal_models_shrink_as_the_prior_has_it() -> None:
    module = deep()
    first, *between, last = matrices(Network(Elastic(module)))
    result = matrices(Network(merged(PFNM(), [module] * 3, torch.full((3, 3), 1 / 3))))

    def norms(layer: Tensor) -> Tensor:
        return layer[:, :-1].square().sum().sqrt()

    for mine, theirs in zip(
        [first, *between], result, strict=False
    ):  # J·w / (J + 1), and (J·b + 0.1) / (J + 1)
        assert mine.shape == theirs.shape
        torch.testing.assert_close(norms(theirs), norms(mine) * 3 / 4)
        torch.testing.assert_close(
            theirs[:, -1].sort().values, (3 * mine[:, -1] + 0.1).sort().values / 4
        )
    torch.testing.assert_close(norms(result[-1]), norms(last) / 2)  # the shares of a class sum to 1
    torch.testing.assert_close(result[-1][:, -1], (last[:, -1] + 0.1) / 2)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (deep, (4,)),
        (Tiny, (4,)),
        (lambda: catalogue.build("lenet", (1, 16, 16), 3), (1, 16, 16)),
        (lambda: catalogue.build("mlp_ma_echo", (7,), 3), (7,)),
    ],
)
def test_equal_models_are_that_model_where_the_prior_is_weak(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = make().eval()
    x = torch.randn(8, *shape, generator=draw())
    with torch.no_grad():
        result = merged(PFNM(sigma=1e-7), [module] * 2, torch.full((2, 3), 0.5))
        torch.testing.assert_close(result(x), module(x), atol=1e-4, rtol=1e-3)


def test_permuted_units_are_found_again() -> None:
    a = deep()
    b = copy.deepcopy(a)
    draws = draw()
    for i in (0, 2, 4):
        order = torch.randperm(len(b[i].weight), generator=draws)  # type: ignore[index]
        b[i].weight.data, b[i].bias.data = b[i].weight[order].data, b[i].bias[order].data  # type: ignore[index]
        b[i + 2].weight.data = b[i + 2].weight[:, order].data  # type: ignore[index]
    with torch.no_grad():
        torch.testing.assert_close(b(X), a(X))
        result = merged(PFNM(sigma=1e-7), [a, b], EVEN)
        torch.testing.assert_close(result(X), a(X), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("make", [deep, Tiny])
def test_where_nothing_is_matched_logits_add_up(make: Callable[[], nn.Module]) -> None:
    modules = [make().eval() for _ in range(3)]
    for module in modules:
        list(module.parameters())[-1].data.zero_()  # the output's bias is averaged
    with torch.no_grad():
        result = merged(PFNM(sigma=1e-7, gamma=1e300), modules, torch.full((3, 3), 1 / 3))
        expected = sum((m(X) for m in modules), torch.zeros(16, 3))
        torch.testing.assert_close(result(X), expected, atol=1e-4, rtol=1e-3)
    assert isinstance(result, Elastic)
    assert result.widths.tolist() == [3 * w for w in Elastic(modules[0]).widths.tolist()]


def test_a_class_counts_by_its_samples() -> None:
    module, other = Tiny().eval(), Tiny().eval()
    shares = torch.tensor([[1.0, 0.5, 0], [0, 0.5, 0]])  # nobody has the last one
    last = matrices(Network(merged(PFNM(), [module, other], shares)))[-1]
    assert torch.equal(last[2, :-1], torch.zeros(last.shape[1] - 1))
    assert float(last[2, -1]) == pytest.approx(0.1)
    own = module.head.bias.detach()
    # the sum may nearly cancel: its error is that of float32 numbers around 0.5
    assert float(last[0, -1]) == pytest.approx(float((own[0] + 0.1) / 2), abs=1e-6)
    assert torch.isfinite(last).all()


def test_models_of_different_width() -> None:
    narrow, wide = (
        nn.Sequential(nn.Linear(4, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 3))
        for a, b in ((3, 9), (7, 2))
    )
    result = merged(PFNM(), [narrow, wide], EVEN)
    assert isinstance(result, Elastic)
    assert 7 <= int(result.widths[0]) <= 10
    assert 9 <= int(result.widths[1]) <= 11
    layers = [
        [torch.randn(5, 4), torch.randn(3, 5)],
        [torch.full((5, 4), float("nan")), torch.randn(3, 5)],
    ]
    with pytest.raises(UserError, match="NaN"):
        PFNM().merge(layers, [Form(4, False), Form(1, False)], EVEN, draw())


def test_one_client_keeps_its_model(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    result = run(PFNM(epochs=2, init="same"), alone, Tiny, **SETTINGS)  # type: ignore[arg-type]
    same = run(Average(epochs=2), alone, Tiny, **SETTINGS)  # type: ignore[arg-type]
    x = blobs.dataset.test.x
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), same.model(x), atol=1e-5, rtol=1e-5)


def test_is_evaluated_saved_and_loaded_like_any_model(blobs: FederatedData, tmp_path: Path) -> None:
    method = PFNM(epochs=30, sigma=0.1)
    result = run(method, blobs, Tiny, folder=tmp_path / "run", **SETTINGS)  # type: ignore[arg-type]
    assert result.accuracy > 0.5
    x, y = blobs.dataset.test.x, blobs.dataset.test.y
    assert float((result.model(x).argmax(1) == y).double().mean()) == pytest.approx(result.accuracy)
    again = result.build()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(again.eval()(x), result.model(x))
    assert isinstance(again, Elastic)
    assert 8 <= int(again.widths) <= 32
    size = Size.of(Network(Tiny()))
    assert result.bytes == method.cost(4, size) == 4 * (size + 4 * 3)
    with pytest.raises(UserError, match="use average"):
        run(PFNM(epochs=1), blobs, lambda: nn.Linear(4, 3), **SETTINGS)  # type: ignore[arg-type]


def test_the_command_line_measures_it(tmp_path: Path) -> None:
    method = PFNM(epochs=1, gamma=50, sweeps=1)
    plan: Plan[Method] = Plan(
        Recipe(method), partition="iid", clients=3, hardware=Hardware(threads=1)
    )
    data = plan.federation()
    result = plan.run(tmp_path / "run", data)
    test = open_run(tmp_path / "run").judge(data)
    weights = read_model(tmp_path / "run", "model.safetensors", test.build)
    assert test.scores(weights).accuracy() == result.accuracy
    assert result.metrics[-1]["parameters"] == len(weights.params)
    own = Network(catalogue.build("mlp", data.dataset.shape, 10))
    assert len(weights.params) > len(own.params)
