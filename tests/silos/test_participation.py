"""The silo's log: what was asked is in it, nobody pushes it out, and a change is noticed. Its files
are private."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ekiden.silos import security, supernode
from ekiden.silos.silo import participation
from ekiden.silos.silo.participation import FILE, log_request
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.fakes import NAMES, FakeNodes, silo_file
from tests.warm import WarmProcess


def lines(folder: Path) -> list[str]:
    return (folder / FILE).read_text(encoding="utf-8").splitlines()


def test_hellos_are_logged(tmp_path: Path) -> None:
    file = silo_file(tmp_path, NAMES[0])
    answer, _ = unpack(FakeNodes([file]).silo(100).answer(pack(Ask("hello", nonce="x"))), Answer)
    assert not answer.error
    (line,) = lines(file.folder)
    assert line.endswith(" hello")


def test_nobody_pushes_out_what_others_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "_RUN", 2000)
    monkeypatch.setattr(participation, "_STRANGERS", 1000)
    log_request(tmp_path, "the first line", run="a" * 16)
    for i in range(200):
        log_request(tmp_path, f"refused {i}\nforged line")
        log_request(tmp_path, f"run {'b' * 16}: {i}", run="b" * 16)
    found = lines(tmp_path)
    assert "the first line" in found[0]
    assert sum("requests of no run today: too many lines" in line for line in found) == 1
    assert (
        sum(f"run {'b' * 16}: too many lines, further ones are left out" in line for line in found)
        == 1
    )
    assert (tmp_path / FILE).stat().st_size < 2000 + 1000 + 3 * 200
    log_request(tmp_path, "the last line", run="a" * 16)
    assert "the last line" in lines(tmp_path)[-1]
    assert set(json.loads((tmp_path / "requests.json").read_text())) >= {"a" * 16, "b" * 16}


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


def test_a_silos_own_calls_avoid_a_proxy() -> None:
    found = security.without_proxy(
        {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "intra.example, 127.0.0.1"}
    )
    assert found["NO_PROXY"] == "intra.example,127.0.0.1,localhost,::1"
    assert found["no_proxy"] == "127.0.0.1,localhost,::1"
