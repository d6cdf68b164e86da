"""Open and check what a request holds, arguments and other silos' values, before anything is executed."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ekiden.engine import wire
from ekiden.engine.method import OwnSamples
from ekiden.engine.wire import SERVER, Encoded
from ekiden.training.network import Network
from ekiden.training.weights import Weights
from ekiden.transports.flower.trust import custody
from ekiden.transports.flower.trust.parcel import Ask
from ekiden.transports.flower.trust.sealing import Sealer

Absence = tuple[int, str]
"""a step, and a client that was missing in it"""
_KEY = re.compile(r"\d{1,9}-\d{1,9}-\w{1,100}")


@dataclass(frozen=True)
class Contents:
    """An opened request.

    Attributes:
        arguments: the task's arguments, encoded, with Refs in place of values.
        values: values of other silos, encoded, by owner and key.
    """

    arguments: Encoded
    values: Mapping[tuple[str, str], Encoded]

    def digest(self, terms: str, ask: Ask, private: Any) -> str:
        """Return a digest of the request, its terms and the private state before it; sealing does not change it."""
        members = [(member.name, member.key) for member in ask.members]
        given = [(name, value.digest) for name, value in self.values.items()]
        asked = (terms, ask.task, self.arguments.digest, *given, *members)
        return custody.digest([repr(asked).encode(), *wire.chunks(private)])[:32]


def arguments_key(ask: Ask) -> str:
    """Return the name under which a task's arguments are sealed. It includes what the silo forgets with the request."""
    forget = custody.digest([wire.encode((ask.settled, ask.keep, ask.absent))])[:16]
    return f"arguments of {ask.step}-{ask.call}-{ask.task}, {forget}"


def value_key(key: str, absent: Collection[Absence]) -> str:
    """Return the name under which a value is sealed. It includes the clients that were missing before it was made.

    So the seal opens only if the silo that uses the value was told the same absences as the silo that made it.
    """
    step = int(key.split("-", 1)[0])
    before = tuple(sorted(one for one in absent if one[0] < step))
    return f"{key} without {custody.digest([wire.encode(before)])[:16]}" if before else key


def opened(ask: Ask, body: memoryview, sealer: Sealer, absent: Collection[Absence] = ()) -> Contents:
    """Return what the body of a request for a task holds.

    Args:
        ask: the request.
        body: the bytes that came with it.
        sealer: opens the seals.
        absent: which clients were missing, if values are sealed under that too.

    Raises:
        WireError: the body is shorter or longer than announced, or a seal is broken.
    """
    values: dict[tuple[str, str], Encoded] = {}
    offset = ask.length
    if not 0 <= offset <= len(body):
        raise wire.WireError("message shorter than it says: refused")
    for part in ask.parts:
        if not 0 <= part.length <= len(body) - offset:
            raise wire.WireError("message shorter than it says: refused")
        piece = body[offset : offset + part.length]
        if not _KEY.fullmatch(part.key):
            raise wire.WireError(f"no value can be called {part.key[:80]!r}: refused")
        name = value_key(part.key, absent)
        values[part.owner, part.key] = sealer.open(piece, part.lock, part.owner, name, ask.step)
        offset += part.length
    if offset != len(body):
        raise wire.WireError("message longer than it says: refused")
    return Contents(sealer.open(body[: ask.length], ask.lock, SERVER, arguments_key(ask), ask.step), values)


def check(value: Any, network: Network, *, whole: bool) -> None:
    """Refuse models that do not fit and numbers that are not finite, before anything is executed.

    Args:
        value: the value that came.
        network: the network that models must fit.
        whole: whether parts of a model, such as only the extractor, are refused too.

    Raises:
        WireError: the message says which it is.
    """
    own = (network.params, network.buffers, network.counters)
    for part in _records(value):
        if isinstance(part, Weights):
            for here, there in zip(own, (part.params, part.buffers, part.counters), strict=True):
                size = there.numel()
                fits = size == here.numel() if whole else size <= here.numel()
                if there.dtype != here.dtype or there.ndim != 1 or not fits:
                    raise wire.WireError("message holds a model of another shape or type than this run's: refused")
        elif (isinstance(part, Tensor) and not _finite(part)) or (isinstance(part, float) and not isfinite(part)):
            raise wire.WireError("message holds NaN or infinity: refused")


def check_claims(value: Any, samples: int) -> None:
    """Refuse a sender that reports another number of training samples than when the run began.

    Args:
        value: what it sent; `OwnSamples` marks the fields of its records.
        samples: the number that it reported first.

    Raises:
        WireError: it reports another number.
    """
    for record in _records(value):
        for name, hint in _hints(type(record)).items():
            if OwnSamples not in getattr(hint, "__metadata__", ()):
                continue
            said = getattr(record, name)
            if isinstance(said, Tensor) and (not said.numel() or said.dtype == torch.bool):
                continue  # the method needs no counts, or only which classes there are
            total = float(said.sum()) if isinstance(said, Tensor) else said
            least = float(said.min()) if isinstance(said, Tensor) else said
            if least < 0 or (total != samples and not (isinstance(said, float) and said == 1)):
                raise wire.WireError(f"message says {total:g} training samples, its sender has {samples}: refused")


def _hints(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a record's fields; other values have none."""
    record = hasattr(kind, "_fields") or is_dataclass(kind)
    return get_type_hints(kind, include_extras=True) if record else {}


def _finite(values: Tensor) -> bool:
    if not values.is_floating_point() or bool(torch.isfinite(values.sum())):
        return True  # NaN and infinity always reach the sum, and it takes a tenth of the time
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
