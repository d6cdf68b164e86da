"""Exported models answer as the run's own, in other software, on samples as they are."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ekiden import FederatedData, UserError, load, load_model, open_run, run
from ekiden.engine.folder import read_lines
from ekiden.methods import Average, FedSeq, Local
from ekiden.serving import exporting
from ekiden.serving.card import card
from ekiden.serving.exporting import export
from tests.conftest import Tiny

Command = Callable[..., tuple[int, str]]


def reported(folder: Path) -> float:
    return float(read_lines(folder / "metrics.jsonl")[-1]["accuracy"])


def test_onnx_answers_as_the_run_was_measured(run_on_digits: Path, tmp_path: Path, command: Command) -> None:
    import onnxruntime

    file = tmp_path / "model.onnx"
    code, printed = command("export", str(run_on_digits), "-o", str(file))  # the name says the format
    assert code == 0, printed
    assert "64 test samples" in printed
    session = onnxruntime.InferenceSession(str(file))
    test = load("digits").test
    (logits,) = session.run(None, {"input": test.x.numpy()})
    assert float((logits.argmax(1) == test.y.numpy()).mean()) == pytest.approx(reported(run_on_digits), abs=1e-12)
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["classes"]) == list("0123456789")
    assert json.loads(said["normalisation"])["inside"] is True
    assert session.run(None, {"input": test.x[:1].numpy()})[0].shape == (1, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_folder_for_the_hub_needs_no_ekiden(run_on_pictures: Path, tmp_path: Path, command: Command) -> None:
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
    assert all(torch.equal(state[name], value) for name, value in model.network.state_dict().items())
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: ekiden\n")
    assert "torch.export.load" in text
    code, _ = command("export", str(run_on_pictures), "--to", "hf", "-o", str(folder))
    assert code == 2, "it is not empty"
    code, _ = command("export", str(run_on_pictures), "--to", "hf", "-o", str(folder), "--overwrite")
    assert code == 0


def test_no_sample_is_in_what_is_written(run_on_digits: Path, tmp_path: Path) -> None:
    """A traced program may keep the samples that it was traced with: these are zeros."""
    export(run_on_digits, "pt2", tmp_path / "model.pt2")
    loaded = torch.export.load(str(tmp_path / "model.pt2"))
    kept = [value for value in loaded.example_inputs[0] if isinstance(value, Tensor)]
    assert not any(value.any() for value in kept)


def test_a_network_and_data_of_ones_own_are_tried_on_made_up_samples(blobs: FederatedData, tmp_path: Path) -> None:
    result = run(FedSeq(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    done = export(tmp_path / "run", "pt2", tmp_path / "model.pt2", network=Tiny)
    assert (done.samples, done.real) == (64, False)
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
    with pytest.raises(UserError, match=r"answers otherwise than the run's .*nothing written"):
        export(run_on_digits, "pt2", tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


class Branching(Tiny):
    """Its way depends on values: no program is traced of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


def test_a_network_that_cannot_be_traced_is_one_line(blobs: FederatedData, tmp_path: Path) -> None:
    run(Average(epochs=1), blobs, Branching(), folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot be traced by torch.export"):
        export(tmp_path / "run", "pt2", tmp_path / "model.pt2", network=Branching)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_card_says_counts_and_nothing_of_the_samples(run_on_pictures: Path, tmp_path: Path, command: Command) -> None:
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
    assert "/" not in text.replace("w/", "").replace("https://", "").split("## Limits")[0].split("## Training data")[1]


def test_a_card_of_a_network_from_python_names_its_class(blobs: FederatedData, tmp_path: Path) -> None:
    run(FedSeq(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    text = card(open_run(tmp_path / "run"))
    assert "`ekiden.conformance.toy:Tiny`, given from Python" in text
    assert "float32 arrays of shape (4,)" in text
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "Linear(in_features=4, out_features=8" in config["architecture"]["layers"]
    assert isinstance(nn.Linear(1, 1), nn.Module)
    assert np.isfinite(config["model_bytes"])
