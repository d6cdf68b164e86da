"""Tensors that are made once, also where a network is traced."""

import torch
from torch import Tensor, nn

from ekiden.core.base.constants import constant


class Shifted(nn.Module):
    """Adds a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x + constant((0.625, 1.375), x.dtype, x.device)


def test_what_is_made_while_a_network_is_traced_is_not_kept() -> None:
    """A tensor of the tracer has no values, and whatever is computed with it has none."""
    x = torch.ones(3, 2)
    for _ in range(2):
        program = torch.export.export(Shifted(), (x,)).module()
        expected = torch.tensor([1.625, 2.375]).expand(3, 2)
        assert torch.equal(Shifted()(x), expected)
        assert torch.equal(program(x), expected)


def test_a_constant_is_made_once() -> None:
    made = [constant((0.5,), torch.float32, torch.device("cpu")) for _ in range(2)]
    assert made[0] is made[1]
