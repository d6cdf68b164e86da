"""Commands that use a model: predictions above a threshold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ekiden import federate, run

Command = Callable[..., tuple[int, str]]


def test_a_threshold_decides_between_two_classes(tmp_path: Path, command: Command) -> None:
    draw = torch.Generator().manual_seed(2)
    y = torch.arange(80) % 4 == 0
    x = torch.randn(80, 2, generator=draw) + y[:, None]
    pair = (x, y.long())
    result = run("glm", federate([pair], tests=[pair]), folder=tmp_path / "run", metric="auroc")
    np.save(tmp_path / "x.npy", x.numpy())
    youden = next(t for t in result.metrics[-1]["figures"]["thresholds"] if t["rule"] == "Youden")
    for given, at in (("youden", youden["threshold"]), ("0.2", 0.2), ("", 0.5)):
        flags = ["--threshold", given] if given else []
        code, said = command(
            "predict",
            str(tmp_path / "run"),
            str(tmp_path / "x.npy"),
            "-o",
            str(tmp_path / "o.csv"),
            "--overwrite",
            *flags,
        )
        assert code == 0, said
        found = pd.read_csv(tmp_path / "o.csv")
        assert (found.prediction == (found.probability_1 >= at)).all()
        assert (f"from a probability of {at:.6g} on" in said) == bool(given)
        if given == "youden":
            assert found.prediction[y.numpy()].mean() == pytest.approx(youden["sensitivity"])
    for given, line in (
        ("best", "unknown threshold 'best'"),
        ("1.5", "is not a share"),
        ("nan", "is not a share"),
    ):
        code, said = command(
            "predict", str(tmp_path / "run"), str(tmp_path / "x.npy"), "--threshold", given
        )
        assert code == 2
        assert line in said
    code, said = command("card", str(tmp_path / "run"))
    assert f"| Youden | {youden['threshold']:.4g} | {youden['sensitivity']:.3f} |" in said
    low, high = result.metrics[-1]["figures"]["intervals"]["auroc"]
    assert f"| {low:.4f} to {high:.4f} |" in said
