"""The chain of custody: what each silo did with which values and what it measured, signed by its
silo key.

An entry names values by owner and key, and identifies their contents by SHA-256 of their encoding.
So entries form a chain: what one silo took is what another gave. `custody.jsonl` in the run folder
holds one entry per line, in a DSSE envelope.
"""

import hashlib
import hmac
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ekiden.core.base.checks import CountOrZero, made
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import ClientData
from ekiden.core.engine import wire
from ekiden.core.engine.wire import Ref
from ekiden.core.training.weights import Weights
from ekiden.silos.trust import keys
from ekiden.silos.trust.sealing import Sign

FILE = "custody.jsonl"


@dataclass(frozen=True)
class Taken:
    """A value that a task used."""

    # the client that gave it
    owner: str
    # its name there
    key: str
    # digest of its encoding
    digest: str
    # its `wire.size`, as found by the silo that used it
    size: int


@dataclass(frozen=True)
class Entry:
    """What a silo says about something that it did."""

    # id of the run
    run: str
    # digest of its agreement, and so of hyperparameters, training and the silos' keys
    terms: str
    # the silo
    client: str
    # step of the run; of a measurement, number of steps done before
    step: int
    # fingerprint of all its samples, see `fingerprint`
    data: str

    @property
    def after(self) -> int:
        """Number of steps of which it is a part."""
        return self.step


@dataclass(frozen=True)
class Hop(Entry):
    """A task that a silo did."""

    # numbers of its training, validation and test samples
    samples: tuple[int, int, int]
    # number of the task among those of the client in this step
    call: int
    # name of the task
    task: str
    # digest of the server's arguments, with names in place of values
    arguments: str
    # the values that the task used
    taken: tuple[Taken, ...]
    # digest of the value that it returned
    given: str
    # `wire.size` of that value
    size: CountOrZero
    # digest of the model in that value; empty if there is none
    model: str
    # samples that went forward through a network
    forward: CountOrZero
    # samples that went backward
    backward: CountOrZero

    def __str__(self) -> str:
        return f"step {self.step + 1}, {self.client}, {self.task}"

    @property
    def after(self) -> int:
        return self.step + 1

    @property
    def ref(self) -> Ref[Any]:
        """Reference to the returned value."""
        return Ref(self.client, f"{self.step}-{self.call}-{self.task}")


@dataclass(frozen=True)
class Tally(Entry):
    """What a silo measured of models on its own test samples."""

    # number of models that are the run's, not a client's own; they come first
    results: int
    # digest of each model
    models: tuple[str, ...]
    # what the silo reported, as it left the silo, in base64; see `report.Reported`
    report: str

    def __str__(self) -> str:
        return f"what {self.client} measured after step {self.step}"


def is_number_of_models(models: int, results: int, clients: int) -> bool:
    """Return whether a run over so many clients can have these models to measure, of which the
    first ones are its results and the others the clients' own.
    """
    return models > 0 and results in (0, 1) and models - results in (0, clients)


# The names have the version of the entries: another version is another kind.
_KINDS: dict[str, type[Entry]] = {"hop.v5": Hop, "tally.v5": Tally}


def signed(entry: Entry, sign: Sign) -> str:
    """Return the envelope of an entry as a line of text."""
    kind = next(kind for kind, what in _KINDS.items() if isinstance(entry, what))
    payload = keys.canonical(asdict(entry))
    signature = bytes.fromhex(sign(kind, payload))
    envelope = {
        "payloadType": keys.type_of(kind),
        "payload": b64encode(payload).decode(),
        "signatures": [{"keyid": entry.client, "sig": b64encode(signature).decode()}],
    }
    return keys.canonical(envelope).decode()


def parse(line: str) -> Entry:
    """Return the entry in an envelope, whoever signed it."""
    return _read(line)[0]


def opened(line: str, silos: Mapping[str, str]) -> Entry:
    """Return the entry in an envelope, which the silo signed that it is about.

    Args:
        line: the envelope.
        silos: public key of each silo.
    """
    entry, kind, payload, signature = _read(line)
    public = silos.get(entry.client, "")
    if not public or not keys.proves(public, kind, payload, signature):
        raise UserError(f"{entry}: the signature is not {entry.client}'s")
    return entry


def _read(line: str) -> tuple[Entry, str, bytes, str]:
    """Return entry, kind, payload and signature (in hexadecimal) of an envelope."""
    try:
        envelope = json.loads(line)
        found = envelope["payloadType"]
        (signature,) = envelope["signatures"]
        payload = b64decode(envelope["payload"], validate=True)
        proof = b64decode(signature["sig"], validate=True).hex()
        kind = next((kind for kind in _KINDS if keys.type_of(kind) == found), "")
        entry = made(_KINDS[kind], json.loads(payload)) if kind else None
        named = entry is None or (len(envelope), signature.keys(), signature["keyid"]) == (
            3,
            {"keyid", "sig"},
            entry.client,
        )
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError, UserError) as error:
        raise _unreadable(type(error).__name__) from None
    if entry is None:
        raise _unreadable(f"{str(found)[:80]}: use the version of Ekiden that wrote it")
    if not named:
        raise _unreadable("other fields")
    return entry, kind, payload, proof


def fingerprint(data: ClientData, salt: bytes) -> str:
    """Return a fingerprint of a silo's samples and labels that tells nothing to those without the
    salt (HMAC-SHA256).

    With the salt, one can check a guess, but only a guess of all samples together. So the salt
    stays at the silo.
    """
    parts = (data.train, data.val, data.test)
    return hmac.new(salt, b"".join(part.digest for part in parts), hashlib.sha256).hexdigest()


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
        raise _unreadable(type(error).__name__) from None


def model_digest(value: Any, given: str) -> str:
    """Return the digest of the model in `value`, or `given` if `value` is the model; empty if there
    is none.
    """
    if isinstance(value, Weights):
        return given
    model = getattr(value, "model", None)
    return digest(wire.chunks(model)) if isinstance(model, Weights) else ""


def _unreadable(why: str) -> UserError:
    return UserError(f"an entry of the chain of custody cannot be read ({why})")
