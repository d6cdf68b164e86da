"""Scattering: features of images from fixed wavelets, whitened by images that nobody took."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.models.split import SplitNetwork

_TURNS = 8  # directions of wavelets
_SCALE = 4  # pixels between two positions
_PAD = 4
_GROUPS = 27  # of channels that are standardised together
_KEEP = 4  # most spatial frequencies in each direction
_MOST = 2200  # most features
_IMAGES = 300  # artificial images
_REST = 0.2  # of the mean variance is added to each
_PLACES = 16  # binary, to which whitening is rounded
_MAPS = 1 + 2 * _TURNS + _TURNS**2


class Scattering(nn.Module):
    """Wavelets, moduli and averages of two orders; normalised, cut to low spatial frequencies and whitened.

    Joan Bruna, Stéphane Mallat: Invariant Scattering Convolution Networks. IEEE TPAMI 2013.
    https://arxiv.org/abs/1203.1513 (Morlet wavelets of 2 scales and 8 directions). For private learning: Florian
    Tramèr, Dan Boneh: Differentially Private Learning Needs Better Features (or Much More Data). ICLR 2021.
    https://arxiv.org/abs/2011.11660, from which the groups of channels are.

    Departures: colours are turned into brightness and two differences. Of the averages only the lowest spatial
    frequencies are kept, and the channels of each are whitened by their covariance for dead leaves, which are images of
    random ellipses that hide each other. So nothing depends on data, and usual images have about the same variance in
    all directions. Noise of differential privacy then hides none of them first.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Prepare for images of `shape` (channels, H, W)."""
        super().__init__()
        colours, *sides = shape
        maps = colours * _MAPS
        # k, spatial frequencies in each direction
        self.keep = max(1, min(_KEEP, math.isqrt(_MOST // maps), *(-(-side // _SCALE) for side in sides)))
        self.width = maps * self.keep**2  # D, the number of features, at most 2,200
        self.centre = nn.Parameter(torch.zeros(self.keep**2, maps))  # (k², C) the mean of each channel, for dead leaves
        self.whiten = nn.Parameter(torch.zeros(self.keep**2, maps, maps))  # (k², C, C)
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
    """Return (B, k², 81·C), low spatial frequencies of the normalised scattering of images (B, C, H, W)."""
    if x.shape[1] == 3:
        red, green, blue = x.unbind(1)
        x = torch.stack([x.mean(1), red - blue, (red + blue) / 2 - green], 1)
    sides = x.shape[-2:]
    below, beside = (-side % _SCALE + _PAD for side in sides)
    u = F.pad(x, (_PAD, beside, _PAD, below), mode="reflect").flatten(0, 1)
    fine, coarse, *averages = (t.to(u) for t in _bank((u.shape[-2], u.shape[-1])))
    whole, half = averages[:2], averages[2:]
    spectrum = torch.fft.fft2(u)
    first = _modulus(torch.fft.ifft2(spectrum[:, None] * fine))
    second = _modulus(torch.fft.ifft2(_cut(spectrum)[:, None] * coarse))
    both = _modulus(torch.fft.ifft2(_cut(torch.fft.fft2(first))[:, :, None] * coarse)).flatten(1, 2)
    parts = ((u[:, None], whole), (first, whole), (second, half), (both, half))
    maps = torch.cat([down @ part @ right.T for part, (down, right) in parts], 1)
    maps = F.group_norm(maps.reshape(len(x), -1, *maps.shape[-2:]), _GROUPS)
    low = [_cosines(side, keep).to(u) for side in maps.shape[-2:]]
    return (low[0] @ maps @ low[1].T).flatten(2).mT


def _modulus(z: Tensor) -> Tensor:
    parts = torch.view_as_real(z).square()
    return (parts[..., 0] + parts[..., 1] + 1e-12).sqrt()  # with a gradient at 0


def _cut(spectrum: Tensor) -> Tensor:
    """Return the lower half of the frequencies in each direction."""
    for dim in (-2, -1):
        half = spectrum.shape[dim] // 4
        spectrum = torch.cat([spectrum.narrow(dim, 0, half), spectrum.narrow(dim, -half, half)], dim)
    return spectrum


def _cosines(side: int, keep: int) -> Tensor:
    """Return (keep, side), the lowest frequencies of the orthonormal discrete cosine transform."""
    k, place = torch.arange(keep)[:, None], torch.arange(side, dtype=torch.float64) + 0.5
    found = torch.cos(math.pi * k * place / side) * math.sqrt(2 / side)
    found[0] /= math.sqrt(2)
    return found


@lru_cache(maxsize=8)
def _bank(sides: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return spectra of the wavelets of both scales, and averages of rows and columns at each resolution.

    Everything after the first wavelets has half the resolution.
    """
    with torch.device("cpu"):
        turns = [t * math.pi / _TURNS for t in range(_TURNS)]
        fine = torch.stack([_wavelet(sides, 0.8, 0.75 * math.pi, turn) for turn in turns])
        coarse = torch.stack([_wavelet(sides, 1.6, 0.375 * math.pi, turn) for turn in turns])
        averages = [_average(side, step) for step in (1, 2) for side in sides]
        return fine, _cut(coarse) / 4, *averages


def _gaussian(sides: tuple[int, int], sigma: float, slant: float, turn: float, shift: float) -> Tensor:
    """Return the spectrum of a Gaussian that is `slant` times as wide across, moved along by `shift`; periodic."""
    total = torch.zeros(sides, dtype=torch.float64)
    y, x = (2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64) for side in sides)
    for down in range(-2, 3):
        for over in range(-2, 3):
            v, h = (y + 2 * math.pi * down)[:, None], x + 2 * math.pi * over
            along, across = h * math.cos(turn) + v * math.sin(turn) - shift, v * math.cos(turn) - h * math.sin(turn)
            total += torch.exp(-(sigma**2) / 2 * (along**2 + (across * slant) ** 2))
    return total


def _wavelet(sides: tuple[int, int], sigma: float, frequency: float, turn: float) -> Tensor:
    """Return the spectrum of a Morlet wavelet, which is 0 at frequency 0."""
    wave, still = (_gaussian(sides, sigma, _TURNS / 4, turn, shift) for shift in (frequency, 0.0))
    return wave - wave[0, 0] / still[0, 0] * still


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
    """Return the means (k², C) of dead leaves' channels, and for each frequency a matrix (C, C) that whitens them.

    Both are computed in double precision and rounded, so that silos with other processors have the same bits.
    """
    maps = torch.cat([_scattered(part, keep) for part in torch.split(dead_leaves(_IMAGES, shape), 4)])
    centred = (maps - maps.mean(0)).transpose(0, 1)  # (k², images, C)
    covariance = centred.mT @ centred / _IMAGES
    variances = covariance.diagonal(dim1=1, dim2=2)
    variances.add_(_REST * variances.mean(1, keepdim=True))
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance)).mT
    centre, whiten = ((t * 2**_PLACES).round() / 2**_PLACES + 0.0 for t in (maps.mean(0), whiten))  # no -0
    return centre.float(), whiten.float()


def dead_leaves(count: int, shape: tuple[int, ...]) -> Tensor:
    """Return images (count, C, H, W) of 30 ellipses that hide each other, of mean 0 and deviation 1."""
    draw = torch.Generator().manual_seed(0)
    channels, height, width = shape

    def some(*sizes: int) -> Tensor:
        return torch.rand(count, *sizes, generator=draw).double()

    images = some(channels, 1, 1).expand(count, *shape)
    y, x = (torch.arange(side, dtype=torch.float64) + 0.5 for side in (height, width))
    for _ in range(30):
        radius = 0.06 * min(height, width) * (some(1, 1) * 35 / 36 + 1 / 36).rsqrt()  # density as r^-3
        right, down, turn = x - some(1, 1) * width, y[:, None] - some(1, 1) * height, some(1, 1) * math.pi
        along = right * turn.cos() + down * turn.sin()
        across = (down * turn.cos() - right * turn.sin()) / (0.4 + 0.6 * some(1, 1))
        cover = (radius - (along**2 + across**2).sqrt() + 0.5).clamp(0, 1)[:, None]
        colour = some(1, 1, 1) + (0.25 * (some(channels, 1, 1) - 0.5) if channels > 1 else 0)
        shade = (1 + 0.5 * (some(1, 1) - 0.5) * along / radius.clamp(min=1)).clamp(0.3, 1.7)[:, None]
        images = images * (1 - cover) + (colour.clamp(0, 1) * shade).clamp(0, 1) * cover
    return (images - 0.5) / 0.25
