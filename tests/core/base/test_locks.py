"""Locks between processes."""

import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from filelock import Timeout

from ekiden.core.base.files import lock_file, locked
from ekiden.lab.tables.records import held
from ekiden.silos.silo.participation import log_request

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
