"""What the rewrites share: three silos, a network of two layers in NumPy with its gradient, and the
library's run.

The rewrites import no method's code. They compute in float64 with flat vectors (W1, b1, W2, b2).
The library computes in float32, so both agree to about 1e-6.

An epoch is one batch of all samples at two silos. The third holds one sample twelve times, so its
two batches have the same gradient in any order: it makes two steps where the others make one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.method import Method
from ekiden.core.models.split import SplitNetwork
from ekiden.data import federate
from ekiden.runs.result import Result

Vector = NDArray[np.float64]
Silos = Sequence[tuple[Vector, NDArray[np.int64]]]
INPUTS, HIDDEN, CLASSES = 3, 4, 3
HEAD = HIDDEN * INPUTS + HIDDEN
"""where the classifier starts in a flat vector"""
LR = 0.3
STEPS = (1, 1, 2)
"""steps of each silo in an epoch"""


def _silos() -> Silos:
    random = np.random.default_rng(4)
    x = random.normal(size=(11, INPUTS)).astype(np.float32).astype(np.float64)
    return (
        (x[:6], np.array([0, 1, 0, 2, 0, 1])),
        (x[6:10], np.array([1, 1, 2, 1])),
        (np.repeat(x[10:], 12, axis=0), np.full(12, 2)),
    )


SILOS = _silos()
SIZES = np.array([len(y) for _, y in SILOS])
START = (
    np.random.default_rng(5)
    .normal(size=HEAD + CLASSES * HIDDEN + CLASSES)
    .astype(np.float32)
    .astype(np.float64)
)


def layers(w: Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """Return W1 (hidden, inputs), b1, W2 (classes, hidden), b2 of a flat vector."""
    first, second = HIDDEN * INPUTS, HEAD + CLASSES * HIDDEN
    return (
        w[:first].reshape(HIDDEN, INPUTS),
        w[first:HEAD],
        w[HEAD:second].reshape(CLASSES, HIDDEN),
        w[second:],
    )


def flat(*parts: Vector) -> Vector:
    """Return the flat vector of layers."""
    return np.concatenate([part.ravel() for part in parts])


def hidden(w: Vector, x: Vector) -> Vector:
    """Return the classifier's inputs (n, hidden)."""
    w1, b1, _, _ = layers(w)
    return np.tanh(x @ w1.T + b1)


def logits(w: Vector, x: Vector) -> Vector:
    """Return the answers (n, classes)."""
    _, _, w2, b2 = layers(w)
    z: Vector = hidden(w, x) @ w2.T + b2
    return z


def softmax(z: Vector) -> Vector:
    """Return the probabilities of logits (n, classes)."""
    e: Vector = np.exp(z - z.max(axis=1, keepdims=True))
    p: Vector = e / e.sum(axis=1, keepdims=True)
    return p


def backward(w: Vector, x: Vector, by_logits: Vector, by_hidden: Vector | None = None) -> Vector:
    """Return the gradient by w, given that by the logits (n, classes) and, in addition, by the
    classifier's inputs."""
    h = hidden(w, x)
    dh = by_logits @ layers(w)[2] + (0 if by_hidden is None else by_hidden)
    dz = dh * (1 - h**2)
    return flat(dz.T @ x, dz.sum(0), by_logits.T @ h, by_logits.sum(0))


def loss(w: Vector, i: int) -> float:
    """Return F_i(w), the mean cross-entropy of silo i."""
    x, y = SILOS[i]
    return float(-np.log(softmax(logits(w, x))[np.arange(len(y)), y]).mean())


def gradient(w: Vector, i: int, silos: Silos = SILOS) -> Vector:
    """Return ∇F_i(w)."""
    x, y = silos[i]
    return backward(w, x, (softmax(logits(w, x)) - np.eye(CLASSES)[y]) / len(y))


def data(val_fraction: float = 0.0) -> FederatedData:
    """Return the silos as the library has them."""
    pairs = [(torch.tensor(x, dtype=torch.float32), torch.tensor(y)) for x, y in SILOS]
    return federate(pairs, test=pairs[0], val_fraction=val_fraction, classes=["a", "b", "c"])


def module(w: Vector = START) -> nn.Module:
    """Return the network with these weights."""
    network = SplitNetwork(
        nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh()),
        nn.Sequential(nn.Linear(HIDDEN, CLASSES)),
    )
    nn.utils.vector_to_parameters(torch.tensor(w, dtype=torch.float32), network.parameters())
    return network


def library(
    method: Method,
    silos: FederatedData | None = None,
    network: nn.Module | None = None,
    **training: Any,
) -> Result:
    """Return the library's run from START with plain SGD and batches of six, or as the arguments
    say."""
    chosen: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": LR,
        "weight_decay": 0.0,
        "batch_size": 6,
        "select": "last",
    } | training
    hardware = Hardware(threads=1)
    return run(
        method,
        silos or data(),
        network or module(),
        training=Training(**chosen),
        hardware=hardware,
        evaluate_every=0,
    )


def agrees(result: Result, expected: Vector, tolerance: float = 1e-5) -> None:
    """Check a run's global model."""
    assert result.weights is not None
    assert np.abs(expected - START).max() > 0.02, "nothing was learned"
    np.testing.assert_allclose(
        result.weights.params.double().numpy(), expected, rtol=0, atol=tolerance
    )


def personal_agree(result: Result, expected: list[Vector], tolerance: float = 1e-5) -> None:
    """Check the clients' models."""
    for found, own in zip(result.personal, expected, strict=True):
        assert np.abs(own - START).max() > 0.02, "nothing was learned"
        np.testing.assert_allclose(found.params.double().numpy(), own, rtol=0, atol=tolerance)
