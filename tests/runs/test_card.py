"""The card of a run: what it says about data and network."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ekiden import FedSeq, Trees, load, run, split
from ekiden.data import federate
from ekiden.runs.card import _figures as figures_of


@pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
def test_a_method_with_a_model_of_its_own_and_natural_silos_are_called_so(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{v:.3f},{'ab'[k % 2]},{'pq'[int(v > 0)]}" for k, v in enumerate(draw.normal(size=90))]
    (tmp_path / "t.csv").write_text("\n".join(["v,site,label", *rows]))
    table = load(tmp_path / "t.csv", label_column="label", group_column="site")
    folder = tmp_path / "run"
    run(Trees(trees=1), split(table, "natural"), folder=folder, quiet=True)
    code, _ = command("card", str(folder), "-o", str(tmp_path / "card.md"))
    card = (tmp_path / "card.md").read_text()
    assert (code, "- Network: `trees`," in card) == (0, True)
    assert "- Divided among silos: natural." in card
    code, said = command("compare", str(folder), "--latex")
    assert (code, "t.csv, label, natural, 2 clients &" in said) == (0, True)


def test_a_run_whose_metric_is_not_defined_for_the_test_data_has_a_card_and_a_report(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    x = torch.randn(60, 2)
    silo = x, (x[:, 0] > 0).long()
    data = federate([silo, silo], test=(x[:20], torch.ones(20, dtype=torch.int64)))
    folder = str(tmp_path / "run")
    run(FedSeq(epochs=1), data, metric="auroc", folder=folder, quiet=True)
    code, card = command("card", folder)
    assert (code, "On the silos' test data" in card) == (0, False)
    code, _ = command("report", folder, "--out", str(tmp_path / "page"))
    assert (code, (tmp_path / "page" / "index.html").exists()) == (0, True)


def test_thresholds_that_were_counted_with_noise_have_no_intervals() -> None:
    exact = {"sensitivity": 0.8, "specificity": 0.7, "threshold": 0.5, "rule": "0.5"}
    between = {"sensitivity": (0.7, 0.9), "specificity": (0.6, 0.8)}
    noisy = exact | {"rule": "Youden", "intervals": {}}
    lines = figures_of({"thresholds": [exact | {"intervals": between}, noisy]})
    assert "| 0.5 | 0.5 | 0.800 | 0.700 to 0.900 | 0.700 | 0.600 to 0.800 |" in lines
    assert "| Youden | 0.5 | 0.800 | - | 0.700 | - |" in lines
