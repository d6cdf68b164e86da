"""The page of a report: one HTML file that needs no network, with figures and numbers in files next
to it.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ekiden._version import __version__
from ekiden.core.base.errors import UserError, visible
from ekiden.core.base.files import disk_error
from ekiden.core.data.samples import FederatedData
from ekiden.lab.describe import counts, held_names
from ekiden.lab.reporting.figures import (
    by_client,
    by_group,
    curves,
    failing,
    forgetting,
    holders,
    ledger,
)
from ekiden.lab.reporting.runs import (
    Found,
    Group,
    Opened,
    accuracies,
    by_setting,
    collect,
    open_models_of,
)
from ekiden.lab.reporting.style import (
    Drawing,
    Heading,
    Missing,
    Value,
    as_csv,
    data_uri,
    look,
    publish,
)
from ekiden.lab.reporting.tables import (
    PlainTable,
    commands,
    costs,
    environments,
    promises,
    results,
)
from ekiden.runs.clock import Devices
from ekiden.runs.loaded_model import ModelSource
from ekiden.runs.summary import Summary

Item = PlainTable | Drawing | Heading | Missing
Say = Callable[[str], None]
Opener = Callable[[Summary], Opened]
_PARTS = ("figures", "data", "index.html")
_MADE_BY = '<meta name="generator" content="ekiden report">'


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    key: str  # the anchor; `page.html` has its heading, and how to read it
    items: tuple[Item, ...]  # tables, figures, and lines that say why a figure is missing


@dataclass(frozen=True)
class Details:
    """The runs that get their own figures."""

    groups: tuple[Group, ...]  # methods; the first run of each is drawn
    opened: Mapping[Group, Opened]  # data and models of these runs
    closed: tuple[Missing, ...]  # why data and models of other runs cannot be read


def compose(
    found: Found, details: int, say: Say, opener: Opener, devices: Devices | None = None
) -> Iterator[Section]:
    """Return all sections, each made when it is asked for."""
    yield _section("results", results(found))
    yield _section("cost", _each(found, lambda i, s, g: [costs(s, i, g)]))
    say("curves")
    yield _section("curves", _each(found, lambda i, s, g: curves(i, g, devices)))
    say("reading data and models")
    chosen = _details(found, details, opener)
    yield _section("groups", _groups(found, chosen))
    yield _section("data", [*_holders(chosen.opened), *chosen.closed])
    yield _section("forgetting", _forgetting(chosen))
    say("ledgers")
    yield _section("ledger", _by_setting(chosen.groups, ledger))
    yield _section("runs", [commands(found), *promises(found), environments(found)])
    yield _section("left-out", _left_out(found.left_out))


def _section(key: str, items: Iterable[Item | None]) -> Section:
    """Make a section. Leave out what does not apply, and state each reason for missing figures
    once.
    """
    shown: list[Item] = []
    why: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if isinstance(item, Missing):
            why[item.why].append(item.who)
        elif item is not None:
            shown.append(item)
    reasons = [Missing(", ".join(dict.fromkeys(who)), reason) for reason, who in why.items()]
    return Section(key, (*shown, *reasons))


def _each(
    found: Found, make: Callable[[int, str, Sequence[Group]], Sequence[Item]]
) -> Iterator[Item]:
    """Make items for each setting, under the setting's name if there are several."""
    settings = by_setting(found.groups)
    for number, (setting, groups) in enumerate(settings.items(), 1):
        items = make(number, setting, groups)
        if len(settings) > 1 and items and not isinstance(items[0], PlainTable):
            yield Heading(setting)
        yield from items


def _details(found: Found, most: int, opener: Opener) -> Details:
    """Open the first run of each method, setting by setting, as long as whole settings fit into
    `most`.
    """
    groups: list[Group] = []
    closed = []
    opened = {}
    for setting, peers in by_setting(found.groups).items():
        fitting = peers
        # a setting is torn apart only if it is the first
        if len(groups) + len(peers) > most:
            fitting = peers[:most]
            if groups:
                fitting = []
        groups += fitting
        if len(fitting) < len(peers):
            why = f"--details {len(found.groups)} draws the other methods and settings too"
            closed.append(Missing(setting, why))
    for group in groups:
        try:
            opened[group] = opener(group.first)
        except UserError as error:
            why = str(error)
            if group.first.config.get("on"):
                why = "run between machines: the data stayed there"
            closed.append(Missing(group.name, why))
    return Details(tuple(groups), opened, tuple(closed))


def _groups(found: Found, chosen: Details) -> Iterator[Item]:
    """Draw accuracies by client, as the runs reported them, and by domain and class, computed from
    their models.
    """
    measured = {group: accuracies(run) for group, run in chosen.opened.items()}

    def make(number: int, setting: str, groups: Sequence[Group]) -> Sequence[Item]:
        metric = groups[0].shown
        shown: list[Item] = [by_client(setting, number, groups)]
        for kind in ("domain", "class"):
            rows = {}
            for group in groups:
                own = measured.get(group, {}).get(kind)
                if own and group.shown.name == metric.name:
                    rows[group.name] = own
            if rows:
                shown.append(by_group(kind, f"{kind}-{number}", rows, metric))
        return [*shown, *failing(number, groups)]

    yield from _each(found, make)
    yield from chosen.closed


def _holders(opened: Mapping[Group, Opened]) -> Iterator[Item]:
    """Draw who holds what for each setting, for its first seed."""
    first: dict[str, tuple[Group, Opened]] = {}
    for group, run in opened.items():
        first.setdefault(group.setting, (group, run))
    for number, (setting, (group, run)) in enumerate(first.items(), 1):
        rows: list[list[Value]] = []
        held = counts(run.data).astype(int).tolist()
        for client, numbers in zip(run.data.clients, held, strict=True):
            rows.append([client.name, *numbers])
        header = ["client", *held_names(run.data)]
        note = f"Seed {group.first.recipe['seed']}."
        yield Drawing(f"holds-{number}", setting, note, holders(run.data), header, rows)


def _by_setting(groups: Iterable[Group], make: Callable[[Group, int], Item | None]) -> list[Item]:
    """Make an item for each group that has one, under the setting's name if there are several
    settings.
    """
    made: dict[str, list[Item]] = defaultdict(list)
    for number, group in enumerate(groups, 1):
        try:
            item = make(group, number)
        except UserError as error:
            # a damaged file in its folder
            item = Missing(group.name, str(error))
        if item is not None:
            made[group.setting].append(item)
    found: list[Item] = []
    for setting, items in made.items():
        if len(made) > 1 and any(isinstance(item, Drawing) for item in items):
            found.append(Heading(setting))
        found += items
    return found


def _forgetting(chosen: Details) -> list[Item]:
    # `_section` joins the names of those that lack figures for one reason
    why = "no model is handed from client to client"
    return _by_setting(chosen.groups, forgetting) or [Missing(g.name, why) for g in chosen.groups]


def _left_out(folders: Sequence[tuple[Path, str]]) -> list[Item]:
    if not folders:
        return []
    rows = [[str(folder), why] for folder, why in folders]
    note = "Folders that are in no table and no figure."
    return [PlainTable("left-out", "", note, ["folder", "why"], rows, texts=frozenset({1}))]


@dataclass(frozen=True)
class View:
    """An item as the template shows it."""

    kind: str  # figure, table, heading or missing
    item: Any  # the item itself
    csv: str = ""  # a link that downloads the numbers
    svg: str = ""  # the figure as SVG, if there is one


def report(
    paths: Sequence[Path],
    out: Path,
    details: int,
    say: Callable[[str], None] = lambda what: None,
    *,
    data: FederatedData | None = None,
    network: ModelSource | None = None,
    devices: Devices | None = None,
) -> Found:
    """Write the report on some runs into a folder. Only an older report there is replaced."""
    _check(out)
    out = out.resolve()
    found = collect(paths)
    building = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        for part in _PARTS[:2]:
            (building / part).mkdir(parents=True)
        with look():
            sections = []
            opener = partial(open_models_of, given=data, network=network)
            for section in compose(found, details, say, opener, devices):
                if section.items:
                    sections.append((section, [_view(item, building) for item in section.items]))
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
        raise UserError(
            "--out names a folder, which gets index.html and its figures: try --out "
            f"{out.with_suffix('')}"
        )
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
    if isinstance(item, Drawing):
        svg, numbers = publish(item, folder)
        return View("figure", item, numbers, svg)
    if isinstance(item, PlainTable):
        table = as_csv(item.numbers or item.header, item.data or item.rows)
        (folder / "data" / f"{item.name}.csv").write_text(table, encoding="utf-8")
        return View("table", item, data_uri(table))
    return View(type(item).__name__.lower(), item)


def _render(found: Found, sections: Sequence[tuple[Section, Sequence[View]]]) -> str:
    """Return the page. What comes from runs is escaped, and shows characters that would turn its
    lines around.
    """
    template = files("ekiden.lab.reporting").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template).render(
        made_by=_MADE_BY,
        version=__version__,
        runs=len(found.runs),
        methods=list(dict.fromkeys(group.name for group in found.groups)),
        settings=list(by_setting(found.groups)),
        sections=sections,
        left_out=len(found.left_out),
    )
    return visible(page, keep="\n\t\xa0")
