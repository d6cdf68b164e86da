"""What `tests.pages` does with a page."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.pages import DOCS, README, agrees, blocks, play

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty page, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    ("shown", "said", "same"),
    [
        ("accuracy 0.91\n", "accuracy  0.9053", True),
        ("accuracy 0.91", "accuracy 0.5", False),
        ("91.2 ± 1.0,", "(90.8 ± 1.05)", True),
        ("4 silos", "5 silos", False),
        ("1,018,480 bytes", "1,018,481 bytes", False),
        ("took ... in all", "took 3 s or so in all", True),
        ("took ... in all", "took 3 s", False),
        ("... end", "a b end", True),
        ("begin ...", "begin", True),
        ("begin ...", "a begin", False),
        ("a ... c ... c", "a b c d c", True),
        ("a", "a b", False),
        ("a b", "a", False),
        ("", "a", False),
        ("┏━━┓ │ a │", "┏━━━━┓ │ a │ └──┘", True),
    ],
)
def test_what_agrees(shown: str, said: str, same: bool) -> None:
    assert agrees(shown, said) == same


def test_a_page_is_played_in_order(page: Path, command: Command) -> None:
    page.write_text(
        '# Page\n\n```python title="mine/own.py"\nVALUE = 3\n```\n\n'
        "```python\nimport sys\nsys.path.insert(0, 'mine')\nfrom own import "
        "VALUE\nprint(VALUE)\n```\n\n"
        "```text\n3\n```\n"
        "```sh\nekiden --version  # a comment\n# a line of comment\nls "
        "mine/*.py\n```\n```text\n... mine/own.py\n```\n"
        "```py\nnothing(of, this)\n```\n"
    )
    assert play(page, command)["VALUE"] == 3
    assert [block.line for block in blocks(page)] == [3, 7, 14, 17, 22, 25]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("```python\nprint(2)\n```\n\n```text\n3\n```\n", 5),
        ("```sh\nekiden show nowhere\n```\n", 1),
        ("```sh\nfalse\n```\n", 1),
        ("```text\n3\n```\n", 1),
    ],
)
def test_what_does_not_hold_is_named(page: Path, command: Command, text: str, line: int) -> None:
    page.write_text(text)
    with pytest.raises(AssertionError, match=f"page.md:{line}"):
        play(page, command)


def test_a_mistake_in_python_has_the_line_of_the_page(page: Path, command: Command) -> None:
    page.write_text("a\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        play(page, command)
    assert caught.traceback[-1].lineno + 1 == 5


def test_no_page_has_a_fence_that_is_left_open() -> None:
    for page in (README, *DOCS.rglob("*.md")):
        assert page.read_text(encoding="utf-8").count("```") % 2 == 0, page


def test_what_follows_a_table_is_not_taken_for_a_row() -> None:
    for page in (README, *DOCS.rglob("*.md")):
        lines = [*page.read_text(encoding="utf-8").splitlines(), ""]
        for row, after in pairwise(line.strip() for line in lines):
            assert not row.startswith("|") or after[:1] in ("", "|"), f"{page}: {after}"
