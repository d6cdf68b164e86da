"""What a SuperLink answers about runs, in our words and one line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")

from ekiden.silos import control
from ekiden.silos.control import Refused, SuperLink


class Client:
    """Answers as the Control API does, or fails."""

    def __init__(self) -> None:
        self.answer: Any = None

    def close(self) -> None:
        pass

    def ask(self, request: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    ListRuns = StreamLogs = RegisterNode = ask


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    kind = SimpleNamespace(from_server_address=lambda *_: made)
    monkeypatch.setattr(control, "ControlHttpClient", kind)
    return made


def refusal(code: int, text: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://link.example.org:8000")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, text=text))


def run(number: int, pending: str, finished: str = "") -> Any:
    status = SimpleNamespace(status="finished", sub_status="failed" if finished else "", details="")
    return SimpleNamespace(
        run_id=number, fab_id="org/app", status=status, pending_at=pending, starting_at="",
        running_at="", finished_at=finished,
    )  # fmt: skip


def test_the_newest_run_is_first_with_the_last_thing_that_happened(client: Client) -> None:
    old = run(1, "2026-01-01T10:00:00.1", "2026-01-03T11:00:00.2")
    client.answer = SimpleNamespace(run_dict={1: old, 2: run(2, "2026-01-02T10:00:00.1")})
    rows = [one.row for one in SuperLink("link:1", None).runs()]
    assert rows == [
        ("2", "app", "finished", "2026-01-02 10:00:00", ""),
        ("1", "app", "failed", "2026-01-03 11:00:00", ""),
    ]


def test_pieces_of_a_log_are_put_together_to_lines(client: Client) -> None:
    client.answer = [SimpleNamespace(log_output=part) for part in ("one\ntw", "o", "\nthree")]
    assert list(SuperLink("link:1", None).lines("7")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (refusal(404, '{"detail": "no such run"}'), "link:1 does not list its runs: no such run"),
        (refusal(500, "<html>"), "link:1 does not list its runs: HTTP 500"),
        (httpx.ConnectError("refused"), r"no SuperLink at link:1 answers \(refused\)"),
    ],
)
def test_what_fails_is_one_line(client: Client, answer: Exception, line: str) -> None:
    client.answer = answer
    with pytest.raises(Refused, match=line):
        SuperLink("link:1", None).runs()


def test_a_key_that_is_known_is_registered(client: Client, tmp_path: Path) -> None:
    from ekiden.silos.trust import keys

    key = keys.read_public(keys.generate(tmp_path / "a.key"))
    client.answer = refusal(409, '{"detail": "the key is already in use"}')
    SuperLink("link:1", None).register(key)
    client.answer = refusal(403, '{"detail": "no"}')
    with pytest.raises(Refused, match="does not take the key: no"):
        SuperLink("link:1", None).register(key)
