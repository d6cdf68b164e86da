"""The style of figures: colours that colour-blind readers can tell apart, in light and dark, in
print and on phones.
"""

import base64
import csv
import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ekiden.core.base.files import csv_cell

INK = "#1b1f24"
MUTED = "#5d6570"
LINE = "#d9dde2"
PAPER = "#ffffff"
WHITE = "#fefefe"  # on top of a dark cell: white in both modes
# Okabe and Ito, grey for black
SERIES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#4d4d4d",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
STROKES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
HEAT = "cividis"  # made for colour-blind readers, readable without colour

_THEMED = {INK: "ink", MUTED: "muted", LINE: "line", "#e0e0e0": "line", PAPER: "card"} | {
    c: f"s{i}" for i, c in enumerate(SERIES)
}
# settings of matplotlib, with the colours above
_SHEET = Path(__file__).with_name("figures.mplstyle")

Value = str | int | float | None


@dataclass(frozen=True)
class Drawing:
    """A figure and the numbers behind it."""

    name: str  # name of its files
    title: str  # the heading
    note: str  # what the figure shows, in one or two sentences
    figure: Any  # made by `blank`
    header: Sequence[str]  # names of the numbers
    rows: Sequence[Sequence[Value]]  # the numbers

    @property
    def width(self) -> str:
        """The width that the figure takes on the page: a third of a line, half a line or a full
        line.
        """
        inches = self.figure.get_figwidth()
        if inches <= 4.7:
            return "third"
        if inches <= 7.8:
            return "half"
        return "full"


@dataclass(frozen=True)
class Heading:
    """A heading for the items up to the next heading."""

    text: str


@dataclass(frozen=True)
class Missing:
    """A line that says why a figure is missing."""

    who: str  # the method or setting of the figure
    why: str  # what the user can do, or why nothing can be done


def look() -> AbstractContextManager[None]:
    """Return the style in which figures are drawn and published, as a context."""
    return mpl.rc_context(fname=_SHEET)


def blank(width: float = 4.4, height: float = 3.2) -> tuple[Any, Any]:
    """Return a new figure, with its size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def line_style(i: int) -> dict[str, Any]:
    """Return colour, marker and stroke of the i-th series; each of the three tells series apart."""
    stroke = STROKES[i // len(SERIES) % len(STROKES)]
    return {
        "color": SERIES[i % len(SERIES)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": stroke,
    }


def shown(name: str) -> str:
    """Return a name as the label of a series. matplotlib omits labels that begin with an underscore
    from the legend.
    """
    if name.startswith("_"):
        return f"\u200b{name}"
    return name


def cut(name: str, most: int) -> str:
    """Return a name with at most this many letters."""
    if len(name) > most:
        return f"{name[: most - 1]}…"
    return name


def legend(figure: Any, axes: Any) -> None:
    """Put the names of the series below the axes, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return
    # in points: the mark and the letters
    widest = 46 + 5.8 * max(map(len, names))
    fit = max(1, min(len(names), int(figure.get_figwidth() * 72 / widest)))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(names) // fit))
    figure.legend(
        handles, names, loc="outside lower center", ncols=fit, handlelength=2.0, columnspacing=1.2
    )


def publish(drawing: Drawing, folder: Path) -> tuple[str, str]:
    """Write a drawing as PNG, SVG and CSV into `folder`; return for the page its SVG, and its
    numbers as an address.
    """
    text = io.StringIO()
    drawing.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # keep the layout of the SVG, without another draw to find it
    drawing.figure.set_layout_engine(None)
    drawing.figure.savefig(
        folder / "figures" / f"{drawing.name}.png", format="png", dpi=160, metadata={}
    )
    svg = text.getvalue()
    (folder / "figures" / f"{drawing.name}.svg").write_text(svg, encoding="utf-8")
    table = as_csv(drawing.header, drawing.rows)
    (folder / "data" / f"{drawing.name}.csv").write_text(table, encoding="utf-8")
    return for_page(svg, drawing.name), data_uri(table)


def for_page(svg: str, name: str) -> str:
    """Return an SVG for use inside the page: with the page's colours, its own ids, and its size in
    the style.
    """
    svg = svg[svg.index("<svg") :]
    for colour, variable in _THEMED.items():
        svg = re.sub(rf"{colour}\b", f"var(--{variable})", svg, flags=re.IGNORECASE)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    width = float(re.findall(r'width="([\d.]+)pt"', svg)[0]) * 96 / 72
    svg = re.sub(
        r'width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt" width="[\d.]+pt"', "", svg, count=1
    )
    return svg.replace("<svg", f'<svg role="img" aria-hidden="true" style="--w:{width:.0f}px"', 1)


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return comma-separated lines; an empty field where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(csv_cell, header))
    writer.writerows(map(csv_cell, row) for row in rows)
    return text.getvalue()


def data_uri(table: str) -> str:
    """Return a table as an address in the page, so that it can be downloaded without a file."""
    return "data:text/csv;base64," + base64.b64encode(table.encode()).decode()
