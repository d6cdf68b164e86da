"""A study: several methods over the same silos and seeds."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import pytest
import torch

import ekiden
from ekiden import FedAvg, FederatedData, FedSeq, Local, Study, Training, UserError, study
from ekiden.core.engine.method import Method
from ekiden.data import Iid
from ekiden.lab.conformance.small_runs import Tiny
from tests.pages import DOCS, blocks, play

mpl.use("Agg")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two methods with two seeds, one setting chosen from two."""
    silos = ekiden.split(ekiden.load("digits"), Iid(), 3, seed=0)
    methods: list[Method | str] = [FedAvg(rounds=2, epochs=1), "local"]
    folder = tmp_path_factory.mktemp("study")
    short = Training(max_steps=2)
    return study(
        methods,
        silos,
        seeds=[3, 5],
        folder=folder,
        model="mlp",
        grid={"epochs": [1, 2]},
        training=short,
    )


def test_a_study_holds_the_results_of_its_runs(made: Study) -> None:
    assert list(made) == ["fedavg", "local"]
    first = made["fedavg"][0]
    assert first.config["recipe"]["seed"] == 3
    assert first.folder == made.folder / "fedavg-seed3"  # type: ignore[operator]
    with pytest.raises(UserError, match="unknown method of the study 'fedseq'"):
        _ = made["fedseq"]


def test_a_grid_chooses_on_validation_data_only(made: Study) -> None:
    scores = {}
    for epochs in (1, 2):
        folders = sorted((made.folder / "tuning").glob(f"fedavg-epochs={epochs}-seed*"))  # type: ignore[operator]
        assert len(folders) == 2
        rows = [
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            for folder in folders
        ]
        scores[epochs] = mean(row["accuracy"] for row in rows)
        counts = json.loads((folders[0] / "config.json").read_text())["clients"]
        assert (
            counts["client-0"][2] == counts["client-0"][1]
        )  # measured on as many samples as are for validation
    best = max(scores, key=lambda epochs: (scores[epochs], -epochs))
    assert made.chosen["fedavg"] == {"epochs": best}
    assert made["fedavg"][0].config["recipe"]["hyperparameters"]["epochs"] == best


def test_the_table_has_means_and_paired_differences(made: Study) -> None:
    table = made.table(against="local")
    ours, theirs = ([100 * result.score for result in made[label]] for label in ("fedavg", "local"))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert table.loc["fedavg", "accuracy %"] == f"{mean(ours):.2f} ± {stdev(ours):.2f}"
    assert table.loc["fedavg", "minus local"] == f"{mean(gaps):+.2f} ± {stdev(gaps) / 2**0.5:.2f}"
    assert table.loc["local", "minus local"] == ""
    assert table.loc["fedavg", "bytes"] == f"{made['fedavg'][0].bytes:,}"
    assert "<table" in made._repr_html_()
    latex = made.to_latex()
    assert r"\toprule" in latex
    assert r"accuracy \%" in latex
    assert r"$\pm$" in latex


def test_frame_and_plot_have_each_step(made: Study) -> None:
    frame = made.frame()
    assert set(zip(frame.method, frame.seed, frame.step, strict=True)) == {
        ("fedavg", 3, 1), ("fedavg", 3, 2), ("fedavg", 5, 1), ("fedavg", 5, 2), ("local", 3, 1), ("local", 5, 1)
    }  # fmt: skip
    line = made.plot(x="step").lines[0]
    expected = [mean(r.metrics[k]["accuracy"] for r in made["fedavg"]) for k in (0, 1)]
    assert list(line.get_ydata()) == pytest.approx(expected)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown number 'byts': did you mean 'bytes'"):
        made.plot(x="byts")


def test_a_finished_study_is_read_and_not_run_again(
    made: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ekiden.core.engine.client import Client

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(Client, "fit", never)
    silos = ekiden.split(ekiden.load("digits"), Iid(), 3, seed=0)
    again = study(
        [FedAvg(rounds=2, epochs=1), "local"], silos, seeds=[3, 5], folder=made.folder, model="mlp",
        grid={"epochs": [1, 2]}, training=Training(max_steps=2),
    )  # fmt: skip
    assert again.table().equals(made.table())


@pytest.mark.slow
def test_a_study_writes_the_report(made: Study, tmp_path: Path) -> None:
    page = made.report(tmp_path / "report")
    assert "fedavg" in page.read_text(encoding="utf-8").lower()


def test_twins_are_told_apart_by_what_differs(blobs: FederatedData) -> None:
    found = study([FedSeq(epochs=1), FedSeq(epochs=1, order="reversed")], blobs, model=Tiny)
    assert list(found) == ["fedseq order=given", "fedseq order=reversed"]
    with pytest.raises(UserError, match="made of run folders"):
        found.report("report")


def test_data_may_depend_on_the_seed() -> None:
    digits = ekiden.load("digits")
    found = study(
        [Local(epochs=1)],
        lambda seed: ekiden.split(digits, "dirichlet:0.5", 3, seed=seed),
        seeds=[0, 1],
        model="mlp",
        training=Training(max_steps=1),
    )
    first, second = found["local"]
    assert first.config["clients"] != second.config["clients"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"methods": "fedseq"}, "study takes a list of methods"),
        ({"methods": []}, "study takes a list of methods"),
        ({"methods": ["fedsek"]}, "did you mean 'fedseq'"),
        ({"methods": ["local", "local"]}, "local is in the study twice"),
        ({"epochs": 2}, "epochs is a setting of the method: give Local"),
        ({"seed": 2}, "unknown argument 'seed': did you mean 'seeds'"),
        ({"seeds": []}, "seeds must be different whole numbers"),
        ({"seeds": [1, 1]}, "seeds must be different whole numbers"),
        ({"grid": {"epoch": [1]}}, "unknown setting in grid 'epoch': did you mean 'epochs'"),
        ({"grid": {"epochs": 3}}, "grid needs a list of values for epochs, not 3"),
        ({"grid": {"epochs": [0]}}, "epochs 0 is out of range"),
    ],
)
def test_a_mistake_is_one_line(blobs: FederatedData, change: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"methods": ["local"], "data": blobs, "model": Tiny} | change
    with pytest.raises(UserError, match=says) as found:
        study(**given)
    assert "\n" not in str(found.value)


def test_of_an_error_the_smallest_is_the_best() -> None:
    """The headline metric says which way is better, also one that the caller names."""
    x = torch.rand(240, 3, generator=torch.Generator().manual_seed(0))
    y = 5 * x[:, 0] + x[:, 1]
    silos = ekiden.federate([(x[:120], y[:120]), (x[120:], y[120:])], task="regression")
    found = study(
        [FedSeq()],
        silos,
        model="mlp",
        grid={"epochs": [1, 30]},
        metric="mae",
        training=Training(lr=0.01),
    )
    assert found.chosen["fedseq"] == {"epochs": 30}


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    space = play(DOCS / "studies.md")
    assert (tmp_path / "patients.png").exists()
    assert (
        len(blocks(DOCS / "studies.md", "python")[0].text.replace("\n\n", "\n").splitlines()) <= 15
    )
    assert list(space["study"]) == ["fedseq", "fedtasuki"]
    assert set(space["study"].chosen["fedseq"]) == {"epochs", "lr"}


@pytest.mark.slow
def test_the_search_of_the_page_finds_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    (script,) = [
        block.text for block in blocks(DOCS / "studies.md", "python") if block.title == "search.py"
    ]
    assert len(script.replace("\n\n", "\n").splitlines()) <= 12
    space: dict[str, Any] = {}
    exec(script.replace("n_trials=20", "n_trials=2"), space)
    assert len(space["search"].trials) == 2
    assert set(space["search"].best_params) == {"epochs", "lr"}
    assert 0.1 < space["search"].best_value <= 1
    assert space["search"].direction == optuna.study.StudyDirection.MAXIMIZE
