"""What a run recorded, read without its network."""

from pathlib import Path

import pytest
import torch

from ekiden import (
    FederatedData,
    Training,
    UserError,
    federate,
    open_run,
    run,
    steps,
)
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedSeq

FAST = Training(max_steps=1)


def test_everything_but_the_models_is_there_without_the_network(
    blobs: FederatedData, tmp_path: Path
) -> None:
    run(FedAvg(rounds=3, epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert len(opened.history()) == 3
    with pytest.raises(UserError, match=r"its own network \(Tiny\): give it by network"):
        _ = opened.weights


def test_a_step_that_is_not_measured_does_not_change_the_headline() -> None:
    draw = torch.Generator().manual_seed(0)
    silos = [(x := torch.randn(60, 5, generator=draw), x[:, 0] + x[:, 1]) for _ in range(3)]
    data = federate(silos, task="regression")
    result = run(FedSeq(epochs=1), data, "mlp", training=FAST, evaluate_every=2, stop_after=1)
    assert "loss" not in result.metrics[-1]
    assert result.headline == "rmse"
    with pytest.raises(UserError, match="not measured after this step"):
        _ = result.score
    *_, last = steps(FedSeq(epochs=1), data, "mlp", training=FAST, evaluate_every=2)
    assert last.headline == "rmse"
    assert last.score == last.metrics[-1]["rmse"]
