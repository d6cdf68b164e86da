"""Measuring a run again: on its own data, and on other data of its kind."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ekiden import FederatedData, Training, UserError, load, open_run, run, split
from ekiden.data import Iid, from_tensors
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq, Local


def test_evaluate_measures_as_the_run_did(run_on_digits: Path) -> None:
    opened = open_run(run_on_digits)
    test = load("digits").test
    silos = split(load("digits"), Iid(), 3, seed=0)
    wanted = opened.metrics[-1]
    for data in (silos, silos.dataset, (test.x, test.y), "digits"):
        assert opened.evaluate(data)["accuracy"] == wanted["accuracy"]
    row = opened.evaluate(silos)
    assert {name: row[name] for name in ("loss", "clients", "client_worst")} == {
        name: wanted[name] for name in ("loss", "clients", "client_worst")
    }
    with pytest.raises(UserError, match="cannot take samples of shape"):
        opened.evaluate(
            (torch.randint(256, (30, 3, 9, 9)).to(torch.uint8), torch.zeros(30, dtype=torch.int64))
        )


def patients(n: int, seed: int = 0) -> dict[str, list[Any]]:
    draw = random.Random(seed)
    age = [draw.randint(20, 90) for _ in range(n)]
    sex = [draw.choice("fm") for _ in range(n)]
    return {
        "age": age,
        "sex": sex,
        "ward": [draw.choice("ab") for _ in range(n)],
        "died": ["yes" if a > 60 else "no" for a in age],
    }


def test_evaluate_reads_a_table_as_the_run_did(tmp_path: Path) -> None:
    """Other rows have other means and categories; they are scaled by the run's."""
    columns: Any = {"label_column": "died", "drop_columns": ["ward"]}
    silos = split(load(patients(200), group_column="ward", label_column="died"), "natural")
    result = run(FedSeq(epochs=30), silos, training=Training(lr=0.01), folder=tmp_path / "run")
    assert result.evaluate(silos)["accuracy"] == result.accuracy
    other = patients(200, seed=1)
    other["age"], other["died"] = [a + 40 for a in other["age"]], ["yes"] * 199 + ["no"]
    row = result.evaluate(other, **columns)
    assert row["accuracy"] > 0.9, "all are old on the run's scale, and half of them on their own"
    assert (tmp_path / "other.csv").write_text("age,sex,died\n" + "90,f,yes\n" * 50)
    assert result.evaluate(tmp_path / "other.csv", label_column="died")["accuracy"] == 1
    with pytest.raises(
        UserError, match="scaled differently from the run's: give their path or frame"
    ):
        result.evaluate(load(other, **columns))
    renamed = patients(50) | {"died": ["dead", "alive"] * 25}
    with pytest.raises(
        UserError,
        match=r"label 'alive' in row 1 \(counted from 0, without the header\) of the table is not among the classes",
    ):
        result.evaluate(renamed, **columns)


def test_evaluate_refuses_other_labels(run_on_digits: Path) -> None:
    """Ten other classes are as many, but mean something else."""
    test = load("digits").test
    other = from_tensors(
        (test.x, test.y), (test.x, test.y), classes=[f"digit {k}" for k in range(10)]
    )
    with pytest.raises(
        UserError, match=r"the model gives 0, 1, .*; the labels of these data are digit 0, digit 1"
    ):
        open_run(run_on_digits).evaluate(other)


def test_evaluate_needs_the_silos_of_personal_models(blobs: FederatedData) -> None:
    result = run(Local(epochs=1), blobs, Tiny())
    assert result.evaluate(blobs)["accuracy"] == result.accuracy
    with pytest.raises(UserError, match="a model for each of 4 clients, but the data have 1"):
        result.evaluate(blobs.dataset)
    with pytest.raises(UserError, match="unknown client 'client-9'"):
        result.load_model(client="client-9")


def test_other_images_are_read_as_those_of_the_run(tmp_path: Path) -> None:
    """Cut out of the middle, not stretched: otherwise the same files give other numbers."""
    draw = np.random.default_rng(0)
    for number in range(40):
        pixels = draw.integers(0, 256, (8, 24), dtype=np.uint8)
        pixels[:, 8:16] = pixels[:, 8:16] // 4 + (0 if number % 2 else 190)  # only the middle tells
        file = tmp_path / "photos" / ("dark", "bright")[number % 2 == 0] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    silos = split(load(str(tmp_path / "photos"), size=8, fit="crop"), Iid(), 2)
    result = run("fedseq", silos, "mlp", folder=tmp_path / "run")
    found = result.evaluate(str(tmp_path / "photos"), part="test")
    assert found["loss"] == pytest.approx(result.metrics[-1]["loss"], rel=1e-5)


def outside(tmp_path: Path, n: int = 400) -> Path:
    """A table of other patients, as large as the file says."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, generator=draw)
    y = (x + torch.randn(n, generator=draw) > 0).long().tolist()
    rows = "".join(f"{a:.4f},{b}\n" for a, b in zip(x.tolist(), y, strict=True))
    (tmp_path / "external.csv").write_text("x,died\n" + rows)
    return tmp_path / "external.csv"


def test_external_data_are_measured_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    own, other = tmp_path / "own.csv", outside(tmp_path)
    own.write_text("\n".join(other.read_text().splitlines()[:121]) + "\n")
    flags = ("--clients", "2", "--partition", "iid", "--metric", "auroc", "--label-column", "died")
    assert command("run", "fedseq", "--data", "own.csv", "--epochs", "1", *flags)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    result = open_run(folder)
    frame = load(other, label_column="died", whole=True)
    inside = result.evaluate(str(other), label_column="died")
    assert inside["figures"]["samples"] == 400
    assert result.evaluate(str(other), label_column="died", part="test")["figures"]["samples"] == 80
    assert frame.train is frame.test
    assert len(frame.test) == 400
    code, said = command("evaluate", str(folder), "--data", "external.csv")
    assert code == 0
    assert "on 400 of 400 rows" in said
    value = json.loads(command("evaluate", str(folder), "--data", "external.csv", "--json")[1])
    assert (value["samples"], value["rows"]) == (400, 400)
    assert value["auroc"] == pytest.approx(inside["auroc"])
    assert (
        "on 80 of 400 rows"
        in command("evaluate", str(folder), "--data", "external.csv", "--part", "test")[1]
    )
    with pytest.raises(UserError, match=r"the run was trained on own\.csv: leave it out"):
        result.evaluate("own.csv")
