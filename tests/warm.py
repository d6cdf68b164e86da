"""Processes that start at once: forks of one that has its imports behind it, where a new interpreter needs seconds.

All else is as in processes that the product makes: what they get is pickled, and nothing is shared with the tests.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest


class WarmProcess(ForkServerProcess):
    """Has the environment variables of the process that makes it, not those of the one that it is a fork of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

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
    """Let the product make its processes so. Tests that start `ekiden` or a script by itself have it as it is."""
    multiprocessing.set_forkserver_preload(["ekiden.cli", "pytest", "sklearn.datasets"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ekiden.transports.processes.SpawnProcess", WarmProcess)
        patch.setattr("ekiden.experiments.launch.get_context", lambda method: WarmContext())
        yield
