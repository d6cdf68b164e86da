"""`ekiden check`, `ekiden new` and `ekiden trust`: methods of one's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from ekiden.base import outside
from ekiden.base.errors import UserError, unknown
from ekiden.cli import skeleton
from ekiden.cli.console import console, parse
from ekiden.conformance import Finding, check, is_a_frozen_dataclass, line
from ekiden.methods import method_named


@dataclass(frozen=True)
class CheckOptions:
    """Check a method against the contract that all methods keep."""

    method: Positional[str]
    """FILE.py:CLASS, or the name of a method"""


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


def check_method(args: Sequence[str]) -> None:
    """`ekiden check METHOD`."""
    name = parse(CheckOptions, args, "ekiden check").method
    outside.trust(name)
    try:
        kind = method_named(name)
    except UserError as error:
        if "frozen" not in str(error.__cause__):  # what Python says of a dataclass that derives from a frozen one
            raise
        _tell(Finding(is_a_frozen_dataclass.__name__, line(is_a_frozen_dataclass), str(error)))
        raise UserError(f"{name} breaks the contract; write @dataclass(frozen=True) above the class") from None
    findings = check(kind, _tell)
    broken = [finding for finding in findings if finding.broken]
    if broken:
        untried = sum(not finding.tried for finding in findings)
        rest = f"; {untried} could not be tried" if untried else ""
        raise UserError(f"{name} breaks {len(broken)} of {len(findings)} lines of the contract (listed above){rest}")
    _say(f"{outside.short(name)} keeps the contract")


def new(args: Sequence[str]) -> None:
    """`ekiden new method NAME`.

    Raises:
        UserError: another thing than a method is asked for, or a file is there already.
    """
    if args[:1] and args[0] not in ("method", "-h", "--help"):
        raise unknown("thing to make", args[0], ("method",))
    name = parse(NewOptions, args[args[:1] == ["method"] :], "ekiden new method").name
    files, kind = skeleton.write(Path(), name)
    for file in files:
        _say(f"wrote {file}")
    _say(f"next: ekiden check {files[0]}:{kind}; ekiden run {files[0]}:{kind} --data digits; pytest {files[1]}")


def trust(args: Sequence[str]) -> None:
    """`ekiden trust FILE...`."""
    for file in parse(TrustOptions, args, "ekiden trust").files:
        outside.trust(f"{file}:")
        _say(f"runs that name {file} may execute it, as it is now")


def _tell(finding: Finding) -> None:
    word = "holds " if finding.holds else "BROKEN" if finding.broken else "untried"
    _say(f"{word:8}{finding.line}")
    if finding.broken:
        _say(f"        found: {finding.broken}")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
    console.file.flush()
