"""Networks of any width: BatchNorm folded, units in other places, shapes from the weights, and what
is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ekiden import UserError
from ekiden.core import models
from ekiden.core.training.network import (
    Elastic,
    Network,
    adapted,
    assemble,
    check,
    folded,
    matrices,
)
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny

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
        (models.build("resnet18", (3, 8, 8), 4), (3, 8, 8), "use average"),
        (models.build("resnet18_gn", (3, 8, 8), 4), (3, 8, 8), "use average"),
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
            (models.build(name, (3, 18, 18), 5), (3, 18, 18))
            for name in ("mlp_ma_echo", "lenet", "cnn_ma_echo")
        ),
        (models.build("vgg11", (3, 32, 32), 5), (3, 32, 32)),
    ],
)
def test_the_networks_of_the_papers_can_be_matched(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    check(module.eval(), shape)
