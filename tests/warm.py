"""Processes that start at once: forks of one that has its imports behind it, where a new
interpreter needs seconds.

All else is as in processes that the product makes: what they get is pickled, and nothing is shared
with the tests."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest


class WarmProcess(ForkServerProcess):
    """Has the environment variables of the process that makes it, not those of the one that it is a
    fork of."""

    def __init__(
        self, *args: Any, environment: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
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


@contextmanager
def warm_processes() -> Iterator[None]:
    """Let the product make its processes so. Tests that start a script, or `ekiden` by its name,
    have it as it is."""
    multiprocessing.set_forkserver_preload(
        ["ekiden.cli.runs", "ekiden.cli.app", "pytest", "sklearn.datasets"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ekiden.core.engine.local.set_forkserver_preload", lambda names: None)
        patch.setattr("ekiden.lab.launch.get_context", lambda method: WarmContext())
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
    *args: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
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
        return subprocess.CompletedProcess(
            line, process.exitcode, out.read_text(), error.read_text()
        )


def children(pid: int) -> list[int]:
    """Return all processes below one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == pid:
            found += [int(stat.parent.name), *children(int(stat.parent.name))]
    return found
