"""The silo's log: what was asked is in it, nobody pushes it out, and a change is noticed. Its files
are private."""

import json
from pathlib import Path

import pytest

from ekiden.silos import security
from ekiden.silos.silo import participation
from ekiden.silos.silo.participation import FILE, log_request
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.fakes import NAMES, FakeNodes, silo_file


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


def test_a_silos_own_calls_avoid_a_proxy() -> None:
    found = security.without_proxy(
        {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "intra.example, 127.0.0.1"}
    )
    assert found["NO_PROXY"] == "intra.example,127.0.0.1,localhost,::1"
    assert found["no_proxy"] == "127.0.0.1,localhost,::1"
