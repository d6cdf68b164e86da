"""Silos that write the same classes in another way, and silos with a kind of samples in a file of
their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ekiden import Training
from ekiden.core.base import outside
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.methods import FedAvg
from ekiden.readers.scaling import agree_on
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust.agreement import parse
from tests.readers.test_kinds import KIND, spectrum
from tests.silos.fakes import FakeNodes

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

NAMES = ("north", "south")


def plan(**more: Any) -> RemotePlan[Any]:
    return RemotePlan(
        Recipe(
            FedAvg(rounds=3, epochs=5), training=Training(lr=1e-2, batch_size=8), evaluate_every=0
        ),
        "north,south",
        **more,
    )


def run(folder: Path, **more: Any) -> Any:
    nodes = FakeNodes([read(folder / f"{name}.toml") for name in NAMES])
    return session.run(plan(**more), nodes, folder / "run", nodes.public, lambda line: None, poll=0)


def vectors(folder: Path, classes: dict[str, tuple[str, ...]]) -> None:
    for seed, (name, names) in enumerate(classes.items()):
        draw = np.random.default_rng(seed)
        y = np.arange(60) % len(names)
        x = (
            draw.normal(size=(60, 4))
            + 4 * np.eye(4)[np.array([n.strip().casefold() == "yes" for n in names])[y] * 1]
        )
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=np.array(names)[y])
        (folder / f"{name}.toml").write_text(
            f'name = "{name}"\n[data]\npath = "{name}.npz"\n[hardware]\nthreads = 1\n'
            '[limits]\nlevel = "models"\nexact_evaluation = true\n'
        )


def test_other_classes_are_refused(tmp_path: Path) -> None:
    vectors(tmp_path, {"north": ("no", "Yes"), "south": ("YES", "no")})
    with pytest.raises(
        UserError,
        match=r"differ in case, blanks, signs or leading zeros only, or mean the same: write them alike",
    ):
        run(tmp_path)
    vectors(tmp_path, {"north": ("no", "Yes"), "south": ("yes", "maybe")})
    with pytest.raises(UserError, match="north and south hold data of different classes"):
        run(tmp_path)
    vectors(tmp_path, {"north": ("0", "1"), "south": ("1", "2")})
    with pytest.raises(
        UserError, match="some count classes from 0 and others from 1: number them alike"
    ):
        run(tmp_path)


def test_sums_with_classes_counted_from_0_and_from_1_are_refused(tmp_path: Path) -> None:
    files = []
    for seed, name in enumerate(NAMES):
        draw = np.random.default_rng(seed)
        table = pd.DataFrame({"dose": draw.normal(size=60), "label": seed + np.arange(60) % 2})
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\n[data]\npath = "{name}.csv"\n[limits]\nlevel = "models"\n'
        )
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(read(tmp_path / f"{name}.toml").sums().to_json())
    with pytest.raises(
        UserError, match="classes are 0 to 1 at north, but 1 to 2 at south: number them alike"
    ):
        agree_on(files)
    assert agree_on(files, "keep").table is not None


def test_sums_with_classes_that_no_other_silo_has_are_named(tmp_path: Path) -> None:
    files = []
    for silo, names in {"north": "BM", "south": "BM", "east": ("benign", "malignant")}.items():
        draw = np.random.default_rng(len(silo))
        table = pd.DataFrame(
            {"dose": draw.normal(size=60), "label": [names[k % 2] for k in range(60)]}
        )
        table.to_csv(tmp_path / f"{silo}.csv", index=False)
        (tmp_path / f"{silo}.toml").write_text(
            f'name = "{silo}"\n[data]\npath = "{silo}.csv"\n[limits]\nlevel = "models"\n'
        )
        files.append(tmp_path / f"{silo}.json")
        files[-1].write_text(read(tmp_path / f"{silo}.toml").sums().to_json())
    with pytest.warns(
        DataWarning, match=r"silo east shares no class with others .*'M' .* may be 'malignant'"
    ):
        agree_on(files)


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two silos, each with its own copy of the file that defines their kind of samples."""
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    for first, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(KIND)
        outside.trust(f"{tmp_path}/{name}/mine.py:Spectra")
        for k in range(60):
            file = tmp_path / name / "lab" / "ab"[k % 2] / f"{k}.spc"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(spectrum(k + 100 * first))
        silo = f'name = "{name}"\n[data]\npath = "{name}/lab"\nsample_kind = "{name}/mine.py:Spectra"\n'
        (tmp_path / f"{name}.toml").write_text(
            silo + '[hardware]\nthreads = 1\n[limits]\nlevel = "models"\nexact_evaluation = true\n'
        )
    return tmp_path


@pytest.mark.slow
def test_a_kind_in_a_file_travels_by_its_name_and_digest(labs: Path) -> None:
    # The noise of counts from few samples would move the accuracy by more than 0.1.
    result = run(labs, evaluate_dp="exact")
    assert result.metrics[-1]["accuracy"] > 0.9
    kind = json.loads(parse((labs / "run" / "agreement.json").read_text()).inputs)["kind"]
    assert kind == outside.by_content(f"{labs}/north/mine.py:Spectra")
    assert str(labs) not in (labs / "run" / "agreement.json").read_text()


def test_silos_with_another_file_are_refused_and_no_party_runs_what_it_was_not_told_to(
    labs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (labs / "south" / "mine.py").write_text(KIND + "\n# changed\n")
    outside.trust(f"{labs}/south/mine.py:Spectra")
    with pytest.raises(UserError, match="north and south hold data of different inputs"):
        run(labs)
    (labs / "south" / "mine.py").write_text(KIND)
    held = read(labs / "north.toml").load()
    assert held[0].shape == (6,)
    run(labs)
    text = (labs / "run" / "agreement.json").read_text()
    monkeypatch.setenv("EKIDEN_CACHE", str(labs / "others"))  # a party that never named the file
    line = r"the kind of samples: mine.py:Spectra is code that is not here, or that was never .* `ekiden trust mine.py`"
    with pytest.raises(UserError, match=line):
        parse(text)
