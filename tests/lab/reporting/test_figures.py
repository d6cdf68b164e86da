"""What is computed for the report, by hand; tables of subgroups and the curve of the calibration."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ekiden import Training
from ekiden.cli.runs import run_options
from ekiden.core.base.settings import Hardware
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Transfer
from ekiden.lab.reporting import figures
from ekiden.lab.reporting.figures import failing, flows, hops, lost_points
from ekiden.lab.reporting.runs import Group, Opener, accuracies, collect
from ekiden.lab.reporting.style import Drawing
from ekiden.lab.reporting.tables import PlainTable, command
from ekiden.lab.tables.experiment import Published
from ekiden.lab.tables.verdicts import Comparison
from ekiden.methods import FedAvg, FedELMY, FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import partition, summarise

pytestmark = pytest.mark.xdist_group("report")


def test_how_far_a_value_is_from_the_printed_one() -> None:
    beside = Comparison(80.0, 3.0, 4, Published(77.0, 1.0)).beside
    assert beside == "published 77.00 ± 1.00; +1.9 standard errors"
    assert Comparison(80.0, None, 1, Published(77.0)).beside == "published 77.00; +3.00 points"


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


@pytest.mark.parametrize(
    "wanted",
    [
        Plan(Recipe(FedSeq())),
        Plan(
            Recipe(FedELMY(models=2, alpha=0.06, average_start=False, form="released"), seed=3),
            clients=4,
        ),
        Plan(
            Recipe(FedAvg(server_optimizer="adam", server_lr=0.01), evaluate_every=5),
            "a folder/with space",
            "domains:a,b",
            size=32,
        ),
        Plan(
            Recipe(
                FedSeq(order="b,a"),
                training=Training(lr=5e-5, mean=(0.5,), std=(0.25,), augment=False, select="last"),
            )
        ),
        Plan(Recipe(FedSeq(), evaluate_on="own")),
        Plan(
            Recipe(FedSeq(), model="cnn"),
            val_fraction=0.0,
            workers=2,
            hardware=Hardware("cuda:1", 2, "bf16", True),
        ),
    ],
)
def test_the_command_of_a_plan_is_read_as_that_plan(wanted: Plan[Method]) -> None:
    words = shlex.split(command(wanted))
    assert words[:3] == ["ekiden", "run", wanted.recipe.method.title()]
    kind = type(wanted.recipe.method)
    assert run_options(Plan(Recipe(kind())), words[3:]).plan == wanted


def test_accuracies_of_all_models_and_classes(runs: Path) -> None:
    run = Opener()(summarise(runs / "fedper"))
    assert run.personal
    rows = accuracies(run)["class"]
    right = sum(n * a for n, a in rows.values())
    assert right / sum(n for n, _ in rows.values()) == pytest.approx(run.run.last["accuracy"])


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


def test_silos_of_a_column_are_the_same_setting_from_python_and_the_command_line() -> None:
    column = {"group_column": "ward"}
    asked, split_up = ({"plan": {"partition": p, "reading": column}} for p in ("auto", "natural"))
    assert partition(asked) == partition(split_up) == "natural"


def test_silos_with_names_of_their_own_are_natural() -> None:
    plan = {"partition": "auto", "data": "digits"}
    assert partition({"plan": plan, "clients": {"client-0": [], "client-1": []}}) == "dirichlet:0.5"
    assert partition({"plan": plan, "clients": {"north": [], "south": []}}) == "natural"
    own = {"partition": "auto", "silos": ["a=/x/a.csv", "b=/x/b.csv"]}
    assert partition({"plan": own, "clients": {"client-0": [], "client-1": []}}) == "natural"


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
