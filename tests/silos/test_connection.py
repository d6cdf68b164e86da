"""A silo knows whether it is connected, since when, or why not and what to do."""

import time
from pathlib import Path

import pytest

from ekiden.silos.silo import connection
from ekiden.silos.silo.connection import Connection

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")


def test_a_silo_that_heard_nothing_for_a_while_is_not_connected() -> None:
    now = time.time()
    assert Connection(now - 900, now - 30).stands
    assert not Connection(now - 900, now - 300).stands
    assert not Connection(now - 900, now, "refused").stands


@pytest.mark.parametrize("text", ["", "[1]", '{"since": "x"}', '{"since": 1, "until": 2}', "\xff"])
def test_a_damaged_note_is_of_a_silo_that_is_not_connected(text: str, tmp_path: Path) -> None:
    (tmp_path / connection.FILE).write_bytes(text.encode("latin-1"))
    assert connection.health(tmp_path) == (False, "not connected yet")
