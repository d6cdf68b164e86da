"""Write one picture in many forms."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]

TURNED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""what a camera does to the picture that it stores with this EXIF orientation"""


def encoded(
    image: Image.Image, kind: str = "PNG", orientation: int | None = None, **how: Any
) -> bytes:
    """Return the file of a picture; with an orientation, stored turned with the tag that says
    so."""
    if orientation is not None:
        turn = TURNED[orientation]
        image = image if turn is None else image.transpose(turn)
        exif = Image.Exif()
        exif[0x0112] = orientation
        how["exif"] = exif
    out = BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def dicom(
    path: Path,
    pixels: NDArray[Any],
    shown: str,
    *,
    bits: int = 8,
    signed: bool = False,
    **more: Any,
) -> Path:
    """Write pixels (H, W), (H, W, 3), or with `NumberOfFrames` one more dimension before them, as a
    DICOM file."""
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = (
        meta.MediaStorageSOPClassUID,
        meta.MediaStorageSOPInstanceUID,
    )
    colour = pixels.ndim > 2 + ("NumberOfFrames" in more)
    data.Rows, data.Columns = pixels.shape[-3:-1] if colour else pixels.shape[-2:]
    data.SamplesPerPixel, data.PhotometricInterpretation = 3 if colour else 1, shown
    if colour:
        data.PlanarConfiguration = 0
    allocated = 8 if bits <= 8 else 16
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = (
        allocated,
        bits,
        bits - 1,
        int(signed),
    )
    for name, value in more.items():
        setattr(data, name, value)
    if colour and data.PlanarConfiguration:
        pixels = np.moveaxis(pixels, -1, -3)
    stored = pixels.astype(f"<{'i' if signed else 'u'}{allocated // 8}").tobytes()
    data.PixelData = stored + b"\0" * (len(stored) % 2)
    data.save_as(path, enforce_file_format=True)
    return path
