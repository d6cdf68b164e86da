"""Figures of numbers: accuracy, clients and classes, who sent how much to whom; and where a model
fails.
"""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from ekiden.clinic.recalibration import kept_subgroups
from ekiden.clinic.subgroups import cell
from ekiden.core.data.samples import FederatedData
from ekiden.core.engine.folder import read_ledger
from ekiden.core.engine.wire import SERVER
from ekiden.core.tasks import Metric
from ekiden.lab.describe import counts, held_names
from ekiden.lab.reporting.runs import Group
from ekiden.lab.reporting.style import (
    HEAT,
    MUTED,
    WHITE,
    Drawing,
    Missing,
    Value,
    blank,
    cut,
    legend,
    line_style,
    shown,
)
from ekiden.lab.reporting.tables import METRICS, PlainTable
from ekiden.runs.clock import PRESETS, Devices
from ekiden.runs.summary import Summary, simulated, size

Row = dict[str, Any]
_Line = NDArray[np.float64]
# most lines in one figure
_MOST = 14
# most letters of a label
_LONGEST = 22
# stands out from every colour of the map
_FRAME = "#e4572e"


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a curve."""

    name: str  # part of the file names
    title: str  # what follows the metric's name in the title of the figure
    label: str  # label of the axis
    measure: Callable[[Summary, Row], float]  # returns the value of a run at a row of its metrics
    note: str = ""  # what the axis means, if the label does not say it
    unit: str = ""  # of its numbers


BYTES = Axis(
    "bytes", "against bytes", "bytes moved", lambda run, row: float(row["bytes"]), unit="B"
)
COMPUTE = Axis(
    "compute",
    "against compute",
    "forward + 2 × backward samples",
    lambda run, row: float(row["forward"] + 2 * row["backward"]),
    "Samples that went through a network, backward counted twice. A dotted line is a method that "
    "counts none. ",
)
STEPS = Axis(
    "steps",
    "after every hop or round",
    "hop or round",
    lambda run, row: float(row["step"]),
    "A hop of a sequential method, else a round. ",
)


@dataclass(frozen=True, eq=False)
class Line:
    """A method's curve: means over the seeds at each step that all seeds have measured."""

    group: Group
    x: _Line  # (t) what was spent
    y: _Line  # (t) the metric, shares in per cent
    std: _Line | None  # (t) its standard deviation over the seeds; None for one seed

    @property
    def rows(self) -> list[list[Value]]:
        """The numbers, a row for each step."""
        rows: list[list[Value]] = []
        for k, (spent, value) in enumerate(zip(self.x.tolist(), self.y.tolist(), strict=True)):
            deviation = None
            if self.std is not None:
                deviation = float(self.std[k])
            rows.append([self.group.name, spent, value, deviation, len(self.group.runs)])
        return rows


def curves(number: int, groups: Sequence[Group], devices: Devices | None = None) -> list[Drawing]:
    """Draw the figures of one setting, without those that would show nothing; with devices, one
    over simulated time.
    """
    axes = [BYTES, COMPUTE, STEPS]
    if devices is not None:
        axes.append(_time(groups, devices))
    return list(filter(None, (_draw(axis, number, groups) for axis in axes)))


def _time(groups: Sequence[Group], devices: Devices) -> Axis:
    """Return the axis of simulated time for these groups."""
    clocks = {}
    for group in groups:
        for run in group.runs:
            clocks[run.folder] = simulated(run, devices)

    def seconds(run: Summary, row: Row) -> float:
        clock = clocks[run.folder]
        if not clock:
            return 0.0
        return float(clock.seconds[row["step"] - 1])

    name = "of your own"
    for preset, its in PRESETS.items():
        if its == devices:
            name = f"`{preset}`"
    note = (
        f"What the run would have taken on devices {name}, from its bytes and passes. Methods that "
        "count no passes, "
        "such as trees, are without their computing. "
    )
    return Axis("time", "over simulated time", "simulated seconds", seconds, note)


def _line(group: Group, axis: Axis, metric: str) -> Line | None:
    """Return the curve of a method; None if no step is measured in all its runs."""
    points = defaultdict[int, list[tuple[float, float]]](list)
    for run in group.runs:
        for row in run.metrics:
            if row.get(metric) is not None:
                points[row["step"]].append((axis.measure(run, row), row[metric]))
    everywhere = [of_step for of_step in points.values() if len(of_step) == len(group.runs)]
    if not everywhere:
        return None
    # (t, runs)
    spent, values = np.moveaxis(np.array(everywhere), -1, 0)
    values = group.shown.scale * values
    std = None
    if len(group.runs) > 1:
        std = values.std(1, ddof=1)
    return Line(group, spent.mean(1), values.mean(1), std)


def _draw(axis: Axis, number: int, groups: Sequence[Group]) -> Drawing | None:
    """Draw one figure; None if nothing was spent, or there is only one step."""
    metric = groups[0].metric
    unit = groups[0].shown
    if len({group.metric for group in groups}) > 1:
        metric = "accuracy"
    lines: list[Line] = []
    rows: list[list[Value]] = []
    ends = []
    for group in groups:
        if line := _line(group, axis, metric):
            lines.append(line)
            rows += line.rows
            if line.x[-1] > 0:
                ends.append(float(line.x[-1]))
    if not ends or (axis is STEPS and max(ends) == 1):
        return None
    best = sorted(lines, key=lambda line: float(line.y[-1]), reverse=unit.higher)[:_MOST]
    # cheap methods would all lie at the left edge
    logarithmic = max(ends) > 12 * min(ends)
    figure, axes = blank()
    for line in lines:
        if line in best:
            _series(axes, line, logarithmic)
    if logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(axis.unit, sep=" "))
    label = f"{unit.name}{unit.unit} {METRICS.get(metric, '')}".strip()
    axes.set(xlabel=axis.label, ylabel=textwrap.fill(label, 32))
    legend(figure, axes)
    note = axis.note
    if len(groups) > _MOST:
        note += f"The best {_MOST} of {len(groups)}."
    title = f"{unit.name.replace('_', ' ').capitalize()} {axis.title}"
    header = ["method", axis.label, f"{unit.name}_mean", f"{unit.name}_std", "seeds"]
    return Drawing(f"{axis.name}-{number}", title, note, figure, header, rows)


def _series(axes: Any, line: Line, logarithmic: bool) -> None:
    """Draw one method as a line with a mark at its end, or as a line across the figure if it spent
    nothing.
    """
    style = line_style(line.group.place)
    name = line.group.name
    colour = style["color"]
    x = line.x
    y = line.y
    if not x[-1] > 0:
        axes.axhline(y[-1], color=colour, linestyle=(0, (1, 2)), label=shown(f"{name} (none)"))
        return
    if logarithmic:
        # which has no place on this axis
        x = np.where(x > 0, x, np.nan)
    axes.plot(x, y, **style, markersize=3.5, markevery=max(1, len(x) // 10), linewidth=1.5)
    if line.std is not None:
        low = y - line.std
        high = y + line.std
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.errorbar(x[-1], y[-1], yerr=line.std[-1], color=colour, capsize=2.5, linewidth=1.2)
    axes.plot(x[-1:], y[-1:], **style, markersize=8, markeredgecolor="none", label=shown(name))


def heat(
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    unit: str,
    form: str = "{:.0f}",
    limits: tuple[float, float] | None = None,
    labels: tuple[str, str] = ("", ""),
) -> Any:
    """Draw a matrix as coloured cells. Cells have their numbers in them if there is room; NaN is
    left blank.
    """
    n, m = values.shape
    most = max(n, m)
    written = most <= 20
    # inches, room for three digits
    cell = 0.42
    high_cell = 0.8 * 0.42
    room = 0.25
    if not written:
        # next to the cells there is a colour bar
        cell = max(8.8 / most, min(0.11, 18 / most))
        room = 1.0
        high_cell = cell
        # so few names can all be read
        if n <= 20:
            high_cell = max(cell, 0.22)
    beside = _room_for(rows)
    below = _room_for(columns)
    figure, axes = blank(max(3.0, cell * m + beside + room), max(1.4, high_cell * n + below + 0.25))
    low, high = limits or (float(np.nanmin(values)), float(np.nanmax(values)))
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=HEAT, vmin=low, vmax=high or 1.0, edgecolors="none"
    )
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines[:].set_visible(False)
    turned = 0
    if max(map(len, columns)) > 3:
        turned = 90
    axes.set_xticks(*_places(columns), rotation=turned)
    axes.set_yticks(*_places(rows))
    axes.tick_params(length=0)
    axes.set(xlabel=labels[1], ylabel=labels[0])
    if written:
        for (i, j), value in np.ndenumerate(values):
            text = "–"
            colour = MUTED
            if np.isfinite(value):
                text = form.format(value)
                colour = WHITE
                # a bright cell
                if (value - low) / ((high - low) or 1) > 0.55:
                    colour = "#101010"
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=8.5, color=colour)
    else:
        bar = figure.colorbar(mesh, ax=axes, fraction=0.03, aspect=25, pad=0.02, label=unit)
        bar.outline.set_visible(False)
    return figure


def _room_for(names: Sequence[str]) -> float:
    """Return the inches that names need next to the cells."""
    return 0.3 + 0.085 * min(_LONGEST, max(map(len, names)))


def holders(fed: FederatedData) -> Any:
    """Draw the training and validation samples of each class at each client."""
    names = [client.name for client in fed.clients]
    held = counts(fed).astype(float)
    return heat(held, names, held_names(fed), unit="samples", labels=("client", "class"))


def _places(names: Sequence[str]) -> tuple[Any, list[str]]:
    """Return where at most forty of the names stand, and these."""
    step = -(-len(names) // 40)
    return np.arange(0, len(names), step) + 0.5, [cut(name, _LONGEST) for name in names[::step]]


def metric_map(
    name: str,
    title: str,
    note: str,
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    metric: Metric,
    labels: tuple[str, str] = ("", ""),
) -> Drawing:
    """Draw a metric of rows and columns as a heat map."""
    limits = None
    if metric.share or np.isnan(values).all():
        limits = (0.0, 100.0)
    unit = f"{metric.name}{metric.unit}"
    figure = heat(values, rows, columns, unit=unit, limits=limits, labels=labels)
    numbers: list[list[Value]] = []
    known = values.astype(object)
    known[np.isnan(values)] = None
    for row, line in zip(rows, known.tolist(), strict=True):
        numbers.append([row, *line])
    return Drawing(name, title, note, figure, [labels[0] or "method", *columns], numbers)


def by_client(setting: str, number: int, groups: Sequence[Group]) -> Drawing | Missing:
    """Draw the final accuracy of every method on each client's own test data."""
    known = [g for g in groups if g.first.last.get("clients")]
    if not known:
        return Missing(setting, "runs list the accuracies of up to 100 clients that have test data")
    metric = known[0].shown
    first = known[0].first
    names = []
    each = []
    clients = list[str]()
    for group in known:
        if group.shown.name == metric.name:
            names.append(group.name)
            each.append(group.first.last["clients"])
            # a yardstick has one client with all data
            if not group.yardstick and not clients:
                clients = list(group.first.config["clients"])
    if not clients:
        clients = [f"client {i}" for i in range(len(each[0]))]
    values = _scaled(each, metric)
    note = (
        f"{_named(metric)} on each client's own test data, of its personal model where there is "
        f"one; seed {first.recipe['seed']}."
    )
    return metric_map(f"clients-{number}", "By client", note, values, names, clients, metric)


def by_group(
    kind: str, name: str, accuracies: Mapping[str, Mapping[str, tuple[int, float]]], metric: Metric
) -> Drawing:
    """Draw the final accuracy of every method on each class or domain."""
    methods = list(accuracies)
    groups = list(accuracies[methods[0]])
    each = []
    for rows in accuracies.values():
        each.append([rows[group][1] for group in groups])
    values = _scaled(each, metric)
    note = f"{_named(metric)} of the final models; of personal models, their mean."
    return metric_map(name, f"By {kind}", note, values, methods, groups, metric)


def hops(run: Summary) -> list[str] | None:
    """Return who trained in each step if the model went from client to client and nothing else
    moved; else None.
    """
    clients: list[str] = []
    for row in read_ledger(run.folder):
        source = row["source"]
        target = row["target"]
        step = row["step"]
        if SERVER in (source, target):
            return None
        if not clients:
            clients.append(source)
        if step == len(clients) and source == clients[-1]:
            clients.append(target)
        elif step != len(clients) - 1 or target != clients[-1]:
            return None
    if len(clients) != len(run.metrics) or len(clients) < 2:
        return None
    return clients


def forgetting(group: Group, number: int) -> Drawing | Missing | None:
    """Draw accuracy on each client's data after each hop, clients in the order of their first hop.
    None: no hops.
    """
    run = group.first
    metric = group.shown
    path = hops(run)
    if path is None:
        return None
    order = list(dict.fromkeys(path))
    clients = list(run.config["clients"])
    each = []
    trained = []
    down = []
    for hop, (client, row) in enumerate(zip(path, run.metrics, strict=True), 1):
        if row.get("clients"):
            each.append(row["clients"])
            trained.append(order.index(client))
            down.append(f"{hop} · {client}")
    if len(each) < 2:
        return Missing(group.name, "run with --evaluate-every 1, up to 100 clients")
    values = _scaled(each, metric)[:, list(map(clients.index, order))]
    lost = "Not every hop was measured."
    if len(each) == len(path):
        gains = values
        if not metric.higher:
            gains = -values
        mean = lost_points(gains, trained)
        if mean is not None and metric.share:
            lost = f"Mean forgetting: {mean:.1f} points."
        elif mean is not None:
            lost = f"Mean forgetting: {mean:.4g}."
    note = (
        f"Seed {run.recipe['seed']}; {_named(metric, first=False)}. Framed: the client that has "
        f"just trained. {lost}"
    )
    labels = ("after hop", "on the data of")
    name = f"forgetting-{number}"
    drawing = metric_map(name, group.name, note, values, down, order, metric, labels)
    for place, column in enumerate(trained):
        corner = (column + 0.06, place + 0.06)
        frame = Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=_FRAME, linewidth=2)
        drawing.figure.axes[0].add_patch(frame)
    return drawing


def lost_points(values: NDArray[np.float64], trained: Sequence[int]) -> float | None:
    """Return the mean forgetting: the best accuracy since a client trained minus the last, without
    the last client.

    `values` are accuracies (hops, clients), and `trained` the column of the client that trained in
    each hop.
    """
    losses = []
    for column in set(trained[:-1]) - {trained[-1]}:
        since = values[list(trained).index(column) :, column]
        if np.isfinite(since).all():
            losses.append(float(since.max() - since[-1]))
    if not losses:
        return None
    return float(np.mean(losses))


def _scaled(values: Sequence[Sequence[float | None]], metric: Metric) -> NDArray[np.float64]:
    """Return values of a metric as they are shown; NaN for None."""
    return metric.scale * np.array(values, dtype=np.float64)


def _named(metric: Metric, *, first: bool = True) -> str:
    """Return the metric's name for a sentence, capitalised if it is the first word."""
    name = metric.name
    if first:
        name = f"{name[0].upper()}{name[1:]}"
    if metric.share:
        name += " in per cent"
    return name


def ledger(group: Group, number: int) -> Drawing | Missing:
    """Draw the bytes from party to party over a whole run."""
    run = group.first
    sent, failed = flows(run)
    if not sent:
        return Missing(group.name, "nothing moved")
    # A client that was forgotten took part, too.
    parties = dict.fromkeys([*(hops(run) or run.config["clients"]), *chain(*sent)])
    if SERVER in parties:
        del parties[SERVER]
        parties[SERVER] = None
    note = (
        f"Seed {run.recipe['seed']}: {size(sent.total())} in all along {len(sent)} edges, at most "
        f"{size(max(sent.values()))} along one"
    )
    if failed:
        note += f"; {failed} times nobody answered"
    places = list(parties)
    values = np.full((len(places), len(places)), np.nan)
    rows: list[list[Value]] = []
    for (source, target), moved in sorted(sent.items()):
        values[places.index(source), places.index(target)] = moved / 1e6
        rows.append([source, target, moved])
    # senders are rows and receivers columns
    labels = ("from", "to")
    figure = heat(values, places, places, unit="MB", form="{:.1f}", labels=labels)
    header = [*labels, "bytes"]
    return Drawing(f"ledger-{number}", group.name, f"{note}.", figure, header, rows)


def flows(run: Summary) -> tuple[Counter[tuple[str, str]], int]:
    """Return the bytes by (source, target), and how often a client did not answer."""
    sent: Counter[tuple[str, str]] = Counter()
    failed = 0
    for row in read_ledger(run.folder):
        failed += bool(row.get("missing"))
        if row["bytes"]:
            sent[row["source"], row["target"]] += row["bytes"]
    return sent, failed


_NOTE = (
    "From counts, with 95 % intervals. A gap is the difference from all others of the column "
    "together. Slope and intercept are those of the label on the logit of the score: 1 and 0 if "
    "probabilities are right. Shift is the population stability index of the scores against the "
    "others; above 0.25 they differ much."
)


def failing(number: int, groups: Sequence[Group]) -> Iterator[PlainTable | Drawing]:
    """Yield a table for each run whose subgroups were measured, and a figure of the calibration of
    all.
    """
    for place, group in enumerate(groups):
        if found := kept_subgroups(group.first.folder):
            yield _table(f"subgroups-{number}-{place}", group.name, found)
    if drawing := _calibration(number, groups):
        yield drawing


def _table(name: str, title: str, found: Mapping[str, Any]) -> PlainTable:
    """Return one row for each subgroup."""
    # which are in percent
    figures: Mapping[str, bool] = found.get("shares", {})
    header = ["subgroup", "samples", "positives"]
    shown = []
    known = False
    for figure, share in figures.items():
        unit = ""
        if share:
            unit = " %"
        header.append(figure + unit)
    for column, groups in found["groups"].items():
        for subgroup, row in groups.items():
            cells = [f"{column}: {subgroup}", str(row["samples"]), str(row.get("positives", "–"))]
            for figure, share in figures.items():
                cells.append(cell(row, figure, share=share).replace("\n", "; "))
            line = "–"
            if row.get("recalibration"):
                line = "{:.2f}, {:+.2f}".format(*row["recalibration"])
                known = True
            shown.append([*cells, line])
    if known:
        header.append("slope, intercept")
    else:
        for cells in shown:
            cells.pop()
    note = _NOTE
    if "threshold" in found:
        note += f" Sensitivity and specificity at {found['threshold']:.4g}."
    for column, left in found.get("untold", {}).items():
        note += f" {column}: {left} samples in small subgroups are left out."
    return PlainTable(name, f"Subgroups: {title}", note, header, shown)


def _calibration(number: int, groups: Sequence[Group]) -> Drawing | None:
    """Draw the share of the second class against the mean score, by tenths of the test samples."""
    rows: list[list[Value]] = []
    series = []
    for group in groups:
        points = group.first.last.get("figures", {}).get("calibration", ())
        for point in points:
            rows.append([group.name, *point])
        if points:
            _, scores, shares = zip(*points, strict=True)
            series.append((group, scores, shares))
    if not series:
        return None
    figure, axes = blank()
    most = max(max(*scores, *shares) for _, scores, shares in series)
    axes.plot([0, most], [0, most], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    for group, scores, shares in series:
        style = line_style(group.place)
        axes.plot(scores, shares, **style, markersize=4, linewidth=1.5, label=shown(group.name))
    axes.set(xlabel="mean probability of the second class", ylabel="share of the second class")
    legend(figure, axes)
    note = "By tenths of the test samples, in order of their scores. On the dotted line probabilities are right."
    header = ["method", "samples", "score", "share"]
    return Drawing(f"calibration-{number}", "Calibration", note, figure, header, rows)
