"""Read PNG, JPEG, TIFF and other pictures that Pillow opens, as they are shown: upright and without
transparency.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from ekiden.core.base.errors import UserError, counted


@dataclass(frozen=True)
class Look:
    """What the header of a file says about the picture that is read."""

    # width and height as it is shown
    size: tuple[int, int]
    # whether it has colours other than greys
    colour: bool
    # number of pages, frames or slices from which the middle one is taken; 1 if the path names one
    # by #
    pages: int = 1
    # what the file leaves open, and how it was read; "" if nothing
    doubt: str = ""
    # millimetres between the rows; 0 if the file does not say
    spacing: float = 0.0
    # how it was taken: "CT axial"; "" if it is not said
    taken: str = ""
    # whom it shows; "" if the file does not say
    subject: str = ""


@dataclass(frozen=True)
class Loaded:
    """The pixels of a picture, upright and opaque."""

    # of mode L or RGB; or I;16, I or F, whose values have more than 8 bits
    image: Image.Image
    # number of values that a pixel can have, counted from 0; None if its values are measurements
    levels: int | None = 256
    # the values that the file itself shows as black and as white, if it says so
    window: tuple[float, float] | None = None


def split(path: Path) -> tuple[Path, int | None]:
    """Return the file, and the number of the page after #, as in scan.nii.gz#12."""
    name, mark, number = path.name.rpartition("#")
    if not mark or not (number.isascii() and number.isdigit()) or path.exists():
        return path, None
    return path.with_name(name), int(number)


def chosen(count: int, number: int | None, what: str) -> int:
    """Return the page (`what`) that is read: the one that was named, counted from 0, or else the
    middle one.
    """
    if number is not None and number >= count:
        raise UserError(
            f"it has {counted(count, what)}, so there is no {what} {number}: count from 0"
        )
    if number is None:
        return count // 2
    return number


Source: TypeAlias = Path | bytes | Image.Image

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
# the tag of EXIF
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# from this orientation on, width and height change places
_SWAPPED = 5
# chunks of a PNG that may follow its pixels and name an orientation
_LATE = (
    b"eXIf",
    b"iTXt",
    b"tEXt",
    b"zTXt",
)
# tags of TIFF
_SUBFILE = 254
_PHOTOMETRIC = 262
# bits of _SUBFILE
_PREVIEW_OR_MASK = 5
_GREY = frozenset({"1", "L", "LA", "La", "I", "F"})
_PLAIN = frozenset({"L", "RGB", "I", "F"})
# of a picture: more than cameras and mammograms have; a file of kilobytes can say more
_MOST_PIXELS = 1 << 26
# while the file of an opened image is read
_shared = Lock()


def look(source: Source) -> Look:
    """Return what the header says."""
    with _page(source) as (image, pages):
        width, height = image.size
        if (image.format != "PNG" or _may_turn(image, source)) and _orientation(image) >= _SWAPPED:
            # depending on its version, Pillow has swapped the sides or not
            if image.format == "TIFF":
                width, height = _upright(image).size
            else:
                width, height = height, width
        return Look((width, height), not _is_grey(image), pages)


def load(source: Source) -> Loaded:
    """Return the pixels."""
    with _page(source) as (image, _):
        deep = image.mode.startswith("I") or _cut(image)
        upright = _upright(image)
        if upright.mode.startswith("I;16"):
            upright = _of_16_bits(upright, image)
        elif image.has_transparency_data and upright.mode not in ("I", "F"):
            upright = _opaque(upright)
        elif upright.mode not in _PLAIN:
            upright = upright.convert("L" if upright.mode == "1" else "RGB")
        if upright is source:
            upright = upright.copy()
        measured = upright.mode == "F" or (upright.mode == "I" and _is_outside(upright))
        if measured:
            return Loaded(upright, None)
        return Loaded(upright, 1 << 16 if deep else 256)


def mask(source: Source) -> np.ndarray[Any, Any]:
    """Return the labels (H, W) in a mask: its grey values, or the numbers of the colours in its
    palette.
    """
    with _page(source) as (image, _):
        grey = image.mode in ("1", "L", "P", "I", "F") or image.mode.startswith("I;16")
        if not grey or image.format in ("JPEG", "MPO"):
            raise UserError(
                f"it is {image.format} of mode {image.mode}: give numbers of classes, as a grey "
                "PNG file"
            )
        return np.asarray(_upright(image))


def check_size(size: tuple[int, int]) -> None:
    """Refuse a picture whose header says that it is huge, before it is decoded."""
    if size[0] * size[1] > _MOST_PIXELS:
        raise UserError(
            f"its header says {size[0]} x {size[1]} pixels, {_MOST_PIXELS} are read at most: "
            "shrink it"
        )


@contextmanager
def _page(source: Source) -> Iterator[tuple[Image.Image, int]]:
    """Open the page that is read, and return it with the number of pages from which it was
    chosen.
    """
    path, number = split(source) if isinstance(source, Path) else (None, None)
    if isinstance(source, Image.Image):
        if len(_pages(source)) == 1 or source.tell() or getattr(source, "fp", None) is None:
            # its owner has chosen a page
            yield source, 1
            return
        source = _file_of(source)
    with Image.open(path or BytesIO(source)) as image:  # type: ignore[arg-type]
        check_size(image.size)
        if number is not None:
            image.seek(chosen(getattr(image, "n_frames", 1), number, "page"))
            yield image, 1
            return
        pages = _pages(image)
        image.seek(pages[chosen(len(pages), None, "page")])
        yield image, len(pages)


def _file_of(image: Any) -> bytes:
    """Return the file of an opened image, which stays at its page."""
    with _shared:
        place = image.fp.tell()
        image.fp.seek(0)
        data: bytes = image.fp.read()
        image.fp.seek(place)
    return data


def _pages(image: Image.Image) -> list[int]:
    """Return the pages that are pictures of their own: no previews, and no second picture inside a
    photo.
    """
    count = getattr(image, "n_frames", 1)
    if count == 1 or image.format == "MPO":
        return [0]
    if image.format != "TIFF":
        return list(range(count))
    place = image.tell()
    found = []
    for page in range(count):
        image.seek(page)
        if not int(image.tag_v2.get(_SUBFILE, 0)) & _PREVIEW_OR_MASK:  # type: ignore[attr-defined]
            found.append(page)
    image.seek(place)
    return found or [0]


def _may_turn(image: Image.Image, source: Source) -> bool:
    """Return whether a PNG may name an orientation. Only then are its pixels decoded to find it."""
    if isinstance(source, Image.Image) or "exif" in image.info or "XML:com.adobe.xmp" in image.info:
        return True
    data = source if isinstance(source, bytes) else split(source)[0].read_bytes()
    return any(chunk in data for chunk in _LATE)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if there is none, or none that has a meaning."""
    try:
        found = int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF, which programs that show the picture ignore as well
        return 1
    if found not in _UPRIGHT:
        return 1
    return found


def _upright(image: Image.Image) -> Image.Image:
    # turns a TIFF and forgets its orientation
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    if turn is None:
        return image
    return image.transpose(turn)


def _is_grey(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        return _equal(np.array(image.getpalette("RGB") or (), dtype=np.uint8).reshape(-1, 3))
    # Pillow's mode of all frames but the first
    if image.format == "GIF" and image.mode in (
        "RGB",
        "RGBA",
    ):
        return _equal(np.asarray(image.convert("RGB")))
    return image.mode in _GREY or image.mode.startswith("I;16")


def _equal(colours: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    return bool((colours == colours[..., :1]).all())


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image on a white background."""
    grey = _is_grey(image)
    if image.mode == "La":
        # Pillow has no way from here to RGBA
        image = image.convert("LA")
    shown = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    if grey:
        return shown.getchannel(0)
    return shown.convert("RGB")


def _of_16_bits(upright: Image.Image, header: Image.Image) -> Image.Image:
    """Return grey values of 16 bits with 0 as black, and white where the image is transparent."""
    values = np.asarray(upright).astype(np.uint16)
    clear = header.info.get("transparency")
    if isinstance(clear, int):
        values = np.where(values == clear, np.uint16(65535), values)
    if header.format == "TIFF" and header.tag_v2.get(_PHOTOMETRIC) == 0:  # type: ignore[attr-defined]
        values = 65535 - values
    return Image.fromarray(values)


def _cut(image: Image.Image) -> bool:
    """Return whether Pillow keeps the upper 8 of 16 bits: it does for colours, and for grey with
    transparency.
    """
    if image.format not in ("PNG", "TIFF") or image.mode.startswith("I"):
        return False
    stored = (tile[3] for tile in getattr(image, "tile", ()))
    return any(";16" in str(raw[0] if isinstance(raw, tuple) else raw) for raw in stored)


def _is_outside(image: Image.Image) -> bool:
    """Return whether values are outside the range of 16 bits."""
    values = np.asarray(image)
    return bool(values.size) and not 0 <= values.min() <= values.max() < 1 << 16
