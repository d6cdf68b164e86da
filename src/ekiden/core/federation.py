"""What a method's outer loop works with: clients to call, values to get, and the ledger of what moved."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from ekiden.core import wire
from ekiden.core.method import EVERYONE, INITIAL, SERVER, Ref, State
from ekiden.core.seeds import derive
from ekiden.core.worker import Setup
from ekiden.errors import UserError, unknown
from ekiden.learning.augment import normalise
from ekiden.learning.fit import Work
from ekiden.learning.layout import Layout
from ekiden.learning.network import Network
from ekiden.learning.weights import Weights

T = TypeVar("T")
_CPU = torch.device("cpu")


class ClientMissing(UserError):
    """A client did not answer within the transport's patience."""


@dataclass(frozen=True)
class Transfer:
    """A row of the ledger: one value that one party used and another one owned.

    Attributes:
        step: the step in which it moved.
        source: its owner.
        target: who used it.
        task: what it was used for ("get" at the server).
        bytes: content on the wire, see `wire.size`.
        missing: True where nothing came because `source` did not answer.
    """

    step: int
    source: str
    target: str
    task: str
    bytes: int
    missing: bool = False


@dataclass(frozen=True)
class Request:
    """A task as the server asks for it: arguments may be Refs."""

    step: int
    call: int
    client: str
    task: str
    args: tuple[Any, ...]

    @property
    def key(self) -> str:
        """The name of its value at the client."""
        return f"{self.step}-{self.call}-{self.task}"


class Transport(Protocol):
    """How tasks reach clients and values travel. Methods never see it."""

    def submit(self, request: Request) -> None:
        """Start a task; its arguments are fetched from their owners."""

    def value(self, ref: Ref[Any]) -> Any:
        """The value behind `ref`; waits for it.

        Raises:
            ClientMissing: its owner does not answer.
        """

    def size(self, ref: Ref[Any]) -> int:
        """`wire.size` of the value behind `ref`; waits for it."""

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Work:
        """Make durable what the state after `step` steps needs, the values `live` among it.

        Returns:
            The compute since the last commit.
        """

    def settle(self) -> None:
        """Once that state is written: drop what only the one before needed."""

    def close(self) -> None:
        """Release processes and files."""


class Fed:
    """The federation as a method sees it.

    Attributes:
        clients: names of all clients, in the order given.
        work: compute of the server in this step; methods that have some there add to it.
    """

    def __init__(
        self,
        clients: Sequence[str],
        transport: Transport,
        seed: int,
        note: Callable[[Transfer], None],
        setup: Setup | None = None,
        *,
        skip: bool = True,
    ) -> None:
        self.clients = tuple(clients)
        self._note = note
        self._transport = transport
        self._seed = seed
        self._setup = setup
        self._skip = skip
        self._step = 0
        self._calls: dict[str, int] = {}
        self.work = Work()

    def call(self, task: Callable[..., T], client: str, *args: Any) -> Ref[T]:
        """Ask `client` to do `task` (a function of the method marked `@on_client`); returns at once.

        Refs among `args` (also inside tuples, lists and dataclasses) move from their owners to `client`.
        """
        if client not in self.clients:
            raise unknown("client", client, self.clients)
        name = task.__name__
        for ref in refs(args):
            self._count(ref, client, name)
        carried = sum(wire.size(resolve(arg, lambda _: None)) for arg in args if not _is_instruction(arg))
        if carried:
            self._note(Transfer(self._step, SERVER, client, name, carried))
        call = self._calls.get(client, 0)
        self._calls[client] = call + 1
        request = Request(self._step, call, client, name, args)
        self._transport.submit(request)
        return Ref(client, request.key)

    @overload
    def get(self, wanted: Ref[T]) -> T: ...
    @overload
    def get(self, wanted: Iterable[Ref[T]], *, at_least: int | None = None) -> list[T]: ...
    def get(self, wanted: Ref[T] | Iterable[Ref[T]], *, at_least: int | None = None) -> T | list[T]:
        """Bring values to the server, which computes on the CPU, as after a resume.

        Args:
            wanted: one Ref, or several.
            at_least: with several: go on if so many came; who was missing is in the ledger. All, if None, or if the
                user wants the run to stop when somebody is missing.

        Raises:
            ClientMissing: fewer came.
        """
        if isinstance(wanted, Ref):
            return self.get([wanted])[0]
        values, wanted = [], list(wanted)
        missing: list[str] = []
        for ref in wanted:
            try:
                values.append(wire.placed(self._transport.value(ref), _CPU))
                self._count(ref, SERVER, "get")
            except ClientMissing:
                missing.append(ref.owner)
                self._note(Transfer(self._step, ref.owner, SERVER, "get", 0, missing=True))
        if len(values) < (at_least if at_least is not None and self._skip else len(wanted)):
            raise _no_answer(missing)
        return values

    def sample(self, k: int) -> tuple[str, ...]:
        """`k` clients of this step, drawn uniformly without replacement, in the order of `clients`."""
        if not 1 <= k <= len(self.clients):
            raise UserError(f"cannot sample {k} of {len(self.clients)} clients: choose 1 to {len(self.clients)}")
        chosen = torch.randperm(len(self.clients), generator=self.generator("sample"))[:k]
        return tuple(self.clients[i] for i in sorted(chosen.tolist()))

    def order(self, order: str, round: int = 0) -> tuple[str, ...]:
        """All clients in the order that the user wants.

        Args:
            order: "given", "reversed", "random" (drawn anew each round) or client names separated by commas.
            round: which round it is for.

        Raises:
            UserError: an explicit order that does not name every client once.
        """
        return in_order(order, self.clients, derive(self._seed, "order", round))

    def generator(self, purpose: str) -> torch.Generator:
        """Randomness of the server in this step, for one purpose."""
        return torch.Generator().manual_seed(derive(self._seed, self._step, SERVER, purpose))

    @cached_property
    def layout(self) -> Layout:
        """Where each tensor of the clients' network is in flat weights."""
        return Network(self._agreed.build()).layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self._agreed.dataset.shape

    def network(self, model: Weights) -> nn.Module:
        """A network of the server's own that holds `model`, in evaluation mode."""
        network = Network(self._agreed.build(), self._agreed.hardware.device)
        network.load(model)
        return network.module.eval()

    def feed(self, samples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the server's own (images with values in [0, 1]), scaled as the clients' are.

        With a generator they are augmented as the clients' are, too.
        """
        dataset = self._agreed.dataset.fed(self._agreed.training)
        samples = samples if generator is None else dataset.augment(samples, generator)
        return normalise(samples, dataset.mean, dataset.std).to(self._agreed.hardware.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the server's own forward passes: the clients'."""
        return self._agreed.hardware.autocast()

    @property
    def _agreed(self) -> Setup:
        if self._setup is None:
            raise UserError("this federation was made without a setup: its network is not known")
        return self._setup

    def begin(self, step: int) -> None:
        """Start a step (the runtime does this, not methods)."""
        self._step = step
        self._calls = {}
        self.work = Work()

    def _count(self, ref: Ref[Any], target: str, task: str) -> None:
        """The one place where bytes are counted: a value crosses from its owner to its user."""
        if ref.owner in (target, EVERYONE):
            return
        try:
            size = self._transport.size(ref)
        except ClientMissing:
            self._note(Transfer(self._step, ref.owner, target, task, 0, missing=True))
            raise _no_answer([ref.owner]) from None
        self._note(Transfer(self._step, ref.owner, target, task, size))


def refs(value: Any) -> Iterable[Ref[Any]]:
    """All Refs in `value`, in order."""
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
    """`value` with every Ref replaced by what `fetch` gives for it."""
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


def live_refs(state: State) -> frozenset[Ref[Any]]:
    """The values that the rest of the run can still ask for."""
    return frozenset(ref for ref in refs(state) if ref != INITIAL)


def in_order(order: str, clients: Sequence[str], seed: int = 0) -> tuple[str, ...]:
    """All clients in an order; see `Fed.order`.

    Raises:
        UserError: an explicit order that does not name every client once.
    """
    if order == "given":
        return tuple(clients)
    if order == "reversed":
        return tuple(clients)[::-1]
    if order == "random":
        shuffled = torch.randperm(len(clients), generator=torch.Generator().manual_seed(seed))
        return tuple(clients[i] for i in shuffled.tolist())
    names = tuple(order.split(","))
    for name in names:
        if name not in clients:
            raise unknown("client or order", name, ("given", "reversed", "random", *clients))
    if sorted(names) != sorted(clients):
        raise UserError(f"--order must name each of the {len(clients)} clients once: {','.join(clients)}")
    return names


def _no_answer(clients: Iterable[str]) -> ClientMissing:
    return ClientMissing(f"{', '.join(clients)} did not answer: start them again, then `ekiden resume`")


def _is_instruction(arg: Any) -> bool:
    """A plain number, text or switch tells the client what to do; it is no content of the learning.

    So does a plain tuple of them, the weights of neighbours say.
    """
    return arg is None or isinstance(arg, (bool, int, float, str)) or (type(arg) is tuple and all(map(_is_plain, arg)))


def _is_plain(part: Any) -> bool:
    return isinstance(part, (bool, int, float, str))
