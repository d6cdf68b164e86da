"""Read pictures from files, as they are shown: PNG, JPEG, TIFF and others that Pillow opens, DICOM, and NIfTI.

They become upright and opaque. A NIfTI volume is turned by its affine so that its axes point to the patient's right,
front and head (RAS+). A slice is axial: front above, left at the left. `scan.nii.gz#12` is slice 12, counted from the
feet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
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


Source: TypeAlias = Path | bytes | Image.Image

RASTER = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})
DICOM, NIFTI = (".dcm", ".dicom"), (".nii", ".nii.gz")
SUFFIXES = RASTER | {*DICOM, *NIFTI}
_MAGIC = slice(128, 132)
_ORIENTATION = 0x0112  # the tag of EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPED = 5  # from this orientation on, width and height change places
_LATE = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks of a PNG that may follow its pixels and name an orientation
_SUBFILE, _PHOTOMETRIC = 254, 262  # tags of TIFF
_PREVIEW_OR_MASK = 5  # bits of _SUBFILE
_GREY = frozenset({"1", "L", "LA", "La", "I", "F"})
_PLAIN = frozenset({"L", "RGB", "I", "F"})
_shared = Lock()  # while the file of an opened image is read


def look(source: Source) -> Look:
    """Return what the header says."""
    if isinstance(source, Path | bytes) and is_medical(source):
        return _look_medical(source)
    with _page(source) as (image, pages):
        width, height = image.size
        if (image.format != "PNG" or _may_turn(image, source)) and _orientation(image) >= _SWAPPED:
            if image.format == "TIFF":  # depending on its version, Pillow has swapped the sides or not
                width, height = _upright(image).size
            else:
                width, height = height, width
        return Look((width, height), not _is_grey(image), pages)


def load(source: Source) -> Loaded:
    """Return the pixels."""
    if isinstance(source, Path | bytes) and is_medical(source):
        return _load_medical(source)
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
        return Loaded(upright, None if measured else 1 << 16 if deep else 256)


@contextmanager
def _page(source: Source) -> Iterator[tuple[Image.Image, int]]:
    """Open the page that is read, and return it with the number of pages from which it was chosen."""
    path, number = split(source) if isinstance(source, Path) else (None, None)
    if isinstance(source, Image.Image):
        if len(_pages(source)) == 1 or source.tell() or getattr(source, "fp", None) is None:
            yield source, 1  # its owner has chosen a page
            return
        source = _file_of(source)
    with Image.open(path or BytesIO(source)) as image:  # type: ignore[arg-type]
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
    """Return the pages that are pictures of their own: no previews, and no second picture inside a photo."""
    count = getattr(image, "n_frames", 1)
    if count == 1 or image.format == "MPO":
        return [0]
    if image.format != "TIFF":
        return list(range(count))
    place, found = image.tell(), []
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
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF, which programs that show the picture ignore as well
        return 1
    return found if found in _UPRIGHT else 1


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # turns a TIFF and forgets its orientation
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _is_grey(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        return _equal(np.array(image.getpalette("RGB") or (), dtype=np.uint8).reshape(-1, 3))
    if image.format == "GIF" and image.mode in ("RGB", "RGBA"):  # Pillow's mode of all frames but the first
        return _equal(np.asarray(image.convert("RGB")))
    return image.mode in _GREY or image.mode.startswith("I;16")


def _equal(colours: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    return bool((colours == colours[..., :1]).all())


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image on a white background."""
    grey = _is_grey(image)
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    shown = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return shown.getchannel(0) if grey else shown.convert("RGB")


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
    """Return whether Pillow keeps the upper 8 of 16 bits: it does for colours, and for grey with transparency."""
    if image.format not in ("PNG", "TIFF") or image.mode.startswith("I"):
        return False
    stored = (tile[3] for tile in getattr(image, "tile", ()))
    return any(";16" in str(raw[0] if isinstance(raw, tuple) else raw) for raw in stored)


def _is_outside(image: Image.Image) -> bool:
    """Return whether values are outside the range of 16 bits."""
    values = np.asarray(image)
    return bool(values.size) and not 0 <= values.min() <= values.max() < 1 << 16


def is_medical(item: Any) -> bool:
    """Return whether `item` is a DICOM or NIfTI file, by its name or its first bytes, or the bytes of a DICOM file."""
    if isinstance(item, Path):
        path = split(item)[0]
        if path.name.lower().endswith((*DICOM, *NIFTI)):
            return True
        return path.suffix.lower() not in RASTER and is_dicom(path)
    return isinstance(item, bytes) and item[_MAGIC] == b"DICM"


def is_dicom(path: Path) -> bool:
    """Return whether a file without the extension of a DICOM file is one, by its first bytes."""
    if path.name == "DICOMDIR":  # a list of other files
        return False
    try:
        with path.open("rb") as file:
            return file.read(_MAGIC.stop)[_MAGIC] == b"DICM"
    except OSError:
        return False


def _look_medical(item: Path | bytes) -> Look:
    """Return what the header says."""
    path, number = split(item) if isinstance(item, Path) else (None, None)
    if path is not None and path.name.lower().endswith(NIFTI):
        return _Volume(path).look(number)
    data = _read(item if path is None else path, stop_before_pixels=True)
    if not data.get("Rows") or not data.get("Columns"):
        raise UserError(f"it holds no picture ({data.get('Modality') or 'no modality'}): leave it out")
    pages = 1 if number is not None else _frames(data)
    return Look((int(data.Columns), int(data.Rows)), _has_colour(data), pages)


def _load_medical(item: Path | bytes) -> Loaded:
    """Return the pixels."""
    path, number = split(item) if isinstance(item, Path) else (None, None)
    if path is not None and path.name.lower().endswith(NIFTI):
        return _Volume(path).load(number)
    return _dicom(_read(item if path is None else path), number)


class _Volume:
    """A NIfTI file; its axes are counted in RAS+."""

    def __init__(self, path: Path) -> None:
        try:
            import nibabel  # noqa: PLC0415  (an extra)
        except ImportError:
            raise UserError('NIfTI files need the package nibabel: pip install "ekiden[medical]"') from None
        self.file: Any = nibabel.load(path)
        shape = self.file.shape
        self.dims = (*shape, 1, 1)[:3] if len(shape) < 3 else shape[:3]
        if max(shape[3:], default=1) > 1:
            raise UserError(f"it has {len(shape)} dimensions, {' x '.join(map(str, shape))}: give a volume with three")
        if not min(self.dims):
            raise UserError("it has no voxels: leave it out")
        turned = nibabel.io_orientation(self.file.affine)
        if np.isnan(turned).any():
            raise UserError("its affine does not say where its axes point: correct the header")
        self.stored = [int(np.flatnonzero(turned[:, 0] == axis)[0]) for axis in range(3)]
        self.mirrored = [bool(turned[stored, 1] < 0) for stored in self.stored]
        flat = [axis for axis in range(3) if self.dims[self.stored[axis]] == 1]
        self.across = flat[0] if len(flat) == 1 else 2  # a volume of one slice is that slice
        self.doubt = self._doubt(nibabel.io_orientation)

    def _doubt(self, orientation: Any) -> str:
        (q, is_q), (s, is_s) = (get(coded=True) for get in (self.file.get_qform, self.file.get_sform))
        if not is_q and not is_s:
            return "do not say where their axes point (the codes of qform and sform are 0); x is taken to point left"
        if is_q and is_s and (orientation(q) != orientation(s)).any():
            return "have a qform and an sform that point to different sides; the sform is used"
        return ""

    def look(self, number: int | None) -> Look:
        count = self.dims[self.stored[self.across]]
        chosen(count, number, "slice")
        right, up = (self.dims[self.stored[axis]] for axis in range(3) if axis != self.across)
        colour = self.file.get_data_dtype().names is not None
        return Look((right, up), colour, 1 if number is not None else count, self.doubt)

    def load(self, number: int | None) -> Loaded:
        cut, count = self.stored[self.across], self.dims[self.stored[self.across]]
        place = chosen(count, number, "slice")
        index: list[Any] = [slice(None)] * 3 + [0] * (len(self.file.shape) - 3)
        index[cut] = count - 1 - place if self.mirrored[self.across] else place
        kept = [axis for axis in range(3) if axis != cut]
        plane = np.asanyarray(self.file.dataobj[tuple(index[: len(self.file.shape)])])
        plane = plane.reshape([self.dims[axis] for axis in kept])
        right, up = (axis for axis in range(3) if axis != self.across)
        if kept.index(self.stored[right]) == 1:
            plane = plane.T
        plane = plane[:: -1 if self.mirrored[right] else 1, :: -1 if self.mirrored[up] else 1]
        shown = np.ascontiguousarray(np.rot90(plane))
        if shown.dtype.names:
            return Loaded(Image.fromarray(np.stack([shown[name] for name in "RGB"], axis=-1)))
        if shown.dtype.kind not in "biuf":
            raise UserError(f"its voxels are {shown.dtype}: give real numbers")
        return Loaded(Image.fromarray(shown.astype(np.float32)), None)


def _read(file: Path | bytes, **how: Any) -> Any:
    """Return the data set of a DICOM file."""
    try:
        import pydicom  # noqa: PLC0415  (an extra)
    except ImportError:
        raise UserError('DICOM files need the package pydicom: pip install "ekiden[medical]"') from None
    try:
        return pydicom.dcmread(BytesIO(file) if isinstance(file, bytes) else file, **how)
    except pydicom.errors.InvalidDicomError:
        raise UserError('it has no "DICM" at byte 128, as DICOM files have: convert it') from None


def _frames(data: Any) -> int:
    return max(int(data.get("NumberOfFrames") or 1), 1)


def _has_colour(data: Any) -> bool:
    if data.get("PhotometricInterpretation") != "PALETTE COLOR":
        return int(data.get("SamplesPerPixel", 1)) > 1
    red, green, blue = (data.get(f"{name}PaletteColorLookupTableData") for name in ("Red", "Green", "Blue"))
    return not red == green == blue


def _dicom(data: Any, number: int | None) -> Loaded:
    from pydicom.pixels import pixel_array  # noqa: PLC0415  (an extra)

    frame = chosen(_frames(data), number, "frame" if _frames(data) > 1 else "slice")
    if not any(name in data for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise UserError(f"it holds no picture ({data.get('Modality') or 'no modality'}): leave it out")
    try:
        raw = pixel_array(data, index=frame)
    except (RuntimeError, NotImplementedError) as error:
        syntax = data.file_meta.get("TransferSyntaxUID")
        if syntax is None or not syntax.is_compressed:
            raise
        raise UserError(
            f"its pixels are compressed as {syntax.name}, and no installed package decodes them: pip install "
            "pylibjpeg[all], or convert it to Explicit VR Little Endian"
        ) from error
    shown, bits = data.get("PhotometricInterpretation"), int(data.get("BitsStored") or 0)
    if shown == "PALETTE COLOR":
        return Loaded(_of_palette(raw, data))
    if raw.ndim == 3:
        if raw.shape[2] != 3 or shown in ("YBR_PARTIAL_420", "YBR_PARTIAL_422", "HSV", "ARGB", "CMYK"):
            raise UserError(f"its colours are {shown}, which is not read: convert it to RGB")
        return Loaded(Image.fromarray((raw >> max(bits - 8, 0)).astype(np.uint8)))
    signed = bool(data.get("PixelRepresentation"))
    if shown == "MONOCHROME1":  # small values are bright
        if raw.dtype.kind == "f":
            raise UserError("its pixels are MONOCHROME1 and floats, which have no range to mirror: convert it")
        raw = (-1 if signed else (1 << bits) - 1) - raw.astype(np.int64)
    values = _in_unit(raw, data, frame)
    levels = 1 << bits if not signed and 0 < bits <= 8 and (values == raw).all() else None
    return Loaded(Image.fromarray(values.astype(np.float32)), levels, None if shown == "MONOCHROME1" else _voi(data))


def _of_palette(raw: NDArray[Any], data: Any) -> Image.Image:
    from pydicom.pixels import apply_color_lut  # noqa: PLC0415  (an extra)

    colours = apply_color_lut(raw, data)
    tables = [getattr(data, f"{name}PaletteColorLookupTableData", b"") for name in ("Red", "Green", "Blue")]
    wide = colours.dtype.itemsize == 2 and max(np.frombuffer(table, "<u2").max(initial=0) for table in tables) > 255
    return Image.fromarray((colours[..., :3] >> (8 if wide else 0)).astype(np.uint8))


def _in_unit(raw: NDArray[Any], data: Any, frame: int) -> NDArray[Any]:
    """Return the values of the modality's unit: by slope and intercept, also those of a single frame, or by a table."""
    from pydicom.pixels import apply_modality_lut  # noqa: PLC0415  (an extra)

    groups = data.get("PerFrameFunctionalGroupsSequence") or []
    for group in (*groups[frame : frame + 1], *(data.get("SharedFunctionalGroupsSequence") or [])):
        if scaling := group.get("PixelValueTransformationSequence"):
            return raw * float(scaling[0].RescaleSlope) + float(scaling[0].RescaleIntercept)
    return np.asarray(apply_modality_lut(raw, data))


def _voi(data: Any) -> tuple[float, float] | None:
    """Return the window that the file suggests."""
    try:
        centre, width = (np.atleast_1d(data[name].value)[0] for name in ("WindowCenter", "WindowWidth"))
        return float(centre) - float(width) / 2, float(centre) + float(width) / 2
    except (KeyError, TypeError, ValueError, IndexError):
        return None
