"""Commands and their help; what a command may do for its user."""

import os
import re
import sys
from pathlib import Path

import pytest

import ekiden
from ekiden.cli.app import COMMANDS, call, main
from ekiden.core.base.errors import UserError


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


def test_only_the_command_line_trusts() -> None:
    source = Path(ekiden.__file__).parent
    named = re.compile(r"outside\.trust|outside import .*trust|getattr\(outside")
    calls = [
        file.relative_to(source).parts[0]
        for file in source.rglob("*.py")
        if named.search(file.read_text())
    ]
    assert set(calls) == {"cli"}


def test_output_that_nobody_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reader that has gone is not an error; a full disk is one, reported in one line."""
    ours, theirs = os.pipe()
    os.close(ours)
    monkeypatch.setattr(sys, "argv", ["ekiden", "--version"])
    for file, code, said in (
        (theirs, 141, ""),
        ("/dev/full", 2, "ekiden: cannot read or write the output: No space left on device\n"),
    ):
        with open(file, "w") as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            with pytest.raises(SystemExit) as stop:
                main()
        assert (stop.value.code, capfd.readouterr().err) == (code, said)
