"""Methods that hand a model on, written from their papers: each in a few lines, against the
library's run."""

from typing import Literal

import numpy as np
import pytest

from ekiden.methods import FedELMY, FedSeq, FedTasuki
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
    library,
    logits,
    loss,
    softmax,
)

ROUNDS, EPOCHS = 2, 3


def test_fedseq() -> None:
    """Li and Lyu 2023, Algorithm 1, in epochs: each client trains what it received."""
    w = START
    for _ in range(ROUNDS):
        for i in range(len(SILOS)):
            for _ in range(EPOCHS * STEPS[i]):
                w = w - LR * gradient(w, i)
    agrees(library(FedSeq(rounds=ROUNDS, epochs=EPOCHS)), w)


def order(x: float) -> float:
    """Return the order of magnitude of x."""
    return float(np.floor(np.log10(x)))


def by_text(w: Vector, pool: list[Vector], value: float, alpha: float, beta: float) -> Vector:
    """Return the gradient of -α d1 + β d2, each a Euclidean norm scaled to one order below the loss
    `value`."""

    def scaled(distance: float, slope: Vector) -> Vector:
        return slope * 10 ** (order(value) - 1 - order(distance)) if distance else np.zeros_like(w)

    def slope(member: Vector) -> Vector:
        length = np.linalg.norm(w - member)
        return (w - member) / length if length else np.zeros_like(w)

    d1 = float(np.mean([np.linalg.norm(w - member) for member in pool]))
    d2 = float(np.linalg.norm(w - pool[0]))
    near = scaled(d2, slope(pool[0]))
    return beta * near - alpha * scaled(d1, np.mean([slope(member) for member in pool], axis=0))


def by_code(w: Vector, pool: list[Vector], value: float, alpha: float, beta: float) -> Vector:
    """Return the gradient as the authors' code has it: squares, the start point in the pool, one
    divisor from d2."""
    members = [*pool, np.mean(pool, axis=0)]
    d2 = float(((w - pool[0]) ** 2).sum())
    divisor = 10 ** max(order(d2) - order(value) + 1, 0) if d2 else 1
    apart: Vector = np.mean([2 * (w - member) for member in members], axis=0)
    return (beta * 2 * (w - pool[0]) - alpha * apart) / divisor


@pytest.mark.parametrize("form", ["paper", "released"])
def test_fedelmy(form: Literal["paper", "released"]) -> None:
    """Wang et al. 2024, Algorithm 2: E_w epochs at the first client, then S models from the pool's
    mean at each."""
    models, warmup, alpha, beta = 2, 2, 0.9, 1.3
    distances = {"paper": by_text, "released": by_code}[form]
    w = START
    for _ in range(warmup * STEPS[0]):
        w = w - LR * gradient(w, 0)
    for _ in range(ROUNDS):
        for i in range(len(SILOS)):
            pool = [w]
            for _ in range(models):
                w = np.mean(pool, axis=0)
                for _ in range(EPOCHS * STEPS[i]):
                    w = w - LR * (gradient(w, i) + distances(w, pool, loss(w, i), alpha, beta))
                pool.append(w)
            w = np.mean(pool, axis=0)
    method = FedELMY(
        models=models,
        epochs=EPOCHS,
        warmup=warmup,
        alpha=alpha,
        beta=beta,
        rounds=ROUNDS,
        form=form,
    )
    agrees(library(method), w)


@pytest.mark.parametrize("rounds", [1, 2])
def test_fedtasuki(rounds: int) -> None:
    """docs/methods/fedtasuki.md: CE + N/n (½ KL(q ‖ p) + ½ KL(q^ ‖ p^)), then the mean of the last
    half."""
    w, behind = START, 0
    for r in range(rounds):
        for i, (x, y) in enumerate(SILOS):
            n = len(y)
            true = np.eye(CLASSES)[y]
            q = softmax(logits(w, x))
            others = q * (1 - true) / (1 - q[true > 0])[:, None]
            earlier = behind if r == 0 else SIZES.sum() - n
            iterates = []
            for _ in range(EPOCHS * STEPS[i]):
                p = softmax(logits(w, x))
                own = p * (1 - true) / (1 - p[true > 0])[:, None]
                by_logits = (p - true) + earlier / n * ((p - q) / 2 + (own - others) / 2)
                w = w - LR * backward(w, x, by_logits / n)
                iterates.append(w)
            w = np.mean([v for k, v in enumerate(iterates, 1) if k > len(iterates) / 2], axis=0)
            behind += n
    agrees(library(FedTasuki(rounds=rounds, epochs=EPOCHS)), w)
