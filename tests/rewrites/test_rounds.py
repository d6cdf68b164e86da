"""Methods of many rounds, written from their papers: each in a few lines, against the library's run.

Every silo takes part in every round. E epochs are `STEPS[i]`·E steps of plain SGD.
"""

from collections.abc import Callable

import numpy as np

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


def descend(w: Vector, i: int, term: Callable[[Vector], Vector | float] = lambda w: 0.0, momentum: float = 0.0) -> Vector:
    """Return w after silo i's local steps on ∇F_i(w) + term(w)."""
    velocity = np.zeros_like(w)
    for _ in range(EPOCHS * STEPS[i]):
        velocity = momentum * velocity + gradient(w, i) + term(w)
        w = w - LR * velocity
    return w


def test_fedavg() -> None:
    """McMahan et al. 2017, Algorithm 1: w ← Σ n_k/n w_k."""
    w = START
    for _ in range(ROUNDS):
        w = sum(SHARES[i] * descend(w, i) for i in ALL)
    agrees(library(FedAvg(rounds=ROUNDS, epochs=EPOCHS)), w)


def test_fedprox() -> None:
    """Li et al. 2020, equation 2: h_k(w; w^t) = F_k(w) + μ/2 ‖w - w^t‖²."""
    w, mu = START, 0.7
    for _ in range(ROUNDS):
        w = sum(SHARES[i] * descend(w, i, lambda v, w=w: mu * (v - w)) for i in ALL)
    agrees(library(FedProx(rounds=ROUNDS, epochs=EPOCHS, mu=mu)), w)


def test_scaffold() -> None:
    """Karimireddy et al. 2020, Algorithm 1 with option II, and with η_g other than 1."""
    w, server_lr = START, 0.8
    c, own = np.zeros_like(w), [np.zeros_like(w) for _ in ALL]
    for _ in range(ROUNDS):
        steps, changes = [], []
        for i in ALL:
            y = descend(w, i, lambda v, i=i: c - own[i])
            new = own[i] - c + (w - y) / (EPOCHS * STEPS[i] * LR)
            steps.append(y - w)
            changes.append(new - own[i])
            own[i] = new
        w = w + server_lr * np.mean(steps, axis=0)
        c = c + np.sum(changes, axis=0) / len(ALL)
    agrees(library(SCAFFOLD(rounds=ROUNDS, epochs=EPOCHS, server_lr=server_lr)), w)


def test_fednova() -> None:
    """Wang et al. 2020, equation 8 and section 4: w ← w - τ_eff Σ p_i η d_i, with heavy-ball momentum ρ.

    a_i = [τ_i - ρ(1 - ρ^τ_i)/(1 - ρ)] / (1 - ρ), d_i = (w - w_i)/(η a_i) and τ_eff = Σ p_i a_i.
    """
    w, rho = START, 0.6
    tau = EPOCHS * np.array(STEPS)
    a = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    for _ in range(ROUNDS):
        d = [(w - descend(w, i, momentum=rho)) / (LR * a[i]) for i in ALL]
        w = w - (SHARES @ a) * LR * sum(SHARES[i] * d[i] for i in ALL)
    agrees(library(FedNova(rounds=ROUNDS, epochs=EPOCHS), momentum=rho), w)


def test_fednova_with_a_proximal_term() -> None:
    """Wang et al. 2020, section 4: a_i = [1 - (1 - ημ)^τ_i] / (ημ)."""
    w, mu = START, 0.7
    tau = EPOCHS * np.array(STEPS)
    a = (1 - (1 - LR * mu) ** tau) / (LR * mu)
    for _ in range(ROUNDS):
        d = [(w - descend(w, i, lambda v, w=w: mu * (v - w))) / a[i] for i in ALL]
        w = w - (SHARES @ a) * sum(SHARES[i] * d[i] for i in ALL)
    agrees(library(FedNova(rounds=ROUNDS, epochs=EPOCHS, mu=mu)), w)


def test_feddyn() -> None:
    """Acar et al. 2021, Algorithm 1: θ_k minimises L_k(θ) - ⟨∇L_k, θ⟩ + α/2 ‖θ - θ^t‖²; h; mean - h/α."""
    w, alpha = START, 0.4
    h, own, mean = np.zeros_like(w), [np.zeros_like(w) for _ in ALL], w
    for _ in range(ROUNDS):
        trained = [descend(w, i, lambda v, i=i, w=w: -own[i] + alpha * (v - w)) for i in ALL]
        own = [own[i] - alpha * (trained[i] - w) for i in ALL]
        h = h - alpha * sum(theta - w for theta in trained) / len(ALL)
        mean = sum(trained) / len(ALL)
        w = mean - h / alpha
    agrees(library(FedDyn(rounds=ROUNDS, epochs=EPOCHS, alpha=alpha, result="cloud")), w)
    agrees(library(FedDyn(rounds=ROUNDS, epochs=EPOCHS, alpha=alpha)), mean)


def test_feddc() -> None:
    """Gao et al. 2022, equations 3 to 8 in the form of the authors' code: L_i + α_i/2 ‖θ + h_i - w‖² + ⟨θ, g/ω_i - g_i⟩."""
    w, alpha = START, 0.3
    size = SIZES * len(ALL) / SIZES.sum()
    zero = np.zeros_like(w)
    drift, own, g, mean = [zero] * len(ALL), [zero] * len(ALL), zero, w
    for _ in range(ROUNDS):
        trained, changes = [], []
        for i in ALL:
            pull = lambda v, i=i: alpha / size[i] * (v + drift[i] - w) + g / size[i] - own[i]  # noqa: B023, E731
            theta = descend(w, i, pull)
            new = own[i] - g / size[i] - (theta - w) / (EPOCHS * STEPS[i] * LR)
            drift[i] = drift[i] + theta - w
            changes.append((new - own[i]) * size[i])
            own[i] = new
            trained.append(theta)
        g = g + sum(changes) / len(ALL)
        mean = sum(trained) / len(ALL)
        w = mean + sum(drift) / len(ALL)
    agrees(library(FedDC(rounds=ROUNDS, epochs=EPOCHS, alpha=alpha, result="cloud")), w)
    agrees(library(FedDC(rounds=ROUNDS, epochs=EPOCHS, alpha=alpha)), mean)


def cosines(a: Vector, b: Vector) -> Vector:
    """Return the cosine similarity of rows (n,)."""
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def by_first(a: Vector, b: Vector) -> Vector:
    """Return the gradient of `cosines` by its first argument (n, d)."""
    na, nb = (np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    return b / (na * nb) - cosines(a, b)[:, None] * a / na**2


def test_moon() -> None:
    """Li et al. 2021, equations 3 and 4: ℓ + μ ℓ_con, ℓ_con = -log e^(s_glob/τ) / (e^(s_glob/τ) + e^(s_prev/τ))."""
    w, mu, tau = START, 2.0, 0.5
    last: list[Vector | None] = [None] * len(ALL)

    def contrast(v: Vector, i: int) -> Vector | float:
        before = last[i]
        if before is None:
            return 0.0
        x, _ = SILOS[i]
        z, glob, prev = hidden(v, x), hidden(w, x), hidden(before, x)
        wrong = 1 / (1 + np.exp((cosines(z, glob) - cosines(z, prev)) / tau))
        by_hidden = mu / len(x) * wrong[:, None] * (by_first(z, prev) - by_first(z, glob)) / tau
        return backward(v, x, np.zeros((len(x), CLASSES)), by_hidden)

    for _ in range(ROUNDS):
        trained = [descend(w, i, lambda v, i=i: contrast(v, i)) for i in ALL]
        last = list(trained)
        w = sum(SHARES[i] * trained[i] for i in ALL)
    agrees(library(MOON(rounds=ROUNDS, epochs=EPOCHS, mu=mu, temperature=tau)), w)


def test_feddisco() -> None:
    """Ye et al. 2023, equation 4: p_k ∝ max(n_k - a d_k + b, 0), d_k = KL(D_k ‖ uniform), divided by its sum."""
    w, a, b = START, 0.6, 0.1
    d = np.zeros(len(ALL))
    for i in ALL:
        share = np.bincount(SILOS[i][1], minlength=CLASSES) / SIZES[i]
        d[i] = sum(p * np.log(p * CLASSES) for p in share if p)
    p = np.maximum(SHARES - a * d / d.sum() + b, 0)
    for _ in range(ROUNDS):
        w = sum(p[i] / p.sum() * descend(w, i) for i in ALL)
    agrees(library(FedDisco(rounds=ROUNDS, epochs=EPOCHS, a=a, b=b)), w)
