"""The chain of custody: what each silo did with which values and what it measured, signed by its
silo key.

A record names values by owner and key, and identifies their contents by SHA-256 of their encoding.
So records form a chain: what one silo took is what another gave. `custody.jsonl` in the run folder
holds one record per line.
"""

import hashlib
import hmac
import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ekiden.core.base.checks import made
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, write_once
from ekiden.core.data.samples import ClientData
from ekiden.core.engine import wire
from ekiden.core.engine.wire import Ref
from ekiden.core.training.weights import Weights
from ekiden.silos.trust import keys

T = TypeVar("T")
FILE = "custody.jsonl"
FORMAT = 3  # format of the records; format 2 had counts of right answers in place of reports
SALT = "custody.salt"  # file in a run's folder at a silo
_SALT_BYTES = 32


@dataclass(frozen=True)
class Taken:
    """A value that a task used."""

    owner: str  # the client that gave it
    key: str  # its name there
    digest: str  # digest of its encoding
    size: int  # its `wire.size`, as found by the silo that used it


@dataclass(frozen=True)
class Hop:
    """A task that a silo did."""

    run: str  # id of the run
    terms: str  # digest of its agreement, and so of hyperparameters, training and the silos' keys
    method: str  # name of the method
    client: str  # the silo that did the task
    samples: int  # number of its training samples
    validation: int  # number of its validation samples
    test: int  # number of its test samples
    data: str  # fingerprint of all these samples, see `fingerprint`
    step: int  # step of the run
    call: int  # number of the task among those of the client in this step
    task: str  # name of the task
    arguments: str  # digest of the server's arguments, with names in place of values
    taken: tuple[Taken, ...]  # the values that the task used
    given: str  # digest of the value that it returned
    size: int  # `wire.size` of that value
    model: str  # digest of the model in that value; empty if there is none
    forward: int  # samples that went forward through a network
    backward: int  # samples that went backward
    format: int = FORMAT  # format of the record

    @property
    def held(self) -> tuple[int, int, int]:
        """Number of training, validation and test samples."""
        return self.samples, self.validation, self.test

    @property
    def key(self) -> str:
        """Name of the returned value, at the client."""
        return f"{self.step}-{self.call}-{self.task}"

    @property
    def ref(self) -> Ref[Any]:
        """Reference to the returned value."""
        return Ref(self.client, self.key)

    def text(self) -> bytes:
        """Return the bytes that are signed."""
        return b"ekiden custody\n" + _json(asdict(self)).encode()


@dataclass(frozen=True)
class Tally:
    """What a silo measured of models on its own test samples."""

    run: str  # id of the run
    terms: str  # digest of its agreement
    client: str  # the silo that measured
    step: int  # number of steps done before the measurement
    results: int  # number of models that are the run's, not a client's own; they come first
    models: tuple[str, ...]  # digest of each model
    last: bool  # whether the run ends with these models
    report: str  # what the silo reported, as it left the silo, in base64; see `report.Reported`
    data: str  # fingerprint of the silo's samples
    format: int = FORMAT  # format of the record

    def text(self) -> bytes:
        """Return the bytes that are signed."""
        return b"ekiden tally\n" + _json(asdict(self)).encode()


@dataclass(frozen=True)
class Record:
    """A hop and its signature in hexadecimal."""

    hop: Hop
    signature: str

    def line(self) -> str:
        """Return the record as a line of text."""
        return _json(asdict(self))

    def signed_by(self, public: str) -> bool:
        """Return whether the holder of the key to `public` signed it."""
        return bool(public) and keys.proves(public, self.hop.text(), self.signature)


@dataclass(frozen=True)
class SignedTally:
    """A tally and its signature in hexadecimal."""

    tally: Tally
    signature: str

    def line(self) -> str:
        """Return the record as a line of text."""
        return _json(asdict(self))

    def signed_by(self, public: str) -> bool:
        """Return whether the holder of the key to `public` signed it."""
        return bool(public) and keys.proves(public, self.tally.text(), self.signature)


def parse(line: str) -> Record:
    """Return the record of a task in a line."""
    return _read(line, Record)


def parse_measured(line: str) -> SignedTally:
    """Return the record of a measurement in a line."""
    return _read(line, SignedTally)


def _read(line: str, kind: type[T]) -> T:
    try:
        values = json.loads(line)
        check_format(values, Path("a record of the chain of custody"))
        return made(kind, values)
    except (ValueError, AttributeError, RecursionError, UserError) as error:
        raise _unreadable(error) from None


def check_format(row: Mapping[str, Any], file: Path) -> None:
    """Refuse a record of another version."""
    said = row.get("hop", row.get("tally"))
    found = said.get("format", 1) if isinstance(said, dict) else FORMAT
    if not (type(found) is int and found == FORMAT):
        raise UserError(
            f"{file} has format {str(found)[:20]}, this version reads {FORMAT}: use the version of "
            "Ekiden that wrote it"
        )


def step_of(row: Mapping[str, Any]) -> int:
    """Return the step of a line of the file, counted from 0."""
    try:
        return int(row["hop"]["step"]) if "hop" in row else int(row["tally"]["step"]) - 1
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(error) from None


def fingerprint(data: ClientData, salt: bytes) -> str:
    """Return a fingerprint of a silo's samples and labels that tells nothing to those without the
    salt (HMAC-SHA256).

    With the salt, one can check a guess, but only a guess of all samples together. So the salt
    stays at the silo.
    """
    parts = (data.train, data.val, data.test)
    return hmac.new(salt, b"".join(part.digest for part in parts), hashlib.sha256).hexdigest()


def kept_salt(folder: Path) -> bytes:
    """Return the salt of a run at a silo, drawn at the first call. Only the file's owner can read
    it.
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
    """Return the SHA-256 of some bytes, in hexadecimal."""
    found = hashlib.sha256()
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


def text_of(report: bytes) -> str:
    """Return a report as text."""
    return b64encode(report).decode()


def bytes_of(text: str) -> bytes:
    """Return a report that `text_of` wrote."""
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise _unreadable(error) from None


def model_digest(value: Any, given: str) -> str:
    """Return the digest of the model in `value`, or `given` if `value` is the model; empty if there
    is none.
    """
    if isinstance(value, Weights):
        return given
    model = getattr(value, "model", None)
    return digest(wire.chunks(model)) if isinstance(model, Weights) else ""


def _unreadable(error: Exception) -> UserError:
    return UserError(f"a record of the chain of custody cannot be read ({type(error).__name__})")


def _json(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), sort_keys=True)
