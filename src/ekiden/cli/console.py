"""What the commands share: the console, JSON for programs, and the wording of some messages."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import wraps
from typing import Any

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from ekiden.core.base.errors import visible

# least width of a text column, if it has words of that length
_WORD = 10


class TableConsole(Console):
    """A console whose tables fold texts but never numbers; if not even that fits, each row becomes
    a block of lines.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Render without control characters, which could move a terminal's cursor: texts may be of
        other parties.
        """
        for segment in super().render(renderable, options):
            text = segment.text
            if not segment.control:
                text = visible(text, keep="\n")
            yield segment if text == segment.text else Segment(text, segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table gets narrow gaps and, if the output is piped, neither lines nor spaces at
        the end.
        """
        if len(objects) == 1 and isinstance(objects[0], RichTable):
            self._table(objects[0], options)
        else:
            super().print(*objects, **options)

    def _table(self, table: RichTable, options: dict[str, Any]) -> None:
        table.box = box.SIMPLE_HEAD if self.is_terminal else None
        table.padding = (0, 1)
        table.pad_edge = False
        table.collapse_padding = True
        if not self._fitted(table):
            self._blocks(table, options)
        elif self.is_terminal:
            super().print(table, **options)
        else:
            with self.capture() as captured:
                super().print(table, **options)
            self.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def _fitted(self, table: RichTable) -> bool:
        """Give the columns widths with which the table fits; return whether there are such
        widths.
        """
        columns = table.columns
        room = self.width - (2 * len(columns) if self.is_terminal else len(columns) - 1)
        least = []
        most = []
        for column in columns:
            column.overflow = "fold"
            header = self.measure(column.header)
            cells = [self.measure(cell) for cell in column.cells]
            longest = max((cell.maximum for cell in cells), default=0)
            word = max((cell.minimum for cell in cells), default=0)
            number = column.justify == "right"
            least.append(max(header.minimum, longest if number else min(word, _WORD)))
            most.append(max(header.maximum, longest))
        if sum(least) > room:
            return False
        if sum(most) > room:
            for column, width in zip(columns, _shared(room, least, most), strict=True):
                column.width = width
        return True

    def _blocks(self, table: RichTable, options: dict[str, Any]) -> None:
        """Print a table row by row: each line has the name of a column and its cell."""
        for text in (
            table.title,
            *zip(*(column.cells for column in table.columns), strict=True),
            table.caption,
        ):
            if isinstance(text, tuple):
                for column, cell in zip(table.columns, text, strict=True):
                    line = cell
                    if name := str(column.header):
                        line = Text.assemble(name, ": ", cell)
                    super().print(line, **options)
                super().print()
            elif text is not None:
                super().print(text, **options | {"justify": "left"})


def _shared(room: int, least: Sequence[int], most: Sequence[int]) -> list[int]:
    """Share `room` among columns: each gets between its least and its most, and the narrowest grow
    first.
    """
    widths = list(least)
    for _ in range(room - sum(least)):
        growing = min(
            (i for i in range(len(widths)) if widths[i] < most[i]), key=lambda i: widths[i]
        )
        widths[growing] += 1
    return widths


# Labels, paths and names of classes may hold square brackets and colons.
console = TableConsole(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)


def print_json(values: Any, *, one_line: bool = False) -> None:
    """Print values as one JSON document; numbers that are not finite become null."""
    indent = None if one_line else 1
    print(json.dumps(_plain(values), ensure_ascii=False, indent=indent), flush=True)


@contextmanager
def only_json(wanted: bool) -> Iterator[Callable[[Any], None]]:
    """Give a function that prints values as JSON if that is wanted; all other output then goes to
    standard error.
    """
    out = sys.stdout

    def tell(values: Any) -> None:
        if wanted:
            with redirect_stdout(out):
                print_json(values)

    with redirect_stdout(sys.stderr) if wanted else nullcontext():
        yield tell


def telling(command: Callable[[Any, Callable[[Any], None]], None]) -> Callable[[Any], None]:
    """Make a command of a function that is also given what prints values as JSON where `--json` is
    among the flags.
    """

    @wraps(command)
    def function(options: Any) -> None:
        with only_json(options.json) as tell:
            command(options, tell)

    return function


def _plain(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case os.PathLike():
            return str(value)
        case _:
            return value


def say(text: str) -> None:
    """Print a line at once, without markup."""
    console.print(text, soft_wrap=True, highlight=False)
    console.file.flush()
