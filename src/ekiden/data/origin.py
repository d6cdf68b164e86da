"""Where data came from, so that they can be read and divided again."""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from ekiden.data.columns import Reading


@dataclass(frozen=True)
class Origin:
    """Where data came from: names and paths, and how they were divided.

    `dataclasses.replace` of a data set drops its origin, since the samples may then be others.

    Attributes:
        data: what `ekiden.load` took, with an absolute path; "" if `silos` is given.
        silos: paths of the silos, each after its name as in "north=/data/n.csv".
        size: as in `ekiden.load`.
        task: as in `ekiden.load`.
        reading: what columns mean.
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
    reading: Reading = field(default_factory=Reading)
    partition: str = ""
    clients: int | None = None
    seed: int = 0
    val_fraction: float = 0.1
    without: tuple[str, ...] = ()
    tune: bool = False


class Found(Protocol):
    """Data that may know their origin."""

    @property
    def origin(self) -> Origin | None:
        """Where the data came from; None for data that were made in memory."""
        ...


F = TypeVar("F", bound=Found)


def coming_from(data: F, origin: Origin | None, **changes: Any) -> F:
    """Return a copy of `data` that knows its origin, with these changes of it."""
    found = copy(data)
    object.__setattr__(found, "origin", None if origin is None else replace(origin, **changes))
    return found
