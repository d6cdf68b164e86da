"""Methods of many rounds, written from their papers: each in a few lines, against the library's
run.

Every silo takes part in every round. E epochs are `STEPS[i]`·E steps of plain SGD.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import pytest

from ekiden.methods import MOON, SCAFFOLD, FedAvg, FedDC, FedDisco, FedDyn, FedNova, FedProx
from tests.rewrites.plain import (
    CLASSES,
    LR,
    SILOS,
    SIZES,
    START,
    STEPS,
    Vector,
    agrees,
    backward,
    gradient,
    hidden,
    library,
)

ALL = range(len(SILOS))
ROUNDS, EPOCHS = 3, 2
SHARES = SIZES / SIZES.sum()
ZERO = np.zeros_like(START)


def descend(
    w: Vector,
    i: int,
    *,
    slope: Vector = ZERO,
    mu: float = 0.0,
    centre: Vector = ZERO,
    momentum: float = 0.0,
    term: Callable[[Vector], Vector] = np.zeros_like,
) -> Vector:
    """Return w after silo i's local steps on F_i(w) + ⟨slope, w⟩ + mu/2 ‖w - centre‖²; `term` adds
    a gradient."""
    velocity = ZERO
    for _ in range(EPOCHS * STEPS[i]):
        velocity = momentum * velocity + gradient(w, i) + slope + mu * (w - centre) + term(w)
        w = w - LR * velocity
    return w


def mean_of(models: Sequence[Vector], shares: Vector) -> Vector:
    """Return Σ shares_i models_i."""
    mean: Vector = shares @ np.stack(models)
    return mean


def test_fedavg() -> None:
    """McMahan et al. 2017, Algorithm 1: w ← Σ n_k/n w_k."""
    w = START
    for _ in range(ROUNDS):
        w = mean_of([descend(w, i) for i in ALL], SHARES)
    agrees(library(FedAvg(rounds=ROUNDS, epochs=EPOCHS)), w)


def test_fedprox() -> None:
    """Li et al. 2020, equation 2: h_k(w; w^t) = F_k(w) + μ/2 ‖w - w^t‖²."""
    w, mu = START, 0.7
    for _ in range(ROUNDS):
        w = mean_of([descend(w, i, mu=mu, centre=w) for i in ALL], SHARES)
    agrees(library(FedProx(rounds=ROUNDS, epochs=EPOCHS, mu=mu)), w)


def test_scaffold() -> None:
    """Karimireddy et al. 2020, Algorithm 1 with option II, and with η_g other than 1."""
    w, server_lr = START, 0.8
    c, own = ZERO, [ZERO for _ in ALL]
    for _ in range(ROUNDS):
        trained = [descend(w, i, slope=c - own[i]) for i in ALL]
        new = [own[i] - c + (w - trained[i]) / (EPOCHS * STEPS[i] * LR) for i in ALL]
        w = w + server_lr * np.mean([y - w for y in trained], axis=0)
        c = c + np.mean([new[i] - own[i] for i in ALL], axis=0)
        own = new
    agrees(library(SCAFFOLD(rounds=ROUNDS, epochs=EPOCHS, server_lr=server_lr)), w)


def test_fednova() -> None:
    """Wang et al. 2020, equation 8 and section 4: w ← w - τ_eff Σ p_i η d_i, with heavy-ball
    momentum ρ.

    a_i = [τ_i - ρ(1 - ρ^τ_i)/(1 - ρ)] / (1 - ρ), d_i = (w - w_i)/(η a_i) and τ_eff = Σ p_i a_i.
    """
    w, rho = START, 0.6
    tau = EPOCHS * np.array(STEPS)
    a = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    for _ in range(ROUNDS):
        d = [(w - descend(w, i, momentum=rho)) / (LR * a[i]) for i in ALL]
        w = w - SHARES @ a * LR * mean_of(d, SHARES)
    agrees(library(FedNova(rounds=ROUNDS, epochs=EPOCHS), momentum=rho), w)


def test_fednova_with_a_proximal_term() -> None:
    """Wang et al. 2020, section 4: a_i = [1 - (1 - ημ)^τ_i] / (ημ)."""
    w, mu = START, 0.7
    tau = EPOCHS * np.array(STEPS)
    a = (1 - (1 - LR * mu) ** tau) / (LR * mu)
    for _ in range(ROUNDS):
        d = [(w - descend(w, i, mu=mu, centre=w)) / (LR * a[i]) for i in ALL]
        w = w - SHARES @ a * LR * mean_of(d, SHARES)
    agrees(library(FedNova(rounds=ROUNDS, epochs=EPOCHS, mu=mu)), w)


@pytest.mark.parametrize("result", ["mean", "cloud"])
def test_feddyn(result: Literal["mean", "cloud"]) -> None:
    """Acar et al. 2021, Algorithm 1: θ_k minimises L_k(θ) - ⟨∇L_k, θ⟩ + α/2 ‖θ - θ^t‖²; h; θ = mean
    - h/α."""
    w, alpha = START, 0.4
    h, own, mean = ZERO, [ZERO for _ in ALL], ZERO
    for _ in range(ROUNDS):
        trained = [descend(w, i, slope=-own[i], mu=alpha, centre=w) for i in ALL]
        own = [own[i] - alpha * (trained[i] - w) for i in ALL]
        h = h - alpha * np.mean([theta - w for theta in trained], axis=0)
        mean = np.mean(trained, axis=0)
        w = mean - h / alpha
    agrees(
        library(FedDyn(rounds=ROUNDS, epochs=EPOCHS, alpha=alpha, result=result)),
        w if result == "cloud" else mean,
    )


@pytest.mark.parametrize("result", ["mean", "cloud"])
def test_feddc(result: Literal["mean", "cloud"]) -> None:
    """Gao et al. 2022, equations 3 to 8 as in the authors' code: L_i + α_i/2 ‖θ + h_i - w‖² + ⟨θ,
    g/ω_i - g_i⟩."""
    w, alpha = START, 0.3
    size = SIZES * len(ALL) / SIZES.sum()
    drift, own, g, mean = [ZERO for _ in ALL], [ZERO for _ in ALL], ZERO, ZERO
    for _ in range(ROUNDS):
        trained = [
            descend(w, i, mu=alpha / size[i], centre=w - drift[i], slope=g / size[i] - own[i])
            for i in ALL
        ]
        new = [own[i] - g / size[i] - (trained[i] - w) / (EPOCHS * STEPS[i] * LR) for i in ALL]
        drift = [drift[i] + trained[i] - w for i in ALL]
        g = g + np.mean([(new[i] - own[i]) * size[i] for i in ALL], axis=0)
        own, mean = new, np.mean(trained, axis=0)
        w = mean + np.mean(drift, axis=0)
    agrees(
        library(FedDC(rounds=ROUNDS, epochs=EPOCHS, alpha=alpha, result=result)),
        w if result == "cloud" else mean,
    )


def cosines(a: Vector, b: Vector) -> Vector:
    """Return the cosine similarity of rows (n,)."""
    similarities: Vector = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return similarities


def by_first(a: Vector, b: Vector) -> Vector:
    """Return the gradient of `cosines` by its first argument (n, d)."""
    na, nb = (np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    slope: Vector = b / (na * nb) - cosines(a, b)[:, None] * a / na**2
    return slope


def test_moon() -> None:
    """Li et al. 2021, equations 3 and 4: ℓ + μ ℓ_con, ℓ_con = -log e^(s_glob/τ) / (e^(s_glob/τ) +
    e^(s_prev/τ))."""
    w, mu, tau = START, 2.0, 0.5
    last: list[Vector | None] = [None] * len(ALL)

    def contrast(i: int, v: Vector) -> Vector:
        before = last[i]
        if before is None:
            return ZERO
        x, _ = SILOS[i]
        z, glob, prev = hidden(v, x), hidden(w, x), hidden(before, x)
        wrong = 1 / (1 + np.exp((cosines(z, glob) - cosines(z, prev)) / tau))
        by_hidden = mu / len(x) * wrong[:, None] * (by_first(z, prev) - by_first(z, glob)) / tau
        return backward(v, x, np.zeros((len(x), CLASSES)), by_hidden)

    for _ in range(ROUNDS):
        trained = [descend(w, i, term=partial(contrast, i)) for i in ALL]
        last = list(trained)
        w = mean_of(trained, SHARES)
    agrees(library(MOON(rounds=ROUNDS, epochs=EPOCHS, mu=mu, temperature=tau)), w)


def test_feddisco() -> None:
    """Ye et al. 2023, equation 4: p_k ∝ max(n_k - a d_k + b, 0), d_k = KL(D_k ‖ uniform), divided
    by its sum."""
    w, a, b = START, 0.6, 0.1
    d = np.zeros(len(ALL))
    for i in ALL:
        share = np.bincount(SILOS[i][1], minlength=CLASSES) / SIZES[i]
        d[i] = sum(p * np.log(p * CLASSES) for p in share if p)
    p = np.maximum(SHARES - a * d / d.sum() + b, 0)
    for _ in range(ROUNDS):
        w = mean_of([descend(w, i) for i in ALL], p / p.sum())
    agrees(library(FedDisco(rounds=ROUNDS, epochs=EPOCHS, a=a, b=b)), w)
