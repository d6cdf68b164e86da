"""Each project in `examples/` runs with its one command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = {
    "images": "prediction for a zero: 0",
    "hospitals": "fedgram",
    "survival": "treated",
    "text": "rude: bad",
    "own_method": "halfseq",
    "own_loop": "after client 4: accuracy 0.",
    "own_transport": "over pipes: accuracy 0.",
}


def test_every_example_is_listed_and_tried() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    there = {file.parent.name for file in EXAMPLES.glob("*/run.py")}
    assert there == SAID.keys()
    assert all(f"({name}/run.py)" in listed for name in there)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name / "run.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"EKIDEN_DATA": ""},
    )
    assert done.returncode == 0, done.stderr
    assert SAID[name] in done.stdout
