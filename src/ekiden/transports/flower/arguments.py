"""Gather a task's arguments at a silo: from the message, the silo's own values, and the initial model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ekiden.engine import wire
from ekiden.engine.method import payload_types
from ekiden.engine.networks import initial_weights
from ekiden.engine.wire import EVERYONE, Encoded, Ref
from ekiden.engine.worker import Worker
from ekiden.transports.flower import custody
from ekiden.transports.flower.contents import Contents, check
from ekiden.transports.flower.custody import Taken


@dataclass(frozen=True)
class GivenArguments:
    """The arguments that a task gets.

    Attributes:
        args: the arguments.
        taken: the values among them.
        own: this silo's own values among them, encoded, by their keys.
    """

    args: tuple[Any, ...]
    taken: tuple[Taken, ...]
    own: Mapping[str, Encoded]


def gather(
    worker: Worker,
    silo: str,
    task: str,
    contents: Contents,
    kept: Callable[[str], Encoded],
    own: Mapping[str, Encoded],
) -> GivenArguments:
    """Gather a task's arguments, each checked and with its digest.

    Args:
        worker: executes the task.
        silo: name of this silo.
        task: name of the task.
        contents: what the request holds.
        kept: returns one of the silo's own values, encoded, by its key.
        own: own values that the silo already has encoded.
    """
    method = worker.setup.method
    taken: dict[Taken, None] = {}
    mine = dict(own)

    def fetch(ref: Ref[Any]) -> Any:
        if ref.owner == EVERYONE:
            initial = initial_weights(worker.setup)
            digest = custody.digest(wire.chunks(initial))
            taken[Taken(ref.owner, ref.key, digest, wire.size(initial))] = None
            return initial
        _, kind = payload_types(method, ref.key.split("-", 2)[-1])
        if ref.owner == silo:
            data, digest = mine[ref.key] if ref.key in mine else kept(ref.key)
            mine[ref.key] = Encoded(data, digest)
        elif (name := (ref.owner, ref.key)) in contents.values:
            data, digest = contents.values[name]
        else:
            raise wire.WireError(f"message lacks the value {ref.key[:80]!r}: refused")
        try:
            value = wire.decode(data, kind)
            check(value, worker.network, whole=False)
        except wire.WireError as error:
            raise wire.WireError(f"value {ref.key[:80]!r} of {ref.owner[:80]}: {error}") from None
        taken[Taken(ref.owner, ref.key, digest, wire.size(value))] = None
        return value

    kinds, _ = payload_types(method, task)
    args = wire.decode(contents.arguments.data, tuple[tuple(kinds)], fetch) if kinds else ()  # type: ignore[misc]
    check(args, worker.network, whole=False)
    return GivenArguments(tuple(args), tuple(taken), mine)
