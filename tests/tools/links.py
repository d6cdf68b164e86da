"""The links of the documentation, and texts on the site that are not ours.

`python -m tests.tools.links` asks the network for each address that the pages and docstrings name
(`make links`). `python -m tests.tools.links SITE` looks at the built site (`make docs`): each link
leads to a file and a place in it. The tests look at the pages as they lie in the repository, where
they are read too (`broken`, `addresses`)."""

import inspect
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
_ADDRESS = re.compile(r"https?://[^\s\"'`<>\\\])}|]+")
_BUILT_IN = tuple(inspect.getdoc(kind) or "" for kind in (bool, int, float, str, tuple, dict))
_MADE_UP = re.compile(r"example|localhost|127\.0\.0\.1|\[|\{|https://link\b")


def pages() -> list[Path]:
    """The Markdown pages of the repository."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def broken() -> Iterator[str]:
    """Links between pages that lead to no file, or to no heading of it: one line each."""
    for page in pages():
        for target in _LINK.findall(_prose(page)):
            path, _, anchor = target.partition("#")
            if urlsplit(target).scheme:
                continue
            file = (page.parent / unquote(path)).resolve() if path else page
            if not file.exists():
                yield f"{page.relative_to(ROOT)}: {target}: there is no such file"
            elif anchor and file.suffix == ".md" and anchor not in headings(file):
                yield f"{page.relative_to(ROOT)}: {target}: there is no such heading"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings that mean the same on the site and where repositories are
    shown."""
    found = set()
    for title in _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").replace("*", "")
        shown = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        letters = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", letters).strip().lower())
        found |= {shown} & {site}
    return found


def addresses() -> Mapping[str, list[str]]:
    """All addresses elsewhere, and the files that name them."""
    found: dict[str, list[str]] = defaultdict(list)
    sources = (ROOT / "src").rglob("*.py"), (ROOT / "experiments").glob("*.toml")
    for file in (*pages(), *(file for group in sources for file in sorted(group))):
        text = _FENCE.sub("", file.read_text(encoding="utf-8"))
        for match in _ADDRESS.findall(text):
            address = match.rstrip(".,;:*") + (")" if match.count("(") > match.count(")") else "")
            if not _MADE_UP.search(address):
                found[address].append(str(file.relative_to(ROOT)))
    return found


def _prose(page: Path) -> str:
    return _CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


class _Page(HTMLParser):
    """What a page of the site refers to, its places, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def broken_in_site(site: Path) -> Iterator[str]:
    """Links of a built site that lead nowhere in it: one line each."""
    found = {
        file.resolve(): _Page(file.read_text(encoding="utf-8"))
        for file in sorted(site.rglob("*.html"))
    }
    for page, content in found.items():
        text = " ".join(content.text.split())
        if any(" ".join(told.split("\n\n")[-1].split())[:60] in text for told in _BUILT_IN):
            yield f"{page.relative_to(site.resolve())}: it prints the docstring of a type of Python's own"
        for link in dict.fromkeys(content.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not file.is_file():
                yield f"{page.relative_to(site.resolve())}: {link}: there is no such file"
            elif (
                parts.fragment
                and file in found
                and unquote(parts.fragment) not in found[file].places
            ):
                yield f"{page.relative_to(site.resolve())}: {link}: there is no such place"


def asked(address: str) -> str:
    """What is wrong with an address; empty if it answers. Refusals of programs count as answers."""
    try:
        request = Request(address, headers={"User-Agent": "Mozilla/5.0 (link check)"})
        with urlopen(request, timeout=30) as answer:
            answer.read(1)
    except HTTPError as error:
        return "" if error.code in (401, 403, 406, 418, 429, 503) else f"status {error.code}"
    except (URLError, OSError, ValueError) as error:
        return str(error)
    return ""


def main() -> None:
    """Look at the site that is named, or ask for all addresses; exit code 1 if something is
    wrong."""
    if sys.argv[1:]:
        wrong = list(broken_in_site(Path(sys.argv[1])))
    else:
        named = addresses()
        with ThreadPoolExecutor(8) as pool:
            said = pool.map(asked, named)
        wrong = [
            f"{where[0]}: {address}: {why}"
            for (address, where), why in zip(named.items(), said, strict=True)
            if why
        ]
        print(f"{len(named)} addresses, {len(wrong)} do not answer")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
