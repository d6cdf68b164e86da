"""Write one picture in many forms."""

import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ekiden.readers.kinds import Images
from tests.fuzz import examples

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


few = settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pixels(seed: int, height: int, width: int, channels: int = 3) -> Pixels:
    """(H, W, channels), or (H, W) for one."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def read(*files: Any, **how: Any) -> Tensor:
    return Images(**how).encode(files)


def tensor(shown: Pixels) -> Tensor:
    return torch.from_numpy(np.atleast_3d(shown)).permute(2, 0, 1)


def tiff(values: NDArray[Any], order: str, *, white_is_zero: bool = False, kind: int = 1) -> bytes:
    """Return a TIFF of one strip with these values (H, W), little-endian (<) or big-endian (>)."""
    data = values.astype(order + values.dtype.str[1:]).tobytes()
    height, width = values.shape
    bits = 8 * values.itemsize
    tags = {
        256: width,
        257: height,
        258: bits,
        259: 1,
        262: int(not white_is_zero),
        273: 8,
        277: 1,
        278: height,
    }
    tags |= {279: len(data), 339: kind}
    entries = b"".join(
        struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())
    )
    place = 8 + len(data)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", place)
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


def stack(kind: str, grey: list[int], **how: Any) -> bytes:
    first, *rest = (Image.fromarray(np.full((6, 6, 3), value, np.uint8)) for value in grey)
    return encoded(first, kind, save_all=True, append_images=rest, **how)
