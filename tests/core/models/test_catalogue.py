"""The networks: sizes as published, shapes, parts, and ResNet-18 against a second computation."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekiden import UserError
from ekiden.core.models import catalogue
from ekiden.core.models.split import Split, SplitNetwork
from ekiden.readers.kinds import Table

CIFAR, MNIST, TINY = (3, 32, 32), (1, 28, 28), (3, 64, 64)

OF_IMAGES = catalogue.fitting((3, 64, 64))
"""networks that take images; those for tables and texts are tried in test_tables_and_texts.py"""


def new(
    name: str, shape: tuple[int, ...] = CIFAR, classes: int = 10, seed: int = 0
) -> SplitNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = catalogue.build(name, shape, classes)
    assert isinstance(network, SplitNetwork)
    return network


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("mlp", MNIST, 10, 784 * 400 + 400 * 200 + 200 * 100 + 100 * 10 + 710),
        ("mlp_ma_echo", MNIST, 10, 414_600),
        ("lenet", CIFAR, 7, 61_751),
        ("lenet", CIFAR, 10, 62_006),
        ("cnn", CIFAR, 10, 319_242),
        ("cnn_tiny", TINY, 200, 2_142_472),
        ("cnn_ma_echo", CIFAR, 10, 4_971_368),
        ("cnn_ua_pdfl", CIFAR, 10, 545_098),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("resnet18", CIFAR, 7, 11_172_423),
        ("resnet18", TINY, 200, 11_271_432),
        ("resnet18_gn", CIFAR, 10, 11_173_962),
        ("vgg11", CIFAR, 10, 9_225_610),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert sum(p.numel() for p in new(name, shape, classes).parameters()) == parameters


def test_buffer_counts() -> None:
    buffers = list(new("resnet18").buffers())
    assert sum(b.numel() for b in buffers if b.dtype == torch.float32) == 9_600
    assert sum(b.numel() for b in buffers if b.dtype == torch.int64) == 20
    assert len(buffers) == 60
    for name in set(OF_IMAGES) - {"resnet18"}:
        assert not list(new(name).buffers()), name


def test_resnet18_has_60_tensors_before_the_head() -> None:
    assert len(list(new("resnet18").features.parameters())) == 60


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize(
    "shape",
    [(3, 33, 40), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 32, 32), (2, 32, 47)))],
)
def test_head_of_features_is_the_output(name: str, shape: tuple[int, ...]) -> None:
    network = new(name, shape, 7).eval()
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    representation = network.features(x)
    first = next(part for part in network.head.modules() if isinstance(part, nn.Linear))
    assert representation.shape == (2, first.in_features)
    logits = network(x)
    assert logits.shape == (2, 7)
    assert torch.equal(logits, network.head(representation))
    in_parts = len(list(network.features.parameters())) + len(list(network.head.parameters()))
    assert in_parts == len(list(network.parameters()))
    assert list(network._modules) == [
        "features",
        "head",
    ]  # the head comes last in every flat vector
    logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (64,)),
        ("mlp", (1, 8, 8)),
        ("mlp", (5, 7)),
        ("mlp_ma_echo", (64,)),
        ("lenet", MNIST),
        ("lenet", (3, 16, 16)),
        ("lenet", TINY),
        ("cnn", (3, 28, 28)),
        ("cnn", (3, 18, 18)),
        ("cnn_tiny", (1, 4, 4)),
        ("cnn_tiny", (1, 8, 8)),
        ("cnn_ma_echo", (1, 8, 8)),
        ("resnet18", (1, 8, 8)),
        ("resnet18_gn", (1, 8, 8)),
        ("vgg11", TINY),
    ],
)
def test_training_step_on_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    network = new(name, shape, 5)
    with torch.random.fork_rng(devices=[]):
        logits = network(torch.rand(2, *shape))
    assert logits.shape == (2, 5)
    logits.sum().backward()


@pytest.mark.parametrize("name", OF_IMAGES)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    first, again, other = (new(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    head = next(key for key in first if key.startswith("head.") and key.endswith("weight"))
    assert not torch.equal(first[head], other[head])


@pytest.mark.parametrize("name", OF_IMAGES)
def test_signal_reaches_the_output(name: str) -> None:
    """At the start, logits of different inputs differ by more than rounding."""
    network = new(name).eval()
    logits = network(torch.randn(8, *CIFAR, generator=torch.Generator().manual_seed(2)))
    assert logits.std(dim=0).mean() > 1e-3


def test_small_networks_as_the_papers_write_them() -> None:
    """ReLU before the pool, from the state dict."""
    x = torch.randn(3, *CIFAR, generator=torch.Generator().manual_seed(3))

    def conv(v: Tensor, i: int, *, padding: int = 0, pool: bool = True) -> Tensor:
        v = F.relu(
            F.conv2d(
                v, values[f"features.{i}.weight"], values.get(f"features.{i}.bias"), padding=padding
            )
        )
        return F.max_pool2d(v, 2) if pool else v

    def linear(v: Tensor, layer: str) -> Tensor:
        return F.linear(v, values[f"{layer}.weight"], values.get(f"{layer}.bias"))

    def compare(network: nn.Module, expected: Tensor) -> None:
        torch.testing.assert_close(network(x), expected, rtol=1e-5, atol=1e-6)

    network = new("lenet").eval()
    values = network.state_dict()
    v = conv(conv(x, 0), 3).flatten(1)
    v = F.relu(linear(F.relu(linear(v, "features.7")), "features.9"))
    compare(network, linear(v, "head"))

    network = new("cnn").eval()
    values = network.state_dict()
    compare(network, linear(conv(conv(conv(x, 0), 3), 6, pool=False).flatten(1), "head"))

    network = new("cnn_tiny").eval()
    values = network.state_dict()
    v = conv(conv(x, 0, padding=1), 3, padding=1).flatten(1)
    compare(network, linear(F.relu(linear(v, "features.7")), "head"))

    network = new("cnn_ma_echo").eval()
    values = network.state_dict()
    v = conv(conv(conv(x, 0, padding=1), 4, padding=1), 8, padding=1).flatten(1)
    v = F.relu(linear(F.relu(linear(v, "features.13")), "features.15"))
    compare(network, linear(v, "head"))

    for name in ("mlp", "mlp_ma_echo"):
        network = new(name).eval()
        values = network.state_dict()
        v = x.flatten(1)
        for i in (1, 3, 5):
            v = F.relu(linear(v, f"features.{i}"))
        compare(network, linear(v, "head"))


def test_vgg11_by_hand() -> None:
    network = new("vgg11").eval()
    v = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(4))
    x = v
    convolutions = [layer for layer in network.features if isinstance(layer, nn.Conv2d)]  # type: ignore[attr-defined]
    for i, layer in enumerate(convolutions):
        v = F.relu(F.conv2d(v, layer.weight, layer.bias, padding=1))
        if i in (0, 1, 3, 5, 7):
            v = F.max_pool2d(v, 2)
    head = network.head
    assert isinstance(head, nn.Linear)
    torch.testing.assert_close(network(x), F.linear(v.flatten(1), head.weight, head.bias))


def test_initial_spread_where_it_is_not_torchs_default() -> None:
    for layer in new("vgg11").features.modules():
        if isinstance(layer, nn.Conv2d):
            expected = (2 / (layer.in_channels * 9)) ** 0.5  # He et al.
            assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.1)
    for layer in new("cnn_ma_echo").modules():
        if isinstance(layer, nn.Linear):
            expected = (2 / (layer.in_features + layer.out_features)) ** 0.5  # Xavier
            assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.1)


def recompute_resnet18(values: dict[str, Tensor], x: Tensor, groups: int = 0) -> Tensor:
    """ResNet-18 from its state dict, read in order: per unit a convolution and its norm."""
    queue = [values[key] for key in values if not key.endswith("num_batches_tracked")]

    def unit(v: Tensor, stride: int, padding: int) -> Tensor:
        v = F.conv2d(v, queue.pop(0), stride=stride, padding=padding)
        scale, shift = queue.pop(0), queue.pop(0)
        if groups:
            return F.group_norm(v, groups, scale, shift)
        mean, var = queue.pop(0), queue.pop(0)
        column = (1, -1, 1, 1)
        return (v - mean.view(column)) / (var.view(column) + 1e-5).sqrt() * scale.view(
            column
        ) + shift.view(column)

    v = F.relu(unit(x, 1, 1))
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = unit(F.relu(unit(v, stride, 1)), 1, 1)
            v = F.relu(inner + (unit(v, stride, 0) if stride == 2 else v))
    logits = F.linear(v.mean((2, 3)), queue.pop(0), queue.pop(0))
    assert not queue
    return logits


@pytest.mark.parametrize(("name", "groups"), [("resnet18", 0), ("resnet18_gn", 2)])
def test_resnet18_by_hand(name: str, groups: int) -> None:
    network = new(name, (3, 16, 16))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # no norm stays the identity
        for value in network.state_dict().values():
            if value.ndim == 1 and value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    x = torch.randn(3, 3, 16, 16, generator=generator)
    expected = recompute_resnet18(network.state_dict(), x, groups)
    logits = network.eval()(x)
    assert expected.std() > 0.01
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_users_network_declares_its_parts_in_one_line_each() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.features(x))
            return logits

    def head_size(network: Split) -> int:
        return sum(p.numel() for p in network.head.parameters())

    assert head_size(Own()) == 8  # mypy checks the types
    assert head_size(new("lenet")) == 850


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model 'resnet81': did you mean 'resnet18'"):
        catalogue.build("resnet81", CIFAR, 10)


def test_ua_pdfl_head_is_all_but_the_convolutions() -> None:
    """Only where the head begins differs from cnn_tiny: initial values and outputs are the same."""
    network, other = new("cnn_ua_pdfl"), new("cnn_tiny")
    x = torch.rand(2, *CIFAR, generator=torch.Generator().manual_seed(1))
    assert torch.equal(network.eval()(x), other.eval()(x))
    assert [
        type(part)
        for part in network.features.modules()
        if next(part.parameters(recurse=False), None) is not None
    ] == [
        nn.Conv2d,
        nn.Conv2d,
    ]
    personal = sum(p.numel() for p in network.head.parameters())
    assert personal == 4096 * 128 + 128 + 128 * 10 + 10
    assert personal / sum(p.numel() for p in network.parameters()) == pytest.approx(
        0.9644, abs=1e-4
    )
    assert sum(p.numel() for p in other.head.parameters()) / 545_098 == pytest.approx(
        0.0024, abs=1e-4
    )


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("lenet", 16),
        ("cnn", 18),
        ("cnn_tiny", 4),
        ("cnn_ma_echo", 8),
        ("cnn_ua_pdfl", 4),
        ("vgg11", 32),
    ],
)
def test_too_small_images(name: str, side: int) -> None:
    new(name, (3, side, side)).eval()(torch.zeros(1, 3, side, side))
    for shape in ((3, side - 1, side), (3, side, side - 1)):
        with pytest.raises(
            UserError, match=f"{name} needs images of at least {side}x{side} pixels"
        ) as caught:
            catalogue.build(name, shape, 10)
        text = str(caught.value)
        assert "\n" not in text
        assert "mlp" in text
        assert f"{name}," not in text.split("one of")[1]


@pytest.mark.parametrize("name", sorted(set(OF_IMAGES) - {"mlp", "linear", "mlp_ma_echo"}))
def test_convolutions_refuse_features(name: str) -> None:
    with pytest.raises(
        UserError, match=r"needs images.*\(64,\): .* one of mlp, linear, mlp_ma_echo, cnn_signal$"
    ):
        catalogue.build(name, (64,), 10)


@pytest.mark.parametrize("name", ["lenet", "resnet18", "unet", "efficientnet_lite0"])
def test_networks_of_images_say_that_a_table_is_none(name: str) -> None:
    with pytest.raises(UserError) as refused:
        catalogue.build(name, (2,), 2, Table(("a", "b")))
    assert "\n" not in str(refused.value)
    if name in catalogue.pretrained_names():
        assert str(refused.value).endswith("have shape (2,): use other images, or another model")
    else:
        said = "but these samples are a table, of shape (2,): use model with one of table_mlp, table_transformer, mlp"
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("dataset", "shape", "name"),
    [
        ("digits", (1, 8, 8), "mlp"),
        ("mnist", MNIST, "mlp"),
        ("fashion_mnist", MNIST, "mlp"),
        ("femnist", MNIST, "mlp"),
        ("pacs", CIFAR, "lenet"),
        ("pacs", TINY, "lenet"),
        ("office_caltech10", CIFAR, "lenet"),
        ("cifar10", CIFAR, "cnn"),
        ("cifar100", CIFAR, "cnn"),
        ("svhn", CIFAR, "cnn"),
        ("pathmnist", (3, 28, 28), "cnn"),
        ("cifar10", (3, 16, 16), "lenet"),
        ("cifar10", (3, 8, 8), "mlp"),
        ("tiny_imagenet", TINY, "cnn_tiny"),
        ("own", (64,), "mlp"),
        ("own", (30, 4), "mlp"),
        ("own", MNIST, "mlp"),
        ("own", (3, 12, 40), "mlp"),
        ("own", (1, 32, 32), "lenet"),
        ("own", CIFAR, "lenet"),
        ("own", (3, 28, 28), "lenet"),
        ("own", (3, 96, 64), "cnn_tiny"),
    ],
)
def test_default_network(dataset: str, shape: tuple[int, ...], name: str) -> None:
    assert catalogue.default_for(dataset, shape) == name
    assert catalogue.build(name, shape, 3)(torch.zeros(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 4, 4), (3, 33, 50), (2, 7, 5)])
def test_the_u_net_gives_classes_to_each_pixel(shape: tuple[int, ...]) -> None:
    network = new("unet", shape, 4)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    assert network(x).shape == (2, 4, *shape[1:])
    assert torch.equal(network(x), network.head(network.features(x)))
    network(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())
    assert list(network._modules) == ["features", "head"]
    assert not list(network.buffers())


def test_the_u_net_refuses_what_it_cannot_take() -> None:
    assert sum(p.numel() for p in new("unet", (3, 32, 32), 2).parameters()) == 118_930
    with pytest.raises(
        UserError, match=r"unet needs images of at least 4x4 pixels, but .* \(3, 3, 8\)"
    ):
        catalogue.build("unet", (3, 3, 8), 2)
    with pytest.raises(UserError, match="unet needs images"):
        catalogue.build("unet", (12,), 2)
