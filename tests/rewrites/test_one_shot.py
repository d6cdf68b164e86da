"""Methods that aggregate once, written from their papers, against the library's runs.

Every client trains E epochs from START; `TRAINED` has the models. What is written again is the
aggregation. Layers are matrices (inputs + 1, outputs): the bias is the weight of one more input,
which is constant 1."""

from functools import partial
from itertools import permutations, product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ekiden.core.engine.setup import builder
from ekiden.core.models.split import SplitNetwork
from ekiden.methods import (
    FAFI,
    Average,
    Ensemble,
    FedFisher,
    FedLPA,
    FisherMerging,
    MAEcho,
    OTFusion,
    RegMean,
)
from tests.rewrites.plain import (
    CLASSES,
    HEAD,
    HIDDEN,
    INPUTS,
    LR,
    SILOS,
    SIZES,
    START,
    STEPS,
    Vector,
    agrees,
    backward,
    data,
    flat,
    gradient,
    hidden,
    layers,
    library,
    logits,
    module,
    softmax,
)

ALL = range(len(SILOS))
EPOCHS = 3
SHARES = SIZES / SIZES.sum()
COUNTS = np.array([np.bincount(y, minlength=CLASSES) for _, y in SILOS])


def trained(i: int) -> Vector:
    """Return silo i's model."""
    w = START
    for _ in range(EPOCHS * STEPS[i]):
        w = w - LR * gradient(w, i)
    return w


TRAINED = [trained(i) for i in ALL]


def matrices(w: Vector) -> list[Vector]:
    """Return both layers as (inputs + 1, outputs)."""
    w1, b1, w2, b2 = layers(w)
    return [np.vstack([w1.T, b1]), np.vstack([w2.T, b2])]


def vector(first: NDArray[Any], second: NDArray[Any]) -> Vector:
    """Return the flat vector of two such matrices."""
    return flat(first[:-1].T, first[-1], second[:-1].T, second[-1])


def inputs(i: int) -> list[Vector]:
    """Return what both layers of silo i's model read on its data, with the constant 1."""
    x, y = SILOS[i]
    return [np.hstack([part, np.ones((len(y), 1))]) for part in (x, hidden(TRAINED[i], x))]


def slopes(i: int, labels: Literal["expected", "given"]) -> list[tuple[Vector, Vector, Vector]]:
    """Return pairs of derivatives by both layers' outputs (n, outputs), and each sample's weight
    (n,)."""
    x, y = SILOS[i]
    p = softmax(logits(TRAINED[i], x))
    _, _, w2, _ = layers(TRAINED[i])
    found = []
    for c in range(CLASSES):
        weight = p[:, c] if labels == "expected" else (y == c).astype(float)
        second = p - np.eye(CLASSES)[c]
        found.append((second @ w2 * (1 - hidden(TRAINED[i], x) ** 2), second, weight / len(y)))
    return found


def diagonal(i: int) -> Vector:
    """Return the diagonal of silo i's Fisher information: the mean of Σ_c p_c (∂ log p_c)²."""
    x, y = SILOS[i]
    p = softmax(logits(TRAINED[i], x))
    total = np.zeros_like(START)
    for at in range(len(y)):
        for c in range(CLASSES):
            by_logits = p[at : at + 1] - np.eye(CLASSES)[c]
            total += p[at, c] * backward(TRAINED[i], x[at : at + 1], by_logits) ** 2 / len(y)
    return total


def factors(i: int, labels: Literal["expected", "given"]) -> list[tuple[Vector, Vector]]:
    """Return the Kronecker factors A (of inputs) and B (of outputs) of silo i's Fisher information
    in both layers."""
    found = []
    for layer, read in enumerate(inputs(i)):
        b = sum((s[layer] * s[2][:, None]).T @ s[layer] for s in slopes(i, labels))
        found.append((read.T @ read / len(read), np.asarray(b)))
    return found


def class_wise(models: list[Vector]) -> Vector:
    """Return classifiers (hidden + 1, classes), each class averaged over clients with two samples
    of it or more."""
    owns = COUNTS > 1
    heads = np.stack([matrices(w)[1] for w in models])
    head: Vector = (heads * owns[:, None, :]).sum(0) / np.maximum(owns.sum(0), 1)
    return head


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_average(weighting: Literal["uniform", "samples"]) -> None:
    """Guha et al. 2019, and McMahan et al. 2017 in one round."""
    shares = SHARES if weighting == "samples" else np.full(len(SILOS), 1 / len(SILOS))
    agrees(library(Average(epochs=EPOCHS, weighting=weighting)), shares @ np.stack(TRAINED))


@pytest.mark.parametrize("rule", ["logits", "probabilities", "class-wise", "counts"])
def test_ensemble(rule: Literal["logits", "probabilities", "class-wise", "counts"]) -> None:
    """Guha et al. 2019; the rules of MA-Echo's code (class-wise) and PFNM's (counts)."""
    x = np.concatenate([x for x, _ in SILOS])
    z = np.stack([logits(w, x) for w in TRAINED])
    p = np.stack([softmax(one) for one in z])
    owns = COUNTS > 1
    expected = {
        "logits": z.mean(0),
        "probabilities": p.mean(0),
        "class-wise": (z * owns[:, None, :]).sum(0) / np.maximum(owns.sum(0), 1),
        "counts": (p * (COUNTS / COUNTS.sum(0))[:, None, :]).sum(0),
    }[rule]
    answers = library(Ensemble(epochs=EPOCHS, rule=rule)).model(
        torch.tensor(x, dtype=torch.float32)
    )
    found = answers.detach().double().numpy()
    if rule in ("probabilities", "counts"):
        found, expected = softmax(found), expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_regmean() -> None:
    """Jin et al. 2023, equation 2 and Algorithm 1: W = (Σ G_k)⁻¹ Σ G_k W_k, off the diagonal α
    G_k."""
    alpha = 0.8
    merged = []
    for layer in (0, 1):
        grams = [inputs(i)[layer].T @ inputs(i)[layer] for i in ALL]
        grams = [alpha * g + (1 - alpha) * np.diag(np.diag(g)) for g in grams]
        right = np.sum([grams[i] @ matrices(TRAINED[i])[layer] for i in ALL], axis=0)
        merged.append(np.linalg.solve(np.sum(grams, axis=0), right))
    agrees(library(RegMean(epochs=EPOCHS, alpha=alpha)), vector(*merged))


class Adapted(nn.Module):
    """tanh(W1 x + b1 + 2·B·A x), of which A (2, inputs) and B (hidden, 2) are trained, named as by
    peft."""

    def __init__(self, a: Vector) -> None:
        super().__init__()
        w1, b1, _, _ = layers(START)
        self.base = nn.Linear(INPUTS, HIDDEN).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(INPUTS, len(a), bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(len(a), HIDDEN, bias=False)})
        values = flat(w1, b1, a, np.zeros((len(w1), len(a))))
        nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float32), self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Return the classifier's inputs."""
        return torch.tanh(self.base(x) + 2 * self.lora_B["default"](self.lora_A["default"](x)))


def test_lorm() -> None:
    """Salami et al. 2025: B = Σ B_k A G_k Aᵀ (A Σ G_k Aᵀ)⁻¹ or A = Σ A_k G_k (Σ G_k)⁻¹ in turn; the
    head by RegMean."""
    w1, b1, w2, b2 = layers(START)
    first = np.random.default_rng(6).normal(size=(2, INPUTS)).astype(np.float32).astype(np.float64)
    a, b, grams = first, np.zeros((HIDDEN, 2)), [x.T @ x for x, _ in SILOS]
    for turn in "BAB":
        sent, read = [], []
        for i, (x, y) in enumerate(SILOS):
            own, ours, v, c = a, b, w2, b2
            for _ in range(EPOCHS * STEPS[i]):
                g1, _, g2, g3 = layers(gradient(flat(w1 + 2 * ours @ own, b1, v, c), i))
                if turn == "A":
                    own = own - LR * 2 * ours.T @ g1
                else:
                    ours = ours - LR * 2 * g1 @ own.T
                v, c = v - LR * g2, c - LR * g3
            sent.append((own, ours, np.column_stack([v, c])))
            read.append(
                np.column_stack([hidden(flat(w1 + 2 * ours @ own, b1, v, c), x), np.ones(len(y))])
            )
        if turn == "A":
            a = sum(s[0] @ g for s, g in zip(sent, grams, strict=True)) @ np.linalg.inv(sum(grams))
        else:
            right = sum(s[1] @ a @ g @ a.T for s, g in zip(sent, grams, strict=True))
            b = right @ np.linalg.inv(a @ sum(grams) @ a.T)
        head = sum(s[2] @ r.T @ r for s, r in zip(sent, read, strict=True))
        head = head @ np.linalg.inv(sum(r.T @ r for r in read))
        w2, b2 = head[:, :-1], head[:, -1]
    network = SplitNetwork(Adapted(first), nn.Linear(HIDDEN, CLASSES))
    nn.utils.vector_to_parameters(
        torch.tensor(START[HEAD:], dtype=torch.float32), network.head.parameters()
    )
    found = library(RegMean(epochs=EPOCHS, rounds=3, alpha=1), network=network).weights
    assert found is not None
    assert min(np.abs(a - first).max(), np.abs(b).max()) > 0.02, "nothing was learned"
    np.testing.assert_allclose(found.params.double().numpy(), flat(a, b, w2, b2), rtol=0, atol=1e-5)


def fafi_loss(w: Vector, i: int) -> float:
    """Return silo i's loss: two equal views of each sample, features of length 1 and a prototype
    for each class."""
    x, y = SILOS[i]
    x, y = np.tile(x, (2, 1)), np.tile(y, 2)
    prototypes = w[HEAD:].reshape(CLASSES, HIDDEN)
    z = hidden(np.append(w, np.zeros(CLASSES)), x)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    alike, contrast = z @ z.T / 0.5, 0.0
    for one in range(len(y)):
        others = np.arange(len(y)) != one
        total = np.log(np.exp(alike[one, others]).sum())
        contrast += (total - alike[one, others & (y == y[one])]).mean() / len(y)
    proper = -np.log(softmax(z @ prototypes.T)[np.arange(len(y)), y]).mean()
    apart = -np.log(np.diag(softmax(prototypes @ prototypes.T))).mean()
    return float(2 * proper + 0.7 * contrast + 0.4 * apart)


def test_fafi() -> None:
    """Zeng et al. 2025: 2 CE(P z, y) + μ SupCon(z) + ν CE(P Pᵀ); then Σ p_k z_k against the mean
    prototypes."""
    method = FAFI(epochs=2, temperature=0.5, mu=0.7, nu=0.4, jitter=0.0)
    first = (
        nn.utils.parameters_to_vector(builder(module(), data(), 0, method)().parameters())
        .detach()
        .double()
        .numpy()
    )
    sent, lr = [], 0.1
    for i in ALL:
        w = first
        for _ in range(2 * STEPS[i]):
            steps = 1e-5 * np.eye(len(w))
            w = w - lr * np.array(
                [(fafi_loss(w + s, i) - fafi_loss(w - s, i)) / 2e-5 for s in steps]
            )
        sent.append(w)
    assert np.abs(sent[0] - first).max() > 0.02, "nothing was learned"
    x = np.concatenate([x for x, _ in SILOS])
    z = SHARES @ np.stack([hidden(np.append(w, np.zeros(CLASSES)), x) for w in sent]).swapaxes(0, 1)
    mean = np.mean([w[HEAD:].reshape(CLASSES, HIDDEN) for w in sent], axis=0)
    expected = z / np.linalg.norm(z, axis=1, keepdims=True) @ mean.T
    found = (
        library(method, lr=lr).model(torch.tensor(x, dtype=torch.float32)).detach().double().numpy()
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_fisher_merging() -> None:
    """Matena and Raffel 2022, equations 3 and 6: F is the mean of Σ_y p(y|x) (∂ log p)², W = Σ λ F
    W_i / Σ λ F."""
    information = np.stack([np.maximum(diagonal(i), 1e-6) for i in ALL]) * SHARES[:, None]
    expected = (information * np.stack(TRAINED)).sum(0) / information.sum(0)
    agrees(library(FisherMerging(epochs=EPOCHS)), expected)


@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
def test_fedfisher(curvature: Literal["diagonal", "kfac"]) -> None:
    """Jhunjhunwala et al. 2024: down Σ p_k ½ (W - W_k)ᵀ F_k (W - W_k) from the average, F_k
    diagonal or A ⊗ B.

    The authors' Adam adds up: m ← g + 0.9 m, v ← g² + 0.99 v, without correction of the bias, ε =
    0.01."""
    steps, lr = 20, 0.02
    w = SHARES @ np.stack(TRAINED)
    m = v = np.zeros_like(w)
    information = [diagonal(i) for i in ALL]
    kronecker = [factors(i, "expected") for i in ALL]

    def slope(w: Vector, i: int) -> Vector:
        if curvature == "diagonal":
            return information[i] * (w - TRAINED[i])
        first, second = (
            a @ d @ b for (a, b), d in zip(kronecker[i], matrices(w - TRAINED[i]), strict=True)
        )
        return vector(first, second)

    for _ in range(steps):
        g = np.sum([SHARES[i] * slope(w, i) for i in ALL], axis=0)
        m, v = g + 0.9 * m, g**2 + 0.99 * v
        w = w - lr * m / (np.sqrt(v) + 0.01 if curvature == "diagonal" else np.sqrt(v + 0.01))
    agrees(
        library(FedFisher(epochs=EPOCHS, curvature=curvature, iterations=steps, server_lr=lr)), w
    )


def test_fedlpa() -> None:
    """Liu et al. 2024: in each layer Σ p_k A_k W B_k = Σ p_k A_k W_k B_k, with √λ on the diagonals
    of both factors."""
    damping = 0.01
    merged: list[NDArray[Any]] = []
    for layer in (0, 1):
        left: Vector = np.zeros((1, 1))
        right: Vector = np.zeros(1)
        for i in ALL:
            a, b = (f + np.sqrt(damping) * np.eye(len(f)) for f in factors(i, "given")[layer])
            left = left + SHARES[i] * np.kron(a, b)
            right = right + SHARES[i] * (a @ matrices(TRAINED[i])[layer] @ b).ravel()
        merged.append(np.linalg.solve(left, right).reshape(matrices(START)[layer].shape))
    agrees(library(FedLPA(epochs=EPOCHS, damping=damping)), vector(*merged))


def smallest(gram: Vector, bound: float) -> Vector:
    """Return α that minimises ½ αᵀ G α with Σ α = 1 and 0 <= α <= C: the best of all choices of
    what is at a bound."""
    n, best, least = len(gram), np.zeros(len(gram)), np.inf
    for kind in product((0.0, bound, None), repeat=n):
        free = [k for k in range(n) if kind[k] is None]
        alpha = np.array([0.0 if part is None else part for part in kind])
        if free:
            fixed = alpha.copy()
            system = np.block(
                [[gram[np.ix_(free, free)], np.ones((len(free), 1))], [np.ones((1, len(free))), 0]]
            )
            right = np.append(-(gram @ fixed)[free], 1 - fixed.sum())
            alpha[free] = np.linalg.lstsq(system, right, rcond=None)[0][:-1]
        allowed = (
            abs(alpha.sum() - 1) < 1e-9 and alpha.min() >= -1e-9 and alpha.max() <= bound + 1e-9
        )
        if allowed and alpha @ gram @ alpha < least:
            best, least = alpha, alpha @ gram @ alpha
    return best


def test_ma_echo() -> None:
    """Su et al., Algorithm 1: the dual of equation 8 gives α, D = -Σ 2 α_i P_i (W - V_i), V by I -
    μ/(1 + μ) P_i."""
    iterations, step, mu, bound, z = 4, 0.4, 1.5, 0.6, 0.01**0.8
    projectors = []
    for i in ALL:
        x = inputs(i)[0]
        projectors.append(x.T @ np.linalg.solve(x @ x.T + z * np.eye(len(x)), x))
    kept = [matrices(w)[0] for w in TRAINED]
    w = np.mean(kept, axis=0)
    for _ in range(iterations):
        g = [2 * projectors[i] @ (w - kept[i]) for i in ALL]
        alpha = smallest(np.array([[(a * b).sum() for b in g] for a in g]), bound)
        w = w - step * np.sum([alpha[i] * g[i] for i in ALL], axis=0)
        kept = [v + (w - v) - mu / (1 + mu) * projectors[i] @ (w - v) for i, v in enumerate(kept)]
    method = MAEcho(
        epochs=EPOCHS,
        form="paper",
        projector="closed",
        weighting="qp",
        iterations=iterations,
        step=step,
        mu=mu,
        bound=bound,
    )
    agrees(library(method), vector(w, class_wise(TRAINED)))


def test_ma_echo_as_released() -> None:
    """Su et al., the authors' code: Q from batch means by a damped recursion, α = 1/N, V ← V + λ Q
    (W - V)."""
    iterations, step, damping, z = 5, 1.6, 0.5, 0.01**0.8
    rest = []
    for i in ALL:
        q, r = (
            np.eye(inputs(i)[0].shape[1]),
            inputs(i)[0].mean(0),
        )  # the last silo has two equal batches
        for _ in range(STEPS[i]):
            k = q @ r
            q = q - damping * np.outer(k, k) / (z + r @ k)
        rest.append(q)
    kept = [matrices(w)[0] for w in TRAINED]
    w = np.mean(kept, axis=0)
    for _ in range(iterations):
        w = w - step * np.mean(
            [(w - v) - q @ (w - v) for q, v in zip(rest, kept, strict=True)], axis=0
        )
        kept = [v + step * q @ (w - v) for q, v in zip(rest, kept, strict=True)]
    method = MAEcho(epochs=EPOCHS, iterations=iterations, step=step)
    agrees(library(method), vector(np.mean(kept, axis=0), class_wise(TRAINED)))


def test_ot_fusion() -> None:
    """Singh and Jaggi 2020, Algorithm 1, weights: match rows of length 1, carry the plan on, then
    average.

    With equal widths the exact plan is a permutation; here the best of all 24. Models start
    differently, so they are read from an ensemble of the same seed."""
    members = library(Ensemble(epochs=EPOCHS, init="different")).weights
    assert members is not None
    models = list(members.params.double().numpy().reshape(len(SILOS), -1))
    rows = [matrices(w)[0].T for w in models]
    unit = [r / np.linalg.norm(r, axis=1, keepdims=True) for r in rows]

    def distance(to: Vector, own: Vector, order: list[int]) -> float:
        return float(np.linalg.norm(own[order] - to, axis=1).sum())

    aligned = []
    for w, own in zip(models, unit, strict=True):
        units = min(
            (list(order) for order in permutations(range(len(own)))),
            key=partial(distance, unit[0], own),
        )
        w1, b1, w2, b2 = layers(w)
        aligned.append((units, flat(w1[units], b1[units], w2[:, units], b2)))
    assert any(units != sorted(units) for units, _ in aligned)
    agrees(
        library(OTFusion(epochs=EPOCHS, init="different")), np.mean([w for _, w in aligned], axis=0)
    )
