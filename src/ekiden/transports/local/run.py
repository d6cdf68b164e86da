"""A run on this machine, once all is checked and made: from its first or last step to its models."""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

from ekiden.base.files import Damaged
from ekiden.engine.drive import Row, drive
from ekiden.engine.drive import models as models_of
from ekiden.engine.evaluation import TestSet
from ekiden.engine.folder import Marks, RunFolder, Trace
from ekiden.engine.method import State
from ekiden.engine.modules import initial_weights, write_models
from ekiden.engine.worker import Setup
from ekiden.training.weights import Weights
from ekiden.transports.local.simulation import Executor, Simulation

log = logging.getLogger("ekiden")
T = TypeVar("T")


@dataclass(frozen=True)
class End:
    """Where a run stands after a step.

    Attributes:
        state: its state.
        trace: all that was reported so far.
        transport: has the values of the state, until the next step is done.
    """

    state: State
    trace: Trace
    transport: Simulation

    @cached_property
    def models(self) -> tuple[Weights | None, list[Weights]]:
        """The global model, where there is one, and the personal ones."""
        return models_of(self.state, self.transport)


def last(steps: Generator[Any, None, T]) -> T:
    """What a generator returns at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


@dataclass(frozen=True)
class Simulated:
    """What a run needs.

    Attributes:
        setup: what the parties agree on.
        clients: their names.
        executor: where tasks run.
        test: measures models.
        folder: where the run is kept; None: in memory.
        evaluate_every: steps between evaluations.
        absent: which clients do not answer in which step.
        on_step: called after each step with the row of metrics.
        stop_after: so many steps; None: to the end.
    """

    setup: Setup
    clients: tuple[str, ...]
    executor: Executor
    test: TestSet
    folder: RunFolder | None
    evaluate_every: int
    absent: Callable[[int, str], bool]
    on_step: Callable[[Row], None]
    stop_after: int | None

    def steps(self) -> Generator[End, None, End]:
        """Go on from where the folder is; from the first step where a file that the run needs is damaged or gone.

        Yields:
            Where it stands after each step.

        Returns:
            Where it stands at the end, with its models at hand.
        """
        try:
            return (yield from self._go())
        except Damaged as damage:
            if self.folder is None:
                raise
            log.warning("%s; the run goes back to its first step and gives the same result", damage)
            self.folder.forget()
            return (yield from self._go())

    def _go(self) -> Generator[End, None, End]:
        method, folder = self.setup.method, self.folder
        found = folder.load(type(method.start())) if folder else None
        state, marks = found or (method.start(), Marks())
        transport = Simulation(
            self.executor,
            method,
            lambda: initial_weights(self.setup),
            folder=folder.path / "clients" if folder else None,
            state=state,
            absent=self.absent,
            written=folder.written if folder else {},
        )
        trace = folder.trace() if folder else Trace()

        def evaluate(model: Weights | None, personal: list[Weights], *, last: bool) -> Row:
            return self.test(model, personal, transport.trained, last=last)

        seed, every = self.setup.seed, self.evaluate_every
        steps = drive(method, self.clients, transport, evaluate, seed, state, marks, trace, folder, every, self.setup)
        end = End(state, trace, transport)
        try:
            for state in islice(steps, self.stop_after):
                self.on_step(trace.metrics[-1])
                end = End(state, trace, transport)
                yield end
        finally:  # also when training failed, or nobody asks for more: the last good model
            weights, personal = end.models
            if folder:
                write_models(folder, self.setup.build, self.test.build, self.clients, weights, personal)
        return end
