"""Processes that start at once: forks of one that has its imports behind it, where a new interpreter needs seconds.

That one is itself a fork of the tests' process, made before the first test. All else is as in processes that the
product makes: what they get is pickled, and nothing is shared with the tests.
"""

import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest


class WarmProcess(ForkServerProcess):
    """Has the environment variables of the process that makes it, not those of the one that it is a fork of."""

    def __init__(self, *args: Any, environment: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ if environment is None else environment)

    def run(self) -> None:
        """Do what the process is for."""
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class WarmContext(ForkServerContext):
    """Makes such processes."""

    Process = WarmProcess


def forked(path: bytes, arguments: Sequence[str], keep: Sequence[int]) -> int:
    """Fork this process, where `multiprocessing` would start an interpreter with these arguments."""
    with warnings.catch_warnings(action="ignore"):  # other threads of this process only wait
        number = os.fork()
    if number:
        return number
    try:
        as_new(keep)
        exec(arguments[-1], vars(sys.modules["__main__"]))
    finally:
        os._exit(0)


def as_new(keep: Sequence[int]) -> None:
    """Undo what pytest changed in this process: its main module, files, streams, filters of warnings."""
    sys.modules["__main__"] = ModuleType("__main__")
    for handle in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, *keep}:
        with suppress(OSError):
            os.close(handle)
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, 1, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.stream = sys.stderr
    logging.root.handlers = []
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # held when it was forked


@contextmanager
def warm_processes() -> Iterator[None]:
    """Let the product make its processes so, also in such processes.

    Tests that start a script, or `ekiden` by its name, have it as it is.
    """
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ekiden.transports.local.SpawnProcess", WarmProcess)
        patch.setattr("ekiden.runs.launch.get_context", lambda method: WarmContext())
        with patch.context() as starting:
            starting.setattr(util, "spawnv_passfds", forked)
            forkserver.ensure_running()
        yield


def command(args: list[str], folder: Path, out: Path, error: Path) -> None:
    """What a process does: an `ekiden` command in a folder, with its output added to files."""
    from ekiden.cli.app import main

    os.chdir(folder)
    for file, number in ((out, 1), (error, 2)):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.argv = ["ekiden", *args]
    main()


def ekiden(
    *args: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run an `ekiden` command in its own process, to its end."""
    line = [*map(str, args)]
    with TemporaryDirectory() as scratch:
        out, error = Path(scratch) / "out", Path(scratch) / "error"
        given = (line, (folder or Path()).absolute(), out, error)
        process = WarmProcess(target=command, args=given, environment=environment)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"ekiden {' '.join(line)}: {out.read_text()}{error.read_text()}")
        return subprocess.CompletedProcess(line, process.exitcode, out.read_text(), error.read_text())
