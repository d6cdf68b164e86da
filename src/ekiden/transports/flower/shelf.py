"""What a silo keeps of a run: outcomes of tasks and private state, each on the disk before the reply leaves.

A task's place is (step, call). Its outcome is stored under it together with a digest of what was asked, so that a
request that comes again gets the stored outcome. A request of another content at the same place (the step died and
was repeated otherwise) discards what was done from that place on, and starts from the private state before it.
"""

import fcntl
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ekiden.core import wire
from ekiden.core.files import write
from ekiden.core.store import read
from ekiden.errors import UserError
from ekiden.transports.flower.parcel import pack, unpack

Place = tuple[int, int]
_NAME = re.compile(r"(outcome|private)-(\d+)-(\d+)(?:-(\w+))?\.parcel")
_DAYS_KEPT = 30


@dataclass(frozen=True)
class Done:
    """How a task ended.

    Attributes:
        digest: of what was asked and the private state before it.
        size: `wire.size` of the value.
        forward: samples that went forward.
        backward: samples that went backward.
        record: of it in the chain of custody, signed; empty without a silo key.
    """

    digest: str
    size: int
    forward: int
    backward: int
    record: str = ""


class Shelf:
    """The folder of one run at one silo."""

    def __init__(self, folder: Path, private_type: Any) -> None:
        self._folder = folder
        self._private_type = private_type

    @property
    def journal(self) -> Path:
        """Folder for progress within tasks."""
        return self._folder / "journal"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes of this silo off the run: one task at a time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "lock").touch()  # how old the run is
        with open(self._folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def busy(self) -> bool:
        """Whether a process of this silo works on the run."""
        try:
            with open(self._folder / "lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return (self._folder / "lock").exists()
        return False

    def find(self, place: Place, task: str, digest: str) -> tuple[Done, bytes] | None:
        """The outcome of this very request, if it is there."""
        path = self._outcome(place, task)
        if not path.exists():
            return None
        done, value = self._load(path)
        return (done, value) if done.digest == digest else None

    def value(self, key: str) -> tuple[Done, bytes]:
        """The value `key`, encoded.

        Raises:
            UserError: it is not here.
        """
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})-(\w{1,100})", key)
        path = self._outcome((int(match[1]), int(match[2])), match[3]) if match else self._folder
        if not path.is_file():
            raise UserError(f"value {key!r} is not here: was the silo's folder replaced?")
        return self._load(path)

    def private(self, before: Place) -> Any:
        """The client's state as it was before the task at that place."""
        earlier = [(place, path) for kind, place, path in self._files() if kind == "private" and place < before]
        if not earlier:
            return None
        kind = self._private_type
        return read(max(earlier)[1], Optional[kind] if kind is not None else None)  # noqa: UP045

    def discard(self, since: Place) -> None:
        """Forget what was done from that place on."""
        for _, place, path in self._files():
            if place >= since:
                path.unlink()

    def put(self, place: Place, task: str, done: Done, value: Any, private: Any, *, changed: bool) -> None:
        """Keep an outcome. It counts once its file is there, which is written last."""
        if changed:
            write(self._folder / f"private-{place[0]}-{place[1]}.parcel", wire.chunks(private))
        write(self._outcome(place, task), (pack(done), *wire.chunks(value)))

    @property
    def settled(self) -> int:
        """Steps of the run that are done for good, as far as is known here."""
        try:
            return int((self._folder / "settled").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0

    def settle(self, steps: int, keep: Callable[[str], bool], void: Sequence[int] = ()) -> None:
        """Drop what the run needs no longer, now that its first `steps` steps are done for good.

        Args:
            steps: so many.
            keep: whether a value from them is still needed.
            void: steps of which nothing counts that was done here.
        """
        if steps > self.settled:
            write(self._folder / "settled", [str(steps).encode()], sync=False)
        for _, place, path in self._files():
            if place[0] in void:
                path.unlink()
        files = list(self._files())
        states = [place for kind, place, _ in files if kind == "private" and place < (steps, 0)]
        for kind, place, path in files:
            if place >= (steps, 0):
                continue
            key = path.stem.removeprefix("outcome-")
            if (kind == "outcome" and not keep(key)) or (kind == "private" and place != max(states)):
                path.unlink()
        for old in self.journal.glob("*"):
            step = re.match(r"\.?(\d+)-", old.name)
            if step is None or int(step[1]) < steps:
                old.unlink()

    def _outcome(self, place: Place, task: str) -> Path:
        return self._folder / f"outcome-{place[0]}-{place[1]}-{task}.parcel"

    def _files(self) -> Iterator[tuple[str, Place, Path]]:
        for path in self._folder.glob("*.parcel"):
            match = _NAME.fullmatch(path.name)
            if match:
                yield match[1], (int(match[2]), int(match[3])), path

    def _load(self, path: Path) -> tuple[Done, bytes]:
        try:
            done, value = unpack(path.read_bytes(), Done)
            return done, bytes(value)
        except (OSError, wire.WireError) as error:
            raise UserError(f"{path} is damaged ({error}): remove it, and the task is done again") from None


def drop_old_runs(runs: Path) -> None:
    """Remove the folders of runs that nobody asked for in a month."""
    limit = time.time() - _DAYS_KEPT * 86400
    for file in runs.glob("*/lock"):
        with suppress(OSError), open(file, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process that works on the run holds it
            if file.stat().st_mtime < limit:
                shutil.rmtree(file.parent, ignore_errors=True)
