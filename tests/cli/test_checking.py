"""The command that checks a method: what holds and what does not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ekiden.lab.conformance import CHECKS, line, rules
from tests.lab.conformance.written import written


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


Command = Callable[..., tuple[int, str]]


def test_the_command_says_what_holds_and_what_does_not(folder: Path, command: Command) -> None:
    code, text = command("check", written(folder, {"(clients - 1) * model": "clients * model"}))
    assert code == 2
    assert f"BROKEN  {line(rules.ledger_equals_the_cost)}\n        found: 1212 bytes" in text
    assert text.count("holds ") == len(CHECKS) - 2  # all but this one, and that it is published
    assert "breaks 1 of 15 lines of the contract (listed above)" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"(frozen=True)": ""}, line(rules.is_a_frozen_dataclass)),
        ({"return clients\n": "return clients +\n"}, "SyntaxError"),
        ({"Count, Fed": "Count, Feed"}, "ImportError"),
    ],
)
def test_a_file_that_cannot_be_loaded_gets_a_line(
    changes: dict[str, str], said: str, folder: Path, command: Command
) -> None:
    code, text = command("check", written(folder, changes))
    assert code == 2
    assert said in text
    assert "Traceback" not in text


def test_an_installed_method_is_checked_by_its_name(command: Command) -> None:
    code, text = command("check", "local")
    assert code == 0, text
    assert line(rules.cites_its_source) in text
    assert "local keeps the contract" in text
    code, text = command("check", "fedsq")
    assert (code, "did you mean 'fedseq'" in text) == (2, True)
