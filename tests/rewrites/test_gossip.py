"""Methods that leave each client its own model, written from their papers, against the library's
runs."""

from itertools import pairwise

import numpy as np
import pytest

import ekiden
from ekiden import Hardware, Training
from ekiden.methods import DFedAvgM, DFedSAM, DisPFL, FedPer, MetaFed
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
    backward,
    data,
    gradient,
    hidden,
    library,
    logits,
    module,
    personal_agree,
)

ALL = range(len(SILOS))
ROUNDS, EPOCHS = 2, 2
STAR = np.array([[1 / 3, 1 / 3, 1 / 3], [1 / 3, 2 / 3, 0], [1 / 3, 0, 2 / 3]])
"""Metropolis weights 1/(1 + max(deg_i, deg_l)) of a star around the first client: symmetric, doubly
stochastic"""


def test_dfedavgm() -> None:
    """Sun et al. 2023, Algorithm 1: y ← y - η g(y) + θ (y - y_before), y_before = y at the start;
    x_i ← Σ w_il z_l."""
    theta = 0.6
    models = [START] * len(SILOS)
    for _ in range(ROUNDS):
        trained = []
        for i in ALL:
            y = before = models[i]
            for _ in range(EPOCHS * STEPS[i]):
                y, before = y - LR * gradient(y, i) + theta * (y - before), y
            trained.append(y)
        models = list(STAR @ trained)
    personal_agree(
        library(DFedAvgM(rounds=ROUNDS, epochs=EPOCHS, theta=theta, topology="star")), models
    )


def test_dfedsam() -> None:
    """Shi et al. 2023, Algorithm 1 with multiple gossip steps: y ← y - η ∇F(y + ρ g/‖g‖); x = W^Q
    z."""
    radius, gossip = 0.3, 2
    models = [START] * len(SILOS)
    for _ in range(ROUNDS):
        trained = []
        for i in ALL:
            y = models[i]
            for _ in range(EPOCHS * STEPS[i]):
                g = gradient(y, i)
                y = y - LR * gradient(y + radius * g / np.linalg.norm(g), i)
            trained.append(y)
        models = list(np.linalg.matrix_power(STAR, gossip) @ trained)
    method = DFedSAM(
        rounds=ROUNDS, epochs=EPOCHS, radius=radius, gossip_steps=gossip, topology="star"
    )
    personal_agree(library(method), models)


@pytest.mark.parametrize("topology", ["server", "complete"])
def test_fedper(topology: str) -> None:
    """Arivazhagan et al. 2019, Algorithms 1 and 2: base layers averaged by n_j, personal layers
    kept."""
    models = [START] * len(SILOS)
    for _ in range(ROUNDS):
        trained = []
        for i in ALL:
            w = models[i]
            for _ in range(EPOCHS * STEPS[i]):
                w = w - LR * gradient(w, i)
            trained.append(w)
        base = SIZES / SIZES.sum() @ np.stack(trained)
        models = [np.concatenate([base[:HEAD], w[HEAD:]]) for w in trained]
    personal_agree(library(FedPer(rounds=ROUNDS, epochs=EPOCHS, topology=topology)), models)


def test_dispfl() -> None:
    """Dai et al. 2022, Algorithms 1 and 2, given the random masks of the first round, which show in
    its zeros.

    Averages divide by the number of masks at each weight. ⌈a/2 (1 + cos(πt/T)) nnz⌉ of a tensor's
    smallest weights are pruned, and as many regrow where the gradient is largest."""
    rounds, prune = 3, 0.5
    method = DisPFL(
        rounds=rounds,
        epochs=EPOCHS,
        density=0.5,
        prune=prune,
        regrow="gradient",
        topology="peers:2",
        lr_decay=1.0,
    )
    training = Training(optimizer="sgd", lr=LR, weight_decay=0.0, batch_size=6, select="last")
    hardware = Hardware(threads=1)
    results = list(
        ekiden.steps(
            method, data(), module(), training=training, hardware=hardware, evaluate_every=0
        )
    )
    masks = [own.params.numpy() != 0 for own in results[0].personal]
    bounds = np.cumsum([0, HIDDEN * INPUTS, HIDDEN, CLASSES * HIDDEN, CLASSES])
    models = [START * mask for mask in masks]
    for t in range(rounds):
        for i in ALL:
            for _ in range(EPOCHS * STEPS[i]):
                models[i] = models[i] - LR * gradient(models[i], i) * masks[i]
        personal_agree(results[t], models)
        moved = [mask.copy() for mask in masks]
        for i in ALL:
            slope = np.abs(gradient(models[i], i))
            for start, stop in pairwise(bounds):
                mask, size = moved[i][start:stop], np.abs(models[i][start:stop])
                count = int(np.ceil(prune / 2 * (1 + np.cos(np.pi * t / rounds)) * mask.sum()))
                mask[np.argsort(np.where(mask, size, np.inf))[:count]] = False
                mask[np.argsort(np.where(mask, -1, slope[start:stop]))[-count:]] = True
        assert any((a != b).any() for a, b in zip(masks, moved, strict=True))
        holders = np.sum(masks, axis=0)
        mean = np.sum(models, axis=0) / np.maximum(holders, 1)
        masks, models = moved, [mean * mask for mask in moved]


def test_metafed() -> None:
    """Chen et al. 2022 as in the authors' code: warm-up, a ring of teachers, then the last one's
    model teaches all."""
    warmup, weight, above, trust = 1, 1.5, 0.6, 0.5
    silos = data(val_fraction=0.34)
    parts = [(own.train, own.val) for own in silos.clients]
    train, val = (
        [(p.x.double().numpy(), p.y.numpy()) for p in group] for group in zip(*parts, strict=True)
    )

    def fit(w: Vector, i: int, epochs: int, teacher: Vector | None, strength: float) -> Vector:
        x, y = train[i]
        for _ in range(epochs * STEPS[i]):
            pull = np.zeros_like(w)
            if teacher is not None:
                by_hidden = 2 * strength * (hidden(w, x) - hidden(teacher, x)) / (len(y) * HIDDEN)
                pull = backward(w, x, np.zeros((len(y), CLASSES)), by_hidden)
            w = w - LR * (gradient(w, i, train) + pull)
        return w

    def accuracy(w: Vector, i: int) -> float:
        x, y = val[i]
        return float((logits(w, x).argmax(1) == y).mean())

    models = [fit(START, i, warmup, None, 0) for i in ALL]
    good = [accuracy(models[i], i) > above for i in ALL]
    flags = [list(good)]
    for r in range(ROUNDS):
        for i in ALL:
            teacher = None if r == i == 0 else models[i - 1]
            start = models[i] if good[i] or teacher is None else teacher
            models[i] = fit(start, i, EPOCHS, teacher if good[i] else None, weight)
        good = [good[i] or accuracy(models[i], i) > above for i in ALL]
        flags.append(list(good))
    common = models[-1]
    for i in ALL:
        own, others = accuracy(models[i], i), accuracy(common, i)
        strength = (
            0
            if others <= own and others < trust
            else weight * 10 ** min(1, 5 * (others - own)) / 10
        )
        models[i] = fit(
            models[i] if good[i] else common, i, EPOCHS, common if good[i] else None, strength
        )
    assert any(flags[0])
    assert not all(flags[1]), "both ways are taken"
    method = MetaFed(
        rounds=ROUNDS,
        epochs=EPOCHS,
        warmup=warmup,
        distill_weight=weight,
        distill_above=above,
        trust=trust,
    )
    personal_agree(library(method, silos), models)
