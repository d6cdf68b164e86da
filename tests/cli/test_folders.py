"""Commands that look at run folders."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.readers.one_column import labelled


def test_the_commonest_class_stands_next_to_every_printed_accuracy(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    labelled(["a", "a", "a", "b"] * 30).to_csv(tmp_path / "t.csv", index=False)
    code, said = command(
        *(
            "run",
            "fedavg",
            "--rounds",
            "1",
            "--epochs",
            "1",
            "--data",
            "t.csv",
            "--partition",
            "iid",
            "--clients",
            "2",
        )
    )
    assert code == 0, said
    assert "majority guess" in said
    assert "75.00" in said
    run = str(next((tmp_path / "runs").iterdir()))
    assert "always giving the commonest class: 75.00 % accuracy" in command("show", run)[1]
    assert "75.00" in command("compare", run)[1]
    assert "| accuracy of always giving the commonest class | 0.7500 |" in command("card", run)[1]
    code, said = command("report", run, "-o", "page")
    assert code == 0, said
    assert "Always giving the commonest class: " in (tmp_path / "page" / "index.html").read_text()
