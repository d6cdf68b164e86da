"""The messages between coordinator and silos: a typed header and a body, as one byte string.

What a request holds, arguments and other silos' values, is opened and checked here before anything
is executed.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import isfinite
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from ekiden.core.engine import wire
from ekiden.core.engine.method import OwnSamples
from ekiden.core.engine.wire import SERVER, Encoded
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.sample_terms import SampleTerms
from ekiden.silos.trust.sealing import Lock, Party, Reader

T = TypeVar("T")
# a step, and a client that was missing in it
Absence = tuple[int, str]
# the name of a value: step, number of the task there, and the task
VALUE = re.compile(r"(\d{1,9})-(\d{1,9})-(\w{1,100})")
# the kind of request, and of what its answer signs
HELLO = "hello"
_LENGTH = 8
_MOST_HEADER = 1 << 22


@dataclass(frozen=True)
class ParcelPart:
    """A value of another client in the body, as its owner encoded and sealed it."""

    owner: str
    key: str
    length: int
    lock: Lock | None = None


@dataclass(frozen=True)
class Ask:
    """A request of the coordinator to a silo."""

    # hello, task, value, evaluate or status
    kind: str
    # terms of the run, see `Agreement`; empty in a hello that only asks what a silo holds
    agreement: str = ""
    # random text that the answer to a hello must sign
    nonce: str = ""
    # in a hello without terms: the name of the data set that the run wants; empty: the only one
    data: str = ""
    # in a hello without terms: what the plan of the run says, as terms of no data; see `session.planned`
    plan: str = ""
    # step of the task
    step: int = 0
    # number of the task among those of this client in this step
    call: int = 0
    # name of the task
    task: str = ""
    # key of the requested value
    key: str = ""
    # place (step and call) of the task that left the private state to start from; empty if there is
    # none
    state: str = ""
    # number of steps of the run that are final
    settled: int = 0
    # keys of the values from those steps that are still needed
    keep: tuple[str, ...] = ()
    # which clients were missing in which step; what they did there does not count. All absences if
    # the method knows
    # beforehand what it asks for, otherwise only this silo's own.
    absent: tuple[tuple[int, str], ...] = ()
    # what the body holds after the arguments
    parts: tuple[ParcelPart, ...] = ()
    # bytes of the arguments in the body
    length: int = 0
    # lock of the arguments, or of the models to measure
    lock: Lock | None = None
    # parties for which to seal the value, which then comes with the answer
    readers: tuple[Reader, ...] = ()
    # all silos that give a part to the sum to which the task adds this silo's, with their keys
    members: tuple[Reader, ...] = ()
    # number of models to measure that are the run's result, not a client's own; they come first
    results: int = 0
    # records of the chain of custody, one for each model to measure: its owner signs that it is the
    # run's result
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A silo's answer to a request."""

    # name of the silo
    silo: str
    # why the silo refused or failed; empty if all went well
    error: str = ""
    # locks of the value, one for each reader
    locks: tuple[Lock, ...] = ()
    # signed record of the task or the measurement in the chain of custody; see `custody`
    record: str = ""
    # in answer to a status: whether the silo is working on this run
    busy: bool = False
    # in answer to a task: place of the task that left the private state that the silo has after
    # this one
    state: str = ""


@dataclass(frozen=True)
class Hello:
    """How a silo introduces itself."""

    # version of Ekiden with a digest of its source, see `code_version`
    version: str
    # What follows is empty if it does not take part.
    # what it says about its samples
    holds: SampleTerms = field(default_factory=SampleTerms)
    # numbers for training, validation and test
    samples: tuple[int, int, int] = (0, 0, 0)
    # signature of nonce and name by the silo's key, in hexadecimal
    signature: str = ""
    # X25519 key of the run whose terms came with the hello, in hexadecimal
    sealing: str = ""
    # signature of `sealing` by the silo's key
    proof: str = ""
    # training samples of all silos in each class, if the silos agreed on them
    counts: dict[str, int] = field(default_factory=dict)
    # of how many features it gives exact sums at most; 0: of any number
    features: int = 0


def pack(header: Any, body: Iterable[bytes | memoryview] = ()) -> bytes:
    """Return `header` and the pieces of the body as one byte string."""
    head = wire.encode(header)
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, *body))


def unpack(data: bytes | memoryview, kind: type[T]) -> tuple[T, memoryview]:
    """Return the header and the body, which is not copied.

    Raises:
        WireError: the data are truncated, or have no such header.
    """
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > min(_MOST_HEADER, len(data) - _LENGTH):
        raise wire.WireError("unreadable message: truncated, or not written by Ekiden")
    header: T = wire.decode(data[_LENGTH : _LENGTH + length], kind)
    return header, memoryview(data)[_LENGTH + length :]


def said(text: str, most: int = 1000) -> str:
    """Return another party's text as one line without control characters, so it cannot move a
    terminal's cursor.
    """
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[:most]}..."


def signed_text(nonce: str, name: str) -> bytes:
    """Return what a silo signs to prove that it is `name`."""
    return keys.canonical([nonce, name])


@dataclass(frozen=True)
class Contents:
    """An opened request."""

    # the task's arguments, encoded, with Refs in place of values
    arguments: Encoded
    # values of other silos, encoded, by owner and key
    values: Mapping[tuple[str, str], Encoded]

    def digest(self, terms: str, ask: Ask, private: Any) -> str:
        """Return a digest of the request, its terms and the private state before it; sealing does
        not change it.
        """
        members = [(member.name, member.key) for member in ask.members]
        given = [(name, value.digest) for name, value in self.values.items()]
        asked = (terms, ask.task, self.arguments.digest, *given, *members)
        return custody.digest([repr(asked).encode(), *wire.chunks(private)])[:32]


def arguments_key(ask: Ask) -> str:
    """Return the name under which a task's arguments are sealed. It includes what the silo forgets
    with the request.
    """
    forget = custody.digest([wire.encode((ask.settled, ask.keep, ask.absent))])[:16]
    return f"arguments of {ask.step}-{ask.call}-{ask.task}, {forget}"


def value_key(key: str, absent: Collection[Absence]) -> str:
    """Return the name under which a value is sealed. It includes the clients that were missing
    before it was made.

    So the seal opens only if the silo that uses the value was told the same absences as the silo
    that made it.
    """
    step = int(key.split("-", 1)[0])
    before = tuple(sorted(one for one in absent if one[0] < step))
    return f"{key} without {custody.digest([wire.encode(before)])[:16]}" if before else key


def opened(ask: Ask, body: memoryview, sealer: Party, absent: Collection[Absence] = ()) -> Contents:
    """Return what the body of a request for a task holds.

    Raises:
        WireError: the body is shorter or longer than announced, or a seal is broken.
    """
    values: dict[tuple[str, str], Encoded] = {}
    offset = ask.length
    lengths = (offset, *(part.length for part in ask.parts))
    if min(lengths) < 0 or sum(lengths) != len(body):
        raise wire.WireError("message is not as long as it says: refused")
    for part in ask.parts:
        piece = body[offset : offset + part.length]
        if not VALUE.fullmatch(part.key):
            raise wire.WireError(f"no value can be called {part.key[:80]!r}: refused")
        name = value_key(part.key, absent)
        values[part.owner, part.key] = sealer.open(piece, part.lock, part.owner, name, ask.step)
        offset += part.length
    return Contents(
        sealer.open(body[: ask.length], ask.lock, SERVER, arguments_key(ask), ask.step), values
    )


def check(value: Any, network: Network, *, whole: bool) -> None:
    """Refuse (WireError) models that do not fit and numbers that are not finite, before anything is
    executed.

    With `whole`, parts of a model, such as only the extractor, are refused too.
    """
    own = (network.params, network.buffers, network.counters)
    for part in _records(value):
        if isinstance(part, Weights):
            for here, there in zip(own, (part.params, part.buffers, part.counters), strict=True):
                size = there.numel()
                fits = size == here.numel() or (size < here.numel() and not whole)
                if there.dtype != here.dtype or there.ndim != 1 or not fits:
                    raise wire.WireError(
                        "message holds a model of another shape or type than this run's: refused"
                    )
        elif (isinstance(part, Tensor) and not _finite(part)) or (
            isinstance(part, float) and not isfinite(part)
        ):
            raise wire.WireError("message holds NaN or infinity: refused")


def models_in(value: Any) -> Iterator[Weights]:
    """Yield all models within a value."""
    return (part for part in _records(value) if isinstance(part, Weights))


def check_claims(value: Any, samples: int) -> None:
    """Refuse (WireError) another number of training samples than a sender reported first;
    `OwnSamples` marks fields.
    """
    for record in _records(value):
        for name, hint in _hints(type(record)).items():
            if OwnSamples not in getattr(hint, "__metadata__", ()):
                continue
            said = getattr(record, name)
            total = least = said
            if isinstance(said, Tensor):
                if not said.numel() or said.dtype == torch.bool:
                    # the method needs no counts, or only which classes there are
                    continue
                total = float(said.double().sum())
                least = float(said.min())
            if least < 0 or (total != samples and not (isinstance(said, float) and said == 1)):
                raise wire.WireError(
                    f"message says {total!s:.20} training samples, its sender has {samples}: refused"
                )


def _hints(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a record's fields; other values have none."""
    record = hasattr(kind, "_fields") or is_dataclass(kind)
    return get_type_hints(kind, include_extras=True) if record else {}


def _finite(values: Tensor) -> bool:
    if not values.is_floating_point() or bool(torch.isfinite(values.sum())):
        # NaN and infinity always reach the sum, and it takes a tenth of the time
        return True
    return bool(torch.isfinite(values).all())


def _records(value: Any) -> Iterator[Any]:
    """Yield every value within `value`, including itself."""
    yield value
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _records(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _records(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _records(getattr(value, f.name))
