"""Stored run folders: what a version wrote, later versions read, or refuse in one line.

`tests/stored/format-N` is a run that stopped after two of its four steps. A folder of a released
version stays as it is. As long as nothing was released, the newest may be made again after a change
of what a run folder holds:

    python -m tests.runs.across.test_stored
"""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import ekiden
from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware
from ekiden.core.engine.folder import FORMAT, read_lines
from ekiden.methods import FedGram
from ekiden.runs.api import How
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

STORED = Path(__file__).parents[1] / "stored"
FORMATS = tuple(sorted(int(path.name.removeprefix("format-")) for path in STORED.glob("format-*")))


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / f"format-{request.param}", tmp_path / "run"))


def test_the_format_of_today_is_stored() -> None:
    assert FORMAT in FORMATS


def test_what_is_stored_is_read_after_another_start_of_the_machine() -> None:
    assert not [*STORED.rglob("latest-*")]


def test_a_stored_run_is_opened_resumed_and_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ekiden.open_run(folder)
    assert (before.state.step, len(before.metrics), len(before.ledger)) == (2, 2, 1)
    call(["resume", str(folder)])
    call(["show", str(folder)])
    assert "finished" in capsys.readouterr().out
    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[:2] == list(before.metrics)
    assert rows[3]["accuracy"] > 0.6
    model = ekiden.load_model(folder, client="client-0")
    with torch.inference_mode():
        assert model(torch.zeros(3, *model.shape, dtype=torch.uint8)).shape == (
            3,
            len(model.classes),
        )


@pytest.mark.parametrize("number", [0, FORMAT - 1, FORMAT + 1, "2", None])
@pytest.mark.parametrize(
    "words", [["show"], ["resume"], ["evaluate"], ["card"], ["report"]], ids="-".join
)
def test_another_format_is_one_line(words: list[str], number: object, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED / f"format-{FORMAT}", tmp_path / "run"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": number}))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=f"run-folder format {number}, this version reads {FORMAT}: use the ver"
    ) as told:
        call([*words, str(folder)])
    assert "\n" not in str(told.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


if __name__ == "__main__":
    place = STORED / f"format-{FORMAT}"
    shutil.rmtree(place, ignore_errors=True)
    method = FedGram(features="patches", width=40, personal=True)
    plan = Plan(
        Recipe(method, model="mlp"),
        data="digits",
        clients=2,
        hardware=Hardware(threads=1, device="cpu"),
    )
    with mock.patch("ekiden.core.engine.folder._boot", return_value=""):  # each state is synced
        plan.run(place, plan.federation(), how=How(stop_after=2, quiet=True))
    (place / "lock").unlink()
    (place / "environment.json").write_text("{}\n")
    (place / "attempts.jsonl").unlink()
