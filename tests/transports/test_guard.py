"""What the process that answers a silo's messages may use of the machine."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = pytest.mark.flower

TAKE = """
import torch
from ekiden.transports.flower.client_app import limit_memory
limit_memory(300_000_000)
torch.ones(50_000_000)
try:
    torch.ones(100_000_000)
except RuntimeError as error:
    print("can't allocate memory" in str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_a_request_takes_no_more_memory_than_the_silo_allows() -> None:
    done = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "True\n", done.stderr
