"""What a method's outer loop works with: clients to call, values to get, and the ledger of what
moved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from math import isfinite
from typing import Any, Literal, Protocol, TypeVar, get_type_hints, overload

import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.settings import Hardware, Training, derive
from ekiden.core.base.sums import Masked
from ekiden.core.data.augment import normalise
from ekiden.core.data.samples import Dataset
from ekiden.core.engine import wire
from ekiden.core.engine.transport import (
    ClientMissing,
    Request,
    Transfer,
    Transport,
    opened,
    refs,
    resolve,
)
from ekiden.core.engine.wire import EVERYONE, SERVER, Ref
from ekiden.core.tasks import Task
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Layout, Weights

K = TypeVar("K")
T = TypeVar("T")
A = TypeVar("A", bound=wire.Addable)
_CPU = torch.device("cpu")
Note = float | None | dict[str, float | None]
"""What a method notes in a step: a number, or one for each of some clients; None if it is not
finite."""


class SharedSetup(Protocol):
    """The part of a run's `Setup` that the server knows."""

    @property
    def build(self) -> Callable[[], nn.Module]:
        """Makes the network."""

    @property
    def dataset(self) -> Dataset:
        """How samples are fed."""

    @property
    def training(self) -> Training:
        """How clients train."""

    @property
    def hardware(self) -> Hardware:
        """On what."""


class Fed:
    """Clients to call, values to get and randomness: the federation as a method sees it.

    Attributes:
        clients: names of all clients, in the order given.
        work: compute of the server in this step; methods that compute at the server add to it.
        notes: what the method noted in this step, with `note`.
    """

    def __init__(
        self,
        clients: Sequence[str],
        transport: Transport,
        seed: int,
        note: Callable[[Transfer], None],
        setup: SharedSetup | None = None,
        *,
        skip: bool = True,
    ) -> None:
        self.clients = tuple(clients)
        self._known = frozenset(self.clients)
        self._note = note
        self._transport = transport
        self._seed = seed
        self._setup = setup
        self._skip = skip
        self._step = 0
        self._calls: dict[str, int] = {}
        self.work = Work()
        self.notes: dict[str, Note] = {}

    def note(self, name: str, value: float | Mapping[str, float]) -> None:
        """Report a diagnostic of this step: a number, or one for each of some clients.

        It is written to `metrics.jsonl`, `ekiden show` and the log; the run does not depend on it.
        Compute it from values of the step, so that every repetition gives the same number. Numbers
        are rounded to six digits.

        Args:
            name: what the number is, in a few words. Each name is noted once a step.
            value: the number, or numbers by the names of clients.

        Raises:
            ValueError: `name` is empty or was already noted in this step, or a number is for
                somebody who is not a client.
        """
        if not name or name in self.notes:
            raise ValueError(f"a step notes {name!r} once")
        if isinstance(value, Mapping):
            if strangers := value.keys() - self._known:
                raise ValueError(
                    f"{name!r} is noted for {sorted(strangers)}, which are not clients"
                )
            self.notes[name] = {
                client: _rounded(value[client]) for client in self.clients if client in value
            }
        else:
            self.notes[name] = _rounded(value)

    def call(self, task: Callable[..., T], client: str, *args: Any) -> Ref[T]:
        """Ask `client` to do `task` (a function of the method marked `@on_client`); returns at
        once.

        Refs among `args` (also inside tuples, lists and dataclasses) move from their owners to
        `client`.
        """
        return self._call(task, client, args)

    def call_all(self, task: Callable[..., T], *args: Any) -> tuple[Ref[T], ...]:
        """Ask every client to do `task`; see `call`."""
        return tuple(self.call(task, client, *args) for client in self.clients)

    def call_each(
        self, task: Callable[..., T], own: Sequence[Any], *args: Any
    ) -> tuple[Ref[T], ...]:
        """Ask every client to do `task`, each with its value of `own` as the first argument."""
        pairs = zip(self.clients, own, strict=True)
        return tuple(self.call(task, client, value, *args) for client, value in pairs)

    def _call(
        self,
        task: Callable[..., T],
        client: str,
        args: tuple[Any, ...],
        among: tuple[str, ...] = (),
    ) -> Ref[T]:
        """Ask `client` to do `task`; `among` are all who give a part to the sum that it is for, if
        it is for one.
        """
        request = self._request(task, client, args, among)
        self._transport.submit(request)
        return Ref(client, request.key)

    def _request(
        self, task: Callable[..., Any], client: str, args: tuple[Any, ...], among: tuple[str, ...]
    ) -> Request:
        """Return the request for a task, and count what it moves."""
        if client not in self._known:
            raise unknown("client", client, self.clients)
        name = task.__name__
        for ref in refs(args):
            self._count(ref, client, name)
        carried = sum(
            wire.size(resolve(arg, lambda _: None)) for arg in args if not _is_instruction(arg)
        )
        if carried:
            self._note(Transfer(self._step, SERVER, client, name, carried))
        call = self._calls.get(client, 0)
        self._calls[client] = call + 1
        return Request(self._step, call, client, name, args, among)

    @overload
    def get(self, wanted: Ref[T]) -> T: ...
    @overload
    def get(  # type: ignore[overload-overlap]  # a mapping whose keys are Refs is not meant
        self, wanted: Mapping[K, Ref[T]], *, at_least: int | None = None
    ) -> dict[K, T]: ...
    @overload
    def get(self, wanted: Iterable[Ref[T]], *, at_least: int | None = None) -> list[T]: ...
    def get(
        self, wanted: Ref[T] | Mapping[K, Ref[T]] | Iterable[Ref[T]], *, at_least: int | None = None
    ) -> T | dict[K, T] | list[T]:
        """Bring values to the server. They are on the CPU, as they are after a resume.

        Args:
            wanted: one Ref, several, or a mapping of them, whose keys are kept.
            at_least: with several Refs, continue if this many values came; the ledger says who was
                missing. All are needed if it is None, or if the user wants the run to stop when a
                client is missing.

        Raises:
            ClientMissing: fewer came.
        """
        if isinstance(wanted, Ref):
            return self.get([wanted])[0]
        if not isinstance(wanted, Mapping):
            return list(self.get(dict(enumerate(wanted)), at_least=at_least).values())
        return dict(self._each(wanted, at_least))

    def each(self, wanted: Iterable[Ref[T]], *, at_least: int | None = None) -> Iterator[T]:
        """Bring values to the server one after the other, like `get`, for what is added up or
        averaged.

        A value is dropped when the next one is asked for, here and where it was made: it cannot be
        used again, and memory holds one value instead of all. In one process a task runs when its
        value is asked for.
        """
        values = self._each({ref: ref for ref in wanted}, at_least)
        while (found := next(values, None)) is not None:
            ref, value = found
            del found
            yield value
            del value
            self._transport.drop(ref)

    def _each(self, wanted: Mapping[K, Ref[T]], at_least: int | None) -> Iterator[tuple[K, T]]:
        came = 0
        missing = list[str]()
        for key, ref in wanted.items():
            try:
                value = wire.placed(self._transport.value(ref), _CPU)
                self._count(ref, SERVER, "get")
            except ClientMissing:
                missing.append(ref.owner)
                self._note_missing(ref, SERVER, "get")
                continue
            came += 1
            yield key, value
            del value
        if came < (at_least if at_least is not None and self._skip else len(wanted)):
            raise _no_answer(missing)

    @overload
    def sum(
        self, task: Callable[..., T], clients: Sequence[str], *args: Any, plus: Ref[T] | None = None
    ) -> Ref[T]: ...
    @overload
    def sum(
        self, task: Callable[..., A], clients: Sequence[str], *args: Any, at: Literal["server"]
    ) -> A: ...
    def sum(
        self,
        task: Callable[..., Any],
        clients: Sequence[str],
        *args: Any,
        plus: Ref[Any] | None = None,
        at: Literal["clients", "server"] = "clients",
    ) -> Any:
        """Ask each of `clients` to do `task`, and return the sum of their results; nothing else is
        needed.

        In a chain each client gets the sum so far as its last argument (None for the first client),
        and returns it with its own part added (`Client.added`). A run continues without a missing
        client if each step calls one client.

        Between machines the parts are masked. A sum from client to client is then one of all
        clients of the run, and one that the server adds up is of `clients`. If one of them does not
        answer, nothing of it can be opened: the sum is asked for again among the others where the
        transport regroups, and otherwise the run stops.

        Args:
            task: a function of the method marked `@on_client`.
            clients: who takes part; a chain goes through them in this order.
            args: further arguments of the task.
            plus: the result of an earlier `sum`, to which this one is added.
            at: where to add up: from client to client, or at the server; then the last argument is
                None for all.

        Returns:
            The sum, which is at the last client, or its value if the server adds up. Clients that
            did not answer are left out of it, if the run may continue without them.

        Raises:
            ClientMissing: nobody answered.
        """
        if not clients:
            raise UserError("a sum needs at least one client")
        if at == "clients":
            for client in clients:
                plus = self._call(task, client, (*args, plus), self.clients)
            return plus
        total: wire.Addable | None = None
        requests = [
            self._request(task, client, (*args, None), tuple(clients)) for client in clients
        ]
        giving = self._together(requests)
        # clients may keep what follows from each sum
        at_least: int | None = 0
        method = getattr(task, "__self__", None)
        if method and not method.traits.skips:
            at_least = None
        for request in requests:
            ref: Ref[Any] = Ref(request.client, request.key)
            if ref.owner not in giving:
                self._note_missing(ref, SERVER, "get")
                continue
            # one at a time: a sum may be large
            for part in self.each([ref], at_least=at_least):
                total = part if total is None else total.plus(part)
        if total is None:
            raise _no_answer(clients)
        if isinstance(total, Masked):
            return opened(total, get_type_hints(task)["return"])
        return total

    def _together(self, requests: Sequence[Request]) -> list[str]:
        """Start tasks that give parts to a sum at the server; return who gives one.

        Where the transport regroups, no part leaves a client before all have one. Without those who
        are missing, all others are asked again, for parts of a smaller sum.
        """
        asked = list(requests)
        if not self._transport.regroups:
            for request in asked:
                self._transport.submit(request)
            return [request.client for request in asked]
        while asked:
            asked = [request for request in asked if self._transport.reachable(request.client)]
            among = tuple(request.client for request in asked)
            for request in asked:
                self._transport.submit(replace(request, among=among))
            here = [request for request in asked if self._answers(request)]
            if here == asked:
                break
            asked = here
        return [request.client for request in asked]

    def _answers(self, request: Request) -> bool:
        """Wait until a client has done a task, or is missing."""
        try:
            self._transport.size(Ref(request.client, request.key))
        except ClientMissing:
            return False
        return True

    def sample(self, k: int) -> tuple[str, ...]:
        """Draw `k` clients for this step, uniformly without replacement; they are in the order of
        `clients`.
        """
        if not 1 <= k <= len(self.clients):
            raise UserError(
                f"cannot sample {k} of {len(self.clients)} clients: choose 1 to {len(self.clients)}"
            )
        chosen = torch.randperm(len(self.clients), generator=self.generator("sample"))[:k]
        return tuple(self.clients[i] for i in sorted(chosen.tolist()))

    def order(self, order: str, round: int = 0) -> tuple[str, ...]:
        """Return all clients in the order that the user wants.

        Args:
            order: "given", "reversed", "random" (redrawn each round) or client names separated by
                commas.
            round: which round it is for.

        Raises:
            UserError: an explicit order that does not name every client once.
        """
        return in_order(order, self.clients, derive(self._seed, "order", round))

    def generator(self, purpose: str) -> torch.Generator:
        """Randomness of the server in this step, for one purpose."""
        return torch.Generator().manual_seed(derive(self._seed, self._step, SERVER, purpose))

    @property
    def task(self) -> Task:
        """What the labels mean."""
        return self._agreed.dataset.task

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
    def _agreed(self) -> SharedSetup:
        if self._setup is None:
            raise UserError("this federation was made without a setup: its network is not known")
        return self._setup

    @property
    def called(self) -> Iterable[str]:
        """Return the clients that were called in this step."""
        return self._calls.keys()

    def begin(self, step: int) -> None:
        """Start a step (the runtime does this, not methods)."""
        self._step = step
        self._calls = {}
        self.work = Work()
        self.notes = {}

    def _count(self, ref: Ref[Any], target: str, task: str) -> None:
        """The one place where bytes are counted: a value crosses from its owner to its user."""
        if ref.owner in (target, EVERYONE):
            return
        try:
            size = self._transport.size(ref)
        except ClientMissing:
            self._note_missing(ref, target, task)
            raise _no_answer([ref.owner]) from None
        self._note(Transfer(self._step, ref.owner, target, task, size, value=ref.key))

    def _note_missing(self, ref: Ref[Any], target: str, task: str) -> None:
        lost = Transfer(self._step, ref.owner, target, task, 0, missing=True, value=ref.key)
        self._note(lost)


def in_order(order: str, clients: Sequence[str], seed: int = 0) -> tuple[str, ...]:
    """All clients in an order; see `Fed.order`."""
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
        raise UserError(
            f"--order must name each of the {len(clients)} clients once: {','.join(clients)}"
        )
    return names


def _rounded(number: float) -> float | None:
    if isfinite(number):
        return float(f"{number:.6g}")
    return None


def _no_answer(clients: Iterable[str]) -> ClientMissing:
    return ClientMissing(
        f"{', '.join(clients)} did not answer: start them again, then `ekiden resume`"
    )


def _is_instruction(arg: Any) -> bool:
    """A plain number, text or switch tells the client what to do; it carries nothing that is
    learned.

    A plain tuple of such values does the same, for example the weights of neighbours.
    """
    parts = arg if type(arg) is tuple else [arg]
    return arg is None or all(isinstance(part, (bool, int, float, str)) for part in parts)
