"""How far two distributions are apart."""

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["jeffreys", "js"]


def divergence(p: Tensor, q: Tensor, kind: Divergence) -> float:
    """Return how far two distributions (C,) are apart, in nats.

    Args:
        p: a distribution.
        q: another one.
        kind: "jeffreys", half the sum of both Kullback-Leibler divergences: no bound, and infinite where one has mass
            and the other has none; "js", the Jensen-Shannon divergence: at most ln 2.
    """
    p, q = p.double(), q.double()
    if kind == "js":
        middle = (p + q) / 2
        return float((relative_entropy(p, middle) + relative_entropy(q, middle)) / 2)
    return float((relative_entropy(p, q) + relative_entropy(q, p)) / 2)


def relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum()
