"""Divide a data set among clients by one of the partitions of the literature."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.checks import Checked, Count, Positive, checked
from ekiden.core.base.errors import UserError, at, counted, listed, tell, unknown
from ekiden.core.data.samples import Dataset, FederatedData, Samples, Shares, coming_from
from ekiden.core.tasks import Classification, ScaledTask, scaled
from ekiden.readers import holdout
from ekiden.readers.assemble import from_tensors
from ekiden.readers.holdings import Source
from ekiden.readers.holdout import DealtUnits, cut
from ekiden.readers.kinds import Table
from ekiden.readers.scaling import agreed
from ekiden.readers.targets import relabelled

Rows = NDArray[np.int64]


def numpy(values: Tensor) -> Rows:
    """Return (n,) int64 on the CPU."""
    return values.cpu().numpy().astype(np.int64, copy=False)


def divide(train_keys: Tensor, rows: Sequence[Rows], test_keys: Tensor) -> list[Rows]:
    """Divide the test rows of each key in proportion to each client's number of training rows of
    that key.

    The largest remainders round proportions to whole rows; among equal remainders the client with
    the fewest test rows so far comes first. Rows of keys that no client holds are dealt round
    robin.

    Args:
        train_keys: (n,) int64, such as labels.
        rows: training rows of each client.
        test_keys: (m,) int64.

    Returns:
        Test rows of each client in ascending order; every row is in exactly one.
    """
    keys, codes = np.unique(
        np.concatenate([numpy(train_keys), numpy(test_keys)]), return_inverse=True
    )
    train, test = np.split(codes, [len(train_keys)])
    clients = np.arange(len(rows))
    client = np.repeat(clients, [*map(len, rows)])
    key_of = train[np.concatenate(rows)]
    sizes = np.zeros(len(rows), dtype=np.int64)
    owner = np.zeros(len(test), dtype=np.int64)
    orphans = [np.empty(0, dtype=np.int64)]
    for key in range(len(keys)):
        found = np.flatnonzero(test == key)
        counts = np.bincount(client[key_of == key], minlength=len(rows))
        if not counts.any():
            orphans.append(found)
            continue
        shares = _shares(len(found), counts, sizes)
        owner[found] = np.repeat(clients, shares)
        sizes += shares
    late = np.concatenate(orphans)
    owner[late] = np.arange(len(late)) % len(rows)
    return cut(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=len(rows)))


def _shares(total: int, weights: Rows, sizes: Rows) -> Rows:
    """Divide `total` into whole shares proportional to `weights`, in exact integer arithmetic."""
    shares, remainder = np.divmod(total * weights, weights.sum())
    first = np.lexsort((sizes, -remainder))[: total - shares.sum()]
    shares[first] += 1
    return shares


def share_out(
    dataset: Dataset,
    names: Sequence[str],
    rows: Sequence[Rows],
    test_rows: Sequence[Rows],
    val_fraction: float,
    *,
    mixed: bool = False,
) -> FederatedData:
    """Make clients that hold the given rows, the first `int(val_fraction * n)` of n training rows
    for validation.

    If samples have subjects or times, whole subjects or the most recent rows are for validation
    instead (`apart`). Clients agree on one scaling of tables and targets.
    """
    if not 0 <= val_fraction < 1:
        raise UserError(
            f"val_fraction is the share for validation, from 0 to below 1; it is {val_fraction}."
        )
    for name, held in zip(names, rows, strict=True):
        if not len(held):
            raise UserError(
                f"client {name!r} would hold no training samples: take fewer clients or another "
                "partition."
            )
    parts = *_validation(dataset.train, rows, val_fraction), test_rows
    return _agreed(FederatedData(dataset, Shares(names, dataset, parts).clients()), mixed=mixed)


def _agreed(before: FederatedData, mixed: bool) -> FederatedData:
    """Return the data after the clients agreed; those who remain of them can agree again."""
    return replace(agreed(before, mixed=mixed), among=partial(_rest, before, mixed))


def _rest(before: FederatedData, mixed: bool, names: Collection[str]) -> FederatedData:
    """Let some of the clients agree, each with the rows that it has."""
    return _agreed(before.without(*({c.name for c in before.clients} - {*names})), mixed)


def _of_owners(
    dataset: Dataset, seed: int, val_fraction: float, names: Collection[str]
) -> FederatedData:
    """Divide the samples of some natural owners as if the others had never been there."""
    groups = tuple(name for name in dataset.groups if name in names)
    owners = torch.tensor([*map(dataset.groups.index, groups)])

    def owned(part: Samples) -> Samples:
        if part.group is None:
            return part
        rows = torch.isin(part.group, owners).nonzero()[:, 0]
        return replace(part.taken(rows), group=torch.searchsorted(owners, part.group[rows]))

    left = replace(
        dataset,
        train=owned(dataset.train),
        test=owned(dataset.test),
        groups=groups,
    )
    if isinstance(left.task, ScaledTask):
        left = replace(left, task=scaled(left.task, left.train.y))
    left = _without_lost_classes(left, dataset)
    return split(left, Natural(), seed=seed, val_fraction=val_fraction)


def _without_lost_classes(left: Dataset, before: Dataset) -> Dataset:
    """Return the data set without classes of which all samples have left.

    Classes that are numbers of outputs stay without gaps, up to the largest one that is left.
    """
    if before.named or not isinstance(before.task, Classification):
        return left
    lost = _present(before) - _present(left)
    kept = sorted({*range(len(before.classes))} - lost)
    numbers = tuple(map(str, range(len(before.classes))))
    if before.classes == numbers and not isinstance(before.inputs, Table):
        kept = list(range(max(kept) + 1))
    classes = tuple(before.classes[k] for k in kept)
    place = torch.full((len(before.classes),), -1)
    place[kept] = torch.arange(len(kept))
    return relabelled(left, place, classes)


def _present(dataset: Dataset) -> set[int]:
    return {*dataset.train.y.tolist(), *dataset.test.y.tolist()}


def _validation(
    train: Samples, rows: Sequence[Rows], share: float
) -> tuple[list[Rows], list[Rows]]:
    """Divide the rows of each client into those for training and those for validation."""
    if not share or (train.subject is None and train.time is None):
        first, last = zip(*(np.split(r, [int(share * len(r))]) for r in rows), strict=True)
        return [*last], [*first]
    every = np.concatenate(rows)
    client = np.repeat(np.arange(len(rows)), [*map(len, rows)])
    known = dict[str, Any]()
    for name in ("subject", "time"):
        values = holdout.together([getattr(train, name)])
        if values is not None:
            known[name] = values[every]
    held = holdout.held_out(share, client, **known)
    sizes = np.bincount(client, weights=held, minlength=len(rows)).astype(np.int64)
    return cut(every[~held], np.bincount(client) - sizes), cut(every[held], sizes)


SPELLINGS = (
    "iid, dirichlet:0.5, domains, domains:photo,sketch (all domains, in this order), "
    "domains:dirichlet:0.5 (labels skewed within domains), classes:2, natural"
)
# draws of a Dirichlet partition; the published settings need fewer than 100
TRIES = 5_000
# shares of classes that are drawn
_NUMBERS = 500_000
# samples or subjects for a client, if the user names no number of clients
_ENOUGH = 20


class Unmet(UserError):
    """A partition would leave some clients with too few samples."""


class Partition(Protocol):
    """A rule for which training rows each client holds."""

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[Rows]:
        """Return the rows of `dataset.train` for each client, shuffled; every row belongs to
        exactly one client.

        Raises:
            UserError: the data set cannot be divided in this way.
        """
        ...


class Mixing:
    """A partition that deals out rows whoever owns them, so that no client's unit or codes can
    differ from the others'.
    """


@dataclass(frozen=True)
class Iid(Mixing):
    """Shuffled rows in even parts, as in the `IidPartitioner` of flwr-datasets."""

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[Rows]:
        return DealtUnits(dataset.train).dealt(clients, rng)

    def __str__(self) -> str:
        return "iid"


@dataclass(frozen=True)
class Dirichlet(Mixing, Checked):
    """Label skew as in the code of FedELMY and of earlier work.

    The rows of each class are shuffled and cut by proportions drawn from Dirichlet(beta, ...,
    beta). A client that already holds n / N samples or more gets nothing, and the shares of the
    others are scaled up. All classes are drawn again until every client holds `min_size` samples.
    We do not use `DirichletPartitioner` of flwr-datasets: it still gives rows to a client with
    exactly n / N, and does not shuffle within a class.

    Attributes:
        beta: concentration; a smaller value gives each client fewer classes.
        min_size: least number of samples that a client may hold.
    """

    _flag: ClassVar[str] = "{}"
    beta: Positive
    min_size: Count = 10

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[Rows]:
        return self.deal(dataset, np.arange(len(dataset.train)), clients, rng)

    def deal(self, dataset: Dataset, rows: Rows, clients: int, rng: Generator) -> list[Rows]:
        """Return which of some training rows each client holds."""
        n = len(rows)
        units = DealtUnits(dataset.train, rows)
        if n >= clients * self.min_size:
            labels = units.commonest(numpy(dataset.strata(dataset.train))[rows])
            classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
            # so that a partition that cannot be met ends in seconds
            tries = max(100, min(TRIES, _NUMBERS // (len(classes) * clients)))
            for _ in range(tries):
                parts = self._draw(classes, units, clients, rng)
                if min(units.sizes[p].sum() for p in parts) >= self.min_size:
                    return [rng.permutation(units.rows(p)) for p in parts]
        smaller = ""
        if self.min_size > 1:
            smaller = f", or a smaller least size (dirichlet:{self._beta()}:1)"
        raise Unmet(
            f"{self} leaves some of {clients} clients with fewer than {self.min_size} of {n} "
            f"samples: take fewer clients or a larger beta{smaller}"
        )

    def _draw(
        self, classes: list[Rows], units: DealtUnits, clients: int, rng: Generator
    ) -> list[Rows]:
        full = units.sizes.sum() / clients
        held = defaultdict[int, list[Rows]](list)
        sizes = np.zeros(clients, dtype=np.int64)
        for rows in classes:
            shuffled = rng.permutation(rows)
            shares = rng.dirichlet(np.full(clients, self.beta)) * (sizes < full)
            # a tiny beta gave everything to clients that are full
            if not shares.sum() > 0:
                return [np.empty(0, dtype=np.int64)]
            cuts = (np.cumsum(shares / shares.sum()) * units.sizes[rows].sum()).astype(np.int64)[
                :-1
            ]
            for client, part in enumerate(units.split(shuffled, cuts)):
                held[client].append(part)
                sizes[client] += units.sizes[part].sum()
        return [*map(np.concatenate, held.values())]

    def __str__(self) -> str:
        text = f"dirichlet:{self._beta()}"
        if self.min_size != 10:
            text += f":{self.min_size}"
        return text

    def _beta(self) -> str:
        return str(float(self.beta)).removesuffix(".0")


@dataclass(frozen=True)
class Domains:
    """One domain for each client. With m times as many clients as domains, each domain is divided
    into m parts.

    Clients take the domains in turn: with four domains, client 0 and client 4 share the first one.

    Attributes:
        order: all domain names, in the order of the clients; the data set's own order if empty.
        skew: how the labels of a domain are divided among its clients; even parts if None.
    """

    order: tuple[str, ...] = ()
    skew: Dirichlet | None = None

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[Rows]:
        names = self.names(dataset)
        if clients % len(names):
            n = len(names)
            raise UserError(
                f"{clients} clients cannot share {n} domains evenly: take a multiple of {n}."
            )
        if self.skew and clients == len(names):
            raise UserError(
                f"{self} skews labels among the clients of a domain: take {2 * clients} clients or "
                "more."
            )
        # names() has checked this
        assert dataset.train.domain is not None
        domain = numpy(dataset.train.domain)
        pieces = list[list[Rows]]()
        for name in names:
            rows = np.flatnonzero(domain == dataset.domains.index(name))
            pieces.append(self._pieces(dataset, rows, clients // len(names), rng))
        # the first part of each domain, then the second
        return [*chain(*zip(*pieces, strict=True))]

    def _pieces(self, dataset: Dataset, rows: Rows, parts: int, rng: Generator) -> list[Rows]:
        """Divide the rows of a domain."""
        if self.skew:
            return self.skew.deal(dataset, rows, parts, rng)
        return DealtUnits(dataset.train, rows).dealt(parts, rng)

    def names(self, dataset: Dataset) -> tuple[str, ...]:
        """Return the domains in the order in which clients take them.

        Raises:
            UserError: the data set has no domains, or `order` does not name each of them once.
        """
        if not dataset.domains or dataset.train.domain is None:
            raise UserError(
                f"{dataset.name!r} has no domains: use another partition, such as dirichlet:0.5."
            )
        for name in self.order:
            if name not in dataset.domains:
                raise unknown("domain", name, dataset.domains)
        if self.order and sorted(self.order) != sorted(dataset.domains):
            raise UserError(f"{self} must name each domain once: {', '.join(dataset.domains)}.")
        return self.order or dataset.domains

    def __str__(self) -> str:
        return ":".join(filter(None, ("domains", ",".join(self.order), str(self.skew or ""))))


@dataclass(frozen=True)
class Pathological(Mixing, Checked):
    """A few classes for each client; each class is cut evenly among the clients that hold it.

    Each draw takes a random class among those drawn least often so far. So all classes are used,
    and their counts differ by one at most. We do not use `PathologicalPartitioner` of
    flwr-datasets: it leaves out the samples of classes that no client draws.

    Attributes:
        classes_per_client: number of classes each client holds.
    """

    _flag: ClassVar[str] = "{}"
    classes_per_client: Count

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[Rows]:
        units = DealtUnits(dataset.train)
        labels = units.commonest(numpy(dataset.strata(dataset.train)))
        present = np.unique(labels)
        k = self.classes_per_client
        n = len(present)
        if k > n or k * clients < n:
            raise UserError(
                f"{self} cannot give all {n} classes to {clients} clients: "
                f"take from {-(-n // clients)} to {n} classes a client, or other clients."
            )
        takers: list[list[int]] = [[] for _ in present]
        for client in range(clients):
            dealt = [*map(len, takers)]
            deck = rng.permutation(n)
            for c in sorted(deck, key=dealt.__getitem__)[:k]:
                takers[c].append(client)
        held = defaultdict[int, list[Rows]](list)
        for label, who in zip(present, takers, strict=True):
            shuffled = rng.permutation(np.flatnonzero(labels == label))
            for client, part in zip(who, units.even(shuffled, len(who)), strict=True):
                held[client].append(part)
        return [rng.permutation(units.rows(np.concatenate(held[k]))) for k in range(clients)]

    def __str__(self) -> str:
        return f"classes:{self.classes_per_client}"


@dataclass(frozen=True)
class Natural:
    """One natural owner (writer, hospital) for each client; fewer clients share the owners at
    random.

    `NaturalIdPartitioner` of flwr-datasets gives the same rows, but takes seconds and shows a
    progress bar.
    """

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[Rows]:
        if dataset.train.group is None:
            raise UserError(
                f"{dataset.name!r} has no natural owners: use another partition, such as iid, or "
                "name the column of a table that says which silo a row belongs to (--group-column)."
            )
        _, owner, sizes = np.unique(
            numpy(dataset.train.group), return_inverse=True, return_counts=True
        )
        if clients > len(sizes):
            raise UserError(
                f"{clients} clients are more than the {len(sizes)} natural owners: take at most "
                f"{len(sizes)}."
            )
        owners = cut(np.argsort(owner, kind="stable"), sizes)
        deal = np.arange(clients)
        if clients < len(sizes):
            deal = rng.permutation(len(sizes))
        found = list[Rows]()
        held = list[str]()
        for k in range(clients):
            dealt = deal[k::clients].tolist()
            found.append(rng.permutation(np.concatenate([owners[owner] for owner in dealt])))
            if dataset.groups:
                names = listed(dataset.groups[owner] for owner in dealt)
                held.append(f"client-{k} holds the rows of {names}")
        if clients < len(sizes) and held:
            tell(
                f"{clients} clients share {len(sizes)} natural owners: {listed(held, sign='; ')}; "
                "without --clients each is a client"
            )
        return found

    def __str__(self) -> str:
        return "natural"


def _has_spelling(partition: Partition) -> bool:
    """Return whether its text gives it back, so that a plan can name it."""
    try:
        return parse(str(partition)) == partition
    except UserError:
        return False


def parse(text: str) -> Partition:  # noqa: PLR0911  (one spelling, one return)
    """Return the partition with this spelling; `str` of a partition returns the spelling.

    Spellings: iid, dirichlet:BETA, dirichlet:BETA:MIN_SIZE, domains, domains:NAME,NAME, classes:K,
    natural. After domains there may be one of Dirichlet, as in domains:dirichlet:BETA.

    Raises:
        UserError: `text` is none of the spellings.
    """
    kind, *values = text.strip().split(":")
    # not a number
    with suppress(ValueError), at(f"partition {text}"):
        match kind, values:
            case "iid", []:
                return Iid()
            case "natural", []:
                return Natural()
            case "dirichlet", [beta]:
                return Dirichlet(float(beta))
            case "dirichlet", [beta, least]:
                return Dirichlet(float(beta), int(least))
            case "classes", [k]:
                return Pathological(int(k))
            case "domains", [*order, "dirichlet", _] | [*order, "dirichlet", _, _]:
                whole = parse(":".join([kind, *order]))
                skew = parse(":".join(values[len(order) :]))
                if isinstance(whole, Domains) and isinstance(skew, Dirichlet):
                    return Domains(whole.order, skew)
            case "domains", []:
                return Domains()
            case "domains", [order] if all(names := order.split(",")):
                return Domains(tuple(names))
    raise UserError(f"{text!r} is not a partition: give one of {SPELLINGS}.")


@checked("dataset", "partition")
def split(
    dataset: Dataset | Source,
    partition: Partition | str,
    clients: int | None = None,
    *,
    seed: int = 0,
    val_fraction: float = 0.1,
) -> FederatedData:
    """Give every sample of a data set to one client.

    The first `int(val_fraction * n)` of a client's n shuffled rows are for validation, the rest for
    training. Test rows follow the training rows: the test rows of each class are divided among the
    clients in proportion to their training rows of that class. `Domains` does this for each domain
    instead, and `Natural` for each owner if the test part has the same owners.

    Args:
        dataset: what to divide: a `Dataset`, or samples that `from_tensors` takes.
        partition: which training rows each client holds: a partition, or its spelling, as in
            "dirichlet:0.5".
        clients: number of clients; the default is the number of domains (twice that if their labels
            are skewed) or natural owners, or else 10, fewer if that leaves less than 20 samples (or
            subjects) for each.
        seed: the same seed gives the same split.
        val_fraction: share of each client's rows for validation, from 0 to below 1.

    Raises:
        UserError: there are more clients than samples, a client would have no samples, the
            partition does not fit the data, or an argument is of another type.
    """
    dataset = _whole(dataset, partition)
    if isinstance(partition, str):
        partition = parse(partition)
    if not callable(getattr(partition, "assign", None)) or isinstance(partition, type):
        shown = getattr(partition, "__name__", type(partition).__name__)
        raise UserError(
            f"split cannot divide by {shown}: give a partition, as in dirichlet:0.5 or "
            "Dirichlet(0.5)"
        )
    if clients is None:
        clients = _default_clients(dataset, partition)
    mixed = isinstance(partition, Mixing)
    n = len(dataset.train)
    noun = "training samples"
    if mixed and dataset.train.subject is not None:
        n = DealtUnits(dataset.train).count
        noun = "subjects"
    if clients < 1 or clients > n:
        raise UserError(f"{clients} clients cannot share {n} {noun}: take from 1 to {n} clients.")
    if seed < 0:
        raise UserError(f"seed must be 0 or more; it is {seed}.")
    if dataset.groups and dataset.train.group is not None and not isinstance(partition, Natural):
        several = counted(len(dataset.groups), "natural owner")
        named = listed(dataset.groups)
        tell(
            f"{partition} mixes the rows of {several} ({named}): use natural to keep what each "
            "owner holds"
        )
    rows = partition.assign(dataset, clients, np.random.default_rng(seed))
    train_keys, test_keys = _keys(dataset, partition)
    test_rows = divide(train_keys, rows, test_keys)
    made = share_out(
        dataset, _names(dataset, partition, clients), rows, test_rows, val_fraction, mixed=mixed
    )
    natural = isinstance(partition, Natural) and bool(dataset.groups)
    owners = natural and clients == _default_clients(dataset, partition)
    # one for each client
    if owners:
        made = replace(made, among=partial(_of_owners, dataset, seed, val_fraction))
    origin = dataset.origin if _has_spelling(partition) else None
    # of other clients than owners, these names would leave out clients
    if origin and origin.without and not owners:
        origin = None
    return coming_from(
        made,
        origin,
        partition=str(partition),
        clients=None if owners else clients,
        seed=seed,
        val_fraction=val_fraction,
    )


def _whole(dataset: Any, partition: Any) -> Dataset:
    """Return the data set that the user means."""
    if isinstance(partition, Dataset):
        raise UserError(
            'split takes the data set first: ekiden.split(dataset, "dirichlet:0.5", clients)'
        )
    if isinstance(dataset, FederatedData):
        raise UserError(
            "split was given data that are divided already: give the Dataset, as it was loaded"
        )
    if isinstance(dataset, str | PathLike):
        raise UserError(
            f"split takes a data set, not its name: ekiden.split(ekiden.load({str(dataset)!r}), "
            "...)"
        )
    if isinstance(dataset, Dataset):
        return dataset
    return from_tensors(dataset)


def _default_clients(dataset: Dataset, partition: Partition) -> int:
    if isinstance(partition, Domains):
        return len(partition.names(dataset)) * (2 if partition.skew else 1)
    if isinstance(partition, Natural) and dataset.train.group is not None:
        return len(np.unique(numpy(dataset.train.group)))
    return max(2, min(10, DealtUnits(dataset.train).count // _ENOUGH))


def _keys(dataset: Dataset, partition: Partition) -> tuple[Tensor, Tensor]:
    """Return keys of training and test rows; rows with the same key belong to the same clients."""
    train = dataset.train
    test = dataset.test
    if isinstance(partition, Domains) and train.domain is not None and test.domain is not None:
        return train.domain, test.domain
    if isinstance(partition, Natural) and train.group is not None and test.group is not None:
        known = np.isin(numpy(test.group), numpy(train.group))
        if known.all():
            return train.group, test.group
        _unknown_groups(dataset, test.group[torch.from_numpy(~known)], everywhere=not known.any())
    return dataset.strata(train), dataset.strata(test)


def _unknown_groups(dataset: Dataset, unknown: Tensor, *, everywhere: bool) -> None:
    """Report or refuse test rows of groups that training does not have."""
    owners = np.unique(numpy(unknown))
    names = listed(dataset.groups[owner] if dataset.groups else owner for owner in owners)
    if not everywhere:
        raise UserError(
            f"{len(unknown):,} test rows of {dataset.name} are of groups that training does not "
            f"have ({names}): take "
            "them out, measure them apart with `ekiden evaluate RUN --data`, or add training rows"
        )
    tell(
        f"no group of the test part of {dataset.name} ({names}) is in training: its rows are "
        "divided among clients by their labels"
    )


def _names(dataset: Dataset, partition: Partition, clients: int) -> list[str]:
    if isinstance(partition, Domains):
        domains = partition.names(dataset)
        if clients == len(domains):
            return list(domains)
        return [f"{domains[k % len(domains)]}-{k // len(domains)}" for k in range(clients)]
    group = dataset.train.group
    if isinstance(partition, Natural) and dataset.groups and group is not None:
        owners = np.unique(numpy(group))
        if len(owners) == clients:
            return [dataset.groups[owner] for owner in owners]
    return [f"client-{k}" for k in range(clients)]
