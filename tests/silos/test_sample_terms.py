"""What silos must agree on about their samples."""

from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.methods import (
    FedSeq,
)
from ekiden.silos.silo import silo_file as silo_toml
from tests.silos.fakes import NAMES, FakeNodes, silo_file
from tests.silos.sessions import far


def test_silos_whose_data_do_not_go_together(tmp_path: Path) -> None:
    other = tmp_path / "client-1.toml"
    files = [silo_file(tmp_path, name) for name in NAMES]
    other.write_text(
        'name = "client-1"\n[data]\npath = "digits"\nsize = 16\n[limits]\nlevel = "models"\n'
    )
    with pytest.raises(UserError, match="client-0 and client-1 hold data of different shape"):
        far(
            FedSeq(epochs=1),
            FakeNodes([files[0], silo_toml.read(other), files[2]]),
            tmp_path / "run",
        )
