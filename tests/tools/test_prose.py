"""The word list finds bad habits in pages, comments, docstrings and messages, and nothing in
code."""

from pathlib import Path

import pytest

from tests.tools.prose import findings, in_file


@pytest.mark.parametrize(
    "text",
    [
        "Fix it, or mend it.",
        "It is no\n# error.",
        "A part of each batch, say, is distilled.\nUse another, say.",
        "What one sends besides.",
        "Everything but\n    for the head.",
        "With the data at hand.",
        "An error that the user can put right.",
        "The file is damaged or no safetensors file.",
    ],
)
def test_a_bad_habit_is_found(text: str) -> None:
    assert list(findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "There is no server.",
        "It is no longer there.",
        "Write `, say.` so.",
        "```\nbeside(x)\n```",
        "{file.beside(x)} is gone",
    ],
)
def test_good_prose_and_code_pass(text: str) -> None:
    assert not list(findings(text))


def test_of_python_only_comments_and_strings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'def f(anew, beside):  # computed anew\n    """Mend it."""\n    return f"{beside} is no '
        'file"\n'
    )
    assert [(line, words) for line, words, _ in in_file(file)] == [
        (3, "is no"),
        (2, "Mend"),
        (1, "anew"),
    ]


def test_pages_are_read_with_more_rules_than_code(tmp_path: Path) -> None:
    text = (
        "FedSeq has 81.3 in the mean; the latter is of the\nserver. [in small](page.md#in-small)\n"
    )
    page, code = tmp_path / "page.md", tmp_path / "code.py"
    page.write_text(text)
    code.write_text(f'"""{text}"""\n')
    found = {words for _, words, _ in in_file(page)}
    assert found == {"is of the", "in the mean", "the latter", "has 81.3", "in small"}
    assert not list(in_file(code))
