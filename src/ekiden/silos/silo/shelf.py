"""What a silo keeps of a run: outcomes of tasks and private state, each on the disk before the
reply is sent.

A task's place is (step, call). Its outcome is stored under this place with a digest of the request,
so a repeated request gets the stored outcome. A request with other content at the same place (the
step was interrupted and repeated in another way) discards all outcomes from that place on, and
starts from the private state before it.

Next to each outcome is the request that it answers, so a lost or damaged outcome can be made again
from the request and the private state before it. Outcomes and states carry a digest. Which private
state a silo has, the coordinator notes too, so a lost one is noticed.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import (
    Damaged,
    lock_file,
    locked,
    marked,
    read_tensors,
    verified,
    with_digest,
    write,
)
from ekiden.core.engine import wire
from ekiden.core.engine.wire import Encoded
from ekiden.silos.trust.parcel import VALUE, pack, unpack

Place = tuple[int, int]
_NAME = re.compile(r"(outcome|private|request)-(\d+)-(\d+)(?:-(\w+))?\.parcel")
_DAYS_KEPT = 30
_DAY = 86400
_DAYS = "days.json"


@dataclass(frozen=True)
class Done:
    """How a task ended."""

    # digest of the request and the private state before it
    digest: str
    # signed record of the task in the chain of custody
    record: str


@dataclass(frozen=True)
class Asked:
    """The request that led to an outcome."""

    # digest of the request and the private state before it
    digest: str
    # SHA-256 of the returned value
    given: str
    # bytes of the request
    length: int
    # names and lengths of the silo's own values that were arguments; they follow the request in its
    # file
    own: tuple[tuple[str, int], ...] = ()


class LostValue(UserError):
    """An outcome or a private state that is missing or damaged."""


@dataclass(frozen=True)
class Shelf:
    """The folder of one run at one silo. Work of `void` steps does not count: the silo was
    missing.
    """

    folder: Path
    # of the client's state
    private_type: Any

    @property
    def journal(self) -> Path:
        """Folder for the progress of unfinished tasks."""
        return self.folder / "journal"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run against other processes of this silo: one task at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # its age is the run's age
        (self.folder / "lock").touch()
        with locked(self.folder / "lock"):
            yield

    def find(self, place: Place, task: str, digest: str) -> tuple[Done, Encoded] | None:
        """Return the outcome of exactly this request, if it is there and undamaged."""
        with suppress(LostValue):
            done, value = self._load(self._file("outcome", place, task))
            if done.digest == digest:
                return done, value
        return None

    def value(self, key: str) -> tuple[Done, Encoded]:
        """Return the value `key`, encoded.

        Raises:
            LostValue: it is missing or damaged.
        """
        place, task = _place(key)
        return self._load(self._file("outcome", place, task))

    def request(self, key: str) -> tuple[Asked, bytes, dict[str, Encoded]] | None:
        """Return the request whose answer was the value `key`, with the own values that it names,
        if it is here.
        """
        place, task = _place(key)
        try:
            asked, data = unpack(self._file("request", place, task).read_bytes(), Asked)
        except (OSError, wire.WireError):
            return None
        own = {}
        offset = asked.length
        for name, length in asked.own:
            own[name] = Encoded.of(bytes(data[offset : offset + length]))
            offset += length
        return asked, bytes(data[: asked.length]), own

    def last(self, before: Place, void: Sequence[int] = ()) -> Place | None:
        """Return the place of the task that left the state before a given task; None if there was
        no state.
        """
        return max(
            (place for place in self._states() if place < before and place[0] not in void),
            default=None,
        )

    def private(self, made: Place | None) -> Any:
        """Return the client's state that the task at this place left.

        Raises:
            LostValue: its file is missing or damaged.
        """
        if made is None:
            return None
        kind = self.private_type
        path = self._file("private", made)
        with _lost_if_damaged(path):
            return wire.assemble(*read_tensors(path), Optional[kind] if kind is not None else None)  # noqa: UP045

    def made_at(self, place: Place) -> str:
        """Return the key of the value that the task at this place returned; empty if its request is
        not here.
        """
        return next(
            (_key(path) for kind, at, path in self._files() if kind == "request" and at == place),
            "",
        )

    def discard(self, since: Place) -> None:
        """Forget what was done from this place on."""
        for _, place, path in self._files():
            if place >= since:
                path.unlink()

    def put_private(self, place: Place, private: Any) -> None:
        """Store the client's state that a task left. It counts only with the outcome, so it is
        written first.
        """
        write(self._file("private", place), with_digest(wire.chunks(private)))

    def put(
        self,
        place: Place,
        task: str,
        done: Done,
        value: Encoded,
        asked: Asked,
        request: Sequence[bytes],
    ) -> None:
        """Store an outcome. It counts once its file is there."""
        write(self._file("outcome", place, task), marked([pack(done), value.data]))
        # The file needs no digest: `asked` has the digests of the request and of the value that
        # must come out.
        write(self._file("request", place, task), [pack(asked), *request], sync=False)

    @property
    def settled(self) -> int:
        """Return the number of final steps of the run, as far as is known here."""
        try:
            return int(bytes(verified((self.folder / "settled").read_bytes())))
        except (OSError, ValueError, Damaged):
            return 0

    def settle(self, steps: int, keep: Callable[[str], bool], void: Sequence[int] = ()) -> None:
        """Drop what the run no longer needs, now that its first `steps` steps are final."""
        if steps > self.settled:
            write(self.folder / "settled", marked([str(steps).encode()]), sync=False)
        for _, place, path in self._files():
            if place[0] in void:
                path.unlink()
        files = list(self._files())
        # We keep the states from which kept values were made, and the newest state.
        made = [place for kind, place, path in files if kind == "request" and keep(_key(path))]
        needed = {self.last(place) for place in (*made, (steps, 0))}
        for kind, place, path in files:
            if place >= (steps, 0):
                continue
            if (kind == "private" and place not in needed) or (
                kind != "private" and not keep(_key(path))
            ):
                path.unlink()
        for old in self.journal.glob("*"):
            step = re.match(r"\.?(\d+)-", old.name)
            if step is None or int(step[1]) < steps:
                old.unlink()

    def _states(self) -> list[Place]:
        """Return the places of the kept tasks that changed the client's state."""
        return [place for kind, place, _ in self._files() if kind == "private"]

    def _file(self, kind: str, place: Place, *task: str) -> Path:
        return self.folder / f"{'-'.join((kind, text_of(place), *task))}.parcel"

    def _files(self) -> Iterator[tuple[str, Place, Path]]:
        for path in self.folder.glob("*.parcel"):
            match = _NAME.fullmatch(path.name)
            if match:
                yield match[1], (int(match[2]), int(match[3])), path

    def _load(self, path: Path) -> tuple[Done, Encoded]:
        with _lost_if_damaged(path):
            done, value = unpack(verified(path.read_bytes()), Done)
            return done, Encoded.of(bytes(value))


@contextmanager
def _lost_if_damaged(path: Path) -> Iterator[None]:
    """Raise LostValue if a file that is read in the block is gone or damaged."""
    try:
        yield
    except FileNotFoundError:
        raise LostValue(f"{path} is gone") from None
    except (OSError, Damaged, wire.WireError) as error:
        raise LostValue(f"{path} is damaged ({error})") from None


def _place(key: str) -> tuple[Place, str]:
    """Return where the value `key` was made, and by which task."""
    match = VALUE.fullmatch(key)
    if match is None:
        raise UserError(f"value {key[:80]!r} is not here: no value has such a name")
    return (int(match[1]), int(match[2])), match[3]


def text_of(place: Place | None) -> str:
    """Return a place as text; empty if there is none."""
    return "" if place is None else f"{place[0]}-{place[1]}"


def place_of(text: str) -> Place:
    """Return the place that `text_of` wrote as `text`."""
    if not is_place(text):
        raise UserError(f"{text[:80]!r} is not the place of a task in a run")
    step, call = text.split("-")
    return int(step), int(call)


def is_place(text: str) -> bool:
    """Return whether `text` is a place."""
    return re.fullmatch(r"\d{1,9}-\d{1,9}", text) is not None


def _key(path: Path) -> str:
    """Return the key of the value that an outcome or a request belongs to."""
    return path.stem.split("-", 1)[1]


def drop_old_runs(runs: Path) -> None:
    """Remove the folders of runs that had no request for a month.

    A clock that is wrong must not remove anything. So a month is 30 days that were seen here after
    the last request, in the order in which they were seen: a jump of the clock is one day.
    """
    if not runs.is_dir():
        return
    file = runs.parent / _DAYS
    today = int(time.time() // _DAY)
    with locked(lock_file(file)):
        days = [day for day in _days_seen(file) if day != today] + [today]
        for lock in runs.glob("*/lock"):
            with suppress(OSError):
                asked = int(lock.stat().st_mtime // _DAY)
                if asked not in days:
                    days.insert(-1, asked)
                if len(days[days.index(asked) :]) > _DAYS_KEPT + 1:
                    # a process that is working on the run holds it
                    with locked(lock, wait=False):
                        shutil.rmtree(lock.parent, ignore_errors=True)
        write(file, [json.dumps(days).encode()], sync=False)


def _days_seen(file: Path) -> list[int]:
    """Return the days, since 1970, on which the silo was there; the one that was seen last comes
    last.
    """
    try:
        return list(map(int, json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return []
