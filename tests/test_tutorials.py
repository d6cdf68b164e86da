"""The tutorials, executed from top to bottom and compared with the outputs that they show; Flower's
is in tests/e2e."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages import DOCS, blocks, play

FOLDER = DOCS / "tutorials"
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in; the user's own files are trusted only there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["first-run"])
def test_a_tutorial_is_as_it_says(name: str, command: Command) -> None:
    play(FOLDER / f"{name}.md", command)


def test_a_study_takes_no_more_commands() -> None:
    """Distinct commands, and lines, of the coordinator and of one hospital."""
    page = FOLDER / "clinical-study.md"
    lines = [line.removeprefix("$ ") for block in blocks(page) for line in block.text.splitlines()]
    commands = [tuple(line.split()[1:]) for line in lines if line.startswith("ekiden ")]
    silo = [words for words in commands if words[0] == "silo" and "north" in " ".join(words)]
    other = [words for words in commands if words[0] != "silo"]
    names = [
        Counter(w[:2] if w[0] == "federation" else w[:1] for w in other),
        Counter(w[:2] for w in silo),
    ]
    assert [len(each) for each in names] == [8, 3]
    assert [sorted(each.values())[-3:] for each in names] == [[1, 2, 2], [1, 1, 2]]


def test_every_tutorial_is_played() -> None:
    played = {"index", "first-run"}
    hospitals = {"clinical-study"}  # in tests/e2e
    assert {page.stem for page in FOLDER.glob("*.md")} == played | hospitals
