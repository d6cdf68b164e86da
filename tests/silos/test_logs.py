"""Lines of long-running commands have a time, a level and a source, and no colours."""

import json
import re

import pytest

from ekiden.silos.logs import Log


@pytest.mark.parametrize(
    ("printed", "level", "source", "text"),
    [
        (
            "\x1b[92mINFO \x1b[0m:      Starting Flower SuperNode",
            "INFO",
            "flower",
            "Starting Flower SuperNode",
        ),
        ("INFO:     Started server process [1]", "INFO", "flower", "Started server process [1]"),
        ("2026-11-27T19:09:22.825Z WARNING [uvicorn.error] slow", "WARNING", "flower", "slow"),
        ("WARNING ekiden: refused: no", "WARNING", "ekiden", "refused: no"),
        ("KeyError: 'x'", "INFO", "flower", "KeyError: 'x'"),
    ],
)
def test_a_line_of_another_process_gets_a_time_and_its_level(
    printed: str, level: str, source: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Log().other(f"{printed}\n")
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\dT[\d:]{{8}}Z {level:7} {source}: {re.escape(text)}\n",
        capsys.readouterr().out,
    )
    Log("json").other(printed)
    found = json.loads(capsys.readouterr().out)
    assert (found["level"], found["source"], found["text"]) == (level, source, text)
    assert found["time"].endswith("Z")


def test_empty_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    Log().other("\x1b[92mINFO \x1b[0m:      \n")
    assert not capsys.readouterr().out
