"""Locks between processes of one machine. A lock is released when its process ends, even by a kill."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["Timeout", "beside", "hold", "locked"]


def hold(path: Path, *, wait: bool) -> FileLock:
    """Hold the lock of a file until `release` is called; a missing file is made.

    Args:
        path: the file, whose contents do not matter.
        wait: whether to wait while another process holds it.

    Raises:
        Timeout: another process holds it, and `wait` is false. It is an OSError.
        OSError: the file cannot be opened.
    """
    lock = FileLock(path, thread_local=False)
    lock.acquire(blocking=wait, poll_interval=0.02)
    return lock


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file for a while; see `hold`."""
    lock = hold(path, wait=wait)
    try:
        yield
    finally:
        lock.release()


def beside(path: Path) -> Path:
    """Return this user's lock file for `path`, in the folder for temporary files."""
    digest = hashlib.blake2b(f"{Path.home()}\n{path.resolve()}".encode(), digest_size=12).hexdigest()
    return Path(tempfile.gettempdir()) / f"ekiden-{digest}.lock"
