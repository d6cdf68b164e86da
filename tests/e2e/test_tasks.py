"""A task without accuracy, from the command line: run, show, compare, evaluate, resume, report."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiden.core.engine.folder import read_config, read_lines

Command = Callable[..., tuple[int, str]]

DATA = """
import torch
from sklearn.datasets import load_diabetes


def parts():
    bunch = load_diabetes()
    x, y = torch.tensor(20 * bunch.data[:120]).float(), torch.tensor(bunch.target[:120]).float()
    return (x[:90], y[:90]), (x[90:], y[90:])


def farthest(answers, y):
    return -float((answers[:, 0] - y).abs().max())
"""
RUN = ("fedseq", "--partition", "iid", "--clients", "2", "--epochs", "2")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text(DATA)
    return "mine.py:parts"


def test_a_regression_is_run_and_shown_by_its_headline_metric(data: str, command: Command) -> None:
    code, said = command("run", *RUN, "--data", data, "--task", "regression")
    assert code == 0, said
    assert "accuracy" not in said
    assert re.search(r"rmse \d\d\.\d", said)
    folder = Path("runs/fedseq-mine-seed0")
    task = read_config(folder)["task"]
    assert task["kind"] == "regression"
    assert task["mean"][0] > 100
    last = read_lines(folder / "metrics.jsonl")[-1]
    assert last["metric"] == "rmse"
    assert last["rmse"] == last["metrics"]["rmse"]
    assert last["client_worst"] == max(last["clients"])
    assert set(last["groups"]) == {"client"}

    code, said = command("show", str(folder))
    assert (code, "worst client" in said, f"{last['rmse']:.4g}" in said, "%" in said) == (
        0,
        True,
        True,
        False,
    )
    code, said = command("compare", str(folder))
    assert code == 0
    assert "rmse on the union" in said
    code, said = command("evaluate", str(folder), "--json")
    found = json.loads(said)
    assert found["rmse"] == pytest.approx(last["rmse"])
    assert found["metrics"] == pytest.approx(last["metrics"])
    code, said = command("evaluate", str(folder), "--metric", "mae")
    assert (code, said.startswith(f"mae {last['metrics']['mae']:.4g}")) == (0, True)
    code, said = command("resume", str(folder))
    assert (code, "rmse" in said) == (0, True)
    code, said = command("report", str(folder), "--out", "page")
    assert code == 0, said
    page = Path("page/index.html").read_text(encoding="utf-8")
    assert "rmse" in page


def test_a_metric_from_a_file_is_the_headline(data: str, command: Command) -> None:
    given = (*RUN, "--data", data, "--task", "regression", "--metric", "mine.py:farthest")
    code, said = command("run", *given)
    assert code == 0, said
    last = read_lines(Path("runs/fedseq-mine-seed0/metrics.jsonl"))[-1]
    assert last["metric"] == "farthest"
    assert last["farthest"] < 0
    code, said = command("compare", "runs/fedseq-mine-seed0")
    assert (code, f"{last['farthest']:.4g}" in said) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("fedseq", "--data", "mine.py:parts"),
            "86 different whole numbers: use --task regression if they are numbers to predict",
        ),
        (
            ("fedgram", "--head", "lda", "--data", "mine.py:parts", "--task", "regression"),
            "fedgram needs one class for each sample, the task is regression: leave out the "
            "options",
        ),
        (
            ("fedseq", "--data", "mine.py:parts", "--task", "regression", "--metric", "auroc"),
            "metric of regression",
        ),
        (
            ("fedseq", "--data", "mine.py:parts", "--task", "regression", "--metric", "mine.py:no"),
            "mine.py 'no'",
        ),
        (("fedseq", "--data", "mine.py:parts", "--task", "numbers"), "numbers"),
        (
            ("fedavg", "--data", "digits", "--task", "multi-label"),
            "multi-label needs a row of 0 and 1 for each of 1797 samples",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    arguments: tuple[str, ...], line: str, data: str, command: Command
) -> None:
    code, said = command("run", *arguments, "--partition", "iid", "--clients", "2")
    assert code == 2, said
    assert said.count("ekiden: ") == 1
    assert line in said
    assert not list(Path("runs").glob("*/*"))
