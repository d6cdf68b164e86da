"""The README's Python runs as it is written, and prints what stands below it."""

import re
from pathlib import Path

import pytest

from tests.pages import README, blocks

ACCURACY = re.compile(r"accuracy ([\d.]+)")


def test_the_example_prints_what_stands_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    (example,), (printed,) = blocks(README, "python"), blocks(README, "text")
    exec(compile(example.text, str(README), "exec"), {"__name__": "readme"})
    said = capsys.readouterr().out
    assert ACCURACY.sub("accuracy", said).strip() == ACCURACY.sub("accuracy", printed.text).strip()
    ours, theirs = (
        float(match[1]) for text in (said, printed.text) if (match := ACCURACY.search(text))
    )
    assert ours == pytest.approx(theirs, abs=0.03)  # processors round differently
