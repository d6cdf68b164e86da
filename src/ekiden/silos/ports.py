"""What all our HTTP ports share: few connections at a time, and short answers."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def respond(
    send: Send, status: int, body: str, kind: str = "text/plain", **headers: str
) -> None:
    """Answer a request, and close the connection."""
    data = body.encode()
    named = {
        "content-type": kind,
        "content-length": str(len(data)),
        "connection": "close",
        **headers,
    }
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": data})


def guarded(most: int, each: int, seconds: float) -> type[H11Protocol]:
    """Return a protocol for uvicorn that bounds connections.

    Args:
        most: connections at a time.
        each: of these from one address, behind which several silos may be; the next one closes the
            oldest idle one.
        seconds: until the first request of a connection has arrived.
    """
    # the oldest first
    connections: dict[Any, None] = {}

    class Guarded(H11Protocol):  # type: ignore[misc]  # uvicorn is not checked
        """HTTP over a connection that is counted."""

        host = ""
        admitted = False

        def connection_made(self, transport: Any) -> None:
            self.host = str((transport.get_extra_info("peername") or ("?",))[0])
            crowd = [one for one in connections if one.host == self.host]
            if len(crowd) < each:
                crowd = list(connections) if len(connections) >= most else []
            if crowd:
                idle = next((one for one in crowd if one.cycle is None), None)
                if idle is None:
                    transport.abort()
                    return
                # the oldest: who only connects shuts nobody out
                del connections[idle]
                idle.transport.abort()
            self.admitted = True
            connections[self] = None
            super().connection_made(transport)
            self.loop.call_later(seconds, self.expire)

        def expire(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.pop(self, None)
            if self.admitted:
                super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.admitted:
                super().data_received(data)

    return Guarded
