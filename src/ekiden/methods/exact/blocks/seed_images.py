"""Images that a seed makes: the same bytes on every machine, and nobody's data.

Filters that are patches of such images answer to photographs like patches of photographs. So no
client gives pieces of its images away, and no client can choose the features of all.

A. B. Lee, D. Mumford, J. Huang: Occlusion Models for Natural Images. IJCV 2001 (dead leaves).
https://doi.org/10.1023/A:1011109015675. Manel Baradad et al.: Learning to See by Looking at Noise.
NeurIPS 2021. https://arxiv.org/abs/2106.05963 (networks that learn from dead leaves).

Departures from the papers: soft edges, shading, texture, three kinds of leaves, and every second
image has few shapes, some of them outlines, on a plain ground. All arithmetic is in whole numbers,
from a counter-based generator (Philox), so no library's rounding can matter.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Coordinates and grey levels are counted in sixteenths
SUB = 16
DEVIATION = 148  # of drawn numbers that are about normal
_TURN = 4096  # cosines are counted in 1/4096
_DIRECTIONS = 32
_LEAVES = 22  # most shapes of an image; 4 at least
_FEW = 6  # most shapes on a plain ground
# Sides in pixels of the cells of the texture's noise
_OCTAVES = (1, 2, 4, 8, 16)
# Images at a time, so that they stay in the cache
_BLOCK = 128

# Written down, because functions such as exp differ between libraries in the last bit.
_QUARTER = [4096, 4017, 3784, 3406, 2896, 2276, 1567, 799, 0]
_FALLING = [*_QUARTER, *(-cosine for cosine in _QUARTER[-2::-1])]
_COSINES = np.array([*_FALLING, *_FALLING[-2:0:-1]])
# Half sizes from 4 to 60 % of an image's side in equal ratios, in 1/4096 of the side.
_HALF_SIZES = np.array([164, 197, 236, 282, 338, 405, 485, 581, 696, 834, 999, 1197, 1434, 1718])
_ASPECTS = np.array([614, 778, 985, 1247, 1579, 2000, 2533, 3207, 4061])  # 0.15 to 1, in 1/4096
# Weights of the octaves, finest first, for spectra that fall as f^-0.8, f^-1.2 and f^-1.6.
_SPECTRA = np.array([[5, 5, 6, 6, 7], [2, 3, 5, 8, 12], [1, 2, 4, 8, 16]])


class Draws:
    """Random whole numbers for many images: those of an image do not depend on how many follow."""

    def __init__(self, count: int, each: int, seed: int) -> None:
        raw = np.random.Philox(key=seed % 2**64).random_raw(count * each)
        self._raw = (raw >> np.uint64(32)).astype(np.int64).reshape(count, each)
        self._next = 0

    def below(self, bound: int, many: int = 1) -> Ints:
        """(n, many) numbers from 0 to `bound` - 1."""
        part = self._raw[:, self._next : self._next + many]
        self._next += many
        return part * bound >> 32

    def normal(self, many: int = 1) -> Ints:
        """(n, many) sums of four bytes minus their mean: about normal, with `DEVIATION`."""
        total: Ints = self.below(256, 4 * many).reshape(len(self._raw), many, 4).sum(2)
        return total - 510


class _Shapes(NamedTuple):
    """One shape of each image; lengths in sixteenths of a pixel."""

    x: Ints  # (n, side, side) coordinates in the shape's own frame
    y: Ints
    half: Ints  # (n, 1, 1) half its length
    width: Ints  # (n, 1, 1) half its width
    kind: Ints  # (n, 1, 1) 0 ellipse, 1 rectangle, 2 triangle

    def inside(self) -> Ints:
        """(n, side, side) how far each pixel lies inside; negative outside."""
        across = np.abs(self.x)
        down = np.abs(self.y)
        squares = (across * 256 // self.half) ** 2 + (down * 256 // self.width) ** 2
        # Roots of whole numbers below 2^52 are rounded right on every machine.
        root = np.sqrt(np.minimum(squares, 2**50).astype(np.float64)).astype(np.int64)
        ellipse = (256 - root) * self.width // 256
        rectangle = np.minimum(self.half - across, self.width - down)
        triangle = np.minimum(self.y + self.width, self.half - self.y - across * 6 // 5)
        found: Ints = np.choose(self.kind, [ellipse, rectangle, triangle])
        return found


def seed_images(count: int, channels: int, side: int, seed: int) -> NDArray[np.uint8]:
    """Make images of shapes that cover each other.

    Args:
        count: n; the first images are the same for every n.
        channels: C.
        side: height and width in pixels.
        seed: decides everything.

    Returns:
        (n, C, side, side) bytes.
    """
    cells = sum((side // step + 2) ** 2 for step in _OCTAVES)
    each = 64 + 14 * channels + _LEAVES * (24 + 4 * channels) + 2 * cells
    draws = Draws(count, each, seed)
    scene = _Scene(draws, count, channels, side)
    blocks = [scene.block(slice(i, i + _BLOCK)) for i in range(0, count, _BLOCK)]
    return np.concatenate(blocks)


class _Scene:
    """What is drawn for each image, before anything is painted."""

    def __init__(self, draws: Draws, count: int, channels: int, side: int) -> None:
        self.side = side
        self.channels = channels
        self.plain = np.arange(count)[:, None] % 2 == 1
        white = self.plain & (draws.below(2) == 0)
        base = 40 + draws.below(176)
        grey = self.plain & (draws.below(5) < 2)
        self.hue = np.where(grey, 0, 35)  # percent of the spread that a channel has of its own
        ground = base + self._colour(draws, 45)
        self.ground = np.where(white, 255, ground)
        self.base = np.where(self.plain, draws.below(256), base)
        few = 1 + draws.below(_FEW)
        many = 4 + draws.below(_LEAVES - 3)
        self.shapes = np.where(self.plain, few, many)
        self.slope = np.where(self.plain, 0, draws.normal() * 10 // 148)  # in levels over the image
        self.direction = draws.below(_DIRECTIONS)
        size = side * SUB
        spread = side * SUB * 3 // 10
        self.centre = size // 2 + draws.normal(2 * _LEAVES) * spread // DEVIATION
        self.turn = draws.below(_DIRECTIONS, _LEAVES)
        self.half = _HALF_SIZES[draws.below(len(_HALF_SIZES), _LEAVES)] * size // 4096 + 4
        aspect = _ASPECTS[draws.below(len(_ASPECTS), _LEAVES)]
        self.width = self.half * aspect // 4096 + 4
        self.kind = draws.below(3, _LEAVES)
        self.soft = 11 + draws.below(22, _LEAVES)  # 256 over the width of the edge
        outlined = self.plain & (draws.below(5, _LEAVES) < 3)
        stroke = SUB * side * (2 + draws.below(7, _LEAVES)) // 256
        self.stroke = np.where(outlined, stroke + 8, 0)  # half the thickness of an outline
        self.shade = draws.normal(_LEAVES) * 16 // DEVIATION
        self.colours = [self.base + self._colour(draws, 50) for _ in range(_LEAVES)]
        self.spectrum = _SPECTRA[draws.below(len(_SPECTRA))[:, 0]]
        strength = np.abs(draws.normal())
        self.strength = np.where(self.plain, 0, strength)
        self.noise = [
            draws.below(256, (side // step + 2) ** 2).astype(np.int16) - 128 for step in _OCTAVES
        ]

    def _colour(self, draws: Draws, spread: int) -> Ints:
        """(n, C) how far a colour lies from the base: together, and each channel by its own."""
        together = draws.normal()
        own = draws.normal(self.channels)
        return (together + own * self.hue // 100) * spread // DEVIATION

    def block(self, some: slice) -> NDArray[np.uint8]:
        """Paint these images."""
        rows = np.arange(self.side, dtype=np.int64) * SUB + SUB // 2
        x = rows[None, None, :]
        y = rows[None, :, None]
        middle = self.side * SUB // 2
        along = self._turned(self.direction[some, 0], x - middle, y - middle)[0]
        slope = self.slope[some, :, None]
        image = self.ground[some, :, None, None] * SUB + (slope * along // self.side)[:, None]
        for k in range(_LEAVES):
            centre = self.centre[some, 2 * k : 2 * k + 2]
            dx = x - centre[:, :1, None]
            dy = y - centre[:, 1:, None]
            shape = _Shapes(
                *self._turned(self.turn[some, k], dx, dy),
                self.half[some, k, None, None],
                self.width[some, k, None, None],
                self.kind[some, k, None, None],
            )
            inside = shape.inside()
            stroke = self.stroke[some, k, None, None]
            inside = np.where(stroke > 0, stroke - np.abs(inside), inside)
            cover = np.clip(128 + inside * self.soft[some, k, None, None], 0, 256)
            cover *= (self.shapes[some] > k)[:, :, None]
            shade = self.shade[some, k, None, None] * shape.x * SUB // shape.half
            colour = self.colours[k][some, :, None, None] * SUB + shade[:, None]
            image += (colour - image) * cover[:, None] >> 8
        image += self._texture(some)[:, None]
        return np.clip(image // SUB, 0, 255).astype(np.uint8)

    @staticmethod
    def _turned(direction: Ints, x: Ints, y: Ints) -> tuple[Ints, Ints]:
        """Coordinates after a turn."""
        cosine = _COSINES[direction][:, None, None]
        sine = _COSINES[direction - _DIRECTIONS // 4][:, None, None]
        return (x * cosine + y * sine) // _TURN, (y * cosine - x * sine) // _TURN

    def _texture(self, some: slice) -> Ints:
        """(b, side, side) noise of several octaves, in sixteenths of a level."""
        total: Ints = np.zeros((1, self.side, self.side), np.int64)
        for octave, step in enumerate(_OCTAVES):
            wide = self.side // step + 2
            grid = self.noise[octave][some].astype(np.int64).reshape(-1, wide, wide)
            cell = np.arange(self.side) // step
            part = np.arange(self.side) % step
            down = grid[:, cell] * (step - part)[:, None] + grid[:, cell + 1] * part[:, None]
            smooth = down[:, :, cell] * (step - part) + down[:, :, cell + 1] * part
            weight = self.spectrum[some, octave, None, None]
            total = total + smooth // step**2 * weight
        # A weighted noise has a deviation of about 1,000; a strength of 148 means 10 levels.
        return total * self.strength[some, :, None] * (10 * SUB) // (DEVIATION * 1000)
