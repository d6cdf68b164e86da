"""The chain of custody: what each silo did with which values and what it measured, signed by its silo key.

A record names values by owner and key, and what they are by SHA-256 of their encoding, so that records chain: what one
silo took is what another gave. `custody.jsonl` in the run folder holds one record a line.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from ekiden.base.errors import UserError
from ekiden.base.files import disk_error, write_once
from ekiden.base.refs import Ref
from ekiden.data.samples import ClientData
from ekiden.engine import wire
from ekiden.training.weights import Weights
from ekiden.transports.flower import keys
from ekiden.transports.flower.parcel import Count
from ekiden.transports.flower.sealing import Sign

T = TypeVar("T")
FILE = "custody.jsonl"
FORMAT = 2
"""of the records; 1 had neither sizes, compute and fingerprints of data, nor what was measured"""
SALT = "custody.salt"
"""file in a run's folder at a silo"""
_SALT_BYTES = 32
_ROWS = 4096
"""samples that a fingerprint takes in at once"""


@dataclass(frozen=True)
class Taken:
    """A value that a task used.

    Attributes:
        owner: who gave it.
        key: its name there.
        digest: of its encoding.
        size: `wire.size` of it, as the silo that used it found.
    """

    owner: str
    key: str
    digest: str
    size: int


@dataclass(frozen=True)
class Hop:
    """What a silo did.

    Attributes:
        run: id of the run.
        terms: digest of its agreement, thus of hyperparameters, training and the silos' keys.
        method: its name.
        client: who did it.
        samples: that it trains on.
        validation: number of its validation samples.
        test: number of its test samples.
        data: fingerprint of all these, see `fingerprint`.
        step: of the run.
        call: number of the task among those of the client in this step.
        task: its name.
        arguments: digest of what the server said, names of values instead of these.
        taken: the values used.
        given: digest of the value that came out.
        size: `wire.size` of that value.
        model: digest of the model in it; empty where there is none.
        forward: samples that went forward through a network.
        backward: samples that went backward.
        format: of the record.
    """

    run: str
    terms: str
    method: str
    client: str
    samples: int
    validation: int
    test: int
    data: str
    step: int
    call: int
    task: str
    arguments: str
    taken: tuple[Taken, ...]
    given: str
    size: int
    model: str
    forward: int
    backward: int
    format: int = FORMAT

    @property
    def held(self) -> tuple[int, int, int]:
        """Number of training, validation and test samples."""
        return self.samples, self.validation, self.test

    @property
    def key(self) -> str:
        """The name of what came out, at the client."""
        return f"{self.step}-{self.call}-{self.task}"

    @property
    def ref(self) -> Ref[Any]:
        """What came out."""
        return Ref(self.client, self.key)

    def text(self) -> bytes:
        """What is signed."""
        return b"ekiden custody\n" + _json(asdict(self)).encode()


@dataclass(frozen=True)
class Tally:
    """What a silo measured of models on its own test samples.

    Attributes:
        run: id of the run.
        terms: digest of its agreement.
        client: who measured.
        step: number of steps that were done.
        results: how many of the models, the first ones, are the run's and not a client's own.
        models: digest of each.
        counts: what the silo said of each, as coarse as it left the silo.
        data: fingerprint of the silo's samples.
        format: of the record.
    """

    run: str
    terms: str
    client: str
    step: int
    results: int
    models: tuple[str, ...]
    counts: tuple[Count, ...]
    data: str
    format: int = FORMAT

    def text(self) -> bytes:
        """What is signed."""
        return b"ekiden tally\n" + _json(asdict(self)).encode()


@dataclass(frozen=True)
class Record:
    """A hop and its signature in hexadecimal."""

    hop: Hop
    signature: str

    def line(self) -> str:
        """As a line of text."""
        return _json(asdict(self))

    def signed_by(self, public: str) -> bool:
        """Whether the holder of the key to `public` signed it."""
        return bool(public) and keys.proves(public, self.hop.text(), self.signature)


@dataclass(frozen=True)
class SignedTally:
    """A tally and its signature in hexadecimal."""

    tally: Tally
    signature: str

    def line(self) -> str:
        """As a line of text."""
        return _json(asdict(self))

    def signed_by(self, public: str) -> bool:
        """Whether the holder of the key to `public` signed it."""
        return bool(public) and keys.proves(public, self.tally.text(), self.signature)


def record(hop: Hop, sign: Sign) -> Record:
    """`hop`, signed."""
    return Record(hop, sign(hop.text()))


def measured(tally: Tally, sign: Sign) -> SignedTally:
    """`tally`, signed."""
    return SignedTally(tally, sign(tally.text()))


def parse(line: str) -> Record:
    """The record of a task in a line.

    Raises:
        UserError: there is none.
    """
    try:
        hop, signature = _parts(line, "hop")
        taken = tuple(_checked(Taken(**t)) for t in hop["taken"])
        return Record(_checked(Hop(**{**hop, "taken": taken})), signature)
    except _UNREADABLE as error:
        raise _unreadable(error) from None


def parse_measured(line: str) -> SignedTally:
    """The record of a measurement in a line.

    Raises:
        UserError: there is none.
    """
    try:
        tally, signature = _parts(line, "tally")
        counts = tuple(_checked(Count(**c)) for c in tally["counts"])
        models = tuple(tally["models"])
        if any(type(m) is not str for m in models):
            raise TypeError
        return SignedTally(_checked(Tally(**{**tally, "models": models, "counts": counts})), signature)
    except _UNREADABLE as error:
        raise _unreadable(error) from None


def check_format(row: Mapping[str, Any], file: Path) -> None:
    """Refuse a record of another version.

    Raises:
        UserError: says which, and of which file.
    """
    said = row.get("hop", row.get("tally"))
    found = said.get("format", 1) if isinstance(said, dict) else FORMAT
    if not (type(found) is int and found == FORMAT):
        raise UserError(
            f"{file} has format {str(found)[:20]}, this version reads {FORMAT}: use the version of Ekiden that wrote it"
        )


def step_of(row: Mapping[str, Any]) -> int:
    """The step that a line of the file belongs to, counted from 0.

    Raises:
        UserError: it is not a record.
    """
    try:
        return int(row["hop"]["step"]) if "hop" in row else int(row["tally"]["step"]) - 1
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(error) from None


def fingerprint(data: ClientData, salt: bytes) -> str:
    """Names a silo's samples and labels, and tells nothing of them to who does not have the salt (HMAC-SHA256).

    Who has the salt can check a guess of all the samples, and of no less: so it stays at the silo.
    """
    found = hmac.new(salt, digestmod=hashlib.sha256)
    for part in (data.train, data.val, data.test):
        samples = part.samples
        found.update(_json([len(part), str(samples.x.dtype), str(samples.y.dtype), *samples.x.shape[1:]]).encode())
        for rows in torch.split(part.rows, _ROWS):
            for values in (samples.x[rows], samples.y[rows]):
                found.update(values.contiguous().view(torch.uint8).numpy().data if values.numel() else b"")
    return found.hexdigest()


def kept_salt(folder: Path) -> bytes:
    """The salt of a run at a silo, drawn at the first call; readable by its owner only.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / SALT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        salt = write_once(file, secrets.token_bytes(_SALT_BYTES))
    except OSError as error:
        raise disk_error(error, file) from error
    if len(salt) != _SALT_BYTES:
        raise UserError(f"{file} is damaged: restore it, or start a new run")
    return salt


def digest(chunks: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of some bytes, in hexadecimal."""
    found = hashlib.sha256()
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


def model_digest(value: Any, given: str) -> str:
    """Of the model that `value`, whose own digest is `given`, is or has; empty where there is none."""
    if isinstance(value, Weights):
        return given
    model = getattr(value, "model", None)
    return digest(wire.chunks(model)) if isinstance(model, Weights) else ""


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
_KINDS: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (float, int)}


def _parts(line: str, name: str) -> tuple[dict[str, Any], str]:
    """What was signed, as plain values, and the signature."""
    values = json.loads(line)
    said, signature = values[name], values["signature"]
    if set(values) != {name, "signature"} or type(signature) is not str or not isinstance(said, dict):
        raise TypeError
    check_format(values, Path("a record of the chain of custody"))
    return said, signature


def _checked(said: T) -> T:
    """`said`, whose plain values are of the types announced."""
    for f in fields(said):  # type: ignore[arg-type]
        if f.type in _KINDS and type(getattr(said, f.name)) not in _KINDS[f.type]:
            raise TypeError
    return said


def _unreadable(error: Exception) -> UserError:
    return UserError(f"a record of the chain of custody cannot be read ({type(error).__name__})")


def _json(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), sort_keys=True)
