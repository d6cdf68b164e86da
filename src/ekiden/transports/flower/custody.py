"""The chain of custody: what each silo did with which values, signed by its silo key.

A record names values by owner and key, and what they are by SHA-256 of their encoding, so that records chain: what one
silo took is what another gave. `custody.jsonl` in the run folder holds one record a line.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ekiden.core import wire
from ekiden.errors import UserError
from ekiden.learning.weights import Weights
from ekiden.transports.flower import keys
from ekiden.transports.flower.sealing import Sign

FILE = "custody.jsonl"


@dataclass(frozen=True)
class Taken:
    """A value that a task used.

    Attributes:
        owner: who gave it.
        key: its name there.
        digest: of its encoding.
    """

    owner: str
    key: str
    digest: str


@dataclass(frozen=True)
class Hop:
    """What a silo did.

    Attributes:
        run: id of the run.
        terms: digest of its agreement, thus of hyperparameters, training and the silos' keys.
        method: its name.
        client: who did it.
        samples: that it trains on.
        step: of the run.
        call: number of the task among those of the client in this step.
        task: its name.
        arguments: digest of what the server said, names of values instead of these.
        taken: the values used.
        given: digest of the value that came out.
        model: digest of the model in it; empty where there is none.
    """

    run: str
    terms: str
    method: str
    client: str
    samples: int
    step: int
    call: int
    task: str
    arguments: str
    taken: tuple[Taken, ...]
    given: str
    model: str

    @property
    def key(self) -> str:
        """The name of what came out, at the client."""
        return f"{self.step}-{self.call}-{self.task}"

    def text(self) -> bytes:
        """What is signed."""
        return b"ekiden custody\n" + _json(asdict(self)).encode()


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


def record(hop: Hop, sign: Sign) -> Record:
    """`hop`, signed."""
    return Record(hop, sign(hop.text()))


def parse(line: str) -> Record:
    """The record in a line.

    Raises:
        UserError: there is none.
    """
    try:
        values = json.loads(line)
        hop = values["hop"]
        taken = tuple(Taken(**t) for t in hop["taken"])
        found = Record(Hop(**(hop | {"taken": taken})), values["signature"])
        texts = (found.hop.client, found.hop.task, found.hop.given, found.hop.model, found.signature)
        numbers = (found.hop.step, found.hop.call, found.hop.samples)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"a record of the chain of custody cannot be read ({type(error).__name__})") from None
    if any(type(t) is not str for t in texts) or any(type(n) is not int for n in numbers):
        raise UserError("a record of the chain of custody cannot be read: a value is of another type than announced")
    return found


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


def _json(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), sort_keys=True)
