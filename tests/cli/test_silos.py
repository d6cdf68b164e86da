"""The commands of a silo."""

from pathlib import Path

import pytest

from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.silos import supernode
from tests.silos.fakes import silo_file


@pytest.mark.parametrize("link", ["nonsense", "link.example.org:http", ":8000"])
def test_a_silo_is_made_for_a_superlink_that_has_an_address(link: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give HOST:PORT"):
        call(["silo", "init", str(tmp_path / "a"), "--link", link])
    assert not (tmp_path / "a").exists()


def test_status_says_what_waits_and_what_was_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = silo_file(tmp_path, "client-0", "[limits]\nepsilon = 3.0\n")
    call(["silo", "status", str(file.path)])
    said = capsys.readouterr().out
    assert f"not started: `ekiden silo start {file.path}`" in said.replace("\n", "")
    assert "models measured: epsilon 0 of 8" in said
    assert "privacy spent: epsilon 0 of 3" in said
    with supernode.alone(file):
        call(["silo", "status", str(file.path), "--json"])
    assert '"state": "not connected yet"' in capsys.readouterr().out
