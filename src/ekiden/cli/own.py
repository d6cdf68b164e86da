"""`ekiden new` and `ekiden trust`: your own methods."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from ekiden.base import outside
from ekiden.cli import skeleton
from ekiden.cli.console import say


@dataclass(frozen=True)
class NewOptions:
    """Write a method to begin with, its test and its page into the current folder."""

    name: Positional[str]
    """of the method, such as half_seq or HalfSeq"""


@dataclass(frozen=True)
class TrustOptions:
    """Allow runs that were made elsewhere to execute a Python file of yours that they name."""

    files: Positional[tuple[Path, ...]]
    """Python files; each is executed only as long as it stays as it is"""


def new(options: NewOptions) -> None:
    """`ekiden new method NAME`."""
    files, kind = skeleton.write(Path(), options.name)
    for file in files:
        say(f"wrote {file}")
    say(f"next: ekiden check {files[0]}:{kind}; ekiden run {files[0]}:{kind} --data digits; pytest {files[1]}")


def trust(options: TrustOptions) -> None:
    """`ekiden trust FILE...`."""
    for file in options.files:
        outside.trust(f"{file}:")
        say(f"runs that name {file} may execute it, as it is now")
