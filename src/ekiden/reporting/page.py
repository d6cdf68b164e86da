"""Write the page: one HTML file that needs no network, with figures and numbers in files next to it."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ekiden._version import __version__
from ekiden.base.errors import UserError
from ekiden.base.files import disk_error
from ekiden.data.samples import FederatedData
from ekiden.reporting.compose import Item, Section, compose
from ekiden.reporting.models import Opener
from ekiden.reporting.runs import Found, collect
from ekiden.reporting.style import Drawing, Heading, Missing, as_csv, data_uri, look, publish
from ekiden.reporting.tables import ResultTable
from ekiden.results.model import ModelSource

_PARTS = ("figures", "data", "index.html")
_MADE_BY = '<meta name="generator" content="ekiden report">'


@dataclass(frozen=True)
class View:
    """An item as the template shows it.

    Attributes:
        kind: figure, results, table or missing.
        item: the item itself.
        csv: a link that downloads the numbers.
        svg: the figure as SVG, if there is one.
    """

    kind: str
    item: Any
    csv: str = ""
    svg: str = ""


def report(
    paths: Sequence[Path],
    out: Path,
    details: int,
    say: Callable[[str], None] = lambda what: None,
    *,
    data: FederatedData | None = None,
    network: ModelSource | None = None,
) -> Found:
    """Write the report on some runs into a folder. Only an older report there is replaced.

    Args:
        paths: run folders, or folders that hold them.
        out: gets `index.html`, `figures/` (PNG and SVG) and `data/` (CSV).
        details: number of methods that get their own figures.
        say: tells the user what is being done.
        data: the data of runs that were given them in Python.
        network: the network of such runs, if it is not in the library.
    """
    _check(out)
    out = out.resolve()
    found = collect(paths)
    building = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        for part in _PARTS[:2]:
            (building / part).mkdir(parents=True)
        with look():
            sections = [
                (section, [_view(item, building) for item in section.items])
                for section in compose(found, details, say, Opener(data, network))
                if section.items
            ]
        (building / "index.html").write_text(_render(found, sections), encoding="utf-8")
        out.mkdir(exist_ok=True)
        for part in _PARTS:
            if (out / part).is_dir():
                shutil.rmtree(out / part)
            os.replace(building / part, out / part)
    except OSError as error:
        raise disk_error(error, out) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return found


def _check(out: Path) -> None:
    """Refuse to overwrite anything except an older report."""
    if out.suffix.lower() in (".html", ".htm"):
        raise UserError(f"--out names a folder, which gets index.html and its figures: try --out {out.with_suffix('')}")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder with --out")
    page = out / "index.html"
    ours = page.exists() and _MADE_BY in page.read_text(encoding="utf-8", errors="replace")[:2000]
    if any(out.iterdir()) and not ours:
        raise UserError(f"{out} is not empty and not a report: choose another folder with --out")


def _view(item: Item, folder: Path) -> View:
    """Write the files of an item."""
    if isinstance(item, (Missing, Heading)):
        return View(type(item).__name__.lower(), item)
    if isinstance(item, Drawing):
        published = publish(item, folder)
        return View("figure", item, published.data, published.svg)
    header, rows = (
        item.csv() if isinstance(item, ResultTable) else (item.numbers or item.header, item.data or item.rows)
    )
    table = as_csv(header, rows)
    (folder / "data" / f"{item.name}.csv").write_text(table, encoding="utf-8")
    return View("results" if isinstance(item, ResultTable) else "table", item, data_uri(table))


def _render(found: Found, sections: Sequence[tuple[Section, Sequence[View]]]) -> str:
    """Return the page. Everything that comes from runs is escaped."""
    template = files("ekiden.reporting").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        made_by=_MADE_BY,
        version=__version__,
        runs=sum(len(group.runs) for group in found.groups),
        methods=list(dict.fromkeys(group.name for group in found.groups)),
        settings=list(found.by_setting()),
        sections=sections,
        left_out=len(found.left_out),
    )
