"""Networks for images, signals and vectors: fully connected, convolutional, ResNet-18, VGG-11,
U-Net, scattering.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.core.models.split import SplitNetwork

SHORTEST = 16
"""fewest values in time of a signal"""
SMALLEST = 4  # fewest pixels of a side


class MaxPool(nn.MaxPool2d):
    """Maximum over 2x2 windows, equal to `nn.MaxPool2d(2)`.

    PyTorch's kernel also finds the place of each maximum, which on a CPU and with few channels is
    most of a small CNN's time. Passes without a gradient, such as evaluation and teachers, do not
    need the places.
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
    """Convolutions 6 and 16 of 5x5, linear 120, 84, K; FedELMY's network for PACS and
    Office-Caltech-10.

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
    """Three unpadded 3x3 convolutions of 128 channels and one linear layer; FedELMY's and DENSE's
    for CIFAR-10.

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

    UA-PDFL gives the numbers of layers (two convolutions, two linear) and the split, but no widths:
    those of `cnn_tiny` are an assumption. With them the head has 96.4 % of the 545,098 parameters
    for 3x32x32 and 10 classes.
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
    """MA-Echo's for CIFAR-10: padded 3x3 convolutions 64, 128, 256 with dropout, linear 1000, 500,
    K; no biases.

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

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        # 1x1 convolution and norm where the shape changes, else nothing
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )
        # after the first norm and after the addition
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


def resnet18(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """ResNet-18 with BatchNorm and the CIFAR stem: 3x3 convolution of stride 1, no max-pool.

    11,173,962 parameters for 3 channels and 10 classes; 9,600 running statistics and 20 counters.

    Kaiming He et al.: Deep Residual Learning for Image Recognition. CVPR 2016.
    https://arxiv.org/abs/1512.03385
    """
    return _resnet18(shape[0], classes, nn.BatchNorm2d)


def resnet18_gn(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """ResNet-18 with GroupNorm of 2 groups (as in FedDisco), which has no running statistics."""
    return _resnet18(shape[0], classes, partial(nn.GroupNorm, 2))


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

    torch's default shrinks the signal at each layer, and eight of them without norm would not
    train.
    """

    def reset_parameters(self) -> None:
        """New initial values."""
        super().reset_parameters()
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")


def vgg11(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """The eight convolutions of VGG-11, averaged to 512 numbers, and ONE linear layer; no
    BatchNorm.

    The head is the form usual for CIFAR; the papers that we compare with do not state theirs.
    9,225,610 parameters for 3 channels and 10 classes.

    Karen Simonyan, Andrew Zisserman: Very Deep Convolutional Networks for Large-Scale Image
    Recognition. ICLR 2015. https://arxiv.org/abs/1409.1556
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
        self.down = nn.ModuleList([_block(channels, 16), _block(16, 32), _block(32, 64)])
        self.up = nn.ModuleList([_block(64 + 32, 32), _block(32 + 16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, 16, H, W)."""
        scales: list[Tensor] = []
        for block in self.down:
            if scales:
                x = F.max_pool2d(x, 2)
            x = block(x)
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
    """A small U-Net: padded 3x3 convolutions of 16, 32 and 64 with group normalisation at three
    scales; any size works.

    118,930 parameters for 3 channels and 2 classes. The head is a 1x1 convolution. The form is that
    of Ronneberger et al. (MICCAI 2015, https://arxiv.org/abs/1505.04597), with fewer scales and
    channels.
    """
    return SplitNetwork(_UNet(shape[0]), nn.Conv2d(16, classes, 1))


def cnn_signal(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Three 1-D convolutions of 32, 64 and 64 with group normalisation, the mean over time; any
    length works.
    """
    channels = 1
    layers: list[nn.Module] = [nn.Unflatten(1, (1, -1))]
    if len(shape) == 2:
        channels = shape[0]
        layers = [nn.Identity()]
    for inputs, outputs, kernel in ((channels, 32, 7), (32, 64, 5), (64, 64, 3)):
        conv = nn.Conv1d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
        layers += [conv, nn.GroupNorm(8, outputs), nn.ReLU()]
    return SplitNetwork(
        nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten()), nn.Linear(64, classes)
    )


# Scattering: fixed wavelets, whitened by images that nobody took

_TURNS = 8  # directions of wavelets
_SCALE = 4  # pixels between two positions
_PAD = 4
_GROUPS = 27  # of channels that are standardised together
_KEEP = 4  # most spatial frequencies in each direction
_MOST = 2200  # most features
_IMAGES = 300  # artificial images
_REST = 0.2  # of the mean variance is added to each
_MAPS = 1 + 2 * _TURNS + _TURNS**2


class Scattering(nn.Module):
    """Wavelets, moduli and averages of two orders; normalised, cut to low spatial frequencies and
    whitened.

    Joan Bruna, Stéphane Mallat: Invariant Scattering Convolution Networks. IEEE TPAMI 2013.
    https://arxiv.org/abs/1203.1513 (Morlet wavelets of 2 scales and 8 directions). For private
    learning: Florian Tramèr, Dan Boneh: Differentially Private Learning Needs Better Features (or
    Much More Data). ICLR 2021. https://arxiv.org/abs/2011.11660, from which the groups of channels
    are.

    Departures: colours are turned into brightness and two differences. Of the averages only the
    lowest spatial frequencies are kept, and the channels of each are whitened by their covariance
    for dead leaves, which are images of random ellipses that hide each other. So nothing depends on
    data, and usual images have about the same variance in all directions. Noise of differential
    privacy then hides none of them first.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Prepare for images of `shape` (channels, H, W)."""
        super().__init__()
        colours, *sides = shape
        maps = colours * _MAPS
        # k, spatial frequencies in each direction
        self.keep = max(
            1, min(_KEEP, math.isqrt(_MOST // maps), *(-(-side // _SCALE) for side in sides))
        )
        # D, the number of features, at most 2,200
        self.width = maps * self.keep**2
        # (k², C) the mean of each channel, for dead leaves
        self.centre = nn.Parameter(torch.zeros(self.keep**2, maps))
        # (k², C, C)
        self.whiten = nn.Parameter(torch.zeros(self.keep**2, maps, maps))
        if not self.centre.is_meta:
            with torch.no_grad(), torch.device("cpu"):
                centre, whiten = _whitening(shape, self.keep)
                self.centre.copy_(centre)
                self.whiten.copy_(whiten)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) features of images (B, C, H, W)."""
        with torch.autocast(x.device.type, enabled=False):
            maps = _scattered(x.float(), self.keep).transpose(0, 1) - self.centre[:, None]
            white: Tensor = maps @ self.whiten
            return white.transpose(0, 1).flatten(1)


def scattering(shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Fixed wavelets of two orders and one linear layer; for private sums and `--train head`."""
    features = Scattering(shape)
    return SplitNetwork(features, nn.Linear(features.width, classes))


def _scattered(x: Tensor, keep: int) -> Tensor:
    """Return (B, k², 81·C), low spatial frequencies of the normalised scattering of images (B, C,
    H, W).
    """
    if x.shape[1] == 3:
        red, green, blue = x.unbind(1)
        x = torch.stack([x.mean(1), red - blue, (red + blue) / 2 - green], 1)
    sides = x.shape[-2:]
    below, beside = (-side % _SCALE + _PAD for side in sides)
    u = F.pad(x, (_PAD, beside, _PAD, below), mode="reflect").flatten(0, 1)
    fine, coarse, *averages = (t.to(u) for t in _bank((u.shape[-2], u.shape[-1])))
    whole = averages[:2]
    half = averages[2:]
    spectrum = torch.fft.fft2(u)
    first = _modulus(torch.fft.ifft2(spectrum[:, None] * fine))
    second = _modulus(torch.fft.ifft2(_cut(spectrum)[:, None] * coarse))
    both = _modulus(torch.fft.ifft2(_cut(torch.fft.fft2(first))[:, :, None] * coarse)).flatten(1, 2)
    parts = ((u[:, None], whole), (first, whole), (second, half), (both, half))
    maps = torch.cat([down @ part @ right.T for part, (down, right) in parts], 1)
    maps = F.group_norm(maps.reshape(len(x), -1, *maps.shape[-2:]), _GROUPS)
    rows, columns = maps.shape[-2:]
    low = _cosines(rows, keep).to(u) @ maps @ _cosines(columns, keep).to(u).T
    return low.flatten(2).mT


def _modulus(z: Tensor) -> Tensor:
    parts = torch.view_as_real(z).square()
    # with a gradient at 0
    return (parts[..., 0] + parts[..., 1] + 1e-12).sqrt()


def _cut(spectrum: Tensor) -> Tensor:
    """Return the lower half of the frequencies in each direction."""
    for dim in (-2, -1):
        half = spectrum.shape[dim] // 4
        spectrum = torch.cat(
            [spectrum.narrow(dim, 0, half), spectrum.narrow(dim, -half, half)], dim
        )
    return spectrum


def _cosines(side: int, keep: int) -> Tensor:
    """Return (keep, side), the lowest frequencies of the orthonormal discrete cosine transform."""
    k = torch.arange(keep)[:, None]
    place = torch.arange(side, dtype=torch.float64) + 0.5
    found = torch.cos(math.pi * k * place / side) * math.sqrt(2 / side)
    found[0] /= math.sqrt(2)
    return found


@lru_cache(maxsize=8)
def _bank(sides: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return spectra of the wavelets of both scales, and averages of rows and columns at each
    resolution.

    Everything after the first wavelets has half the resolution.
    """
    with torch.device("cpu"):
        fine = _wavelets(sides, 0.8, 0.75 * math.pi)
        coarse = _cut(_wavelets(sides, 1.6, 0.375 * math.pi)) / 4
        averages = [_average(side, step) for step in (1, 2) for side in sides]
        return fine, coarse, *averages


def _gaussian(
    sides: tuple[int, int], sigma: float, slant: float, turn: float, shift: float
) -> Tensor:
    """Return the spectrum of a Gaussian that is `slant` times as wide across, moved along by
    `shift`; periodic.
    """
    total = torch.zeros(sides, dtype=torch.float64)
    y, x = (2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64) for side in sides)
    for down in range(-2, 3):
        for over in range(-2, 3):
            v = (y + 2 * math.pi * down)[:, None]
            h = x + 2 * math.pi * over
            along = h * math.cos(turn) + v * math.sin(turn) - shift
            across = v * math.cos(turn) - h * math.sin(turn)
            total += torch.exp(-(sigma**2) / 2 * (along**2 + (across * slant) ** 2))
    return total


def _wavelets(sides: tuple[int, int], sigma: float, frequency: float) -> Tensor:
    """Return (8, H, W), the spectra of Morlet wavelets in all directions; 0 at frequency 0."""
    spectra = []
    for number in range(_TURNS):
        turn = number * math.pi / _TURNS
        wave = _gaussian(sides, sigma, _TURNS / 4, turn, frequency)
        still = _gaussian(sides, sigma, _TURNS / 4, turn, 0.0)
        spectra.append(wave - wave[0, 0] / still[0, 0] * still)
    return torch.stack(spectra)


def _average(side: int, step: int) -> Tensor:
    """Return (positions, side / step), Gaussian averages of values that are `step` pixels apart."""
    places = _PAD + _SCALE * torch.arange((side - 2 * _PAD) // _SCALE)
    spectrum = _gaussian((1, side), 1.6, 1.0, 0.0, 0.0)[0]
    kernel = torch.fft.ifft(spectrum / spectrum[0]).real
    apart = (places[:, None] - step * torch.arange(side // step)) % side
    average: Tensor = step * kernel[apart]
    return average


@lru_cache(maxsize=4)
def _whitening(shape: tuple[int, ...], keep: int) -> tuple[Tensor, Tensor]:
    """Return the means (k², C) of dead leaves' channels, and for each frequency a matrix (C, C)
    that whitens them.

    Both are computed in double precision and rounded, so that silos with other processors have the
    same bits.
    """
    maps = torch.cat(
        [_scattered(part, keep) for part in torch.split(dead_leaves(_IMAGES, shape), 4)]
    )
    # (k², images, C)
    centred = (maps - maps.mean(0)).transpose(0, 1)
    covariance = centred.mT @ centred / _IMAGES
    variances = covariance.diagonal(dim1=1, dim2=2)
    variances.add_(_REST * variances.mean(1, keepdim=True))
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance)).mT
    return _rounded(maps.mean(0)), _rounded(whiten)


def _rounded(values: Tensor) -> Tensor:
    """Return float32 of 16 binary places, without -0."""
    return ((values * 2**16).round() / 2**16 + 0.0).float()


def dead_leaves(count: int, shape: tuple[int, ...]) -> Tensor:
    """Return images (count, C, H, W) of 30 ellipses that hide each other, of mean 0 and deviation
    1.
    """
    draw = torch.Generator().manual_seed(0)
    channels, height, width = shape

    def some(*sizes: int) -> Tensor:
        return torch.rand(count, *sizes, generator=draw).double()

    images = some(channels, 1, 1).expand(count, *shape)
    y = torch.arange(height, dtype=torch.float64) + 0.5
    x = torch.arange(width, dtype=torch.float64) + 0.5
    for _ in range(30):
        # density as r^-3
        radius = 0.06 * min(height, width) * (some(1, 1) * 35 / 36 + 1 / 36).rsqrt()
        right = x - some(1, 1) * width
        down = y[:, None] - some(1, 1) * height
        turn = some(1, 1) * math.pi
        along = right * turn.cos() + down * turn.sin()
        across = (down * turn.cos() - right * turn.sin()) / (0.4 + 0.6 * some(1, 1))
        cover = (radius - (along**2 + across**2).sqrt() + 0.5).clamp(0, 1)[:, None]
        colour = some(1, 1, 1)
        if channels > 1:
            colour = colour + 0.25 * (some(channels, 1, 1) - 0.5)
        shade = (1 + 0.5 * (some(1, 1) - 0.5) * along / radius.clamp(min=1)).clamp(0.3, 1.7)[
            :, None
        ]
        images = images * (1 - cover) + (colour.clamp(0, 1) * shade).clamp(0, 1) * cover
    return (images - 0.5) / 0.25
