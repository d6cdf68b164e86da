"""The pages of the methods: one for each method, all in the form that docs/how-to-add.md gives."""

import re
from pathlib import Path

import pytest

from ekiden.cli.own import write
from ekiden.methods import METHODS

PAGES = sorted((Path(__file__).parents[3] / "docs" / "methods").glob("*.md"))
REQUIRED = ("When to use it", "Command", "Cost", "Results")
ORDER = (*REQUIRED[:3], "How it works", "Settings", "Privacy", "Results", "Paper and code")


def faults(page: str) -> list[str]:
    """What is wrong with the form of a method's page; nothing if all is well."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = [
        found
        for found in re.findall(r"^## (.+)$", prose, re.MULTILINE)
        if not found.startswith("Appendix")
    ]
    return [
        *(f"no section '{name}'" for name in REQUIRED if name not in headings),
        *(f"unknown section '{name}'" for name in headings if name not in ORDER),
        *(
            ["sections out of order"]
            if headings != [name for name in ORDER if name in headings]
            else []
        ),
        *(["no title"] if not prose.startswith("# ") else []),
        *(
            ["an appendix that is not last"]
            if re.search(r"^## Appendix(?:.|\n)*^## (?!Appendix)", prose, re.M)
            else []
        ),
        *(
            ["no command"]
            if "ekiden run " not in page.partition("\n## Command\n")[2].partition("\n## ")[0]
            else []
        ),
        *(
            f"nothing under '{name}'"
            for name in re.findall(r"^## (.+)\n+(?=## |\Z)", prose, re.M)
            if name != "Command"
        ),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_has_the_form_of_all_pages(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


def test_no_page_has_kept_a_sentence_of_the_template(tmp_path: Path) -> None:
    template = write(tmp_path, "HalfSeq")[0][2].read_text(encoding="utf-8")
    sentences = [line for line in template.splitlines() if line.endswith((".", "?"))]
    assert len(sentences) >= 5
    kept = [p.name for p in PAGES for line in sentences if line in p.read_text(encoding="utf-8")]
    assert kept == []


def test_every_method_has_a_page() -> None:
    assert {method.__module__.rsplit(".", 1)[1] for method in METHODS} <= {
        page.stem for page in PAGES
    }


def test_the_page_of_a_new_method_has_the_same_form(tmp_path: Path) -> None:
    page = write(tmp_path, "TwoLaps")[0][2]
    assert faults(page.read_text(encoding="utf-8")) == []


def test_faults_are_found() -> None:
    page = "X\n\n## Cost\n\nN bytes.\n\n## When to use it\n\n## Command\n\n## History\n\nOnce.\n"
    found = " ".join(faults(page))
    for fault in (
        "no section 'Results'",
        "unknown section 'History'",
        "out of order",
        "no title",
        "no command",
    ):
        assert fault in found
    assert "nothing under 'When to use it'" in found
