"""A run goes on where it stopped, and begins again where it cannot."""

import shutil
from pathlib import Path

import pytest
import torch

from ekiden import FederatedData
from ekiden.core.engine.folder import RunFolder
from ekiden.methods import FedSeq
from ekiden.runs.api import How
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import summarise
from tests.core.engine.kept import Counting, flipped, go, outcome


def test_a_result_of_an_earlier_step_does_not_outlive_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after a step, continued, and killed between the last state and the result."""
    plan, folder = Plan(Recipe(FedSeq(epochs=1)), clients=2), tmp_path / "run"
    data = plan.federation()
    plan.run(folder, data, how=How(stop_after=1, quiet=True))
    early = (folder / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("ekiden.core.engine.run.write_models", lambda *args: None)
        plan.run(folder, data)
    assert summarise(folder).last["step"] == 2
    assert not summarise(folder).finished
    plan.run(folder, data)
    assert summarise(folder).finished
    assert (folder / "model.safetensors").read_bytes() != early


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *(("value-3-0-train", harm) for harm in ("flipped", "gone")),
        *(("private-4", harm) for harm in ("flipped", "gone", "gone with its folder")),
        ("state", "flipped"),
    ],
)
def test_a_run_whose_files_are_damaged_or_gone_begins_again(
    blobs: FederatedData,
    tmp_path: Path,
    name: str,
    harm: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunFolder, "due", True)  # one file of the state
    whole = go(Counting(), blobs, tmp_path / "whole")
    go(Counting(), blobs, tmp_path / "run", stop_after=4)
    (file,) = (tmp_path / "run").rglob(f"{name}.safetensors")
    if harm == "flipped":
        file.write_bytes(flipped(file.read_bytes(), file.stat().st_size - 1))
    elif harm == "gone":
        file.unlink()
    else:
        (keeper,) = (tmp_path / "run").rglob("value-3-0-train.safetensors")
        assert keeper.parent == file.parent
        go(Counting(), blobs, tmp_path / "run", stop_after=1)  # now another client has the model
        shutil.rmtree(file.parent)
    again = go(Counting(), blobs, tmp_path / "run")
    assert torch.equal(again.weights.params, whole.weights.params)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert "goes back to its first step and gives the same result" in caplog.text
    assert name.removeprefix("value-") in caplog.text
