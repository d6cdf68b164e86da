"""The run itself, once everything is checked and made: from its first or last step to its
models.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Generic, TypeVar

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import Damaged
from ekiden.core.engine.drive import Evaluator, Row, drive
from ekiden.core.engine.drive import models as models_of
from ekiden.core.engine.evaluation import Built
from ekiden.core.engine.folder import Marks, RunFolder, Trace
from ekiden.core.engine.method import State
from ekiden.core.engine.setup import write_models
from ekiden.core.engine.transport import Interrupted, Transport
from ekiden.core.engine.worker import Setup
from ekiden.core.training.weights import Weights

log = logging.getLogger("ekiden")
T = TypeVar("T")
X = TypeVar("X", bound=Transport)


@dataclass(frozen=True)
class End:
    """What a run has after a step."""

    state: State
    trace: Trace  # all that was reported so far
    transport: Transport  # holds the values of the state until the next step is done

    @cached_property
    def models(self) -> tuple[Weights | None, list[Weights]]:
        """Return the global model, if there is one, and the personal models."""
        return models_of(self.state, self.transport)


def last(steps: Generator[Any, None, T]) -> T:
    """What a generator returned at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


@dataclass(frozen=True)
class Run(Generic[X]):
    """Everything that a run needs."""

    setup: Setup  # what the parties agree on
    clients: tuple[str, ...]  # their names
    # makes the transport that continues from a state; it is also given what `Transport.written`
    # said then
    transport: Callable[[State, Mapping[str, str] | None], X]
    evaluator: Callable[[X], Evaluator]  # makes the evaluator of models, from the transport
    build: Built  # makes a network that the result fits
    folder: RunFolder | None  # where the run is kept; None keeps it in memory
    evaluate_every: int  # steps between evaluations; 0 evaluates only at the end
    on_step: Callable[[Row], None]  # called after each step with the row of metrics
    skip: bool = (
        True  # whether steps whose client is missing may be left out, if the method allows it
    )
    stop_after: int | None = None  # number of steps after which the run stops; None runs to the end
    # whether the clients are other parties. These have dropped what the first steps need, so a
    # damaged run cannot begin
    # again. After a failure they are asked for nothing more.
    elsewhere: bool = False

    def steps(self) -> Generator[End, None, End]:
        """Continue from the folder's last state, or from the first step if a file that it needs is
        damaged or gone.

        Where a transport is interrupted, the step is done again on a new one; two times without a
        step in between stop the run.

        Yields:
            What the run has after each step.

        Returns:
            What the run has at the end, with its models.
        """
        done: list[int] = []
        failed = -1
        damaged = False
        while True:
            try:
                return (yield from self._go(done))
            except Interrupted as death:
                if self.folder is None:
                    raise Interrupted(
                        f"{death}: give the run a folder, so that it can continue"
                    ) from None
                if len(done) == failed:
                    raise Interrupted(
                        f"{death} twice in one step (out of memory?): resume with fewer of them"
                    ) from None
                failed = len(done)
                log.warning("%s; the run does this step again and gives the same result", death)
            except Damaged as damage:
                if self.elsewhere:
                    raise UserError(
                        f"{damage}: restore it from a backup, or start a new run"
                    ) from None
                if self.folder is None or damaged:
                    raise
                log.warning(
                    "%s; the run goes back to its first step and gives the same result", damage
                )
                self.folder.forget()
                done = []
                damaged = True

    def _go(self, done: list[int]) -> Generator[End, None, End]:
        """Do the steps that are left, and add them to those that were `done` by this process."""
        method = self.setup.method
        folder = self.folder
        found = folder.load(type(method.start())) if folder else None
        state, marks = found or (method.start(), Marks())
        trace = folder.trace() if folder else Trace()
        with closing(self.transport(state, folder.written if folder else {})) as transport:
            steps = drive(
                self.setup,
                self.clients,
                transport,
                self.evaluator(transport),
                state,
                marks,
                trace,
                folder,
                self.evaluate_every or method.steps(len(self.clients)),
                skip=self.skip,
            )
            end = End(state, trace, transport)
            failed = True
            try:
                for state in islice(
                    steps, None if self.stop_after is None else self.stop_after - len(done)
                ):
                    done.append(state.step)
                    self.on_step(trace.metrics[-1])
                    end = End(state, trace, transport)
                    yield end
                failed = False
            finally:  # also if training failed or the caller stopped: the last good model
                if not (failed and self.elsewhere):
                    weights, personal = end.models
                    if folder:
                        write_models(
                            folder, self.setup.build, self.build, self.clients, weights, personal
                        )
            return end
