"""The run loop: the one place that saves, evaluates, reports and counts.

The same loop without values (`outline`) finds out what a method will ask for. This works only if
the server reads no value on the way. Then it is settled before the run starts who uses whose value
in which step, and every party finds the same.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Protocol

from ekiden.core.base.errors import UserError
from ekiden.core.engine.federation import Fed, Note
from ekiden.core.engine.folder import Marks, RunFolder, TaskPasses, Trace
from ekiden.core.engine.method import INITIAL, HasModel, Method, Model, State
from ekiden.core.engine.transport import (
    ClientMissing,
    Request,
    Transfer,
    Transport,
    live_refs,
    refs,
)
from ekiden.core.engine.wire import SERVER, Ref
from ekiden.core.engine.worker import Setup
from ekiden.core.training.fit import Work
from ekiden.core.training.weights import Weights

log = logging.getLogger("ekiden")
# clients that a line of the log names
_TOLD = 3
EACH = 5  # values that move, for each task that a run may have
Row = Mapping[str, Any]  # What is measured after a step: one JSON line of metrics.jsonl
Absent = Callable[[int, str], bool]  # (step, client): whether that client is missing in that step


class Evaluator(Protocol):
    """Measures models; the run loop asks it, methods never do."""

    def __call__(self, model: Weights | None, personal: list[Weights], *, last: bool) -> Row:
        """What to report about a global model and personal models (one per client, or none); more
        at the last step.
        """


class _Report:
    """Write down what a run does: in `trace`, and in the run folder if there is one."""

    def __init__(self, trace: Trace, marks: Marks, folder: RunFolder | None) -> None:
        self._trace = trace
        self._marks = marks
        self._folder = folder

    def transfer(self, row: Transfer) -> None:
        """Note that a value moved."""
        self._trace.ledger.append(row)
        self._marks = replace(self._marks, bytes=self._marks.bytes + row.bytes)
        if self._folder:
            self._folder.transfer(row)

    def counted(self, step: int, tasks: Mapping[Ref[Any], Work], server: Work) -> dict[str, int]:
        """Note the compute of a step, and return what the run has moved and computed so far."""
        done = [
            TaskPasses(ref.owner, ref.key, work.forward, work.backward)
            for ref, work in tasks.items()
        ]
        done = sorted(done, key=lambda one: (one.party, one.call))
        if server != Work():
            done.append(TaskPasses(SERVER, "", server.forward, server.backward))
        self._trace.passes[step] = tuple(done)
        if self._folder:
            self._folder.computed(step, done)
        marks = self._marks
        self._marks = marks = replace(
            marks,
            forward=marks.forward + sum(one.forward for one in done),
            backward=marks.backward + sum(one.backward for one in done),
        )
        return {"bytes": marks.bytes, "forward": marks.forward, "backward": marks.backward}

    def step(
        self,
        state: State,
        row: Row,
        called: Iterable[str],
        written: Mapping[str, str] | None,
        began: float,
        *,
        lasting: bool,
    ) -> None:
        """Note that a step which began at this time is done; see `RunFolder.save`."""
        self._trace.metrics.append(row)
        if folder := self._folder:
            folder.called(called)
            length = folder.append("metrics.jsonl", row)
            self._marks = replace(self._marks, metrics=length, ledger=folder.length("ledger.jsonl"))
            folder.save(state, self._marks, written, lasting=lasting)
            folder.append(
                "times.jsonl",
                {"step": state.step, "seconds": round(time.perf_counter() - began, 3)},
            )


def drive(
    setup: Setup,
    clients: tuple[str, ...],
    transport: Transport,
    evaluate: Evaluator,
    state: State,
    marks: Marks,
    trace: Trace,
    folder: RunFolder | None,
    evaluate_every: int,
    *,
    skip: bool,
) -> Iterator[State]:
    """Run the method from `state` on, and yield each state once it is saved and reported in `trace`.

    After every step: evaluate (each `evaluate_every` steps and at the end), write metrics, make the
    clients' values and the state durable, in this order. After a crash at any moment, the run
    therefore resumes from the last finished step.

    With `skip`, a run whose method allows it continues without clients that do not answer. A round
    then has fewer replies; a hop is left out, so that the state stays the same and only its step
    number grows.
    """
    method: Method = setup.method
    total = method.steps(len(clients))
    report = _Report(trace, marks, folder)
    fed = Fed(clients, transport, setup.seed, report.transfer, setup, skip=skip)
    began = time.perf_counter()
    for after, tasks in stepped(method, fed, transport, state, report.transfer, skip=skip):
        counted = report.counted(after.step - 1, tasks, fed.work)
        row: dict[str, Any] = {"step": after.step}
        if after.step % evaluate_every == 0 or after.step == total:
            model, personal = models(after, transport)
            row |= evaluate(model, personal, last=after.step == total)
            # accuracies of different sizes are hard to compare
            if model is not None and method.changes_network:
                row["parameters"] = len(model.params)
        row |= counted
        if fed.notes:
            row["notes"] = fed.notes
            log.info("step %d: %s", after.step, told(fed.notes))
        lasting = folder is None or after.step == total or not transport.defers or folder.due
        if lasting:
            transport.sync()
        report.step(after, row, fed.called, transport.written(), began, lasting=lasting)
        transport.settle()
        yield after
        began = time.perf_counter()


def stepped(
    method: Method,
    fed: Fed,
    transport: Transport,
    state: State,
    note: Callable[[Transfer], None],
    *,
    skip: bool = True,
) -> Iterator[tuple[State, Mapping[Ref[Any], Work]]]:
    """Execute the outer loop from `state` on, in a run or to find out what a run will ask for.

    Yields:
        Each state once its tasks are done, and the compute of each. A step that needs a missing
        client is left out if the run may `skip` it: `note` is given the missing transfer, the state
        stays the same and only its step number grows.

    Raises:
        ClientMissing: the run cannot continue without this client, or would end without a result.
    """
    total = method.steps(len(fed.clients))
    fed.begin(state.step)
    steps = method.run(fed, state)
    while (after := next(steps, None)) is not None:
        try:
            work = transport.commit(after.step, live_refs(after))
        except ClientMissing:
            for transfer in _lost(state, after):
                note(transfer)
            after = state.next()
            empty = after.step >= total and not method.complete(after)
            # a run does not end without a result
            if empty or not (skip and method.traits.skips):
                raise
            fed.notes.clear()
            # the loop starts again from the state, as after a resume
            steps = method.run(fed, after)
            work = transport.commit(after.step, live_refs(after))
        yield after, work
        state = after
        fed.begin(after.step)


def told(notes: Mapping[str, Note]) -> str:
    """Return what a method noted in a step, on one line. With many clients, the largest numbers are
    named.
    """
    return "; ".join(f"{name} {_one(value)}" for name, value in notes.items())


def _one(value: Note) -> str:
    if not isinstance(value, Mapping):
        return _number(value)
    if not value:
        return "none"
    size = {client: inf if number is None else number for client, number in value.items()}
    first = sorted(value, key=lambda client: size[client], reverse=True)[:_TOLD]
    named = ", ".join(f"{_number(value[client])} ({client})" for client in first)
    rest = len(value) - len(first)
    if rest:
        return f"{named} and {rest} smaller"
    return named


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4g}"


def _lost(before: State, after: State) -> list[Transfer]:
    """Return the clients whose missing values stopped the step that leads to `after`."""
    owed = sorted(live_refs(after) - live_refs(before), key=lambda ref: (ref.owner, ref.key))
    lost = []
    for ref in owed:
        task = ref.key.split("-", 2)[2]
        lost.append(Transfer(before.step, ref.owner, SERVER, task, 0, missing=True, value=ref.key))
    return lost


def models(state: State, transport: Transport) -> tuple[Weights | None, list[Weights]]:
    """Return the models of a state, wherever they are. Reading them here is not counted as
    communication.
    """

    def fetch(model: Model) -> Weights:
        value: Weights | HasModel = transport.value(model) if isinstance(model, Ref) else model
        if isinstance(value, Weights):
            return value
        return value.model

    model = None if state.model is None else fetch(state.model)
    return model, [fetch(m) for m in state.personal]


@dataclass(frozen=True)
class Outline:
    """All that a run asks for."""

    requests: tuple[Request, ...]  # in order
    end: State  # the last state
    # the ledger of the run, in order; their bytes are right where sizes of values were given
    transfers: tuple[Transfer, ...] = ()

    @cached_property
    def result(self) -> frozenset[Ref[Any]]:
        """Return the values of the models that the run ends with. Nothing else is the result."""
        return live_refs(self.models)

    @property
    def models(self) -> tuple[Model, ...]:
        """Return the models of the result: the global one, then the personal ones."""
        shared = () if self.end.model is None else (self.end.model,)
        return (*shared, *self.end.personal)

    def contributors(self, ref: Ref[Any]) -> frozenset[str]:
        """Return the clients whose work is in a value."""
        seen = {ref}
        waiting = [ref]
        while waiting:
            value = waiting.pop()
            if value == INITIAL:
                continue
            step, call, _ = value.key.split("-", 2)
            if request := self.request(int(step), int(call), value.owner):
                new = set(refs(request.args)) - seen
                seen |= new
                waiting += new
        return frozenset(value.owner for value in seen if value != INITIAL)

    def needed(self, steps: int) -> frozenset[Ref[Any]]:
        """Return the values that a run still asks for after this number of steps, including its
        result.
        """
        return self.result.union(
            *(refs(request.args) for request in self.requests if request.step >= steps)
        )

    def users(self, ref: Ref[Any]) -> list[tuple[str, int]]:
        """Return who else uses a value, and in which step."""
        return [(client, step) for client, step in self._users.get(ref, ()) if client != ref.owner]

    def request(self, step: int, call: int, client: str) -> Request | None:
        """Return what a client is asked to do at that place."""
        return self._places.get((step, call, client))

    @cached_property
    def _users(self) -> dict[Ref[Any], list[tuple[str, int]]]:
        users: dict[Ref[Any], list[tuple[str, int]]] = {}
        for request in self.requests:
            for ref in dict.fromkeys(refs(request.args)):
                users.setdefault(ref, []).append((request.client, request.step))
        return users

    @cached_property
    def _places(self) -> dict[tuple[int, int, str], Request]:
        return {(r.step, r.call, r.client): r for r in self.requests}


def outline(
    setup: Setup,
    clients: Sequence[str],
    state: State | None = None,
    absent: Absent = lambda step, client: False,
    most: float = float("inf"),
    size: Callable[[Ref[Any]], int] = lambda ref: 0,
) -> Outline | None:
    """Return what the rest of a run asks for; None if the server reads a value, because the rest
    may depend on it.

    Args:
        setup: method and network.
        clients: their names, in order.
        state: where to begin; by default the start of the run.
        absent: who is missing; steps that need them are left out.
        most: the largest number of tasks that is allowed, with `EACH` times as many values that go
            to other parties.
        size: gives the bytes of a value, for the transfers.

    Raises:
        TooLong: it has more of them; found before they are built.
        ClientMissing: the run cannot continue without a missing client.
    """
    method: Method = setup.method
    nobody = _Nobody(absent, most, size)
    transfers: list[Transfer] = []
    fed = Fed(clients, nobody, setup.seed, transfers.append, setup)
    begin = end = state or method.start()
    try:
        for end, _ in stepped(method, fed, nobody, begin, transfers.append):  # noqa: B007
            pass
    except _ReadByServer:
        return None
    return Outline(tuple(nobody.requests), end, tuple(transfers))


class TooLong(UserError):
    """A run asks for more tasks, or moves more values, than allowed."""


class _ReadByServer(Exception):
    """The server reads a value."""


class _Nobody(Transport):
    """A transport that notes the requests and executes nothing."""

    def __init__(self, absent: Absent, most: float, size: Callable[[Ref[Any]], int]) -> None:
        self.requests: list[Request] = []
        self._missing: set[Ref[Any]] = set()
        self._moved = 0
        self._absent = absent
        self._most = most
        self._size = size

    def submit(self, request: Request) -> None:
        if len(self.requests) >= self._most:
            raise TooLong(f"the run asks for more than {self._most:.0f} tasks: lower its rounds")
        if self._absent(request.step, request.client):
            self._missing.add(Ref(request.client, request.key))
        else:
            self.requests.append(request)

    def value(self, ref: Ref[Any]) -> Any:
        raise _ReadByServer

    def size(self, ref: Ref[Any]) -> int:
        # asked once for each value that moves; tasks that take many cost as many
        self._moved += 1
        if self._moved > EACH * self._most:
            raise TooLong(
                f"the run moves more than {EACH * self._most:.0f} values: lower its rounds"
            )
        return self._size(ref)

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Mapping[Ref[Any], Work]:
        if missing := sorted(ref.owner for ref in self._missing & live):
            raise ClientMissing(
                f"{', '.join(missing)} was missing in a step that cannot be left out"
            )
        return {}
