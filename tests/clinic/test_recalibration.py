"""The recalibration of a model of two classes and its threshold, in all that uses the model."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ekiden import Hardware, Training, UserError, evaluate, load_model, open_run, run
from ekiden.data import federate
from ekiden.methods import FedSeq
from ekiden.runs.card import card
from ekiden.runs.exporting import about

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Path:
    """A run of two silos whose probabilities are too high, as rare deaths have more weight."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    died = x[:, 0] + rng.logistic(size=400) > 2
    names = np.where(died, "yes", "no")
    rows = [
        f"{a:.3f},{b:.3f},w{k % 2},{name}"
        for k, ((a, b), name) in enumerate(zip(x, names, strict=True))
    ]
    Path("t.csv").write_text("\n".join(["a,b,ward,died", *rows]))
    flags = (
        "--label-column",
        "died",
        "--group-column",
        "ward",
        "--val-fraction",
        "0.4",
        "--class-weights",
        "balanced",
    )
    code, said = command(
        "run", "fedseq", "--data", "t.csv", *flags, "--epochs", "3", "--out", "runs"
    )
    assert code == 0, said
    (found,) = Path("runs").iterdir()
    return found


@pytest.mark.slow  # measures AUROC
def test_it_goes_with_the_model(folder: Path, command: Command) -> None:
    raw = load_model(folder)
    x = torch.randn(50, 2)
    before = raw.network(x)
    assert command("evaluate", str(folder), "--calibrate", "platt", "--threshold", "0.3")[0] == 0
    how = json.loads((folder / "recalibration.json").read_text())
    assert (how["form"], how["threshold"], how["rule"]) == ("platt", 0.3, "chosen")
    assert how["intercept"] < -0.5, "weights of classes made the probabilities too high"
    kept = (folder / "recalibration.json").read_bytes()
    row = evaluate(folder, calibrate="platt", threshold=0.3)
    assert row["recalibration"] == how
    assert (folder / "recalibration.json").read_bytes() == kept, (
        "Python and the command line fit the same"
    )
    model = load_model(folder)
    logits = model.network(x)
    z = how["slope"] * (before[:, 1] - before[:, 0]) + how["intercept"]
    torch.testing.assert_close(logits.softmax(1)[:, 1], z.sigmoid())
    assert about(model, named=True)["recalibration"]["threshold"] == 0.3
    text = card(open_run(folder))
    assert f"became {how['slope']:.4g}·z" in text
    assert command("predict", str(folder), "t.csv", "-o", "p.csv")[0] == 0
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert all(
        (row["prediction"] == "yes") == (float(row["probability_yes"]) >= 0.3) for row in rows
    )
    assert 0 < sum(row["prediction"] == "yes" for row in rows) < len(rows)
    assert sum(float(row["probability_yes"]) for row in rows) == pytest.approx(
        sum(line.endswith("yes") for line in Path("t.csv").read_text().splitlines()), rel=0.25
    )
    code, said = command("predict", str(folder), "t.csv", "--threshold", "youden")
    assert (code, "measured thresholds before it was recalibrated" in said) == (2, True)
    assert command("evaluate", str(folder), "--calibrate", "temperature")[0] == 0
    again = json.loads((folder / "recalibration.json").read_text())
    assert (again["form"], again["intercept"], again["rule"]) == ("temperature", 0.0, "Youden")
    (folder / "recalibration.json").write_text(json.dumps(again | {"model": "0" * 64}))
    with pytest.raises(UserError, match="is of an earlier model"):
        load_model(folder)


def test_what_cannot_be_recalibrated_is_one_line(tmp_path: Path, command: Command) -> None:
    y = torch.arange(40) % 3
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    training = Training(batch_size=16)
    run(
        FedSeq(epochs=1),
        federate([(x, y)]),
        training=training,
        hardware=Hardware(threads=1),
        folder=tmp_path / "r",
    )
    code, said = command("evaluate", str(tmp_path / "r"), "--calibrate", "platt")
    assert (code, len(said.splitlines())) == (2, 1), said
    for given, what in (
        ({"calibrate": "platt"}, "for a global model of two classes: leave it out"),
        ({"calibrate": "plat"}, "calibrate 'plat' is unknown"),
        ({"calibrate": "platt", "by": "a"}, "leave out the rest"),
        ({"threshold": 0.3}, "threshold is for calibrate: give both, or none"),
        ({"threshold": 1.5}, "threshold"),
    ):
        with pytest.raises(UserError, match=what):
            evaluate(tmp_path / "r", federate([(x, y)]), **given)
    code, said = command("evaluate", str(tmp_path / "r"), "--calibrate", "platt", "--client", "a")
    assert (code, "own validation data" in said) == (2, True)


def test_numbers_cannot_be_recalibrated(folder: Path, command: Command) -> None:
    flags = ("--label-column", "a", "--drop-columns", "died", "--task", "regression")
    code, said = command("run", "fedseq", "--data", "t.csv", *flags, "--out", "numbers")
    assert code == 0, said
    (numbers,) = Path("numbers").iterdir()
    code, said = command("evaluate", str(numbers), "--calibrate", "platt")
    assert (code, "--calibrate is for two classes: leave it out" in said) == (2, True), said
