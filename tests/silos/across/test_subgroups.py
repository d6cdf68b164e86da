"""Tables of subgroups from silos: sums under masks, what a silo's file allows, and what verify
finds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ekiden.core.base.errors import UserError
from ekiden.methods import FedSeq
from ekiden.silos.coordinator.session import EVALUATIONS
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Limits, read
from ekiden.silos.trust import keys
from tests.silos.fakes import FakeNodes, evaluate
from tests.silos.sessions import far

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

NAMES = ("north", "south")
FILE = """
name = "{name}"
[data]
path = "{name}.csv"
label_column = "died"
[limits]
level = "models"
subgroups = ["sex", "age:50"]
own_figures = {own}
[link]
key = "{name}.key"
peers = "peers"
"""


class Nodes(FakeNodes):
    def silo(self, node: int) -> Silo:
        return Silo(self.files[node])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Nodes, dict[str, str], Path]:
    """A sealed run of two silos over tables, of which one shows its own figures."""
    from ekiden.cli.app import call

    folder = tmp_path_factory.mktemp("study")
    draw = np.random.default_rng(0)
    for name in NAMES:
        sex, age = draw.choice(["f", "m"], 400), draw.integers(20, 90, 400)
        died = np.where(draw.random(400) < 0.2 + 0.3 * (age > 60), "yes", "no")
        rows = [f"{a},{s},{d}" for a, s, d in zip(age, sex, died, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["age,sex,died", *rows]) + "\n")
        (folder / f"{name}.toml").write_text(
            FILE.format(name=name, own=str(name == "north").lower())
        )
    public = {name: keys.read_public(keys.generate(folder / f"{name}.key")) for name in NAMES}
    (folder / "peers").mkdir()
    for name, key in public.items():
        (folder / "peers" / f"{name}.pub").write_text(key)
    for name in NAMES:
        call(["silo", "sums", str(folder / f"{name}.toml")])
    call(
        [
            "federation",
            "agree",
            *(f"{folder}/{name}-sums.json" for name in NAMES),
            "--out",
            f"{folder}/agreed.json",
        ]
    )
    for name in NAMES:
        file = folder / f"{name}.toml"
        file.write_text(file.read_text().replace("[limits]", 'agreed = "agreed.json"\n[limits]'))
    nodes = Nodes([read(folder / f"{name}.toml") for name in NAMES])
    far(FedSeq(epochs=1), nodes, folder / "run", public, clients=",".join(NAMES))
    return nodes, public, folder / "run"


def measured(study: tuple[Nodes, dict[str, str], Path], *by: str, to: str) -> dict[str, Any]:
    nodes, public, run = study
    out = run / EVALUATIONS / to
    return evaluate(run, NAMES, nodes, out, public, lambda line: None, by=by, seconds=1.0, poll=0.0)


def test_silos_tell_of_subgroups_under_masks(study: tuple[Nodes, dict[str, str], Path]) -> None:
    row = measured(study, "sex,age:50", to="both")
    groups = row["subgroups"]["groups"]
    assert groups["sex"].keys() == {"f", "m"}
    assert groups["age"].keys() == {"below 50", "50 or more"}
    assert sum(one["samples"] for one in groups["sex"].values()) == 160
    assert groups["sex"]["f"]["gaps"]["auroc"][0] == pytest.approx(
        -groups["sex"]["m"]["gaps"]["auroc"][0]
    )
    assert groups["client"].keys() == {"north"}, "only the silo whose file says so"
    run = study[2]
    assert verify(run, study[1]).wrong == ()
    file = run / EVALUATIONS / "both" / "metrics.jsonl"
    groups["sex"]["f"]["values"]["auroc"] = 0.99
    file.write_text(json.dumps(row) + "\n")
    changed = "evaluations/both: metrics.jsonl, line 1, says "
    assert verify(run).wrong[0].startswith(changed)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (
            "age:51",
            r"asks for subgroups by age:51, north reports sex, age:50 \(limits.subgroups in its "
            r"silo.toml\)",
        ),
        ("age:49:50", "asks for subgroups by age:49:50"),
        ("seks", "unknown column 'seks': did you mean 'sex'"),
    ],
)
def test_silos_tell_only_of_the_columns_and_bounds_in_their_files(
    by: str, said: str, study: tuple[Nodes, dict[str, str], Path]
) -> None:
    with pytest.raises(UserError, match=said):
        measured(study, by, to="other")


def test_a_file_lists_each_column_once() -> None:
    assert Limits().subgroups == ()
    with pytest.raises(UserError, match="twice: two divisions subtracted would show a few samples"):
        Limits(subgroups=("age:50", "age:51"))
