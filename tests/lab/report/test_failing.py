"""Tables of subgroups and the curve of the calibration in a report."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ekiden.lab.reporting.figures import failing
from ekiden.lab.reporting.runs import Group
from ekiden.lab.reporting.style import Drawing
from ekiden.lab.reporting.tables import PlainTable

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
