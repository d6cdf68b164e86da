"""A port that anybody reaches has bounds: connections, and the time for a request."""

import socket
import time
from collections.abc import Callable

import pytest

from tests.silos.links import PATH, App, asked, served

pytestmark = pytest.mark.flower


def until(happened: Callable[[], bool]) -> None:
    """Wait for it, as long as the slowest machine may take."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("bounds", [{"each": 3}, {"most": 3}])
def test_connections_of_one_address_and_of_all_are_bounded(bounds: dict[str, int]) -> None:
    begun = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n".encode()
    app = App()
    with served(app, None, **bounds, seconds=600) as port:
        held = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        for link in held:
            link.sendall(begun)
        until(lambda: app.begun == 3)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one_more:
            assert closed(one_more)
        for link in held:
            link.close()
        until(lambda: asked(port, "", 4, b"body").startswith(b"HTTP/1.1 200"))


@pytest.mark.parametrize("bounds", [{"each": 3}, {"most": 3}])
def test_who_only_connects_shuts_out_no_silo_behind_the_same_address(
    bounds: dict[str, int],
) -> None:
    app = App()
    with served(app, None, **bounds, seconds=600) as port:
        begun = socket.create_connection(("127.0.0.1", port), timeout=20)
        begun.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n".encode())
        until(lambda: app.begun == 1)
        idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(9)]
        for link in idle:
            link.sendall(b"POST ")
        time.sleep(0.2)
        assert asked(port, "", 4, b"body").startswith(b"HTTP/1.1 200")
        begun.sendall(b"body")
        assert begun.recv(4096).startswith(b"HTTP/1.1 200"), "a request that has begun is answered"
        for link in (*idle, begun):
            link.close()


def test_a_connection_without_a_request_is_closed() -> None:
    with (
        served(App(), None, seconds=0.2) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as idle,
    ):
        idle.sendall(f"POST {PATH} HTTP/1.1\r\nhost:".encode())
        assert closed(idle)


def closed(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True
