"""Health and metrics of a silo or a coordinator for a monitor, counts only, and a page for its
operator; over HTTP, on loopback by default.
"""

import ipaddress
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from ekiden.core.base.checks import Checked, Range
from ekiden.core.base.errors import UserError
from ekiden.silos.status_page import POLICY

Counts = Callable[[], Mapping[str, float]]
# seconds until a request must have arrived
_PATIENCE = 5.0
_CONNECTIONS = 8
_KINDS = {
    "hello": r"hello\b",
    "refused": r"refused\b",
    "failed": r"failed\b",
    "run": r"run [0-9a-f]{16} begins:",
    "task": r"run [0-9a-f]{16}, step \d+: \w+ done\b",
    "value": r"run [0-9a-f]{16}: value\b",
    "measurement": r"run [0-9a-f]{16}, after step\b",
}


@dataclass(frozen=True)
class Metrics(Checked):
    """Where a monitor reads `/health` and `/metrics`."""

    port: Annotated[int, Range(least=0, below=1 << 16)] = 0
    """port; 0 for none"""
    host: str = "127.0.0.1"
    """address of this machine; whoever reaches it reads the counts"""


@contextmanager
def served(
    where: Metrics,
    prefix: str,
    counts: Counts,
    health: Callable[[], tuple[bool, str]],
    page: Callable[[], str] | None = None,
) -> Iterator[int]:
    """Answer a monitor until the block ends, and give the port; 0 if nothing is served.

    Counts are named as Prometheus writes them, behind a prefix, with labels. The page is only for
    browsers on this machine.
    """
    if not where.port:
        yield 0
        return

    class Answers(_Answers):
        def answer(self) -> tuple[int, str]:
            match self.path:
                case "/" if page is not None and self.is_at_home():
                    return 200, page()
                case "/health":
                    good, words = health()
                    return (200 if good else 503), f"{words}\n"
                case "/metrics":
                    found = {"up": float(health()[0]), **counts()}
                    return 200, "".join(
                        f"{prefix}_{name} {value:.12g}\n" for name, value in found.items()
                    )
                case _:
                    return 404, "there are /health and /metrics\n"

    try:
        server = _Server((where.host, where.port), Answers)
    except OSError as error:
        raise UserError(
            f"metrics cannot be served at {where.host}:{where.port}: {error.strerror}"
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_PATIENCE)


class _Server(ThreadingHTTPServer):
    """Serves few connections at a time; further ones are closed."""

    def __init__(self, address: tuple[str, int], answers: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.Semaphore(_CONNECTIONS)
        super().__init__(address, answers)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # whatever it sends meanwhile
        alarm = threading.Timer(_PATIENCE, self._cut, [request])
        alarm.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            alarm.cancel()
            self._free.release()

    def _cut(self, request: Any) -> None:
        # closing alone would not wake who waits for it
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a connection that broke."""


class _Answers(BaseHTTPRequestHandler):
    """Answers GET of few paths; it opens no file and reads no body."""

    protocol_version = default_request_version = "HTTP/1.1"
    error_content_type, error_message_format = "text/plain", "%(message)s\n"
    server_version, sys_version = "-", ""

    def answer(self) -> tuple[int, str]:
        """Return status and text for the path."""
        raise NotImplementedError

    def is_at_home(self) -> bool:
        """Return whether a browser on this machine asks, and asks this machine by its own name.

        A page of somebody else whose name leads to this machine names another host.
        """
        named = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        own = named in ("127.0.0.1", "localhost", "::1")
        return own and ipaddress.ip_address(self.client_address[0]).is_loopback

    def do_GET(self) -> None:
        """Answer a request."""
        status, text = self.answer()
        body = text.encode()
        kind = "text/html; charset=utf-8" if text.startswith("<") else "text/plain; version=0.0.4"
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about requests."""


class LogCounts:
    """Counts the lines of a silo's log by kind; each line is read once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0
        self._found: Counter[str] = Counter(dict.fromkeys(_KINDS, 0))
        self._lock = threading.Lock()

    def __call__(self) -> Mapping[str, float]:
        """Return how many lines of each kind there are."""
        with self._lock, suppress(OSError), open(self._file, "rb") as lines:
            lines.seek(self._at)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                _, _, text = line.decode(errors="replace").partition(" ")
                self._found.update(
                    kind for kind, pattern in _KINDS.items() if re.match(pattern, text)
                )
        return {
            f'requests_total{{kind="{kind}"}}': float(count) for kind, count in self._found.items()
        }
