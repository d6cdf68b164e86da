"""All places that name the version agree, so that a release needs only a tag."""

import re
from pathlib import Path

from ekiden import __version__

ROOT = Path(__file__).parents[1]


def test_the_citation_names_this_version() -> None:
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [__version__]


def test_the_changelog_has_what_is_not_released_above_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[:2] == ["Unreleased", __version__]
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
