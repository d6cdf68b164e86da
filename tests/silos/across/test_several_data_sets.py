"""One silo, several data sets: a run names the one that it wants, and nobody edits a file or
restarts a silo."""

from pathlib import Path
from typing import Any

import pytest

from ekiden import Training
from ekiden.core.base.errors import UserError
from ekiden.methods import FedSeq
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import keys
from tests.silos.across.test_attacks import Attacker
from tests.silos.across.test_networks_of_a_run import refused
from tests.silos.fakes import FakeNodes, evaluate

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

SILO = """name = "{name}"
[data.labs]
python = "own.py:labs"
[data.xray]
python = "own.py:xray"
[hardware]
threads = 1
[limits]
level = "models"
approve = false
[link]
key = "{name}.key"
peers = "peers"
"""
OWN = """
import torch
from ekiden.data import from_tensors

def points(width):
    x = torch.randn(60, width, generator=torch.Generator().manual_seed(width))
    return from_tensors((x, (x[:, 0] > 0).long()))

def labs():
    return points(4)

def xray():
    return points(6)
"""


class Nodes(FakeNodes):
    """Silos that stay the same over all requests."""

    def __init__(self, folder: Path) -> None:
        (folder / "own.py").write_text(OWN)
        for name in "ab":
            (folder / f"{name}.toml").write_text(SILO.format(name=name))
        files = [read(folder / f"{name}.toml") for name in "ab"]
        for file in files:
            keys.generate(file.key)
        super().__init__(files)
        (folder / "peers").mkdir()
        for name, key in self.public.items():
            (folder / "peers" / f"{name}.pub").write_text(key)
        self.silos = {node: Silo(file) for node, file in self.files.items()}

    def silo(self, node: int) -> Silo:
        return self.silos[node]


def far(nodes: Nodes, folder: Path, data: str) -> Any:
    recipe = Recipe(
        FedSeq(epochs=1), model="mlp", training=Training(batch_size=32), evaluate_every=0
    )
    return session.run(
        RemotePlan(recipe, "a,b", data=data, patience=0.1),
        nodes,
        folder,
        nodes.public,
        lambda line: None,
        poll=0,
    )


def test_a_run_names_the_data_set_that_it_wants(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for name, width in (("labs", 4), ("xray", 6), ("labs", 4)):
        folder = tmp_path / f"{name}-{len(list(tmp_path.glob('*-run')))}-run"
        far(nodes, folder, name)
        terms = agreements.parse((folder / "agreement.json").read_text())
        assert (terms.data, terms.shape) == (name, (width,))
        assert verify(folder, nodes.public).wrong == ()
    row = evaluate(
        tmp_path / "xray-1-run",
        ("a", "b"),
        nodes,
        tmp_path / "again",
        nodes.public,
        lambda line: None,
        poll=0,
    )
    assert row["figures"]["samples"] > 0
    assert "a and the run are of different shape: (6,)" in refused(
        Attacker(nodes, terms), data="xray"
    )
    for wrong, line in (("ct", "holds no data set 'ct', but labs, xray"), ("", "choose by")):
        with pytest.raises(UserError, match=line):
            far(nodes, tmp_path / "none", wrong)
    assert not (tmp_path / "none").exists()
