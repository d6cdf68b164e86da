"""Files of others are read within bounds, and what is written for others runs in no spreadsheet."""

import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
from filelock import Timeout

from ekiden.core.base.errors import UserError, visible
from ekiden.core.base.files import csv_cell, for_csv, lock_file, locked, read_text
from ekiden.lab.tables.records import held
from ekiden.silos.silo.participation import log_request

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


HOLDER = """
import sys, time
from pathlib import Path
from ekiden.core.base.files import hold_lock
lock = hold_lock(Path(sys.argv[1]), wait=False)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_keeps_others_off_until_its_process_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Timeout), locked_at_once(file):
            """Another process has it."""
    finally:
        holder.kill()
        holder.communicate()
    with locked(file, wait=False), pytest.raises(Timeout), locked_at_once(file):
        """This one has it now."""
    with locked(file, wait=True):
        """And gave it back."""


def locked_at_once(file: Path) -> AbstractContextManager[None]:
    return locked(file, wait=False)


def test_a_lock_beside_a_path_is_the_same_for_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert (
        lock_file(tmp_path / "folder") == lock_file(tmp_path / "link") == tmp_path / ".folder.lock"
    )


def test_a_silo_leaves_no_lock_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    log_request(tmp_path / "silo", "hello")
    with held(tmp_path / "records" / "a.jsonl"):
        assert not [*(tmp_path / "temp").iterdir()]
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*lock")} == {
        "silo/.requests.log.lock",
        "records/.lock",
    }
