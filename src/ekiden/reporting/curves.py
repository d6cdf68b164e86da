"""Draw accuracy against bytes, against compute, and after each step."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from ekiden.reporting.runs import Group
from ekiden.reporting.style import Drawing, Value, blank, legend, line_style, shown
from ekiden.reporting.tables import METRICS

Row = dict[str, Any]
_MOST = 14  # most lines in one figure


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a curve.

    Attributes:
        name: part of the file names.
        title: title of the figure.
        label: label of the axis.
        measure: returns the value of a row of metrics.
        note: what the axis means, if the label does not say it.
    """

    name: str
    title: str
    label: str
    measure: Callable[[Row], float]
    note: str = ""


BYTES = Axis("bytes", "Accuracy against bytes", "bytes moved", lambda row: float(row["bytes"]))
COMPUTE = Axis(
    "compute",
    "Accuracy against compute",
    "forward + 2 × backward samples",
    lambda row: float(row["forward"] + 2 * row["backward"]),
    "Samples that went through a network, backward counted twice. ",
)
STEPS = Axis(
    "steps",
    "Accuracy after every hop or round",
    "hop or round",
    lambda row: float(row["step"]),
    "A hop of a sequential method, else a round. ",
)


def curves(number: int, groups: Sequence[Group]) -> list[Drawing]:
    """Draw the three figures of one setting, without those that would show nothing."""
    drawn = [_draw(axis, number, groups) for axis in (BYTES, COMPUTE, STEPS)]
    return [drawing for drawing in drawn if drawing]


def track(group: Group, axis: Axis, metric: str = "accuracy") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (s, t) what was spent and (s, t) the metric, shares in per cent, for each seed and each evaluated step."""
    steps = [{row["step"]: row for row in run.metrics if row.get(metric) is not None} for run in group.runs]
    common = [step for step in steps[0] if all(step in rows for rows in steps)]
    spent = np.array([[axis.measure(rows[step]) for step in common] for rows in steps])
    return spent, np.array([[group.shown.scale * rows[step][metric] for step in common] for rows in steps])


def _draw(axis: Axis, number: int, groups: Sequence[Group]) -> Drawing | None:
    """Draw one figure; None if nothing was spent, or there is only one step."""
    metric = groups[0].metric if len({group.metric for group in groups}) == 1 else "accuracy"
    unit = groups[0].shown
    tracks = {group: track(group, axis, metric) for group in groups}
    tracks = {group: found for group, found in tracks.items() if found[1].size}
    ends = [end for spent, _ in tracks.values() if (end := float(spent.mean(0)[-1])) > 0]
    if not ends or (axis is STEPS and max(ends) == 1):
        return None
    best = sorted(tracks, key=lambda group: float(tracks[group][1].mean(0)[-1]), reverse=unit.higher)[:_MOST]
    logarithmic = max(ends) > 12 * min(ends)
    figure, axes = blank()
    rows: list[list[Value]] = []
    for group, (spent, accuracy) in tracks.items():
        x, y = spent.mean(0), accuracy.mean(0)
        several = len(accuracy) > 1
        std = accuracy.std(0, ddof=1) if several else np.zeros_like(y)
        numbers = ((float(a), float(b), float(c) if several else None) for a, b, c in zip(x, y, std, strict=True))
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
    header = ["method", axis.label, f"{unit.name}_mean", f"{unit.name}_std", "seeds"]
    return Drawing(f"{axis.name}-{number}", axis.title, note, figure, header, rows)


def _series(
    axes: Any,
    group: Group,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    std: NDArray[np.float64],
    logarithmic: bool,
) -> None:
    """Draw one method as a line with a mark at its end, or as a line across the figure if it spent nothing."""
    style = line_style(group.place)
    if not x[-1] > 0:
        axes.axhline(y[-1], color=style["color"], linestyle=(0, (1, 2)), label=shown(f"{group.name} (none)"))
        return
    drawn = x > 0 if logarithmic else x >= 0
    every = max(1, drawn.sum() // 10)
    axes.plot(x[drawn], y[drawn], **style, markersize=3.5, markevery=every, linewidth=1.5)
    axes.fill_between(x[drawn], (y - std)[drawn], (y + std)[drawn], color=style["color"], alpha=0.15, linewidth=0)
    axes.errorbar(x[-1], y[-1], yerr=std[-1] or None, color=style["color"], capsize=2.5, linewidth=1.2)
    axes.plot(x[-1:], y[-1:], **style, markersize=8, markeredgecolor="none", label=shown(group.name))
