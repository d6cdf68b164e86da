"""What a silo reported about its samples without noise: about one version of them, one set of
features, among one list of silos.

Two totals, subtracted, are what only one of them has: the few rows that were added in between, or
one silo. Equations about other features of the same rows add up, too. So there is one of each, and
anything else needs noise.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ekiden.core.base.checks import Checked, made, plain
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, lock_file, locked, write_once

FILE = "told.jsonl"
"""file in the silo's folder: what was reported about samples of each kind, never changed"""
L = TypeVar("L", bound=Checked)


@dataclass(frozen=True)
class ToldLine(Checked):
    """A line of that file."""

    # the samples, as `ToldSums.kind`
    kind: str
    about: Mapping[str, str]


@dataclass(frozen=True)
class ToldSums:
    """What is reported about some samples."""

    # the samples, whatever version: training rows with these columns, for example
    kind: str
    # what stays the same: `rows`, `features`, `members` and the like
    about: Mapping[str, str]
    # whether the silo that makes the difference agrees to other `members`
    released: Callable[[], bool] = lambda: False


def note(folder: Path, told: ToldSums, *, write_down: bool = True) -> None:
    """Refuse what differs from what was told before; note the rest in the silo's folder.

    Raises:
        UserError: names what was another one.
    """
    kind = told.kind
    about = told.about
    file = folder / FILE
    with hold_ledger(file):
        before = _told(file, kind)
        for what, value in about.items():
            if before.get(what, value) == value or (what == "members" and told.released()):
                continue
            raise UserError(
                f"sums of {kind} were told with other {what} before: the difference could show "
                "single samples or one silo. Use those again, add noise (--dp, --evaluate-dp), or if "
                f"nobody read those sums, empty {file}"
            )
        if write_down and {**before, **about} != before:
            append(file, ToldLine(kind, about))


def count(folder: Path, kind: str, task: str, numbers: int, most: int) -> int:
    """Note how many numbers a task tells about samples; return how many all tasks have told then.

    If these are more than `most`, nothing is noted, and nothing may be told. The same task counts
    once.
    """
    line = ToldLine(kind, {task: str(numbers)})
    with hold_ledger(folder / FILE):
        tasks = {**_told(folder / FILE, kind), **line.about}
        told = sum(map(int, tasks.values()))
        if told <= most:
            append(folder / FILE, line)
    return told


def _told(file: Path, kind: str) -> dict[str, str]:
    """Return what was told about samples of a kind."""
    found = dict[str, str]()
    for line in lines_of(file, ToldLine):
        if line.kind == kind:
            found |= line.about
    return found


@contextmanager
def hold_ledger(file: Path) -> Iterator[None]:
    """Keep other processes of the silo from changing a file of what it told.

    Raises:
        UserError: the file is gone; all of it could be told once more.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = lock_file(file)
    # the lock stays for ever, so it shows that there was a file
    if not lock.exists():
        write_once(file, b"")
    elif not file.exists():
        raise UserError(
            f"{file} is gone, which counts what was told: restore it, or if nobody read that, make "
            "an empty one"
        )
    with locked(lock):
        yield


def lines_of(ledger: Path, kind: type[L]) -> list[L]:
    """Return the ledger's lines. What a crash left unfinished at its end was not told."""
    try:
        text = ledger.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {ledger} ({error}): restore it from a backup") from None
    lines = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            lines.append(made(kind, json.loads(line)))
        except (ValueError, UserError) as error:
            raise UserError(
                f"{ledger}, line {number} is damaged ({error}): restore it from a backup"
            ) from None
    return lines


def append(ledger: Path, line: Checked) -> None:
    """Append a line, and wait until it is on the disk."""
    try:
        with open(os.open(ledger, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.seek(file.read().rfind(b"\n") + 1)
            file.truncate()
            file.write(json.dumps(plain(line)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, ledger) from None
