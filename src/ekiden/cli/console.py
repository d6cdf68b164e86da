"""What the commands share: the console, and words of its messages."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ekiden.base.errors import UserError
from ekiden.engine.method import Method


class TableConsole(Console):
    """A console whose tables fold long cells and lose no digit; where output is piped they have no lines."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table loses its frame and gets narrow gaps, so that it fits 80 columns."""
        for table in objects:
            if isinstance(table, Table):
                table.box = box.SIMPLE_HEAD if self.is_terminal else None
                table.padding, table.pad_edge, table.collapse_padding = (0, 1), False, True
                for column in table.columns:
                    column.overflow = "fold"
        super().print(*objects, **options)


# Labels, paths and names of classes may hold square brackets and colons.
console = TableConsole(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)


def no_run(action: str, paths: Sequence[Path]) -> UserError:
    """The error where there is no run to do something with."""
    if not paths:
        return UserError(f"name the run folders or sweep folders to {action}")
    return UserError(f"no run in {', '.join(map(str, paths))}: give other folders, or the file of --records")


def first_line(method: type[Method]) -> str:
    """What the method is, in one sentence."""
    return (method.__doc__ or "").strip().split("\n")[0]


def say(text: str) -> None:
    """Print a line at once, as it is."""
    console.print(text, soft_wrap=True, highlight=False)
    console.file.flush()
