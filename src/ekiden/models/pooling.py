"""Pooling."""

import torch
from torch import Tensor, nn


class MaxPool(nn.MaxPool2d):
    """Maximum over 2x2 windows, equal to `nn.MaxPool2d(2)`.

    PyTorch's kernel also finds the place of each maximum, which on a CPU and with few channels is most of a small CNN's
    time. Passes without a gradient, such as evaluation and teachers, do not need the places.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C, H // 2, W // 2)."""
        if input.requires_grad or input.device.type != "cpu":
            return nn.functional.max_pool2d(input, 2)
        height, width = (side // 2 * 2 for side in input.shape[-2:])
        rows = torch.maximum(input[..., 0:height:2, :width], input[..., 1:height:2, :width])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])
