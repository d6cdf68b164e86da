"""Networks for images, signals and vectors: fully connected, convolutional, ResNet-18, VGG-11, U-Net."""

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.models.split import SplitNetwork

SMALLEST = 4  # fewest pixels of a side
_WIDTHS = (16, 32, 64)


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


def mlp(shape: tuple[int, ...], classes: int, *, bias: bool = True) -> SplitNetwork:
    """d-400-200-100-K with ReLU, d = all the numbers of a sample (784 for MNIST)."""
    features = nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 400, bias=bias),
        nn.ReLU(),
        nn.Linear(400, 200, bias=bias),
        nn.ReLU(),
        nn.Linear(200, 100, bias=bias),
        nn.ReLU(),
    )
    return SplitNetwork(features, nn.Linear(100, classes, bias=bias))


def mlp_ma_echo(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """The MLP of MA-Echo and OT fusion: no biases; 414,600 parameters for MNIST."""
    return mlp(shape, classes, bias=False)


def lenet(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Convolutions 6 and 16 of 5x5, linear 120, 84, K; FedELMY's network for PACS and Office-Caltech-10.

    62,006 parameters for 3x32x32 and 10 classes, 61,751 for 7.
    """
    channels, *sides = shape
    width = 16 * prod(((side - 4) // 2 - 4) // 2 for side in sides)
    features = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        MaxPool(),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        MaxPool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return SplitNetwork(features, nn.Linear(84, classes))


def cnn(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Three unpadded 3x3 convolutions of 128 channels and one linear layer; FedELMY's and DENSE's for CIFAR-10.

    319,242 parameters for 3x32x32 and 10 classes.
    """
    channels, *sides = shape
    width = 128 * prod(((side - 2) // 2 - 2) // 2 - 2 for side in sides)
    features = nn.Sequential(
        nn.Conv2d(channels, 128, 3),
        MaxPool(),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3),
        MaxPool(),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3),
        nn.ReLU(),
        nn.Flatten(),
    )
    return SplitNetwork(features, nn.Linear(width, classes))


def cnn_tiny(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Padded 3x3 convolutions 32 and 64, linear 128, K; FedELMY's for Tiny-ImageNet.

    2,142,472 parameters for 3x64x64 and 200 classes.
    """
    channels, *sides = shape
    features = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        MaxPool(),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        MaxPool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * prod(side // 4 for side in sides), 128),
        nn.ReLU(),
    )
    return SplitNetwork(features, nn.Linear(128, classes))


def cnn_ua_pdfl(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """The layers of `cnn_tiny`; the head is both linear layers, as in UA-PDFL's CNN.

    UA-PDFL gives the numbers of layers (two convolutions, two linear) and the split, but no widths: those of `cnn_tiny`
    are an assumption. With them the head has 96.4 % of the 545,098 parameters for 3x32x32 and 10 classes.
    """
    whole = cnn_tiny(shape, classes)
    layers = list(whole.features.children())
    first = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    return SplitNetwork(nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:], whole.head))


class XavierLinear(nn.Linear):
    """A linear layer whose weights start Xavier-normal."""

    def reset_parameters(self) -> None:
        """New initial values."""
        super().reset_parameters()
        nn.init.xavier_normal_(self.weight)


def cnn_ma_echo(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """MA-Echo's for CIFAR-10: padded 3x3 convolutions 64, 128, 256 with dropout, linear 1000, 500, K; no biases.

    The linear layers start Xavier-normal. 4,971,368 parameters for 3x32x32 and 10 classes.
    """
    channels, *sides = shape
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 64), (64, 128), (128, 256)):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        layers += [conv, nn.ReLU(), nn.Dropout(0.2), MaxPool()]
    features = nn.Sequential(
        *layers,
        nn.Flatten(),
        XavierLinear(256 * prod(side // 8 for side in sides), 1000, bias=False),
        nn.ReLU(),
        XavierLinear(1000, 500, bias=False),
        nn.ReLU(),
    )
    return SplitNetwork(features, XavierLinear(500, classes, bias=False))


class Block(nn.Module):
    """The basic residual block: two 3x3 convolutions next to a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)  # 3x3, with the stride
        self.norm1 = norm(outputs)  # after it
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)  # 3x3
        self.norm2 = norm(outputs)  # after it
        self.shortcut = nn.Sequential()  # 1x1 convolution and norm where the shape changes, else nothing
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        self.relu = nn.ReLU(inplace=True)  # after the first norm and after the addition

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
    for outputs, convolutions in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(convolutions):
            layers += [HeConv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.insert(-1, MaxPool())
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return SplitNetwork(features, nn.Linear(512, classes))


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


class Channels(nn.Module):
    """Gives a signal of one channel its dimension of channels."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, time) or (b, channels, time) to (b, channels, time)."""
        return x.unsqueeze(1) if x.ndim == 2 else x


def cnn_signal(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Three 1-D convolutions of 32, 64 and 64 with group normalisation, the mean over time; any length works."""
    layers: list[nn.Module] = [Channels()]
    for inputs, outputs, kernel in ((shape[0] if len(shape) == 2 else 1, 32, 7), (32, 64, 5), (64, 64, 3)):
        conv = nn.Conv1d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
        layers += [conv, nn.GroupNorm(8, outputs), nn.ReLU()]
    return SplitNetwork(nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten()), nn.Linear(64, classes))
