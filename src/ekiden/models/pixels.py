"""A network that gives classes to pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.models.split import SplitNetwork

SMALLEST = 4
"""fewest pixels of a side"""
_WIDTHS = (16, 32, 64)


class _UNet(nn.Module):
    """Features of pixels at three scales, as in a U-Net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = zip((channels, *_WIDTHS), _WIDTHS, strict=False)
        self.down = nn.ModuleList(_block(inputs, outputs) for inputs, outputs in sizes)
        pairs = zip(_WIDTHS[:0:-1], _WIDTHS[-2::-1], strict=True)
        self.up = nn.ModuleList(_block(coarse + fine, fine) for coarse, fine in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, 16, H, W)."""
        scales: list[Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(scales[-1], 2) if scales else x)
            scales.append(x)
        for block, fine in zip(self.up, scales[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, size=fine.shape[2:]), fine], dim=1))
        return x


def _block(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def unet(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """A small U-Net: padded 3x3 convolutions of 16, 32 and 64 with group normalisation at three scales; any size works.

    118,930 parameters for 3 channels and 2 classes. The head is a 1x1 convolution. The form is that of Ronneberger et
    al. (MICCAI 2015, https://arxiv.org/abs/1505.04597), with fewer scales and channels.
    """
    return SplitNetwork(_UNet(shape[0]), nn.Conv2d(_WIDTHS[0], classes, 1))
