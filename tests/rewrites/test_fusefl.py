"""FuseFL, written from its paper and code, against the library's run: a block is linear + tanh, and
so is the next."""

from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import Hardware, Training, run
from ekiden.core.models.split import SplitNetwork
from ekiden.methods import FuseFL
from ekiden.methods.one_shot import fusefl
from tests.rewrites.plain import CLASSES, HIDDEN, INPUTS, LR, SILOS, STEPS, data

ALL, EPOCHS = range(len(SILOS)), 2
N = len(SILOS)
Block = tuple[Tensor, Tensor]
X, Y = ([torch.tensor(silo[part]) for silo in SILOS] for part in (0, 1))


def linear(outputs: int, inputs: int) -> nn.Linear:
    """Return a layer with fixed values."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(-0.9, 1.1, p.numel()).sin().mul(3).cos().view(p.shape))
    return layer


def network() -> nn.Module:
    """Return the library's network."""
    first, second = linear(HIDDEN, INPUTS), linear(HIDDEN, HIDDEN)
    features = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
    return SplitNetwork(features, nn.Sequential(linear(CLASSES, HIDDEN)))


def values(layer: nn.Module) -> Block:
    """Return weight and bias."""
    weight, bias = (p.detach().double() for p in layer.parameters())
    return weight, bias


def apply(block: Block, x: Tensor) -> Tensor:
    """Return x Wᵀ + b."""
    return x @ block[0].T + block[1]


def descend(parts: list[Tensor], answers: Any, i: int) -> list[Tensor]:
    """Return the parts after gradient steps on silo i's cross-entropy."""
    for _ in range(EPOCHS * STEPS[i]):
        at = [p.detach().requires_grad_() for p in parts]
        z = answers(at)
        loss = (torch.logsumexp(z, 1) - z[torch.arange(len(z)), Y[i]]).mean()
        parts = [
            p.detach() - LR * g for p, g in zip(at, torch.autograd.grad(loss, at), strict=True)
        ]
    return parts


@pytest.mark.parametrize("adapter", ["conv", "mean"])
def test_fusefl(adapter: Literal["conv", "mean"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tang et al. 2024, Figure 4: train all blocks; freeze block 1 of all; train block 2 on all of
    them.

    A classifier's average reads the sum of the last blocks, and is calibrated (CCVR) by one pass
    over given features."""
    seen: list[Any] = []
    features, wanted = torch.linspace(-1, 1, 40).view(10, 4).sin(), torch.arange(10) % CLASSES

    def fixed(self: nn.Module) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(1, 2, p.numel()).mul(5).sin().div(3).view(p.shape))

    def given(parts: Any, *further: Any) -> tuple[Tensor, Tensor]:
        seen.append(parts)
        return features, wanted

    monkeypatch.setattr(fusefl.Adapter, "reset_parameters", fixed)
    monkeypatch.setattr(fusefl, "drawn", given)
    made = fusefl.Adapter(N * HIDDEN, HIDDEN)
    start = [
        *values(network().get_submodule("features.0")),
        *values(network().get_submodule("features.2")),
    ]
    start += values(network().get_submodule("head.0"))

    def plain(at: list[Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(apply((at[2], at[3]), torch.tanh(apply((at[0], at[1]), x))))
        return apply((at[4], at[5]), h)

    first = [descend(start, partial(plain, x=X[i]), i) for i in ALL]

    def joined(x: Tensor) -> list[Tensor]:
        return [torch.tanh(apply((p[0], p[1]), x)) for p in first]

    def second(at: list[Tensor], x: Tensor) -> Tensor:
        parts = joined(x)
        read = (
            apply((at[4], at[5]), torch.cat(parts, 1))
            if adapter == "conv"
            else torch.stack(parts).mean(0)
        )
        return torch.tanh(apply((at[0], at[1]), read))

    def fuse(at: list[Tensor], x: Tensor) -> Tensor:
        return apply((at[2], at[3]), second(at, x))

    adapters = list(values(made)) if adapter == "conv" else []
    own = [descend([*first[i][2:], *adapters], partial(fuse, x=X[i]), i) for i in ALL]
    x = torch.cat(X)
    last = [second(at, x) for at in own]
    head = [torch.stack([at[part] for at in own]).mean(0) for part in (2, 3)]
    z = apply((head[0], head[1]), features.double())
    slope = (z.softmax(1) - torch.eye(CLASSES)[wanted]) / len(z)
    head = [head[0] - 0.2 * slope.T @ features.double(), head[1] - 0.2 * slope.sum(0)]
    expected = apply((head[0], head[1]), torch.stack(last).sum(0))
    method = FuseFL(
        epochs=EPOCHS,
        hidden_width=1.0,
        adapter=adapter,
        calibration_lr=0.2,
        calibration_samples=4,
    )
    training = Training(optimizer="sgd", lr=LR, weight_decay=0.0, batch_size=6, select="last")
    hardware = Hardware(threads=1)
    result = run(method, data(), network(), training=training, hardware=hardware, evaluate_every=0)
    np.testing.assert_allclose(
        result.model(x.float()).detach().numpy(), expected.numpy(), atol=1e-5
    )
    for c in range(CLASSES):
        of_class = torch.stack(last).sum(0)[torch.cat(Y) == c].numpy()
        n, mean, covariance = fusefl.pooled(seen[0], c)
        assert n == len(of_class)
        np.testing.assert_allclose(mean.numpy(), of_class.mean(0), atol=1e-5)
        np.testing.assert_allclose(covariance.numpy(), np.cov(of_class.T), atol=1e-5)
