"""Say what was understood of data, and show who holds what as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table as RichTable

from ekiden.core.base.errors import counted, listed
from ekiden.core.data.samples import Dataset, FederatedData
from ekiden.core.tasks import Regression, Survival

WIDE = 12  # the table summarises more classes than this
# classes in a line
_NAMED = 6
# letters of a line
_WIDTH = 110
# the table leaves out some of more clients than this
LONG = 40
_PARTS = ("train", "val", "test")

# samples whose range is shown
_LOOKED_AT = 2000


@dataclass(frozen=True)
class Description:
    """What was understood of data, for a look before training."""

    lines: Mapping[str, str]  # what each line is about, and the line
    # the number of training, validation and test samples of each client, and of each label in its
    # training and
    # validation samples
    clients: Mapping[str, Mapping[str, Any]]

    def __str__(self) -> str:
        return "\n".join(f"{f'{what}:':9} {line}" for what, line in self.lines.items())

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"understood": self.lines, "clients": self.clients}


def description(fed: FederatedData) -> Description:
    """Return what was understood of data."""
    dataset = fed.dataset
    held = counts(fed)
    sizes = _sizes(fed)
    train, val, test = sizes.sum(axis=0)
    takes = dataset.inputs.takes(dataset.shape).removesuffix(".")
    subjects = (
        "no column given; one patient's rows may be in both training and test (--subject-column)"
    )
    if dataset.train.subject is not None:
        known = len(set(dataset.train.subject.tolist()))
        subjects = f"{known:,} in training; none of them is in the test"
    lines = {
        "samples": f"{sizes.sum():,}: {train:,} for training, {val:,} for validation, "
        f"{test:,} for the test",
        "layout": shorten(takes, _WIDTH, placeholder=" ..."),
        "range": _range(dataset),
        "labels": _labels(dataset),
        "silos": _silos(fed, sizes[:, :2].sum(axis=1)),
        "subjects": subjects,
    }
    clients = {}
    for client, parts, has in zip(fed.clients, sizes.tolist(), held, strict=True):
        named = dict(zip(held_names(fed), has.tolist(), strict=True))
        labels = {name: count for name, count in named.items() if count}
        clients[client.name] = dict(zip(_PARTS, parts, strict=True)) | {"labels": labels}
    return Description(lines, clients)


def _sizes(fed: FederatedData) -> NDArray[np.int64]:
    """Return the samples for training, validation and test of each client, (clients, 3)."""
    return np.array([[len(c.train), len(c.val), len(c.test)] for c in fed.clients])


def _silos(fed: FederatedData, each: NDArray[np.int64]) -> str:
    """Return how many silos there are, with how many samples, and how a division was made up."""
    spread = f"{each.min():,}"
    if each.max() > each.min():
        spread += f" to {each.max():,}"
    line = f"{len(fed.clients)} with {spread} samples for training and validation each"
    if fed.origin is None or fed.origin.partition in ("", "natural"):
        return line
    return f"{line}, {fed.origin.partition}"


def _range(dataset: Dataset) -> str:
    """Return the least and greatest values, and how they are scaled."""
    samples = len(dataset.train)
    rows = torch.linspace(0, samples - 1, min(samples, _LOOKED_AT)).long()
    x = dataset.train.x[rows]
    found = f"{x.min().item():.4g} to {x.max().item():.4g}"
    if samples > _LOOKED_AT:
        found += f" in {_LOOKED_AT:,} samples"
    if dataset.inputs.agreed:
        return f"{found}, after scaling to mean 0 and deviation 1 by all silos' training rows"
    if x.dtype == torch.uint8:
        found += ", divided by 255"
    if any(dataset.mean) or any(s != 1 for s in dataset.std):
        mean, std = (listed(map("{:.3g}".format, one), 100) for one in (dataset.mean, dataset.std))
        return f"{found}, less mean {mean}, divided by {std}"
    if x.dtype != torch.uint8:
        found += ", used as they are"
    return found


def _labels(dataset: Dataset) -> str:
    """Return the task, its classes or targets, and the commonest class."""
    task = dataset.task
    y = dataset.train.y
    names = listed(dataset.classes, _NAMED)
    if isinstance(task, Regression):
        return f"regression of {names}: {y.min().item():.4g} to {y.max().item():.4g}"
    if isinstance(task, Survival):
        return f"survival, {names} from {y[:, 0].min():.4g} to {y[:, 0].max():.4g}: {y[:, 1].sum():,.0f} events"
    if not dataset.classes:
        return task.kind
    held = task.counts(y, len(dataset.classes))
    top = dataset.classes[int(held.argmax())]
    share = 100 * float(held.max()) / max(1, int(held.sum()))
    of = "training labels"
    if task.kind == "segmentation":
        of = "pixels"
    many = counted(len(dataset.classes), "class", "classes")
    return f"{task.kind}, {many}: {names}; commonest: {top} ({share:.1f} % of the {of})"


def counts(fed: FederatedData) -> NDArray[np.int64]:
    """Count the labels of each kind that each client holds for training and validation, (clients,
    K); see `held_names`.

    For classes these are samples, for numbers the samples of each target, and for texts all
    samples.
    """
    if not fed.dataset.classes:
        return np.asarray(_sizes(fed)[:, :2].sum(axis=1, keepdims=True))
    task = fed.dataset.task
    k = len(fed.dataset.classes)
    held = []
    for client in fed.clients:
        both = task.counts(client.train.y, k) + task.counts(client.val.y, k)
        held.append(both.cpu().numpy())
    return np.stack(held)


def held_names(fed: FederatedData) -> tuple[str, ...]:
    """Return the names of the columns of `counts`: classes, labels, targets, or texts."""
    return fed.dataset.classes or ("texts",)


def table(fed: FederatedData) -> RichTable:
    """Return a table of the clients: samples of each class (training and validation together) and
    sizes of all parts.

    More than 12 classes are summarised by their number and the three largest. If there are more
    than 40 clients, the middle ones are left out.
    """
    held = counts(fed)
    names = held_names(fed)
    sizes = _sizes(fed)
    out = RichTable("client", title=f"{_short(fed.dataset.name)}: {counted(len(held), 'client')}")
    columns = names
    if len(names) > WIDE:
        columns = ("classes", "largest classes")
    for name in columns:
        out.add_column(name, justify="right")
    for name in _PARTS:
        out.add_column(name, justify="right", style="bold")
    rows = []
    for client, has, parts in zip(fed.clients, held, sizes, strict=True):
        rows.append((client.name, *_cells(has, names), *map(str, parts)))
    if len(rows) > LONG:
        rows[LONG // 2 : -LONG // 2] = [("...",)]
    for row in rows:
        out.add_row(*row)
    out.add_section()
    out.add_row("all", *_cells(held.sum(axis=0), names), *map(str, sizes.sum(axis=0)))
    return out


def _short(name: str) -> str:
    """Return the name of data without the folder that they are in."""
    if Path(name).is_absolute():
        return Path(name).name
    return name


def _cells(held: NDArray[np.int64], classes: tuple[str, ...]) -> list[str]:
    if len(classes) <= WIDE:
        return [str(count or "-") for count in held]
    largest = []
    for place in np.argsort(-held, kind="stable")[:3]:
        if held[place]:
            largest.append(f"{classes[place]} {held[place]}")
    return [str(np.count_nonzero(held)), ", ".join(largest)]
