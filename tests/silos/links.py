"""A port behind its gate, and requests to it."""

import socket
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from ekiden.silos.ports import guarded
from ekiden.silos.superlink import FleetOnly

PATH = "/v1/fleet/push-object"


class App:
    """Stands for the SuperLink: counts requests, and the bytes of bodies."""

    def __init__(self) -> None:
        self.begun = 0
        self.bodies: list[int] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.begun += 1
        length, more = 0, True
        while more:
            message = await receive()
            length, more = length + len(message.get("body", b"")), message.get("more_body", False)
        self.bodies.append(length)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


BOUNDS: dict[str, Any] = {"most": 1024, "each": 64, "seconds": 20.0}


@contextmanager
def served(app: App, known: Any, **bounds: Any) -> Iterator[int]:
    """The port at which the app is served behind the gate."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    gate = FleetOnly(app, known) if known else app
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "lifespan": "off",
        "log_level": "error",
    }
    config = uvicorn.Config(gate, http=guarded(**BOUNDS | bounds), ws="none", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join(20)


def asked(port: int, more: str, length: int, body: bytes) -> bytes:
    """What comes back until the connection is closed, if of a body of `length` bytes only these are
    sent."""
    found = b""
    # a connection that is one too many is reset
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as link,
        suppress(ConnectionError),
    ):
        link.sendall(
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{more}content-length: {length}\r\n\r\n".encode()
            + body
        )
        while part := link.recv(4096):
            found += part
            if b"done" in part:
                break
    return found
