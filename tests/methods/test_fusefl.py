"""FuseFL: one fused block by hand, adapters, cuts, widths; one client and one block; calibration;
bytes; refusals."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Size
from ekiden.core.models import catalogue
from ekiden.core.models.split import SplitNetwork
from ekiden.core.training.network import Network
from ekiden.methods import Ensemble, FuseFL
from ekiden.methods.one_shot.fusefl import (
    Adapter,
    ClassGaussians,
    Fused,
    Stage,
    calibrate,
    channels,
    content,
    cut,
    drawn,
    measure,
    pooled,
    thin,
)

SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16, select="last"),
    "hardware": Hardware(threads=1),
}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Plain(SplitNetwork):
    """Two hidden layers, no dropout."""

    def __init__(self) -> None:
        features = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU())
        super().__init__(features, nn.Linear(5, 3))


def linear(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def test_two_fused_blocks_by_hand() -> None:
    """Client a's first block gives 2x, b's x - 1; adapters read both; the head reads the sum."""
    first = [Stage(linear([[2.0]], [0.0])), Stage(linear([[1.0]], [-1.0]))]
    adapters = [Adapter(2, 1), Adapter(2, 1)]
    adapters[0].weight.data, adapters[0].bias.data = torch.tensor([[1.0, 1.0]]), torch.tensor([0.0])
    adapters[1].weight.data, adapters[1].bias.data = torch.tensor([[0.0, 3.0]]), torch.tensor([1.0])
    second = [
        Stage(linear([[1.0]], [0.0]), adapters[0]),
        Stage(linear([[2.0]], [5.0]), adapters[1]),
    ]
    head = linear([[1.0], [0.0]], [0.0, 1.0])
    x = torch.tensor([[3.0]])  # first level: 6 and 2; adapters: 8 and 7; second level: 8 and 19
    assert Fused([first, second], head)(x).tolist() == [[27, 1]]
    means = [Stage(nn.Identity()), Stage(nn.Identity())]
    assert Fused([first, means], head)(x).tolist() == [[8, 1]]


def test_an_adapter_is_a_1x1_convolution() -> None:
    adapter, conv, x = (
        Adapter(6, 2),
        nn.Conv2d(6, 2, 1),
        torch.randn(3, 6, 4, 5, generator=generator()),
    )
    conv.weight.data, conv.bias.data = adapter.weight.data[:, :, None, None], adapter.bias.data  # type: ignore[union-attr]
    torch.testing.assert_close(adapter(x), conv(x))
    torch.testing.assert_close(adapter(x[:, :, 0, 0]), conv(x)[:, :, 0, 0])


@pytest.mark.parametrize(
    ("name", "blocks", "sizes", "wide"),
    [
        ("mlp", 3, [2, 2, 2], [400, 200, 100]),
        ("mlp", 1, [7], [100]),
        ("lenet", 2, [6, 5], [16, 84]),
        ("lenet", 4, [3, 3, 3, 2], [6, 16, 120, 84]),
        ("resnet18", 2, [7, 6], [128, 512]),
        ("resnet18", 4, [5, 2, 2, 4], [64, 128, 256, 512]),
    ],
)
def test_where_networks_are_cut(name: str, blocks: int, sizes: list[int], wide: list[int]) -> None:
    network = catalogue.build(name, (3, 32, 32), 10)
    parts = cut(network.get_submodule("features"), blocks)
    children = [child for part in parts for child in part.children()]
    assert [id(c) for c in children] == [
        id(c) for c in network.get_submodule("features").children()
    ]
    lengths = [len(list(part.children())) for part in parts]
    assert lengths == ([3, 2, 2] if name == "mlp" and blocks == 3 else sizes)
    assert channels(parts) == wide


@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        "cnn_ua_pdfl",
        "resnet18_gn",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet18", "vgg11")),
    ],
)
@pytest.mark.parametrize("adapter", ["conv", "mean"])
def test_thin_networks_run_in_blocks(name: str, adapter: Any) -> None:
    network = catalogue.build(name, (3, 32, 32), 10)
    method = FuseFL(hidden_width=0.1, adapter=adapter)
    method.check_network(Size.of(Network(copy.deepcopy(network)), (3, 32, 32)))
    narrow = thin(network, 0.1)
    assert content(narrow) < 0.03 * content(network)
    assert narrow.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_widths_by_hand() -> None:
    lenet = thin(catalogue.build("lenet", (1, 28, 28), 10), 0.5)
    assert [tuple(p.shape) for p in lenet.parameters() if p.dim() > 1] == [
        (3, 1, 5, 5),
        (8, 3, 5, 5),
        (60, 8 * 16),
        (42, 60),
        (10, 42),
    ]
    norms = [
        m
        for m in thin(catalogue.build("resnet18_gn", (3, 8, 8), 10), 0.05).modules()
        if isinstance(m, nn.GroupNorm)
    ]
    assert {m.num_channels for m in norms} == {
        4,
        6,
        12,
        26,
    }  # 3.2, 6.4, 12.8, 25.6 in groups of two
    assert sum(p.numel() for p in thin(Plain(), 1).parameters()) == sum(
        p.numel() for p in Plain().parameters()
    )


def test_one_client_trains_blocks_one_after_the_other(blobs: FederatedData) -> None:
    """Rewritten with plain modules: the first block of the first fit stays, a new adapter
    follows."""
    data = replace(blobs, clients=blobs.clients[:1])
    plain = replace(SETTINGS["training"], optimizer="sgd")
    method = FuseFL(blocks=2, epochs=2, hidden_width=1)
    result = run(method, data, Plain, **(SETTINGS | {"training": plain}), stop_after=2)
    first = run(Ensemble(epochs=2), data, Plain, **(SETTINGS | {"training": plain}))
    assert isinstance(result.model, Fused)
    block = result.model.get_submodule("levels.0.0.block.0")
    assert torch.equal(block.weight, first.model.get_submodule("members.0.features.0").weight)  # type: ignore[arg-type]
    later = result.model.get_submodule("levels.1.0.block.0")
    assert not torch.equal(later.weight, first.model.get_submodule("members.0.features.2").weight)  # type: ignore[arg-type]
    x = torch.randn(9, 4, generator=generator())
    adapter = result.model.get_submodule("levels.1.0.adapter")
    assert isinstance(adapter, Adapter)
    by_hand = torch.relu(block(x)) @ adapter.weight.T + adapter.bias
    by_hand = result.model.get_submodule("classifier")(torch.relu(later(by_hand)))
    torch.testing.assert_close(result.model(x), by_hand)


def test_frozen_levels_keep_their_statistics() -> None:
    norm, own = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    fused = Fused(
        [[Stage(nn.Sequential(norm))], [Stage(nn.Sequential(own, nn.Linear(4, 4)))]],
        nn.Linear(4, 3),
        1,
    )
    fused.train()
    fused(torch.randn(8, 4, generator=generator()) + 5).sum().backward()
    assert torch.equal(norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert norm.weight.grad is None
    assert float(own.running_mean.min()) > 0.3  # type: ignore[union-attr]
    assert own.weight.grad is not None


def test_pooled_gaussians_are_those_of_all_samples() -> None:
    h, y = torch.randn(50, 3, generator=generator()) * 2 + 7, torch.arange(50) % 3
    y[:20] = 0  # classes spread unevenly over the parts; nobody has class 3
    parts = [measure([(h[r], y[r])], 4) for r in (slice(0, 25), slice(25, 26), slice(26, 50))]
    for c in range(3):
        n, mean, covariance = pooled(parts, c)
        own = h[y == c].double().numpy()
        assert n == len(own)
        np.testing.assert_allclose(mean.numpy(), own.mean(0), rtol=1e-5)
        np.testing.assert_allclose(covariance.numpy(), np.cov(own.T), rtol=1e-4, atol=1e-5)
    assert pooled(parts, 3)[0] == 0
    x, labels = drawn(parts, 40_000, generator())
    assert sorted(set(labels.tolist())) == [0, 1, 2]
    own = h[y == 1].numpy()
    np.testing.assert_allclose(x[labels == 1].mean(0).numpy(), own.mean(0), atol=0.1)
    np.testing.assert_allclose(np.cov(x[labels == 1].T.numpy()), np.cov(own.T), atol=0.2)


def test_calibration_is_plain_sgd() -> None:
    head = nn.Linear(2, 2)
    w, b = head.weight.detach().clone(), head.bias.detach().clone()
    x, y = torch.randn(6, 2, generator=generator()), torch.tensor([0, 1, 1, 0, 1, 0])
    calibrate(head, x, y, 0.5, generator())
    error = (x @ w.T + b).softmax(1) - nn.functional.one_hot(y, 2)
    torch.testing.assert_close(head.weight.detach(), w - 0.5 * error.T @ x / 6)
    torch.testing.assert_close(head.bias.detach(), b - 0.5 * error.mean(0))


def bytes_by_hand(c: int) -> int:
    """Plain's blocks of full width with `c` clients: 4·6 + 6, adapter 6c·6 + 6 and 6·5 + 5, head
    5·3 + 3."""
    first, second, head = 30, 36 * c + 6 + 35, 18
    total = c * (first + second + head) + c * (c - 1) * first
    return 4 * (total + c * (c - 1) * second + c * 3 * (1 + 5 + 15))


def test_bytes_by_hand(blobs: FederatedData) -> None:
    method = FuseFL(epochs=1, hidden_width=1, calibration_samples=2)
    assert run(method, blobs, Plain, **SETTINGS).bytes == bytes_by_hand(4)


@pytest.mark.parametrize("clients", [2, 10])
def test_by_default_no_more_bytes_move_than_n_models(clients: int) -> None:
    network = catalogue.build("lenet", (3, 32, 32), 10)
    size, method = Size.of(Network(network)), FuseFL()
    width = method.fitting(network, clients)
    assert 0 < width < 1
    assert method.cost(clients, size) <= clients * size
    assert replace(method, hidden_width=width).cost(clients, size) == method.cost(clients, size)
    assert replace(method, hidden_width=width + 1 / 64).cost(clients, size) > clients * size


def frozen() -> nn.Module:
    network = Plain()
    network.features[0].requires_grad_(False)  # type: ignore[index]
    return network


class Twice(Plain):
    """Not head(features(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3)), "features"),
        (SplitNetwork(nn.Linear(4, 4), nn.Linear(4, 3)), "nn.Sequential"),
        (SplitNetwork(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3)), "blocks 1"),
        (
            SplitNetwork(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), nn.Identity()),
            "linear classifier",
        ),
        (frozen(), "frozen"),
        (Twice(), r"head\(features\(x\)\)"),
        (
            SplitNetwork(
                nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 3)
            ),
            "hidden_width=1",
        ),
    ],
    ids=[
        "undeclared",
        "not a sequence",
        "too short",
        "no classifier",
        "frozen",
        "more",
        "layer norm",
    ],
)
def test_networks_that_cannot_be_fused_are_refused(network: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FuseFL(hidden_width=0.5).check_network(Size.of(Network(network), (4,)))


def test_gaussians_that_do_not_fit_are_refused() -> None:
    counts, means = torch.ones(2, dtype=torch.int32), torch.zeros(2, 3)
    with pytest.raises(UserError, match="fit together"):
        ClassGaussians(counts, means, torch.zeros(2, 9))
    with pytest.raises(UserError, match="finite"):
        ClassGaussians(counts, means, torch.full((2, 6), torch.inf))
    with pytest.raises(UserError, match="negative"):
        ClassGaussians(-counts, means, torch.zeros(2, 6))
