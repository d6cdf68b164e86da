"""Measures models on the test samples of all silos, which stay where they are."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch

from ekiden.engine.evaluation import consensus, diverged
from ekiden.training.weights import Weights
from ekiden.transports.flower.coordinator import Remote
from ekiden.transports.flower.parcel import Count


class SiloTests:
    """Measures models on the test samples of all silos, which stay where they are."""

    def __init__(self, remote: Remote, clients: Sequence[str], classes: int) -> None:
        self._remote = remote
        self._clients = clients
        self._classes = classes

    def __call__(self, model: Weights | None, personal: list[Weights], *, last: bool = False) -> dict[str, Any]:
        """The row of metrics, as `ekiden.engine.evaluation.TestSet` gives it on one machine."""
        shared = [] if model is None else [model]
        models = shared + personal
        if not models:
            return {}
        row = row_of(self._remote.evaluate(self._clients, models, len(shared)), len(shared), self._classes)
        if row and personal:
            row["consensus"] = consensus(personal)
        return row


def row_of(counts: Sequence[Sequence[Count]], results: int, classes: int) -> dict[str, Any]:
    """What the counts of all silos give; without what only the models tell.

    Args:
        counts: of each silo, for each model.
        results: how many of the models, the first ones, are the run's and not a client's own.
        classes: number of classes.
    """
    samples = sum(row[0].samples for row in counts)
    if not samples:
        return {}
    models = len(counts[0])
    accuracy = [sum(row[m].right for row in counts) / samples for m in range(models)]
    loss = [sum(row[m].loss for row in counts) / samples for m in range(models)]
    personal = models > results
    first = results if personal else 0
    own = [row[first + i if personal else 0] for i, row in enumerate(counts)]
    accuracies = [c.right / c.samples if c.samples else None for c in own]
    known = torch.tensor([a for a in accuracies if a is not None], dtype=torch.float64)
    found: dict[str, Any] = {
        "accuracy": sum(accuracy[first:]) / len(accuracy[first:]),
        "loss": sum(loss[first:]) / len(loss[first:]),
        "client_mean": float(known.mean()),
        "client_std": float(known.std(correction=0)),
        "client_worst": float(known.min()),
        "client_decile": float(known.quantile(0.1)),
        "clients": accuracies,
    }
    losses = [c.loss / c.samples for c in own if c.samples]
    if diverged(losses, log(classes), personal=personal):
        found["diverged"] = True
    if personal and results:
        found["global_accuracy"], found["global_loss"] = accuracy[0], loss[0]
    return found
