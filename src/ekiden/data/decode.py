"""Decode images to uint8 tensors."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ekiden.base.checks import Checked, CountOrZero
from ekiden.base.errors import UserError
from ekiden.data import medical
from ekiden.data.raw import Raw

CHUNK = 128  # images that a thread decodes at a time
_FEW = 64  # of the 256 levels; with fewer, the values of 16-bit images fill only a small part of their range
Pixels = NDArray[np.uint8]
Room = Callable[[tuple[int, ...]], Tensor]
"""makes a uint8 tensor of this shape, whose values are written later"""


@dataclass(frozen=True)
class Images(Checked):
    """Pictures: (C, H, W) uint8. `Dataset.mean` and `std` scale them.

    Attributes:
        size: side of all images in pixels; 0 keeps their own size.
        fit: how images come to `size`. stretch: both sides are scaled to it. crop: the shorter side is scaled to it,
            then the middle is cut out.
        window: the file's values that become 0 and 255, for pixels of more than 8 bits; (): the smallest and largest
            value of the file's type.
    """

    size: CountOrZero = 0
    fit: Literal["stretch", "crop"] = "stretch"
    window: tuple[float, ...] = ()

    def encode(self, raw: Any) -> Tensor:
        """Return (n, C, H, W) uint8 for files, encoded bytes or opened images.

        Raises:
            UserError: one cannot be decoded, or they differ in size.
        """
        images = list(raw)
        return decode([[Raw("the images given", images, np.zeros(len(images), dtype=np.int64))]], self)[0]


def memory(shape: tuple[int, ...]) -> Tensor:
    """Make a tensor in memory."""
    return torch.empty(shape, dtype=torch.uint8)


def decode(sides: Sequence[Sequence[Raw]], images: Images, room: Room = memory) -> list[Tensor]:
    """Decode all images of a data set, in order.

    All get one size and one number of channels: grey images become RGB if any image is RGB, alpha is dropped, and
    16-bit grey is cut to its upper 8 bits unless there is a window.

    Args:
        sides: what the sources hold for training and, if there is a test part, for the test.
        images: how they come to one size (bilinear with antialias).
        room: makes the tensors that they are written into.

    Returns:
        For each side (n, C, H, W) uint8, C = 1 or 3.

    Raises:
        UserError: an image cannot be decoded, the images differ in size and no size is given, or 16-bit images use a
            small part of their range and no window is given.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        each = [[(raw, row) for raw in side for row in range(len(raw.images))] for side in sides]
        looks = list(pool.map(lambda item: _look(*item), chain(*each)))
        channels = max(c for c, _ in looks)
        sizes = {size for _, size in looks}
        if not images.size and len(sizes) > 1:
            some = ", ".join(f"{w}x{h}" for w, h in sorted(sizes, key=lambda size: size[::-1])[:3])
            raise UserError(
                f"images in {sides[0][0].source} differ in size ({some}): give one size for all with --size."
            )
        width, height = (images.size, images.size) if images.size else next(iter(sizes))
        out, levels = [], []
        for items in each:
            pixels = room((len(items), channels, height, width))
            chunks = [
                (items[start : start + CHUNK], pixels[start : start + CHUNK]) for start in range(0, len(items), CHUNK)
            ]
            levels += list(pool.map(lambda chunk: _chunk(chunk[0], chunk[1], images), chunks))
            out.append(pixels)
    deep = [level for level in levels if level is not None]
    if deep and max(deep) < _FEW << 8 and not images.window:
        raise UserError(
            f"images in {sides[0][0].source} have 16 bits and values up to {max(deep)} only, so that 8 bits would hold "
            f"{(max(deep) >> 8) + 1} grey levels: say which values become black and white, as in --pixel-window 0 "
            f"{max(deep)}"
        )
    return out


def _look(raw: Raw, row: int) -> tuple[int, tuple[int, int]]:
    """Return channels and size (width, height) of one image, from its header if that has them."""
    image = _opened(raw, row)
    seen = (1 if _is_grey(image) else 3), image.size
    if image is not raw.images[row]:
        image.close()
    return seen


def _chunk(items: Sequence[tuple[Raw, int]], into: Tensor, images: Images) -> int | None:
    """Write the pixels of these images, and return the largest value of those of more than 8 bits."""
    deepest = None
    for place, (raw, row) in enumerate(items):
        pixels, deep = _pixels(raw, row, images)
        deepest = deep if deepest is None else max(deepest, deep or 0)
        into[place].copy_(torch.from_numpy(pixels).permute(2, 0, 1))  # copies one grey channel into three
    return deepest


def _opened(raw: Raw, row: int) -> Image.Image:
    item = raw.images[row]
    try:
        if item is None:
            raise ValueError("no bytes")
        if isinstance(item, Image.Image):
            return item
        if medical.is_medical(item):
            return medical.image(item)
        return Image.open(BytesIO(item) if isinstance(item, bytes) else item)
    except UserError as error:
        raise UserError(f"the image in {raw.where(row)}: {error}") from error
    except Exception as error:  # the many decoders of Pillow raise errors of many kinds
        raise _broken(raw, row, error) from error


def _broken(raw: Raw, row: int, error: Exception) -> UserError:
    return UserError(f"the image in {raw.where(row)} cannot be decoded ({error}): replace or remove it")


def _pixels(raw: Raw, row: int, images: Images) -> tuple[Pixels, int | None]:
    """Return the pixels (H, W, C) of one image, and its largest value if it has more than 8 bits."""
    image = _opened(raw, row)
    try:
        plain, deep = _plain(image, images.window)
        pixels: NDArray[Any] = np.array(_sized(plain, images))
    except UserError as error:
        raise UserError(f"the image in {raw.where(row)}: {error}") from error
    except Exception as error:
        raise _broken(raw, row, error) from error
    return (pixels if pixels.ndim == 3 else pixels[:, :, None]), deep


def _sized(image: Image.Image, images: Images) -> Image.Image:
    size = images.size
    if not size or image.size == (size, size):
        return image
    box = None
    if images.fit == "crop":  # the middle square
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def _is_grey(image: Image.Image) -> bool:
    return image.mode.startswith("I") or image.mode in ("L", "1", "LA", "La", "F")


def _plain(image: Image.Image, window: tuple[float, ...]) -> tuple[Image.Image, int | None]:
    """Return the image as 8-bit grey or RGB, and its largest value if it has 16 bits."""
    if image.mode in ("L", "RGB"):
        return image, None
    deep = image.mode.startswith("I") or image.mode == "F"
    if deep and window:
        low, high = window
        scaled = (np.asarray(image).astype(np.float64) - low) * (255 / (high - low))
        return Image.fromarray(np.rint(scaled).clip(0, 255).astype(np.uint8)), None
    if image.mode == "F":
        values = np.asarray(image)
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 255 or 0 < high <= 1:
            raise UserError(
                f"its pixels go from {low:g} to {high:g}: say which values become black and white by --pixel-window "
                "LOW HIGH"
            )
    if image.mode.startswith("I"):  # 16 bits; Pillow would clip at 255 instead of scaling
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8)), int(values.max())
    return image.convert("L" if image.mode in ("1", "LA", "La", "F") else "RGB"), None
