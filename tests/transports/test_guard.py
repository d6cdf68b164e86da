"""What the process that answers a silo's messages may use of the machine."""

import sys
from pathlib import Path

import pytest
import torch

from tests.warm import WarmProcess

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = pytest.mark.flower


def take(file: Path) -> None:
    """Allocate in a process of its own what fits, then what does not."""
    from ekiden.transports.flower.client_app import limit_memory  # with all of Flower, which no other test needs

    limit_memory(300_000_000)
    torch.ones(50_000_000)
    try:
        torch.ones(100_000_000)
    except RuntimeError as error:
        file.write_text(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_a_request_takes_no_more_memory_than_the_silo_allows(tmp_path: Path) -> None:
    process = WarmProcess(target=take, args=(tmp_path / "said",))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert "can't allocate memory" in (tmp_path / "said").read_text()
