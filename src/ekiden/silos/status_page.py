"""A page for an operator: it only shows, and has no script."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""what a browser may load for the page: nothing"""


@dataclass(frozen=True)
class StatusTable:
    """A table of texts, which anybody may have written."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    # what is said instead of a table without rows
    empty: str

    def html(self) -> str:
        """Return the section, with every text escaped."""
        body = "".join(_row("td", row) for row in self.rows)
        table = f"<table>{_row('th', self.columns)}{body}</table>"
        shown = table if body else f"<p>{escape(self.empty)}</p>"
        return f"<section><h2>{escape(self.title)}</h2>{shown}</section>"


def page(title: str, health: tuple[bool, str], sections: Iterable[StatusTable]) -> str:
    """Return the page; `health` says whether all is well, and in words what is to do."""
    good, words = health
    return Template(
        (files("ekiden.silos") / "status_page.html").read_text(encoding="utf-8")
    ).substitute(
        title=escape(title),
        mood="good" if good else "bad",
        words=escape(words),
        sections="\n".join(section.html() for section in sections),
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    )


def _row(cell: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"
