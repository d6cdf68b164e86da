"""Features of image patches: small integers that are the same on every machine; and how their
filters are chosen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import ceil, erf, exp, isqrt, log2, pi, sqrt
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from ekiden.core.base.errors import UserError
from ekiden.methods.exact.blocks.seed_images import seed_images

# Added to the variance of a patch (bytes squared), so that flat patches stay small
CONTRAST = 10
# Added to the eigenvalues of the patches' covariance
WHITENING = 0.1
# Images of the seed, of which patches become filters
_IMAGES = 1000
_SIDE = 32  # of these images, in pixels
# Largest number of patches on which the whitening is measured
SAMPLE = 20_000
# most Σ|q| of a filter: 255·Σ|q| < 2^23 keeps sums exact, which may count in halves
_REACH = 32_896
LEVELS = 127  # largest value of a feature: seven bits
_BLOCK = 8  # images at a time; on a GPU 16 times that
# Responses at a time, so that they stay in the cache; on a GPU 256 times that
_CHUNK = 2**18
# The most that a position counts in bilinear pooling
_WEIGHTS = 4


class Dictionary(NamedTuple):
    """Filters of one size, ready to travel."""

    filters: Tensor  # (F, C, p, p) int8 q; each sums to zero, so that the mean of a patch drops out
    gain: Tensor  # (F,) float32 s; q/s is the filter that gives whitened responses


def from_images(images: Tensor, count: int, generator: Generator, size: int = 6) -> Dictionary:
    """Make filters of patches drawn from `images`; they show what these patches look like.

    Flat patches make no filter. If too few others are drawn, random directions fill up.

    Args:
        images: (n, C, H, W) uint8 images of one client.
        count: F, number of filters.
        generator: on the CPU; decides which patches are drawn.
        size: p, side of the patches in pixels.
    """
    n, channels, height, width = images.shape
    rows = height - size + 1
    columns = width - size + 1
    places = torch.randint(n * rows * columns, (SAMPLE,), generator=generator)
    pixels = _at(images, places, size)
    patches = _normalised(pixels)
    d = pixels.shape[1]
    whitening = _whitening(patches.T @ patches / len(patches))
    # Whether the variance of the bytes is above `CONTRAST`, in whole numbers: no library decides.
    spread = pixels.square().sum(1) * d - pixels.sum(1).square()
    textured = patches[spread > CONTRAST * d * d][:count]
    directions = torch.cat(
        [
            textured @ whitening,
            torch.randn(count, channels * size * size, generator=generator, dtype=torch.float64),
        ]
    )[:count]
    return _quantised(directions, whitening, (channels, size, size))


# A run builds its network many times: a silo, for one, with each message.
@lru_cache(maxsize=8)
def _filters_of_seed(
    channels: int, sizes: tuple[tuple[int, int], ...], seed: int
) -> list[Dictionary]:
    """Return filters that are patches of images of the seed; `sizes` are F and p of each
    dictionary.
    """
    drawn = Generator().manual_seed(seed)
    images = _images_of_seed(channels, max(_SIDE, *(size for _, size in sizes)), seed)
    return [from_images(images, count, drawn, size) for count, size in sizes]


@lru_cache(maxsize=8)
def _images_of_seed(channels: int, side: int, seed: int) -> Tensor:
    return torch.from_numpy(seed_images(_IMAGES, channels, side, seed))


def _at(images: Tensor, places: Tensor, size: int) -> Tensor:
    """(k, d) float64 bytes of patches at `places`, which count over images, rows and columns."""
    _, channels, height, width = images.shape
    rows = height - size + 1
    columns = width - size + 1
    image = places // (rows * columns)
    y = places // columns % rows
    x = places % columns
    offset = torch.arange(size)
    y = (y[:, None] + offset)[:, None, :, None]
    x = (x[:, None] + offset)[:, None, None, :]
    image = image[:, None, None, None]
    patches = images[image, torch.arange(channels)[:, None, None], y, x]
    return patches.flatten(1).double()


def _normalised(patches: Tensor) -> Tensor:
    """(k, d) float64 patches minus their means, over the root of their variance + `CONTRAST`."""
    v = patches.double()
    v = v - v.mean(1, keepdim=True)
    variance = v.square().mean(1, keepdim=True)
    return v.div_((variance + CONTRAST).sqrt_())


def _whitening(moments: Tensor) -> Tensor:
    """(d, d) symmetric W = V(Λ + 0.1)^(-1/2)Vᵀ (ZCA)."""
    values, vectors = torch.linalg.eigh(moments)
    roots = (values.clamp(min=0) + WHITENING).sqrt()
    whitening: Tensor = (vectors / roots) @ vectors.T
    return whitening


def _quantised(directions: Tensor, whitening: Tensor, shape: tuple[int, int, int]) -> Dictionary:
    """Filters W·d/|d| minus their means, as int8 that sum to exactly zero."""
    folded = (directions / directions.norm(dim=1, keepdim=True)) @ whitening
    folded -= folded.mean(1, keepdim=True)
    # Rounding moves each entry by one at most.
    reach = _REACH - folded.shape[1]
    sizes = folded.abs()
    gain = torch.minimum(127 / sizes.amax(1), reach / sizes.sum(1))
    scaled = folded * gain[:, None]
    filters = _balanced(scaled).to(torch.int8)
    return Dictionary(filters.view(-1, *shape), gain.float())


def _balanced(wanted: Tensor) -> Tensor:
    """Return `wanted` (F, d) as whole numbers that sum to 0 too; those rounded the farthest move by
    one.
    """
    q = wanted.round()
    surplus = q.sum(1, keepdim=True)
    step = surplus.sign()
    # A step beyond 127 would not fit into int8.
    error = ((q - wanted) * step).masked_fill_((q - step).abs() > 127, -1)
    rank = error.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return q - step * (rank < surplus.abs())


@dataclass(frozen=True)
class Pooling:
    """How responses become features."""

    pool: int = 2  # g; responses are pooled in g x g regions
    mirror: bool = True  # average with the features of the mirror image
    threshold: float = 0.5  # t, of the soft threshold
    root: bool = True  # take the square root of the pooled responses
    bilinear: bool = False  # let regions overlap, and positions near their centres count more


USUAL_POOLING = Pooling()


class Patches(nn.Module):
    """Pooled responses, of both signs, of images and their mirror images to a dictionary of
    patches.

    Adam Coates, Andrew Y. Ng: The Importance of Encoding Versus Training with Sparse Coding and
    Vector Quantization. ICML 2011. https://icml.cc/Conferences/2011/papers/485_icmlpaper.pdf

    Departures from the paper: bytes times int8 filters, rounded responses and seven-bit features,
    so that no sum is ever rounded and the order of adding does not matter; each image is averaged
    with its mirror image; square roots of the pooled responses.

    A response is v = ⌊unit·(q·x)/√(σ² + 10)⌉, with the standard deviation σ of the patch x; with q
    = s·f and the threshold t, max(±v - T, 0) with T = ⌊unit·s·t⌉ is summed over each of g x g
    regions. Neighbouring regions share a row or column where the positions do not divide evenly.
    With bilinear pooling each position counts in the regions whose centres are nearest, the more
    the nearer it is, in whole quarters along rows and along columns. A feature is 127 times this
    sum (or its root) over `scale`, rounded and at most 127.
    """

    filters: Tensor
    gain: Tensor
    mean: Tensor
    std: Tensor
    # (D,) float32, the largest sums (or roots) at the client that measured them, or usual ones
    scale: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: Sequence[tuple[int, int]],
        how: Pooling = USUAL_POOLING,
    ) -> None:
        """Prepare for images of `shape`.

        Args:
            shape: (C, H, W).
            sizes: F and p of each dictionary, number and side of its filters.
            how: responses become features.
        """
        super().__init__()
        if len(shape) != 3:
            raise UserError(
                "patch features need images (channels, height, width), these samples have shape "
                f"{shape}"
            )
        channels, height, width = shape
        most = isqrt(_REACH // 2 // channels)
        for _, size in sizes:
            if not 2 <= size <= most:
                raise UserError(
                    f"patches of {size}x{size} pixels are out of range: choose a size from 2 to "
                    f"{most}"
                )
            if min(height, width) < size + how.pool - 1:
                raise UserError(
                    f"patches of {size}x{size} in {how.pool}x{how.pool} regions do not fit images "
                    f"of {height}x{width}: choose smaller patches"
                )
        self.shape = shape
        self.sizes = tuple(sizes)
        self.how = how
        count = sum(count for count, _ in sizes)
        # D = 2·g²·F, number of features, ordered by filter, sign, row and column.
        self.width = 2 * how.pool**2 * count
        pixels = sum(count * size**2 for count, size in sizes)
        self.register_buffer("filters", torch.zeros(channels * pixels))
        self.register_buffer("gain", torch.zeros(count))
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("std", torch.ones(channels, 1, 1))
        self.register_buffer("scale", torch.ones(self.width))

    def take(self, dictionaries: Sequence[Dictionary]) -> None:
        """Take filters, one dictionary for each size."""
        self.filters.copy_(torch.cat([d.filters.flatten() for d in dictionaries]))
        self.gain.copy_(torch.cat([d.gain for d in dictionaries]))

    def fix(self, seed: int, reach: float) -> None:
        """Take filters and scales by the seed alone.

        Filters are patches of images that the seed makes. Whitened responses to patches with
        texture are about normal, and a scale is `reach` times what they then add up to in a region.
        """
        # A silo asks for the shapes with each message.
        if self.gain.is_meta:
            return
        self.take(_filters_of_seed(self.shape[0], self.sizes, seed))
        self.scale.copy_(self.usual_sums() * reach)

    def forward(self, x: Tensor) -> Tensor:
        """(b, D) float32 features, integers from 0 to 127, of (b, C, H, W) normalised floats or
        bytes.
        """
        sums = self.sums(x)
        return sums.mul_(LEVELS / self.scale).round_().clamp_(max=LEVELS)

    @torch.no_grad()
    def sums(self, x: Tensor) -> Tensor:
        """(b, D) float32 pooled responses (or their roots) before they are scaled to seven bits."""
        if torch.get_float32_matmul_precision() != "highest":
            raise UserError(
                "patch features are sums of integers that float32 must hold exactly: "
                'call torch.set_float32_matmul_precision("highest")'
            )
        out = x.new_empty(len(x), self.width, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            banks = list(self._banks())
            some = _BLOCK
            if x.device.type != "cpu":
                some *= 16
            for start in range(0, len(x), some):
                block = self.bytes(x[start : start + some])
                # Images last: all sums run over them.
                pixels = block.permute(1, 2, 3, 0).contiguous()
                pooled = [self._pooled(pixels, bank) for bank in banks]
                out[start : start + some] = torch.cat([part.flatten(0, 3) for part in pooled]).T
        return self._rooted(out)

    def _rooted(self, sums: Tensor) -> Tensor:
        """Return the roots of sums, or these themselves."""
        if not self.how.root:
            return sums
        # A double's root rounds right, see the tests.
        return sums.double().sqrt_().float()

    def usual_sums(self) -> Tensor:
        """(D,) what `sums` gives on average for whitened responses that are normal."""
        t = self.how.threshold
        # E max(z - t, 0).
        density = exp(-t * t / 2) / sqrt(2 * pi)
        above = density - t * (1 - erf(t / sqrt(2))) / 2
        parts = []
        first = 0
        for count, size in self.sizes:
            rows, columns = (self._regions(side - size + 1) for side in self.shape[1:])
            area = rows.sum(1)[:, None] * columns.sum(1)
            unit = _unit(self.shape[0] * size**2, int(area.max()))
            usual = above * unit * (1 + self.how.mirror)
            each = self.gain[first : first + count, None, None, None] * usual
            parts.append((each * area).expand(count, 2, *area.shape).flatten())
            first += count
        return self._rooted(torch.cat(parts).clamp(min=1))

    def scale_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Take what was subtracted from each channel of the images, and what they were divided
        by.
        """
        for buffer, values in ((self.mean, mean), (self.std, std)):
            given = torch.tensor(values, device=buffer.device).view(-1, 1, 1)
            buffer.copy_(given.expand_as(buffer))

    def bytes(self, x: Tensor) -> Tensor:
        """Float32 bytes 0 to 255 of normalised inputs, the nearest of what is beyond; bytes stay as
        they are.
        """
        if x.dtype == torch.uint8:
            return x.float()
        return (x.float() * self.std).add_(self.mean).mul_(255).round_().clamp_(0, 255)

    def _banks(self) -> Iterator["_Bank"]:
        """What the forward pass needs of each patch size."""
        channels, height, width = self.shape
        first = 0
        start = 0
        for count, size in self.sizes:
            depth = channels * size**2
            q = self.filters[start : start + count * depth].view(count, channels, size, size)
            rows = self._regions(height - size + 1).to(q)
            columns = self._regions(width - size + 1).to(q)
            area = rows.sum(1)[:, None] * columns.sum(1)
            unit = _unit(depth, int(area.max()))
            # No response is larger than this.
            most = LEVELS * depth * unit
            thresholds = (
                (self.gain[first : first + count] * (self.how.threshold * unit))
                .round_()
                .clamp_(max=most)
            )
            # By column, row and channel, as `_folded` has the pixels
            q = q.permute(0, 3, 2, 1)
            yield _Bank(size, _halves(q), thresholds[:, None], unit, rows, columns, area)
            first = first + count
            start = start + count * depth

    def _regions(self, positions: int) -> Tensor:
        """(pool, positions) how much each position counts."""
        if self.how.bilinear:
            return _bilinear(positions, self.how.pool)
        return _regions(positions, self.how.pool)

    def _pooled(self, pixels: Tensor, bank: "_Bank") -> Tensor:
        """(F, 2, g, g, b) sums of max(v - T, 0) and max(-v - T, 0) over regions, pixels (C, H, W,
        b).
        """
        inverse = _inverse_contrast(pixels, bank.size)
        height, width, b = inverse.shape
        g = self.how.pool
        inverse = (inverse * bank.unit).float().view(-1)
        read = _folded(pixels, bank.size)
        count = len(bank.thresholds)
        out = pixels.new_empty(count, 2, g, g, b)
        room = _CHUNK
        if pixels.device.type != "cpu":
            room *= 256
        faces = 1 + self.how.mirror
        step = max(1, room // (faces * len(inverse)))
        for first in range(0, count, step):
            chunk = slice(first, first + step)
            even, odd = bank.parts
            v, spare = self._responses((even[chunk], odd[chunk]), read)
            v.mul_(inverse).round_()
            t = bank.thresholds[chunk]
            shape = v.shape[:2]
            for sign, clip, bound in ((0, torch.maximum, t), (1, torch.minimum, -t)):
                clip(v, bound, out=spare)
                lines = bank.rows @ spare.view(-1, height, width * b)
                sums = (bank.columns @ lines.view(-1, width, b)).view(*shape, g, g, b)
                # The sums of the mirror image run from right to left.
                if self.how.mirror:
                    torch.add(sums[0], sums[1].flip(2), out=out[chunk, sign])
                else:
                    out[chunk, sign] = sums[0]
        out[:, 1].neg_()
        clipped = faces * bank.area * bank.thresholds[:, :, None]
        return out.sub_(clipped[:, None, :, :, None])

    def _responses(
        self, parts: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(faces, F, positions) products with the image and, if wanted, with its mirror image from
        right to left; and room.
        """
        faces = 1 + self.how.mirror
        products = parts[0].new_empty(faces, len(parts[0]), read[0].shape[1])
        room = torch.empty_like(products)
        torch.mm(parts[0], read[0], out=products[0])
        if not self.how.mirror:
            torch.addmm(products[0], parts[1], read[1], out=room[0])
            return room, products
        torch.mm(parts[1], read[1], out=products[1])
        torch.add(products[0], products[1], out=room[0])
        torch.sub(products[0], products[1], out=room[1])
        return room, products


class _Bank(NamedTuple):
    """Filters of one size as the forward pass needs them."""

    size: int  # p
    parts: tuple[Tensor, Tensor]  # (F, ·) even and odd parts of the filters
    thresholds: Tensor  # (F, 1) T
    unit: float  # of the responses
    # (g, height) 1 where a region has a row of positions, or how much the row counts there
    rows: Tensor
    columns: Tensor  # (g, width) the same for columns
    area: Tensor  # (g, g) positions in each region, or the sum of what they count


def _unit(depth: int, positions: int) -> float:
    """A power of two, at most 1, with which sums over a region's positions stay below 2^24 whatever
    the images.

    |q·x|/σ ≤ |q|·√d ≤ 127·d, and the mirror image counts too.
    """
    return 2.0 ** min(0, 24 - ceil(log2(2 * 127 * depth * positions) + 1e-9))


def _regions(positions: int, pool: int) -> Tensor:
    """(pool, positions) 1 where a region has a position; as equal as can be, and the same from both
    ends.
    """
    out = torch.zeros(pool, positions)
    for i in range(pool):
        out[i, i * positions // pool : -(-(i + 1) * positions // pool)] = 1
    return out


def _bilinear(positions: int, pool: int) -> Tensor:
    """(pool, positions) whole numbers up to `_WEIGHTS`, the larger the nearer to the region's
    centre.

    0 at the centres of its neighbours; the outermost centres count fully, and so does what is
    beyond them.
    """
    at = 2 * torch.arange(positions) + 1
    centre = (2 * torch.arange(pool) + 1)[:, None]
    # 2·pool times the distance; 2·positions to the next centre
    far = pool * at - positions * centre
    far[0].clamp_(min=0)
    far[-1].clamp_(max=0)
    near = (2 * positions - far.abs()).clamp(min=0)
    return ((_WEIGHTS * near + positions) // (2 * positions)).float()


def _inverse_contrast(pixels: Tensor, size: int) -> Tensor:
    """(rows, columns, b) float64 1/√(σ² + 10) of the patches at each position.

    With the exact sums s and r of a patch's d bytes and of their squares, 16·d/⌊16·√(d·r - s² +
    10·d²)⌋. The integer part is there because libraries differ in the last bit of a root.
    """
    d = len(pixels) * size**2
    # Sums of squares of bytes must be exact: in float32 they are up to 2^24.
    x = pixels
    if 255**2 * d >= 2**24:
        x = pixels.double()
    both = torch.stack([x.sum(0), x.square().sum(0)])
    for axis in (1, 2):
        length = both.shape[axis] - size + 1
        both = reduce(torch.add, (both.narrow(axis, i, length) for i in range(size)))
    both = both.double()
    squared = (both[1] * d - both[0].square() + CONTRAST * d * d) * 256
    root = squared.sqrt().round_()
    root -= (root.square() > squared).double()
    return 16 * d / root


def _folded(pixels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums and differences of pixels in columns j and p-1-j of each patch, (·, positions·b) by
    column, row and channel of the patch.

    A filter is an even part plus an odd part; its mirror image is the even part minus the odd part.
    So two products of half the depth give the responses of an image and of its mirror image.
    """
    # (p, C, rows, W, b) view: row i of the patch at each position
    windows = pixels.unfold(1, size, 1).permute(4, 0, 1, 2, 3)
    columns = pixels.shape[2] - size + 1
    shape = (*windows.shape[:3], columns, windows.shape[4])
    even = pixels.new_empty(-(-size // 2), *shape)
    odd = pixels.new_empty(size // 2, *shape)
    for j in range(size // 2):
        k = size - 1 - j
        left = windows[:, :, :, j : j + columns]
        right = windows[:, :, :, k : k + columns]
        torch.add(left, right, out=even[j])
        torch.sub(left, right, out=odd[j])
    if size % 2:
        even[-1] = windows[:, :, :, size // 2 : size // 2 + columns]
    return even.flatten(3).flatten(0, 2), odd.flatten(3).flatten(0, 2)


def _halves(q: Tensor) -> tuple[Tensor, Tensor]:
    """The even and odd part of filters (F, p, p, C), half of the columns each, as `_folded` has the
    pixels.
    """
    size = q.shape[1]
    mirrored = q.flip(1)
    # Halves of whole numbers are exact in float32, too.
    even = (q + mirrored) / 2
    odd = (q - mirrored) / 2
    half = size // 2
    return even[:, : half + size % 2].flatten(1), odd[:, :half].flatten(1)
