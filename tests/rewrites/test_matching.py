"""PFNM and FedMA, written from their papers, against the library's runs.

Matching draws the orders of clients; the rewrites replay them. They look for the best assignment
among all of them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ekiden.methods import PFNM, Ensemble, FedMA
from tests.rewrites.plain import (
    CLASSES,
    HIDDEN,
    INPUTS,
    LR,
    SILOS,
    STEPS,
    Vector,
    flat,
    gradient,
    layers,
    library,
    softmax,
)

ALL = range(len(SILOS))
N, EPOCHS = len(SILOS), 3
COUNTS = np.array([np.bincount(y, minlength=CLASSES) for _, y in SILOS])


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Collect the orders of clients that were drawn."""
    drawn: list[list[int]] = []
    real = torch.randperm

    def noted(n: int, **options: Any) -> torch.Tensor:
        order: torch.Tensor = real(n, **options)
        if n == N:
            drawn.append(order.tolist())
        return order

    monkeypatch.setattr(torch, "randperm", noted)
    return drawn


def trained() -> list[Vector]:
    """Return the clients' models, which start differently."""
    members = library(Ensemble(epochs=EPOCHS, init="different")).weights
    assert members is not None
    return list(members.params.double().numpy().reshape(N, -1))


def most(old: list[list[float]], new: list[float]) -> list[int | None]:
    """Return each unit's atom, no two the same, or None for a new one: the best of all
    assignments."""
    best: tuple[float, list[int | None]] = (-np.inf, [])

    def further(chosen: list[int | None], total: float, created: int) -> None:
        nonlocal best
        unit = len(chosen)
        if unit == len(new):
            best = max(best, (total, chosen), key=lambda one: one[0])
            return
        further([*chosen, None], total + new[unit] - 2 * math.log(created + 1), created + 1)
        for a, score in enumerate(old[unit]):
            if a not in chosen:
                further([*chosen, a], total + score, created)

    further([], 0.0, 0)
    return best[1]


def matched(
    rows: Sequence[Vector],
    s: Sequence[Vector],
    mu: Vector,
    s0: float,
    gamma: float,
    orders: Iterator[Sequence[int]],
) -> tuple[list[list[int]], Vector]:
    """Yurochkin et al. 2019, proposition 2, as in the authors' code: each client's atoms, and all
    atoms' values.

    Score of an atom of which m clients have a unit: Σ_d (s w + G)²/(s + S) - G²/S + log m/(J - m),
    of the r-th new one: Σ_d (s w + μ0 s0)²/(s0 + s) - (μ0 s0)²/s0 - 2 log r + 2 log γ/J."""
    assigned: list[list[int] | None] = [None] * N
    assigned[0] = list(range(len(rows[0])))

    def atoms(without: int) -> tuple[Vector, Vector, list[int], int]:
        kept = sorted(
            {a for j, own in enumerate(assigned) if own is not None and j != without for a in own}
        )
        for j, own in enumerate(assigned):
            if own is not None and j != without:
                assigned[j] = [kept.index(a) for a in own]
        total, precision, members = (
            np.tile(mu * s0, (len(kept), 1)),
            np.full((len(kept), len(mu)), s0),
            [0] * len(kept),
        )
        for j, own in enumerate(assigned):
            if own is not None and j != without:
                for unit, a in enumerate(own):
                    total[a] += s[j] * rows[j][unit]
                    precision[a] += s[j]
                    members[a] += 1
        return total, precision, members, len(kept)

    for j in [*range(1, N), *(j for _ in range(SWEEPS) for j in next(orders))]:
        total, precision, members, known = atoms(j)
        old = np.zeros((len(rows[j]), known))
        new = (((s[j] * rows[j] + mu * s0) ** 2 / (s0 + s[j])) - mu**2 * s0).sum(1) + 2 * np.log(
            gamma / N
        )
        for unit, w in enumerate(rows[j]):
            for a in range(known):
                gain = (s[j] * w + total[a]) ** 2 / (s[j] + precision[a]) - total[
                    a
                ] ** 2 / precision[a]
                old[unit, a] = gain.sum() + np.log(members[a] / (N - members[a]))
        best = most(old.tolist(), new.tolist())
        fresh = iter(range(known, known + len(best)))
        assigned[j] = [next(fresh) if a is None else a for a in best]
    total, precision, _, _ = atoms(-1)
    return [list(own) for own in assigned if own is not None], total / precision


SWEEPS = 1


def answers(result: Any) -> Vector:
    """Return what the library's network of any width answers at all samples."""
    x = np.concatenate([x for x, _ in SILOS])
    found: Vector = result.model(torch.tensor(x, dtype=torch.float32)).detach().double().numpy()
    return found


def of_layers(w1: Vector, b1: Vector, w2: Vector, b2: Vector) -> Vector:
    """Return what a network with these layers answers."""
    x = np.concatenate([x for x, _ in SILOS])
    z: Vector = np.tanh(x @ w1.T + b1) @ w2.T + b2
    return z


@pytest.mark.parametrize(("gamma", "sigma"), [(8.0, 1.0), (5.0, 0.3)])
def test_pfnm(orders: list[list[int]], gamma: float, sigma: float) -> None:
    """Yurochkin et al. 2019 and their code: a unit is [incoming | bias | outgoing], by shares of
    classes."""
    sigma0, bias = 2.0, 0.1
    models = trained()
    shares = COUNTS / COUNTS.sum(0)
    rows, s = [], []
    for j, w in enumerate(models):
        w1, b1, w2, _ = layers(w)
        rows.append(np.hstack([w1, b1[:, None], w2.T]))
        s.append(np.concatenate([np.full(INPUTS + 1, 1 / sigma), shares[j] / sigma]))
    mu = np.concatenate([np.zeros(INPUTS), [bias], np.zeros(CLASSES)])
    orders.clear()
    result = library(
        PFNM(epochs=EPOCHS, gamma=gamma, sigma=sigma, sigma0=sigma0, sweeps=SWEEPS, bias=bias)
    )
    _, atoms = matched(rows, s, mu, 1 / sigma0, gamma, iter(orders))
    ends = np.stack([layers(w)[3] for w in models])
    b2 = ((shares * ends).sum(0) / sigma + bias / sigma0) / (1 / sigma0 + shares.sum(0) / sigma)
    expected = of_layers(atoms[:, :INPUTS], atoms[:, INPUTS], atoms[:, INPUTS + 1 :].T, b2)
    np.testing.assert_allclose(answers(result), expected, atol=1e-5)
    assert HIDDEN < len(atoms) < N * HIDDEN


@pytest.mark.parametrize("rounds", [0, 2])
def test_fedma(orders: list[list[int]], rounds: int) -> None:
    """Wang et al. 2020, Algorithm 1, and their code: a unit is [incoming | bias]; the next layer's
    inputs follow it.

    The matched layer is frozen and the classifier retrained; classes are weighted by n_jc. A
    further round starts from a client's own units of the global model. Without retraining (0) the
    classifier is only reordered."""
    gamma, retrained = 6.0, 2
    models = trained()
    mu = np.append(np.zeros(INPUTS), 0.1)
    shares = COUNTS / COUNTS.sum(0)
    orders.clear()
    method = FedMA(
        epochs=EPOCHS,
        gamma=gamma,
        sweeps=SWEEPS,
        rounds=max(rounds, 1),
        retrain_epochs=retrained * (rounds > 0),
    )
    result, drawn = library(method), iter(orders)
    w1, b1, w2, b2 = layers(models[0])
    units: list[list[int]] = []
    for r in range(max(rounds, 1)):
        if r:
            models = []
            for j, own in enumerate(units):
                w = flat(w1[own], b1[own], w2[:, own], b2)
                for _ in range(EPOCHS * STEPS[j]):
                    w = w - LR * gradient(w, j)
                models.append(w)
        rows = [np.hstack([layers(w)[0], layers(w)[1][:, None]]) for w in models]
        units, atoms = matched(rows, [np.ones(INPUTS + 1)] * N, mu, 1.0, gamma, drawn)
        w1, b1 = atoms[:, :INPUTS], atoms[:, INPUTS]
        heads = []
        for j, (x, y) in enumerate(SILOS):
            head, bias = np.zeros((CLASSES, len(atoms))), layers(models[j])[3]
            head[:, units[j]] = layers(models[j])[2]
            h = np.tanh(x @ w1.T + b1)
            for _ in range(retrained * STEPS[j] * (rounds > 0)):
                by_logits = (softmax(h @ head.T + bias) - np.eye(CLASSES)[y]) / len(y)
                head, bias = head - LR * by_logits.T @ h, bias - LR * by_logits.sum(0)
            heads.append((head, bias))
        w2 = sum(shares[j][:, None] * heads[j][0] for j in ALL)
        b2 = sum(shares[j] * heads[j][1] for j in ALL)
    np.testing.assert_allclose(answers(result), of_layers(w1, b1, w2, b2), atol=1e-5)
    assert HIDDEN < len(w1) < N * HIDDEN
