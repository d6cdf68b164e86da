"""Each claim of the pages on silos names tests that exist."""

import re
from pathlib import Path

from ekiden.transports.flower.silo.silo_file import Limits

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8") + SECURITY


def test_every_test_that_the_page_names_exists() -> None:
    named = {name for told in re.findall(r"<!-- tests: ([^>]+) -->", PAGE) for name in re.findall(r"test_\w+", told)}
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert named - set(re.findall(r"def (test_\w+)\(", code)) == set()


def test_the_page_names_every_limit_with_its_default() -> None:
    section = SECURITY[SECURITY.index("### Limits of a silo") :]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for name, value in vars(Limits()).items():
        assert f"`{name}`" in section, name
        said = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        if isinstance(value, tuple) or value is None or not said:
            continue
        shown = f"{value // 10**9} GB" if value >= 10**9 else f"{value:,}"

        assert (f"`{str(value).lower()}`" if isinstance(value, bool) else shown) in said[0], name
    assert len(rows) >= 10
