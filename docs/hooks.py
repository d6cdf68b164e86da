"""Pages of the site that are made from files elsewhere in the repository."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
SHIM = "assets/iframe-worker.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the methods' pages in the navigation, by name."""
    section = next(entry for entry in config.nav or [] if "Methods" in entry)
    section["Methods"] += sorted(f"methods/{page.name}" for page in (ROOT / "docs/methods").glob("*.md"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, the contributor's guide and the changelog."""
    pages = {
        "index.md": _moved("README.md"),
        "contributing.md": _moved("CONTRIBUTING.md"),
        "changelog.md": _moved("CHANGELOG.md"),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def _moved(name: str) -> str:
    """A file of the repository's root as a page: links into docs/ lose that prefix."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")
    return text.replace("](CHANGELOG.md)", "](changelog.md)")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script that search needs in a page opened as a file from the site itself, not from a network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", get_relative_url(SHIM, page.url))
