"""Symmetric matrices as they travel: their upper triangles, row by row."""

from math import isqrt

import torch
from torch import Tensor


def numbers(size: int) -> int:
    """Return d(d + 1)/2, the numbers in the upper triangle of a matrix of `size` rows."""
    return size * (size + 1) // 2


def upper(matrices: Tensor) -> Tensor:
    """Return the upper triangles (..., d(d + 1)/2) of matrices (..., d, d)."""
    rows, columns = torch.triu_indices(*matrices.shape[-2:], device=matrices.device)
    return matrices[..., rows, columns]


def symmetric(triangles: Tensor) -> Tensor:
    """Return the matrices (..., d, d) with these upper triangles (..., d(d + 1)/2)."""
    size = (isqrt(8 * triangles.shape[-1] + 1) - 1) // 2
    rows, columns = torch.triu_indices(size, size, device=triangles.device)
    matrices = triangles.new_zeros(*triangles.shape[:-1], size, size)
    matrices[..., rows, columns] = matrices[..., columns, rows] = triangles
    return matrices
