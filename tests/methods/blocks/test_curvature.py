"""Fisher information and moments of inputs against plain loops over samples, classes, positions and
layers."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import UserError
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.methods.one_shot.blocks.curvature import (
    Labels,
    diagonal,
    gradients,
    half,
    kronecker,
    moments,
    refuse_layers,
    whole,
)

CLASSES = 3


class Dense(nn.Module):
    """Two linear layers with an activation in place."""

    shape = (4,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu_(self.first(x)))  # type: ignore[no-any-return]


class Normed(Dense):
    """With normalisations, with and without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(F.relu_(self.norm(self.first(x)))))  # type: ignore[no-any-return]


class Pictures(nn.Module):
    """Convolutions with padding, stride, without bias; BatchNorm and GroupNorm on channels."""

    shape = (2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 3, 2, stride=2)
        self.head = nn.Linear(27, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(F.relu(self.norm(self.conv(x))))
        return self.head(self.second(x).flatten(1))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """A layer that is called twice, and a linear layer over positions."""

    shape = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(4, 4)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.each(torch.tanh(self.each(x)))).flatten(1))  # type: ignore[no-any-return]


def made(kind: Any, samples: int = 7) -> tuple[Network, list[tuple[Tensor, Tensor]]]:
    """A network with ordinary values, and two batches of unequal size."""
    torch.manual_seed(3)
    module = kind().eval()
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(part.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 2)  # type: ignore[arg-type]
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)):
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    x, y = torch.randn(samples, *kind.shape), torch.randint(CLASSES, (samples,))
    return Network(module), [(x[:4], y[:4]), (x[4:], y[4:])]


def measured(network: Network, batches: Any, labels: Labels, work: Work | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    layers = network.layout.layers
    return diagonal(gradients(network.module, layers, batches, labels, draw, work or Work()))


def by_loop(network: Network, batches: Any, labels: Labels) -> Tensor:
    """Squared gradients of one sample and one class after the other, by `backward`."""
    total, samples = torch.zeros(len(network.params), dtype=torch.float64), 0
    for x, y in batches:
        for one, label in zip(x, y, strict=True):
            samples += 1
            p = network.module(one[None])[0].detach().softmax(0)
            for c in range(CLASSES):
                weight = float(p[c]) if labels == "expected" else float(c == int(label))
                network.grad.zero_()
                network.module(one[None])[0].log_softmax(0)[c].backward()
                total += weight * network.grad.double() ** 2
    return total / samples


@pytest.mark.parametrize("labels", ["expected", "given"])
@pytest.mark.parametrize("kind", [Dense, Normed, Pictures, Shared])
def test_diagonal_equals_squared_gradients_of_single_samples(kind: Any, labels: Labels) -> None:
    network, batches = made(kind)
    expected = by_loop(network, batches, labels)
    assert bool((expected > 0).any())
    work = Work()
    torch.testing.assert_close(
        measured(network, batches, labels, work), expected, rtol=1e-4, atol=1e-9
    )
    assert work == Work(0, 7 * (CLASSES if labels == "expected" else 1))


def test_sampled_labels_estimate_the_expectation_without_bias() -> None:
    network, [(x, y), _] = made(Dense)
    many = [(x[:1].expand(3000, -1), y[:1].expand(3000))]
    sampled, expected, given = (
        measured(network, many, labels) for labels in ("sampled", "expected", "given")
    )
    assert (
        float((sampled - expected).norm())
        < 0.1 * float(expected.norm())
        < float((given - expected).norm())
    )


def test_large_gradients_are_squared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    network, batches = made(Pictures)
    before = measured(network, batches, "given")
    monkeypatch.setattr("ekiden.methods.one_shot.blocks.curvature._ENTRIES", 1)
    torch.testing.assert_close(measured(network, batches, "given"), before, rtol=1e-6, atol=1e-12)


def patches(x: Tensor, conv: nn.Conv2d) -> list[list[list[float]]]:
    """Of each sample and position, what a convolution multiplies with its weights, and 1 for its
    bias."""
    (height, width), stride, pad = conv.kernel_size, conv.stride[0], int(conv.padding[0])
    x = F.pad(x, (pad, pad, pad, pad))
    found = []
    for sample in x:
        rows = []
        for i in range(0, x.shape[2] - height + 1, stride):
            for j in range(0, x.shape[3] - width + 1, stride):
                patch = sample[:, i : i + height, j : j + width].flatten().tolist()
                rows.append(patch + [1.0] * (conv.bias is not None))
        found.append(rows)
    return found


@pytest.mark.parametrize("labels", ["expected", "given"])
def test_factors_of_a_convolution_equal_sums_over_positions(labels: Labels) -> None:
    network, batches = made(Pictures)
    layers = network.layout.dense
    found = kronecker(gradients(network.module, layers, batches, labels, torch.Generator(), Work()))
    assert [(len(f.inputs), len(f.outputs)) for f in found] == [(18, 4), (17, 3), (28, 3)]
    entered, left = [], []
    module: Any = network.module
    module.second.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach()))
    module.second.register_forward_hook(lambda _, args, out: left.append(out))
    a, b, samples = np.zeros((17, 17)), np.zeros((3, 3)), 0
    for x, y in batches:
        for one, label in zip(x, y, strict=True):
            samples += 1
            p = network.module(one[None])[0].detach().softmax(0)
            rows = patches(entered[-1], module.second)[0]
            for row in rows:
                a += np.outer(row, row) / len(rows) ** 2
            for c in range(CLASSES):
                weight = float(p[c]) if labels == "expected" else float(c == int(label))
                log_p = network.module(one[None])[0].log_softmax(0)[c]
                gradient = torch.autograd.grad(log_p, left[-1])[0][0].flatten(1)
                for g in gradient.T.numpy():
                    b += weight * len(rows) * np.outer(g, g)
    np.testing.assert_allclose(found[1].inputs, a / samples, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found[1].outputs, b / samples, rtol=1e-4, atol=1e-9)


def test_factors_of_one_sample_are_the_fisher_information_of_a_layer() -> None:
    network, [(x, y), _] = made(Dense)
    layers = network.layout.dense
    one = [(x[:1], y[:1])]
    passes = gradients(network.module, layers, one, "given", torch.Generator(), Work())
    a, b = kronecker(passes)[0]
    network.module(x[:1])[0].log_softmax(0)[int(y[0])].backward()
    gradient = network.layout.dense[0].matrix(network.grad).double().numpy().flatten(order="F")
    np.testing.assert_allclose(np.kron(a, b), np.outer(gradient, gradient), rtol=1e-4, atol=1e-9)


def test_moments_of_inputs() -> None:
    network, batches = made(Pictures)
    conv, _, head = moments(network.module, network.layout.dense, batches)
    images = torch.cat([x for x, _ in batches])
    module: Any = network.module
    rows = np.array(patches(images, module.conv)).reshape(7 * 36, 18)
    np.testing.assert_allclose(conv, rows.T @ rows / 7, rtol=1e-5, atol=1e-6)
    assert float(head[-1, -1]) == 1
    each, _ = made(Shared)
    linear = moments(each.module, each.layout.dense, made(Shared)[1])[0]
    assert float(linear[-1, -1]) == 6  # two calls of three positions


def test_the_network_is_as_it_was_but_for_its_gradients() -> None:
    network, batches = made(Normed)
    before = network.weights()
    measured(network, batches, "expected")
    assert torch.equal(network.weights().params, before.params)
    assert torch.equal(network.weights().buffers, before.buffers)
    assert not any(part._forward_hooks for part in network.module.modules())


def test_half_a_matrix_travels() -> None:
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    symmetric = (x + x.T).double()
    sent = half(symmetric)
    assert sent.dtype == torch.float32
    assert len(sent) == 15
    assert torch.equal(whole(sent, 5), symmetric.float().double())
    with pytest.raises(UserError, match=r"\(15,\) numbers do not fit a symmetric matrix of 6 rows"):
        whole(sent, 6)


class Attention(nn.Module):
    """Its output projection is a linear layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 1, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return self.head(self.mix(x, x, x, need_weights=False)[0][:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(2, 3)),
            (2, 3, 3),
            "layer '0' is no",
        ),
        (
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")),
            (2, 4, 4),
            "layer '0' is no",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, affine=True)),
            (4,),
            "layer '1' is no",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
            (4,),
            "running statistics",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), (4,), "layer '1' is no"),
    ],
)
def test_other_networks_are_refused_in_one_line(
    module: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    network = Network(module)
    with pytest.raises(UserError, match=message) as error:
        refuse_layers(network, shape, network.layout.layers)
    assert "\n" not in str(error.value)
    assert "average" in str(error.value)


def test_a_layer_that_is_not_called_is_refused() -> None:
    network = Network(Attention())
    with pytest.raises(UserError, match=r"layer mix\.out_proj is not called"):
        refuse_layers(network, (4,), network.layout.dense)


@pytest.mark.parametrize("kind", [Dense, Normed, Pictures, Shared])
def test_usual_networks_are_not_refused_and_stay_in_training(kind: Any) -> None:
    network = Network(kind())
    refuse_layers(network, kind.shape, network.layout.layers)
    assert network.module.training
