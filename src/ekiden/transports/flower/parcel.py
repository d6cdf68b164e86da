"""What travels between coordinator and silos: a typed header and a body, as one byte string."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ekiden.engine import wire
from ekiden.transports.flower.sealing import Lock, Reader

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
    """What the coordinator wants of a silo.

    Attributes:
        kind: hello, task, value, evaluate or status.
        agreement: of the run, see `Agreement`; empty in a hello that only asks what a silo holds.
        nonce: random text that the answer to a hello must sign.
        step: of the task.
        call: number of the task among those of this client in this step.
        task: its name.
        key: of the value that is wanted.
        state: the place of the task that left the private state to start from, step and call; empty if there is none,
            None where the coordinator does not know it.
        settled: steps of the run that are done for good.
        keep: keys of the values from those steps that are still needed.
        absent: who was missing in which step, so that nothing counts that it did there: all of them where the method
            tells beforehand what it asks for, else this silo's own steps.
        parts: what the body holds after the arguments.
        length: bytes of the arguments in the body.
        lock: to the arguments, or to the models to measure.
        eager: send the value with the answer.
        readers: whom to seal the value for.
        results: how many of the models to measure, the first ones, are the run's result and not a client's own.
        clients: number of clients of the run, which the network of a result may depend on.
        records: of the chain of custody, one for each model to measure: its owner's word that it is the run's result.
    """

    kind: str
    agreement: str = ""
    nonce: str = ""
    step: int = 0
    call: int = 0
    task: str = ""
    key: str = ""
    state: str | None = None
    settled: int = 0
    keep: tuple[str, ...] = ()
    absent: tuple[tuple[int, str], ...] = ()
    parts: tuple[ParcelPart, ...] = ()
    length: int = 0
    lock: Lock | None = None
    eager: bool = False
    readers: tuple[Reader, ...] = ()
    results: int = 0
    clients: int = 0
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a silo says to it.

    Attributes:
        silo: its name.
        error: why not; empty where all went well.
        size: `wire.size` of the value.
        forward: samples that went forward through a network.
        backward: samples that went backward.
        locks: to the value, one for each reader.
        record: of the task or the measurement in the chain of custody, signed; see `custody`.
        busy: to a status: whether the silo works on something for this run.
        state: to a task: the place of the task that left the private state that the silo has after this one.
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
        version: of Ekiden.
        dataset: name of its data set.
        shape: of one sample.
        classes: names of the classes.
        mean: per channel, how its samples are scaled.
        std: the same for the standard deviation.
        augment: crop, flip and rotation in training.
        samples: for training, validation and test.
        evaluations: most models of a run that it measures.
        signature: of nonce and name by the silo's key, in hexadecimal; empty without a key.
        sealing: X25519 key of the run whose terms came with the hello, in hexadecimal; empty where it seals nothing.
        proof: signature of that by the silo's key.
        inputs: what the samples are, see `ekiden.data.inputs.terms`.
        task: what the labels mean, see `ekiden.data.tasks.terms`.
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
    evaluations: int = 0
    signature: str = ""
    sealing: str = ""
    proof: str = ""
    inputs: str = ""
    task: str = ""


@dataclass(frozen=True)
class Count:
    """What a model does on the test samples of a silo; all 0 where these are too few to say anything of them.

    Attributes:
        right: number of right answers; where a sample has several labels, the sum of the shares of right ones, as a
            whole number; 0 where answers are not right or wrong.
        loss: the mean loss, coarse (see `measured.coarse`), times the number of samples.
        samples: number of test samples.
    """

    right: int
    loss: float
    samples: int


def pack(header: Any, body: Iterable[bytes | memoryview] = ()) -> bytes:
    """`header` and the pieces of the body as one byte string."""
    head = wire.encode(header)
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, *body))


def unpack(data: bytes | memoryview, kind: type[T]) -> tuple[T, memoryview]:
    """Header and body, the latter uncopied.

    Raises:
        WireError: truncated, or no such header.
    """
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > min(_MOST_HEADER, len(data) - _LENGTH):
        raise wire.WireError("unreadable message: truncated, or not written by Ekiden")
    header: T = wire.decode(data[_LENGTH : _LENGTH + length], kind)
    return header, memoryview(data)[_LENGTH + length :]


def said(text: str, most: int = 1000) -> str:
    """What another party said, as one line that a terminal only shows: nobody's words move its cursor."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[:most]}..."


def signed_text(nonce: str, name: str) -> bytes:
    """What a silo signs to prove that it is `name`."""
    return f"ekiden hello\n{nonce}\n{name}".encode()
