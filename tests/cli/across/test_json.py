"""`--json`: one document on standard output for every command that prints a table."""

import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from ekiden.cli.app import COMMANDS
from ekiden.cli.flags import texts_below
from ekiden.cli.folders import ShowOptions
from ekiden.cli.run_options import RunOptions
from tests.warm import ekiden

NOT_A_TABLE = {
    "report": "it writes a page",
    "predict": "it writes a file, or CSV",
    "export": "it writes a file",
    "card": "it prints Markdown",
    "new method": "it writes files",
    "new study": "it writes files",
    "new hospital": "it writes files",
    "trust": "it prints a line",
    "stop": "it prints a line",
    **{
        f"federation {name}": "it prints lines"
        for name in ("init", "start", "agree", "add", "rotate", "revoke")
    },
    **{
        name: "it runs at a silo"
        for name in COMMANDS
        if name.startswith("silo ") and name != "silo status"
    },
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_prints_a_table_has_json(name: str) -> None:
    module, _, function = COMMANDS[name].partition(":")
    kind = (
        RunOptions
        if name == "run"
        else get_type_hints(getattr(import_module(f"ekiden.{module}"), function))["options"]
    )
    has = "json" in {field.name for field in fields(kind)}
    assert has != (name in NOT_A_TABLE), name


def test_run_and_resume_print_only_json_on_standard_output(tmp_path: Path) -> None:
    args = [
        "run",
        "fedavg",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--clients",
        "2",
        "--data",
        "digits",
        "--out",
        "r",
    ]
    for line in (args, ["resume", "r/fedavg-digits-seed0"]):
        done = ekiden(*line, "--json", folder=tmp_path)
        (run,) = json.loads(done.stdout)
        always, _, _ = texts_below(ShowOptions)["json"].partition("; of a regression")
        assert set(re.findall(r"`(\w+)`", always)) == run.keys(), "the help lists all entries"
        assert run["finished"]
        assert run["metrics"][-1]["accuracy"] == run["value"]
        assert "samples:" in done.stderr
