"""The tables of the ledger, a line for each cell: written from runs, or read from an older page and judged again."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from textwrap import fill

from ekiden.tables.experiment import Cell, Experiment, Published
from ekiden.tables.verdicts import CONSISTENT, FORMER, Comparison, as_printed, names, obstacle

_TITLES = (
    *("row", "column", "ours", "seeds", "sent", "passes", "printed", "difference"),
    *("t (limit)", "verdict", "by single runs"),
)
_HEADER = f"| {' | '.join(_TITLES[:8])} |"  # in older pages the verdict follows
_VALUE = re.compile(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")
_T = re.compile(r"([+-]\d+\.\d+) \((\d+\.\d+)\)")
_ROUNDED = 0.005
_CHANGED = "Other verdicts than by single runs: "
_RUNS = re.compile(r"^Printed values are means of (\d+) runs?\.$", flags=re.MULTILINE)
_FEW = "Printed values are means of {} run{}."


@dataclass(frozen=True)
class Line:
    """A cell that has been run, as text. The attributes are the columns of the table, from left to right."""

    row: str
    column: str
    ours: str
    seeds: str
    sent: str
    passes: str
    printed: str = "-"
    difference: str = ""
    t: str = ""
    verdict: str = "not printed"
    former: str = ""

    @property
    def compared(self) -> bool:
        """Whether a spread is known. Only then is there a verdict by single runs."""
        return self.former in (FORMER, "above", "below")

    @property
    def change(self) -> str:
        """The verdict by single runs and the current one; empty if they agree, or if there is none."""
        same = self.verdict == (CONSISTENT if self.former == FORMER else self.former)
        return f"{self.former} → {self.verdict.split(':')[0]}" if self.compared and not same else ""


def judgement(compared: Comparison, reason: str) -> dict[str, str]:
    """Return the columns of a line that compare our value with the printed one.

    Args:
        compared: our value and the printed one.
        reason: why they cannot be compared; empty if they can.
    """
    beside = {"printed": as_printed(compared.printed), "difference": f"{compared.difference:+.2f}"}
    if reason:
        return beside | {"verdict": f"not comparable: {reason}"}
    t = "" if compared.t is None else f"{compared.t:+.2f} ({compared.limit:.2f})"
    return beside | {"t": t, "verdict": compared.verdict, "former": compared.former}


def table(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a table, and below it which verdicts differ from those by single runs."""
    changes: dict[str, list[str]] = {}
    for line in lines:
        if line.change:
            changes.setdefault(line.change, []).append(f"{line.row} / {line.column}")
    found = "; ".join(f"{change}: {', '.join(cells)}" for change, cells in changes.items())
    rows = [row([getattr(line, f.name) for f in fields(line)]) for line in lines]
    below = ["", fill(f"{_CHANGED}{found}.", 118, break_on_hyphens=False)] if found else []
    return [row(_TITLES), "|---" * len(_TITLES) + "|", *rows, *below]


def runs(experiment: Experiment) -> list[str]:
    """Return the line that says how many runs the printed values are means of, if that is known."""
    known = _printed_runs(experiment)
    return [_FEW.format(known, "" if known == 1 else "s"), ""] if known else []


def _printed_runs(experiment: Experiment) -> int | None:
    return next((cell.published.runs for cell in experiment.cells if cell.published), None)


def row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def lines(section: str) -> tuple[Line, ...]:
    """Return the lines of the tables of results in a section of a page, or in a whole page."""
    return tuple(line for table in _tables(section) for line in _lines(table))


def cell(line: Line, experiment: Experiment) -> Cell | None:
    """Return the cell of a line, or None if the table no longer has it."""
    place = line.row, line.column
    return next((c for c in experiment.cells if place in ((c.row, c.column), names(c, experiment))), None)


def judged_again(section: str, experiment: Experiment | None = None) -> str:
    """Return a section of an older page with its lines judged by today's rules.

    Our values are the rounded ones of the section. Printed values come from the experiment file if there is one, since
    they may have been corrected. Verdicts from unrounded values stay as long as the rounded ones allow them, so that
    writing one section does not change another.

    Args:
        section: a section of a ledger of this version or an older one.
        experiment: the current content of the experiment file, if the file exists.
    """
    found = _RUNS.search(section)
    known = _printed_runs(experiment) if experiment else int(found[1]) if found else None
    for old in _tables(section):
        section = section.replace(old, "\n".join(table([_judged(n, known, experiment) for n in _lines(old)])))
    if experiment:
        section = _RUNS.sub("", section).replace(f"\n\n\n{_HEADER}", f"\n{_HEADER}")
        section = section.replace(_HEADER, "\n".join([*runs(experiment), _HEADER]), 1)
    return section


def _judged(line: Line, runs: int | None, experiment: Experiment | None) -> Line:
    """Return the line with today's verdict."""
    now = cell(line, experiment) if experiment else None
    place = names(now, experiment) if now and experiment else (line.row, line.column)
    printed, ours = now.published if now else _value(line.printed, runs), _value(line.ours)
    if printed is None or ours is None:
        return Line(*place, line.ours, line.seeds, line.sent, line.passes)
    _, _, reason = line.verdict.partition("not comparable: ")
    if now and experiment:
        reason = reason or obstacle(now, experiment)
    compared = Comparison(ours.mean, ours.std, len(line.seeds.split(",")), printed)
    says = judgement(compared, reason)
    if not reason and len(sides := {one.verdict for one in _before_rounding(compared)}) > 1:
        says["verdict"] = f"{' or '.join(sorted(sides))}: the rounded values do not tell"
    if says["printed"] == line.printed:
        says["difference"] = line.difference  # computed from values that were not rounded
        if not reason and _may_be_exact(line, compared):
            says |= {"t": line.t, "verdict": line.verdict, "former": line.former}
    return Line(*place, line.ours, line.seeds, line.sent, line.passes, **says)


def _may_be_exact(line: Line, rounded: Comparison) -> bool:
    """Return whether values that round to these can have the line's t, limit and verdicts."""
    extremes = _before_rounding(rounded)
    ts, limits = [one.t for one in extremes if one.t is not None], [one.limit for one in extremes if one.limit]
    said = _T.fullmatch(line.t)
    if said is None or len(ts) < len(extremes):
        return False
    return (
        _within(float(said[1]), ts)
        and _within(float(said[2]), limits)
        and line.verdict in {one.verdict for one in extremes}
        and line.former in {one.former for one in extremes}
    )


def _within(value: float, bounds: Sequence[float]) -> bool:
    """Return whether a value with two decimals can lie between the bounds before rounding."""
    return min(bounds) - _ROUNDED <= value <= max(bounds) + _ROUNDED


def _before_rounding(found: Comparison) -> list[Comparison]:
    """Return the extremes of what may have been rounded to two digits."""
    stds = (None,) if found.std is None else (max(found.std - _ROUNDED, 0.0), found.std + _ROUNDED)
    return [replace(found, mean=found.mean + m, std=std) for m in (-_ROUNDED, _ROUNDED) for std in stds]


def _value(text: str, runs: int | None = None) -> Published | None:
    found = _VALUE.fullmatch(text)
    return Published(float(found[1]), float(found[2]) if found[2] else None, runs) if found else None


def _tables(section: str) -> list[str]:
    """Return the tables of results in a section, each with the remarks on changed verdicts below it."""
    changed = rf"(?:\n\n{re.escape(_CHANGED)}[^\n]+(?:\n[^\n]+)*)?"
    return re.findall(rf"^{re.escape(_HEADER[:-1])}[^\n]*(?:\n\|[^\n]*)+{changed}", section, flags=re.MULTILINE)


def _lines(table: str) -> list[Line]:
    """Return the lines of one table."""
    head, _, *rest = (_cells(text) for text in table.splitlines() if text.startswith("|"))
    names = {title: f.name for title, f in zip(_TITLES, fields(Line), strict=True)}
    return [Line(**{names[title]: cell for title, cell in zip(head, cells, strict=True)}) for cells in rest]


def _cells(text: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", text)[1:-1]]
