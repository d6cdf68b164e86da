"""What all tests share."""

import gc
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fuzz import examples
from tests.warm import warm_processes

# The process that hands tests out to workers loads this file and no test: PyTorch and Ekiden are
# imported where used.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = (
    "1"  # tests run side by side, and so do the processes that they start
)
settings.register_profile("ekiden", max_examples=examples(30), deadline=None)
settings.load_profile("ekiden")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are processors: tests of other processes mostly wait."""
    return (
        len(os.sched_getaffinity(0)) + 1
        if hasattr(os, "sched_getaffinity")
        else (os.cpu_count() or 1) + 1
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file run in one process, which makes and imports what they share once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.location[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded now stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache of data sets for all processes of a session, none of the user's."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "EKIDEN_CACHE",
            str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Worker processes start at once; see `tests.warm`."""
    with warm_processes():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Tests kill processes, never the machine: what a process wrote outlives it without waiting for
    the disk."""

    def fsync(handle: int) -> None:
        os.fstat(handle)  # a wrong handle is an error all the same

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session", autouse=True)
def silos_allow_more() -> Iterator[None]:
    """Where the file of a silo in a test does not say otherwise, nobody is asked about a plan, and
    models may be measured without noise, as on one machine."""
    silo_file = sys.modules.get("ekiden.silos.silo.silo_file")
    if silo_file is None:
        yield
        return
    made, limits = silo_file.made, silo_file.Limits

    def unasked(kind: type[object], values: object, what: str = "") -> object:
        if kind is limits and isinstance(values, dict):
            values = {"approve": False, "exact_evaluation": True, **values}
        return made(kind, values, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silo_file, "made", unasked)
        yield


@pytest.fixture(autouse=True)
def seeds(request: pytest.FixtureRequest) -> None:
    """No test depends on an unseeded generator: its name seeds all of them. EKIDEN_TEST_SEED gives
    other seeds, to find tests that hold for some draws only.
    """
    import numpy as np
    import torch

    file, _, _ = request.node.location
    # not the id of the test, to which `--dist loadgroup` adds its group
    name = f"{file}::{request.node.name} {os.environ.get('EKIDEN_TEST_SEED', '')}"
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats the stack for a GPU


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run side by side: one thread each."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def blobs() -> object:
    """The silos of `small_runs.blobs`, a `FederatedData`, the same for all tests."""
    from ekiden.lab.conformance import small_runs

    return small_runs.blobs()


@pytest.fixture(scope="session")
def few() -> object:
    """The same with 12 to 42 points, for what is slow: two mini-batches of 16 at some clients, one
    at others."""
    from ekiden.lab.conformance import small_runs

    return small_runs.blobs(12)


@pytest.fixture
def data_home() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is missing."""
    home = os.environ.get("EKIDEN_DATA", "")
    if not home or not Path(home).is_dir():
        pytest.skip("EKIDEN_DATA does not name a folder of data sets")
    return Path(home)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command line in this process: exit code, and what was printed."""
    from ekiden.cli import app

    def go(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ekiden", *args])
        code = 0
        try:
            app.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, error = capsys.readouterr()
        return code, out + error

    return go
