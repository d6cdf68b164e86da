"""The roll call: find out which node is which silo. Nodes have random numbers; silos prove their names."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ekiden.base.errors import UserError
from ekiden.engine import wire
from ekiden.engine.folder import code_version
from ekiden.engine.transport import ClientMissing
from ekiden.transports.flower import keys
from ekiden.transports.flower.courier import Lost, Patience, SealingKey
from ekiden.transports.flower.parcel import Answer, Ask, Hello, pack, said, signed_text, unpack

_GREET_AGAIN = 600.0
"""seconds without an answer"""


class Nodes(Protocol):
    """The engine: numbered nodes, and byte strings to and from them."""

    def ids(self) -> Sequence[int]:
        """Return the nodes that are connected now."""

    def send(self, node: int, data: bytes) -> str | Lost:
        """Send a message, and return the name of its ticket."""

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """Return the answers that have come; each answer is returned once."""

    def overhead(self, length: int) -> int:
        """Return the number of bytes that the engine adds to a byte string of this length."""


class Roll:
    """A post that addresses silos by name."""

    def __init__(
        self,
        nodes: Nodes,
        clients: Sequence[str],
        public_keys: Mapping[str, str],
        patience: Patience,
        warn: Callable[[str], None],
    ) -> None:
        self._nodes = nodes
        self._clients = clients
        self._keys = public_keys
        self._patience = patience
        self._warn = warn
        self._terms = ""
        self._greeted: dict[int, str] = {}
        self._pending: dict[str, tuple[int, str, float]] = {}
        self._silos: dict[str, tuple[int, Hello]] = {}
        self._known: dict[int, str] = {}  # nodes that proved their names, and so are told the terms
        self._reasons: dict[str, str] = {}  # the silos' reasons for not taking part

    def gather(self, *, all_of_them: bool = True) -> dict[str, Hello]:
        """Wait until every client is connected.

        Args:
            all_of_them: wait for all clients; if False, one client is enough after the usual patience.

        Raises:
            ClientMissing: patience ended.
        """
        since, told = time.monotonic(), 0.0
        while True:
            self._call()
            absent = [c for c in self._clients if c not in self._silos]
            waited = time.monotonic() - since
            if not absent or (not all_of_them and self._silos and self._patience.ended(since)):
                return {c: self._silos[c][1] for c in self._clients if c in self._silos}
            if self._patience.ended(since):
                raise ClientMissing(
                    f"{self._with_reasons(absent)} did not come: run `ekiden silo start silo.toml` there and retry"
                )
            if waited > told + 30:
                told = waited
                self._warn(f"waiting for {self._with_reasons(absent)}")
            time.sleep(self._patience.poll)

    def _with_reasons(self, absent: Sequence[str]) -> str:
        said = {name: f" (it said: {self._reasons[name]})" if name in self._reasons else "" for name in absent}
        return ", ".join(f"{name}{reason}" for name, reason in said.items())

    def introduce(self, terms: str) -> None:
        """From now on, ask silos that proved their names whether they agree to these terms; `gather` waits for all."""
        self._terms = terms
        self._known = {node: name for name, (node, _) in self._silos.items()}
        again = {*self._known, *(node for node, _, _ in self._pending.values())}
        self._greeted = {node: name for node, name in self._greeted.items() if node not in again}
        self._silos, self._pending = {}, {}

    def send(self, client: str, data: bytes) -> str | Lost:
        """Send to the node that is now `client`."""
        if client not in self._silos or self._silos[client][0] not in self._nodes.ids():
            self._call()
        if client not in self._silos:
            return Lost("not connected")
        return self._nodes.send(self._silos[client][0], data)

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """Return the answers that have come."""
        return self._nodes.receive(tickets) if tickets else {}

    def sealing_key(self, client: str) -> SealingKey | None:
        """Return the key that the silo gave when it introduced itself; None if it is not connected."""
        if client not in self._silos:
            self._call()
        if client not in self._silos:
            return None
        hello = self._silos[client][1]
        return SealingKey(hello.sealing, hello.proof)

    def anyone(self) -> bool:
        """Return whether any silo is connected."""
        return any(node in self._nodes.ids() for node, _ in self._silos.values())

    def overhead(self, length: int) -> int:
        """Return the number of bytes that the engine adds to a byte string of this length."""
        return self._nodes.overhead(length)

    def _call(self) -> None:
        """Greet new nodes, and receive their answers."""
        present = set(self._nodes.ids())
        self._greeted = {node: name for node, name in self._greeted.items() if node in present}
        self._silos = {name: silo for name, silo in self._silos.items() if silo[0] in present}
        self._known = {node: name for node, name in self._known.items() if node in present}
        for node in sorted(present - set(self._greeted)):
            nonce = secrets.token_hex(16)
            terms = self._terms if node in self._known else ""
            ticket = self._nodes.send(node, pack(Ask("hello", terms, nonce)))
            if isinstance(ticket, str):
                self._greeted[node] = ""
                self._pending[ticket] = (node, nonce, time.monotonic())
        for ticket, data in self._nodes.receive(list(self._pending)).items() if self._pending else ():
            node, nonce, _ = self._pending.pop(ticket)
            if isinstance(data, Lost):
                self._greeted.pop(node, None)  # greet it again
            else:
                self._meet(node, nonce, data)

        for ticket, (node, _, since) in list(self._pending.items()):
            if time.monotonic() - since > _GREET_AGAIN:  # the message was cut off on the way
                del self._pending[ticket]
                self._greeted.pop(node, None)

    def _meet(self, node: int, nonce: str, data: bytes) -> None:
        """Believe only what a node proves. No message of a node can end the run of the others."""
        try:
            answer, body = unpack(data, Answer)
            hello: Hello | None = None if answer.error else wire.decode(body, Hello)
        except wire.WireError as error:
            self._warn(f"a node sent an unreadable answer, maybe from another version of Ekiden ({error}): ignored")
            return
        name = answer.silo[:80]
        if hello is None and self._known.get(node) == name:
            raise UserError(f"silo {name}: {said(answer.error)}")
        if hello is None:
            self._reasons[name] = said(answer.error, 300)
            self._warn(f"silo {name!r} cannot take part: {said(answer.error)}")
        elif name not in self._clients:
            self._warn(f"silo {name!r} is connected, but not among --clients: ignored")
        elif name in self._keys and not keys.proves(self._keys[name], signed_text(nonce, name), hello.signature):
            self._warn(f"a node says it is {name!r} but does not hold the key of {name!r}: ignored")
        elif name in self._silos:
            raise UserError(f"two silos are called {name!r}: give each its own name in its silo.toml")
        elif hello.version != code_version():
            raise UserError(
                f"silo {name!r} has Ekiden {said(hello.version, 40)}, here is {code_version()}: install the same commit"
            )
        elif self._terms and node not in self._known:
            self._known[node] = name
            del self._greeted[node]  # greet it again, with the terms
        else:
            self._greeted[node] = name
            self._reasons.pop(name, None)
            self._silos[name] = (node, hello)
