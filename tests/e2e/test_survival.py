"""Cox regression over a real SuperLink and real SuperNodes: the numbers of lifelines, from masked
sums."""

import json
from pathlib import Path

import pytest

from tests.e2e.silos import NAMES, Federation, running

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
REFERENCE = json.loads((Path(__file__).parents[1] / "methods" / "survival.json").read_text())
OWN = """
from ekiden.data import federate
from tests.methods.survival_reference import CUT, cohort

def mine():
    silos = [{name: list(values[rows]) for name, values in cohort().items()} for rows in (slice(CUT), slice(CUT, None))]
    names = ["client-0", "client-1"]
    return federate(silos, tests=silos, names=names, val_fraction=0.0, label_column=["days", "died"], task="survival")
"""


def start(federation: Federation, name: str) -> None:
    """Two silos that hold the patients."""
    file = federation.folder / f"{name}.toml"
    (federation.folder / "own.py").write_text(OWN)
    file.write_text(file.read_text().replace('"fedseq"]', '"fedseq", "glm"]'))
    if name != NAMES[2]:
        federation.start_silo(name)


def test_silos_compute_what_lifelines_does(tmp_path: Path) -> None:
    (tmp_path / "flower").mkdir()
    with running(tmp_path / "flower", start) as federation:
        flags = (
            "--clients",
            ",".join(NAMES[:2]),
            "--family",
            "cox",
            "--laps",
            "5",
            "--times",
            "100,200,500",
            "--out",
            "runs",
        )
        said = federation.run("glm", *flags, timeout=570)
        (folder,) = (federation.folder / "runs").iterdir()
        shown = json.loads(federation.ekiden("show", str(folder), "--json"))
        (federation.folder / "new.csv").write_text("age,bmi,sex,stage\n60,27,m,II\n70,27,m,II\n")
        rows = federation.ekiden(
            "predict", str(folder), "new.csv", "--at", "100", "500"
        ).splitlines()
        assert "verified: " in federation.ekiden("verify", str(folder), "--keys", "keys")
    found = shown["coefficients"]
    assert rows[0].endswith('"survival_100","survival_500"'), rows
    young, old = ([float(value) for value in row.split(",")[-2:]] for row in rows[1:3])
    assert 1 > young[0] > young[1] > 0
    assert all(a > b for a, b in zip(young, old, strict=True))
    assert len(found) == len(REFERENCE["estimate"]), said
    for k, one in enumerate(found):
        error = REFERENCE["error"][k]
        assert one["estimate"] == pytest.approx(REFERENCE["estimate"][k], abs=1e-6 * error)
        assert one["error"] == pytest.approx(error, rel=1e-6)
        assert one["p"] == pytest.approx(REFERENCE["p"][k], abs=1e-6)
    assert "c_index" in said
