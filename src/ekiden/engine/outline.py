"""Find out what a method will ask for by running its outer loop without computing any value.

This works only if the server reads no value on the way. Then it is settled before the run starts who uses whose value
in which step, and every party finds the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ekiden.base.errors import UserError
from ekiden.base.refs import Ref
from ekiden.engine.drive import stepped
from ekiden.engine.federation import Fed
from ekiden.engine.method import INITIAL, Method, Model, State
from ekiden.engine.transport import ClientMissing, Request, Transfer, Transport, live_refs, refs
from ekiden.engine.worker import Setup
from ekiden.training.objective import Work

Absent = Callable[[int, str], bool]
"""(step, client): whether that client is missing in that step."""


@dataclass(frozen=True)
class Outline:
    """All that a run asks for.

    Attributes:
        requests: in order.
        end: the last state.
        transfers: the ledger of the run, in order; their bytes are right where sizes of values were given.
    """

    requests: tuple[Request, ...]
    end: State
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
        seen, waiting = {ref}, [ref]
        while waiting:
            value = waiting.pop()
            step, call, _ = value.key.split("-", 2) if value != INITIAL else (-1, 0, "")
            request = self.request(int(step), int(call), value.owner)
            new = [r for r in refs(request.args) if r not in seen] if request else []
            seen.update(new)
            waiting += new
        return frozenset(value.owner for value in seen if value != INITIAL)

    def needed(self, steps: int) -> frozenset[Ref[Any]]:
        """Return the values that a run still asks for after this number of steps, including its result."""
        return self.result.union(*(refs(request.args) for request in self.requests if request.step >= steps))

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
    """Return what the rest of a run asks for; None if the server reads a value, because the rest may depend on it.

    Args:
        setup: method and network.
        clients: their names, in order.
        state: where to begin; by default the start of the run.
        absent: who is missing; steps that need them are left out.
        most: the largest number of tasks that is allowed.
        size: gives the bytes of a value, for the transfers.

    Raises:
        TooLong: it has more tasks than `most`; found before they are built.
        ClientMissing: the run cannot continue without a missing client.
    """
    method: Method = setup.method
    nobody = _Nobody(absent, most, size)
    transfers: list[Transfer] = []
    fed = Fed(clients, nobody, setup.seed, transfers.append, setup)
    begin = end = method.start() if state is None else state
    try:
        for end, _ in stepped(method, fed, nobody, begin, transfers.append):  # noqa: B007
            pass
    except _ReadByServer:
        return None
    return Outline(tuple(nobody.requests), end, tuple(transfers))


class TooLong(UserError):
    """A run asks for more tasks than allowed."""


class _ReadByServer(Exception):
    """The server reads a value."""


class _Nobody(Transport):
    """A transport that notes the requests and executes nothing."""

    def __init__(self, absent: Absent, most: float, size: Callable[[Ref[Any]], int]) -> None:
        self.requests: list[Request] = []
        self._missing: set[Ref[Any]] = set()
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
        return self._size(ref)

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Work:
        if missing := sorted(ref.owner for ref in self._missing & live):
            raise ClientMissing(f"{', '.join(missing)} was missing in a step that cannot be left out")
        return Work()
