"""What the help pages show, and how."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from ekiden import Hardware, Training, UserError
from ekiden.cli import coordinator
from ekiden.cli.app import COMMANDS, call
from ekiden.cli.flags import parse
from ekiden.cli.run_options import BetweenMachines, Here, RunOptions
from ekiden.cli.runs import overview, run_options
from ekiden.cli.serving import ExportOptions
from ekiden.core.engine.method import Method
from ekiden.data import Reading
from ekiden.methods import METHODS, FedELMY, FedSeq, MAEcho, method_named
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator.remote_plan import RemotePlan


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


def test_the_help_of_run_is_one_screen_with_every_method() -> None:
    text = overview()
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    assert all(re.search(rf"\b{method.title()}\b", text) for method in METHODS)
    assert len(set(METHODS)) == len(METHODS)


@pytest.mark.parametrize(
    "name", ["fedelmy-parallel", "fedelmyparallel", "FedELMY_Parallel", "ot-fusion", "otfusion"]
)
def test_names_with_and_without_hyphens(name: str) -> None:
    assert method_named(name).title() == name.lower().replace("-", "").replace("_", "")


def test_internal_flags_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["run", "fedper", "--help"], ["run", "fedgram", "--on", "flower", "--help"]):
        with pytest.raises(SystemExit):
            call(args)
    text = capsys.readouterr().out
    assert "  --lr-decay FLOAT" in text
    assert "--revises" not in text, "what `ekiden forget` says"


@pytest.mark.parametrize(
    "words", [name.split() for name in COMMANDS if name != "run"], ids="-".join
)
def test_every_command_has_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--help"], ["-h"], ["--no-such-flag", "--help"]):
        with pytest.raises(SystemExit) as stop:
            call([*words, *flags])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: ekiden {' '.join(words)} [flags]")
        assert "  -h, --help" in text


def test_a_group_of_commands_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    call(["silo"])
    assert "ekiden silo init|join|start|keys|" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown silo command 'stort': did you mean 'start'"):
        call(["silo", "stort"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show"], "RUN is missing: see ekiden show --help"),
        (["forget", "runs/a"], "--client is missing: see ekiden forget --help"),
        (["list", "--json=3"], "--json takes no value: see ekiden list --help"),
        (["export", "a", "--out"], "--out needs a value: see ekiden export --help"),
        (["export", "a", "-out", "x"], "unknown flag -out: did you mean --out"),
    ],
)
def test_what_is_missing_is_named(args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call(args)
    assert str(error.value).count("see ekiden") <= 1


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


@pytest.mark.parametrize("kind", ["study", "hospital"])
def test_a_new_project_has_data_settings_a_script_a_test_and_a_readme(
    kind: str, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    folder = tmp_path / "mine"
    code, said = command("new", kind, str(folder))
    assert code == 0, said
    files = {file.name for file in folder.rglob("*") if file.is_file()}
    assert "README.md" in files
    for suffix in (".csv", ".toml", ".py"):
        assert any(name.endswith(suffix) for name in files), suffix
    assert any(name.startswith("test_") for name in files)
    assert not any(name.endswith(".txt") for name in files)
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# mine\n")
    for script in folder.glob("*.py"):
        compile(script.read_text(encoding="utf-8"), str(script), "exec")
    code, said = command("new", kind, str(folder))
    assert (code, "exists already" in said) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["study", "hospital"])
def test_the_test_of_a_new_project_passes(
    kind: str, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    assert command("new", kind, str(tmp_path / "mine"))[0] == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path / "mine", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_an_argument_without_a_flag_names_the_flag_that_is_meant(
    command: Callable[..., tuple[int, str]],
) -> None:
    code, said = command("forget", "runs/x", "client-1")
    assert (code, "did you mean --client client-1?" in said) == (2, True)
