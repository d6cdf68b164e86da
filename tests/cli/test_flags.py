"""Flags and their help: from the fields of dataclasses, in the width of the terminal."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from ekiden import Hardware, Training
from ekiden.cli.flags import parse
from ekiden.cli.run_options import Here, RunOptions
from ekiden.cli.runs import run_options
from ekiden.cli.serving import ExportOptions
from ekiden.core.engine.method import Method
from ekiden.data import Reading
from ekiden.methods import FedELMY, FedSeq, MAEcho, method_named
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

Command = Callable[..., tuple[int, str]]
SHOWN = (
    "run fedelmy",
    "run fedavg",
    "export",
    "sweep",
    "evaluate",
    "silo start",
    "federation init",
    "report",
)


@pytest.mark.parametrize("words", SHOWN)
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_fits_the_terminal(
    words: str, columns: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text = command(*words.split(), "--help")
    lines = text.splitlines()
    assert code == 0
    assert max(len(line) for line in lines if " " in line.strip()) <= columns
    assert not any(
        sign in text for sign in ("\x1b", "│", "╭", "{None}", "(default: None)", "(default: )")
    )
    assert "\n\n\n" not in text


def test_help_is_shown_in_the_narrowest_window(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "7")
    code, text = command("show", "--help")
    assert code == 0
    assert "run folder" in text


def test_help_has_every_flag_once_with_its_help_and_default(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, text = command("run", "fedavg", "--help")
    for flag in (
        "--rounds INT",
        "--lr FLOAT",
        "--data STR",
        "--seeds INT ...",
        "--clients INT",
        "--device STR",
    ):
        assert text.count(f"\n  {flag} ") == 1, flag
    assert "  --rounds INT            T, rounds (default: 100)\n" in text
    assert "Federated averaging" in text
    assert "https://arxiv.org/abs/1602.05629" in text


@pytest.mark.parametrize("kind", [FedELMY, FedSeq, MAEcho])
def test_the_help_of_a_method_fits_and_begins_with_its_own(
    kind: type[Method], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        run_options(Plan(Recipe(kind())), ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    boxes = re.findall(r"^\n([\w-]+)$", text, re.MULTILINE)
    assert boxes == [
        "options",
        kind.title(),
        "data",
        "columns",
        "network",
        "training",
        "privacy",
        "hardware",
        "run",
    ]
    flags = re.findall(r"^  (--[a-z][\w-]*)", text, re.MULTILINE)
    nested = {"recipe", "method", "reading", "training", "hardware", "plan", "place"}
    kinds = (kind, Recipe, Plan, Reading, Training, Hardware, RunOptions, Here)
    wanted = {
        f"--{f.name.replace('_', '-')}"
        for one in kinds
        for f in fields(one)
        if f.name not in nested
    }
    assert sorted(flags) == sorted(wanted), "each once"


def test_flags_may_have_underscores_short_names_and_negative_numbers() -> None:
    read = run_options(
        Plan(Recipe(method_named("pfnm")())),
        ["--bias", "-1e-3", "--batch_size", "7", "--size=None"],
    )
    assert (read.plan.recipe.method.bias, read.plan.recipe.training.batch_size, read.plan.size) == (
        -1e-3,
        7,
        None,
    )
    assert parse(ExportOptions, ["a", "-o", "x.csv", "b"], "ekiden export").out == Path("x.csv")
    assert parse(ExportOptions, ["a", "--", "b"], "ekiden export").paths == (Path("a"), Path("b"))


def test_a_flag_that_is_off_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(Recipe(FedSeq()))
    with pytest.raises(SystemExit):
        run_options(plan, ["--help"])
    text = capsys.readouterr().out
    assert "  --augment, --no-augment\n" in text
    assert "  --json  " in text
    assert "--no-json" not in text
    assert "(default: False)" not in text
    read = run_options(plan, ["--json", "--no-json", "--no-augment", "--tune"])
    assert (read.json, read.plan.recipe.training.augment, read.plan.tune) == (False, False, True)


def test_an_argument_without_a_flag_names_the_flag_that_is_meant(
    command: Callable[..., tuple[int, str]],
) -> None:
    code, said = command("forget", "runs/x", "client-1")
    assert (code, "did you mean --client client-1?" in said) == (2, True)
