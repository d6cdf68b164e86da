"""Filters for patch features, from the images of one client or from sums over all clients."""

from math import isqrt
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ekiden.base.errors import UserError

CONTRAST = 10
"""added to the variance of a patch (bytes squared), so that flat patches stay small"""
WHITENING = 0.1
"""added to the eigenvalues of the patches' covariance"""
USUAL = 0.9
"""correlation of neighbouring pixels, and of the channels of a pixel, in usual images"""
SAMPLE = 20_000
"""largest number of patches on which the whitening is measured"""
_UNIT = 32  # contrast-normalised pixels are counted in 1/32 for sums that are exact
_REACH = 32_896  # most Σ|q| of a filter: 255·Σ|q| < 2^23 keeps sums exact, which may count in halves


class Dictionary(NamedTuple):
    """Filters of one size, ready to travel.

    Attributes:
        filters: (F, C, p, p) int8 q; each sums to zero, so that the mean of a patch drops out.
        gain: (F,) float32 s; q/s is the filter that gives whitened responses.
    """

    filters: Tensor
    gain: Tensor


class PatchSums(NamedTuple):
    """Second moments of all clients' patches. They are integers, so the order and split of the images do not matter.

    Attributes:
        patches: () int64, their number.
        gram: (d, d) int64 Σ vvᵀ over contrast-normalised patches v in 1/32, d = C·p·p.
    """

    patches: Tensor
    gram: Tensor

    def plus(self, other: "PatchSums") -> "PatchSums":
        """Return the sums over the patches of both."""
        if self.gram.shape != other.gram.shape:
            raise UserError(
                f"patches of {len(self.gram)} and {len(other.gram)} numbers cannot be added: use the same patch size "
                "and images with the same channels at every client"
            )
        return PatchSums(self.patches + other.patches, self.gram + other.gram)


def measure_patches(images: Tensor, size: int = 6) -> PatchSums:
    """Sum vvᵀ over patches v at each `size // 2` pixels.

    Args:
        images: (n, C, H, W) uint8.
        size: p, side of the patches in pixels.
    """
    _check(images, size)
    step = max(1, size // 2)
    d = images.shape[1] * size * size
    count, gram = 0, torch.zeros(d, d, dtype=torch.int64)
    for block in torch.split(images, 64):
        windows = block.unfold(2, size, step).unfold(3, size, step).permute(0, 2, 3, 1, 4, 5)
        v = (_normalised(windows.reshape(-1, d)) * _UNIT).round_()
        count += len(v)
        gram += (v.T @ v).long()  # integers below 2^53: exact
    return PatchSums(torch.tensor(count), gram)


def from_images(images: Tensor, count: int, generator: Generator, size: int = 6) -> Dictionary:
    """Make filters of patches drawn from `images`; they show what these patches look like.

    Flat patches make no filter. If too few others are drawn, random directions fill up.

    Args:
        images: (n, C, H, W) uint8 images of one client.
        count: F, number of filters.
        generator: on the CPU; decides which patches are drawn.
        size: p, side of the patches in pixels.
    """
    _check(images, size)
    if not len(images):
        raise UserError("there are no images to draw patches from: begin with a client that has images")
    n, channels, height, width = images.shape
    rows, columns = height - size + 1, width - size + 1
    places = torch.randint(n * rows * columns, (SAMPLE,), generator=generator)
    patches = _at(images, places, size)
    whitening = _whitening(patches.T @ patches / len(patches))

    spread = patches.square().mean(1)  # v/(v + 10), v the variance of the bytes
    textured = patches[spread > 0.5][:count]
    directions = torch.cat(
        [textured @ whitening, torch.randn(count, channels * size * size, generator=generator, dtype=torch.float64)]
    )[:count]
    return _quantised(directions, whitening, (channels, size, size))


def from_sums(sums: PatchSums, count: int, generator: Generator, channels: int) -> Dictionary:
    """Make filters of random directions among whitened patches: no patch travels.

    Args:
        sums: of all clients.
        count: F, number of filters.
        generator: on the CPU; decides the directions.
        channels: C of the images.
    """
    if not sums.patches:
        raise UserError("there are no images to measure patches on: let a client with images take part")
    d = len(sums.gram)
    size = round((d / channels) ** 0.5)
    whitening = _whitening(sums.gram.double() / (_UNIT**2 * float(sums.patches)))
    directions = torch.randn(count, d, generator=generator, dtype=torch.float64)
    return _quantised(directions, whitening, (channels, size, size))


def usual_filters(count: int, generator: Generator, channels: int, size: int) -> Dictionary:
    """Make filters of random directions among whitened patches of usual images: they depend on no image.

    Args:
        count: F, number of filters.
        generator: on the CPU; decides the directions.
        channels: C of the images.
        size: p, side of the patches in pixels.
    """
    at = torch.stack(torch.meshgrid(*[torch.arange(size, dtype=torch.float64)] * 2, indexing="ij")).flatten(1)
    apart = (at[:, :, None] - at[:, None]).square().sum(0).sqrt()
    colours = torch.full((channels, channels), USUAL, dtype=torch.float64).fill_diagonal_(1)
    moments = torch.kron(colours, USUAL**apart)
    centring = torch.eye(len(moments), dtype=torch.float64) - 1 / len(moments)
    moments = centring @ moments @ centring
    whitening = _whitening(moments * (len(moments) / moments.trace()))
    directions = torch.randn(count, len(moments), generator=generator, dtype=torch.float64)
    return _quantised(directions, whitening, (channels, size, size))


def _check(images: Tensor, size: int) -> None:
    if images.ndim != 4 or images.dtype != torch.uint8:
        raise UserError(
            f"patch features need images as bytes (n, channels, height, width), but these are {images.dtype} of "
            f"shape {tuple(images.shape[1:])}: choose features for vectors, or give images as bytes"
        )
    most = isqrt(_REACH // 2 // images.shape[1])
    if not 2 <= size <= most:
        raise UserError(f"patches of {size}x{size} pixels are out of range: choose a size from 2 to {most}")
    if min(images.shape[2:]) < size:
        height, width = images.shape[2:]
        raise UserError(
            f"images of {height}x{width} pixels are smaller than patches of {size}x{size}: choose smaller patches"
        )


def _at(images: Tensor, places: Tensor, size: int) -> Tensor:
    """(k, d) float64 contrast-normalised patches at `places`, which count over images, rows and columns."""
    _, channels, height, width = images.shape
    rows, columns = height - size + 1, width - size + 1
    image, y, x = places // (rows * columns), places // columns % rows, places % columns
    offset = torch.arange(size)
    y, x = (y[:, None] + offset)[:, None, :, None], (x[:, None] + offset)[:, None, None, :]
    patches = images[image[:, None, None, None], torch.arange(channels)[:, None, None], y, x]
    return _normalised(patches.flatten(1))


def _normalised(patches: Tensor) -> Tensor:
    """(k, d) float64 patches minus their means, over the root of their variance + `CONTRAST`."""
    v = patches.double()
    v -= v.mean(1, keepdim=True)
    return v.div_((v.square().mean(1, keepdim=True) + CONTRAST).sqrt_())


def _whitening(moments: Tensor) -> Tensor:
    """(d, d) symmetric W = V(Λ + 0.1)^(-1/2)Vᵀ (ZCA)."""
    values, vectors = torch.linalg.eigh(moments)
    whitening: Tensor = (vectors / (values.clamp(min=0) + WHITENING).sqrt()) @ vectors.T
    return whitening


def _quantised(directions: Tensor, whitening: Tensor, shape: tuple[int, int, int]) -> Dictionary:
    """Filters W·d/|d| minus their means, as int8 that sum to exactly zero."""
    folded = (directions / directions.norm(dim=1, keepdim=True)) @ whitening
    folded -= folded.mean(1, keepdim=True)
    reach = _REACH - folded.shape[1]  # rounding moves each entry by one at most
    gain = torch.minimum(127 / folded.abs().amax(1), reach / folded.abs().sum(1))
    scaled = folded * gain[:, None]
    filters = _balanced(scaled).to(torch.int8)
    return Dictionary(filters.view(-1, *shape), gain.float())


def _balanced(wanted: Tensor) -> Tensor:
    """Return `wanted` (F, d) as whole numbers that sum to 0 too; those rounded the farthest move by one."""
    q = wanted.round()
    surplus = q.sum(1, keepdim=True)
    step = surplus.sign()
    error = ((q - wanted) * step).masked_fill_((q - step).abs() > 127, -1)  # no int8 otherwise
    rank = error.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return q - step * (rank < surplus.abs())
