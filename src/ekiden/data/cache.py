"""Decoded data sets on disk, named by the contents of their sources."""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ekiden.data.samples import Dataset, Samples
from ekiden.data.tasks import recorded, task_of

VERSION = 1  # of the decoder and of the format; a new number makes all old files unused


def folder() -> Path:
    """`$EKIDEN_CACHE`, or `~/.cache/ekiden`."""
    return Path(os.environ.get("EKIDEN_CACHE") or "~/.cache/ekiden").expanduser()


def key(pieces: Iterable[bytes | memoryview | str | Path]) -> str:
    """Hexadecimal BLAKE2b of the format version and the pieces; a path stands for what its file holds."""
    digest = hashlib.blake2b(f"ekiden {VERSION}".encode(), digest_size=16)
    for piece in pieces:
        if isinstance(piece, Path):
            with piece.open("rb") as file:
                piece = hashlib.file_digest(file, hashlib.blake2b).digest()  # noqa: PLW2901
        data = piece.encode() if isinstance(piece, str) else piece
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of pieces run together alike
        digest.update(data)
    return digest.hexdigest()


def cached(name: str, content: str, build: Callable[[], Dataset]) -> Dataset:
    """The decoded data set, from its cache file, or else built and then stored.

    A damaged file is built again; a folder that cannot be written to is no error.

    Args:
        name: starts the name of the file.
        content: key of what the data set is made of.
        build: makes it; only samples and names of classes and domains are stored.
    """
    path = folder() / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}-{content}.safetensors"
    dataset = _load(path)
    if dataset is None:
        dataset = build()
        with contextlib.suppress(OSError):
            _store(path, dataset)
    return dataset


def _store(path: Path, dataset: Dataset) -> None:
    tensors = {
        f"{part}.{field}": tensor
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
        "sum": _sum(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    os.close(handle)
    try:
        save_file({k: t.contiguous() for k, t in tensors.items()}, temporary, metadata={"ekiden": json.dumps(names)})
        os.replace(temporary, path)  # readers see the whole file or none
    except Exception as error:
        Path(temporary).unlink(missing_ok=True)
        raise OSError(str(error)) from error  # safetensors has an error of its own for a full disk


def _load(path: Path) -> Dataset | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            names = json.loads(file.metadata()["ekiden"])
            tensors = {k: file.get_tensor(k) for k in sorted(file.keys())}
        if names["sum"] != _sum(tensors):
            return None
        train, test = (
            Samples(**{k.removeprefix(part): t for k, t in tensors.items() if k.startswith(part)})
            for part in ("train.", "test.")
        )
        more = {"groups": tuple(names.get("groups", ())), "least": names.get("least", 0)}
        if "task" in names:
            more["task"] = task_of(_tuples(names["task"]))
        return Dataset(names["name"], train, test, tuple(names["classes"]), tuple(names["domains"]), **more)
    except Exception:  # whatever is wrong with it, the sources are there
        return None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _sum(tensors: dict[str, Tensor]) -> int:
    """Checksum of all bytes."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].contiguous().numpy().data, total)
    return total
