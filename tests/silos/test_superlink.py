"""The silos' port of a SuperLink: who has no registered key gets no memory, no lasting connection,
and stops no run."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
from fastapi import HTTPException
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)

from ekiden.silos.superlink import keep_private, keep_superexec, own_replies
from tests.silos.links import App, asked, served

pytestmark = pytest.mark.flower


def headers(key: Any, public: Any, moment: str | None = None) -> str:
    moment = moment or now().isoformat()
    signature = sign_message(key, moment.encode())
    return (
        f"flwr-public-key: {b64encode(public_key_to_bytes(public)).decode()}\r\n"
        f"flwr-signature: {b64encode(signature).decode()}\r\nflwr-timestamp: {moment}\r\n"
    )


def test_a_body_is_not_read_before_a_registered_silo_signed() -> None:
    """300 MB are announced; the answer comes and the connection is closed although none of them
    were sent."""
    (key, public), (other, unknown) = generate_key_pairs(), generate_key_pairs()
    registered = {public_key_to_bytes(public)}
    app, old = App(), "2026-01-01T00:00:00+00:00"
    with served(app, registered.__contains__) as port:
        mixed = headers(other, unknown).split("\r\n")
        attacks = [
            "",
            headers(other, unknown),
            headers(key, public, old),
            headers(other, public),
            "\r\n".join([headers(key, public).split("\r\n")[0], *mixed[1:]]),
            "flwr-public-key: ä\r\nflwr-signature: =\r\nflwr-timestamp: now\r\n",
        ]
        for attack in attacks:
            assert asked(port, attack, 300_000_000, b"").startswith(b"HTTP/1.1 401"), attack
        assert app.bodies == []
        assert asked(port, headers(key, public), 200_000, b"x" * 200_000).startswith(
            b"HTTP/1.1 200"
        )
        assert app.bodies == [200_000]


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
def test_only_its_user_reads_the_messages_at_the_superlink(tmp_path: Path) -> None:
    """Also those of a database that was made before, and the files that SQLite puts next to it."""
    made = tmp_path / "made.db"
    made.touch(0o644)
    for file in (made, tmp_path / "new.db"):
        keep_private(file)
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE messages (content)")
            found = list(tmp_path.glob(f"{file.name}*"))
            assert len(found) == 3
            assert {path.stat().st_mode & 0o777 for path in found} == {0o600}


def test_superexec_is_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Lifespan(SimpleNamespace):
        def _start_superexec_if_needed(self) -> None:
            self.starts += 1
            self.superexec_process = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(60)"]
            )

    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    lifespan = Lifespan(superexec_process=ended, starts=0)

    async def for_a_while() -> None:
        task = asyncio.create_task(
            keep_superexec([lifespan, Lifespan(superexec_process=None)], 0.01)
        )
        while not lifespan.starts:
            await asyncio.sleep(0.01)
        # time to start one too many
        await asyncio.sleep(0.1)
        task.cancel()

    asyncio.run(for_a_while())
    lifespan.superexec_process.kill()
    lifespan.superexec_process.wait()
    assert lifespan.starts == 1
    assert "flower-superexec ended with code 3: starting it again" in capsys.readouterr().out


def test_a_silo_sends_nothing_but_its_own_replies() -> None:
    """Neither requests to other silos, nor what the coordinator would take for a silo's reply."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node

    pushed: list[Any] = []
    push = own_replies(lambda request, state: pushed.append(request))

    def send(*messages: dict[str, Any]) -> None:
        sent = [Message(metadata=Metadata(**about)) for about in messages]
        push(request=PushMessagesRequest(node=Node(node_id=7), messages_list=sent), state=None)

    reply = {"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "asked"}
    for other in (
        {"src_node_id": 8},
        {"src_node_id": 1},
        {"dst_node_id": 8},
        {"reply_to_message_id": ""},
    ):
        with pytest.raises(HTTPException):
            send({**reply, **other})
        with pytest.raises(HTTPException):
            send(reply, {**reply, **other})
    assert not pushed
    send(reply)
    assert len(pushed) == 1
