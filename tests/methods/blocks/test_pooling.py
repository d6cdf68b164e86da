"""Our pooling against PyTorch's."""

import pytest
import torch
from torch import nn

from ekiden.core.models.images import MaxPool


@pytest.mark.parametrize("shape", [(3, 6, 28, 28), (2, 16, 11, 9), (1, 1, 2, 2), (5, 7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_equals_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1)[::7] = 0  # ties
    if len(shape) == 4:
        x = x.to(memory_format=layout)
    expected = nn.MaxPool2d(2)(x)
    assert torch.equal(MaxPool()(x), expected)
    assert MaxPool()(x).stride() == expected.stride()

    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for pool, inputs in ((MaxPool(), ours), (nn.MaxPool2d(2), theirs)):
        out = pool(inputs)
        assert torch.equal(out, expected)
        out.square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_propagates_nan() -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 1, 0] = torch.nan
    assert torch.equal(MaxPool()(x).isnan(), torch.tensor([[[[True, False]]]]))
