"""Our bytes in a message of Flower."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
from flwr.app import RecordDict

from ekiden.silos.envelope import content, wrap


@pytest.mark.parametrize(("record", "held"), [(wrap(b"one"), b"one"), (RecordDict({}), b"")])
def test_a_message_carries_bytes_and_others_carry_none(record: RecordDict, held: bytes) -> None:
    message: Any = SimpleNamespace(content=record)
    assert content(message) == held
