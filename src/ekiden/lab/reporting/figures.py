"""Figures of numbers: accuracy, clients and classes, who sent how much to whom; and where a model
fails.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from ekiden.clinic.recalibration import kept_subgroups
from ekiden.clinic.subgroups import cell
from ekiden.core.engine.folder import read_ledger
from ekiden.core.engine.wire import SERVER
from ekiden.core.tasks import Metric
from ekiden.lab.reporting.runs import Group
from ekiden.lab.reporting.style import (
    HEAT,
    INK,
    MUTED,
    PAPER,
    SERIES,
    WHITE,
    Drawing,
    Missing,
    Value,
    bare,
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
_MOST = 14  # most lines in one figure
_LONGEST = 22  # most letters of a label
_FRAME = "#e4572e"  # stands out from every colour of the map
_MOST_NODES = 24  # in a graph; with more parties a matrix is drawn


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a curve."""

    name: str  # part of the file names
    title: str  # what follows the metric's name in the title of the figure
    label: str  # label of the axis
    measure: Callable[[Summary, Row], float]  # returns the value of a run at a row of its metrics
    note: str = ""  # what the axis means, if the label does not say it


BYTES = Axis("bytes", "against bytes", "bytes moved", lambda run, row: float(row["bytes"]))
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


def curves(number: int, groups: Sequence[Group], devices: Devices | None = None) -> list[Drawing]:
    """Draw the figures of one setting, without those that would show nothing; with devices, one
    over simulated time.
    """
    axes = (
        (BYTES, COMPUTE, STEPS)
        if devices is None
        else (BYTES, COMPUTE, STEPS, _time(groups, devices))
    )
    drawn = [_draw(axis, number, groups) for axis in axes]
    return [drawing for drawing in drawn if drawing]


def _time(groups: Sequence[Group], devices: Devices) -> Axis:
    """Return the axis of simulated time for these groups."""
    clocks = {run.folder: simulated(run, devices) for group in groups for run in group.runs}

    def seconds(run: Summary, row: Row) -> float:
        clock = clocks[run.folder]
        return clock.seconds[row["step"] - 1] if clock else 0.0

    name = next((f"`{name}`" for name, its in PRESETS.items() if its == devices), "of your own")
    note = (
        f"What the run would have taken on devices {name}, from its bytes and passes. Methods that "
        "count no passes, "
        "such as trees, are without their computing. "
    )
    return Axis("time", "over simulated time", "simulated seconds", seconds, note)


def track(
    group: Group, axis: Axis, metric: str = "accuracy"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (s, t) what was spent and (s, t) the metric, shares in per cent, for each seed and
    each evaluated step.
    """
    steps = [
        {row["step"]: row for row in run.metrics if row.get(metric) is not None}
        for run in group.runs
    ]
    common = [step for step in steps[0] if all(step in rows for rows in steps)]
    pairs = list(zip(group.runs, steps, strict=True))
    spent = np.array([[axis.measure(run, rows[step]) for step in common] for run, rows in pairs])
    return spent, np.array(
        [[group.shown.scale * rows[step][metric] for step in common] for rows in steps]
    )


def _draw(axis: Axis, number: int, groups: Sequence[Group]) -> Drawing | None:
    """Draw one figure; None if nothing was spent, or there is only one step."""
    metric = groups[0].metric if len({group.metric for group in groups}) == 1 else "accuracy"
    unit = groups[0].shown
    tracks = {group: track(group, axis, metric) for group in groups}
    tracks = {group: found for group, found in tracks.items() if found[1].size}
    ends = [end for spent, _ in tracks.values() if (end := float(spent.mean(0)[-1])) > 0]
    if not ends or (axis is STEPS and max(ends) == 1):
        return None
    best = sorted(
        tracks, key=lambda group: float(tracks[group][1].mean(0)[-1]), reverse=unit.higher
    )[:_MOST]
    logarithmic = max(ends) > 12 * min(ends)
    figure, axes = blank()
    rows: list[list[Value]] = []
    for group, (spent, accuracy) in tracks.items():
        x, y = spent.mean(0), accuracy.mean(0)
        several = len(accuracy) > 1
        std = accuracy.std(0, ddof=1) if several else np.zeros_like(y)
        numbers = (
            (float(a), float(b), float(c) if several else None)
            for a, b, c in zip(x, y, std, strict=True)
        )
        rows += [[group.name, *three, len(group.runs)] for three in numbers]
        if group in best:
            _series(axes, group, x, y, std, logarithmic)
    if logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B" if axis is BYTES else "", sep=" "))
    label = f"{unit.name}{unit.unit} {METRICS.get(metric, '')}".strip()
    axes.set(xlabel=axis.label, ylabel=textwrap.fill(label, 32))
    legend(figure, axes)
    note = axis.note + (f"The best {_MOST} of {len(groups)}." if len(groups) > _MOST else "")
    title = f"{unit.name.replace('_', ' ').capitalize()} {axis.title}"
    header = ["method", axis.label, f"{unit.name}_mean", f"{unit.name}_std", "seeds"]
    return Drawing(f"{axis.name}-{number}", title, note, figure, header, rows)


def _series(axes: Any, group: Group, x: _Line, y: _Line, std: _Line, logarithmic: bool) -> None:
    """Draw one method as a line with a mark at its end, or as a line across the figure if it spent
    nothing.
    """
    style = line_style(group.place)
    if not x[-1] > 0:
        axes.axhline(
            y[-1], color=style["color"], linestyle=(0, (1, 2)), label=shown(f"{group.name} (none)")
        )
        return
    drawn = x > 0 if logarithmic else x >= 0
    every = max(1, drawn.sum() // 10)
    axes.plot(x[drawn], y[drawn], **style, markersize=3.5, markevery=every, linewidth=1.5)
    axes.fill_between(
        x[drawn], (y - std)[drawn], (y + std)[drawn], color=style["color"], alpha=0.15, linewidth=0
    )
    axes.errorbar(
        x[-1], y[-1], yerr=std[-1] or None, color=style["color"], capsize=2.5, linewidth=1.2
    )
    axes.plot(
        x[-1:], y[-1:], **style, markersize=8, markeredgecolor="none", label=shown(group.name)
    )


def heat(
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    unit: str,
    form: str = "{:.0f}",
    limits: tuple[float, float] | None = None,
    labels: tuple[str, str] = ("", ""),
) -> tuple[Any, Any]:
    """Draw a matrix as coloured cells. Cells have their numbers in them if there is room; NaN is
    left blank.
    """
    n, m = values.shape
    cell = 0.42 if max(n, m) <= 20 else max(0.11, 8.8 / max(n, m))
    written = cell >= 0.3
    beside, below = (0.3 + 0.085 * min(_LONGEST, max(map(len, names))) for names in (rows, columns))
    high_cell = 0.8 * cell if written else max(cell, 0.22 if n <= 20 else 0)
    room = 0.25 if written else 1.0
    figure, axes = blank(max(3.0, cell * m + beside + room), max(1.4, high_cell * n + below + 0.25))
    low, high = limits or (float(np.nanmin(values)), float(np.nanmax(values)))
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=HEAT, vmin=low, vmax=high or 1.0, edgecolors="none"
    )
    axes.invert_yaxis()
    bare(axes)
    _names(axes, rows, columns)
    axes.set(xlabel=labels[1], ylabel=labels[0])
    if written:
        for (i, j), value in np.ndenumerate(values):
            text = form.format(value) if np.isfinite(value) else "–"
            bright = not np.isfinite(value) or (value - low) / ((high - low) or 1) > 0.55
            colour = MUTED if not np.isfinite(value) else "#101010" if bright else WHITE
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=8.5, color=colour)
    else:
        bar = figure.colorbar(mesh, ax=axes, fraction=0.03, aspect=25, pad=0.02, label=unit)
        bar.outline.set_visible(False)
    return figure, axes


def _names(axes: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Write as many names as are readable."""
    across, down = (-(-len(names) // 40) for names in (columns, rows))
    left, under = ([cut(name, _LONGEST) for name in names] for names in (rows, columns))
    turned = 90 if max(map(len, under)) > 3 else 0
    axes.set_xticks(np.arange(0, len(columns), across) + 0.5, under[::across], rotation=turned)
    axes.set_yticks(np.arange(0, len(rows), down) + 0.5, left[::down])
    axes.tick_params(length=0)


def matrix_rows(
    values: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str]
) -> list[list[Value]]:
    """Return the numbers of a heat map, one line per row."""
    return [
        [name, *(float(v) if np.isfinite(v) else None for v in line)]
        for name, line in zip(rows, values, strict=True)
    ]


def by_client(setting: str, number: int, groups: Sequence[Group]) -> Drawing | Missing:
    """Draw the final accuracy of every method on each client's own test data."""
    known = [g for g in groups if g.first.last.get("clients")]
    if not known:
        return Missing(setting, "runs list the accuracies of up to 100 clients that have test data")
    named = [
        g.first.config["clients"] for g in known if not g.yardstick
    ]  # a yardstick has one client with all data
    clients = (
        list(named[0])
        if named
        else [f"client {i}" for i in range(len(known[0].first.last["clients"]))]
    )
    metric = known[0].shown
    known = [g for g in known if g.shown.name == metric.name]
    values = np.array([_scaled(g.first.last["clients"], metric) for g in known])
    names = [g.name for g in known]
    figure, _ = heat(
        values, names, clients, unit=f"{metric.name}{metric.unit}", limits=_limits(values, metric)
    )
    seed = known[0].first.recipe["seed"]
    note = f"{_named(metric)} on each client's own test data, of its personal model where there is one; seed {seed}."
    return Drawing(
        f"clients-{number}",
        "By client",
        note,
        figure,
        ["method", *clients],
        matrix_rows(values, names, clients),
    )


def by_group(
    kind: str, name: str, accuracies: Mapping[str, Mapping[str, tuple[int, float]]], metric: Metric
) -> Drawing:
    """Draw the final accuracy of every method on each class or domain."""
    methods = list(accuracies)
    groups = list(accuracies[methods[0]])
    values = np.array([[metric.scale * accuracies[m][g][1] for g in groups] for m in methods])
    figure, _ = heat(
        values, methods, groups, unit=f"{metric.name}{metric.unit}", limits=_limits(values, metric)
    )
    note = f"{_named(metric)} of the final models; of personal models, their mean."
    return Drawing(
        name, f"By {kind}", note, figure, ["method", *groups], matrix_rows(values, methods, groups)
    )


def hops(run: Summary) -> list[str] | None:
    """Return who trained in each step if the model went from client to client and nothing else
    moved; else None.
    """
    clients: list[str] = []
    for row in read_ledger(run.folder):
        source, target, step = row["source"], row["target"], row["step"]
        if SERVER in (source, target):
            return None
        if not clients:
            clients.append(source)
        if step == len(clients) and source == clients[-1]:
            clients.append(target)
        elif step != len(clients) - 1 or target != clients[-1]:
            return None
    return clients if len(clients) == len(run.metrics) > 1 else None


def forgetting(group: Group, number: int) -> Drawing | Missing | None:
    """Draw accuracy on each client's data after each hop, clients in the order of their first hop.
    None: no hops.
    """
    run = group.first
    path = hops(run)
    if path is None:
        return None
    rows = [(i, row["clients"]) for i, row in enumerate(run.metrics) if row.get("clients")]
    if len(rows) < 2:
        return Missing(group.name, "run with --evaluate-every 1, up to 100 clients")
    names = list(run.config["clients"])
    order = list(dict.fromkeys(path))
    metric = group.shown
    values = np.array([_scaled(line, metric) for _, line in rows])[
        :, [names.index(client) for client in order]
    ]
    down = [f"{i + 1} · {path[i]}" for i, _ in rows]
    unit, limits = f"{metric.name}{metric.unit}", _limits(values, metric)
    figure, axes = heat(
        values, down, order, unit=unit, limits=limits, labels=("after hop", "on the data of")
    )
    trained = [order.index(path[i]) for i, _ in rows]
    for place, column in enumerate(trained):
        frame = Rectangle(
            (column + 0.06, place + 0.06), 0.88, 0.88, fill=False, edgecolor=_FRAME, linewidth=2
        )
        axes.add_patch(frame)
    lost = (
        lost_points(values if metric.higher else -values, trained)
        if len(rows) == len(path)
        else None
    )
    note = f"Seed {run.recipe['seed']}; {_named(metric, first=False)}. Framed: the client that has just trained. "
    if lost is None:
        note += "Not every hop was measured."
    else:
        note += f"Mean forgetting: {f'{lost:.1f} points' if metric.share else f'{lost:.4g}'}."
    return Drawing(
        f"forgetting-{number}",
        group.name,
        note,
        figure,
        ["after hop", *order],
        matrix_rows(values, down, order),
    )


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
    return float(np.mean(losses)) if losses else None


def _scaled(values: Sequence[float | None], metric: Metric) -> list[float]:
    return [float("nan") if a is None else metric.scale * a for a in values]


def _limits(values: NDArray[np.float64], metric: Metric) -> tuple[float, float] | None:
    """Return 0 and 100 % for shares; for other metrics None, which takes the range of the
    values.
    """
    return (0, 100) if metric.share or np.isnan(values).all() else None


def _named(metric: Metric, *, first: bool = True) -> str:
    """Return the metric's name for a sentence, capitalised if it is the first word."""
    name = f"{metric.name[0].upper()}{metric.name[1:]}" if first else metric.name
    return f"{name} in per cent" if metric.share else name


def ledger(group: Group, number: int) -> Drawing | Missing:
    """Draw the bytes from party to party over a whole run."""
    run = group.first
    sent, failed = flows(run)
    if not sent:
        return Missing(group.name, "nothing moved")
    clients = hops(run) or list(run.config["clients"])
    moved = [party for edge in sent for party in edge]
    gone = [
        party for party in moved if party != SERVER
    ]  # a client that was forgotten took part, too
    parties = [*dict.fromkeys([*clients, *gone]), *([SERVER] if SERVER in moved else [])]
    total, largest = sum(sent.values()), max(sent.values())
    note = (
        f"Seed {run.recipe['seed']}: {size(total)} in all along {len(sent)} edges, at most "
        f"{size(largest)} along one" + (f"; {failed} times nobody answered" if failed else "") + "."
    )
    rows: list[list[Value]] = [[a, b, n] for (a, b), n in sorted(sent.items())]
    draw = _graph if len(parties) <= _MOST_NODES else _matrix
    return Drawing(
        f"ledger-{number}", group.name, note, draw(parties, sent), ["from", "to", "bytes"], rows
    )


def flows(run: Summary) -> tuple[Counter[tuple[str, str]], int]:
    """Return the bytes by (source, target), and how often a client did not answer."""
    sent: Counter[tuple[str, str]] = Counter()
    failed = 0
    for row in read_ledger(run.folder):
        failed += bool(row.get("missing"))
        if row["bytes"]:
            sent[row["source"], row["target"]] += row["bytes"]
    return sent, failed


def _graph(parties: Sequence[str], sent: Counter[tuple[str, str]]) -> object:
    """Draw clients on a circle and the server in its centre; wider arrows mean more bytes."""
    figure, axes = blank(4.4, 3.3)
    around = [party for party in parties if party != SERVER]
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(around)) / len(around)
    places = {
        party: np.array([np.cos(a), np.sin(a)]) for party, a in zip(around, angles, strict=True)
    }
    places[SERVER] = np.zeros(2)
    largest = max(sent.values())
    crowd = min(1.0, 40 / len(sent))
    for (source, target), moved in sorted(sent.items(), key=lambda item: item[1]):
        share = moved / largest
        arrow = FancyArrowPatch(
            tuple(places[source]),
            tuple(places[target]),
            arrowstyle="-|>",
            mutation_scale=9 + 5 * share,
            shrinkA=10,
            shrinkB=10,
            connectionstyle="arc3,rad=0.12",
            linewidth=0.5 + 2.5 * share * max(crowd, 0.4),
            color=SERIES[0],
            alpha=0.25 + 0.6 * share * crowd,
        )
        axes.add_patch(arrow)
    for party in parties:
        x, y = places[party]
        server = party == SERVER
        axes.plot(
            x, y, "s" if server else "o", color=SERIES[1] if server else SERIES[0], markersize=11
        )
        axes.text(
            x * 1.14,
            y * 1.14 - (0.2 if server else 0),
            cut(party, 16),
            ha="center" if abs(x) < 0.3 else "left" if x > 0 else "right",
            va="center",
            color=INK,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5, "alpha": 0.8}
            if server
            else None,
        )
    axes.set(xlim=(-1.8, 1.8), ylim=(-1.3, 1.3), xticks=[], yticks=[])
    axes.set_aspect("equal")
    bare(axes)
    return figure


def _matrix(parties: Sequence[str], sent: Counter[tuple[str, str]]) -> object:
    """Draw senders as rows and receivers as columns."""
    values = np.full((len(parties), len(parties)), np.nan)
    for (source, target), moved in sent.items():
        values[parties.index(source), parties.index(target)] = moved / 1e6
    figure, _ = heat(values, parties, parties, unit="MB", form="{:.1f}", labels=("from", "to"))
    return figure


_NOTE = (
    "From counts, with 95 % intervals. A gap is the difference from all others of the column "
    "together. Slope and "
    "intercept are those of the label on the logit of the score: 1 and 0 if probabilities are "
    "right. Shift is the "
    "population stability index of the scores against the others; above 0.25 they differ much."
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
    every = [
        (column, name, row)
        for column, rows in found["groups"].items()
        for name, row in rows.items()
    ]
    names: Mapping[str, bool] = found.get("shares", {})
    slopes = any("recalibration" in row for _, _, row in every)
    rows, data = [], []
    for column, subgroup, row in every:
        cells = [f"{column}: {subgroup}", str(row["samples"]), str(row.get("positives", "–"))]
        cells += [cell(row, name, share=share).replace("\n", "; ") for name, share in names.items()]
        if slopes:
            cells.append(
                "{:.2f}, {:+.2f}".format(*row["recalibration"]) if "recalibration" in row else "–"
            )
        rows.append(cells)
        values: list[Value] = [column, subgroup, row["samples"], row.get("positives")]
        for figure in names:
            ends, gap = row.get("intervals", {}).get(figure), row.get("gaps", {}).get(figure, [])
            values += [
                row["values"].get(figure),
                *(ends or (None, None)),
                *(*gap, None, None, None)[:3],
            ]
        data.append(
            [
                *values,
                *(row.get("recalibration") or (None, None)),
            ]
        )
    header = ["subgroup", "samples", "positives"]
    header += [f"{name} %" if share else name for name, share in names.items()]
    if slopes:
        header.append("slope, intercept")
    ends = ("", "_low", "_high", "_gap", "_gap_low", "_gap_high")
    numbers = [
        "column",
        *header[:3],
        *(name + end for name in names for end in ends),
        "slope",
        "intercept",
    ]
    at = (
        f" Sensitivity and specificity at {found['threshold']:.4g}." if "threshold" in found else ""
    )
    untold = found.get("untold", {}).items()
    left = "".join(
        f" {column}: {n} samples in small subgroups are left out." for column, n in untold
    )
    return PlainTable(name, f"Subgroups: {title}", _NOTE + at + left, header, rows, numbers, data)


def _calibration(number: int, groups: Sequence[Group]) -> Drawing | None:
    """Draw the share of the second class against the mean score, by tenths of the test samples."""
    curves = ((group, group.first.last.get("figures", {}).get("calibration")) for group in groups)
    known = [(group, points) for group, points in curves if points]
    if not known:
        return None
    figure, axes = blank()
    rows: list[list[Value]] = []
    most = max(max(score, share) for _, points in known for _, score, share in points)
    axes.plot([0, most], [0, most], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    for group, points in known:
        _, scores, shares = zip(*points, strict=True)
        axes.plot(
            scores,
            shares,
            **line_style(group.place),
            markersize=4,
            linewidth=1.5,
            label=shown(group.name),
        )
        rows += [[group.name, *point] for point in points]
    axes.set(xlabel="mean probability of the second class", ylabel="share of the second class")
    legend(figure, axes)
    note = "By tenths of the test samples, in order of their scores. On the dotted line probabilities are right."
    return Drawing(
        f"calibration-{number}",
        "Calibration",
        note,
        figure,
        ["method", "samples", "score", "share"],
        rows,
    )
