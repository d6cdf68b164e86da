"""Every command and every line of Python on docs/own-data.md, typed in."""

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from tests.pages import DOCS, blocks
from tests.readers.own_data import patients, sentences

PAGE = DOCS / "own-data.md"
pytestmark = pytest.mark.xdist_group("own-data page")  # a command reads what one before it wrote
COMMANDS = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page names."""
    folder = tmp_path_factory.mktemp("page")
    rng = np.random.default_rng(0)
    pandas.DataFrame(patients(120)).to_csv(folder / "patients.csv", index=False)
    visits = pandas.DataFrame(patients(120)).assign(
        patient=[f"p{k // 3}" for k in range(120)], seen=range(120)
    )
    visits.to_csv(folder / "visits.csv", index=False)
    (folder / "wards").mkdir()
    for k, name in enumerate(("north", "south")):
        rows = {
            c: v for c, v in patients(40, seed=k).items() if c in ("age", "sex", "dose", "died")
        }
        pandas.DataFrame(rows).to_csv(folder / "wards" / f"{name}.csv", index=False)
    (named,) = (block.text for block in blocks(PAGE, "toml") if block.text.startswith("[silos]"))
    (folder / "wards.toml").write_text(named)
    pandas.DataFrame(sentences(90)).rename(columns={"label": "mood"}).to_csv(
        folder / "reviews.csv", index=False
    )
    x, y = rng.normal(size=(60, 2, 32)).astype(np.float32), np.arange(60) % 2
    np.savez(folder / "signals.npz", x=x, y=y)
    columns = {"vector": list(x[:, 0]), "kind": [f"kind {k}" for k in y], "site": np.arange(60) % 3}
    pandas.DataFrame(columns).to_parquet(folder / "embeddings.parquet")
    listed = []
    for k in range(40):
        file = folder / "photos" / ("cat", "dog")[k % 2] / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20 + k, 40, 3), dtype=np.uint8)).save(file)
        listed.append(
            (f"photos/{file.parent.name}/{file.name}", file.parent.name, f"scanner {k % 4 // 2}")
        )
    pandas.DataFrame(listed, columns=["file", "kind", "scanner"]).to_csv(
        folder / "photos.csv", index=False
    )
    return folder


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 12


@pytest.mark.slow
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run(
    line: str, files: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    name, *words = shlex.split(line)
    assert name == "ekiden"
    code, said = command(*words)
    assert code == 0, said


@pytest.mark.usefixtures("no_data")
def test_the_python_runs(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    space: dict[str, object] = {}
    for block in blocks(PAGE, "python"):
        exec(compile(block.text, str(PAGE), "exec"), space)
    assert capsys.readouterr().out == "regression ('age', 'dose')\n(120, 2)\n"
