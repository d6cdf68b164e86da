"""A run's result can be used elsewhere: as a module in Python, and in plain PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ekiden import (
    FederatedData,
    Training,
    UserError,
    load,
    load_model,
    run,
    split,
)
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.method import Method
from ekiden.data import Iid
from ekiden.methods import DENSE, PFNM, Ensemble, FedMA, FedOV, FedPer, FedSeq, Local
from tests.pages import DOCS, blocks, play

PAGE = DOCS / "using-the-result.md"


@pytest.fixture(scope="module")
def digits() -> FederatedData:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EKIDEN_DATA", raising=False)
        return split(load("digits"), Iid(), 3, seed=0)


def accuracy(model: Callable[[Tensor], Tensor], data: FederatedData) -> float:
    test = data.dataset.test
    with torch.no_grad():
        return float((model(test.x).argmax(1) == test.y).double().mean())


@pytest.mark.parametrize(
    ("method", "network"),
    [
        (FedSeq(epochs=1), "mlp"),
        (Ensemble(epochs=1), "mlp"),
        (Ensemble(epochs=1, rule="class-wise"), "mlp"),
        (PFNM(epochs=1), "mlp"),
        (FedMA(epochs=1, retrain_epochs=1), "mlp"),
        (FedOV(epochs=1), "mlp"),
        (
            DENSE(
                epochs=1,
                distill_epochs=1,
                steps_per_batch=1,
                distill_batch_size=16,
                generator_width=8,
            ),
            "mlp",
        ),
    ],
    ids=lambda value: value.title() if isinstance(value, Method) else value,
)
def test_a_result_answers_as_it_was_measured(
    method: Method, network: str, digits: FederatedData, tmp_path: Path
) -> None:
    training = Training(mean=(0.3,), std=(0.4,))
    result = run(method, digits, network, training=training, folder=tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert not any(part.training for part in loaded.modules())
    assert accuracy(loaded, digits) == pytest.approx(result.accuracy, abs=1e-12)
    assert loaded.classes == tuple("0123456789")
    assert (loaded.shape, loaded.mean, loaded.std) == ((1, 8, 8), (0.3,), (0.4,))
    x = digits.dataset.test.x[:5]
    with torch.no_grad():
        assert torch.equal(loaded(x), result.model((x / 255 - 0.3) / 0.4)) or torch.allclose(
            loaded(x), result.model((x / 255 - 0.3) / 0.4), atol=1e-5
        )
        torch.testing.assert_close(loaded(x), loaded(x / 255))
    with pytest.raises(UserError, match=r"samples of shape \(1, 8, 8\), not \(5, 8, 8\)"):
        loaded(x[:, 0])


def test_personal_models_are_loaded_by_the_name_of_the_client(
    digits: FederatedData, tmp_path: Path
) -> None:
    result = run(Local(epochs=1), digits, folder=tmp_path / "run")
    with pytest.raises(
        UserError,
        match=r"client-0, client-1, client-2, and no global one: choose one by client=NAME",
    ):
        load_model(tmp_path / "run")
    loaded = load_model(tmp_path / "run", client="client-2")
    rows = digits.clients[2].test.rows
    test = digits.dataset.test
    with torch.no_grad():
        right = (loaded(test.x[rows]).argmax(1) == test.y[rows]).double().mean()
    assert float(right) == pytest.approx(result.metrics[-1]["clients"][2], abs=1e-12)


def test_a_run_that_has_not_ended_says_so(digits: FederatedData, tmp_path: Path) -> None:
    run(FedSeq(epochs=1), digits, folder=tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model.safetensors: run `ekiden resume`"):
        load_model(tmp_path / "run")
    with pytest.raises(UserError, match="is not a run folder"):
        load_model(tmp_path)


def test_folder_and_file_say_what_the_model_takes(digits: FederatedData, tmp_path: Path) -> None:
    run(
        FedPer(epochs=1, rounds=1),
        digits,
        training=Training(mean=(0.3,), std=(0.4,)),
        folder=tmp_path / "run",
    )
    wanted: dict[str, Any] = {
        "network": "mlp",
        "classes": list("0123456789"),
        "input": {"shape": [1, 8, 8], "mean": [0.3], "std": [0.4]},
    }
    config = read_config(tmp_path / "run")
    assert {key: config[key] for key in wanted} == wanted
    wanted |= {"frozen": {}, "task": {"kind": "classification"}}
    wanted |= {
        "inputs": {"kind": "images", "size": 0, "fit": "stretch", "window": [], "colour": "auto"}
    }
    assert {key: config[key] for key in wanted} == wanted
    with safe_open(tmp_path / "run" / "personal" / "client-0.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["ekiden"]) == wanted | {
            "method": "fedper",
            "train": "all",
        }


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of the page, one after the other."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    code = "\n".join(block.text for block in blocks(PAGE, "python"))
    names = play(PAGE)
    model = load_model("runs/digits")
    with torch.no_grad():
        theirs = names["network"]((names["x"].float() / 255 - names["mean"]) / names["std"])
        torch.testing.assert_close(theirs, model(names["x"]))
        ours = model(torch.from_numpy(names["pixels"]))
    assert names["answers"] == [model.classes[i] for i in ours.argmax(1)]
    torch.testing.assert_close(names["outputs"], ours, rtol=1e-3, atol=1e-4)
    for plain in ("# Plain ONNX Runtime from here on.", "# Plain PyTorch from here on."):
        block = code.split(plain)[1].split("ekiden.export(")[0]
        assert "ekiden." not in block.replace('"ekiden"', "")
