"""A run's result as an object to look at, draw, measure and load."""

from pathlib import Path

import pytest
import torch

from ekiden import FederatedData, UserError, open_run, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedSeq


def test_a_folder_opens_as_what_the_run_returned(blobs: FederatedData, tmp_path: Path) -> None:
    first = run(FedAvg(rounds=3, epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    again = open_run(tmp_path / "run", network=Tiny)
    assert (again.metrics, again.ledger, again.accuracy, again.bytes) == (
        first.metrics,
        first.ledger,
        first.accuracy,
        first.bytes,
    )
    assert again.state.step == 3
    assert {**again.config, **first.config} == again.config
    assert repr(again) == repr(first)
    assert first.weights is not None
    assert again.weights is not None
    assert torch.equal(again.weights.params, first.weights.params)
    x = blobs.dataset.test.x
    with torch.no_grad():
        assert torch.equal(again.load_model()(x), first.load_model()(x))


def test_a_killed_step_does_not_count(blobs: FederatedData, tmp_path: Path) -> None:
    run(FedAvg(rounds=3, epochs=1), blobs, Tiny(), folder=tmp_path / "run", stop_after=2)
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(rows[-1].replace(b'"step":2', b'"step":3'))
    opened = open_run(tmp_path / "run")
    assert [row["step"] for row in opened.metrics] == [1, 2]
    assert "step 2 of 3" in repr(opened)


def test_history_says_that_pandas_is_missing(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    result = run(FedSeq(epochs=1), blobs, Tiny())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r'pip install "ekiden\[pandas\]"'):
        result.history()
