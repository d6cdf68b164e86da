"""Digests of a run's data and initial model, so that nobody resumes or measures it with something else."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ekiden._version import __version__
from ekiden.base.seeds import seeded
from ekiden.data.samples import ClientData, Subset
from ekiden.engine.worker import Setup
from ekiden.training import frozen
from ekiden.training.network import Network

_CHUNK = 1 << 26  # bytes hashed at a time
_SHOWN = 8  # outputs of the initial model that are kept
_LISTED = 3  # clients that a message names
_LIKE = 1e-2  # relative: more than machines and devices differ by rounding, less than other networks differ


def data_digests(clients: Sequence[ClientData]) -> dict[str, str]:
    """Return a digest of what each client holds: inputs and labels, in order, of its training, validation, test data.

    It depends on the contents alone, not on the files that they came from or the machine.
    """
    return {client.name: _client(client) for client in clients}


@cache
def code() -> str:
    """Return the version of this package with a digest of its source: two checkouts of one version differ."""
    return f"{__version__}+{source_digest(Path(__file__).parents[1])}"


def source_digest(root: Path) -> str:
    """Return a digest of the names and contents of all Python files below a folder."""
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def model_digest(setup: Setup) -> dict[str, Any]:
    """Return what identifies the initial model: a digest of its values and its structure, and some outputs.

    The outputs tell apart networks that have the same layers but use them differently.
    """
    module = setup.build()
    structure = re.sub(r"0x[0-9a-f]+", "", repr(module))  # addresses differ between processes
    network = Network(module, setup.hardware.device)
    digest = hashlib.blake2b(structure.encode(), digest_size=16)
    for name, tensor in network.module.state_dict().items():
        _add(digest, tensor, name)
    found = {"digest": digest.hexdigest(), "answers": _answers(network, setup.dataset.shape)}
    return found | ({"frozen": constants} if (constants := frozen.digest(network.module)) else {})


def values_digest(module: nn.Module) -> str:
    """Return a digest of all values of an initial network, including frozen ones."""
    digest = hashlib.blake2b(frozen.digest(module).encode(), digest_size=16)
    for name, tensor in module.state_dict().items():
        _add(digest, tensor, name)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of named tensors, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        _add(digest, tensors[name], name)
    return digest.hexdigest()


def unlike(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say which digests in a run folder differ from those wanted; those that one side lacks are not compared.

    A run between machines has none of the data.
    """
    different = []
    if "data" in found and "data" in wanted:
        there, here = found["data"], wanted["data"]
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if names:
            more = f" and {len(names) - _LISTED} other clients" if len(names) > _LISTED else ""
            different.append(f"the data of {', '.join(names[:_LISTED])}{more}")
    if "model" in found and "model" in wanted:
        if found["model"].get("frozen") != wanted["model"].get("frozen"):
            different.append("the frozen part of the network")
        elif not _alike(found["model"], wanted["model"]):
            different.append("the initial model")
    return different


def _client(client: ClientData) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, part in (("train", client.train), ("val", client.val), ("test", client.test)):
        _add_samples(digest, part, name)
    return digest.hexdigest()


def _add_samples(digest: "hashlib.blake2b", part: Subset, name: str) -> None:
    x = part.samples.x
    digest.update(f"{name} {len(part)} {tuple(x.shape[1:])} {x.dtype};".encode())
    for rows in torch.split(part.rows, max(1, _CHUNK // max(1, x[:1].nbytes))):
        digest.update(_bytes(x[rows]))
    _add(digest, part.y, "labels")


def _add(digest: "hashlib.blake2b", tensor: Tensor, name: str) -> None:
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
    digest.update(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _answers(network: Network, shape: tuple[int, ...]) -> list[float]:
    """Return outputs for two fixed inputs; none if they are not finite or the network does not take such inputs."""
    x = torch.arange(2 * prod(shape), dtype=torch.float32).sin().reshape(2, *shape).to(network.params.device)
    with seeded(0), torch.inference_mode():
        try:
            out = network.module.eval()(x)
        except Exception:  # the user's own network may take certain values only
            return []
    values = [float(v) for v in out.float().flatten()[:_SHOWN].cpu()]
    return values if all(map(isfinite, values)) else []


def _alike(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    before, now = found["answers"], wanted["answers"]
    near = _LIKE * max((abs(v) for v in before), default=0.0)
    same = len(before) == len(now) and all(abs(a - b) <= near for a, b in zip(before, now, strict=True))
    return found["digest"] == wanted["digest"] and (same or not before or not now)
