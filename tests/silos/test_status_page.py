"""The operator's page shows what happens, runs nothing that others wrote, and is for this machine."""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest

from ekiden.silos import supernode
from ekiden.silos.metrics import Metrics, Watched, served
from ekiden.silos.silo.participation import log_request
from ekiden.silos.silo.silo import Silo
from ekiden.silos.trust.parcel import Ask, pack
from tests.lab.reporting.across.test_browser import BROWSER, browse
from tests.silos.asked import TERMS
from tests.silos.fakes import mine, silo_file
from tests.silos.test_metrics import asked, free_port

FRAME = """<!doctype html><iframe id="frame" style="width: WIDTHpx; height: 844px; border: 0" srcdoc="PAGE">
</iframe><pre id="found"></pre><script>
document.getElementById("frame").addEventListener("load", event => {
  const page = event.target.contentDocument;
  const all = what => page.querySelectorAll(what).length;
  const found = [page.documentElement.scrollWidth, all("section"), all("script, img, a")];
  document.getElementById("found").textContent = found.join(" ");
});
</script>"""
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)> & \"'"


@pytest.fixture
def watched(tmp_path: Path) -> supernode.Monitored:
    """A silo with a plan that waits, spent epsilon, and a log with text of somebody else."""
    file = silo_file(tmp_path, "client-0", "[limits]\napprove = true\n")
    Silo(file, {"": mine("client-0")}).answer(pack(Ask("hello", TERMS.text(), "0")))
    log_request(file.folder, f"refused hello: {ATTACK}")
    return supernode.Monitored(file)


@pytest.fixture
def port(watched: supernode.Monitored) -> Iterator[int]:
    about = Watched("ekiden_silo", dict, watched.health, watched.page)
    with served(Metrics(port=free_port()), about) as found:
        yield found


def test_the_page_shows_what_waits_and_what_was_asked(watched: supernode.Monitored) -> None:
    text = watched.page()
    assert "Silo client-0" in text
    assert "not connected yet" in text
    assert re.search(r"<td>[0-9a-f]{64}</td>", text), "a plan waits"
    assert "method: " in text
    assert "0 of 8" in text
    assert "refused hello: " in text


def test_text_of_others_is_text(watched: supernode.Monitored, port: int) -> None:
    """Neither a script nor a picture, also for a browser that ignores the policy."""
    found = asked(port, b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n").decode()
    head, _, body = found.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/html" in head
    assert "content-security-policy: default-src 'none'" in head
    assert "script-src" not in head
    assert not re.search(r"<(script|img|iframe|form)\b|javascript:|https?://", body)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:9100", 200),
        (b"localhost", 200),
        (b"[::1]:9100", 200),
        (b"hospital.example.org:9100", 404),
        (b"localhost.example.org", 404),
        (b"", 404),
        (b"\xff", 404),
        (b"[::1", 404),
    ],
)
def test_only_this_machine_by_its_own_name_gets_the_page(
    host: bytes, status: int, port: int
) -> None:
    """A web page whose name was turned to this machine (DNS rebinding) reads nothing."""
    found = asked(port, b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"client-0" in found) == (status == 200)


def test_a_header_does_not_say_from_where_somebody_asks(
    watched: supernode.Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uvicorn would believe it, of anybody where its environment says so."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    about = Watched("ekiden_silo", watched.counts, watched.health, watched.page)
    with served(Metrics(free_port()), about) as port:
        said = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n"
        assert asked(port, said).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_on_a_desk_and_on_a_phone(
    watched: supernode.Monitored, width: int, tmp_path: Path
) -> None:
    """Nothing is wider than the window, nothing is complained of, and no text became an element."""
    frame = tmp_path / "frame.html"
    text = FRAME.replace("WIDTH", str(width)).replace("PAGE", escape(watched.page()))
    frame.write_text(text)
    dom, said = browse(frame, tmp_path)
    assert said == []
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom)
    wide, sections, foreign = map(int, found.split())
    assert wide <= width
    assert sections >= 3
    assert foreign == 0
