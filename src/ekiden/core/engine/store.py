"""What one client stores: values behind Refs, private state between steps, and progress within a
task.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import (
    Damaged,
    read_tensors,
    safetensors_chunks,
    sync,
    with_digest,
    write,
)
from ekiden.core.engine import wire

_VALUE = re.compile(r"value-(.+)\.safetensors")
_PRIVATE = re.compile(r"private-(\d+)\.safetensors")


class Store:
    """Values and private state of one client, in memory and, if there is one, in `folder`.

    `commit` adds what the next state needs, and `settle` deletes what only the state before needed,
    so a crash between the two loses nothing. With a folder, private state is in memory only during
    the steps that use it: with a thousand clients, memory holds those of the current round.
    """

    def __init__(
        self,
        folder: Path | None,
        type_of: Callable[[str], Any],
        private_type: Any,
        step: int,
        written: int | None = None,
    ) -> None:
        """Continue after `step` steps.

        Args:
            folder: of the client; None keeps everything in memory.
            type_of: gives the return type of a task, by the task's name.
            private_type: of the client's state.
            step: steps that are done.
            written: the number of steps after which the client's state was last written, 0 if
                never. That file must exist. None if the transport does not know it; then the newest
                file is read.
        """
        self._folder = folder
        self._type_of = type_of
        self._private_type = private_type
        self._values: dict[str, Any] = {}
        self._private: Any = None
        self._changed = False
        newest = max((version for version in self._versions() if version <= step), default=0)
        self.written = newest if written is None else written
        for version in self._versions():
            # of a step that did not finish
            if version > step:
                self._private_file(version).unlink()
        self._on_disk = self._private_file(self.written) if self.written else None
        # values whose files this process has written or read
        self._safe: set[str] = set()
        # files that may not be on the disk yet
        self._unsynced: set[Path] = set()

    @property
    def private(self) -> Any:
        """Return the client's state.

        Raises:
            Damaged: its file is damaged, or gone.
        """
        if self._on_disk is not None:
            if not self._on_disk.exists():
                raise Damaged(f"{self._on_disk} is gone, the client's private state")
            self._private = read(self._on_disk, self._private_type)
            self._on_disk = None
        return self._private

    def put(self, key: str, value: Any, private: Any) -> None:
        """Keep what a task gave, and the client's state after it."""
        self._values[key] = value
        self._changed |= private is not self.private
        self._private = private

    def get(self, key: str) -> Any:
        """Return the value `key`.

        Raises:
            Damaged: it does not exist, or its file is damaged.
        """
        if key not in self._values:
            if self._folder is None or not self._file(key).exists():
                raise Damaged(
                    f"value {key} is not in {self._folder or 'memory'}: the run folder is "
                    "incomplete"
                )
            self._values[key] = read(self._file(key), self._type_of(key.split("-", 2)[2]))
            self._safe.add(key)
        return self._values[key]

    def drop(self, key: str) -> None:
        """Forget the value `key`, which no step needs any more."""
        self._values.pop(key, None)

    def commit(self, step: int, keys: set[str]) -> None:
        """Make values `keys` and the private state after `step` steps durable. Nothing is deleted
        yet.
        """
        if self._folder is None:
            return
        if keys or self._changed:
            self._folder.mkdir(parents=True, exist_ok=True)
        for key in keys:
            # a file that an earlier process left may be damaged
            if key not in self._safe:
                self._write(self._file(key), self.get(key))
                self._safe.add(key)
        if self._changed:
            self._write(self._private_file(step), self._private)
            self.written = step
            self._changed = False

    def sync(self, keys: set[str]) -> None:
        """Wait until values `keys` and the private state, all committed, are on the disk."""
        if self._folder is not None:
            needed = {self._private_file(self.written), *map(self._file, keys)}
            for path in self._unsynced & needed:
                sync(path)
        self._unsynced.clear()

    def _write(self, path: Path, value: Any) -> None:
        write(path, with_digest(wire.chunks(value)), sync=False)
        self._unsynced.add(path)

    def settle(self, keys: set[str]) -> None:
        """Delete all that the run's state, which is now written, does not need."""
        self._values = {key: value for key, value in self._values.items() if key in keys}
        self._safe &= keys
        folder = self._folder
        if folder is None or not folder.exists():
            return
        # one look, because gossip settles all clients in each step
        names = os.listdir(folder)
        for name in names:
            value = _VALUE.fullmatch(name)
            private = _PRIVATE.fullmatch(name)
            if (value and value[1] not in keys) or (private and int(private[1]) != self.written):
                (folder / name).unlink()
        if self.written:
            self._private, self._on_disk = None, self._private_file(self.written)
        if "journal" in names:
            shutil.rmtree(folder / "journal", ignore_errors=True)

    def _file(self, key: str | int, kind: str = "value") -> Path:
        assert self._folder is not None
        return self._folder / f"{kind}-{key}.safetensors"

    def _private_file(self, step: int) -> Path:
        return self._file(step, "private")

    def _versions(self) -> list[int]:
        if self._folder is None:
            return []
        names = (_PRIVATE.fullmatch(p.name) for p in self._folder.glob("private-*"))
        return sorted(int(match[1]) for match in names if match)


class FolderJournal:
    """Progress within tasks, in files. One that is damaged or of other arguments is ignored: the
    work is done again.
    """

    def __init__(self, folder: Path, arguments: Callable[[], str] = str) -> None:
        """Keep files in `folder`; `arguments` gives a digest of the task's arguments, once it is
        needed.
        """
        self._folder = folder
        self._arguments = cache(arguments)

    def load(self, key: str) -> dict[str, Tensor] | None:
        """Return what was saved under `key`, if it can be read."""
        try:
            tensors, said = read_tensors(self._folder / f"{key}.safetensors")
            if said.get("arguments") == self._arguments():
                return tensors
            return None
        except (OSError, Damaged):
            return None

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Save `tensors` under `key`, in place of what was there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        chunks = with_digest(safetensors_chunks(tensors, {"arguments": self._arguments()}))
        write(self._folder / f"{key}.safetensors", chunks, sync=False)


def read(path: Path, expected: Any) -> Any:
    """Return the payload in a file; see `read_described`."""
    return read_described(path, expected)[0]


def read_described(path: Path, expected: Any) -> tuple[Any, Mapping[str, str]]:
    """Return the payload in a file and the file's metadata.

    Raises:
        Damaged: it has changed since it was written; the message names the file.
    """
    try:
        tensors, said = read_tensors(path)
        return wire.assemble(tensors, said, expected), said
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except Damaged as error:
        raise Damaged(f"{path} is damaged ({error})") from None
    except wire.WireError as error:
        raise wire.WireError(
            f"{path}: {error}; use the version of Ekiden that wrote it, or start a new run"
        ) from None
