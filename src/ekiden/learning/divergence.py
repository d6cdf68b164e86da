"""How far two distributions are apart."""

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["jeffreys", "js"]


def divergence(p: Tensor, q: Tensor, kind: Divergence) -> float:
    """Of two distributions, natural logarithm; infinite where one has no mass and the other has, in "jeffreys"."""
    p, q = p.double(), q.double()
    if kind == "js":
        middle = (p + q) / 2
        return float((relative_entropy(p, middle) + relative_entropy(q, middle)) / 2)
    return float((relative_entropy(p, q) + relative_entropy(q, p)) / 2)


def relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum()
