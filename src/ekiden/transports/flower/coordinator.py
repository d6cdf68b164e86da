"""The transport between machines: tasks, values and evaluations as messages.

A value travels from its owner to its user through the coordinator as bytes that the coordinator does not read, unless
the method itself brings it to the server (`fed.get`) or it is the result.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ekiden.core import wire
from ekiden.core.federation import ClientMissing, Request, live_refs, refs
from ekiden.core.method import EVERYONE, INITIAL, Method, Ref, State
from ekiden.core.worker import payload_types
from ekiden.errors import UserError
from ekiden.evaluation import consensus
from ekiden.learning.fit import Work
from ekiden.learning.weights import Weights
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.parcel import Answer, Ask, Count, Part, pack, unpack


@dataclass(frozen=True)
class Lost:
    """A message that will not be answered.

    Attributes:
        why: one line.
    """

    why: str


class Post(Protocol):
    """Carries byte strings to silos and their answers back. May lose them, but says so."""

    def send(self, client: str, data: bytes) -> str | Lost:
        """Send a message; returns the name of its ticket."""

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """The answers that are there by now."""


@dataclass(frozen=True)
class Crossing:
    """One message and its answer on the network: a row of network.jsonl.

    Attributes:
        client: the silo.
        kind: task, value or evaluate.
        sent: bytes to the silo.
        received: bytes from it.
    """

    client: str
    kind: str
    sent: int
    received: int


@dataclass
class Patience:
    """How long to wait for silos that do not answer.

    Attributes:
        seconds: since the last sign of life, before a client counts as missing.
        poll: seconds between looks at the post.
    """

    seconds: float = 3600.0
    poll: float = 1.0


@dataclass
class _Message:
    client: str
    kind: str
    data: bytes
    ticket: str | Lost
    since: float | None = None  # since when nothing but losses
    answer: tuple[Answer, bytes] | ClientMissing | None = None


class Courier:
    """Sends messages until they are answered or patience ends. Sending again is harmless: silos do nothing twice."""

    def __init__(
        self, post: Post, patience: Patience, note: Callable[[Crossing], None], warn: Callable[[str], None]
    ) -> None:
        self._post = post
        self._patience = patience
        self._note = note
        self._warn = warn
        self._open: list[_Message] = []

    def send(self, client: str, ask: Ask, body: Sequence[bytes] = ()) -> _Message:
        """Send a request; `wait` gives the answer."""
        data = pack(ask, body)
        message = _Message(client, ask.kind, data, self._post.send(client, data))
        self._open.append(message)
        return message

    def wait(self, message: _Message) -> tuple[Answer, bytes]:
        """The answer and what came with it; other messages are answered meanwhile.

        Raises:
            ClientMissing: patience ended.
            UserError: the silo refused.
        """
        while message.answer is None:
            if not self._look() and message.answer is None:
                time.sleep(self._patience.poll)
        if isinstance(message.answer, ClientMissing):
            raise message.answer
        answer, body = message.answer
        if answer.error:
            raise UserError(f"silo {message.client}: {answer.error}")
        return answer, body

    def _look(self) -> bool:
        """Take in what has come and send again what was lost; whether anything has come."""
        came = self._post.receive([m.ticket for m in self._open if isinstance(m.ticket, str)])
        for message in list(self._open):
            got = message.ticket if isinstance(message.ticket, Lost) else came.get(message.ticket)
            if isinstance(got, Lost):
                self._lost(message, got)
            elif got is not None:
                self._open.remove(message)
                self._note(Crossing(message.client, message.kind, len(message.data), len(got)))
                answer, body = unpack(got, Answer)
                if answer.silo != message.client:
                    raise UserError(f"{answer.silo[:40]!r} answered for {message.client}: give each silo its own name")
                message.answer = answer, body
                message.data = b""
        return any(isinstance(got, bytes) for got in came.values())

    def _lost(self, message: _Message, lost: Lost) -> None:
        now = time.monotonic()
        if message.since is None:
            message.since = now
            self._warn(f"{message.client} does not answer ({lost.why}): sending again")
        if now - message.since > self._patience.seconds:
            self._open.remove(message)
            message.answer = ClientMissing(
                f"{message.client} did not answer for {self._patience.seconds:.0f} s: start it, then `ekiden resume`"
            )
            return
        message.ticket = self._post.send(message.client, message.data)


class Remote:
    """A transport whose clients are silos elsewhere."""

    def __init__(
        self, courier: Courier, method: Method, agreed: Agreement, initial: Callable[[], Weights], state: State
    ) -> None:
        self._courier = courier
        self._method = method
        self._agreed = agreed.text()
        self._initial = initial
        self._running: dict[Ref[Any], _Message] = {}
        self._last: dict[str, Ref[Any]] = {}
        self._sizes: dict[Ref[Any], int] = {}
        self._bytes: dict[Ref[Any], bytes] = {}
        self._read_by_server: set[str] = set()
        self._live = live_refs(state)
        self._settled = (state.step, self._live)
        self._asked: dict[Ref[Any], _Message] = {}
        self._step = state.step
        self._work = Work()

    def submit(self, request: Request) -> None:
        """Send a task with the values that it needs, after the client's earlier tasks of this step."""
        if request.client in self._last:
            self._finish(self._last[request.client])
        foreign = [r for r in dict.fromkeys(refs(request.args)) if r.owner not in (request.client, EVERYONE)]
        for ref in foreign:
            self._order(ref)
        values = [self._fetch(ref) for ref in foreign]
        arguments = wire.encode(request.args)
        parts = tuple(Part(r.owner, r.key, len(v)) for r, v in zip(foreign, values, strict=True))
        ask = self._ask(
            "task",
            request.client,
            step=request.step,
            call=request.call,
            task=request.task,
            parts=parts,
            length=len(arguments),
            eager=request.task in self._read_by_server,
        )
        result: Ref[Any] = Ref(request.client, request.key)
        self._running[result] = self._courier.send(request.client, ask, (arguments, *values))
        self._last[request.client] = result

    def value(self, ref: Ref[Any]) -> Any:
        """The value behind `ref`, brought here."""
        if ref == INITIAL:
            return self._initial()
        task = ref.key.split("-", 2)[2]
        if ref in self._running:
            self._read_by_server.add(task)  # the next ones may send it at once
        return wire.decode(self._fetch(ref), payload_types(self._method, task)[1])

    def size(self, ref: Ref[Any]) -> int:
        """Its content in bytes, as its owner says."""
        if ref == INITIAL:
            return wire.size(self._initial())
        self._finish(ref)
        if ref not in self._sizes:
            self._fetch(ref)
        return self._sizes[ref]

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Work:
        """Wait for all tasks: their outcomes are on the silos' disks by then."""
        for ref in list(self._running):
            try:
                self._finish(ref)
            except ClientMissing:
                if ref in live:
                    raise
                del self._running[ref]
        self._live = live
        self._last = {}
        self._settled = (self._settled[0], self._settled[1] | live)  # until the state is written, keep both
        self._step = step
        self._bytes = {ref: value for ref, value in self._bytes.items() if ref in live}
        self._sizes = {ref: size for ref, size in self._sizes.items() if ref in live}
        work, self._work = self._work, Work()
        return work

    def settle(self) -> None:
        """From now on silos may drop what only the state before needed; the next request tells them."""
        self._settled = (self._step, self._live)

    def close(self) -> None:
        """Nothing to release: silos keep what a resumed run would ask for."""

    def evaluate(self, clients: Sequence[str], models: Sequence[Weights], results: int) -> list[list[Count]]:
        """What each silo counts for each model on its own test samples. No part of the method's communication."""
        body = wire.encode(list(models))
        messages = [
            self._courier.send(c, self._ask("evaluate", c, results=results, clients=len(clients)), (body,))
            for c in clients
        ]
        counts = []
        for message in messages:
            _, answer = self._courier.wait(message)
            found = wire.decode(answer, list[Count])
            if len(found) != len(models):
                raise UserError(f"silo {message.client} measured {len(found)} of {len(models)} models")
            counts.append(found)
        return counts

    def _ask(self, kind: str, client: str, **changes: Any) -> Ask:
        steps, live = self._settled
        keep = tuple(sorted(ref.key for ref in live if ref.owner == client))
        return replace(Ask(kind, self._agreed, settled=steps, keep=keep), **changes)

    def _order(self, ref: Ref[Any]) -> None:
        """Ask for a value without waiting for it, so that several come at once."""
        self._finish(ref)
        if ref not in self._bytes and (ref not in self._asked or self._asked[ref].answer is not None):
            self._asked[ref] = self._courier.send(ref.owner, self._ask("value", ref.owner, key=ref.key))

    def _fetch(self, ref: Ref[Any]) -> bytes:
        """The value behind `ref` as its owner encoded it."""
        if ref not in self._bytes:
            self._order(ref)
        if ref not in self._bytes:
            answer, value = self._courier.wait(self._asked.pop(ref))
            self._bytes[ref], self._sizes[ref] = value, answer.size
        return self._bytes[ref]

    def _finish(self, ref: Ref[Any]) -> None:
        """Wait for the task behind `ref`, if it runs."""
        message = self._running.get(ref)
        if message is None:
            return
        answer, value = self._courier.wait(message)
        del self._running[ref]
        self._sizes[ref] = answer.size
        if value:
            self._bytes[ref] = value
        self._work.add(Work(answer.forward, answer.backward))


class SiloTests:
    """Measures models on the test samples of all silos, which stay where they are."""

    def __init__(self, remote: Remote, clients: Sequence[str]) -> None:
        self._remote = remote
        self._clients = clients

    def __call__(self, model: Weights | None, personal: list[Weights]) -> dict[str, Any]:
        """The row of metrics, as `ekiden.evaluation.TestSet` gives it on one machine."""
        shared = [] if model is None else [model]
        models = shared + personal
        if not models:
            return {}
        counts = self._remote.evaluate(self._clients, models, len(shared))
        samples = sum(row[0].samples for row in counts)
        if not samples:
            return {}
        accuracy = [sum(row[m].right for row in counts) / samples for m in range(len(models))]
        loss = [sum(row[m].loss for row in counts) / samples for m in range(len(models))]
        first = len(shared) if personal else 0
        own = [row[first + i if personal else 0] for i, row in enumerate(counts)]
        accuracies = [c.right / c.samples if c.samples else None for c in own]
        row: dict[str, Any] = {
            "accuracy": sum(accuracy[first:]) / len(accuracy[first:]),
            "loss": sum(loss[first:]) / len(loss[first:]),
        }
        known = torch.tensor([a for a in accuracies if a is not None], dtype=torch.float64)
        row["client_mean"] = float(known.mean())
        row["client_std"] = float(known.std(correction=0))
        row["client_worst"] = float(known.min())
        row["client_decile"] = float(known.quantile(0.1))
        row["clients"] = accuracies
        if personal and shared:
            row["global_accuracy"], row["global_loss"] = accuracy[0], loss[0]
        if personal:
            row["consensus"] = consensus(personal)
        return row
