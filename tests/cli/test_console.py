"""Tables fit the terminal, are plain when they are piped, and have no colours if NO_COLOR is set."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.table import Table

from ekiden.cli import console
from ekiden.cli.console import TableConsole, print_json


def shown(table: Table, width: int, terminal: bool) -> str:
    out = io.StringIO()
    TableConsole(width=width, file=out, force_terminal=terminal, markup=False).print(table)
    return out.getvalue()


def wide() -> Table:
    table = Table(title="ten clients")
    table.add_column("client")
    for number in range(10):
        table.add_column(str(number), justify="right", style="red")
    table.add_column("a name", justify="left")
    table.add_row(
        "client-0",
        *(str(1000 + number) for number in range(10)),
        "a_word_that_is_longer_than_its_column",
    )
    return table


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_folds_into_80_columns_and_loses_nothing(terminal: bool) -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(wide(), 80, terminal))
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert all(str(1000 + number) in plain for number in range(10))
    assert "…" not in plain
    assert "a_word_that_is_longer_than_its_column" in re.sub(r"\s", "", plain)


def test_a_terminal_of_40_columns_gets_a_block_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")  # a dumb terminal has 80
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(wide(), 40, terminal=True))
    lines = [line.rstrip() for line in plain.splitlines()]
    assert max(map(len, lines)) <= 40
    assert lines[:3] == ["ten clients", "client: client-0", "0: 1000"]
    assert [line for line in lines if line.startswith("9:")] == ["9: 1009"]


def test_numbers_are_never_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for width in range(20, 60):
        table = Table()
        table.add_column("what was run, in many words")
        table.add_column("accuracy %", justify="right")
        table.add_row("a method with a long name and settings", "64.90 ± 7.72")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(table, width, terminal=True))
        assert max(map(len, plain.splitlines())) <= width
        assert "64.90 ± 7.72" in plain or width < 25, width


def test_a_piped_table_is_plain_text() -> None:
    text = shown(wide(), 160, terminal=False)
    assert text.isascii()
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert "client-0 1000 1001" in text


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours.search(shown(wide(), 120, terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours.search(shown(wide(), 120, terminal=True))


def test_a_terminal_still_gets_colours_of_our_own() -> None:
    text = io.StringIO()
    console = TableConsole(file=text, force_terminal=True, color_system="standard", markup=False)
    console.print("a\x1b[2Jb", style="bold", highlight=False)
    table = Table("name")
    table.add_row("c\x1b[2Jd")
    console.print(table)
    assert "\x1b[1m" in text.getvalue()
    assert "\x1b[2J" not in text.getvalue()
    assert "a?[2Jb" in text.getvalue()
    assert "c?[2J" in text.getvalue()


def test_json_has_only_numbers_that_every_reader_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """Python's own writer prints NaN and Infinity, which JSON does not have."""
    found = {"rmse": float("inf"), "each": [{"auroc": float("nan"), "n": 3}], "mean": 0.5}
    print_json(found, one_line=True)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == {"rmse": None, "each": [{"auroc": None, "n": 3}], "mean": 0.5}


def test_every_command_prints_json_so() -> None:
    printing = [
        file.name
        for file in Path(console.__file__).parent.glob("*.py")
        if "print(json.dumps" in file.read_text() and file.name != "console.py"
    ]
    assert not printing
