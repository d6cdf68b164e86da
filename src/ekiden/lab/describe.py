"""Show who holds what, as a table and as a picture; and describe the copies of the data that
results were made with.
"""

import re
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
from ekiden.core.base.files import disk_error
from ekiden.core.base.outside import require_extra
from ekiden.core.data.samples import Dataset, FederatedData
from ekiden.core.tasks import Regression, Survival
from ekiden.readers.kinds import Table as Columns

WIDE = 12  # the table summarises more classes than this
_NAMED = 6  # classes in a line
_WIDTH = 110  # letters of a line
LONG = 40  # the table leaves out some of more clients than this


_LOOKED_AT = 2000  # samples whose range is shown
_OWNER = re.compile(
    r"(^|[^a-z])(hospital|clinic|cent(re|er)|site|silo|bank|institution|client)([^a-z]|$)"
)


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
        return {
            "understood": dict(self.lines),
            "clients": {name: dict(one) for name, one in self.clients.items()},
        }


def description(fed: FederatedData) -> Description:
    """Return what was understood of data."""
    held, names = counts(fed), held_names(fed)
    sizes = np.array([[len(c.train), len(c.val), len(c.test)] for c in fed.clients])
    clients = {
        client.name: {
            **dict(zip(("train", "val", "test"), map(int, sizes[k]), strict=True)),
            "labels": {str(name): int(n) for name, n in zip(names, held[k], strict=True) if n},
        }
        for k, client in enumerate(fed.clients)
    }
    dataset, each = fed.dataset, sizes[:, 0] + sizes[:, 1]
    train, val, test = (f"{n:,}" for n in sizes.sum(axis=0))
    made_up = fed.origin is not None and fed.origin.partition not in ("", "natural")
    how = f", {fed.origin.partition}{_owners(dataset)}" if fed.origin and made_up else ""
    spread = f"{each.min():,}" if each.min() == each.max() else f"{each.min():,} to {each.max():,}"
    subject = dataset.train.subject
    lines = {
        "samples": f"{sizes.sum():,}: {train} for training, {val} for validation, {test} for the test",
        "layout": shorten(
            dataset.inputs.takes(dataset.shape).removesuffix("."), _WIDTH, placeholder=" ..."
        ),
        "range": _range(dataset),
        "labels": _labels(dataset),
        "silos": f"{len(fed.clients)} with {spread} samples for training and validation each{how}",
        "subjects": "no column given; one patient's rows may be in both training and test (--subject-column)"
        if subject is None
        else f"{len(set(subject.tolist())):,} in training; none of them is in the test",
    }
    return Description(lines, clients)


def _owners(dataset: Dataset) -> str:
    """Say which feature sounds like the silos' names."""
    columns = dataset.inputs.categorical if isinstance(dataset.inputs, Columns) else ()
    found = [name for name in columns if _OWNER.search(name.lower())]
    return (
        f"; {found[0]!r} is a feature: if it says who holds a row, make it the group column"
        if found
        else ""
    )


def _range(dataset: Dataset) -> str:
    """Return the least and greatest values, and how they are scaled."""
    x = dataset.train.x[
        torch.linspace(0, len(dataset.train) - 1, min(len(dataset.train), _LOOKED_AT)).long()
    ]
    looked = f" in {_LOOKED_AT:,} samples" if len(dataset.train) > _LOOKED_AT else ""
    found = f"{x.min().item():.4g} to {x.max().item():.4g}{looked}"
    if dataset.inputs.agreed:
        return f"{found}, after scaling to mean 0 and deviation 1 by all silos' training rows"
    parts = ["divided by 255"] * (x.dtype == torch.uint8)
    if any(dataset.mean) or any(s != 1 for s in dataset.std):
        mean, std = (
            ", ".join(f"{value:.3g}" for value in values) for values in (dataset.mean, dataset.std)
        )
        parts += [f"less mean {mean}", f"divided by {std}"]
    return f"{found}, {', '.join(parts) or 'used as they are'}"


def _labels(dataset: Dataset) -> str:
    """Return the task, its classes or targets, and the commonest class."""
    task, y = dataset.task, dataset.train.y
    names = listed(dataset.classes, _NAMED)
    if isinstance(task, Regression):
        return f"regression of {names}: {y.min().item():.4g} to {y.max().item():.4g}"
    if isinstance(task, Survival):
        return f"survival, {names} from {y[:, 0].min():.4g} to {y[:, 0].max():.4g}: {y[:, 1].sum():,.0f} events"
    if not dataset.classes:
        return task.kind
    held = task.counts(y, len(dataset.classes))
    top, share = (
        str(dataset.classes[int(held.argmax())]),
        100 * float(held.max()) / max(1, int(held.sum())),
    )
    of = "pixels" if task.kind == "segmentation" else "training labels"
    common = f"; commonest: {top} ({share:.1f} % of the {of})"
    return f"{task.kind}, {counted(len(dataset.classes), 'class', 'classes')}: {names}{common}"


def counts(fed: FederatedData) -> NDArray[np.int64]:
    """Count the labels of each kind that each client holds for training and validation, (clients,
    K); see `held_names`.

    For classes these are samples, for numbers the samples of each target, and for texts all
    samples.
    """
    if not fed.dataset.classes:
        return np.array([[len(c.train) + len(c.val)] for c in fed.clients])
    task, k = fed.dataset.task, len(fed.dataset.classes)
    return np.stack(
        [(task.counts(c.train.y, k) + task.counts(c.val.y, k)).cpu().numpy() for c in fed.clients]
    )


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
    sizes = np.array([[len(c.train), len(c.val), len(c.test)] for c in fed.clients])
    wide = held.shape[1] > WIDE
    out = RichTable(
        title=f"{_short(fed.dataset.name)}: {counted(len(fed.clients), 'client')}, {_kinds(fed)}"
    )
    out.add_column("client")
    for name in ("classes", "largest classes") if wide else held_names(fed):
        out.add_column(name, justify="left" if name == "largest classes" else "right")
    for name in ("train", "val", "test"):
        out.add_column(name, justify="right", style="bold")
    for k, client in enumerate(fed.clients):
        if len(fed.clients) > LONG and LONG // 2 <= k < len(fed.clients) - LONG // 2:
            if k == LONG // 2:
                out.add_row("...")
            continue
        out.add_row(client.name, *_cells(held[k], held_names(fed)), *map(str, sizes[k]))
    out.add_section()
    out.add_row("all", *_cells(held.sum(axis=0), held_names(fed)), *map(str, sizes.sum(axis=0)))
    return out


def _short(name: str) -> str:
    """Return the name of data without the folder that they are in."""
    return Path(name).name if Path(name).is_absolute() else name


def _kinds(fed: FederatedData) -> str:
    """Return in words how many kinds of labels there are."""
    count, task = len(held_names(fed)), fed.dataset.task.kind
    what = {
        "multi-label": "label",
        "regression": "target",
        "survival": "target",
        "language-modelling": "kind",
    }.get(task, "class")
    return f"{count} {what}{'es' if what == 'class' else 's' if count != 1 else ''}"


def _cells(held: NDArray[np.int64], classes: tuple[str, ...]) -> list[str]:
    if len(classes) <= WIDE:
        return [str(n) if n else "-" for n in held]
    top = [c for c in np.argsort(-held, kind="stable")[:3] if held[c]]
    return [str(np.count_nonzero(held)), ", ".join(f"{classes[c]} {held[c]}" for c in top)]


def draw(fed: FederatedData, path: Path | str) -> None:
    """Write the bubble chart of `picture` to a PNG file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        picture(fed).savefig(path, format="png", dpi=120)
    except OSError as error:
        raise disk_error(error, Path(path)) from None


def picture(fed: FederatedData) -> Any:
    """Return a matplotlib figure: classes across, clients down, bubbles sized by training and
    validation samples.
    """
    require_extra("report", "the picture", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    held = counts(fed)
    clients, classes = held.shape
    cell = min(0.5, 14 / classes, 20 / clients)  # inches a bubble may take
    figure = Figure(figsize=(cell * classes + 2.6, cell * clients + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    row, column = np.nonzero(held)
    points = (0.95 * cell * 72) ** 2  # area of the largest bubble; a point is 1/72 inch
    area = points / held.max()
    blue = "#0072B2"  # from the palette of Okabe and Ito, for colour-blind readers
    axes.scatter(column, row, s=held[row, column] * area, color=blue, alpha=0.85, linewidths=0)
    axes.set(
        xlim=(-0.7, classes - 0.3),
        ylim=(clients - 0.3, -0.7),
        title=_short(fed.dataset.name),
        xlabel="class",
        ylabel="client",
    )
    axes.title.set_parse_math(False)
    _ticks(axes, fed)
    axes.grid(color="#e0e0e0", linewidth=0.5)
    axes.set_axisbelow(True)
    sizes = sorted({max(1, int(held.max() * share)) for share in (0.1, 0.5, 1.0)})
    marks = [
        axes.scatter([], [], s=n * area, color=blue, alpha=0.85, linewidths=0, label=str(n))
        for n in sizes
    ]
    wide = cell * 7  # the largest bubble's width in letters
    figure.legend(
        handles=marks,
        loc="outside right upper",
        title="samples",
        frameon=False,
        labelspacing=max(0.5, wide - 0.8),
        handletextpad=max(0.5, wide / 2 - 0.5),
        borderpad=1.5,
    )
    return figure


def _ticks(axes: Any, fed: FederatedData) -> None:
    """Show names if there is room to read them, else every fifth number."""
    short = len(held_names(fed)) <= 20
    names = [c if len(c) <= 16 else f"{c[:15]}…" for c in held_names(fed)]
    places = range(len(names)) if short else range(0, len(names), 5)
    axes.set_xticks(places, [names[i] if short else str(i) for i in places], parse_math=False)
    if short and max(map(len, names)) > 2:
        axes.tick_params(axis="x", labelrotation=90)
    step = -(-len(fed.clients) // 40)
    axes.set_yticks(
        range(0, len(fed.clients), step), [c.name for c in fed.clients[::step]], parse_math=False
    )
    axes.tick_params(labelsize=8, length=0)
