"""Upper triangles of symmetric matrices: their order, and the way back."""

import pytest
import torch

from ekiden.methods.blocks.symmetric import numbers, symmetric, upper


def test_a_triangle_goes_row_by_row() -> None:
    matrix = torch.tensor([[1.0, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert upper(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(symmetric(upper(matrix)), matrix)


@pytest.mark.parametrize("size", [0, 1, 2, 17])
def test_many_matrices_come_back(size: int) -> None:
    some = torch.randn(3, 2, size, size, dtype=torch.float64)
    some = some + some.mT
    sent = upper(some)
    assert sent.shape == (3, 2, numbers(size))
    assert torch.equal(symmetric(sent), some)
