"""From encoded images to one uint8 tensor."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.files import Raw

CHUNK = 512  # images a thread decodes at a time
Pixels = NDArray[np.uint8]


def decode(parts: Sequence[Raw], size: int | None) -> list[Tensor]:
    """Decode all images of a data set, in order.

    All come out with one size and one number of channels: grey images become RGB if any image is RGB,
    alpha is dropped, 16-bit grey is cut to its upper 8 bits.

    Args:
        parts: training part and, if there is one, test part.
        size: side in pixels that images are resized to (bilinear with antialias), or None to keep theirs.

    Returns:
        For each part (n, C, H, W) uint8, C = 1 or 3.

    Raises:
        UserError: an image cannot be decoded, or `size` is None and the images differ in size.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        decoded = [
            list(pool.map(lambda start, part=p: _chunk(part, start, size), range(0, len(p.images), CHUNK)))
            for p in parts
        ]
    chunks = [c for part in decoded for c in part]
    _check_same({c.shape[1:3] for c in chunks}, parts[0].source)
    channels = max(c.shape[3] for c in chunks)
    return [_join(part, channels) for part in decoded]


def _join(chunks: list[Pixels], channels: int) -> Tensor:
    n, (height, width) = sum(map(len, chunks)), chunks[0].shape[1:3]
    out = torch.empty(n, channels, height, width, dtype=torch.uint8)
    for start, chunk in zip(range(0, n, CHUNK), chunks, strict=True):
        # copying spreads one grey channel over three
        out[start : start + CHUNK].copy_(torch.from_numpy(chunk).permute(0, 3, 1, 2))
    return out


def _chunk(raw: Raw, start: int, size: int | None) -> Pixels:
    """(k, H, W, C) pixels of the images from `start` on."""
    stop = min(start + CHUNK, len(raw.images))
    pixels = [_pixels(raw, row, size) for row in range(start, stop)]
    _check_same({p.shape[:2] for p in pixels}, raw.source)
    channels = max(p.shape[2] for p in pixels)
    return np.stack([np.broadcast_to(p, (*p.shape[:2], channels)) for p in pixels])


def _check_same(shapes: set[tuple[int, ...]], source: str) -> None:
    if len(shapes) > 1:
        some = ", ".join(f"{w}x{h}" for h, w in sorted(shapes)[:3])
        raise UserError(f"images in {source} differ in size ({some}): give the size that all are to have by --size.")


def _pixels(raw: Raw, row: int, size: int | None) -> Pixels:
    """(H, W, C) pixels of one image."""
    item = raw.images[row]
    try:
        if item is None:
            raise ValueError("no bytes")
        image = (
            item if isinstance(item, Image.Image) else Image.open(BytesIO(item) if isinstance(item, bytes) else item)
        )
        image = _plain(image)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        pixels: NDArray[Any] = np.asarray(image)
    except Exception as error:  # the many decoders of Pillow raise errors of many kinds
        where = str(item) if isinstance(item, Path) else f"row {row} of {raw.source}"
        raise UserError(f"the image in {where} cannot be decoded, replace or remove it ({error})") from error
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _plain(image: Image.Image) -> Image.Image:
    """The image as 8-bit grey or RGB."""
    if image.mode in ("L", "RGB"):
        return image
    if image.mode.startswith("I"):  # 16 bits; Pillow would clip at 255 instead of scaling
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("L" if image.mode in ("1", "LA", "La", "F") else "RGB")
