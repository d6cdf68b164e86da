"""What is computed for the report, by hand; tables of subgroups and the curve of the calibration."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ekiden.core.engine.transport import Transfer
from ekiden.lab.reporting import figures
from ekiden.lab.reporting.figures import failing, flows, hops, lost_points
from ekiden.lab.reporting.runs import Group, collect
from ekiden.lab.reporting.style import Drawing
from ekiden.lab.reporting.tables import PlainTable
from ekiden.runs.summary import summarise

pytestmark = pytest.mark.xdist_group("report")


def test_forgetting_is_the_best_since_training_less_the_end() -> None:
    accuracy = np.array([[90.0, 95, 10], [70, 80, 20], [60, 85, 75]])
    assert lost_points(accuracy, [0, 1, 2]) == pytest.approx(((90 - 60) + (85 - 85)) / 2)
    assert lost_points(accuracy[:1], [0]) is None


@pytest.mark.parametrize(
    ("edges", "path"),
    [
        ([(1, "a", "b"), (2, "b", "c")], ["a", "b", "c"]),
        ([(1, "a", "b"), (2, "b", "a")], ["a", "b", "a"]),
        ([(0, "server", "a"), (1, "a", "server"), (2, "server", "b")], None),
        ([(1, "a", "b"), (2, "a", "c")], None),
        ([(1, "a", "b"), (1, "b", "c"), (2, "c", "a")], None),
    ],
)
def test_who_trained_when(
    runs: Path, tmp_path: Path, edges: list[tuple[int, str, str]], path: list[str] | None
) -> None:
    config = json.loads((runs / "fedseq" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    metrics = [{"step": i, "bytes": 0, "forward": 0, "backward": 0} for i in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    rows = [Transfer(step, source, target, "train", 10 * step) for step, source, target in edges]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    run = summarise(tmp_path)
    assert hops(run) == path
    assert sum(flows(run)[0].values()) == sum(10 * s for s, _, _ in edges)


def test_a_crowded_figure_holds_the_best_and_its_numbers_all(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = collect([runs]).groups
    monkeypatch.setattr(figures, "_MOST", 2)
    drawing = figures.curves(1, groups)[0]
    assert drawing.note == f"The best 2 of {len(groups)}."
    assert {row[0] for row in drawing.rows} == {group.name for group in groups}
    ends = {group.name: sum(group.values("accuracy", 100)) / len(group.runs) for group in groups}
    shown = drawing.figure.legends[0].get_texts()
    assert {text.get_text() for text in shown} == set(
        sorted(ends, key=lambda name: -ends[name])[:2]
    )
    last = [row for row in drawing.rows if row[0] == groups[0].name][-1]
    assert last[2] == pytest.approx(ends[groups[0].name])


WOMEN: dict[str, Any] = {
    "samples": 40,
    "positives": 10,
    "values": {"auroc": 0.7, "accuracy": 0.8, "shift": 0.31},
    "intervals": {"auroc": [0.6, 0.8]},
    "gaps": {"auroc": [-0.1, -0.2, 0.05], "accuracy": [0.02]},
    "recalibration": [1.2, -0.4],
}


SHARES = {"auroc": True, "accuracy": True, "shift": False}


def group(folder: Path, last: dict[str, Any]) -> Group:
    run = SimpleNamespace(folder=folder, last=last)
    return cast(Group, SimpleNamespace(name="FedAvg", place=0, first=run))


def test_subgroups_and_calibration_are_on_the_page(tmp_path: Path) -> None:
    table = {
        "model": "",
        "groups": {"sex": {"f": WOMEN}},
        "threshold": 0.25,
        "untold": {"sex": 7},
        "shares": SHARES,
    }
    (tmp_path / "subgroups.json").write_text(json.dumps(table))
    curve = [[20, 0.1, 0.05], [20, 0.4, 0.6]]
    found, drawing = failing(1, [group(tmp_path, {"figures": {"calibration": curve}})])
    assert isinstance(found, PlainTable)
    assert isinstance(drawing, Drawing)
    (row,) = found.rows
    assert dict(zip(found.header, row, strict=True)) == {
        "subgroup": "sex: f",
        "samples": "40",
        "positives": "10",
        "auroc %": "70.0 (60.0 to 80.0); gap -10.0 (-20.0 to +5.0)",
        "accuracy %": "80.0; gap +2.0",
        "shift": "0.310",
        "slope, intercept": "1.20, -0.40",
    }
    assert "Sensitivity and specificity at 0.25." in found.note
    assert "sex: 7 samples in small subgroups are left out" in found.note
    assert drawing.rows == [["FedAvg", 20, 0.1, 0.05], ["FedAvg", 20, 0.4, 0.6]]


def test_without_either_nothing_is_shown(tmp_path: Path) -> None:
    assert list(failing(1, [group(tmp_path, {})])) == []
