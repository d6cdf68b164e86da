"""Methods between machines: the flags that silos allow."""

import re
from dataclasses import fields

import pytest

from ekiden import Training, UserError
from ekiden.cli import coordinator
from ekiden.cli.run_options import BetweenMachines, RunOptions
from ekiden.methods import FedSeq
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator.remote_plan import RemotePlan


def test_the_help_between_silos_has_each_flag_that_silos_allow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        coordinator.run(FedSeq, ["--help"])
    flags = re.findall(r"^  (--[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)
    hidden = {"recipe", "method", "training", "plan", "place", "revises"}
    kinds = (FedSeq, Recipe, RemotePlan, Training, RunOptions, BetweenMachines)
    wanted = {
        f"--{f.name.replace('_', '-')}"
        for one in kinds
        for f in fields(one)
        if f.name not in hidden
    }
    assert sorted(flags) == sorted(wanted), "each once"


@pytest.mark.parametrize("flags", [["--evaluate-on", "own"]])
def test_what_silos_decide_is_no_flag_between_silos(flags: list[str]) -> None:
    with pytest.raises(UserError, match="--evaluate-on is for runs on one machine"):
        coordinator.run(FedSeq, [*flags, "--clients", "a,b"])
