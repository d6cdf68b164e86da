"""Read DICOM files and slices of NIfTI volumes as images.

`scan.nii.gz#12` is slice 12; `scan.nii.gz` is the middle slice.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ekiden.base.errors import UserError

DICOM, NIFTI = (".dcm", ".dicom"), (".nii", ".nii.gz")


def is_medical(item: Any) -> bool:
    """Return whether `item` has the name of a DICOM or NIfTI file, or is the bytes of a DICOM file."""
    if isinstance(item, Path):
        return split(item)[0].name.lower().endswith((*DICOM, *NIFTI))
    return isinstance(item, bytes) and item[128:132] == b"DICM"


def split(path: Path) -> tuple[Path, int | None]:
    """Return the file, and the number of the slice after #."""
    name, mark, number = path.name.rpartition("#")
    return (path.with_name(name), int(number)) if mark and number.isdigit() else (path, None)


def image(item: Path | bytes) -> Image.Image:
    """Return the slice as grey values: 8 bits if the file says which values are shown, otherwise float.

    Raises:
        UserError: the extra is missing, or there is no such slice.
    """
    path, number = split(item) if isinstance(item, Path) else (None, None)
    if path is not None and path.name.lower().endswith(NIFTI):
        volume = _nifti(path)
        return Image.fromarray(np.ascontiguousarray(np.rot90(_slice(volume, number))).astype(np.float32))
    return _dicom(path or BytesIO(item), number)  # type: ignore[arg-type]


def _nifti(path: Path) -> NDArray[Any]:
    """Return (rows, columns, slices)."""
    try:
        import nibabel  # noqa: PLC0415  (an extra)
    except ImportError:
        raise UserError('NIfTI files need the package nibabel: pip install "ekiden[medical]"') from None
    return np.asarray(nibabel.load(path).dataobj)


def _dicom(file: Path | BytesIO, number: int | None) -> Image.Image:
    try:
        import pydicom  # noqa: PLC0415  (an extra)
        from pydicom.pixels import apply_modality_lut  # noqa: PLC0415
    except ImportError:
        raise UserError('DICOM files need the package pydicom: pip install "ekiden[medical]"') from None
    data = pydicom.dcmread(file)
    raw = data.pixel_array
    if int(data.get("SamplesPerPixel", 1)) == 3:
        return Image.fromarray((raw if raw.ndim == 3 else raw[number or 0]).astype(np.uint8))
    if data.get("PhotometricInterpretation") == "MONOCHROME1":  # small values are bright
        raw = (1 << int(data.BitsStored)) - 1 - raw.astype(np.int64)
    values = apply_modality_lut(raw, data).astype(np.float32)
    if values.ndim == 3:
        values = _slice(values.transpose(1, 2, 0), number)
    elif number:
        raise UserError(f"it has one slice, so there is no slice {number}")
    return Image.fromarray(values)


def _slice(volume: NDArray[Any], number: int | None) -> NDArray[Any]:
    if volume.ndim == 2:
        volume = volume[:, :, None]
    if volume.ndim != 3:
        raise UserError(f"it has {volume.ndim} dimensions: give a volume with three")
    slices = volume.shape[2]
    if number is not None and number >= slices:
        raise UserError(f"it has {slices} slices, so there is no slice {number}: count from 0")
    return volume[:, :, slices // 2 if number is None else number]
