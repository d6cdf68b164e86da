"""The tutorials, executed from top to bottom and compared with the outputs that they show; Flower's is in tests/e2e."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages import DOCS, play

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
@pytest.mark.parametrize("name", ["first-run", "serve", "your-data", "own-method"])
def test_a_tutorial_is_as_it_says(name: str, command: Command) -> None:
    if name == "serve":
        pytest.importorskip("onnxruntime")
    try:
        play(FOLDER / f"{name}.md", command)
    finally:
        sys.modules.pop("serve", None)


@pytest.mark.slow
def test_a_published_table_is_reproduced(
    data_home: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (data_home / "office_caltech10").is_dir():
        pytest.skip("EKIDEN_DATA holds no office_caltech10")
    monkeypatch.chdir(tmp_path)
    Path("experiments").symlink_to(DOCS.parent / "experiments")
    play(FOLDER / "reproduce.md", command)


def test_every_tutorial_is_played() -> None:
    played = {"index", "first-run", "your-data", "own-method", "serve", "reproduce"}
    hospitals = {"three-hospitals", "clinical-study"}  # in tests/e2e
    assert {page.stem for page in FOLDER.glob("*.md")} == played | hospitals
