"""Run Flower's SuperLink with two ports: one for silos, and one on loopback for the coordinator.

Flower 1.41 serves everything on one port: the Fleet API, which SuperNodes need; the Control API, which registers keys,
submits runs and shows their logs; and the Runtime API of the submitted apps. Anyone who reaches one of them reaches
all. Here `flower-superlink` itself stays on loopback, and a second port forwards only requests to the Fleet API.

Flower reads the whole body of a request before it looks at who sent it. The second port looks first: at the signature
in the headers, which needs no body. It also bounds connections, and the time until their first request.
"""

import asyncio
import importlib
import ipaddress
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
FLEET = "/v1/fleet/"
"""prefix of the Fleet API's paths"""


_CONNECTIONS = 1024
"""connections at the silos' port"""
_EACH = 64
"""of these from one address, behind which several silos may be"""
_FIRST = 20.0
"""seconds until the first request of a connection has arrived"""
_LOOK = 5.0
"""seconds between looks at SuperExec"""


class FleetOnly:
    """Forwards requests to the Fleet API to an app, and answers all others with 404, even if the app knows them.

    Requests that no registered silo signed are answered with 401, and their bodies are not read.
    """

    def __init__(self, app: App, known: Callable[[bytes], bool] | None = None) -> None:
        """Make the gate.

        Args:
            app: the SuperLink.
            known: whether a public key is that of a registered silo; None lets everybody in.
        """
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] != "http":  # no web sockets, and no start or end of the app: the other port handles those
            return
        if not str(scope["path"]).startswith(FLEET):
            await _refuse(send, 404, b"this port is for silos only\n")
        elif self._known is not None and not await asyncio.to_thread(signed, dict(scope["headers"]), self._known):
            await _refuse(send, 401, b"no registered silo signed this request\n")
        else:
            await self._app(scope, receive, send)


async def _refuse(send: Send, status: int, why: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": why})


def signed(headers: Mapping[bytes, bytes], known: Callable[[bytes], bool]) -> bool:
    """Return whether a registered silo signed the time in these headers, as Flower checks it after the body is read."""
    try:
        public = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
        time = headers[TIMESTAMP_HEADER.encode()]
        age = (now() - datetime.fromisoformat(time.decode())).total_seconds()
        recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        return recent and known(public) and verify_signature(bytes_to_public_key(public), time, signature)
    except (KeyError, ValueError, TypeError):
        return False


def guarded(most: int = _CONNECTIONS, each: int = _EACH, seconds: float = _FIRST) -> type[H11Protocol]:
    """Return a protocol for uvicorn that bounds connections.

    Args:
        most: largest number of connections.
        each: largest number from one address.
        seconds: time in which the first request of a connection must have arrived.
    """
    connections: Counter[str] = Counter()

    class Guarded(H11Protocol):  # type: ignore[misc]  # uvicorn is not checked
        """HTTP over a connection that is counted."""

        host = ""

        def connection_made(self, transport: Any) -> None:
            host = str((transport.get_extra_info("peername") or ("?",))[0])
            if connections.total() >= most or connections[host] >= each:
                transport.abort()
                return
            self.host = host
            connections[host] += 1
            super().connection_made(transport)
            self.loop.call_later(seconds, self._expire)

        def _expire(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.host:
                connections[self.host] -= 1
                super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.host:
                super().data_received(data)

    return Guarded


def serve(fleet: str) -> None:
    """Run `flower-superlink` with the flags in `sys.argv`, on loopback, and its Fleet API at `fleet`, HOST:PORT."""
    # We import by name: in its package, a function of the same name hides the module.
    superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    lifespans: list[Any] = []

    class Watched(superlink.SuperLinkLifespan):  # type: ignore[misc]  # Flower is not checked
        """The SuperLink's state, which also has the process that starts runs."""

        def startup(self) -> None:
            lifespans.append(self)
            super().startup()

    superlink.SuperLinkLifespan = Watched
    superlink.uvicorn = SimpleNamespace(run=partial(run, fleet, lifespans=lifespans))
    sys.argv[0] = "flower-superlink"
    superlink.flower_superlink()


def run(fleet: str, app: App, host: str, lifespans: Sequence[Any] = (), **options: Any) -> None:
    """Serve `app` at `host`, like `uvicorn.run`, and its Fleet API also at `fleet`; exit if `host` is not loopback."""
    if not ipaddress.ip_address(host).is_loopback:
        sys.exit(f"ekiden: the Control API stays on loopback: --host 127.0.0.1, not {host}")
    outside, _, port = fleet.rpartition(":")
    others = options | {"port": int(port), "lifespan": "off", "http": guarded(), "ws": "none"}
    known = partial(_registered, app) if "--enable-supernode-auth" in sys.argv else None
    outer = uvicorn.Config(FleetOnly(app, known), host=outside.strip("[]"), **others)
    with suppress(KeyboardInterrupt):
        asyncio.run(_together(lifespans, uvicorn.Config(app, host=host, **options), outer))


def _registered(app: Any, public_key: bytes) -> bool:
    found: int | None = app.state.linkstate_factory.state().get_node_id_by_public_key(public_key)
    return found is not None


async def _together(lifespans: Sequence[Any], *configs: uvicorn.Config) -> None:
    """Serve until one of the servers ends, then end the others."""
    servers = [uvicorn.Server(config) for config in configs]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    watch = asyncio.create_task(keep_superexec(lifespans))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


async def keep_superexec(lifespans: Sequence[Any], seconds: float = _LOOK) -> None:
    """Start SuperExec again whenever it ends; without it, runs stay pending for ever."""
    while True:
        await asyncio.sleep(seconds)
        for lifespan in lifespans:
            process = lifespan.superexec_process
            if process is not None and (code := process.poll()) is not None:
                print(f"ekiden: flower-superexec ended with code {code}: starting it again", flush=True)
                lifespan._start_superexec_if_needed()


if __name__ == "__main__":
    serve(sys.argv.pop(1))
