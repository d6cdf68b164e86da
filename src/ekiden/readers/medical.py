"""Read DICOM files and slices of NIfTI volumes.

A NIfTI volume, or mask, is turned by its affine so that its axes point to the patient's right,
front and head (RAS+). A slice is axial: front above, left at the left. `scan.nii.gz#12` is slice
12, counted from the feet.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ekiden.core.base.errors import UserError
from ekiden.core.base.outside import require_extra
from ekiden.readers import raster
from ekiden.readers.raster import Loaded, Look, chosen, split

DICOM = (".dcm", ".dicom")
NIFTI = (".nii", ".nii.gz")
_MAGIC = slice(128, 132)
# cosine of 30 degrees
_OBLIQUE = 0.866
_DOUBTS = (
    (
        "ImageType",
        "LOCALIZER",
        "are localizers (scouts) by their header: leave them out, if models are to see scans",
    ),
    ("Modality", "SEG", "are segmentations by their header, not pictures: leave them out"),
    (
        "PresentationLUTShape",
        "INVERSE",
        "are to be shown inverted (PresentationLUTShape), which is not done",
    ),
    (
        "BurnedInAnnotation",
        "YES",
        "have names or marks in their pixels by their header: cover them, or leave them out",
    ),
)
"""tags of DICOM files, their values, and what these mean"""
_PLANES = ("sagittal", "coronal", "axial")
"""slices across each axis of the patient: right, front, head"""


def is_medical(item: Any) -> bool:
    """Return whether `item` is a DICOM or NIfTI file, by its name or its first bytes, or the bytes
    of a DICOM file.
    """
    if isinstance(item, Path):
        path = split(item)[0]
        if path.name.lower().endswith((*DICOM, *NIFTI)):
            return True
        return path.suffix.lower() not in raster.SUFFIXES and is_dicom(path)
    return isinstance(item, bytes) and item[_MAGIC] == b"DICM"


def is_dicom(path: Path) -> bool:
    """Return whether a file without the extension of a DICOM file is one, by its first bytes."""
    # a list of other files
    if path.name == "DICOMDIR":
        return False
    try:
        with path.open("rb") as file:
            return file.read(_MAGIC.stop)[_MAGIC] == b"DICM"
    except OSError:
        return False


def _file_and_number(item: Any) -> tuple[Any, int | None]:
    """Return the file and the number of the slice that its name has after #; bytes unchanged."""
    if isinstance(item, Path):
        return split(item)
    return item, None


def _is_nifti(file: Any) -> bool:
    return isinstance(file, Path) and file.name.lower().endswith(NIFTI)


def look(item: Path | bytes) -> Look:
    """Return what the header says."""
    file, number = _file_and_number(item)
    if _is_nifti(file):
        return _Volume(file).look(number)
    data = _read(file, stop_before_pixels=True)
    if not data.get("Rows") or not data.get("Columns"):
        raise UserError(
            f"it holds no picture ({data.get('Modality') or 'no modality'}): leave it out"
        )
    pages = 1
    if number is None:
        pages = _frames(data)
    size = int(data.Columns), int(data.Rows)
    apart = _of_frame(data, 0, "PixelMeasuresSequence").get("PixelSpacing") or data.get(
        "ImagerPixelSpacing"
    )
    return Look(
        size,
        _has_colour(data),
        pages,
        doubt=_doubt(data),
        spacing=float(apart[0]) if apart else 0.0,
        taken=f"{data.get('Modality') or ''} {_plane(data)}".strip(),
        subject=str(data.get("PatientID") or ""),
    )


def _doubt(data: Any) -> str:
    """Return what the header of a DICOM file leaves open; "" if nothing."""
    for tag, value, what in _DOUBTS:
        if value in np.atleast_1d(data.get(tag) or "").tolist():
            return what
    return ""


def _of_frame(data: Any, frame: int, group: str) -> Any:
    """Return what a DICOM file says about a frame by this sequence of its functional groups; else
    the file itself.
    """
    groups = data.get("PerFrameFunctionalGroupsSequence") or []
    for one in (*groups[frame : frame + 1], *(data.get("SharedFunctionalGroupsSequence") or [])):
        if found := one.get(group):
            return found[0]
    return data


def _plane(data: Any) -> str:
    """Return the plane of a DICOM picture, or that nearest to it; "" if it is not said. Of an
    X-ray, its view.
    """
    sides = _of_frame(data, 0, "PlaneOrientationSequence").get("ImageOrientationPatient") or ()
    if len(sides) != 6:
        return str(data.get("ViewPosition") or "")
    across = np.abs(np.cross(np.array(sides[:3], dtype=float), np.array(sides[3:], dtype=float)))
    return _PLANES[int(across.argmax())]


def load(item: Path | bytes) -> Loaded:
    """Return the pixels."""
    file, number = _file_and_number(item)
    if _is_nifti(file):
        return _Volume(file).load(number)
    return _dicom(_read(file), number)


def mask(item: Path, image: Any) -> NDArray[Any]:
    """Return the labels of a NIfTI mask on the slice that is read of its image, turned as the image
    is.
    """
    path, number = split(item)
    beside, wanted = _file_and_number(image)
    if not _is_nifti(path) or not _is_nifti(beside):
        raise UserError(
            "a mask is a NIfTI file if its image is one, otherwise a PNG or TIFF file: convert it"
        )
    labels = _Volume(path)
    volume = _Volume(beside)
    if number not in (None, wanted):
        raise UserError(
            f"it names slice {number}, which its image {image.name} does not: name the same for "
            "both"
        )
    corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(volume.shape) - 1)
    apart = np.abs(labels.placed(corners) - volume.placed(corners))
    if labels.shape != volume.shape or apart.max() > min(volume.file.header.get_zooms()[:3]) / 2:
        raise UserError(
            f"it has {' x '.join(map(str, labels.shape))} voxels, its image "
            f"{' x '.join(map(str, volume.shape))}, "
            f"up to {apart.max():.3g} mm apart: bring both to one grid"
        )
    return np.asarray(labels.load(wanted).image)


class _Volume:
    """A NIfTI file; its axes are counted in RAS+."""

    def __init__(self, path: Path) -> None:
        require_extra("medical", "the file is NIfTI, which", "nibabel")
        # an extra
        import nibabel

        self.file: Any = nibabel.load(path)
        shape = self.file.shape
        self.dims = (*shape, 1, 1)[:3]
        if max(shape[3:], default=1) > 1:
            raise UserError(
                f"it has {len(shape)} dimensions, {' x '.join(map(str, shape))}: give a volume "
                "with three"
            )
        if not min(self.dims):
            raise UserError("it has no voxels: leave it out")
        turned = nibabel.io_orientation(self.file.affine)
        if np.isnan(turned).any():
            raise UserError("its affine does not say where its axes point: correct the header")
        # the axis of the file that is each of these
        self.stored = np.argsort(turned[:, 0])
        self.mirrored = turned[self.stored, 1] < 0
        self.shape = [self.dims[axis] for axis in self.stored]
        self._grid = self.file.affine @ nibabel.orientations.inv_ornt_aff(turned, self.dims)
        # a volume of one slice is that slice
        self.across = 2
        if self.shape.count(1) == 1:
            self.across = self.shape.index(1)
        self.right, self.up = np.delete(self.stored, self.across).tolist()
        zooms = (*map(float, self.file.header.get_zooms()), 1.0, 1.0)
        self.spacing = zooms[self.up] * {"meter": 1e3, "micron": 1e-3}.get(
            self.file.header.get_xyzt_units()[0], 1.0
        )
        self.doubt = self._doubt(nibabel.io_orientation)

    def placed(self, voxels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return where voxels (n, 3), counted in RAS+, lie (n, 3), in millimetres."""
        return np.asarray(voxels @ self._grid[:3, :3].T + self._grid[:3, 3])

    def _doubt(self, orientation: Any) -> str:
        q, is_q = self.file.get_qform(coded=True)
        s, is_s = self.file.get_sform(coded=True)
        if not is_q and not is_s:
            return "do not say where their axes point (the codes of qform and sform are 0); x is taken to point left"
        axes = np.abs(self.file.affine[:3, :3]) / np.linalg.norm(self.file.affine[:3, :3], axis=0)
        if (axes.max(axis=0) < _OBLIQUE).any():
            return "are turned by more than 30 degrees from the patient's axes, and slices follow the nearest one"
        if is_q and is_s and (orientation(q) != orientation(s)).any():
            return "have a qform and an sform that point to different sides; the sform is used"
        return ""

    def look(self, number: int | None) -> Look:
        count = self.shape[self.across]
        chosen(count, number, "slice")
        size = self.dims[self.right], self.dims[self.up]
        colour = self.file.get_data_dtype().names is not None
        pages = 1
        if number is None:
            pages = count
        return Look(size, colour, pages, self.doubt, self.spacing, _PLANES[self.across])

    def load(self, number: int | None) -> Loaded:
        cut = int(self.stored[self.across])
        count = self.shape[self.across]
        place = chosen(count, number, "slice")
        index: list[Any] = [slice(None)] * 3 + [0] * (len(self.file.shape) - 3)
        index[cut] = count - 1 - place if self.mirrored[self.across] else place
        plane = np.asanyarray(self.file.dataobj[tuple(index[: len(self.file.shape)])])
        plane = plane.reshape(np.delete(self.dims, cut))
        if self.right > self.up:
            plane = plane.T
        right, up = np.delete(self.mirrored, self.across).tolist()
        plane = plane[:: -1 if right else 1, :: -1 if up else 1]
        shown = np.ascontiguousarray(np.rot90(plane))
        if shown.dtype.names:
            return Loaded(Image.fromarray(np.stack([shown[name] for name in "RGB"], axis=-1)))
        if shown.dtype.kind not in "biuf":
            raise UserError(f"its voxels are {shown.dtype}: give real numbers")
        return Loaded(Image.fromarray(shown.astype(np.float32)), None)


def _read(file: Path | bytes, **how: Any) -> Any:
    """Return the data set of a DICOM file."""
    require_extra("medical", "the file is DICOM, which", "pydicom")
    # an extra
    import pydicom

    try:
        return pydicom.dcmread(BytesIO(file) if isinstance(file, bytes) else file, **how)
    except pydicom.errors.InvalidDicomError:
        raise UserError('it has no "DICM" at byte 128, as DICOM files have: convert it') from None


def _frames(data: Any) -> int:
    return max(int(data.get("NumberOfFrames") or 1), 1)


def _has_colour(data: Any) -> bool:
    if data.get("PhotometricInterpretation") != "PALETTE COLOR":
        return int(data.get("SamplesPerPixel", 1)) > 1
    red, green, blue = _palette(data)
    return not red == green == blue


def _palette(data: Any) -> list[bytes]:
    """Return the tables of red, green and blue."""
    names = ("Red", "Green", "Blue")
    return [data.get(f"{name}PaletteColorLookupTableData", b"") for name in names]


def _dicom(data: Any, number: int | None) -> Loaded:
    # an extra
    from pydicom.pixels import pixel_array

    frame = chosen(_frames(data), number, "frame")
    if not any(name in data for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise UserError(
            f"it holds no picture ({data.get('Modality') or 'no modality'}): leave it out"
        )
    try:
        raw = pixel_array(data, index=frame)
    except (RuntimeError, NotImplementedError) as error:
        syntax = data.file_meta.get("TransferSyntaxUID")
        if syntax is None or not syntax.is_compressed:
            raise
        raise UserError(
            f"its pixels are compressed as {syntax.name}, and no installed package decodes them: "
            "pip install pylibjpeg[all], or convert it to Explicit VR Little Endian"
        ) from error
    shown = data.get("PhotometricInterpretation")
    bits = int(data.get("BitsStored") or 0)
    if bits and data.get("HighBit") not in (None, bits - 1):
        raise UserError(
            f"{bits} bits are stored, and the highest is number {data.HighBit}: shift them to the "
            "low end"
        )
    if shown == "PALETTE COLOR":
        return Loaded(_of_palette(raw, data))
    if raw.ndim == 3:
        if raw.shape[2] != 3 or shown in (
            "YBR_PARTIAL_420",
            "YBR_PARTIAL_422",
            "HSV",
            "ARGB",
            "CMYK",
        ):
            raise UserError(f"its colours are {shown}, which is not read: convert it to RGB")
        return Loaded(Image.fromarray((raw >> max(bits - 8, 0)).astype(np.uint8)))
    signed = bool(data.get("PixelRepresentation"))
    window: tuple[float, float] | None = None
    # small values are bright
    if shown == "MONOCHROME1":
        if raw.dtype.kind == "f":
            raise UserError(
                "its pixels are MONOCHROME1 and floats, which have no range to mirror: convert it"
            )
        raw = (-1 if signed else (1 << bits) - 1) - raw.astype(np.int64)
    values = _in_unit(raw, data, frame)
    if shown != "MONOCHROME1":
        window = _voi(data)
    levels = None
    # then they are grey values, not measurements
    if not signed and 0 < bits <= 8 and (values == raw).all():
        levels = 1 << bits
    return Loaded(Image.fromarray(values.astype(np.float32)), levels, window)


def _of_palette(raw: NDArray[Any], data: Any) -> Image.Image:
    # an extra
    from pydicom.pixels import apply_color_lut

    colours = apply_color_lut(raw, data)
    deep = colours.dtype.itemsize == 2
    colours = colours[..., :3]
    if deep and np.frombuffer(b"".join(_palette(data)), "<u2").max(initial=0) > 255:
        colours = colours >> 8
    return Image.fromarray(colours.astype(np.uint8))


def _in_unit(raw: NDArray[Any], data: Any, frame: int) -> NDArray[Any]:
    """Return the values of the modality's unit: by slope and intercept, also those of a single
    frame, or by a table.
    """
    # an extra
    from pydicom.pixels import apply_modality_lut

    if (scaling := _of_frame(data, frame, "PixelValueTransformationSequence")) is not data:
        return raw * float(scaling.RescaleSlope) + float(scaling.RescaleIntercept)
    return np.asarray(apply_modality_lut(raw, data))


def _voi(data: Any) -> tuple[float, float] | None:
    """Return the window that the file suggests."""
    try:
        centre, width = (
            np.atleast_1d(data[name].value)[0] for name in ("WindowCenter", "WindowWidth")
        )
        return float(centre) - float(width) / 2, float(centre) + float(width) / 2
    except (KeyError, TypeError, ValueError, IndexError):
        return None
