"""How often the courier looks for answers, and how long it waits for whom."""

import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from ekiden.core.base.errors import UserError
from ekiden.core.engine.transport import ClientMissing
from ekiden.silos.coordinator.courier import Courier, Crossing, Lost, Patience
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from ekiden.silos.trust.sealing import Reader

HOUR = 3600.0
Reply = bytes | Lost | None


@pytest.mark.parametrize(
    ("waited", "pause"), [(0.0, 0.1), (4.0, 0.1), (10.0, 0.25), (20.0, 0.5), (3600.0, 1.0)]
)
def test_looks_soon_at_first_and_then_less_often(
    waited: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiden.silos.coordinator.courier.time.monotonic", lambda: 1000.0 + waited)
    assert Patience(poll=1.0).pause(1000.0) == pytest.approx(pause)
    assert Patience(poll=0.0).pause(1000.0) == 0


class Clock:
    """Time that passes in sleep only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start = self.now = time.monotonic()
        monkeypatch.setattr("ekiden.silos.coordinator.courier.time.monotonic", lambda: self.now)
        monkeypatch.setattr("ekiden.silos.coordinator.courier.time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        assert self.passed < 100 * HOUR, "waits without end"
        self.now += max(seconds, 0.1)

    @property
    def passed(self) -> float:
        return self.now - self.start


class FakePost:
    """A silo whose answers are a function of what it was asked, when, and how long ago."""

    def __init__(self, clock: Clock, answer: Callable[[str, float, float], Reply]) -> None:
        self.connected = True
        self.sent: list[tuple[str, float]] = []
        self._clock = clock
        self._answer = answer

    def send(self, client: str, data: bytes) -> str | Lost:
        kind = unpack(data, Ask)[0].kind
        if kind == "task" and isinstance(self._answer("connected", self._clock.passed, 0.0), Lost):
            return Lost("not connected")
        self.sent.append((kind, self._clock.passed))
        return str(len(self.sent) - 1)

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        sent = {ticket: self.sent[int(ticket)] for ticket in tickets}
        found = {
            t: self._answer(kind, at, self._clock.passed - at) for t, (kind, at) in sent.items()
        }
        return {ticket: reply for ticket, reply in found.items() if reply is not None}

    def reader(self, client: str) -> Reader | None:
        return None

    def anyone(self) -> bool:
        return True


DONE = pack(Answer("a"))
BUSY = pack(Answer("a", busy=True))
GONE = Lost("node unavailable")


def asked(
    answer: Callable[[str, float, float], Reply], clock: Clock
) -> tuple[FakePost, list[Crossing]]:
    """Ask the silo for a task that ends when `answer` says so."""
    post, crossed = FakePost(clock, answer), list[Crossing]()
    courier = Courier(post, Patience(HOUR), crossed.append, lambda line: None)
    courier.wait(courier.send("a", Ask("task")))
    return post, crossed


def test_a_silo_that_works_is_not_missing_however_often_its_message_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task of 30 hours; the engine drops messages after 12."""

    def answer(kind: str, at: float, age: float) -> Reply:
        if kind == "status":
            return BUSY
        return DONE if at + age > 30 * HOUR else GONE if age > 12 * HOUR else None

    clock = Clock(monkeypatch)
    post, crossed = asked(answer, clock)
    assert [kind for kind, _ in post.sent].count("task") == 3
    assert clock.passed == pytest.approx(30 * HOUR, rel=0.01)
    assert crossed[0].waited < 1300  # twice until it was asked again


def test_a_silo_that_was_away_twice_for_less_than_patience_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is back before it can be asked whether it is working, and away again before it answers."""

    def answer(kind: str, at: float, age: float) -> Reply:
        now = at + age
        if kind == "connected":
            return GONE if 100 < now < 0.9 * HOUR or HOUR < now < 1.8 * HOUR else None
        if kind == "status":
            return None
        return GONE if (at < 100 < now) or (at < HOUR < now) else DONE if now > 2 * HOUR else None

    _, crossed = asked(answer, Clock(monkeypatch))
    assert crossed[0].waited == pytest.approx(1.6 * HOUR, rel=0.05)


def test_a_silo_that_gives_no_sign_of_life_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(ClientMissing, match="a did not answer for 3600 s"):
        asked(lambda kind, at, age: GONE if age > 10 else None, clock)
    assert clock.passed == pytest.approx(HOUR, rel=0.02)


def test_a_lost_question_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message broke off, and so did the first three questions whether the silo is working on
    it."""
    questions: list[float] = []

    def answer(kind: str, at: float, age: float) -> Reply:
        if kind == "status":
            if at not in questions:
                questions.append(at)
            return DONE if questions.index(at) == 3 else None
        return None if at == 0 else DONE

    clock = Clock(monkeypatch)
    post, _ = asked(answer, clock)
    assert [kind for kind, _ in post.sent] == ["task", *["status"] * 4, "task"]
    assert clock.passed < 0.3 * HOUR


@pytest.mark.parametrize("kind", ["task", "status"])
@pytest.mark.parametrize(
    ("said", "why"),
    [(b"\xff" * 20, "silo a sent an unreadable answer"), (pack(Answer("b")), "'b' answered for a")],
    ids=["noise", "other name"],
)
def test_who_answers_nonsense_is_named(
    kind: str, said: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=why):
        asked(lambda of, at, age: said if of == kind else None, Clock(monkeypatch))
