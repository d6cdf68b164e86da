"""Private FedGram over a real SuperLink and SuperNodes: the noise is the silos' own, and their
ledgers bound it."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ekiden.core.training.private.promise import DP
from ekiden.methods import FedGram
from tests.e2e.silos import NAMES, Federation, expected, running

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.xdist_group("flower"),
    pytest.mark.filterwarnings(
        "ignore::ekiden.core.base.errors.DivergenceWarning"
    ),  # 1,296 digits are few for the noise
]
PROMISE = "epsilon=5,delta=0.0001,clip=0.3,honest=3"
LIMITS = "[limits]\nhonest = 3\nepsilon = 8.0\ndelta = 0.001\n"


def start(federation: Federation, name: str) -> None:
    file = federation.folder / f"{name}.toml"
    file.write_text(file.read_text().replace("[limits]\n", LIMITS))
    federation.start_silo(name)


def test_noisy_sums_between_silos_are_charged_and_end_with_the_budget(tmp_path: Path) -> None:
    """What does not depend on noise has the bits of a simulation with the seed; the classifier has
    other noise."""
    (tmp_path / "fed").mkdir()
    with running(tmp_path / "fed", start) as federation:
        ledgers = [federation.folder / f"{name}-silo" / "privacy.jsonl" for name in NAMES]
        said = federation.run(
            "fedgram", "--width", "60", "--dp", PROMISE, "--out", "runs", timeout=500
        )
        there = federation.folder / "runs" / "fedgram-flower-seed3"
        assert (there / "model.safetensors").exists(), said
        method = FedGram(width=60, dictionary="seed", min_active=10)
        expected(method, here := tmp_path / "here", dp=DP.parse(PROMISE))
        assert (there / "ledger.jsonl").read_bytes() == (here / "ledger.jsonl").read_bytes()
        one, two = (load_file(folder / "model.safetensors") for folder in (there, here))
        assert one.keys() == two.keys()
        differ = {name for name in one if not one[name].equal(two[name])}
        assert differ
        assert all(
            one[name].shape[0] == 10 for name in differ
        )  # weights and biases of the classifier
        spent = [json.loads(line) for ledger in ledgers for line in ledger.read_text().splitlines()]
        assert [(line["epsilon"], line["steps"]) for line in spent] == [
            (5.0, 1)
        ] * 4  # three sums, and a mean
        assert len({line["mark"] for line in spent}) == 4
        assert len({line["run"] for line in spent}) == 1
        said = " ".join(federation.ekiden("verify", str(there), "--keys", "keys").split())
        assert (
            "it trained with differential privacy (epsilon=5,delta=0.0001,clip=0.3,honest=3)"
            in said
        )
        assert "verified: " in said

        before = [ledger.read_bytes() for ledger in ledgers]
        said = federation.run(
            "fedgram", "--width", "60", "--dp", PROMISE, "--out", "again", timeout=500
        )
        text = r"client-. has promised epsilon 5 in 1 earlier runs and allows 8 over all runs, this one wants 5: lower it"
        assert len(re.findall(text, " ".join(said.split()))) == len(NAMES), said
        assert not [*(federation.folder / "again").rglob("model.safetensors")]
        assert [ledger.read_bytes() for ledger in ledgers] == before
        said = federation.run(
            "fedgram", "--width", "60", "--out", "plain", timeout=500
        )  # and none without noise
        assert "the run trains without noise, client-" in " ".join(said.split())
