"""Keep decoded data sets on disk, named by the contents of their sources.

Large sets stay there: their images are mapped into memory, so a set larger than memory can be used for training.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ekiden.base.errors import DataWarning
from ekiden.data import mapped
from ekiden.data.kinds import from_json, to_json
from ekiden.data.mapped import Place
from ekiden.data.samples import Dataset, Samples
from ekiden.data.tasks import recorded, task_of

_PIECE = 1 << 24  # bytes read or written at a time
VERSION = 3  # of the decoder and of the format; after a new number, old files are not used


def key(pieces: Iterable[bytes | memoryview | str | Path]) -> str:
    """Return the hexadecimal BLAKE2b of the format version and the pieces; of a path, the file's contents count."""
    digest = hashlib.blake2b(f"ekiden {VERSION}".encode(), digest_size=16)
    for piece in pieces:
        if isinstance(piece, Path):
            with piece.open("rb") as file:
                piece = hashlib.file_digest(file, hashlib.blake2b).digest()  # noqa: PLW2901
        data = piece.encode() if isinstance(piece, str) else piece
        digest.update(len(data).to_bytes(8, "little"))  # so that two lists of pieces never give the same bytes
        digest.update(data)
    return digest.hexdigest()


def cached(name: str, content: str, build: Callable[[], Dataset]) -> Dataset:
    """Return the decoded data set from its cache file, or else build it and store it.

    A damaged file is built again. A folder that cannot be written to is not an error. What `build` warned of is said
    each time.

    Args:
        name: beginning of the file's name.
        content: key of the data set's sources.
        build: makes the data set; only samples and names of classes and domains are stored.
    """
    path = mapped.folder() / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}-{content}.safetensors"
    found = _load(path)
    if found is None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", DataWarning)
            dataset = build()
        said = [str(one.message) for one in seen if issubclass(one.category, DataWarning)]
        found = dataset, said
        with contextlib.suppress(OSError):
            if dataset.inputs.kept:
                _store(path, dataset, said)
                if max(part.x.nbytes for part in (dataset.train, dataset.test)) >= mapped.LARGE:
                    found = _load(path) or found
        for one in seen:
            if not issubclass(one.category, DataWarning):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    dataset, said = found
    for line in said:
        warnings.warn(line, DataWarning, stacklevel=2)
    return dataset


def _store(path: Path, dataset: Dataset, said: Sequence[str]) -> None:
    tensors = {
        f"{part}.{field}": tensor.contiguous()
        for part, samples in (("train", dataset.train), ("test", dataset.test))
        for field, tensor in vars(samples).items()
        if isinstance(tensor, Tensor)
    }
    names = {
        "name": dataset.name,
        "classes": dataset.classes,
        "domains": dataset.domains,
        "groups": dataset.groups,
        "task": recorded(dataset.task),
        "least": dataset.least,
        "inputs": to_json(dataset.inputs),
        "said": said,
        "sum": _sum(_pieces(tensors[name]) for name in sorted(tensors)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_header(tensors, {"ekiden": json.dumps(names)}))
            for name in sorted(tensors):
                file.writelines(_pieces(tensors[name]))
        os.replace(temporary, path)  # readers see a complete file or none
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file. We write the file in pieces; the library would copy all into memory."""
    described: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        shape = list(tensors[name].shape)
        described[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_DTYPES = {torch.uint8: "U8", torch.int64: "I64", torch.float32: "F32", torch.float64: "F64"}


def _load(path: Path) -> tuple[Dataset, list[str]] | None:
    """Return the data set in a file, and what was said about it."""
    if not path.is_file():
        return None
    try:
        tensors: dict[str, Any] = {}
        total = 0
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(length))
            names = json.loads(described.pop("__metadata__")["ekiden"])
            for name in sorted(described):
                begin, end = described[name]["data_offsets"]
                dtype = next(dtype for dtype, text in _DTYPES.items() if text == described[name]["dtype"])
                shape, at = tuple(described[name]["shape"]), 8 + length + begin
                file.seek(at)
                if end - begin < mapped.LARGE or dtype != torch.uint8:
                    data = file.read(end - begin)
                    total = zlib.crc32(data, total)
                    whole = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
                    tensors[name] = whole.view(shape)
                    continue
                for piece in _read(file, end - begin):
                    total = zlib.crc32(piece, total)
                tensors[name] = Place(path, at, shape).open()
        if names["sum"] != total:
            return None
        train, test = (
            Samples(**{k.removeprefix(part): t for k, t in tensors.items() if k.startswith(part)})
            for part in ("train.", "test.")
        )
        more: dict[str, Any] = {"inputs": from_json(names["inputs"])}
        more |= {"groups": tuple(names.get("groups", ())), "least": names.get("least", 0)}
        if "task" in names:
            more["task"] = task_of(_tuples(names["task"]))
        dataset = Dataset(names["name"], train, test, tuple(names["classes"]), tuple(names["domains"]), **more)
        return dataset, names["said"]
    except Exception:  # whatever is wrong with it, it can be built from its sources
        return None


def _read(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next bytes of a file: read, not mapped, so that they do not stay in memory."""
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        size -= len(piece)
        yield piece


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor."""
    flat = tensor.reshape(-1).view(torch.uint8)
    for piece in torch.split(flat, _PIECE) if len(flat) else ():
        yield piece.numpy().data


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _sum(tensors: Iterable[Iterable[memoryview]]) -> int:
    """Return the checksum of all bytes."""
    total = 0
    for pieces in tensors:
        for piece in pieces:
            total = zlib.crc32(piece, total)
    return total
