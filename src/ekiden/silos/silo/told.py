"""What a silo reported about its samples without noise: about one version of them, one set of
features, among one list of silos.

Two totals, subtracted, are what only one of them has: the few rows that were added in between, or
one silo. Equations about other features of the same rows add up, too. So there is one of each, and
anything else needs noise.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import lock_file, locked, write, write_once

FILE = "told.json"
"""file in the silo's folder: what was reported about samples of each kind, never changed"""
Told = dict[str, dict[str, str]]


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
    kind, about = told.kind, told.about
    file = folder / FILE
    with _held(folder) as known:
        before = known.get(kind, {})
        for what, value in about.items():
            if before.get(what, value) == value or (what == "members" and told.released()):
                continue
            raise UserError(
                f"sums of {kind} were told with other {what} before: the difference could show "
                "single samples or one silo. Use those again, add noise (--dp, --evaluate-dp), or if "
                f"nobody read those sums, empty {file}"
            )
        if write_down and {**before, **about} != before:
            write(file, [json.dumps({**known, kind: {**before, **about}}).encode()])


def count(folder: Path, kind: str, task: str, numbers: int, most: int) -> int:
    """Note how many numbers a task tells about samples; return how many all tasks have told then.

    If these are more than `most`, nothing is noted, and nothing may be told. The same task counts
    once.
    """
    with _held(folder) as known:
        tasks = known.get(kind, {}) | {task: str(numbers)}
        told = sum(map(int, tasks.values()))
        if told <= most:
            write(folder / FILE, [json.dumps({**known, kind: tasks}).encode()])
    return told


@contextmanager
def _held(folder: Path) -> Iterator[Told]:
    """Give what was told, and keep other processes of the silo from changing it."""
    with hold_ledger(folder / FILE):
        yield _read(folder / FILE)


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


def _read(file: Path) -> Told:
    try:
        found = json.loads(file.read_text(encoding="utf-8") or "{}")
        return {str(kind): dict(about) for kind, about in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}): restore it from a backup") from None
