"""What the process that answers a silo's messages may use of the machine."""

import sys
from pathlib import Path

import pytest
import torch

from ekiden.core.base.memory import limited
from ekiden.core.data.samples import Subset
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.fakes import keyed
from tests.warm import WarmProcess

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = pytest.mark.flower
TABLE = """
import torch

from ekiden import federate


def mine():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 3, generator=draw), torch.arange(80) % 2
    return federate([(x, y)], names=["a"], classes=["no", "yes"])
"""


def take(file: Path) -> None:
    """Allocate in a process of its own what fits, then what does not."""
    with limited(300_000_000):
        torch.ones(50_000_000)
        try:
            torch.ones(100_000_000)
        except RuntimeError as error:
            file.write_text(str(error))
    torch.ones(100_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_a_request_takes_no_more_memory_than_the_silo_allows(tmp_path: Path) -> None:
    process = WarmProcess(target=take, args=(tmp_path / "said",))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert "can't allocate memory" in (tmp_path / "said").read_text()


def test_no_request_reads_all_samples_to_know_what_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a process of its own, which knows what the process that holds the data has found."""
    from ekiden.silos import client_app

    (tmp_path / "own.py").write_text(TABLE)
    (tmp_path / "silo.toml").write_text('name = "a"\n[data]\npython = "own.py:mine"\n')
    file = keyed(read(tmp_path / "silo.toml"))
    monkeypatch.setattr(client_app, "_held", None)
    client_app.hold(file)
    assert client_app._held is not None
    held = client_app._held[1]
    (_, client), kept = held[""], ("digest", "variety")
    before = {name: vars(client.train)[name] for name in kept}
    monkeypatch.setattr(
        Subset, "x", property(lambda part: pytest.fail("a greeting reads all samples"))
    )
    said = unpack(Silo(file, held).answer(pack(Ask("hello"))), Answer)[0]
    assert not said.error
    assert {name: vars(client.train)[name] for name in kept} == before
