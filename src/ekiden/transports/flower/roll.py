"""The roll call: which node is which silo. Nodes have random numbers; silos have the names that they prove."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ekiden._version import __version__
from ekiden.core import wire
from ekiden.core.federation import ClientMissing
from ekiden.errors import UserError
from ekiden.transports.flower import keys
from ekiden.transports.flower.coordinator import Lost, Patience
from ekiden.transports.flower.parcel import Answer, Ask, Hello, pack, signed_text, unpack


class Nodes(Protocol):
    """The engine: nodes with numbers, and byte strings to and from them."""

    def ids(self) -> Sequence[int]:
        """The nodes that are connected now."""

    def send(self, node: int, data: bytes) -> str | Lost:
        """Send a message; returns the name of its ticket."""

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """The answers that are there by now; an answer is given once."""


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
        self._greeted: dict[int, str] = {}
        self._pending: dict[str, tuple[int, str]] = {}
        self._silos: dict[str, tuple[int, Hello]] = {}

    def gather(self) -> dict[str, Hello]:
        """Wait until every client is there.

        Raises:
            ClientMissing: patience ended.
            UserError: two silos have one name, a silo is of another version, or does not hold its key.
        """
        since, told = time.monotonic(), 0.0
        while True:
            self._call()
            absent = [c for c in self._clients if c not in self._silos]
            if not absent:
                return {c: self._silos[c][1] for c in self._clients}
            waited = time.monotonic() - since
            if waited > self._patience.seconds:
                raise ClientMissing(
                    f"{', '.join(absent)} did not come: `ekiden silo start silo.toml` there, then again"
                )
            if waited > told + 30:
                told = waited
                self._warn(f"waiting for {', '.join(absent)}")
            time.sleep(self._patience.poll)

    def send(self, client: str, data: bytes) -> str | Lost:
        """Send to the node that is `client` now."""
        if client not in self._silos or self._silos[client][0] not in self._nodes.ids():
            self._call()
        if client not in self._silos:
            return Lost("not connected")
        return self._nodes.send(self._silos[client][0], data)

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """The answers that are there by now."""
        return self._nodes.receive(tickets) if tickets else {}

    def _call(self) -> None:
        """Greet new nodes, and take in who answered."""
        present = set(self._nodes.ids())
        self._greeted = {node: name for node, name in self._greeted.items() if node in present}
        self._silos = {name: silo for name, silo in self._silos.items() if silo[0] in present}
        for node in sorted(present - set(self._greeted)):
            nonce = secrets.token_hex(16)
            ticket = self._nodes.send(node, pack(Ask("hello", nonce=nonce)))
            if isinstance(ticket, str):
                self._greeted[node] = ""
                self._pending[ticket] = (node, nonce)
        for ticket, data in self._nodes.receive(list(self._pending)).items() if self._pending else ():
            node, nonce = self._pending.pop(ticket)
            if isinstance(data, Lost):
                self._greeted.pop(node, None)  # greet it again
            else:
                self._meet(node, nonce, data)

    def _meet(self, node: int, nonce: str, data: bytes) -> None:
        """Believe a node what it proves; whatever a node says, it cannot end the run of the others."""
        try:
            answer, body = unpack(data, Answer)
            hello: Hello | None = None if answer.error else wire.decode(body, Hello)
        except wire.WireError as error:
            self._warn(f"a node answers unreadably, maybe of another version of Ekiden ({error}): it is given nothing")
            return
        name = answer.silo[:80]
        if hello is None:
            self._warn(f"silo {name!r} cannot take part: {answer.error}")
        elif name not in self._clients:
            self._warn(f"silo {name!r} is connected, but not among --clients: it is given nothing")
        elif name in self._keys and not keys.proves(self._keys[name], signed_text(nonce, name), hello.signature):
            self._warn(f"a node says it is {name!r} but does not hold the key of {name!r}: it is given nothing")
        elif name in self._silos:
            raise UserError(f"two silos are called {name!r}: give each its own name in its silo.toml")
        elif hello.version != __version__:
            raise UserError(
                f"silo {name!r} has Ekiden {hello.version}, here is {__version__}: install the same version"
            )
        else:
            self._greeted[node] = name
            self._silos[name] = (node, hello)
