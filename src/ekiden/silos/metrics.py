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
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Annotated, Any

from ekiden.core.base.checks import Checked, Range
from ekiden.core.base.errors import UserError
from ekiden.silos.status_page import POLICY

Counts = Callable[[], Mapping[str, float]]
_PATIENCE = 5.0  # seconds until a request must have arrived
_CONNECTIONS = 8
_HEAD = 4096  # bytes of a request that are read
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
        def answer(self, path: str, host: str) -> tuple[int, str]:
            match path:
                case "/" if page is not None and self._is_at_home(host):
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


class _Server(ThreadingTCPServer):
    """Serves few connections at a time; further ones are closed."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answers: type[BaseRequestHandler]) -> None:
        self._free = threading.Semaphore(_CONNECTIONS)
        super().__init__(address, answers)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a connection that broke."""


class _Answers(BaseRequestHandler):
    """Reads one short request, and answers GET of two paths; it opens no file and reads no body."""

    def answer(self, path: str, host: str) -> tuple[int, str]:
        """Return status and text for a path at the host that the browser names."""
        raise NotImplementedError

    def _is_at_home(self, host: str) -> bool:
        """Return whether a browser on this machine asks, and asks this machine by its own name.

        A page of somebody else whose name leads to this machine names another host.
        """
        name = host.rpartition(":")[0] if not host.endswith("]") else host
        own = (name or host) in ("127.0.0.1", "localhost", "[::1]")
        return own and ipaddress.ip_address(self.client_address[0]).is_loopback

    def handle(self) -> None:
        """Answer one request and close the connection, within some seconds."""
        alarm = threading.Timer(_PATIENCE, self._cut)
        alarm.start()
        try:
            head = b""
            while (
                b"\r\n\r\n" not in head and len(head) < _HEAD and (part := self.request.recv(_HEAD))
            ):
                head += part
            words = head.split(b"\r\n")[0].split(b" ")
            if (
                len(words) != 3
                or not words[2].startswith(b"HTTP/1.")
                or b"\r\n\r\n" not in head[:_HEAD]
            ):
                status, text = 400, "not a request\n"
            elif words[0] != b"GET":
                status, text = 405, "only GET\n"
            else:
                named = [line[5:] for line in head.split(b"\r\n") if line[:5].lower() == b"host:"]
                host = b"".join(named).decode("latin-1").strip()
                status, text = self.answer(words[1].decode("latin-1"), host)
            body = text.encode()
            kind = (
                "text/html; charset=utf-8" if text.startswith("<") else "text/plain; version=0.0.4"
            )
            lines = [
                f"HTTP/1.1 {status} -",
                f"Content-Type: {kind}",
                f"Content-Length: {len(body)}",
            ]
            lines += [f"Content-Security-Policy: {POLICY}", "X-Content-Type-Options: nosniff"]
            about = "\r\n".join([*lines, "Referrer-Policy: no-referrer", "Connection: close"])
            self.request.sendall(f"{about}\r\n\r\n".encode() + body)
        finally:
            alarm.cancel()

    def _cut(self) -> None:
        with suppress(OSError):  # closing alone would not wake who waits for it
            self.request.shutdown(socket.SHUT_RDWR)


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
