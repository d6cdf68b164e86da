"""What `ekiden run` prints of a run that has ended."""

import re
from pathlib import Path

import pytest

from ekiden.cli.app import call
from ekiden.cli.runs import overview
from ekiden.methods import METHODS


def test_a_run_of_a_rare_class_says_what_its_accuracy_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("north", "south"):
        # one in twenty dies, and no column tells who
        rows = [f"{50 + k * 7 % 30},{'yes' if k % 20 == 0 else 'no'}" for k in range(200)]
        Path(f"{name}.csv").write_text("\n".join(["age,died", *rows]) + "\n")
    words = "run fedseq --silos north.csv south.csv --label-column died --epochs 1 --out run"
    call(words.split())
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if line.startswith("run/") and "never answers 'yes'" in line]
    assert "auroc" in told
    assert "sensitivity 0.00 %" in told


def test_the_help_of_run_is_one_screen_with_every_method() -> None:
    text = overview()
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    assert all(re.search(rf"\b{method.title()}\b", text) for method in METHODS)
    assert len(set(METHODS)) == len(METHODS)
