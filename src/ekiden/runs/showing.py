"""Show the result of a run: as text, in a notebook, as a curve."""

from collections.abc import Mapping
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

from ekiden.core.base.errors import counted, unknown, visible
from ekiden.core.base.outside import require_extra, short
from ekiden.core.tasks import Metric
from ekiden.runs.config import by_group, data_name, flat, task_in
from ekiden.runs.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_text(result: RunRecord) -> str:
    """Say in three or four lines what was run, how far it is, and its result."""
    config = result.config
    value = result.last.get(result.headline)
    step = f"step {result.state.step} of {config['steps']}"
    if value is not None:
        step += f", {result.headline} {value:.4f}"
        if result.headline == "accuracy" and result.majority is not None:
            step += f" (always the commonest class: {result.majority:.4f})"
    if result.diverged:
        step += " (diverged: far worse than guessing)"
    lines = [
        f"Result: {short(config['recipe']['method'])} on {data_name(config)}: "
        f"{counted(len(result.clients), 'client')}, "
        f"{counted(len(config['classes']), 'class', 'classes')}",
        step,
        f"{result.bytes:,} bytes moved in "
        f"{counted(sum(not row.missing for row in result.ledger), 'transfer')}",
    ]
    if result.folder:
        lines.append(f"run folder: {result.folder}")
    return "\n  ".join(lines)


def as_html(result: RunRecord) -> str:
    """Show in a notebook what `repr` says, and the headline metric by client and by class."""
    text = f"<pre>{_html(as_text(result))}</pre>"
    metric = task_in(result.config).headline
    row = result.last
    if metric.name != result.headline or "loss" not in row:
        return text
    groups = by_group(row, result.clients, metric)
    return text + "".join(_folded(kind, found, metric) for kind, found in groups.items() if found)


def _html(text: str) -> str:
    return escape(visible(text, keep="\n"))


def _folded(kind: str, values: Mapping[str, float | None], metric: Metric) -> str:
    """Return a table in HTML, folded until it is clicked."""
    rows = "".join(
        f"<tr><th>{_html(name)}</th><td>{metric.shown(value)}</td></tr>"
        for name, value in values.items()
    )
    head = f"<summary>{_html(metric.name)}{metric.unit} by {kind}</summary>"
    return f"<details>{head}<table>{rows}</table></details>"


def plot(result: RunRecord, metric: str, ax: "Axes | None") -> "Axes":
    """Draw a metric after each step; see `Result.plot`."""
    require_extra("report", "plot", "matplotlib")
    # seconds
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    metric = metric or result.headline
    rows = [flat(row, result.clients) for row in result.metrics]
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    if not found:
        raise unknown("metric", metric, set(chain.from_iterable(rows)) - {"step"})
    axes = ax or pyplot.subplots()[1]
    axes.plot(
        *zip(*found, strict=True),
        marker="o" if len(found) == 1 else None,
        label=result.config["recipe"]["method"],
    )
    axes.set_xlabel("step")
    axes.set_ylabel(metric.replace("_", " "))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes
