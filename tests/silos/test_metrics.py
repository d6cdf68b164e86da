"""What a monitor reads is counts, and who reaches its port gets nothing else and stops nothing."""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest

from ekiden.core.base.errors import UserError
from ekiden.silos import metrics
from ekiden.silos.metrics import Metrics, Watched, served

RUN = "0123456789abcdef"


def counts() -> Mapping[str, float]:
    return {"runs": 3.0, 'silos{state="away"}': 12_345_678.0}


WATCHED = Watched("ekiden_silo", counts, lambda: (True, "connected"), lambda: "<p>for one")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> Iterator[int]:
    with served(Metrics(port=free_port()), WATCHED) as found:
        yield found


def asked(port: int, request: bytes) -> bytes:
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link, suppress(OSError):
        link.sendall(request)
        while part := link.recv(4096):
            found += part
    return found


def test_a_monitor_reads_health_and_counts(port: int) -> None:
    head, _, body = asked(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (
        body.decode()
        == 'ekiden_silo_up 1\nekiden_silo_runs 3\nekiden_silo_silos{state="away"} 12345678\n'
    )
    assert asked(port, b"GET /health HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nconnected\n")
    away = replace(WATCHED, health=lambda: (False, "away"))
    with served(Metrics(port=free_port()), away) as ill:
        assert asked(ill, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 503")
    taken = served(Metrics(port=port), WATCHED)
    with pytest.raises(UserError, match=f"metrics cannot be served at 127.0.0.1:{port}"), taken:
        pass
    with served(Metrics(), WATCHED) as none:
        assert none == 0


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", 404),
        (b"GET /../../etc/passwd HTTP/1.1", 404),
        (b"GET /metrics/../silo.toml HTTP/1.1", 404),
        (b"GET /metrics/%2e%2e/%2e%2e/etc/passwd HTTP/1.1", 404),
        (b"GET //etc/passwd HTTP/1.1", 404),
        (b"GET http://127.0.0.1/metrics HTTP/1.1", 404),
        (b"GET /\xff\x00 HTTP/1.1", 400),
        (b"POST /metrics HTTP/1.1", 405),
        (b"PUT /health HTTP/1.1", 405),
        (b"DELETE /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 1_000_000, 400),
        (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1", 400),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_nothing_but_counts_is_served(request_line: bytes, status: int, port: int) -> None:
    found = asked(port, request_line + b"\r\nHost: x\r\n\r\n")
    assert found.startswith(f"HTTP/1.1 {status} ".encode()) or (status >= 400 and not found)
    assert b"root:" not in found
    assert len(found) < 450


def test_slow_and_many_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(metrics, "_PATIENCE", 0.3)
    port = request.getfixturevalue("port")
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(12)]
    for link in idle:
        with suppress(OSError):  # it was one too many
            link.sendall(b"GET /metrics HT")
    for link in idle:
        with suppress(ConnectionResetError), link:
            assert link.recv(1) == b""
    deadline = time.monotonic() + 10
    while not asked(port, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < deadline
    with socket.create_connection(("127.0.0.1", port), timeout=20) as drip, suppress(OSError):
        while True:
            assert time.monotonic() < deadline + 10
            drip.sendall(b"a")
            time.sleep(0.05)
