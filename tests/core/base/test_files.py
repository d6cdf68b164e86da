"""Files of others are read within bounds, and what is written for others runs in no spreadsheet."""

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest

from ekiden.core.base.errors import UserError, visible
from ekiden.core.base.files import csv_cell, for_csv, read_text

RIGHT_TO_LEFT, ISOLATE, NOTHING = "\u202e", "\u2066", "\u200b"


def test_text_of_others_is_read_within_bounds(tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(file) == "{}", "the mark that some editors put in front does not count as text"
    with pytest.raises(UserError, match="is not a file of at most 4 bytes"):
        read_text(file, 4)
    file.write_bytes(b'{"moments": "\xff"}')
    with pytest.raises(UserError, match=r"is not text in UTF-8 \(byte 13\)"):
        read_text(file)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")


@pytest.mark.parametrize("flags", [(), ("--table-one",)])
def test_sums_that_are_not_text_are_one_line(
    flags: tuple[str, ...], tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    file = tmp_path / "sums.json"
    file.write_bytes(b"\xff\xff{}")
    code, said = command("federation", "agree", str(file), *flags)
    assert (code, said.count("\n")) == (2, 1)
    assert "is not text in UTF-8" in said


def test_what_nobody_sees_is_shown() -> None:
    text = f"invoice{RIGHT_TO_LEFT}gpj.exe {ISOLATE}a{NOTHING}b\x07"
    assert visible(text) == "invoice?gpj.exe ?a?b?"
    assert visible("plain – ß 中文\n", keep="\n") == "plain – ß 中文\n"


@pytest.mark.parametrize("begin", list("=+-@\t\r"))
def test_no_cell_is_a_formula(begin: str) -> None:
    text = f'{begin}HYPERLINK("http://x","y")'
    assert not str(csv_cell(text)).startswith(begin)
    out = io.BytesIO()
    pyarrow.csv.write_csv(
        for_csv(pa.table({text: ["a"], "run": [text], "more": [None], "n": [-1.5]})), out
    )
    cells = [cell for row in out.getvalue().decode().splitlines() for cell in row.split('","')]
    assert not any(cell.strip('"').startswith(begin) for cell in cells[:2])
    assert out.getvalue().endswith(b",,-1.5\n"), "numbers and missing values stay"
