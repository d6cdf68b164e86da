"""`ekiden predict`: its predictions for the test data give what the run reported."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch

from ekiden import load, load_model, run
from ekiden.cli.flags import texts_below
from ekiden.cli.serving import ExportOptions, PredictOptions
from ekiden.core.engine.folder import read_lines
from ekiden.core.tasks import MultiLabel, Regression, Task
from ekiden.data import ClientData, Dataset, FederatedData, Iid, Samples, Subset, split
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedSeq, Local
from ekiden.readers.kinds import of_tensor
from ekiden.runs.predictions import TABLES, Answers, predict, written_whole
from tests.runs.predicted import reported

Command = Callable[..., tuple[int, str]]


def test_pictures_of_any_size_and_mode_are_seen_as_in_training(
    run_on_pictures: Path, pictures: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "predictions.parquet"
    assert command("predict", str(run_on_pictures), str(pictures / "test"), "-o", str(out))[0] == 0
    found = pd.read_parquet(out)
    truth = [Path(file).parent.name for file in found.file]
    assert (found.prediction == truth).mean() == reported(run_on_pictures)
    assert list(found) == [
        "file",
        "prediction",
        "probability_none",
        "probability_one",
        "probability_two",
    ]
    each = found.filter(like="probability").to_numpy()
    assert np.allclose(each.sum(1), 1, atol=1e-5)
    assert (found.prediction == np.array(["none", "one", "two"])[each.argmax(1)]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]


def test_a_personal_model_answers_for_its_client(tmp_path: Path) -> None:
    silos = split(load("digits"), Iid(), 2, seed=0)
    run(Local(epochs=1), silos, folder=tmp_path / "run")
    rows = silos.clients[1].test.rows
    np.save(tmp_path / "x.npy", silos.dataset.test.x[rows].numpy())
    model = load_model(tmp_path / "run", client="client-1")
    predict(Answers(model), [tmp_path / "x.npy"], str(tmp_path / "out.csv"))
    found = pd.read_csv(tmp_path / "out.csv")
    wanted = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["clients"][1]
    assert (found.prediction == silos.dataset.test.y[rows].numpy()).mean() == wanted


@pytest.mark.parametrize("suffix", TABLES)
def test_a_table_has_the_format_of_its_name_and_helps_name_it(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"table{suffix}"
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    with written_whole(str(file)) as write:
        assert write(table) == 2
    assert pa.dataset.dataset(file, format=suffix[1:]).to_table().equals(table)
    assert suffix[1:] in texts_below(ExportOptions)["to"]
    assert suffix in texts_below(PredictOptions)["out"]


def numbers(task: Task, y: torch.Tensor, names: tuple[str, ...]) -> FederatedData:
    """Two silos with 4 numbers each sample."""
    samples = Samples(torch.randn(len(y), 4, generator=torch.Generator().manual_seed(1)), y)
    parts = torch.arange(len(y)).chunk(6)
    clients = (
        ClientData(f"client-{i}", *(Subset(samples, part) for part in parts[3 * i : 3 * i + 3]))
        for i in (0, 1)
    )
    return FederatedData(
        Dataset("numbers", samples, samples, names, task=task, inputs=of_tensor(samples.x)),
        tuple(clients),
    )


@pytest.mark.parametrize(
    ("task", "names", "wanted"),
    [
        (Regression(mean=(50.0,), std=(3.0,)), ("age",), ["prediction"]),
        (Regression(mean=(50.0,), std=(3.0,)), ("a", "b"), ["prediction_a", "prediction_b"]),
        (
            MultiLabel(),
            ("cough", "fever"),
            ["prediction", "probability_cough", "probability_fever"],
        ),
    ],
    ids=["one number", "two numbers", "labels"],
)
def test_each_task_has_its_columns(
    task: Task, names: tuple[str, ...], wanted: list[str], tmp_path: Path
) -> None:
    n = 120
    y = torch.rand(n, len(names), generator=torch.Generator().manual_seed(2)).round()
    data = numbers(task, y + 50 if isinstance(task, Regression) else y, names)
    run(FedAvg(rounds=1, epochs=1), data, torch.nn.Linear(4, len(names)), folder=tmp_path / "run")
    model = load_model(tmp_path / "run", network=torch.nn.Linear(4, len(names)))
    x = data.dataset.test.x
    np.save(tmp_path / "x.npy", x.numpy())
    predict(Answers(model), [tmp_path / "x.npy"], str(tmp_path / "out.parquet"))
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert list(found)[2:] == wanted
    with torch.no_grad():
        raw = model(x)
    if isinstance(task, Regression):
        expected = (raw * 3 + 50).numpy()
        assert np.allclose(found[wanted].to_numpy(), expected)
    else:
        assert np.allclose(found[wanted[1:]].to_numpy(), raw.sigmoid().numpy())
        first = [name for name, value in zip(names, raw[0], strict=True) if value >= 0]
        assert found.prediction[0] == ";".join(first)


def test_features_from_python_are_predicted(blobs: FederatedData, tmp_path: Path) -> None:
    result = run(FedSeq(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    x, y = blobs.dataset.test.x, blobs.dataset.test.y
    np.save(tmp_path / "x.npy", x.numpy().astype(np.float64))
    predict(
        Answers(load_model(tmp_path / "run", network=Tiny)),
        [tmp_path / "x.npy"],
        str(tmp_path / "out.parquet"),
    )
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert (found.prediction.astype(int) == y.numpy()).mean() == pytest.approx(
        result.accuracy, abs=1e-12
    )


def test_rows_of_a_table_are_encoded_as_the_silos_agreed(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    size = draw.normal(50, 20, 240)
    ward = draw.choice(["north", "south"], 240)
    frame = pd.DataFrame({"size": size, "ward": ward, "clinic": draw.integers(0, 3, 240)})
    frame["label"] = np.where(size + np.where(ward == "north", 20, -20) > 50, "ill", "well")
    frame.loc[::17, "size"] = None
    (tmp_path / "data").mkdir()
    frame[:180].to_parquet("data/train.parquet", index=False)
    frame[180:].to_parquet("data/test.parquet", index=False)
    frame[180:].drop(columns=["label", "clinic"]).to_csv("new.csv", index=False)
    flags = ["--group-column", "clinic", "--partition", "natural", "--rounds", "2", "--epochs", "3"]
    code, printed = command("run", "fedavg", "--data", "data", *flags)
    assert code == 0, printed
    run_folder = tmp_path / "runs" / "fedavg-data-seed0"
    for file in ("new.csv", "data/test.parquet"):
        code, printed = command(
            "predict", str(run_folder), file, "-o", "out.parquet", "--overwrite"
        )
        assert code == 0, printed
        found = pd.read_parquet("out.parquet")
        assert (found.prediction.to_numpy() == frame.label[180:].to_numpy()).mean() == reported(
            run_folder
        )
        assert "does not know" not in printed
    strange = frame[180:].reset_index(drop=True)
    strange.loc[:4, "ward"], strange.loc[5, "ward"] = "east", "West"
    strange.to_csv("strange.csv", index=False)
    line = (
        "strange.csv holds categories that the model does not know (column 'ward': 'east', 'West' "
        "in 6 of 60 rows): "
        "all of them count as one, as categories with too few rows did in training"
    )
    for args in (
        ("predict", str(run_folder), "strange.csv"),
        ("evaluate", str(run_folder), "--data", "strange.csv"),
    ):
        code, printed = command(*args)
        assert code == 0, printed
        assert printed.count(line) == 1
    frame[180:].drop(columns=["size"]).to_csv("lacking.csv", index=False)
    code, printed = command("predict", str(run_folder), "lacking.csv")
    assert (code, printed.count("\n")) == (2, 1)
    assert (
        "lacking.csv has no column 'size', which the model's data has: it has ward, clinic, label"
        in printed
    )
