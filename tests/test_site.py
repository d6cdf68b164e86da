"""What the site makes from the code and the records."""

import importlib.util
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from ekiden.base.checks import Count, Fraction
from ekiden.methods import FedELMY, Local
from ekiden.tables import records

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks() -> Any:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_row_of_the_leaderboard_has_the_values_of_the_records(hooks: Any) -> None:
    runs = records.read(ROOT / "experiments/records/krylov-small.jsonl").runs.values()
    pacs = [run for run in runs if run.config["dataset"] == "pacs" and run.config["method"] == "fedkrylov"]
    orders = {run.config["plan"]["partition"] for run in pacs}
    for order in orders:
        values = [100 * run.last["accuracy"] for run in pacs if run.config["plan"]["partition"] == order]
        (row,) = [
            row for row in hooks.board()
            if row[0] == f"pacs, {order}, 4 clients" and row[1] == "fedkrylov" and row[-1] == "krylov-small.jsonl"
        ]  # fmt: skip
        assert row[6:9] == (pytest.approx(mean(values)), pytest.approx(stdev(values)), 5)
        assert f"{mean(values):.1f} ± {stdev(values):.1f}" in hooks.leaderboard()


def test_a_method_lists_its_hyperparameters_in_words(hooks: Any) -> None:
    table = hooks.settings(FedELMY)
    assert "| `models` | S, models trained at each client | `5` | whole number, 1 or more |" in table
    assert "`paper` or `released`" in table
    assert hooks.words(Fraction) == "number, above 0 and at most 1"
    assert hooks.words(Count | None).startswith("none, or whole number")
    assert "ekiden run local" in hooks.settings(Local)
