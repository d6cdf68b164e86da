"""One picture of a file: which page is read, and what its header says."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ekiden.base.errors import UserError


@dataclass(frozen=True)
class Look:
    """What the header of a file says about the picture that is read.

    Attributes:
        size: width and height as it is shown.
        colour: whether it has colours other than greys.
        pages: number of pages, frames or slices from which the middle one is taken; 1 if the path names one by #.
        doubt: what the file leaves open, and how it was read; "" if nothing.
    """

    size: tuple[int, int]
    colour: bool
    pages: int = 1
    doubt: str = ""


@dataclass(frozen=True)
class Loaded:
    """The pixels of a picture, upright and opaque.

    Attributes:
        image: of mode L or RGB; or I;16, I or F, whose values have more than 8 bits.
        levels: number of values that a pixel can have, counted from 0; None if its values are measurements.
        window: the values that the file itself shows as black and as white, if it says so.
    """

    image: Image.Image
    levels: int | None = 256
    window: tuple[float, float] | None = None


def split(path: Path) -> tuple[Path, int | None]:
    """Return the file, and the number of the page after #, as in scan.nii.gz#12."""
    name, mark, number = path.name.rpartition("#")
    if not mark or not (number.isascii() and number.isdigit()) or path.exists():
        return path, None
    return path.with_name(name), int(number)


def chosen(count: int, number: int | None, what: str) -> int:
    """Return the page that is read: the one that was named, counted from 0, or else the middle one.

    Args:
        count: how many there are.
        number: the one that was named.
        what: what they are called in messages, in the singular.
    """
    if number is not None and number >= count:
        has = f"one {what}" if count == 1 else f"{count} {what}s"
        raise UserError(f"it has {has}, so there is no {what} {number}: count from 0")
    return count // 2 if number is None else number
