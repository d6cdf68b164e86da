"""ResNet-18 with the stem for small images."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ekiden.models.small import Split

Norm = Callable[[int], nn.Module]


class ResNet18(Split):
    """ResNet-18 whose stem keeps small images whole: 3x3 convolution of stride 1, no pool, global average at the end.

    Kaiming He et al.: Deep Residual Learning for Image Recognition. CVPR 2016. https://arxiv.org/abs/1512.03385
    """

    def __init__(self, shape: tuple[int, ...], classes: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), norm(64), nn.ReLU()]
        before = 64
        for channels, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            layers.append(Block(before, channels, stride, norm))
            before = channels
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, classes)


class Block(nn.Module):
    """Two 3x3 convolutions around which the input is added, projected where its shape changes."""

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
            norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
        )
        same = stride == 1 and before == channels
        self.skip = nn.Sequential(
            *(() if same else (nn.Conv2d(before, channels, 1, stride, bias=False), norm(channels)))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features (b, channels, h / stride, w / stride)."""
        return nn.functional.relu(self.body(x) + self.skip(x))


resnet18_gn = partial(ResNet18, norm=partial(nn.GroupNorm, 32))
"""The same with GroupNorm of 32 groups: no statistics to average."""
