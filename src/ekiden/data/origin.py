"""Where data came from, so that they can be read and divided again."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from ekiden.base import outside
from ekiden.base.checks import Checked, made, plain, reading


@dataclass(frozen=True)
class Origin(Checked):
    """Where data came from: names and paths, and how they were divided.

    `dataclasses.replace` of a data set drops its origin, since the samples may then be others.

    Attributes:
        data: what `ekiden.load` took, with an absolute path.
        silos: or else paths of the silos, each after its name as in "north=/data/n.csv". If both are empty, the data
            were made in memory.
        size: as in `ekiden.load`.
        task: as in `ekiden.load`.
        reading: what columns mean: the fields of a `Reading` that differ from its defaults.
        partition: how rows were divided, in its spelling; "" if they were not yet.
        clients: number of clients.
        seed: of the partition.
        val_fraction: share of each client's rows for validation.
        without: clients that were left out.
        tune: whether the clients' validation samples take the place of the test samples.
    """

    data: str = ""
    silos: tuple[str, ...] = ()
    size: int | None = None
    task: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)
    partition: str = ""
    clients: int | None = None
    seed: int = 0
    val_fraction: float = 0.1
    without: tuple[str, ...] = ()
    tune: bool = False

    @property
    def kept(self) -> bool:
        """Whether the data are in files or in a named set, so that they can be read again."""
        return bool(self.data or self.silos)

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the defaults as plain values, with digests of the user's Python files."""
        values, usual = plain(self), plain(Origin())
        code = outside.digests((self.data, self.reading.get("sample_kind", "")))
        return {k: v for k, v in values.items() if v != usual[k]} | ({"code": code} if code else {})


def from_json(values: Mapping[str, Any]) -> Origin:
    """Return the origin that `Origin.to_json` wrote."""
    outside.refuse_changed(values.get("code", {}))
    with reading("where the data came from"):
        return made(Origin, {name: value for name, value in values.items() if name != "code"})


def said_in(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the configuration of a run says about its data: those of a plan, or the origin."""
    found: Mapping[str, Any] = config.get("plan") or config.get("origin") or {}
    return found


class HasOrigin(Protocol):
    """Data that may know their origin."""

    @property
    def origin(self) -> Origin | None:
        """Where the data came from; None for data that were made in memory."""
        ...


F = TypeVar("F", bound=HasOrigin)


def coming_from(data: F, origin: Origin | None, **changes: Any) -> F:
    """Return a copy of `data` that knows its origin, with these changes of it."""
    found = copy(data)
    object.__setattr__(found, "origin", None if origin is None else replace(origin, **changes))
    return found
