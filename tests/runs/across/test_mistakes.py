"""Users' mistakes after a run: one line, exit code 2, and nothing half-written."""

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ekiden import FederatedData, load, run, split
from ekiden.data import Iid
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq, Local

Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def place(
    run_on_digits: Path,
    run_on_pictures: Path,
    blobs: FederatedData,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Runs and files as a user has them."""
    root = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(run_on_digits, root / "digits")
    shutil.copytree(run_on_pictures, root / "pictures")
    shutil.copytree(run_on_digits, root / "killed")
    (root / "killed" / "model.safetensors").unlink()
    shutil.copytree(run_on_digits, root / "damaged")
    content = bytearray((root / "damaged" / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (root / "damaged" / "model.safetensors").write_bytes(bytes(content))
    shutil.copytree(run_on_digits, root / "broken")
    (root / "broken" / "config.json").write_text("{")
    run(FedSeq(epochs=1), blobs, Tiny(), folder=root / "own")
    run(Local(epochs=1), split(load("digits"), Iid(), 2, seed=0), folder=root / "personal")
    (root / "empty").mkdir()
    (root / "images").mkdir()
    Image.new("L", (8, 8)).save(root / "images" / "good.png")
    Image.new("RGB", (8, 8), (200, 10, 10)).save(root / "colour.png")
    (root / "mixed").mkdir()
    Image.new("L", (8, 8)).save(root / "mixed" / "a.png")
    (root / "mixed" / "b.png").write_text("this is text")
    (root / "notes.txt").write_text("this is text")
    (root / "fake.parquet").write_text("this is text")
    (root / "zero.png").write_bytes(b"")
    pq.write_table(pa.table({"picture": [b"x"]}), root / "other.parquet")
    good = (root / "images" / "good.png").read_bytes()
    pq.write_table(pa.table({"image": [good, good, b"text"]}), root / "third.parquet")
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), root / "none.parquet")
    pq.write_table(pa.table({"image": [1.5]}), root / "numbers.parquet")
    np.save(root / "large.npy", np.zeros((2, 1, 9, 9), np.uint8))
    np.save(root / "floats.npy", np.zeros((2, 1, 8, 8)))
    np.save(root / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(root / "wide.npy", np.zeros((2, 5), np.float32))
    (root / "there.csv").write_text("mine")
    (root / "there.onnx").write_text("mine")
    (root / "full").mkdir()
    (root / "full" / "mine").write_text("mine")
    (root / "closed").mkdir()
    (root / "nets.py").write_text(
        "from torch import nn\n\ndef small():\n    return nn.Linear(4, 2)\n\nnumber = 3\n"
    )
    return root


PREDICT = [
    ("a folder that is not a run", "predict images images", "is not a run folder"),
    ("a run that is not there", "predict nowhere images", "is not a run folder"),
    (
        "a run that was killed",
        "predict killed images",
        "has no model.safetensors: run `ekiden resume`",
    ),
    ("a damaged model", "predict damaged images", "is damaged"),
    ("a damaged configuration", "predict broken images", "cannot be read"),
    ("no files", "predict digits", "name the files to predict: images"),
    (
        "a file that is not there",
        "predict digits missing.png",
        "there is no file or folder missing.png",
    ),
    ("an empty folder", "predict digits empty", "holds nothing to predict"),
    ("a text file", "predict digits notes.txt", "notes.txt is not a file that this model takes"),
    ("text that is called an image", "predict digits mixed", "mixed/b.png cannot be decoded"),
    ("an empty image", "predict digits zero.png", "zero.png cannot be decoded"),
    (
        "a colour image for a grey model",
        "predict digits colour.png",
        "colour.png: it is in colour, but the model",
    ),
    (
        "text that is called Parquet",
        "predict digits fake.parquet",
        "fake.parquet cannot be read as Parquet",
    ),
    (
        "a table without images",
        "predict digits other.parquet",
        "no column 'image', it has picture: name it by",
    ),
    (
        "a column that is not there",
        "predict digits other.parquet --column pic",
        "has no column 'pic', it has picture",
    ),
    ("a column of numbers", "predict digits numbers.parquet", "images must be bytes"),
    (
        "a broken row",
        "predict digits third.parquet",
        "row 2 (counted from 0, without the header) of third.parquet cannot be decoded",
    ),
    ("a table without rows", "predict digits none.parquet", "none.parquet has no row"),
    (
        "arrays of another size",
        "predict digits large.npy",
        "takes uint8 of shape (1, 8, 8), not uint8 of shape (1, 9, 9)",
    ),
    (
        "floats for an image model",
        "predict digits floats.npy",
        "takes uint8 of shape (1, 8, 8), not float32",
    ),
    (
        "pickled objects",
        "predict digits objects.npy",
        "objects.npy cannot be read (it holds Python objects)",
    ),
    (
        "another client's name",
        "predict personal images --client client-9",
        "there is no model of 'client-9'",
    ),
    (
        "no client's name",
        "predict personal images",
        "has models of client-0, client-1, and no global one",
    ),
    (
        "a client of a run without personal models",
        "predict digits images --client client-1",
        "gives no personal models",
    ),
    (
        "a run with a network from Python",
        "predict own wide.npy",
        "its own network (Tiny): give it by --network",
    ),
    (
        "another network",
        "predict own wide.npy --network nets.py:small",
        "holds another network than the run's",
    ),
    (
        "a network that is none",
        "predict own wide.npy --network nets.py:number",
        "nets.py:number is not a function",
    ),
    (
        "a network without a file",
        "predict own wide.npy --network small",
        "--network 'small' names no file",
    ),
    (
        "an unknown format",
        "predict digits images -o out.xlsx",
        "out.xlsx must end in .parquet or .csv, or be -",
    ),
    (
        "an output that is there",
        "predict digits images -o there.csv",
        "there.csv exists: choose another name, or add",
    ),
    ("an output in no folder", "predict digits images -o no/out.csv", "there is no folder no"),
    ("a flag that is none", "predict digits images --ouput out.csv", "--ouput"),
]
EXPORT = [
    (
        "an unknown format",
        "export digits --to onx -o a.onnx",
        "unknown format 'onx': did you mean 'onnx'",
    ),
    ("no output", "export digits --to onnx", "say what to write: -o OUT.parquet"),
    (
        "two runs",
        "export digits pictures --to onnx -o a.onnx",
        "a model is of one run: give one run folder",
    ),
    ("an output that is there", "export digits --to onnx -o there.onnx", "there.onnx exists"),
    (
        "a folder that is not empty",
        "export digits --to hf -o full",
        "full is a folder that is not empty",
    ),
    (
        "a folder for a file",
        "export digits --to pt2 -o empty",
        "empty is a folder: choose another name",
    ),
    ("a run that was killed", "export killed --to pt2 -o a.pt2", "has no model.safetensors"),
    ("no run", "export images --to pt2 -o a.pt2", "is not a run folder"),
    (
        "metrics with a client",
        "export digits -o out.csv --client client-1",
        "a client and a network are for models",
    ),
    ("metrics without a file", "export digits", "say what to write: -o OUT.parquet, OUT.onnx"),
    (
        "metrics of another ending",
        "export digits --to csv -o out.parquet",
        "out.parquet must end in .csv",
    ),
]
CARD = [
    ("no run", "card images", "is not a run folder"),
    ("an output that is there", "card digits -o there.csv", "there.csv exists"),
]


def state(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*")}


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        pytest.param(typed, wanted, id=f"{typed.split()[0]}: {what}")
        for what, typed, wanted in [*PREDICT, *EXPORT, *CARD]
    ],
)
def test_one_line_and_nothing_written(
    typed: str, wanted: str, place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    before = state(place)
    code, printed = command(*typed.split())
    assert (code, printed.count("\n")) == (2, 1), printed
    assert printed.startswith("ekiden: ")
    assert wanted in printed
    assert state(place) == before


def test_what_is_there_is_replaced_where_that_is_asked_for(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(place)
    (tmp_path / "out.csv").write_text("old")
    code, _ = command("predict", "digits", "images", "-o", str(tmp_path / "out.csv"), "--overwrite")
    assert code == 0
    assert (tmp_path / "out.csv").read_text().startswith('"file","prediction"')


def test_a_folder_that_cannot_be_written(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("closed"))
    code, printed = command("predict", "digits", "images", "-o", "closed/out.csv")
    assert (code, printed) == (2, "ekiden: cannot write closed/out.csv: closed is not writable\n")
    assert list((place / "closed").iterdir()) == []
    assert stat.S_ISDIR((place / "closed").stat().st_mode)


def test_a_missing_extra_is_named(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.chdir(place)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, printed = command("export", "digits", "--to", "onnx", "-o", "a.onnx")
    assert (code, printed) == (2, 'ekiden: ONNX needs an extra: pip install "ekiden[onnx]"\n')
    assert not (place / "a.onnx").exists()


def test_an_unfinished_run_says_how_far_it_is(
    place: Path, command: Command, tmp_path: Path
) -> None:
    """As `ekiden evaluate` does: its model so far can be used."""
    silos = split(load("digits"), Iid(), 3, seed=0)
    run(FedSeq(epochs=1), silos, folder=tmp_path / "run", stop_after=1)
    code, printed = command("predict", str(tmp_path / "run"), str(place / "images"))
    assert code == 0
    assert "the run stopped after step 1 of 3: this is its model so far" in printed
    code, printed = command("card", str(tmp_path / "run"))
    assert "**Not finished:** the run stopped after step 1 of 3" in printed
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 3
