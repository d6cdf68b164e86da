"""Averages that treat the classifier class by class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ekiden.authoring import UserError, Weights, mean
from ekiden.training.weights import Layout


def class_mean(models: Sequence[Weights], shares: Tensor, layout: Layout, base: Weights | None = None) -> Weights:
    """Return the average of models, with each class's row of the classifier (and its bias) averaged by its own weights.

    Args:
        models: the models to average.
        shares: (N, K) >= 0, weight of client i in row c: 1 or 0 for owners, or numbers of samples. The row of a class
            that no client has becomes zero.
        layout: layout of the models.
        base: everything except the classifier; by default the uniform mean.
    """
    result = mean(models) if base is None else base
    if shares.shape != (len(models), layout.classes):
        raise UserError(
            f"counts of {shares.shape[1]} classes by {len(shares)} clients do not fit {len(models)} models whose last "
            f"layer has {layout.classes} outputs: call the classifier `head`"
        )
    params = result.params.clone()
    total, head = torch.zeros(layout.classes, dtype=torch.float64), layout.head
    rows = torch.zeros_like(head.matrix(params))
    for model, share in zip(models, shares.double(), strict=True):  # a running mean: equal rows stay as they are
        total += share
        rows.lerp_(head.matrix(model.params), (share / total.clamp(min=1e-300)).float()[:, None].to(rows.device))
    head.put(params, rows)
    return result.with_params(params)


def owned(counts: Tensor) -> Tensor:
    """Return (K,) bool: the classes of which a client has more than one sample."""
    return counts > 1
