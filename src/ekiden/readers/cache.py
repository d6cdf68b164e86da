"""Keep decoded data sets on disk, named by the contents of their sources.

Large sets stay there: their images are mapped into memory, so a set larger than memory can be used
for training.
"""

import contextlib
import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base import files
from ekiden.core.base.errors import DataWarning, UserError, warn
from ekiden.core.data.samples import Dataset, Samples
from ekiden.core.tasks import recorded, task_of
from ekiden.readers.kinds import from_json

# bytes read or written at a time
_PIECE = 1 << 24
# of the decoder, its lines and the format; after a new number, old files are not used
VERSION = 6


def key(pieces: Iterable[bytes | memoryview | str | Path]) -> str:
    """Return the digest of the decoder's version and the pieces, see `files.digest_of`."""
    return files.digest_of(f"ekiden {VERSION}", pieces)


def cached(name: str, content: str, build: Callable[[], Dataset]) -> Dataset:
    """Return the decoded data set from its cache file, or else build it and store it.

    A damaged file is built again. A folder that cannot be written to is not an error. What `build`
    warned of is said each time. Only samples and names of classes and domains are stored, under a
    name and the key of their sources.
    """
    path = files.cache_folder() / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}-{content}.safetensors"
    found = _load(path)
    if found is None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", DataWarning)
            dataset = build()
        said = [str(one.message) for one in seen if issubclass(one.category, DataWarning)]
        found = dataset, said
        with contextlib.suppress(OSError, UserError):
            if dataset.inputs.kept:
                _store(path, dataset, said)
                if max(part.x.nbytes for part in (dataset.train, dataset.test)) >= files.LARGE:
                    found = _load(path) or found
        for one in seen:
            if not issubclass(one.category, DataWarning):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    dataset, said = found
    for line in said:
        warn(line, DataWarning)
    return dataset


def _store(path: Path, dataset: Dataset, said: Sequence[str]) -> None:
    tensors = dict[str, Tensor]()
    for part, samples in ("test", dataset.test), ("train", dataset.train):
        for field, tensor in sorted(vars(samples).items()):
            if isinstance(tensor, Tensor):
                tensors[f"{part}.{field}"] = tensor.contiguous()
    names = {
        "name": dataset.name,
        "classes": dataset.classes,
        "domains": dataset.domains,
        "groups": dataset.groups,
        "task": recorded(dataset.task),
        "least": dataset.least,
        "inputs": dataset.inputs.to_json(),
        "said": said,
        "sum": _sum(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, files.safetensors_chunks(tensors, {"ekiden": json.dumps(names)}), sync=False)


def _load(path: Path) -> tuple[Dataset, list[str]] | None:
    """Return the data set in a file, and what was said about it."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(begin - 8))
            total = 0
            # read, not mapped: they do not stay in memory
            while piece := file.read(_PIECE):
                total = zlib.crc32(piece, total)
            names = json.loads(described.pop("__metadata__")["ekiden"])
            if names["sum"] != total:
                return None
            parts: dict[str, dict[str, Any]] = {"train": {}, "test": {}}
            for name, about in described.items():
                part, _, field = name.partition(".")
                first, end = about["data_offsets"]
                at = begin + first
                shape = tuple(about["shape"])
                dtype = next(kind for kind, text in files.DTYPES.items() if text == about["dtype"])
                if end - first >= files.LARGE and dtype == torch.uint8:
                    parts[part][field] = files.Place(path, at, shape).open()
                else:
                    file.seek(at)
                    data = torch.from_numpy(np.fromfile(file, np.uint8, end - first))
                    parts[part][field] = data.view(dtype).view(shape)
        classes = tuple(names["classes"])
        dataset = Dataset(
            names["name"],
            Samples(classes=classes, **parts["train"]),
            Samples(classes=classes, **parts["test"]),
            classes,
            tuple(names["domains"]),
            task=task_of(names["task"]),
            inputs=from_json(names["inputs"]),
            groups=tuple(names["groups"]),
            least=names["least"],
        )
        return dataset, names["said"]
    except Exception:  # whatever is wrong with it, it can be built from its sources
        return None


def _sum(tensors: Mapping[str, Tensor]) -> int:
    """Return the checksum of all bytes."""
    total = 0
    for tensor in tensors.values():
        total = zlib.crc32(files.bytes_of(tensor), total)
    return total
