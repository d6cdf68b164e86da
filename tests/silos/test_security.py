"""Certificates that have expired, or soon will, are named before anything connects; and files as
editors of other systems write them.
"""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ekiden import UserError
from ekiden.silos.security import certificate_end, certificate_state, check_link
from ekiden.silos.silo import silo_file
from ekiden.silos.trust import keys
from tests.silos.fakes import silo_file as written_file


@contextmanager
def link(folder: Path) -> Iterator[str]:
    """The address of a server that shows the certificate in a folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "link.crt", folder / "link.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                connection, _ = server.accept()
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("days", "said"), [(-0.5, "has expired"), (20, "ends in 19 days"), (300, "")]
)
def test_a_certificate_near_its_end_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, said: str
) -> None:
    monkeypatch.setattr(keys, "_DAYS", days)
    keys.make_certificates(tmp_path, "127.0.0.1")
    lines: list[str] = []
    with link(tmp_path) as address:
        certificate = tmp_path / "ca.crt"
        if days < 0:
            with pytest.raises(UserError, match="has expired: `ekiden federation rotate FOLDER`"):
                check_link(address, certificate, lines.append)
        else:
            check_link(address, certificate, lines.append)
            assert all("`ekiden federation rotate FOLDER`" in line for line in lines)
    assert (said in " ".join(lines)) or days < 0
    assert bool(lines) == (days == 20)
    check_link("127.0.0.1:9", certificate, lines.append)  # nobody answers


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (365, "the SuperLink's certificate ends in 364 days"),
        (-0.5, "the SuperLink's certificate has expired: `ekiden federation rotate FOLDER` at"),
    ],
)
def test_a_silo_says_for_how_long_the_certificate_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, said: str
) -> None:
    monkeypatch.setattr(keys, "_DAYS", days)
    keys.make_certificates(tmp_path, "127.0.0.1")
    with link(tmp_path) as address:
        good, words = certificate_state(certificate_end(address))
        assert words.startswith(said)
        assert good == (days > 0)
    assert certificate_end("127.0.0.1:9") is certificate_end("nowhere") is None
    assert certificate_state(None) == (True, "")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_with_a_byte_order_mark_are_read(tmp_path: Path, encoding: str) -> None:
    key = keys.generate(tmp_path / "a.key")
    text = keys.read_public(key)
    key.write_text(text, encoding=encoding)
    assert keys.read_public(key) == text
    path = written_file(tmp_path, "client-0").path
    wanted = silo_file.read(path)
    path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
    assert silo_file.read(path) == wanted
