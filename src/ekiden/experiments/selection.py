"""Find the cells of a table that a user names by parts of their labels."""

import re
from collections.abc import Sequence

from ekiden.base.errors import UserError, unknown
from ekiden.experiments.experiment import Cell


def select(cells: Sequence[Cell], only: Sequence[str], without: Sequence[str] = ()) -> tuple[Cell, ...]:
    """Return the cells that `only` names (all if it is empty), except those that `without` names.

    Each is ROW, COLUMN or ROW/COLUMN, where ROW and COLUMN are labels or parts of labels.
    """

    def named(texts: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for text in texts:
            slugs = {c.slug for c in cells if _named(c, text, cells)}
            if not slugs:
                raise unknown("cell", text, {t for c in cells for t in (c.row, c.column)})
            found |= slugs
        return found

    kept = named(only) if only else {c.slug for c in cells}
    kept -= named(without)
    if not kept:
        raise UserError("--without leaves no cell: name fewer")
    return tuple(c for c in cells if c.slug in kept)


def _named(cell: Cell, text: str, cells: Sequence[Cell]) -> bool:
    row, slash, column = (part.strip() for part in text.partition("/"))
    if slash and not any(text.strip() in (c.row, c.column) for c in cells):
        return _is(row, cell.row, [c.row for c in cells]) and _is(column, cell.column, [c.column for c in cells])
    text = text.strip()
    labels = [label for c in cells for label in (c.row, c.column)]
    return _is(text, cell.row, labels) or _is(text, cell.column, labels)


def _is(text: str, label: str, labels: Sequence[str]) -> bool:
    """Return whether a label is meant: an exact match wins over whole words, and whole words over parts of words."""
    if text in labels:
        return label == text
    words = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)
    if any(words.search(one) for one in labels):
        return words.search(label) is not None
    return text.lower() in label.lower()
