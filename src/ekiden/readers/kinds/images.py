"""Decode images to uint8 tensors."""

import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor

from ekiden.core.base import files
from ekiden.core.base.checks import CountOrZero
from ekiden.core.base.errors import UserError, counted, row_text, tell
from ekiden.core.data.inputs import Encoding, Inputs
from ekiden.readers import frames, medical, raster
from ekiden.readers.cells import is_text, short
from ekiden.readers.kinds import arrays
from ekiden.readers.raster import Loaded, Look, split
from ekiden.readers.undecoded import Raw

# images that a thread decodes at a time
CHUNK = 128
# alike, or planes of NIfTI
_X_RAYS = {
    "CR",
    "DX",
    "DR",
    "RF",
    "XA",
    "sagittal",
    "coronal",
    "axial",
}
# between a number of a class and one that was stored with a slope
_ROUNDED = 1e-3
# of the 256 levels; with fewer, the values of 16-bit images fill only a small part of their range
_FEW = 64
_Item: TypeAlias = tuple[Raw, int]
"""a part of a source and the place of an image in it"""


@dataclass(frozen=True)
class Images(Inputs):
    """Pictures: (C, H, W) uint8. `Dataset.mean` and `std` scale them."""

    kind = "images"
    words = "images"
    column = "image"
    arrays = True
    positions = True
    kept = True
    sized = True
    dtype = torch.uint8

    # side of all images in pixels; 0 keeps their own size
    size: CountOrZero = 0
    # how images come to `size`. stretch: both sides are scaled to it. crop: the shorter side is
    # scaled to it, then the
    # middle is cut out.
    fit: Literal["stretch", "crop"] = "stretch"
    # the file's values that become 0 and 255, for pixels of more than 8 bits; (): the smallest and
    # largest value of the
    # file's type
    window: tuple[float, ...] = ()
    # the channels. auto: three if any image has colour, otherwise one. rgb: three; grey values are
    # repeated. grey: one;
    # colours become their luminance (Rec. 601).
    colour: Literal["auto", "rgb", "grey"] = "auto"

    def encode(self, raw: Any, shape: tuple[int, ...] = ()) -> Tensor:
        """Return (n, C, H, W) uint8 for files, encoded bytes or opened images.

        Args:
            raw: the images.
            shape: shape of the samples that a model takes; () if there is no model.
        """
        images = list(raw)
        given = Raw("the images given", images, np.zeros(len(images), dtype=np.int64), kind=Images)
        return self.encode_part(given, shape)

    def encode_part(
        self, raw: Raw, shape: tuple[int, ...] = (), notes: "Notes | None" = None
    ) -> Tensor:
        return decode([[raw]], self, shape=shape, notes=notes)[0]

    @classmethod
    def assembled(
        cls, sides: Sequence[Sequence[Raw]], wanted: Encoding
    ) -> tuple[list[Tensor], Inputs | None]:
        """Decode all images, each side into one tensor; large ones into a file."""
        images = wanted.known or wanted.reading.images(wanted.size)
        return decode(sides, images, shape=wanted.shape), images

    @classmethod
    def of_cells(cls, table: Any, source: str) -> list[bytes | Path | None]:
        """Return encoded bytes, or files, which are named relative to the table."""
        import pyarrow as pa

        column = table.column(0)
        name = table.column_names[0]
        beside = Path(source).parent
        if is_text(column.type):
            names = column.to_pylist()
            for row, file in enumerate(names):
                if not file or not split(beside / file)[0].is_file():
                    raise UserError(
                        f"{row_text(row)} of {source} names the image {short(file)} (column "
                        f"{name!r}), which is not a "
                        f"file in {beside}: give paths relative to the table"
                    )
            return [*map(beside.joinpath, names)]
        if not is_encoded(column.type):
            raise UserError(
                f"column {name!r} of {source} holds {column.type}: images must be bytes, structs "
                "of bytes and path, or paths."
            )
        images: list[Any] = column.to_pylist()
        if not pa.types.is_struct(column.type):
            return images
        for row, cell in enumerate(images):
            held = cell or {}
            images[row] = held.get("bytes")
            if images[row] is None and held.get("path"):
                images[row] = beside / held["path"]
        return images

    def takes(self, shape: Sequence[int]) -> str:
        colour = "grey"
        if shape[0] == 3:
            colour = "colour"
        return f"{colour} images of {shape[2]} x {shape[1]} pixels, 0 to 255."

    @classmethod
    def is_file(cls, file: Path) -> bool:
        """Return whether a file is an image, by its extension or, for DICOM, by its first bytes."""
        suffix = split(file)[0].suffix.lower()
        many = (*frames.SUFFIXES, *arrays.SUFFIXES)
        return suffix in raster.SUFFIXES or (suffix not in many and medical.is_medical(file))

    def for_shape(self, shape: Sequence[int]) -> "Images":
        """Return the images of which a model takes samples of a shape, () if there is no model: all
        of one size.
        """
        if not self.size and len(shape) == 3 and shape[1] == shape[2]:
            return replace(self, size=shape[1])
        return self

    def terms(self) -> Inputs:
        """See `Inputs`; the shape of samples stands for their size."""
        return replace(self, size=0)


@dataclass
class Notes:
    """What the user should know about how images were read."""

    # number of images
    files: int = 0
    # number of pages of those that have several
    several: list[int] = field(default_factory=list)
    # what files leave open, and how many do
    doubts: Counter[str] = field(default_factory=Counter)
    # number of images with values that are not a number
    blank: int = 0
    # lines about silos that differ from the others
    silos: list[str] = field(default_factory=list)

    def look(self, looks: Sequence[Look]) -> None:
        """Add what headers say."""
        self.files += len(looks)
        for seen in looks:
            if seen.pages > 1:
                self.several.append(seen.pages)
            if seen.doubt:
                self.doubts[seen.doubt] += 1

    def warn(self, source: str) -> None:
        """Say it, in one line for each kind."""
        lines = list(self.silos)
        if self.several:
            pages = max(self.several)
            lines.append(
                f"{len(self.several)} of {counted(self.files, 'image')} in {source} have several "
                f"pages, frames or slices (up to {pages}); the middle one is read (number "
                f"{pages // 2} of {pages}, counted from 0): name another after #, as in FILE#0"
            )
        if self.blank:
            lines.append(
                f"{self.blank} of {counted(self.files, 'image')} in {source} have pixels that are "
                "not a number (NaN); these are black"
            )
        for what, n in self.doubts.items():
            lines.append(f"{n} of {counted(self.files, 'image')} in {source} {what}")
        for line in lines:
            tell(line)


def is_encoded(kind: Any) -> bool:
    """Return whether an Arrow type is that of encoded images: bytes, or structs of bytes and
    path.
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return str(kind) in ("binary", "large_binary")


def holds_files(column: Any) -> bool:
    """Return whether a column holds encoded images, or names of such files: labels that are
    masks.
    """
    if is_encoded(column.type):
        return True
    if not is_text(column.type) or not len(column):
        return False
    suffixes = (*raster.SUFFIXES, *medical.NIFTI, *medical.DICOM)
    return all(
        name and split(Path(name))[0].name.lower().endswith(suffixes)
        for name in column.unique().to_pylist()
    )


def masks(files_: Sequence[Any], images: Sequence[Any], source: str) -> NDArray[Any]:
    """Return the class of each pixel (n, H, W) that masks of images hold; (n,) arrays (H, W) if
    they differ in size.
    """
    found: list[NDArray[Any]] = []
    for row, (file, image) in enumerate(zip(files_, images, strict=True)):
        if isinstance(file, Path) and file == image:
            raise UserError(
                f"{source} names {file.name} as an image and as its mask: name masks by "
                "--label-column"
            )
        try:
            values = medical.mask(file, image) if medical.is_medical(file) else raster.mask(file)
            if values.ndim != 2 or not (np.abs(values - np.rint(values)) <= _ROUNDED).all():
                raise UserError("its pixels are not whole numbers: give numbers of classes")
        except Exception as error:
            raise _error_at(
                (Raw(source, images, np.arange(len(images)), kind=Images), row), error, "mask"
            ) from error
        found.append(np.rint(values).astype(np.int64))
    if len({mask.shape for mask in found}) == 1:
        return np.stack(found)
    each = np.empty(len(found), dtype=object)
    each[:] = found
    return each


def sized_masks(label: NDArray[Any], images: Images, source: str) -> NDArray[np.int64]:
    """Return masks (n, H, W) of the size to which their images come, each pixel with the class of
    the nearest one.
    """
    if images.size:
        sized = list[NDArray[Any]]()
        for mask in label:
            drawn = Image.fromarray(mask.astype(np.int32))
            sized.append(np.asarray(_sized(drawn, images, Image.Resampling.NEAREST)))
        return np.stack(sized).astype(np.int64)
    if label.dtype != object:
        return label
    sizes = [*dict.fromkeys(f"{mask.shape[1]}x{mask.shape[0]}" for mask in label)]
    if len(sizes) > 1:
        raise UserError(
            f"masks of {source} differ in size ({' and '.join(sizes[:2])}): give one size for all, "
            "as --size=32"
        )
    return np.stack([*label])


def decode(
    sides: Sequence[Sequence[Raw]],
    images: Images,
    *,
    shape: tuple[int, ...] = (),
    notes: Notes | None = None,
) -> list[Tensor]:
    """Decode all images of a data set, in order.

    Each image becomes what a viewer shows: turned as its EXIF orientation says, and on white where
    it is transparent. Colour profiles and gamma are not applied. All get one size and one number of
    channels, see `Images`. Grey values of 16 bits are cut to their upper 8 bits unless there is a
    window.

    Args:
        sides: what the sources hold for training and, if there is a test part, for the test.
        images: how they come to one size (bilinear with antialias).
        shape: shape of the samples that a trained model takes: images get its size and its
            channels. () without one.
        notes: collects what the user should know; without it, this is said by warnings.

    Returns:
        For each side (n, C, H, W) uint8, C = 1 or 3.
    """
    told = notes or Notes()
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        tell(
            "missing parts of damaged images are read as grey: set "
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES to False"
        )
    images = images.for_shape(shape)
    raws = [*chain(*sides)]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        each = [[*chain.from_iterable(map(_items, side))] for side in sides]
        items = list(chain(*each))
        looks = list(pool.map(_look, items))
        told.look(looks)
        channels = _channels(images, looks, shape)
        width = images.size
        height = images.size
        if not images.size:
            width, height = _one_size(looks, sides[0][0].source)
        # then no image may have colours
        strict = channels == 1 and images.colour == "auto"
        out = []
        levels = list[int | None]()
        for side in each:
            pixels = files.room((len(side), channels, height, width))
            chunks = [side[at : at + CHUNK] for at in range(0, len(side), CHUNK)]
            for found, blank in pool.map(
                _chunk, chunks, torch.split(pixels, CHUNK), repeat(images), repeat(strict)
            ):
                levels += found
                told.blank += blank
            out.append(pixels)
    if not shape:
        _check_levels(_by_silo(items), levels, images)
        # these places come first
        silos = _by_silo(each[0])
        told.silos += _lines_on_silos(silos, looks, levels, channels, images)
        named = any(raw.subject is not None for raw in raws)
        told.silos += _patients(looks, named=named)
    if notes is None:
        told.warn(_first([*dict.fromkeys(raw.source for raw in raws)]))
    return out


def _items(raw: Raw) -> Iterator[_Item]:
    for row in range(len(raw.images)):
        yield raw, row


def _patients(looks: Sequence[Look], *, named: bool) -> Iterator[str]:
    """Yield a line about patients that headers name several times; `named` says that they are
    known.
    """
    patients = len({seen.subject for seen in looks})
    if 1 < patients < len(looks) and not named:
        yield (
            f"headers name {patients:,} patients for {len(looks):,} images, so a patient may be in "
            "training and in the test: list the files in a table, and name the column of patients "
            "by --subject-column"
        )


def _channels(images: Images, looks: Sequence[Look], shape: tuple[int, ...]) -> int:
    if images.colour == "rgb":
        return 3
    if images.colour == "grey":
        return 1
    if len(shape) == 3 and shape[0] in (1, 3):
        return shape[0]
    if any(seen.colour for seen in looks):
        return 3
    return 1


def _one_size(looks: Sequence[Look], source: str) -> tuple[int, int]:
    sizes = {seen.size for seen in looks}
    if len(sizes) > 1:
        some = ", ".join(f"{w}x{h}" for w, h in sorted(sizes, key=lambda size: size[::-1])[:3])
        raise UserError(
            f"images in {source} differ in size ({some}): give one size for all, as --size=32, or "
            "resize them."
        )
    return next(iter(sizes))


def _by_silo(items: Sequence[_Item]) -> dict[Hashable, list[int]]:
    """Return the places of the images of each silo: of each source, or of each group in it."""
    silos: dict[Hashable, list[int]] = {}
    for place, (raw, row) in enumerate(items):
        owner = raw.source
        if raw.group is not None:
            owner = f"group {raw.group[row]} of {raw.source}"
        silos.setdefault(owner, []).append(place)
    return silos


def _check_levels(
    silos: dict[Hashable, list[int]], levels: Sequence[int | None], images: Images
) -> None:
    """Refuse a silo whose images of 16 bits would keep only a few grey levels."""
    if images.window:
        return
    for silo, places in silos.items():
        deep = [level for place in places if (level := levels[place]) is not None]
        if deep and max(deep) < _FEW << 8:
            raise UserError(
                f"images in {silo} have 16 bits and values up to {max(deep)} only, so that 8 bits "
                f"would hold {(max(deep) >> 8) + 1} grey levels: say which values become black and "
                f"white, as in --pixel-window=[0, {max(deep)}]"
            )


def _lines_on_silos(
    silos: Mapping[Hashable, Sequence[int]],
    looks: Sequence[Look],
    levels: Sequence[int | None],
    channels: int,
    images: Images,
) -> Iterator[str]:
    """Yield lines about silos whose images were taken, or are stored, otherwise than those of
    others.
    """
    scans = dict[Hashable, list[Look]]()
    for silo, places in silos.items():
        scans[silo] = [looks[place] for place in places]
    yield from _mixed_scans(scans)
    yield from _odd_spacings(scans, images.size)
    views = [lambda place: _bits(levels[place]), lambda place: looks[place].taken]
    # grey values among colours are repeated in three channels
    if channels == 3 and images.colour == "auto":
        views.insert(0, lambda place: _colours(looks[place]))
    for view in views:
        at = dict[str, list[Hashable]]()
        for silo, places in silos.items():
            own = set(map(view, places))
            if len(own) == 1:
                at.setdefault(own.pop(), []).append(silo)
        at.pop("", None)
        if len(at) > 1:
            (one, here), (other, there), *_ = at.items()
            yield (
                f"images in {_first(here)} are {one}, those in {_first(there)} {other}: check that "
                "they show the same; --colour and --pixel-window make them alike"
            )


def _bits(level: int | None) -> str:
    if level is None:
        return "of 8 bits"
    return "of 16 bits"


def _colours(seen: Look) -> str:
    if seen.colour:
        return "in colour"
    return "grey"


def _mixed_scans(scans: Mapping[Hashable, Sequence[Look]]) -> Iterator[str]:
    for silo, looks in scans.items():
        devices = {seen.taken.split()[0] for seen in looks if seen.taken} - _X_RAYS
        if len(devices) > 1:
            shown = " and ".join(sorted(devices))
            yield f"images in {silo} are {shown}: check that they show the same"


def _odd_spacings(scans: Mapping[Hashable, Sequence[Look]], size: int) -> Iterator[str]:
    heights = dict[Hashable, float]()
    for silo, looks in scans.items():
        each = list[float]()
        for seen in looks:
            height = seen.spacing
            if size:
                # pixels of images that are made smaller are larger
                height = height * min(seen.size) / size
            if height > 0:
                each.append(height)
        if not each:
            continue
        heights[silo] = median(each)
        # more than among adults
        if max(each) >= 2.5 * min(each):
            yield (
                f"pixels of images in {silo} are {min(each):.3g} to {max(each):.3g} mm high: bring "
                "images to one spacing, or structures differ in size"
            )
    usual = usual_spacing(heights)
    for silo, height in heights.items():
        # smaller factors are also between patients
        if max(height / usual, usual / height) >= 1.25:
            yield (
                f"pixels of images in {silo} are {height:.3g} mm high, those of other silos "
                f"{usual:.3g} mm: bring images to one spacing, or structures have another size "
                "there"
            )


def usual_spacing(heights: Mapping[Hashable, float]) -> float:
    """Return the spacing (mm) that silos are compared with; 0 if none is known."""
    if not heights:
        return 0.0
    # the median of two is neither, and would name both
    if len(heights) == 2:
        return list(heights.values())[1]
    return median(heights.values())


def _first(silos: Sequence[Hashable]) -> str:
    if len(silos) == 1:
        return str(silos[0])
    return f"{silos[0]} and {counted(len(silos) - 1, 'other')}"


def _look(item: _Item) -> Look:
    """Return what the header of one image says."""
    try:
        source = _source(item)
        seen = medical.look(source) if medical.is_medical(source) else raster.look(source)
        if not min(seen.size):
            raise UserError("it has no pixels: leave it out")
        raster.check_size(seen.size)
        return seen
    except Exception as error:  # the many decoders raise errors of many kinds
        raise _error_at(item, error) from error


def _chunk(
    items: Sequence[_Item], into: Tensor, images: Images, strict: bool
) -> tuple[list[int | None], int]:
    """Write the pixels of these images.

    Return the largest value of each image that has more than 8 bits, otherwise None; and the number
    of images with NaN.
    """
    levels = list[int | None]()
    blank = 0
    for place, item in enumerate(items):
        try:
            source = _source(item)
            read = medical if medical.is_medical(source) else raster
            loaded = read.load(source)
            image, level, holes = _plain(loaded, images.window)
            pixels = np.array(_sized(_in_channels(image, into.shape[1], strict), images))
        except Exception as error:
            raise _error_at(item, error) from error
        levels.append(level)
        blank += holes
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        # copies one grey channel into three
        into[place].copy_(torch.from_numpy(pixels).permute(2, 0, 1))
    return levels, blank


def _source(item: _Item) -> Any:
    raw, row = item
    if raw.images[row] is None:
        raise ValueError("no bytes")
    return raw.images[row]


def _error_at(item: _Item, error: Exception, what: str = "image") -> UserError:
    """Return a line that names the image, or its mask."""
    raw, row = item
    where = f"the {what} in {raw.where(row)}"
    if what == "mask":
        where = f"the mask of {raw.where(row)}"
    if isinstance(error, UserError):
        return UserError(f"{where}: {error}")
    why = " ".join((str(error) or type(error).__name__).split())
    if isinstance(error, UnidentifiedImageError):
        why = "it is of an unknown format, or damaged"
    return UserError(f"{where} cannot be decoded ({why[:200]}): replace or remove it")


def _sized(
    image: Image.Image, images: Images, how: Image.Resampling = Image.Resampling.BILINEAR
) -> Image.Image:
    size = images.size
    if not size or image.size == (size, size):
        return image
    box = None
    # the middle square
    if images.fit == "crop":
        side = min(image.size)
        left = (image.width - side) / 2
        top = (image.height - side) / 2
        box = (left, top, left + side, top + side)
    return image.resize((size, size), how, box=box)


def _in_channels(image: Image.Image, channels: int, strict: bool) -> Image.Image:
    """Return the image as grey if there is one channel."""
    if channels == 3 or image.mode == "L":
        return image
    grey = image.convert("L")
    if strict and (np.asarray(image) != np.asarray(grey)[:, :, None]).any():
        raise UserError(
            "it is in colour, but the model was trained on grey images: convert it to grey, or "
            "train with --colour=grey"
        )
    return grey


def _plain(loaded: Loaded, window: tuple[float, ...]) -> tuple[Image.Image, int | None, bool]:
    """Return the image as 8-bit grey or RGB, its largest value if it has 16 bits, and whether it
    holds NaN.
    """
    image = loaded.image
    levels = loaded.levels
    if image.mode in ("L", "RGB"):
        if levels == 256:
            return image, None, False
        if window:
            raise UserError(
                "its colours have 16 bits, of which the upper 8 are read, so there is no window to "
                "apply: convert it to 8 bits"
            )
        return image, 256 * int(np.asarray(image).max(initial=0)), False
    values = np.asarray(image)
    # Pillow would clip at 255 instead of scaling
    if levels == 1 << 16 and not window:
        values = values.astype(np.int64)
        return Image.fromarray((values >> 8).astype(np.uint8)), int(values.max()), False
    values = values.astype(np.float64)
    holes = np.isnan(values)
    if holes.all():
        raise UserError("its pixels are not numbers (NaN): leave it out")
    low, high = window or (0, 255)
    if not window and levels is None:
        _check_range(values, loaded)
    if not window and levels is not None:
        high = min(levels, 256) - 1
    values[holes] = low
    scaled = (values - low) * (255 / (high - low))
    return Image.fromarray(np.rint(scaled).clip(0, 255).astype(np.uint8)), None, bool(holes.any())


def _check_range(values: NDArray[np.float64], loaded: Loaded) -> None:
    """Refuse measurements outside the grey levels from 0 to 255."""
    least = float(np.nanmin(values))
    most = float(np.nanmax(values))
    if least >= 0 and most <= 255 and not 0 < most <= 1:
        return
    own = ""
    if loaded.window:
        own = ", as in --pixel-window=[{:g}, {:g}] (what the file shows)".format(*loaded.window)
    raise UserError(
        f"its pixels go from {least:g} to {most:g}: say which values become black and white by "
        f"--pixel-window LOW HIGH{own}"
    )
