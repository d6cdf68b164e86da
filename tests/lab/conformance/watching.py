"""A method under test, and what its small run asked of the transport and of local training."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

from ekiden.core.engine.local import Simulation
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Request
from ekiden.core.engine.wire import Ref
from ekiden.core.training import fit as fitting
from ekiden.core.training.fit import Bench
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance import Subject
from ekiden.runs.result import Result


class Watched(Subject):
    """A method under test."""

    def __init__(self, kind: type[Method]) -> None:
        super().__init__(kind)
        # the method's requests
        self.requests: list[Request] = []
        # the values that were read from the transport
        self.read: set[Ref[Any]] = set()
        # what local training was told to return, each value that occurred
        self.selected: set[str] = set()

    @cached_property
    def watched(self) -> tuple[Result, dict[str, Any]]:
        """The small run in a folder, see `Subject.watched`."""
        # made first, so that its requests are not among those of this run
        _ = self.plain
        with self._transport(), watched_fits() as self.selected:
            return super().watched

    @contextmanager
    def _transport(self) -> Iterator[None]:
        submit, value = Simulation.submit, Simulation.value

        def spy_submit(transport: Simulation, request: Request) -> None:
            self.requests.append(request)
            submit(transport, request)

        def spy_value(transport: Simulation, ref: Ref[Any]) -> Any:
            self.read.add(ref)
            return value(transport, ref)

        with (
            patch.object(Simulation, "submit", spy_submit),
            patch.object(Simulation, "value", spy_value),
        ):
            yield


@contextmanager
def watched_fits() -> Iterator[set[str]]:
    """Watch what local training is told to return, while the context is open."""
    selected: set[str] = set()
    train = fitting.fit

    def spy(bench: Bench, *args: Any, **options: Any) -> Weights:
        selected.add(bench.training.select)
        return train(bench, *args, **options)

    with patch.object(fitting, "fit", spy):
        yield selected
