"""Labelled samples as tensors, where they came from, and which client holds which of them."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, Count, CountOrZero, checked, made, plain, reading
from ekiden.core.base.errors import UserError, counted, unknown
from ekiden.core.base.files import Place, bytes_of, place
from ekiden.core.base.settings import Training
from ekiden.core.data.augment import Augment
from ekiden.core.data.inputs import Inputs
from ekiden.core.tasks import Classification, Need, Task

# that are read at a time
_ROWS = 1024
_VARIED = 20_000


@dataclass(frozen=True)
class Origin(Checked):
    """Where data came from: names and paths, and how they were divided.

    `dataclasses.replace` of a data set drops its origin, since the samples may then be others.
    """

    data: str = ""  # what `ekiden.load` took, with an absolute path
    # or else paths of the silos, each after its name as in "north=/data/n.csv". If both are empty,
    # the data were made
    # in memory.
    silos: tuple[str, ...] = ()
    size: int | None = None  # as in `ekiden.load`
    task: str = ""  # as in `ekiden.load`
    # what columns mean: the fields of a `Reading` that differ from its defaults
    reading: Mapping[str, Any] = field(default_factory=dict)
    partition: str = ""  # how rows were divided, in its spelling; "" if they were not yet
    clients: int | None = None  # number of clients
    seed: int = 0  # of the partition
    val_fraction: float = 0.1  # share of each client's rows for validation
    without: tuple[str, ...] = ()  # clients that were left out
    tune: bool = False  # whether the clients' validation samples take the place of the test samples

    @property
    def kept(self) -> bool:
        """Whether the data are in files or in a named set, so that they can be read again."""
        return bool(self.data or self.silos)

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the defaults as plain values, with digests of the user's Python
        files.
        """
        values = plain(self)
        usual = plain(Origin())
        code = outside.digests((self.data, self.reading.get("sample_kind", "")))
        found = {k: v for k, v in values.items() if v != usual[k]}
        if code:
            found["code"] = code
        return found

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Origin":
        """Return the origin that `to_json` wrote."""
        given = dict(values)
        outside.refuse_changed(given.pop("code", {}))
        with reading("where the data came from"):
            return made(Origin, given)


def said_in(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the configuration of a run says about its data: those of a plan, or the
    origin.
    """
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


@dataclass(frozen=True)
class Samples:
    """Labelled samples, decoded once.

    Attributes:
        x: (n, C, H, W) uint8 images, (n, L) int64 tokens or (n, d) float32 features; float32 of any
            other shape is used as it is.
        y: (n,) int64 class indices; for other tasks than classification, see `ekiden.core.tasks`.
        domain: (n,) int64 indices into `Dataset.domains`, or None.
        group: (n,) int64 natural owner (a writer, a hospital), or None.
        classes: class names in the order of the indices; empty if they have none, or if the names
            of a `Dataset` count.
        subject: (n,) int64 number of whom or what each sample is about (a patient, a device), the
            same number in all parts and at all silos of one data set, or None. A subject is in one
            of training, validation and test.
        time: (n,) numbers that grow with time, or None. Held-out samples are the most recent ones.
    """

    x: Tensor
    y: Tensor
    domain: Tensor | None = None
    group: Tensor | None = None
    classes: tuple[str, ...] = ()
    subject: Tensor | None = None
    time: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        """In short: printed tensors would hide what matters."""
        return f"Samples({counted(len(self), 'sample')} of {_kind(self.x)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Send to worker processes the place of a mapped tensor, which they map too, and all else
        by value.
        """
        at = place(self.x)
        rest = (self.y, self.domain, self.group, self.classes, self.subject, self.time)
        if at:
            return (_opened, (at, *rest))
        return (Samples, (self.x, *rest))

    def taken(self, rows: Tensor) -> "Samples":
        """Return a copy of these rows."""
        taken: dict[str, Any] = {}
        for name in ("x", "y", "domain", "group", "subject", "time"):
            part = getattr(self, name)
            if part is not None:
                taken[name] = part[rows]
        return replace(self, **taken)


def _kind(x: Tensor) -> str:
    """Type and shape of one of samples (n, ...), as in uint8 (3, 32, 32)."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}"


def _opened(at: Place, *rest: Any) -> Samples:
    return Samples(at.open(), *rest)


@dataclass(frozen=True)
class Dataset:
    """A data set: training and test samples, and how to feed them to a network.

    Attributes:
        name: the name that the user gave.
        train: all training samples (validation is cut from each client's share of them).
        test: all test samples.
        classes: what the network's outputs mean: names of classes, labels or targets.
        domains: domain names; empty if the set has none.
        mean: per channel, subtracted after scaling bytes to [0, 1].
        std: per channel, divided by.
        augment: how training batches are augmented.
        task: what the labels mean.
        inputs: what a sample is, and how raw samples become such tensors.
        groups: names of the natural owners, if they have any.
        least: smallest number of rows that a client reports when clients agree on the scaling of
            tables and targets; 0: nothing is left to agree on.
        named: whether the user named the classes, so that they stay if nobody has one of them.
        origin: where the data came from, if they were read by `load`.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: Augment = field(default_factory=Augment)
    task: Task = field(default_factory=Classification)
    inputs: Inputs = field(kw_only=True)
    groups: tuple[str, ...] = ()
    least: int = 0
    named: bool = False
    origin: Origin | None = field(default=None, init=False, compare=False)

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} training and {counted(len(self.test), 'test sample')}"
        task = f"{type(self.task).__name__}, outputs: {self.outputs}"
        return f"Dataset({self.name!r}, {sizes} of {_kind(self.train.x)}, {task})"

    def fed(self, training: Training) -> "Dataset":
        """Return the data set with the normalisation and augmentation that `training` asks for."""
        return replace(
            self,
            mean=training.mean or self.mean,
            std=training.std or self.std,
            augment=self.augment if training.augment else Augment(),
        )

    @checked()
    def subset(self, samples: Count, seed: CountOrZero = 0) -> "Dataset":
        """Return the data set with so many random training samples; all else stays as it is."""
        draws = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(self.train), generator=draws)[:samples].sort().values
        return replace(self, train=self.train.taken(rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])

    @property
    def offers(self) -> frozenset[Need]:
        """Return what methods can rely on; see `Method.needs`."""
        if self.inputs.ragged:
            return self.task.offers
        if self.inputs.continuous:
            return self.task.offers | {"numbers", "continuous"}
        return self.task.offers | {"numbers"}

    def strata(self, samples: Samples) -> Tensor:
        """Return a group (n,) int64 for each of some samples, by their labels; in classification,
        the class.
        """
        return self.task.strata(samples.y)

    @property
    def outputs(self) -> int:
        """K, the number of outputs that the network needs for each sample, pixel or token."""
        return self.task.outputs(self.classes)


@dataclass(frozen=True)
class Subset:
    """Some rows of `samples`; the tensors are shared, not copied."""

    samples: Samples
    rows: Tensor  # (k,) int64

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Subset({len(self)} of {counted(len(self.samples), 'sample')})"

    @cached_property
    def y(self) -> Tensor:
        """(k, ...) labels."""
        return self.samples.y[self.rows]

    @property
    def x(self) -> Tensor:
        """(k, ...) raw samples, gathered at each access."""
        return self.samples.x[self.rows]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all samples and labels with their types and shapes, kept since it takes a
        second for 1 GB.
        """
        found = hashlib.sha256()
        x = self.samples.x
        y = self.samples.y
        found.update(
            repr((len(self), x.dtype, tuple(x.shape[1:]), y.dtype, tuple(y.shape[1:]))).encode()
        )
        for rows in torch.split(self.rows, _ROWS):
            for values in (x[rows], y[rows]):
                found.update(bytes_of(values))
        return found.digest()

    @cached_property
    def variety(self) -> tuple[int, float]:
        """Of a table (n, d): the number of different rows, and Σ log₂ of the number of values of
        each column.

        At most 20,000 rows are looked at.
        """
        # -0 is 0
        x = (self.samples.x[self.rows[:_VARIED]] + 0).numpy()
        columns = np.sort(np.ascontiguousarray(x.T), axis=1)
        values = 1 + (columns[:, 1:] != columns[:, :-1]).sum(1)
        return len(set(map(bytes, x))), sum(map(log2, values.tolist()))

    def class_counts(self, classes: int) -> Tensor:
        """Return the number of samples of each class, (classes,)."""
        return torch.bincount(self.y, minlength=classes)


@dataclass(frozen=True)
class ClientData:
    """What one client holds."""

    name: str
    train: Subset
    val: Subset
    test: Subset

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} training, {len(self.val)} validation, {counted(len(self.test), 'test sample')}"
        return f"ClientData({self.name!r}, {sizes})"


Sizes = tuple[int, int, int]
"""Numbers of training, validation and test samples."""


@dataclass(frozen=True)
class Clients(Sequence[ClientData]):
    """Clients whose names and sizes are known, and whose data are read each time that they are
    asked for.
    """

    sizes: Mapping[str, Sizes]  # numbers of samples, by the clients' names
    read: Callable[[int], ClientData]  # reads the data of a client, given its number from 0 on

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> ClientData: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[ClientData, ...]: ...
    def __getitem__(self, at: int | slice) -> ClientData | tuple[ClientData, ...]:
        """Read one client, or several."""
        numbers = range(len(self))[at]
        if isinstance(numbers, int):
            return self.read(numbers)
        return tuple(map(self.read, numbers))


@dataclass(frozen=True)
class Held(Mapping[str, ClientData]):
    """Clients by their names; data of `Clients` are read each time that they are asked for."""

    clients: Sequence[ClientData]
    sizes: Mapping[str, Sizes]  # their numbers of samples, by their names, in the same order

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.sizes)}

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __getitem__(self, name: str) -> ClientData:
        """Read a client."""
        return self.clients[self._places[name]]


def sizes_of(clients: Sequence[ClientData]) -> Mapping[str, Sizes]:
    """Return the numbers of samples of each client, by its name; see `FederatedData.sizes`."""
    if isinstance(clients, Clients):
        return clients.sizes
    _refuse_twice([client.name for client in clients])
    return {
        client.name: (len(client.train), len(client.val), len(client.test)) for client in clients
    }


def _refuse_twice(names: Sequence[str]) -> None:
    """Refuse clients with one name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"two clients are called {name!r}: give each its own name")


def held_by(clients: Sequence[ClientData]) -> Held:
    """Return clients by their names."""
    return Held(clients, sizes_of(clients))


class Shares:
    """Rows of all clients in one tensor each for training, validation and test; makes a client's
    `ClientData`.
    """

    def __init__(
        self, names: Sequence[str], dataset: Dataset, rows: Sequence[Sequence[NDArray[np.int64]]]
    ) -> None:
        """Keep the rows.

        Args:
            names: of the clients.
            dataset: whose rows.
            rows: for training, validation and test: the rows of each client.
        """
        _refuse_twice(names)
        self._names = tuple(names)
        self._samples = (dataset.train, dataset.train, dataset.test)
        self._rows = [torch.from_numpy(np.concatenate(part)) for part in rows]
        self._sizes = [list(map(len, part)) for part in rows]
        self._ends = [np.cumsum(sizes).tolist() for sizes in self._sizes]

    def clients(self) -> Clients:
        """Return the clients."""
        return Clients(dict(zip(self._names, zip(*self._sizes, strict=True), strict=True)), self)

    def __call__(self, at: int) -> ClientData:
        """Return what client number `at` holds; its samples are in the tensors of the data set."""
        held = zip(self._samples, self._rows, self._sizes, self._ends, strict=True)
        parts = (
            Subset(samples, rows[ends[at] - sizes[at] : ends[at]])
            for samples, rows, sizes, ends in held
        )
        return ClientData(self._names[at], *parts)


@dataclass(frozen=True)
class FederatedData:
    """A data set divided among clients. Every test row belongs to exactly one client.

    Attributes:
        dataset: the samples of all clients.
        clients: who holds what; `Clients` are read when they are asked for.
        among: divides the data among some of the clients, given their names; see `without`.
        origin: where the data came from, if they can be read and divided again.
    """

    dataset: Dataset
    clients: Sequence[ClientData]
    among: "Callable[[Collection[str]], FederatedData] | None" = field(default=None, compare=False)
    origin: Origin | None = field(default=None, init=False, compare=False)

    def __repr__(self) -> str:
        """One line for the data set and one for each client."""
        clients = (f"  {client!r}," for client in self.clients)
        return "\n".join([f"FederatedData({self.dataset!r},", *clients, ")"])

    @cached_property
    def sizes(self) -> Mapping[str, Sizes]:
        """Return the numbers of samples of each client, by its name, without reading them.

        Raises:
            UserError: two clients have the same name.
        """
        return sizes_of(self.clients)

    def with_task(self, task: Task) -> "FederatedData":
        """Return the same data with another headline metric or scale."""
        return replace(self, dataset=replace(self.dataset, task=task))

    def for_tuning(self) -> "FederatedData":
        """Return the data with the clients' validation samples in place of the test samples.

        Raises:
            UserError: no client has validation samples.
        """
        rows = torch.cat([client.val.rows for client in self.clients])
        if not len(rows):
            raise UserError(
                "there are no validation samples, which choose settings and recalibrate: run with "
                "--val-fraction 0.1"
            )
        test = self.dataset.train.taken(rows)
        places = torch.split(torch.arange(len(rows)), [len(client.val) for client in self.clients])
        found = self._tested_on(test, self.clients, places)
        return coming_from(found, self.origin or Origin(), tune=True)

    def _tested_on(
        self, test: Samples, clients: Sequence[ClientData], places: Sequence[Tensor]
    ) -> "FederatedData":
        """Return the data of some clients, with their places in other test samples."""
        pairs = zip(clients, places, strict=True)
        tested = tuple(replace(client, test=Subset(test, at)) for client, at in pairs)
        return FederatedData(replace(self.dataset, test=test), tested)

    def without(self, *names: str) -> "FederatedData":
        """Return the data without some clients and their test samples, as if they had never been.

        Natural owners are divided again, and agree again on scale, categories and classes. Other
        clients keep their rows, and agree again on scale and categories.

        Raises:
            UserError: no client has such a name, or no client would be left.
        """
        for name in names:
            if name not in self.sizes:
                raise unknown("client", name, self.sizes)
        kept = [client for client in self.clients if client.name not in names]
        if not kept:
            raise UserError("no client would be left: name fewer")
        origin = self.origin
        if self.among is not None:
            found = self.among([client.name for client in kept])
            task = replace(found.dataset.task, metric=self.dataset.task.metric)
            found = found.with_task(task)
            # read again without some owners, other rows would be held out for the test
            if origin and origin.clients is None and "group_column" in origin.reading:
                origin = None
        else:
            rows = torch.cat([client.test.rows for client in kept]).sort().values
            test = self.dataset.test.taken(rows)
            places = [torch.searchsorted(rows, client.test.rows) for client in kept]
            found = self._tested_on(test, kept, places)
        return coming_from(found, origin, without=(*origin.without, *names) if origin else ())
