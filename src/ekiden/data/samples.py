"""Labelled samples as tensors, and who holds which of them."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ekiden.base.errors import UserError, unknown
from ekiden.base.settings import Training
from ekiden.data.augment import Augment
from ekiden.data.inputs import Inputs, of_tensor
from ekiden.data.mapped import Place, place
from ekiden.data.tasks import Classification, Need, Task


@dataclass(frozen=True)
class Samples:
    """Labelled samples, decoded once.

    Attributes:
        x: (n, C, H, W) uint8 images, (n, L) int64 tokens or (n, d) float32 features; float32 of any other shape is used
            as it is.
        y: (n,) int64 class indices; of other tasks than classification, see theirs in `ekiden.data.tasks`.
        domain: (n,) int64 indices into `Dataset.domains`, or None.
        group: (n,) int64 natural owner (a writer, a hospital), or None.
        classes: class names in the order of the indices; empty where they have none, or those of a `Dataset` are meant.
    """

    x: Tensor
    y: Tensor
    domain: Tensor | None = None
    group: Tensor | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes map what stays in a file; the rest travels."""
        at = place(self.x)
        rest = (self.y, self.domain, self.group, self.classes)
        return (_opened, (at, *rest)) if at else (Samples, (self.x, *rest))

    def taken(self, rows: Tensor) -> "Samples":
        """A copy of these rows."""
        domain, group = (None if part is None else part[rows] for part in (self.domain, self.group))
        return Samples(self.x[rows], self.y[rows], domain, group, self.classes)


def _opened(at: Place, *rest: Any) -> Samples:
    return Samples(at.open(), *rest)


@dataclass(frozen=True)
class Dataset:
    """A data set: training and test samples and how to feed them to a network.

    Attributes:
        name: the name the user gave.
        train: all training samples (validation is cut from each client's share of them).
        test: all test samples.
        classes: names of what the network's outputs stand for: classes, labels or targets.
        domains: domain names, empty where the set has none.
        mean: per channel, subtracted after scaling bytes to [0, 1].
        std: per channel, divided by.
        augment: what training batches undergo.
        task: what the labels mean.
        inputs: what a sample is, and how raw ones become such tensors; by default what the tensor says.
        groups: names of the natural owners, where they are to be called so.
        least: fewest rows of a client about which it tells anything when clients agree on the scaling of tables and
            targets; 0: nothing is left to agree on.
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
    inputs: Inputs = None  # type: ignore[assignment]  # __post_init__ sets it
    groups: tuple[str, ...] = ()
    least: int = 0

    def __post_init__(self) -> None:
        if self.inputs is None:
            object.__setattr__(self, "inputs", of_tensor(self.train.x))

    def fed(self, training: Training) -> "Dataset":
        """With the normalisation and augmentation that `training` asks for."""
        return replace(
            self,
            mean=training.mean or self.mean,
            std=training.std or self.std,
            augment=self.augment if training.augment else Augment(),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])

    @property
    def offers(self) -> frozenset[Need]:
        """What methods can rely on; see `Method.needs`."""
        tokens = self.train.x.dtype == torch.int64
        return self.task.offers if tokens else self.task.offers | {"numbers"}

    def strata(self, samples: Samples) -> Tensor:
        """A group (n,) int64 for each of some samples, by their labels: the class, in classification."""
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

    @cached_property
    def y(self) -> Tensor:
        """(k, ...) labels."""
        return self.samples.y[self.rows]

    @property
    def x(self) -> Tensor:
        """(k, ...) raw samples, gathered at each call."""
        return self.samples.x[self.rows]

    def class_counts(self, classes: int) -> Tensor:
        """(classes,) number of samples of each class."""
        return torch.bincount(self.y, minlength=classes)


@dataclass(frozen=True)
class ClientData:
    """What one client holds."""

    name: str
    train: Subset
    val: Subset
    test: Subset


@dataclass(frozen=True)
class FederatedData:
    """A data set and who holds what. Every test row belongs to exactly one client."""

    dataset: Dataset
    clients: tuple[ClientData, ...]

    def with_task(self, task: Task) -> "FederatedData":
        """The same data, with another headline metric or scale."""
        return replace(self, dataset=replace(self.dataset, task=task))

    def for_tuning(self) -> "FederatedData":
        """With the clients' validation samples in place of the test samples.

        Raises:
            UserError: no client has any.
        """
        rows = torch.cat([client.val.rows for client in self.clients])
        if not len(rows):
            raise UserError("there are no validation data to choose settings by: raise --val-fraction")
        test = self.dataset.train.taken(rows)
        places = torch.split(torch.arange(len(rows)), [len(client.val) for client in self.clients])
        clients = (replace(c, test=Subset(test, at)) for c, at in zip(self.clients, places, strict=True))
        return FederatedData(replace(self.dataset, test=test), tuple(clients))

    def without(self, *names: str) -> "FederatedData":
        """The same without some clients, whose test samples go with them; the other clients' data stay as they are.

        Raises:
            UserError: no client is called so, or none would be left.
        """
        for name in names:
            if name not in (known := [client.name for client in self.clients]):
                raise unknown("client", name, known)
        kept = [client for client in self.clients if client.name not in names]
        if not kept:
            raise UserError("no client would be left: name fewer")
        rows = torch.cat([client.test.rows for client in kept]).sort().values
        test = self.dataset.test.taken(rows)
        clients = (replace(c, test=Subset(test, torch.searchsorted(rows, c.test.rows))) for c in kept)
        return FederatedData(replace(self.dataset, test=test), tuple(clients))
