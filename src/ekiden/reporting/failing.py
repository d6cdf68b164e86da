"""Where a model fails: tables of subgroups and silos, and the curve of its calibration."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ekiden.reporting.runs import Group
from ekiden.reporting.style import MUTED, Drawing, Value, blank, legend, line_style, shown
from ekiden.reporting.tables import PlainTable
from ekiden.results import divided

_FIGURES = ("auroc", "sensitivity", "specificity", "accuracy", "r2", "mae", "c_index")
_SHARES = frozenset(("auroc", "sensitivity", "specificity", "accuracy", "c_index"))
_NOTE = (
    "From counts, with 95 % intervals. A gap is the difference from all others of the column together. Slope and "
    "intercept are those of the label on the logit of the score: 1 and 0 if probabilities are right. Shift is the "
    "population stability index of the scores against the others; above 0.25 they differ much."
)


def failing(number: int, groups: Sequence[Group]) -> Iterator[PlainTable | Drawing]:
    """Yield a table for each run whose subgroups were measured, and a figure of the calibration of all."""
    for place, group in enumerate(groups):
        if found := divided.kept(group.first.folder):
            yield _table(f"subgroups-{number}-{place}", group.name, found)
    if drawing := _calibration(number, groups):
        yield drawing


def _table(name: str, title: str, found: Mapping[str, Any]) -> PlainTable:
    """Return one row for each subgroup."""
    every = [(column, name, row) for column, rows in found["groups"].items() for name, row in rows.items()]
    names = [name for name in _FIGURES if any(name in row["values"] for _, _, row in every)]
    more = [name for name in ("calibration_error", "shift") if any(name in row["values"] for _, _, row in every)]
    slopes = any("recalibration" in row for _, _, row in every)
    rows, data = [], []
    for column, subgroup, row in every:
        cells = [f"{column}: {subgroup}", str(row["samples"]), str(row.get("positives", "–"))]
        cells += [_cell(row, name) for name in names]
        cells += [f"{row['values'][name]:.3f}" if name in row["values"] else "–" for name in more]
        if slopes:
            cells.append("{:.2f}, {:+.2f}".format(*row["recalibration"]) if "recalibration" in row else "–")
        rows.append(cells)
        values: list[Value] = [column, subgroup, row["samples"], row.get("positives")]
        for figure in names:
            ends, gap = row.get("intervals", {}).get(figure), row.get("gaps", {}).get(figure, [])
            values += [row["values"].get(figure), *(ends or (None, None)), *(*gap, None, None, None)[:3]]
        data.append([*values, *(row["values"].get(name) for name in more), *(row.get("recalibration") or (None, None))])
    header = ["subgroup", "samples", "positives"]
    header += [f"{name} %" if name in _SHARES else name for name in names]
    header += [name.replace("_", " ") for name in more] + (["slope, intercept"] if slopes else [])
    ends = ("", "_low", "_high", "_gap", "_gap_low", "_gap_high")
    numbers = ["column", *header[:3], *(name + end for name in names for end in ends), *more, "slope", "intercept"]
    at = f" Sensitivity and specificity at {found['threshold']:.4g}." if "threshold" in found else ""
    untold = found.get("untold", {}).items()
    left = "".join(f" {column}: {n} samples in small subgroups are left out." for column, n in untold)
    return PlainTable(name, f"Subgroups: {title}", _NOTE + at + left, header, rows, numbers, data)


def _cell(row: Mapping[str, Any], name: str) -> str:
    """Return a figure with its interval and gap, which the page puts below each other."""
    if name not in row["values"]:
        return "–"
    scale, digits = (100, 1) if name in _SHARES else (1, 3)
    text = f"{scale * row['values'][name]:.{digits}f}"
    if ends := row.get("intervals", {}).get(name):
        text += f"; {scale * ends[0]:.{digits}f} to {scale * ends[1]:.{digits}f}"
    if gap := row.get("gaps", {}).get(name):
        within = f" ({scale * gap[1]:+.{digits}f} to {scale * gap[2]:+.{digits}f})" if len(gap) == 3 else ""
        text += f"; gap {scale * gap[0]:+.{digits}f}{within}"
    return text


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
        axes.plot(scores, shares, **line_style(group.place), markersize=4, linewidth=1.5, label=shown(group.name))
        rows += [[group.name, *point] for point in points]
    axes.set(xlabel="mean probability of the second class", ylabel="share of the second class")
    legend(figure, axes)
    note = "By tenths of the test samples, in order of their scores. On the dotted line probabilities are right."
    return Drawing(f"calibration-{number}", "Calibration", note, figure, ["method", "samples", "score", "share"], rows)
