"""Exported models give the run's outputs, in other software, on raw samples."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import safetensors.torch
import torch
from scipy.special import softmax
from torch import Tensor, nn

from ekiden import (
    FederatedData,
    Training,
    UserError,
    federate,
    load,
    load_model,
    open_run,
    run,
    split,
)
from ekiden.core.models import catalogue
from ekiden.core.tasks import Regression
from ekiden.data import ClientData, Dataset, Iid, Samples, Subset
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import GLM, Average, FedAvg, FedSeq, Local
from ekiden.readers.kinds import Table, of_tensor
from ekiden.runs import exporting
from ekiden.runs.card import card
from ekiden.runs.exporting import export
from ekiden.runs.predictions import Answers, predict
from tests.runs.predicted import reported

pytestmark = pytest.mark.xdist_group("export")  # what exports need takes seconds to import
Command = Callable[..., tuple[int, str]]


@pytest.mark.slow
def test_onnx_answers_as_the_run_was_measured(
    run_on_digits: Path, tmp_path: Path, command: Command
) -> None:
    import onnxruntime

    file = tmp_path / "model.onnx"
    code, printed = command(
        "export", str(run_on_digits), "-o", str(file)
    )  # the name says the format
    assert code == 0, printed
    assert "64 made-up samples" in printed
    session = onnxruntime.InferenceSession(str(file))
    test = load("digits").test
    (logits,) = session.run(None, {"input": test.x.numpy()})
    assert float((logits.argmax(1) == test.y.numpy()).mean()) == pytest.approx(
        reported(run_on_digits), abs=1e-12
    )
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["classes"]) == list("0123456789")
    assert json.loads(said["normalisation"])["inside"] is True
    assert session.run(None, {"input": test.x[:1].numpy()})[0].shape == (1, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_folder_for_the_hub_needs_no_ekiden(
    run_on_pictures: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "hub"
    code, printed = command("export", str(run_on_pictures), "--to", "hf", "-o", str(folder))
    assert code == 0, printed
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.pt2",
        "model.safetensors",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "none", "1": "one", "2": "two"}
    assert config["inputs"]["shape"] == [3, 20, 20]
    x = torch.randint(0, 256, (5, 3, 20, 20), dtype=torch.uint8)
    model = load_model(run_on_pictures)
    program = torch.export.load(str(folder / "model.pt2")).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=1e-3, atol=1e-4)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    assert all(
        torch.equal(state[name], value) for name, value in model.network.state_dict().items()
    )
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: ekiden\n")
    assert "torch.export.load" in text
    code, _ = command("export", str(run_on_pictures), "--to", "hf", "-o", str(folder))
    assert code == 2, "it is not empty"
    code, _ = command(
        "export", str(run_on_pictures), "--to", "hf", "-o", str(folder), "--overwrite"
    )
    assert code == 0


def test_no_sample_is_in_what_is_written(run_on_digits: Path, tmp_path: Path) -> None:
    """A traced program may keep the samples that it was traced with: these are zeros."""
    export(run_on_digits, "pt2", tmp_path / "model.pt2")
    loaded = torch.export.load(str(tmp_path / "model.pt2"))
    kept = [value for value in loaded.example_inputs[0] if isinstance(value, Tensor)]
    assert not any(value.any() for value in kept)


def test_a_network_and_data_of_ones_own_are_tried_on_made_up_samples(
    blobs: FederatedData, tmp_path: Path
) -> None:
    result = run(FedSeq(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    done = export(tmp_path / "run", "pt2", tmp_path / "model.pt2", network=Tiny)
    assert done.samples == 64
    x = blobs.dataset.test.x
    with torch.no_grad():
        theirs = torch.export.load(str(tmp_path / "model.pt2")).module()(x)
        torch.testing.assert_close(theirs, result.model(x), rtol=1e-3, atol=1e-4)


def test_a_personal_model_is_exported(tmp_path: Path, blobs: FederatedData) -> None:
    run(Local(epochs=1), blobs, "mlp", folder=tmp_path / "run")
    export(tmp_path / "run", "pt2", tmp_path / "model.pt2", client="client-2")
    x = blobs.dataset.test.x
    with torch.no_grad():
        ours = load_model(tmp_path / "run", client="client-2")(x)
        torch.testing.assert_close(torch.export.load(str(tmp_path / "model.pt2")).module()(x), ours)


def test_a_model_that_answers_otherwise_is_not_put_in_place(
    run_on_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = exporting._Raw.forward
    monkeypatch.setattr(exporting._Raw, "forward", lambda self, x: original(self, x) + 0.01)
    with pytest.raises(UserError, match=r"outputs differ from the run's .*nothing written"):
        export(run_on_digits, "pt2", tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


class Branching(Tiny):
    """Its computation depends on values, so it cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


def test_a_network_that_cannot_be_traced_is_one_line(blobs: FederatedData, tmp_path: Path) -> None:
    run(Average(epochs=1), blobs, Branching(), folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot be traced by torch.export"):
        export(tmp_path / "run", "pt2", tmp_path / "model.pt2", network=Branching)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_card_says_counts_and_nothing_of_the_samples(
    run_on_pictures: Path, tmp_path: Path, command: Command
) -> None:
    code, _ = command("card", str(run_on_pictures), "-o", str(tmp_path / "card.md"))
    assert code == 0
    text = (tmp_path / "card.md").read_text()
    result = open_run(run_on_pictures)
    for name, counts in result.config["clients"].items():
        assert f"| {name} | {' | '.join(map(str, counts))} |" in text
    assert f"| accuracy | {result.accuracy:.4f} |" in text
    assert "colour images of 20 x 20 pixels" in text
    assert str(run_on_pictures.parent) not in text
    assert "none, one, two" in text
    assert ".png" not in text
    assert (
        "/"
        not in text.replace("w/", "")
        .replace("https://", "")
        .split("## Limits")[0]
        .split("## Training data")[1]
    )


def test_a_card_of_a_network_from_python_names_its_class(
    blobs: FederatedData, tmp_path: Path
) -> None:
    run(FedSeq(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    text = card(open_run(tmp_path / "run"))
    assert "`ekiden.lab.conformance.small_runs:Tiny`, given from Python" in text
    assert "float32 arrays of shape (4,)" in text
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "Linear(in_features=4, out_features=8" in config["architecture"]["layers"]


def test_frozen_values_are_in_what_is_exported(tmp_path: Path) -> None:
    """`model.safetensors` of the run holds only what was trained."""
    silos = split(load("digits"), Iid(), 2, seed=0)
    run(FedSeq(epochs=1), silos, "mlp", train="head", folder=tmp_path / "run")
    assert set(safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")) == {
        "head.weight",
        "head.bias",
    }
    export(tmp_path / "run", "hf", tmp_path / "hub")
    state = safetensors.torch.load_file(tmp_path / "hub" / "model.safetensors")
    network = catalogue.build("mlp", (1, 8, 8), 10)
    network.load_state_dict(state)
    x = silos.dataset.test.x
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(x / 255), load_model(tmp_path / "run")(x))


def test_numbers_are_exported_in_their_unit(tmp_path: Path) -> None:
    samples = Samples(torch.randn(60, 4), torch.rand(60, 1) + 50)
    parts = torch.arange(60).chunk(3)
    clients = (ClientData("client-0", *(Subset(samples, part) for part in parts)),)
    task = Regression(mean=(50.0,), std=(3.0,))
    data = FederatedData(
        Dataset("numbers", samples, samples, ("age",), task=task, inputs=of_tensor(samples.x)),
        clients,
    )
    run(FedAvg(rounds=1, epochs=1), data, nn.Linear(4, 1), folder=tmp_path / "run")
    export(tmp_path / "run", "pt2", tmp_path / "model.pt2", network=nn.Linear(4, 1))
    model = load_model(tmp_path / "run", network=nn.Linear(4, 1))
    with torch.no_grad():
        theirs = torch.export.load(str(tmp_path / "model.pt2")).module()(samples.x)
        torch.testing.assert_close(theirs, model(samples.x).double() * 3 + 50)


def test_a_process_that_did_not_train_exports_numbers_and_categories(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = {"age": draw.normal(50, 9, 90), "sex": draw.choice(["m", "w"], 90)}
    table = pandas.DataFrame(rows | {"label": rows["age"] + 3 * (rows["sex"] == "w")})
    data = split(load(table), "iid", 2)
    run(GLM(family="linear"), data, "auto", folder=tmp_path / "run", quiet=True)
    command = ["-m", "ekiden", "export", str(tmp_path / "run"), "-o", str(tmp_path / "model.pt2")]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "gives the run's outputs on 64 made-up samples" in ended.stdout


def patients(
    draw: np.random.Generator, columns: tuple[str, ...] = ("age", "output", "seen", "sex", "n/a")
) -> Any:
    """Rows with gaps, large numbers, categories in other alphabets, and columns called like parts
    of a graph."""
    rows = {
        "age": np.where(draw.random(90) < 0.2, np.nan, draw.normal(50, 9, 90)),
        "output": draw.normal(1.7e12, 3e5, 90),
        "seen": draw.integers(0, 2, 90).astype(float),
        "sex": draw.choice(["männlich", "weiblich", ""], 90),
        "n/a": draw.choice(["a b", "c"], 90),
    }
    label = np.where((rows["sex"] == "weiblich") ^ (rows["output"] > 1.7e12), "yes", "no")
    return pandas.DataFrame({name: rows[name] for name in columns} | {"label": label})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* categories that the model does not know")  # new.csv has one
@pytest.mark.parametrize(
    "columns",
    [("age", "output", "seen", "sex", "n/a"), ("age", "output"), ("sex", "n/a")],
)
def test_an_exported_table_takes_raw_columns(columns: tuple[str, ...], tmp_path: Path) -> None:
    """ONNX: an input for each column. pt2: numbers and codes. Both answer as `ekiden predict` on
    the same rows."""
    import onnxruntime

    draw = np.random.default_rng(0)
    silos = federate([patients(draw, columns), patients(draw, columns)], min_count=2)
    run("fedseq", silos, training=Training(lr=0.01), folder=tmp_path / "run")
    new = patients(draw, columns).drop(columns="label")
    if "sex" in columns:
        new.loc[:3, "sex"] = "unbekannt"
    new.to_csv(tmp_path / "new.csv", index=False)
    predict(
        Answers(load_model(tmp_path / "run")), [tmp_path / "new.csv"], str(tmp_path / "out.csv")
    )
    answers = pandas.read_csv(tmp_path / "out.csv")[
        ["probability_no", "probability_yes"]
    ].to_numpy()
    done = export(tmp_path / "run", "onnx", tmp_path / "model.onnx")
    assert done.samples == 64
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    kinds = {value.name: value.type for value in session.get_inputs()}
    texts = {"sex", "n/a"}
    assert kinds == {
        name: "tensor(string)" if name in texts else "tensor(double)" for name in columns
    }
    given = {name: new[name].to_numpy(object if name in texts else np.float64) for name in columns}
    (outputs,) = session.run(None, given)
    np.testing.assert_allclose(softmax(outputs, axis=1), answers, atol=1e-5)
    assert session.run(None, {name: values[:1] for name, values in given.items()})[0].shape == (
        1,
        2,
    )
    export(tmp_path / "run", "pt2", tmp_path / "model.pt2")
    table = silos.dataset.inputs
    assert isinstance(table, Table)
    parts = [torch.tensor(new[list(table.numeric)].to_numpy(np.float64))] if table.numeric else []
    if table.categorical:
        codes = [
            [1 + known.index(v) if v in known else 0 for v in new[name]]
            for name, known in vocabularies(table)
        ]
        parts.append(torch.tensor(codes).T)
    with torch.no_grad():
        outputs = torch.export.load(str(tmp_path / "model.pt2")).module()(*parts)
    np.testing.assert_allclose(softmax(outputs.numpy(), axis=1), answers, atol=1e-5)


def test_an_exported_table_takes_dates_as_days(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)

    def visits() -> pandas.DataFrame:
        days, size = draw.integers(0, 300, 90), draw.normal(size=90)
        seen = pandas.Series(pandas.Timestamp("2024-01-01") + pandas.to_timedelta(days, "D"))
        label = np.where(size > 0, "yes", "no")
        return pandas.DataFrame(
            {"seen": seen.where(draw.random(90) < 0.8), "size": size, "label": label}
        )

    silos = federate([visits(), visits()], min_count=2)
    run("fedseq", silos, training=Training(lr=0.01), folder=tmp_path / "run")
    done = export(tmp_path / "run", "pt2", tmp_path / "model.pt2")
    assert "days since 1970 for dates (seen), NaN if missing" in done.takes
    new = visits().drop(columns="label")
    days = (new["seen"] - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    with torch.no_grad():
        outputs = torch.export.load(str(tmp_path / "model.pt2")).module()(
            torch.tensor(new.assign(seen=days).to_numpy(np.float64))
        )
    torch.testing.assert_close(outputs, load_model(tmp_path / "run")(new).float())


def vocabularies(table: Table) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from zip(table.categorical, table.vocabularies, strict=True)


@pytest.mark.parametrize(
    ("wrong", "to"),
    [
        ("scaling", "pt2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gaps", "pt2"), ("categories", "onnx"))
        ),
    ],
)
def test_a_table_that_is_encoded_otherwise_is_not_written(
    wrong: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    silos = federate([patients(draw), patients(draw)], min_count=2)
    run("fedseq", silos, training=Training(lr=0.01), folder=tmp_path / "run")
    model = load_model(tmp_path / "run")
    table = model.inputs
    assert isinstance(table, Table)
    others = {
        "scaling": replace(table, scale=tuple(2 * s for s in table.scale)),
        "gaps": replace(table, gaps=("output",)),
        "categories": replace(table, vocabularies=tuple(v[::-1] for v in table.vocabularies)),
    }
    rows = exporting.Rows
    monkeypatch.setattr(exporting, "Rows", lambda whole, table: rows(whole, others[wrong]))
    columns = exporting.take_columns
    monkeypatch.setattr(exporting, "take_columns", lambda made, table: columns(made, others[wrong]))
    with pytest.raises(UserError, match=r"outputs differ from the run's .*nothing written"):
        export(tmp_path / "run", to, tmp_path / f"model.{to}")
    assert not (tmp_path / f"model.{to}").exists()


def test_wrong_numbers_far_from_zero_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets are 3e6 ± 800: an error of a standard deviation is less than a thousandth of
    them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=draw)
    y = 3e6 + 800 * x[:, 0]
    silos = federate([(x, y), (x, y)], task="regression")
    run("fedseq", silos, nn.Linear(4, 1), folder=tmp_path / "run")
    export(tmp_path / "run", "pt2", tmp_path / "right.pt2", network=nn.Linear(4, 1))
    original = exporting._Raw.forward
    monkeypatch.setattr(exporting._Raw, "forward", lambda self, x: original(self, x) + 800)
    with pytest.raises(UserError, match=r"outputs differ from the run's .*nothing written"):
        export(tmp_path / "run", "pt2", tmp_path / "wrong.pt2", network=nn.Linear(4, 1))
