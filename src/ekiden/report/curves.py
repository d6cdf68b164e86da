"""Accuracy against bytes, against compute, and along the steps."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from ekiden.report.runs import Group
from ekiden.report.style import Drawing, Value, blank, legend, line_style
from ekiden.report.tables import METRICS

Row = dict[str, Any]
Measure = Callable[[Row], float]


def curves(number: int, groups: Sequence[Group]) -> list[Drawing]:
    """The three figures of one setting, less those with nothing to see."""
    drawn = [
        _draw(
            groups,
            f"bytes-{number}",
            "Accuracy against bytes",
            "",
            lambda row: float(row["bytes"]),
            "bytes moved",
        ),
        _draw(
            groups,
            f"compute-{number}",
            "Accuracy against compute",
            "Samples that went through a network, backward counted twice.",
            lambda row: float(row["forward"] + 2 * row["backward"]),
            "forward + 2 × backward samples",
        ),
        _draw(
            groups,
            f"steps-{number}",
            "Accuracy after every hop or round",
            "A hop of a sequential method, else a round.",
            lambda row: float(row["step"]),
            "hop or round",
        ),
    ]
    return [drawing for drawing in drawn if drawing]


def track(group: Group, measure: Measure, metric: str = "accuracy") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(s, t) what was spent and (s, t) the accuracy in per cent, of each seed after each evaluated step."""
    steps = [{row["step"]: row for row in run.metrics if row.get(metric) is not None} for run in group.runs]
    common = [step for step in steps[0] if all(step in rows for rows in steps)]
    spent = np.array([[measure(rows[step]) for step in common] for rows in steps])
    return spent, np.array([[100 * rows[step][metric] for step in common] for rows in steps])


def _draw(groups: Sequence[Group], name: str, title: str, note: str, measure: Measure, label: str) -> Drawing | None:
    figure, axes = blank()
    rows: list[list[Value]] = []
    metric = groups[0].metric if len({group.metric for group in groups}) == 1 else "accuracy"
    tracks = [track(group, measure, metric) for group in groups]
    ends = [float(spent.mean(0)[-1]) for spent, _ in tracks if spent.mean(0)[-1] > 0]
    if not ends or (name.startswith("steps") and max(ends) == 1):
        return None
    logarithmic = bool(ends) and max(ends) > 12 * min(ends)
    for group, (spent, accuracy) in zip(groups, tracks, strict=True):
        x, y = spent.mean(0), accuracy.mean(0)
        std = accuracy.std(0, ddof=1) if len(accuracy) > 1 else np.zeros_like(y)
        rows += [[group.name, float(a), float(b), float(c), len(group.runs)] for a, b, c in zip(x, y, std, strict=True)]
        _series(axes, group, x, y, std, logarithmic)
    if logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B" if "bytes" in label else "", sep=" "))
    axes.set(xlabel=label, ylabel=f"accuracy % {METRICS.get(metric, '')}".strip())
    legend(figure, axes)
    return Drawing(name, title, note, figure, ["method", label, "accuracy_mean", "accuracy_std", "seeds"], rows)


def _series(
    axes: Any,
    group: Group,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    std: NDArray[np.float64],
    logarithmic: bool,
) -> None:
    """One method: a line with a mark at its end; across the whole figure where nothing was spent."""
    style = line_style(group.place)
    if not x[-1] > 0:
        axes.axhline(y[-1], color=style["color"], linestyle=(0, (1, 2)), label=f"{group.name} (none)")
        return
    drawn = x > 0 if logarithmic else x >= 0
    every = max(1, drawn.sum() // 10)
    axes.plot(x[drawn], y[drawn], **style, markersize=3.5, markevery=every, linewidth=1.5)
    axes.fill_between(x[drawn], (y - std)[drawn], (y + std)[drawn], color=style["color"], alpha=0.15, linewidth=0)
    axes.errorbar(x[-1], y[-1], yerr=std[-1] or None, color=style["color"], capsize=2.5, linewidth=1.2)
    axes.plot(x[-1:], y[-1:], **style, markersize=8, markeredgecolor="none", label=group.name)
