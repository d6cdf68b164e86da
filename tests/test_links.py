"""The links of the documentation lead somewhere, as far as that can be told without a network, and
files that it names exist.
"""

import re
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.tools import links
from tests.tools.links import ROOT


def test_links_between_pages_lead_somewhere() -> None:
    assert list(links.broken()) == []


def test_a_dead_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "# A `b` (c)\n\n```\n# no heading\n[x](no.md)\n```\n\n`[x](no.md)`\n"
    )
    text = "[a](docs/a.md#a-b-c) [b](docs/b.md) [c](docs/a.md#no-heading) [d](#here) [e](https://x.org)"
    (tmp_path / "README.md").write_text(text)
    monkeypatch.setattr(links, "ROOT", tmp_path)
    assert [line.split(": ")[1] for line in links.broken()] == [
        "docs/b.md",
        "docs/a.md#no-heading",
        "#here",
    ]


def test_addresses_are_well_formed_and_each_is_written_in_one_way() -> None:
    found = links.addresses()
    assert len(found) > 50
    alike = defaultdict(set)
    for address, where in found.items():
        parts = urlsplit(address)
        assert parts.scheme == "https", (address, where)
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), (address, where)
        assert not re.search(r"//|\s", parts.path), (address, where)
        host = parts.netloc.removeprefix("www.").removeprefix("dx.")
        alike[
            host, parts.path.rstrip("/").removesuffix(".pdf").lower(), parts.query, parts.fragment
        ].add(address)
    assert [sorted(same) for same in alike.values() if len(same) > 1] == []


def test_a_dead_link_of_the_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a id="here" href="b.html#there">b</a><img src="no.svg"><a href="https://x.org">'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#here">a</a><a href="a.html#gone">a</a>')
    assert [line.split(": ")[:2] for line in links.broken_in_site(tmp_path)] == [
        ["a.html", "b.html#there"],
        ["a.html", "no.svg"],
        ["b.html", "a.html#gone"],
    ]


def test_a_docstring_of_a_type_of_python_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<p>lr = 0.1</p><p>{float.__doc__}</p>")
    (tmp_path / "b.html").write_text("<p>lr = 0.1, a floating point number</p>")
    assert list(links.broken_in_site(tmp_path)) == [
        "a.html: it prints the docstring of a type of Python's own"
    ]


BY_HAND = (
    "docs/how-to-add.md",
    "docs/architecture.md",
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("src/ekiden/*/README.md"))),
)


@pytest.fixture(scope="module")
def python() -> dict[str, str]:
    """The text of each Python file, by its path."""
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


@pytest.mark.parametrize("page", BY_HAND)
def test_pages_for_contributors_name_files_and_names_that_exist(
    page: str, python: dict[str, str]
) -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    paths = {f"/{part}" for file in python for part in (file, *map(str, Path(file).parents))}
    paths |= {path.removesuffix(".py") for path in paths}
    everything = "\n".join(python.values())
    for name in re.findall(r"`([\w./]+)`", prose):
        found = any(path.endswith("/" + name.rstrip("/")) for path in paths)
        if not found and "/" not in name:
            found = name.rpartition(".")[2] in everything
        assert found or (ROOT / name).exists(), name
