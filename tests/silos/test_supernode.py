"""The process of a silo: private files, no core file, and counts without its data."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ekiden.silos import supernode
from ekiden.silos.silo import approval
from ekiden.silos.silo.participation import log_request
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.parcel import Ask, pack
from tests.silos.asked import TERMS, task
from tests.silos.fakes import NAMES, mine, seal_for, silo_file
from tests.warm import WarmProcess


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_only_its_user_reads_the_folder_of_a_silo(tmp_path: Path) -> None:
    file = silo_file(tmp_path, NAMES[0])
    (file.folder / "runs").mkdir(parents=True)
    (file.folder / "runs").chmod(0o755)
    (file.folder / "old").write_text("of a version before")
    (file.folder / "old").chmod(0o644)
    before = os.umask(0o022)
    try:
        with supernode.alone(file):
            log_request(file.folder, "a line")
            (file.folder / "runs" / "new").mkdir()
            (file.folder / "runs" / "new" / "value").write_text("secret")
    finally:
        os.umask(before)
    for path in (file.folder, *file.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def crash(folder: Path, file: SiloFile) -> None:
    """Let a process crash that was started by one as `ekiden silo start` is, and one that was
    not."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    for name in ("other", "silo"):
        if name == "silo":
            supernode.keep_private(file)
        (folder / name).mkdir()
        subprocess.run(
            [sys.executable, "-IS", "-c", "import os; os.abort()"], cwd=folder / name, check=False
        )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems write core files elsewhere")
def test_a_silo_that_crashes_leaves_no_core_file(tmp_path: Path) -> None:
    process = WarmProcess(target=crash, args=(tmp_path, silo_file(tmp_path, NAMES[0])))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    if not list((tmp_path / "other").iterdir()):
        pytest.skip("this machine keeps core files elsewhere, or none")
    assert not list((tmp_path / "silo").iterdir())


def test_a_silos_counts_hold_nothing_of_its_data(tmp_path: Path) -> None:
    file = silo_file(tmp_path, "client-0", "[limits]\napprove = true\n")
    silo = Silo(file, {"": mine("client-0")})
    for data in (pack(Ask("hello", TERMS.text(), "0")), task(), b"no message"):
        silo.answer(data)
    found = supernode.Monitored(file).counts()
    assert found["plans_waiting"] == 1.0
    assert found["runs"] == found["disk_bytes"] == 0.0
    approval.approve(file, approval.digest(file, TERMS))
    silo.answer(seal_for(file, task()))
    after = supernode.Monitored(file).counts()
    assert (after["plans_waiting"], after["runs"]) == (0.0, 1.0)
    assert after["disk_bytes"] > 0
    names = {name.partition("{")[0] for name in after}
    assert names == {
        "supernode_starts_total",
        "connection_changed_seconds",
        "runs",
        "disk_bytes",
        "plans_waiting",
    }
    assert all(isinstance(value, (int, float)) for value in after.values())


def test_a_silo_whose_superlink_is_away_says_nothing_about_its_certificate(tmp_path: Path) -> None:
    file = silo_file(tmp_path, NAMES[0])
    assert supernode.Monitored(file).health() == (False, "not connected yet")
