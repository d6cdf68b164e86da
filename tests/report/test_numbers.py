"""What is computed for the report, by hand."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from ekiden import Training
from ekiden.base.settings import Hardware
from ekiden.cli.runs import run_options
from ekiden.engine.method import Method
from ekiden.engine.store import read_trained
from ekiden.engine.transport import Transfer
from ekiden.methods import FedAvg, FedELMY, FedSeq
from ekiden.recipe import Recipe
from ekiden.reporting import figures
from ekiden.reporting.figures import flows, hops, lost_points
from ekiden.reporting.models import Opener, accuracies, embedding, surface, trained
from ekiden.reporting.runs import collect, partition
from ekiden.reporting.tables import Entry, command
from ekiden.runs.plan import Plan
from ekiden.runs.summary import summarise
from ekiden.tables.experiment import Published
from ekiden.training.weights import Weights, mean
from tests.report.conftest import make, plan

pytestmark = pytest.mark.xdist_group("report")


def test_difference_in_standard_errors() -> None:
    assert Entry(80.0, 3.0, 4, published=Published(77.0, 1.0)).difference == pytest.approx(3 / (10 / 4) ** 0.5)
    assert Entry(80.0, 3.0, 4, published=Published(83.0)).difference == pytest.approx(-(2**0.5))
    assert Entry(80.0, 3.0, 4, published=Published(83.0, 2.0, 1)).difference == pytest.approx(-3 / 6.25**0.5)
    assert Entry(80.0, None, 1, published=Published(77.0)).difference is None
    assert Entry(80.0, None, 1, published=Published(77.0)).beside == "published 77.00; +3.00 points"


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
            keep_trained=True,
        ),
        Plan(
            Recipe(FedAvg(server_optimizer="adam", server_lr=0.01), evaluate_every=5),
            "a folder/with space",
            "domains:a,b",
            size=32,
        ),
        Plan(
            Recipe(
                FedSeq(order="b,a"), training=Training(lr=5e-5, mean=(0.5,), std=(0.25,), augment=False, select="last")
            )
        ),
        Plan(Recipe(FedSeq(), evaluate_on="own")),
        Plan(Recipe(FedSeq(), model="cnn"), val_fraction=0.0, workers=2, hardware=Hardware("cuda:1", 2, "bf16", True)),
    ],
)
def test_the_command_of_a_plan_is_read_as_that_plan(wanted: Plan[Method]) -> None:
    words = shlex.split(command(wanted))
    assert words[:3] == ["ekiden", "run", wanted.recipe.method.title()]
    kind = type(wanted.recipe.method)
    assert run_options(Plan(Recipe(kind())), words[3:]).plan == wanted


def test_the_pool_is_kept_and_nothing_else_changes(runs: Path, tmp_path: Path) -> None:
    kept = runs / "fedelmy-0"
    make(plan(FedELMY(models=3, epochs=2, warmup=2)), tmp_path / "bare")
    for name in ("metrics.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (tmp_path / "bare" / name).read_bytes() == (kept / name).read_bytes()
    assert not list((tmp_path / "bare").rglob("trained*"))
    run = Opener()(summarise(kept))
    by_client = dict(trained(run))
    assert list(by_client) == ["client-0", "client-1", "client-2"]
    pool = by_client["client-2"]
    assert len(pool) == 4, "the received model and three"
    assert torch.equal(mean(pool).params, run.models[0].params)
    assert torch.equal(pool[0].params, mean(by_client["client-1"]).params)
    assert read_trained(kept / "clients" / "client-1")[0] == 1


def test_accuracies_of_all_models_and_classes(runs: Path) -> None:
    run = Opener()(summarise(runs / "fedper"))
    assert run.personal
    rows = accuracies(run)["class"]
    right = sum(n * a for n, a in rows.values())
    assert right / sum(n for n, _ in rows.values()) == pytest.approx(run.run.last["accuracy"])
    places, picked = embedding(run)
    assert places.shape == (len(picked), 2)
    assert np.isfinite(places).all()


def test_the_surface_passes_through_its_models(runs: Path) -> None:
    run = Opener()(summarise(runs / "fedelmy-0"))
    corners = trained(run)[-1][1][:3]
    found = surface(run, corners, [mean(corners)], own=True)
    distance = float((corners[0].params - corners[1].params).norm())
    assert np.allclose(found.places[:2], np.array([[0.0, 0.0], [distance, 0.0]]), atol=1e-5)
    assert np.allclose(found.places[3], found.places[:3].mean(0), atol=1e-4)
    apart = np.linalg.norm(found.places[1] - found.places[2])
    assert apart == pytest.approx(float((corners[1].params - corners[2].params).norm()), rel=1e-4)
    assert found.x[0] < found.places[:, 0].min() < found.places[:, 0].max() < found.x[-1]
    near = int(np.abs(found.x).argmin()), int(np.abs(found.y).argmin())
    u, v = _axes(corners)
    point = corners[0].with_params(corners[0].params + float(found.x[near[0]]) * u + float(found.y[near[1]]) * v)
    rows = torch.randperm(len(run.data.dataset.test), generator=torch.Generator().manual_seed(0))[: found.samples]
    loss = float(run.test.scores(point, rows=rows.sort().values).loss.double().mean())
    assert found.loss[near[1], near[0]] == pytest.approx(loss, rel=1e-3)


def _axes(corners: list[Weights]) -> tuple[torch.Tensor, torch.Tensor]:
    u = corners[1].params - corners[0].params
    u = u / u.norm()
    v = corners[2].params - corners[0].params
    v = v - u * v.dot(u)
    return u, v / v.norm()


def test_a_crowded_figure_holds_the_best_and_its_numbers_all(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = collect([runs]).groups
    monkeypatch.setattr(figures, "_MOST", 2)
    drawing = figures.curves(1, groups)[0]
    assert drawing.note == f"The best 2 of {len(groups)}."
    assert {row[0] for row in drawing.rows} == {group.name for group in groups}
    ends = {group.name: sum(group.values("accuracy", 100)) / len(group.runs) for group in groups}
    shown = drawing.figure.legends[0].get_texts()
    assert {text.get_text() for text in shown} == set(sorted(ends, key=lambda name: -ends[name])[:2])
    last = [row for row in drawing.rows if row[0] == groups[0].name][-1]
    assert last[2] == pytest.approx(ends[groups[0].name])


def test_silos_of_a_column_are_the_same_setting_from_python_and_the_command_line() -> None:
    column = {"group_column": "ward"}
    asked, split_up = ({"plan": {"partition": p, "reading": column}} for p in ("auto", "natural"))
    assert partition(asked) == partition(split_up) == "natural"
