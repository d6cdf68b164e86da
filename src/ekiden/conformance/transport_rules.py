"""The contract of transports, measured by small runs of different methods."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from ekiden.api import run
from ekiden.conformance.run_rules import difference
from ekiden.conformance.small_runs import Broken, Tiny, blobs, files, settings
from ekiden.engine.folder import RunFolder
from ekiden.engine.method import Method
from ekiden.methods import SCAFFOLD, FedGram, FedSeq, MetaFed
from ekiden.transports import MakesTransport

SHAPES: tuple[Method, ...] = (FedSeq(epochs=1), SCAFFOLD(rounds=2, epochs=1), MetaFed(epochs=1, warmup=1), FedGram())
"""Models that are handed on; rounds with private state; clients' own models; sums that clients add up."""


def gives_the_same_bits(make: MakesTransport) -> None:
    """Models, metrics and ledger are those of a run in one process."""
    for method in SHAPES:
        here, there = _run(method), _run(method, transport=make)
        differs = difference(here, there) or ("other metrics" if here.metrics != there.metrics else "")
        if differs:
            raise Broken(f"a run of {method.title()} gives {differs}")


def resumes_on_it(make: MakesTransport) -> None:
    """A run that is stopped after any step resumes and ends with the same files."""
    for method in SHAPES:

        def stopping(folder: Path, steps: int, method: Method = method) -> None:
            for _ in range(steps):
                _run(method, folder=folder, transport=make, stop_after=1)

        _compare(method, stopping)


def forgets_what_died(make: MakesTransport) -> None:
    """What is done in a step whose state is not written does not count: the step is done again."""
    save = RunFolder.save
    for method in SHAPES:

        def dying(folder: Path, steps: int, method: Method = method) -> None:
            for last in range(steps):

                def full(self: RunFolder, state: Any, *args: Any, last: int = last) -> None:
                    if state.step > last:
                        raise _Died
                    save(self, state, *args)

                with patch.object(RunFolder, "save", full), suppress(_Died):
                    _run(method, folder=folder, transport=make)
            _run(method, folder=folder, transport=make)

        _compare(method, dying)


class _Died(Exception):
    """The state could not be written."""


def _compare(method: Method, attempts: Callable[[Path, int], None]) -> None:
    """Refuse a run made by `attempts` that left other files than a run in one process."""
    with TemporaryDirectory() as scratch:
        whole, other = Path(scratch) / "whole", Path(scratch) / "other"
        _run(method, folder=whole)
        attempts(other, method.steps(len(blobs().clients)))
        here, there = files(whole), files(other)
        if different := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
            raise Broken(f"a run of {method.title()} gives another {', '.join(different)}")


def _run(method: Method, **options: Any) -> Any:
    return run(method, blobs(), Tiny, **settings(), **options)


CHECKS = (gives_the_same_bits, resumes_on_it, forgets_what_died)
"""The lines of the contract."""
