"""ResNet-18 and VGG-11 in the forms used for small images."""

from collections.abc import Callable

from torch import Tensor, nn

from ekiden.models.pooling import MaxPool
from ekiden.models.split import SplitNetwork


class Block(nn.Module):
    """The basic residual block: two 3x3 convolutions next to a shortcut.

    Attributes:
        conv1: 3x3, with the stride.
        norm1: after it.
        conv2: 3x3.
        norm2: after it.
        shortcut: 1x1 convolution and norm where the shape changes, else nothing.
        relu: after the first norm and after the addition.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


def resnet18(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """ResNet-18 with BatchNorm and the CIFAR stem: 3x3 convolution of stride 1, no max-pool.

    11,173,962 parameters for 3 channels and 10 classes; 9,600 running statistics and 20 counters.

    Kaiming He et al.: Deep Residual Learning for Image Recognition. CVPR 2016. https://arxiv.org/abs/1512.03385
    """
    return _resnet18(shape[0], classes, nn.BatchNorm2d)


def resnet18_gn(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """ResNet-18 with GroupNorm of 2 groups (as in FedDisco), which has no running statistics."""
    return _resnet18(shape[0], classes, lambda channels: nn.GroupNorm(2, channels))


def _resnet18(channels: int, classes: int, norm: Callable[[int], nn.Module]) -> SplitNetwork:
    blocks: list[nn.Module] = []
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(inputs, outputs, stride, norm), Block(outputs, outputs, 1, norm)]
        inputs = outputs
    features = nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        norm(64),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return SplitNetwork(features, nn.Linear(512, classes))


class HeConv2d(nn.Conv2d):
    """A convolution whose weights start as He et al. advise for ReLUs.

    torch's default shrinks the signal at each layer, and eight of them without norm would not train.
    """

    def reset_parameters(self) -> None:
        """New initial values."""
        super().reset_parameters()
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")


def vgg11(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """The eight convolutions of VGG-11, averaged to 512 numbers, and ONE linear layer; no BatchNorm.

    The head is the form usual for CIFAR; the papers that we compare with do not state theirs.
    9,225,610 parameters for 3 channels and 10 classes.

    Karen Simonyan, Andrew Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition.
    ICLR 2015. https://arxiv.org/abs/1409.1556
    """
    layers: list[nn.Module] = []
    inputs = shape[0]
    for outputs, pool in (
        (64, True),
        (128, True),
        (256, False),
        (256, True),
        (512, False),
        (512, True),
        (512, False),
        (512, True),
    ):
        conv = HeConv2d(inputs, outputs, 3, padding=1)
        layers += [conv, MaxPool(), nn.ReLU()] if pool else [conv, nn.ReLU()]
        inputs = outputs
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return SplitNetwork(features, nn.Linear(512, classes))
