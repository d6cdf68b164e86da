"""Pages of the site that are made from files elsewhere in the repository."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
SHIM = "assets/iframe-worker.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the methods' pages in the navigation, by name."""
    section = next(entry for entry in config.nav or [] if "Methods" in entry)
    section["Methods"] += sorted(f"methods/{page.name}" for page in (ROOT / "docs/methods").glob("*.md"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are in the repository's root."""
    for name, path in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, path, content=_linked(text, "")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the pages made of these files."""
    return _linked(markdown, "../" * (page.file.src_uri.count("/") + 1))


def _linked(text: str, up: str) -> str:
    """The text with links to files of the root, which is `up` from its own folder, as links to their pages."""
    for name, path in ROOT_PAGES.items():
        text = text.replace(f"]({up}{name}", f"]({up.removesuffix('../')}{path}")
    return text


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script that search needs in a page opened as a file from the site itself, not from a network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", get_relative_url(SHIM, page.url))
