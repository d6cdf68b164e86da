"""What run folders hold, and who is in a study, as tables for a terminal, plain text, or LaTeX."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import chain
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from ekiden.core.base.errors import counted
from ekiden.core.engine.folder import read_ledger, read_lines
from ekiden.core.tasks import Metric
from ekiden.runs.clock import Devices, Timed
from ekiden.runs.summary import (
    Summary,
    about,
    coefficients_of,
    compared,
    duration,
    grouped,
    headline,
    label,
    majority,
    network,
    notes,
    privacy,
    simulated,
    size,
    spread,
    summarise,
    sums,
)

if TYPE_CHECKING:
    from ekiden.clinic.curves import Compared, Curve
    from ekiden.clinic.study import CohortLine


def table_of(*columns: str, right: Sequence[str] = ()) -> RichTable:
    """Return a table with these columns, of which some have numbers."""
    table = RichTable()
    for column in columns:
        side: JustifyMethod = "left"
        if column in right:
            side = "right"
        table.add_column(column, justify=side)
    return table


def shown(folder: Path, devices: Devices | None = None) -> list[str | RichTable]:
    """Return what `ekiden show` prints: texts and tables."""
    run = summarise(folder)
    clock = simulated(run, devices)
    starts = lost = 0
    for row in read_lines(folder / "attempts.jsonl"):
        # other lines say how an attempt ended
        if "lost_transfers" in row:
            starts += 1
            lost += sum(transfer["bytes"] for transfer in row["lost_transfers"])
    again = f"started {counted(starts, 'time')}; bytes moved in steps that were lost: {size(lost)}"
    took = ""
    if clock and clock.seconds:
        share = "without computing, of which no passes were counted"
        if clock.computing is not None:
            share = f"in {clock.computing:.1%} of which clients computed"
        took = f"simulated time: {duration(clock.seconds[-1])}, {share}"
    parts: list[str | RichTable | None] = [label(run.config), about(run), steps(run, clock)]
    parts += [estimates(run), notes(run)]
    parts += [network(run), sums(run), privacy(run.config), took, again]
    return list(filter(None, parts))


def as_text(parts: Iterable[str | RichTable]) -> str:
    """Return texts and tables as plain text."""
    console = Console(file=StringIO(), width=160, markup=False, emoji=False, highlight=False)
    for part in parts:
        if isinstance(part, RichTable):
            part.box = None
            part.pad_edge = False
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(map(str.rstrip, console.file.getvalue().splitlines()))  # type: ignore[attr-defined]


def steps(run: Summary, clock: Timed | None = None) -> RichTable:
    """Return a table with one row per step; with a clock, also when it was done in simulated
    time.
    """
    moved: dict[int, list[str]] = defaultdict(list)
    for row in read_ledger(run.folder):
        moved[row["step"] + 1].append(f"{row['source']} → {row['target']} {size(row['bytes'])}")
    metric = headline(run)
    value = f"{metric.name}{metric.unit}"
    worst = f"worst client{metric.unit}"
    columns = ["step", value, "loss", worst]
    # the result is not the clients' own network
    if any("parameters" in row for row in run.metrics):
        columns.append("parameters")
    if clock:
        columns.append("simulated time")
    table = table_of(*columns, right=columns)
    table.add_column("what moved")
    for number, row in enumerate(run.metrics):
        cells = dict.fromkeys(columns, "")
        cells["step"] = str(row["step"])
        if "parameters" in row:
            cells["parameters"] = str(row["parameters"])
        if "loss" in row:
            cells["loss"] = f"{row['loss']:.3f}"
            if row.get(metric.name) is not None:
                cells[value] = metric.shown(row[metric.name])
        if "client_worst" in row:
            cells[worst] = metric.shown(row["client_worst"])
        if clock:
            cells["simulated time"] = duration(clock.seconds[number])
        transfers = moved[row["step"]]
        what = ", ".join(transfers[:3])
        if len(transfers) > 3:
            what += f" and {len(transfers) - 3} more"
        table.add_row(*cells.values(), what)
    return table


def estimates(run: Summary) -> RichTable | None:
    """Return the table of a finished regression; None for other runs."""
    found = coefficients_of(run)
    if not found:
        return None
    names = ["column"]
    # one output needs no name
    if len({one.output for one in found}) > 1:
        names.insert(0, "output")
    figures = ("estimate", "error", "z", "p", "from", "to")
    table = table_of(*names, *figures, right=figures)
    table.title = "coefficients, 95 % intervals"
    table.title_justify = "left"
    for one in found:
        named = (one.output, one.column)[-len(names) :]
        numbers = (one.estimate, one.error, one.statistic, one.p, one.low, one.high)
        table.add_row(*named, *(_number(value, ".4g") for value in numbers))
    return table


def _number(value: float | None, digits: str) -> str:
    """Return a number as text; a dash for none."""
    if value is None:
        return "-"
    return f"{value:{digits}}"


def cohort(lines: "Sequence[CohortLine]") -> RichTable:
    """Return table one: mean (standard deviation) of numbers, rows (share) of categories."""
    silos = list(lines[0].silos)
    table = table_of("column", *silos, right=silos)
    table.title = "mean (standard deviation), or rows (share)"
    table.title_justify = "left"
    rows, *others = lines
    table.add_row(rows.column, *(f"{cell.count:,}" for cell in rows.silos.values()))
    for line in others:
        name = line.column
        if line.category:
            name += f" = {line.category}"
        table.add_row(name, *map(str, line.silos.values()))
    return table


def survival(found: "Compared") -> RichTable:
    """Return the table of the curves of silos, with the log-rank test below it."""
    test = ""
    if found.p is not None:
        test = f"log-rank between silos: {found.statistic:.2f}, p {found.p:.3g}"
    if found.p_range and found.p_range[0] < found.p_range[1]:
        low, high = found.p_range
        test += f" ({low:.3g} to {high:.3g}, by when rows were last seen between two times)"
    names = (found.name, *found.curves)
    table = table_of(*names, right=names)
    table.title = "survival %, 95 % interval, how far off it can be"
    table.caption = test
    table.title_justify = table.caption_justify = "left"
    every = set[float]()
    for curve in found.curves.values():
        every.update(curve.times)
    times = sorted(every)
    columns = [[*map("{:g}".format, times), "events", *curve.quartiles]]
    for curve in found.curves.values():
        columns.append(_of_curve(curve, times))
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _of_curve(curve: "Curve", times: Sequence[float]) -> list[str]:
    """Return the column of a curve: survival, interval and error at each time, in percent; events;
    and the times by which so many had the event, with the ends of their intervals.
    """
    cells = dict.fromkeys(times, "-")
    numbers = zip(curve.times, curve.survival, curve.low, curve.high, curve.error, strict=True)
    for time, share, low, high, error in numbers:
        cells[time] = f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"
        # below half of the last digit that is shown, there is nothing to say
        if error >= 0.0005:
            cells[time] += f" ±{100 * error:.1f}"
    column = [*cells.values(), f"{sum(curve.events):,}"]
    for quartile in curve.quartiles.values():
        at, low_end, high_end = (_number(time, "g") for time in quartile)
        column.append(f"{at} ({low_end} to {high_end})")
    return column


def comparison(summaries: Iterable[Summary], devices: Devices | None = None) -> RichTable:
    """Return a table with a row for all runs that differ only in the seed: mean ± standard
    deviation over the seeds.

    With devices it also has the simulated time on them, and the share of it in which clients
    compute. The best value for the same data is bold.
    """
    groups = [list(seeds.values()) for seeds in grouped(summaries).values()]
    every = list(chain(*groups))
    metrics = {}
    for run in filter(attrgetter("metrics"), every):
        metric = headline(run)
        metrics[metric.name] = metric
    named = "headline metric"
    unit = ""
    if not metrics:
        named = "accuracy"
        unit = " %"
    elif len(metrics) == 1:
        ((named, metric),) = metrics.items()
        unit = metric.unit
    columns = ["seeds", f"{named}{unit}"]
    if named == "accuracy" and any("majority" in run.last for run in every):
        columns.append("majority guess %")
    columns += ["bytes moved", "forward", "backward", "time"]
    if devices:
        columns += ["simulated time", "computing"]
    table = table_of("method", "data", *columns, right=columns)
    table.title = f"{named} on the union of all clients' test data"
    table.title_justify = "left"
    rows = compared(every, devices)
    best = {}
    methods = Counter[str]()
    for row in sorted(rows, key=_worth):
        best[row["data"], row["metric"]] = row["mean"]
        methods[row["data"]] += 1
    for row, group in zip(rows, groups, strict=True):
        done = [run for run in group if run.finished]
        name = row["method"]
        data = row["data"]
        if row["diverged"]:
            name += f", {row['diverged']} of {len(done)} diverged"
        if not done:
            table.add_row(name, data, "0 finished")
            continue
        value = Text(_result(row["values"], metrics[row["metric"]], alone=len(metrics) == 1))
        if methods[data] > 1 and row["mean"] == best[data, row["metric"]]:
            value.style = "bold"
        cells: dict[str, str | Text] = {
            "seeds": str(len(done)),
            f"{named}{unit}": value,
            "majority guess %": majority(done),
            "bytes moved": size(row["bytes"]),
            "forward": f"{row['forward']:,.0f}",
            "backward": f"{row['backward']:,.0f}",
            "time": duration(row["seconds"]),
        }
        if row.get("simulated") is not None:
            cells["simulated time"] = duration(row["simulated"])
        if row.get("computing") is not None:
            cells["computing"] = f"{row['computing']:.1%}"
        table.add_row(name, data, *(cells.get(column, "-") for column in columns))
    return table


def _worth(row: Mapping[str, Any]) -> float:
    """Return a key by which rows of one metric are sorted, the best last."""
    if row["mean"] is None:
        return -inf
    if row["higher"]:
        return float(row["mean"])
    return -float(row["mean"])


def _result(values: Sequence[float], metric: Metric, *, alone: bool) -> str:
    """Return a metric of finished runs, with its name if other rows of the table have another
    metric.
    """
    text = spread([metric.scale * value for value in values], metric)
    if alone or not text:
        return text
    return f"{metric.name} {text}{metric.unit}"


def latex(table: RichTable) -> str:
    """Return a table as LaTeX; its preamble needs booktabs."""
    columns = [[column.header, *column.cells] for column in table.columns]
    lines = []
    for cells in zip(*columns, strict=True):
        lines.append(rf"{' & '.join(map(_escaped, cells))} \\")
    head, *rows = lines
    ends = "l" * 2 + "r" * (len(table.columns) - 2)
    begin = [rf"\begin{{tabular}}{{{ends}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*begin, *rows, r"\bottomrule", r"\end{tabular}"])


def _escaped(cell: object) -> str:
    text = re.sub(r"([%_&#$])", r"\\\1", str(cell)).replace("±", r"$\pm$")
    if isinstance(cell, Text) and cell.style:
        return rf"\textbf{{{text}}}"
    return text
