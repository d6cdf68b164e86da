"""Health and counts of a silo or a coordinator for a monitor, and a page for its operator; over
HTTP, on loopback by default.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from ekiden.core.base.checks import Checked, Range
from ekiden.core.base.errors import UserError
from ekiden.silos.security import OWN_HOSTS
from ekiden.silos.status_page import POLICY

if TYPE_CHECKING:
    from ekiden.silos.ports import Receive, Scope, Send

# seconds until a request must have arrived
_PATIENCE = 5.0
_CONNECTIONS = 8


@dataclass(frozen=True)
class Metrics(Checked):
    """Where a monitor reads `/health` and `/metrics`."""

    port: Annotated[int, Range(least=0, below=1 << 16)] = 0
    """port; 0 for none"""
    host: str = "127.0.0.1"
    """address of this machine; whoever reaches it reads the counts"""


@dataclass(frozen=True)
class Watched:
    """What a monitor and an operator may know."""

    # before the names of counts
    prefix: str
    # named as Prometheus writes them, with labels
    counts: Callable[[], Mapping[str, float]]
    # whether all is well, and in words what is to do
    health: Callable[[], tuple[bool, str]]
    page: Callable[[], str]

    def answer(self, scope: "Scope") -> tuple[int, str]:
        """Return status and text for the path of a request."""
        if scope["method"] != "GET":
            return 405, "only GET is answered\n"
        match scope["path"]:
            case "/" if _is_at_home(scope):
                return 200, self.page()
            case "/health":
                good, words = self.health()
                return (200 if good else 503), f"{words}\n"
            case "/metrics":
                found = {"up": float(self.health()[0]), **self.counts()}
                lines = (f"{self.prefix}_{name} {value:.12g}\n" for name, value in found.items())
                return 200, "".join(lines)
        return 404, "there are /health and /metrics\n"


def _is_at_home(scope: "Scope") -> bool:
    """Return whether a browser on this machine asks, and asks this machine by its own name.

    A page of somebody else whose name leads to this machine names another host.
    """
    host = dict(scope["headers"]).get(b"host", b"").decode(errors="replace")
    try:
        own = urlsplit(f"//{host}").hostname in OWN_HOSTS
    except ValueError:
        return False
    return own and ipaddress.ip_address(scope["client"][0]).is_loopback


@contextmanager
def served(where: Metrics, watched: Watched) -> Iterator[int]:
    """Answer a monitor until the block ends, and give the port; 0 if nothing is served. The page is
    only for browsers on this machine.
    """
    if not where.port:
        yield 0
        return
    # most commands serve nothing
    import uvicorn

    from ekiden.silos.ports import guarded, respond

    async def app(scope: "Scope", receive: "Receive", send: "Send") -> None:
        status, text = await asyncio.to_thread(watched.answer, scope)
        kind = "text/plain; version=0.0.4"
        if text.startswith("<"):
            kind = "text/html; charset=utf-8"
        more = {"content_security_policy": POLICY, "referrer_policy": "no-referrer"}
        await respond(send, status, text, kind, x_content_type_options="nosniff", **more)

    config = uvicorn.Config(
        app,
        http=guarded(_CONNECTIONS, _CONNECTIONS, _PATIENCE),
        ws="none",
        lifespan="off",
        # in a header anybody can claim to ask from this machine
        proxy_headers=False,
        server_header=False,
        log_level="critical",
        log_config=None,
    )
    server = uvicorn.Server(config)
    try:
        listener = socket.create_server((where.host, where.port))
    except OSError as error:
        raise UserError(
            f"metrics cannot be served at {where.host}:{where.port} ({error.strerror}): choose "
            "another port or host"
        ) from None
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield where.port
    finally:
        server.should_exit = True
        thread.join(_PATIENCE)
