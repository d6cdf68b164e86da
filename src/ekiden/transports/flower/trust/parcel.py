"""The messages between coordinator and silos: a typed header and a body, as one byte string."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ekiden.engine import wire
from ekiden.transports.flower.trust.sealing import Lock, Reader

T = TypeVar("T")
Kind = Literal["hello", "task", "value", "evaluate", "status"]
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
    """A request of the coordinator to a silo.

    Attributes:
        kind: hello, task, value, evaluate or status.
        agreement: terms of the run, see `Agreement`; empty in a hello that only asks what a silo holds.
        nonce: random text that the answer to a hello must sign.
        step: step of the task.
        call: number of the task among those of this client in this step.
        task: name of the task.
        key: key of the requested value.
        state: place (step and call) of the task that left the private state to start from; empty if there is none.
        settled: number of steps of the run that are final.
        keep: keys of the values from those steps that are still needed.
        absent: which clients were missing in which step; what they did there does not count. All absences if the
            method knows beforehand what it asks for, otherwise only this silo's own.
        parts: what the body holds after the arguments.
        length: bytes of the arguments in the body.
        lock: lock of the arguments, or of the models to measure.
        eager: send the value with the answer.
        readers: parties for which to seal the value.
        members: all silos that give a part to the sum to which the task adds this silo's, with their keys.
        results: number of models to measure that are the run's result, not a client's own; they come first.
        clients: number of clients of the run, on which the network of a result may depend.
        records: records of the chain of custody, one for each model to measure: its owner signs that it is the run's
            result.
        last: whether the models to measure are those with which the run ends.
    """

    kind: str
    agreement: str = ""
    nonce: str = ""
    step: int = 0
    call: int = 0
    task: str = ""
    key: str = ""
    state: str = ""
    settled: int = 0
    keep: tuple[str, ...] = ()
    absent: tuple[tuple[int, str], ...] = ()
    parts: tuple[ParcelPart, ...] = ()
    length: int = 0
    lock: Lock | None = None
    eager: bool = False
    readers: tuple[Reader, ...] = ()
    members: tuple[Reader, ...] = ()
    results: int = 0
    clients: int = 0
    records: tuple[str, ...] = ()
    last: bool = False


@dataclass(frozen=True)
class Answer:
    """A silo's answer to a request.

    Attributes:
        silo: name of the silo.
        error: why the silo refused or failed; empty if all went well.
        size: `wire.size` of the value.
        forward: samples that went forward through a network.
        backward: samples that went backward.
        locks: locks of the value, one for each reader.
        record: signed record of the task or the measurement in the chain of custody; see `custody`.
        busy: in answer to a status: whether the silo is working on this run.
        state: in answer to a task: place of the task that left the private state that the silo has after this one.
    """

    silo: str
    error: str = ""
    size: int = 0
    forward: int = 0
    backward: int = 0
    locks: tuple[Lock, ...] = ()
    record: str = ""
    busy: bool = False
    state: str = ""


@dataclass(frozen=True)
class Hello:
    """How a silo introduces itself.

    Attributes:
        name: from its `silo.toml`.
        version: version of Ekiden with a digest of its source, see `identity.code`.
        dataset: name of its data set.
        shape: shape of one sample.
        classes: names of the classes.
        mean: per channel, subtracted after scaling bytes to [0, 1].
        std: per channel, divided by.
        augment: crop, flip and rotation in training.
        samples: numbers of samples for training, validation and test.
        inputs: what the samples are, see `ekiden.data.kinds.terms`.
        evaluations: largest number of a run's models that it measures.
        signature: signature of nonce and name by the silo's key, in hexadecimal; empty without a key.
        sealing: X25519 key of the run whose terms came with the hello, in hexadecimal; empty if it seals nothing.
        proof: signature of `sealing` by the silo's key.
        task: what the labels mean, see `ekiden.data.tasks.terms`.
        schema: the study's schema that its data meet, as `Schema.text` gives it; empty without one.
    """

    name: str
    version: str
    dataset: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[int, bool, float]
    samples: tuple[int, int, int]
    inputs: str
    evaluations: int = 0
    signature: str = ""
    sealing: str = ""
    proof: str = ""
    task: str = ""
    schema: str = ""


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
    """Return another party's text as one line without control characters, so it cannot move a terminal's cursor."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[:most]}..."


def signed_text(nonce: str, name: str) -> bytes:
    """Return the text that a silo signs to prove that it is `name`."""
    return f"ekiden hello\n{nonce}\n{name}".encode()
