"""A result as text and as a plot."""

from pathlib import Path

import matplotlib as mpl
import pytest

from ekiden import FederatedData, UserError, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedSeq

mpl.use("Agg")


def test_history_is_a_frame_and_plot_draws_it(blobs: FederatedData) -> None:
    result = run(FedAvg(rounds=3, epochs=1), blobs, Tiny())
    frame = result.history()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame.accuracy.tolist() == [row["accuracy"] for row in result.metrics]
    assert frame["client_accuracy_client-1"].iloc[-1] == result.metrics[-1]["clients"][1]
    axes = result.plot()
    assert axes.lines[0].get_xydata().tolist() == [  # type: ignore[union-attr]
        [step, value] for step, value in frame.accuracy.items()
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "accuracy")
    assert result.plot("client_worst", axes) is axes
    with pytest.raises(UserError, match="unknown metric 'accurac': did you mean 'accuracy'"):
        result.plot("accurac")


def test_a_result_tells_what_it_is(blobs: FederatedData, tmp_path: Path) -> None:
    result = run(FedSeq(epochs=1), blobs, Tiny(), folder=tmp_path / "run")
    lines = repr(result).splitlines()
    assert lines[0] == "Result: fedseq on own data: 4 clients, 3 classes"
    guess = f"(always the commonest class: {result.majority:.4f})"
    assert lines[1].strip() == f"step 4 of 4, accuracy {result.accuracy:.4f} {guess}"
    assert lines[2].strip() == f"{result.bytes:,} bytes moved in 3 transfers"
    assert lines[3].strip() == f"run folder: {tmp_path / 'run'}"
