"""A loaded model takes samples as they are: features, arrays, rows and texts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
from ekiden.data import Iid
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, FedSeq


@pytest.fixture(scope="module")
def digits() -> FederatedData:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EKIDEN_DATA", raising=False)
        return split(load("digits"), Iid(), 3, seed=0)


def test_features_are_taken_as_they_are(blobs: FederatedData, tmp_path: Path) -> None:
    result = run(Average(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"its own network \(Tiny\): give it by network"):
        load_model(tmp_path / "run")
    x = blobs.dataset.test.x
    for given in (Tiny(), Tiny):
        with torch.no_grad():
            assert torch.equal(load_model(tmp_path / "run", network=given)(x), result.model(x))
    with pytest.raises(UserError, match="holds another network"):
        load_model(tmp_path / "run", network=nn.Linear(4, 3))


def test_a_model_takes_arrays_as_it_takes_tensors(digits: FederatedData) -> None:
    model, x = run(FedSeq(epochs=1), digits, "mlp").load_model(), digits.dataset.test.x[:3]
    assert torch.equal(model(x.numpy()), model(x))
    assert model(x).requires_grad
    assert model(x.numpy()).numpy().shape == (3, 10), "NumPy in, NumPy out"
    assert torch.equal(model(x.numpy().astype("float64") / 255), model(x.float() / 255))
    with pytest.raises(UserError, match="an array of <U1 holds no numbers"):
        model(np.full((3, 1, 8, 8), "a"))


def test_a_model_takes_rows_and_texts_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows: Any = {
        "age": rng.normal(50, 9, 90).tolist(),
        "ward": ["n", "s", "e", "e"] * 22 + ["n", "s"],
        "label": ["no", "yes", "no"] * 30,
    }
    south = {**rows, "age": rng.normal(50, 9, 90).tolist()}
    run(
        "fedseq",
        {"north": rows, "south": south},
        folder=tmp_path / "t",
        training=Training(max_steps=1),
    )
    model = load_model(tmp_path / "t")
    assert torch.equal(model(rows), model.encoded(model.inputs.encode(rows)))
    assert open_run(tmp_path / "t").clients == ("north", "south")
    with pytest.raises(
        UserError,
        match="an array does not say which columns it has: give a frame or a dict with age, ward",
    ):
        model(np.zeros((3, 2)))
    with pytest.raises(UserError, match="a tensor does not say which columns it has: give a frame"):
        model(torch.zeros(3, 2))  # in years, or scaled?
    texts: Any = {"text": ["good day", "bad day"] * 20, "mood": ["p", "n"] * 20}
    silos = federate([texts, texts], text_column="text", label_column="mood")
    run("fedseq", silos, folder=tmp_path / "x", training=Training(max_steps=1))
    spoken = load_model(tmp_path / "x")
    assert torch.equal(spoken(["a good day"]), spoken(spoken.inputs.encode(["a good day"])))
