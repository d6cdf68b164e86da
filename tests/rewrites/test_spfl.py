"""SPFL, written from its poster and the papers of its hosts, against the library's run.

Three chains in fixed order: chain j begins at silo j and goes round. A silo's memory changes once a
round, by the mean over its visits."""

from typing import Literal

import numpy as np
import pytest

from ekiden.methods import SPFL
from tests.rewrites.plain import (
    LR,
    SILOS,
    SIZES,
    START,
    STEPS,
    Vector,
    agrees,
    backward,
    gradient,
    library,
    logits,
    softmax,
)

ALL = range(len(SILOS))
N, ROUNDS, EPOCHS = len(SILOS), 2, 1
ZERO = np.zeros_like(START)


def visit(
    w: Vector, i: int, *, slope: Vector = ZERO, mu: float = 0.0, centre: Vector = ZERO
) -> Vector:
    """Return w after silo i's steps on F_i(w) + ⟨slope, w⟩ + mu/2 ‖w - centre‖²."""
    for _ in range(EPOCHS * STEPS[i]):
        w = w - LR * (gradient(w, i) + slope + mu * (w - centre))
    return w


def spfl(host: str, rounds: int = ROUNDS) -> SPFL:
    """Return SPFL without its alignment."""
    return SPFL(
        host=host,
        rounds=rounds,
        epochs=EPOCHS,
        chain_order="fixed",
        align_previous=0,
        align_global=0,
    )


@pytest.mark.parametrize("previous", ["received", "own"])
def test_spfl_with_glam(previous: Literal["received", "own"]) -> None:
    """Poster of SPFL: ℓ + ρ L_ag + τ L_ap, L_ag = -Σ q_g log p, L_ap = ½ KL(p ‖ q_p) + ½ KL(q_p ‖
    p)."""
    tau, rho, w = 0.8, 0.6, START
    last: list[Vector | None] = [None] * N
    for _ in range(ROUNDS):
        ends, now = [w] * N, list(last)
        for position in ALL:
            for j in ALL:
                i = (j + position) % N
                x, y = SILOS[i]
                v = ends[j]
                q_g, w_p = softmax(logits(w, x)), v if previous == "received" else last[i]
                for _ in range(EPOCHS * STEPS[i]):
                    p = softmax(logits(v, x))
                    by_logits = p - np.eye(p.shape[1])[y] + rho * (p - q_g)
                    if w_p is not None:
                        q = softmax(logits(w_p, x))
                        ratio = np.log(p / q)
                        by_logits += (
                            tau / 2 * (p * (ratio - (p * ratio).sum(1, keepdims=True)) + p - q)
                        )
                    v = v - LR * backward(v, x, by_logits / len(y))
                ends[j] = now[i] = v
        w, last = np.mean(ends, axis=0), now
    method = SPFL(
        rounds=ROUNDS,
        epochs=EPOCHS,
        chain_order="fixed",
        align_previous=tau,
        align_global=rho,
        previous=previous,
    )
    agrees(library(method), w)


@pytest.mark.parametrize(
    ("host", "mu"), [("fedavg", 0.0), ("fednova", 0.0), ("feddisco", 0.0), ("fedprox:mu=0.7", 0.7)]
)
def test_chains_of_hosts_without_memory(host: str, mu: float) -> None:
    """Poster of SPFL: w^{r+1} is the mean of the chains' ends; full chains have equal weights and
    equal steps."""
    w = START
    for _ in range(ROUNDS):
        ends = [w] * N
        for position in ALL:
            ends = [visit(v, (j + position) % N, mu=mu, centre=w) for j, v in enumerate(ends)]
        w = np.mean(ends, axis=0)
    agrees(library(spfl(host)), w)


def test_chains_of_scaffold() -> None:
    """c_i⁺ = c_i - c + the mean over visits of (w_in - w_out)/(Kη), and c ← c + 1/N Σ (c_i⁺ -
    c_i)."""
    w, c, own = START, ZERO, [ZERO] * N
    for _ in range(3):
        ends, found = [w] * N, [list[Vector]() for _ in ALL]
        for position in ALL:
            for j in ALL:
                i = (j + position) % N
                out = visit(ends[j], i, slope=c - own[i])
                found[i].append(own[i] - c + (ends[j] - out) / (EPOCHS * STEPS[i] * LR))
                ends[j] = out
        new = [np.mean(parts, axis=0) for parts in found]
        c = c + np.mean([new[i] - own[i] for i in ALL], axis=0)
        w, own = np.mean(ends, axis=0), new
    agrees(library(spfl("scaffold", 3)), w)


@pytest.mark.parametrize("anchor", ["received", "global"])
def test_chains_of_feddyn(anchor: str) -> None:
    """h_i ← h_i - α mean(w_out - w_in); the server's h by the mean displacement of the ends; w =
    mean - h/α."""
    alpha, w, h, own = 0.4, START, ZERO, [ZERO] * N
    mean = w
    for _ in range(ROUNDS):
        ends, gone = [w] * N, [list[Vector]() for _ in ALL]
        for position in ALL:
            for j in ALL:
                i = (j + position) % N
                centre = ends[j] if anchor == "received" else w
                out = visit(ends[j], i, slope=-own[i], mu=alpha, centre=centre)
                gone[i].append(out - ends[j])
                ends[j] = out
        own = [own[i] - alpha * np.mean(gone[i], axis=0) for i in ALL]
        mean = np.mean(ends, axis=0)
        h = h - alpha * (mean - w)
        w = mean - h / alpha
    agrees(library(spfl(f"feddyn:alpha={alpha},anchor={anchor}")), mean)


def test_chains_of_feddc() -> None:
    """h_i grows by the mean displacement of the visits; g_i is the mean gradient; w^r = mean of
    ends + mean of h_i."""
    alpha, size = 0.3, SIZES * N / SIZES.sum()
    w, drift, g, own = START, [ZERO] * N, ZERO, [ZERO] * N
    mean = w
    for _ in range(ROUNDS):
        ends = [w] * N
        gone, slopes = [list[Vector]() for _ in ALL], [list[Vector]() for _ in ALL]
        for position in ALL:
            for j in ALL:
                i = (j + position) % N
                v = ends[j]
                out = visit(
                    v, i, slope=g / size[i] - own[i], mu=alpha / size[i], centre=w - drift[i]
                )
                gone[i].append(out - v)
                slopes[i].append(own[i] - g / size[i] - (out - v) / (EPOCHS * STEPS[i] * LR))
                ends[j] = out
        new = [np.mean(parts, axis=0) for parts in slopes]
        g = g + np.mean([size[i] * (new[i] - own[i]) for i in ALL], axis=0)
        drift = [drift[i] + np.mean(gone[i], axis=0) for i in ALL]
        own, mean = new, np.mean(ends, axis=0)
        w = mean + np.mean(drift, axis=0)
    agrees(library(spfl(f"feddc:alpha={alpha}")), mean)
