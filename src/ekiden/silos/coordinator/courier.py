"""Send messages to silos, repeat lost ones, and wait for answers as long as the user allows."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.transport import ClientMissing
from ekiden.silos.security import Say
from ekiden.silos.trust.parcel import Answer, Ask, pack, said, unpack
from ekiden.silos.trust.sealing import Reader

Absent = Literal["wait", "skip", "stop"]
# seconds without an answer before a silo is asked whether it works; doubled each time, up to
# tenfold
_PROBE = 60.0


@dataclass(frozen=True)
class Lost:
    """A message that will get no answer."""

    # the reason, one line
    why: str


class Post(Protocol):
    """Carries byte strings to silos and their answers back. It may lose them, but reports that."""

    def send(self, client: str, data: bytes) -> str | Lost:
        """Send a message, and return the name of its ticket."""

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """Return the answers that have come."""

    def reader(self, client: str) -> Reader | None:
        """Return the silo with the key that it gave when it introduced itself; None if it is not
        connected.
        """

    def anyone(self) -> bool:
        """Return whether any silo is connected."""


@dataclass(frozen=True)
class Crossing:
    """A message from SuperLink to silo and its answer: a row of network.jsonl."""

    # the silo
    client: str
    # task, value, evaluate or status
    kind: str
    # bytes to the silo
    sent: int
    # bytes from it
    received: int
    # seconds for which the silo was away in between
    waited: float = 0.0


@dataclass
class Patience:
    """How long to wait for silos that do not answer."""

    # time since the last sign of life after which a client counts as missing
    seconds: float = 3600.0
    # longest time in seconds between two looks at the post. It begins at a tenth, so that a quick
    # answer is seen at
    # once.
    poll: float = 1.0
    # what to do about a missing client: wait without end, skip it, or stop the run
    absent: Absent = "stop"

    def pause(self, since: float) -> float:
        """Return the seconds until the next look for an answer awaited since then: a fortieth of
        the time so far.
        """
        return min(self.poll, max(self.poll / 10, (time.monotonic() - since) / 40))

    def ended(self, since: float) -> bool:
        """Return whether a client whose last sign of life was at `since` counts as missing."""
        return self.absent != "wait" and time.monotonic() - since > self.seconds


@dataclass
class Message:
    """A request without an answer so far."""

    client: str
    kind: str
    data: bytes
    ticket: str | Lost
    # time since which all attempts were lost
    since: float | None = None
    # seconds of such times before
    waited: float = 0.0
    # ticket of the question whether the silo is working on it
    probe: str = ""
    probe_after: float = field(default_factory=lambda: _PROBE)
    probed: float = field(default_factory=time.monotonic)
    answer: tuple[Answer, memoryview] | ClientMissing | None = None


@dataclass
class Courier:
    """Sends messages until they are answered or patience ends. Sending again is harmless: silos do
    nothing twice.

    The engine reports messages to silos that are gone, but not messages that were cut off on the
    way. So a silo that does not answer for long is asked from time to time whether it is working.
    If not, it gets the message again.
    """

    post: Post
    patience: Patience
    note: Callable[[Crossing], None]
    warn: Say
    _open: list[Message] = field(default_factory=list)
    # time of the last sign of life; since then all was lost
    _silent: dict[str, float] = field(default_factory=dict)

    def send(self, client: str, ask: Ask, body: Sequence[bytes | memoryview] = ()) -> Message:
        """Send a request; `wait` gives the answer."""
        data = pack(ask, body)
        message = Message(client, ask.kind, data, self.post.send(client, data))
        self._open.append(message)
        return message

    def wait(self, message: Message) -> tuple[Answer, memoryview]:
        """Wait for the answer, and return it with its body; answers to other messages are received
        in the meantime.

        Raises:
            ClientMissing: patience ended.
        """
        began = time.monotonic()
        while message.answer is None:
            if not self._look() and message.answer is None:
                time.sleep(self.patience.pause(began))
        if isinstance(message.answer, ClientMissing):
            raise message.answer
        answer, body = message.answer
        if answer.error:
            raise UserError(f"silo {message.client}: {said(answer.error)}")
        return answer, body

    def reader(self, client: str) -> Reader:
        """Return a silo with its key; wait until it is connected.

        Raises:
            ClientMissing: patience ended.
        """
        found = self.post.reader(client)
        while found is None:
            self._gone(client, "not connected")
            time.sleep(self.patience.poll)
            found = self.post.reader(client)
            if found is not None:
                self._alive(client)
        return found

    def _look(self) -> bool:
        """Receive what has come, send again what was lost, and return whether anything has come."""
        came = self.post.receive([m.ticket for m in self._open if isinstance(m.ticket, str)])
        for message in list(self._open):
            got = message.ticket if isinstance(message.ticket, Lost) else came.get(message.ticket)
            if isinstance(got, Lost):
                self._lost(message, got)
            elif got is not None:
                self._take(message, got)
            else:
                self._probe(message)
        return any(isinstance(got, bytes) for got in came.values())

    def _probe(self, message: Message) -> None:
        """Find out whether a message without an answer was cut off on the way."""
        if message.probe:
            got = self.post.receive([message.probe]).get(message.probe)
            if got is not None:
                message.probe = ""
            if isinstance(got, bytes):
                self._alive(message.client)
                if not _read(message.client, got)[0].busy:
                    self.warn(f"{message.client} does not work on what it was asked: sending again")
                    message.ticket = self.post.send(message.client, message.data)
        if (
            time.monotonic() - message.probed > message.probe_after
        ):  # the last question may have been cut off too
            ask, _ = unpack(message.data, Ask)
            ticket = self.post.send(message.client, pack(Ask("status", ask.agreement)))
            message.probe = ticket if isinstance(ticket, str) else ""
            message.probed = time.monotonic()
            message.probe_after = min(2 * message.probe_after, 10 * _PROBE)

    def _take(self, message: Message, got: bytes) -> None:
        self._alive(message.client)
        self._open.remove(message)
        waited = round(message.waited, 1)
        self.note(Crossing(message.client, message.kind, len(message.data), len(got), waited))
        message.answer = _read(message.client, got)
        message.data = b""

    def _lost(self, message: Message, lost: Lost) -> None:
        if message.since is None:
            message.since = time.monotonic()
        # to learn soon that a silo is back
        message.probe_after = _PROBE
        try:
            self._gone(message.client, lost.why)
        except ClientMissing as missing:
            self._open.remove(message)
            message.answer = missing
            return
        away = isinstance(message.ticket, Lost)
        message.ticket = self.post.send(message.client, message.data)
        if away and isinstance(message.ticket, str):
            # it is connected again
            self._alive(message.client)

    def _alive(self, client: str) -> None:
        """Restart patience with a silo: it gave a sign of life."""
        self._silent.pop(client, None)
        for message in self._open:
            if message.client == client and message.since is not None:
                message.waited += time.monotonic() - message.since
                message.since = None

    def _gone(self, client: str, why: str) -> None:
        """Wait for a silo that gives no sign of life, as long as patience lasts.

        Raises:
            ClientMissing: patience ended.
        """
        if client not in self._silent:
            self._silent[client] = time.monotonic()
            self.warn(f"{client} does not answer ({why}): sending again")
        if not self.patience.ended(self._silent[client]):
            return
        seconds = f"{self.patience.seconds:.0f} s"
        if self.patience.absent == "skip":
            if not self.post.anyone():
                raise UserError(
                    f"no silo was connected for {seconds}: check the SuperLink, then `ekiden "
                    "resume`"
                )
            self.warn(f"{client} did not answer for {seconds}: going on without it (--absent skip)")
        raise ClientMissing(
            f"{client} did not answer for {seconds}: start it, then `ekiden resume`"
        )


def _read(client: str, data: bytes) -> tuple[Answer, memoryview]:
    """Return a silo's answer."""
    try:
        answer, body = unpack(data, Answer)
    except wire.WireError as error:
        raise UserError(
            f"silo {client} sent an unreadable answer ({error}): install the same Ekiden there"
        ) from None
    if answer.silo != client:
        raise UserError(f"{answer.silo[:40]!r} answered for {client}: give each silo its own name")
    return answer, body
