"""What the commands share: the console, and flags read into a dataclass."""

import ast
import contextlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes

from ekiden.base.errors import UserError
from ekiden.cli.helping import WIDE, tidy
from ekiden.engine.method import Method

T = TypeVar("T")
_LISTS = (
    "--seeds",
    "--mean",
    "--std",
    "--only",
    "--without",
    "--track",
    "--silos",
    "--label-column",
    "--feature-columns",
    "--drop-columns",
    "--categorical-columns",
    "--pixel-window",
)


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


def parse(kind: type[T], args: Sequence[str], prog: str, default: T | None = None, about: str | None = None) -> T:
    """Read flags into a dataclass; help is printed plain, and an error becomes one line."""
    for flag, value in zip(args, [*args[1:], "--"], strict=False):
        if flag in _LISTS and value.startswith("--"):  # an empty list to tyro
            raise UserError(f"{flag} needs a value. Try {prog} --help")
    printed = io.StringIO()
    helped = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # in another encoding tyro draws otherwise
    extra: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(helped), _columns(WIDE):
            parsed: T = tyro.cli(
                kind, args=list(args), prog=prog, description=about, config=(OmitArgPrefixes,), **extra
            )
            return parsed
    except SystemExit as stop:
        if stop.code in (0, None):
            helped.flush()
            sys.stdout.write(tidy(helped.buffer.getvalue().decode()))
            raise
    lines = [re.sub("[│─]+|-{3,}", " ", line) for line in printed.getvalue().splitlines() if line[:1] not in "╭╰+"]
    text = re.sub(r"\s+", " ", " ".join(lines)).strip()
    text = re.sub(r"^(?:Unrecognized options|Missing argument) (?=Unrecognized|Missing)", "", text)
    text = re.split(r"Argument helptext:|For full helptext|\(default:", text)[0].strip()
    raise UserError(f"{text.rstrip('.')}. Try {prog} --help")


def current_flags(method: type[Method], args: Sequence[str]) -> list[str]:
    """Arguments with today's names of a method's flags in place of former ones."""
    names = {f"--{old.replace('_', '-')}": f"--{new.replace('_', '-')}" for old, new in method.renamed.items()}
    parts = (arg.partition("=") for arg in args)
    return ["".join((names.get(flag, flag), equals, value)) for flag, equals, value in parts]


def part_of(name: str, about: str, kind: type, names: Sequence[str], default: Any, also: type | None = None) -> type:
    """Some fields of a dataclass as a dataclass of its own, with the values of `default` and the same help texts.

    Args:
        name: of the class that is made; the help shows it as the title of a box.
        about: its docstring, which the help shows below.
        kind: the dataclass that has the fields.
        names: which, in the order of the help.
        default: one of `kind`.
        also: a dataclass made so, whose fields follow.
    """
    hints, texts = get_type_hints(kind, include_extras=True), field_texts(kind)
    annotated = {n: Annotated[hints[n], tyro.conf.arg(help=texts.get(n))] for n in names}
    parts = [(n, hint, field(default=getattr(default, n))) for n, hint in annotated.items()]
    bases = (also,) if also is not None else ()
    return make_dataclass(name, parts, bases=bases, frozen=True, namespace={"__doc__": about})


def field_texts(kind: type) -> dict[str, str]:
    """The texts below the fields of a dataclass, by their names."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for one, after in pairwise(node.body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(text, str) and isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found[one.target.id] = " ".join(text.split())
    return found


@contextlib.contextmanager
def _columns(wide: int) -> Iterator[None]:
    """Let tyro write in so many columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(wide)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


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
