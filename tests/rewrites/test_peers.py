"""Methods whose clients draw peers, written from their papers, against the library's runs.

Which peers a client draws is random. Each step of the library must agree with exactly one of the
possible draws. The next step of the rewrite starts from that."""

from collections.abc import Iterator
from itertools import combinations
from typing import Literal

import numpy as np
import pytest

import ekiden
from ekiden import Hardware, Training
from ekiden.core.engine.method import Method
from ekiden.methods import UAPDFL, CriticalFL, CriticalFLServer
from ekiden.runs.result import Result
from tests.rewrites.plain import (
    CLASSES,
    HEAD,
    INPUTS,
    LR,
    SILOS,
    SIZES,
    START,
    STEPS,
    Vector,
    backward,
    data,
    gradient,
    hidden,
    logits,
    module,
    softmax,
)

ALL = range(len(SILOS))
N, EPOCHS = len(SILOS), 2


def results(method: Method) -> Iterator[Result]:
    """Yield the library's results after each round."""
    training = Training(optimizer="sgd", lr=LR, weight_decay=0.0, batch_size=6, select="last")
    return ekiden.steps(
        method, data(), module(), training=training, hardware=Hardware(threads=1), evaluate_every=0
    )


def models_of(result: Result) -> list[Vector]:
    """Return the clients' models."""
    return [own.params.double().numpy() for own in result.personal]


def the_one(found: Vector, candidates: list[Vector]) -> int:
    """Return which of the candidates, all of them different, was found."""
    fits = [k for k, candidate in enumerate(candidates) if np.abs(candidate - found).max() < 1e-5]
    assert len(fits) == 1, [float(np.abs(candidate - found).max()) for candidate in candidates]
    return fits[0]


def apart(p: Vector, q: Vector, kind: str) -> float:
    """Return the Jensen-Shannon divergence, or half of Jeffreys'."""
    middle = (p + q) / 2

    def kl(a: Vector, b: Vector) -> float:
        return float((a * np.log(a / b)).sum())

    return (kl(p, middle) + kl(q, middle)) / 2 if kind == "js" else (kl(p, q) + kl(q, p)) / 2


@pytest.mark.parametrize(
    ("kind", "average", "threshold"), [("js", True, 0.06), ("jeffreys", False, 0.3)]
)
def test_ua_pdfl(kind: Literal["js", "jeffreys"], average: bool, threshold: float) -> None:
    """Zhu, Fan and Xie 2024, Algorithm 2: one peer's model if Div <= th_I for all peers, else g of
    all and near h.

    Then E epochs on F_i + μ ‖g(X_unit) - I_avg^Aux‖², with X_unit = 1; the mean of squares as in
    the authors' code."""
    mu, decay, unit = 0.7, 0.9, np.ones((1, INPUTS))
    method = UAPDFL(
        rounds=4,
        epochs=EPOCHS,
        peers=N - 1,
        threshold=threshold,
        mu=mu,
        divergence=kind,
        average_aux=average,
        lr_decay=decay,
    )
    models, seen = [START] * N, set()
    for t, result in enumerate(results(method)):
        answers = [softmax(logits(w, unit))[0] for w in models]
        target = np.mean([hidden(w, unit)[0] for w in models], axis=0)
        new = models_of(result)
        for i in ALL:
            peers = [j for j in ALL if j != i]
            near = [j for j in peers if apart(answers[i], answers[j], kind) < threshold]
            if len(near) == len(peers):
                starts = [models[j] for j in peers] if t else [START]
            else:
                heads = [i, *near]
                g = SIZES / SIZES.sum() @ np.stack(models)
                h = SIZES[heads] / SIZES[heads].sum() @ np.stack([models[j] for j in heads])
                starts = [np.concatenate([g[:HEAD], h[HEAD:]])]
            if t:
                seen.add(len(near))
            candidates = []
            for start in starts:
                w = start
                for _ in range(EPOCHS * STEPS[i]):
                    away = 2 * mu * (hidden(w, unit) - target) / (len(target) if average else 1)
                    pull = backward(w, unit, np.zeros((1, CLASSES)), away)
                    w = w - LR * decay**t * (gradient(w, i) + pull)
                candidates.append(w)
            the_one(new[i], candidates)
        models = new
    assert seen >= {1, 2}, "both branches are taken"


def norms_of(w: Vector, i: int) -> tuple[Vector, float]:
    """Return silo i's model after E epochs, and η/E Σ ‖∇F_i‖² over its batches."""
    total = 0.0
    for _ in range(EPOCHS * STEPS[i]):
        g = gradient(w, i)
        total += LR * float(g @ g) / EPOCHS
        w = w - LR * g
    return w, total


def after_check(
    history: list[float], number: int, capped: bool, least: int, most: int
) -> tuple[bool, int]:
    """Return whether the period is critical, and the new M: δ = 0.05, one forced check, windows of
    two."""
    growth = 0.0
    if len(history) > 1:
        now, before = np.mean(history[-2:]), np.mean(history[:-1][-2:])
        growth = float((now - before) / before)
    if len(history) <= 1 or growth > 0.05:
        return True, number if capped else min(2 * number, most)
    return False, max(least, number - max(number // 2, 1))


def test_criticalfl() -> None:
    """Yan et al. 2023 with each client as its own server: twice as many peers while the norm grows,
    else half."""
    method = CriticalFL(
        rounds=6, epochs=EPOCHS, peers=1, cap=1.0, delta=0.05, window=2, forced=1, every=1
    )
    models, peers = [START] * N, [1] * N
    history, capped, numbers = [list[float]() for _ in ALL], [False] * N, set()
    for t, result in enumerate(results(method)):
        trained, norms = zip(*(norms_of(models[i], i) for i in ALL), strict=True)
        new = models_of(result)
        for i in ALL:
            circles = [
                [i, *others] for others in combinations([j for j in ALL if j != i], peers[i])
            ]
            the_one(
                new[i],
                [SIZES[c] / SIZES[c].sum() @ np.stack([trained[j] for j in c]) for c in circles],
            )
            numbers.add((t, peers[i]))
            history[i].append(norms[i])
            _, peers[i] = after_check(history[i], peers[i], capped[i], 1, N - 1)
            capped[i] = capped[i] or peers[i] >= N - 1
        models = new
    assert {number for _, number in numbers} == {1, 2}


@pytest.mark.parametrize("upload", [1.0, 0.4])
def test_criticalfl_at_a_server(upload: float) -> None:
    """Yan et al. 2023 and its code: M clients, in critical rounds the largest changes alone, means
    of what was sent."""
    method = CriticalFLServer(
        rounds=6,
        epochs=EPOCHS,
        participation=1 / 3,
        cap=1.0,
        upload=upload,
        delta=0.05,
        window=2,
        forced=1,
        every=1,
    )
    w, number, capped, critical = START, 1, False, True
    history, numbers = list[float](), []
    for result in results(method):
        assert result.weights is not None
        found = result.weights.params.double().numpy()
        trained, norms = zip(*(norms_of(w, i) for i in ALL), strict=True)
        kept = np.ones((N, len(w)))
        if critical and upload < 1:
            for i in ALL:
                kept[i, np.argsort(-np.abs(trained[i] - w))[round(upload * len(w)) :]] = 0
        groups, candidates = list(combinations(ALL, number)), []
        for group in groups:
            weights = SIZES[list(group)][:, None] * kept[list(group)]
            total = (weights * np.stack([trained[i] for i in group])).sum(0)
            candidates.append(
                np.where(weights.sum(0) > 0, total / np.maximum(weights.sum(0), 1), w)
            )
        numbers.append((number, critical))
        group = groups[the_one(found, candidates)]
        history.append(float(np.mean([norms[i] for i in group])))
        critical, number = after_check(history, number, capped, 1, N)
        capped = capped or number >= N
        w = found
    assert len({n for n, _ in numbers}) > 1
    assert {c for _, c in numbers} == {True, False}
