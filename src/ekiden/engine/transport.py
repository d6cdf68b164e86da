"""The contract of transports, which bring tasks to clients and values to those who use them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ekiden.base.errors import UserError
from ekiden.base.refs import EVERYONE, Ref
from ekiden.engine import wire
from ekiden.training.objective import Work
from ekiden.training.weights import Weights


class ClientMissing(UserError):
    """A client did not answer in time."""


@dataclass(frozen=True)
class Transfer:
    """A row of the ledger: one party used a value of another party.

    Attributes:
        step: the step in which it moved.
        source: its owner.
        target: who used it.
        task: the task that used it ("get" at the server).
        bytes: content on the wire, see `wire.size`.
        missing: True if nothing came because `source` did not answer.
    """

    step: int
    source: str
    target: str
    task: str
    bytes: int
    missing: bool = False


@dataclass(frozen=True)
class Request:
    """A task that the server asks for.

    Attributes:
        step: step of the run.
        call: number of earlier tasks of this client in this step.
        client: who does it.
        task: name of the method's function.
        args: its arguments after the client; they may be Refs.
        among: if the task gives a part to a sum: all clients that do.
    """

    step: int
    call: int
    client: str
    task: str
    args: tuple[Any, ...]
    among: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of its result at the client."""
        return f"{self.step}-{self.call}-{self.task}"


class Transport(ABC):
    """How tasks reach clients and how values travel. Only the run loop uses it; methods never see it.

    What a transport promises:

    - It does each task as `Worker.execute` does, with the private state after the client's previous task. Tasks of one
      client are done in the order in which they were submitted.
    - Arguments arrive unchanged, with each Ref replaced by its value. `value` gives what the task returned, bit for
      bit, as often as it is called. All parties can make the value behind `INITIAL` themselves.
    - After `commit` and `settle`, a transport that is made with the new state has the values that this state names, and
      the clients' private state of that moment, whatever was done later.
    - Where a client does not answer, the transport raises `ClientMissing`, and the task counts as not done.

    `ekiden.conformance.check_transport` measures all but the last.
    """

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Start a task. Return without waiting for it if other tasks can be done meanwhile."""

    @abstractmethod
    def value(self, ref: Ref[Any]) -> Any:
        """Wait for the value behind `ref`, and return it.

        Raises:
            ClientMissing: its owner does not answer.
        """

    @abstractmethod
    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Work:
        """Wait for all tasks; make durable what the state after `step` steps needs: private state and values `live`.

        Until `settle` a run may still resume from the state before, so what that state needs is kept too.

        Returns:
            The compute since the last commit.

        Raises:
            ClientMissing: the owner of one of the values does not answer.
        """

    def size(self, ref: Ref[Any]) -> int:
        """Wait for the value behind `ref`, and return its `wire.size`."""
        return wire.size(self.value(ref))

    def written(self) -> Mapping[str, str] | None:
        """Return when each client's private state was last written, as of the last commit, in a form of its own.

        It is kept with the run's state, and given to the transport of a run that resumes. So a private state that is
        missing is told from one that was never written. None if this is not known.
        """
        return None

    def trained(self) -> Mapping[str, Weights]:
        """Return the model that each client trained last in this step, where the setup says `show_trained`."""
        return {}

    def settle(self) -> None:  # noqa: B027  (a transport that keeps nothing has nothing to delete)
        """Delete what only the state before needed: the new one is written."""

    def close(self) -> None:  # noqa: B027
        """Release processes, connections and files."""


def refs(value: Any) -> Iterable[Ref[Any]]:
    """Return all Refs in `value`, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from refs(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from refs(part)
    elif is_dataclass(value) and not isinstance(value, (type, Weights)):
        for f in fields(value):
            yield from refs(getattr(value, f.name))


def resolve(value: Any, fetch: Callable[[Ref[Any]], Any]) -> Any:
    """Return `value` with every Ref replaced by what `fetch` gives for it."""
    if isinstance(value, Ref):
        return fetch(value)
    if isinstance(value, (list, tuple)):
        parts = [resolve(part, fetch) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: resolve(part, fetch) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, (type, Weights)) and any(True for _ in refs(value)):
        return replace(value, **{f.name: resolve(getattr(value, f.name), fetch) for f in fields(value)})
    return value


def live_refs(state: Any) -> frozenset[Ref[Any]]:
    """Return the values that a run in this state can still ask for, without those that follow from the seed."""
    return frozenset(ref for ref in refs(state) if ref.owner != EVERYONE)
