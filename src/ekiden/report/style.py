"""Style of figures: colours that colour-blind readers can tell apart, in light and dark, on paper and on a phone."""

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

INK, MUTED, LINE, PAPER = "#1b1f24", "#5d6570", "#d9dde2", "#ffffff"
WHITE = "#fefefe"  # on top of a dark cell: white in both modes
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")  # Okabe and Ito, grey for black
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
STROKES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
HEAT = "cividis"  # made for colour-blind readers, readable without colour

_THEMED = {INK: "ink", MUTED: "muted", LINE: "line", "#e0e0e0": "line", PAPER: "card"} | {
    c: f"s{i}" for i, c in enumerate(SERIES)
}
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "text.parse_math": False,  # names are what they are, dollars too
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "svg.fonttype": "none",  # text stays text: searchable, in the reader's font
    "svg.hashsalt": "ekiden",  # the same report twice is the same bytes
}

Value = str | int | float | None


@dataclass(frozen=True)
class Drawing:
    """A figure and the numbers behind it.

    Attributes:
        name: of its files.
        title: its heading.
        note: what it shows, in a sentence or two.
        figure: drawn by `blank`.
        header: of the numbers.
        rows: the numbers.
    """

    name: str
    title: str
    note: str
    figure: Any
    header: Sequence[str]
    rows: Sequence[Sequence[Value]]

    @property
    def width(self) -> str:
        """How much of a line it wants: a third, a half or all of it."""
        inches = self.figure.get_figwidth()
        return "third" if inches <= 4.7 else "half" if inches <= 7.8 else "full"


@dataclass(frozen=True)
class Heading:
    """What the items after it, up to the next heading, are about."""

    text: str


@dataclass(frozen=True)
class Missing:
    """A line in place of a figure that is not possible.

    Attributes:
        who: the method or setting of the figure. why: what to do, or why nothing can be done.
    """

    who: str
    why: str


@dataclass(frozen=True)
class Inlined:
    """What a drawing becomes on the page.

    Attributes:
        drawing: what was drawn.
        svg: for the page, its colours those of the page.
        data: its numbers as a data URI.
    """

    drawing: Drawing
    svg: str
    data: str


def look() -> AbstractContextManager[None]:
    """All is drawn and published inside of this."""
    return mpl.rc_context(_RC)


def blank(width: float = 4.4, height: float = 3.2) -> tuple[Any, Any]:
    """A new figure, in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def line_style(i: int) -> dict[str, Any]:
    """Return colour, marker and stroke of the i-th series; each of the three tells series apart."""
    stroke = STROKES[i // len(SERIES) % len(STROKES)]
    return {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)], "linestyle": stroke}


def shown(name: str) -> str:
    """A name as the label of a series: one that begins with an underscore would be in no legend."""
    return f"\u200b{name}" if name.startswith("_") else name


def legend(figure: Any, axes: Any, markers: float = 1.0) -> None:
    """Put the names of the series below the axes, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return
    widest = 46 + 5.8 * max(map(len, names))  # points: the mark, and letters
    fit = max(1, min(len(names), int(figure.get_figwidth() * 72 / widest)))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(names) // fit))
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=fit,
        handlelength=2.0,
        columnspacing=1.2,
        markerscale=markers,
    )


def publish(drawing: Drawing, folder: Path) -> Inlined:
    """Write a drawing as PNG, SVG and CSV into `folder`, and make it ready for the page."""
    text = io.StringIO()
    drawing.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing.figure.set_layout_engine("none")  # laid out once
    drawing.figure.savefig(folder / "figures" / f"{drawing.name}.png", format="png", dpi=160, metadata={})
    svg = text.getvalue()
    (folder / "figures" / f"{drawing.name}.svg").write_text(svg, encoding="utf-8")
    table = as_csv(drawing.header, drawing.rows)
    (folder / "data" / f"{drawing.name}.csv").write_text(table, encoding="utf-8")
    return Inlined(drawing, for_page(svg, drawing.name), data_uri(table))


def for_page(svg: str, name: str) -> str:
    """An SVG to stand inside a page: its colours are the page's, its ids its own, its size in the style."""
    svg = svg[svg.index("<svg") :]
    for colour, variable in _THEMED.items():
        svg = re.sub(rf"{colour}\b", f"var(--{variable})", svg, flags=re.IGNORECASE)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    width = float(re.findall(r'width="([\d.]+)pt"', svg)[0]) * 96 / 72
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt" width="[\d.]+pt"', "", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-hidden="true" style="--w:{width:.0f}px"', 1)


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Comma-separated lines; nothing where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return text.getvalue()


def data_uri(table: str) -> str:
    """A table that can be downloaded from the page itself."""
    return "data:text/csv;base64," + base64.b64encode(table.encode()).decode()
