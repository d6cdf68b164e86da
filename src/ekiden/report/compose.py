"""What stands on the page, section by section."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

from ekiden.data.describe import counts, picture
from ekiden.errors import UserError
from ekiden.report import landscape
from ekiden.report.curves import curves
from ekiden.report.ledger import ledger
from ekiden.report.maps import by_client, by_group, forgetting
from ekiden.report.models import Opened, accuracies, open_run
from ekiden.report.provenance import commands, environments
from ekiden.report.runs import Found, Group
from ekiden.report.style import RC, Drawing, Missing
from ekiden.report.tables import PlainTable, ResultTable, costs, results

Item = ResultTable | PlainTable | Drawing | Missing | None
Say = Callable[[str], None]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: its anchor.
        title: its heading.
        items: tables, figures, and lines for figures that cannot be.
    """

    key: str
    title: str
    items: tuple[ResultTable | PlainTable | Drawing | Missing, ...]


def compose(found: Found, details: int, say: Say) -> Iterator[Section]:
    """All sections, each made when it is asked for.

    Args:
        found: the runs.
        details: how many methods get figures of their own; with 0 no data are read.
        say: tells the user what is being done.
    """
    settings = found.by_setting()
    chosen = found.groups[:details]
    opened, closed = _open(chosen)
    yield _section("results", "Results", results(found))
    yield _section("cost", "What it took", (costs(s, i, g) for i, (s, g) in _numbered(settings)))
    say("curves")
    yield _section("curves", "Accuracy for bytes, compute and time", _each(settings, curves))
    say("accuracy by client, class and domain")
    clients = (by_client(s, i, g) for i, (s, g) in _numbered(settings))
    yield _section("groups", "Accuracy by client, domain and class", [*clients, *_by_group(opened, closed)])
    yield _section("data", "Who holds what", [*_holders(opened), *closed])
    yield _section("forgetting", "Forgetting along the hops", _forgetting(chosen))
    say("models: pools, features, loss surfaces")
    pools = (landscape.last_pool(g, o, i) for i, (g, o) in enumerate(opened.items(), 1))
    yield _section("pool", "Distances in the last pool", [*pools, *closed])
    seen = (item for i, (g, o) in enumerate(opened.items(), 1) for item in landscape.features(g, o, i))
    yield _section("features", "Features of the final models", [*seen, *closed])
    yield _section("surface", "Loss between models", [*_surfaces(opened), *closed])
    say("ledgers")
    yield _section("ledger", "Who sent how much to whom", (ledger(g, i) for i, g in enumerate(chosen, 1)))
    yield _section("runs", "Commands and environments", [commands(found), environments(found)])
    yield _section("left-out", "Left out", [_left_out(found.left_out)])


def _section(key: str, title: str, items: Iterable[Item]) -> Section:
    """Without what does not apply, and with the reasons for missing figures told once each."""
    shown: list[ResultTable | PlainTable | Drawing | Missing] = []
    why: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if isinstance(item, Missing):
            why[item.why].append(item.who)
        elif item is not None:
            shown.append(item)
    return Section(key, title, (*shown, *(Missing(", ".join(dict.fromkeys(who)), w) for w, who in why.items())))


def _open(chosen: Sequence[Group]) -> tuple[dict[Group, Opened], list[Missing]]:
    """Data and models of the runs that are shown in detail, and why those of others cannot be read."""
    opened, closed = {}, []
    for group in chosen:
        try:
            opened[group] = open_run(group.first)
        except UserError as error:
            closed.append(Missing(group.name, str(error)))
    return opened, closed


def _by_group(opened: Mapping[Group, Opened], closed: Sequence[Missing]) -> Iterator[Item]:
    """By domain and by class, one figure for each setting."""
    measured: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for group, run in opened.items():
        for kind, rows in accuracies(run).items():
            if rows:
                measured[group.setting][kind][group.name] = rows
    for number, (setting, kinds) in _numbered(measured):
        for kind in ("domain", "class"):
            if kind in kinds:
                note = f"{setting}: final models of the first seed; of personal models, their mean."
                yield by_group(kind, f"{kind}-{number}", note, kinds[kind])
    yield from closed


def _holders(opened: Mapping[Group, Opened]) -> Iterator[Item]:
    """One drawing for each setting, of its first seed."""
    first: dict[str, tuple[Group, Opened]] = {}
    for group, run in opened.items():
        first.setdefault(group.setting, (group, run))
    for number, (setting, (group, run)) in _numbered(first):
        with mpl.rc_context(RC):
            figure = picture(run.data)
        classes = run.data.dataset.classes
        rows = [[c.name, *map(int, n)] for c, n in zip(run.data.clients, counts(run.data), strict=True)]
        note = f"{setting}, seed {group.first.config['seed']}: training and validation samples of each class."
        yield Drawing(f"holds-{number}", run.data.dataset.name, note, figure, ["client", *classes], rows)


def _forgetting(chosen: Sequence[Group]) -> list[Item]:
    items = [forgetting(group, i) for i, group in enumerate(chosen, 1)]
    if chosen and not any(items):
        return [Missing("these runs", "no method here hands one model from client to client")]
    return list(items)


def _surfaces(opened: Mapping[Group, Opened]) -> Iterator[Item]:
    """Around each run's own models, and through three final models that began as the same one."""
    alike: dict[str, list[Group]] = defaultdict(list)
    for group, run in opened.items():
        if not run.personal and group.first.config["seed"] == next(iter(opened)).first.config["seed"]:
            sizes = {len(opened[g].models[0].params) for g in alike[group.setting]}
            if not sizes or len(run.models[0].params) in sizes:
                alike[group.setting].append(group)
    for number, (setting, groups) in _numbered({s: g[:3] for s, g in alike.items() if len(g) >= 3}):
        yield landscape.shared_surface(setting, groups, [opened[g] for g in groups], number)
    for number, (group, run) in enumerate(opened.items(), len(alike) + 1):
        yield landscape.own_surface(group, run, number)


def _left_out(folders: Sequence[tuple[Path, str]]) -> PlainTable | None:
    if not folders:
        return None
    rows = [[str(folder), why] for folder, why in folders]
    return PlainTable(
        "left-out", "", "Folders that are in no table and no figure.", ["folder", "why"], rows, texts=frozenset({1})
    )


def _numbered(things: Mapping[str, Any]) -> Iterator[tuple[int, tuple[str, Any]]]:
    return enumerate(things.items(), 1)


def _each(
    settings: Mapping[str, Sequence[Group]], draw: Callable[[str, int, Sequence[Group]], list[Drawing]]
) -> list[Drawing]:
    return [drawing for i, (setting, groups) in _numbered(settings) for drawing in draw(setting, i, groups)]
