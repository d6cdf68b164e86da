"""Pages of the site that are made from files elsewhere in the repository."""

import base64
import csv
import inspect
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

import ekiden
from ekiden.cli.flags import flags
from ekiden.cli.listing import ends_with, moves
from ekiden.core.base import checks
from ekiden.core.base.checks import Range, hints_of
from ekiden.core.base.errors import counted
from ekiden.core.engine.method import Method
from ekiden.lab.tables import records
from ekiden.methods import METHODS, SORTS
from ekiden.runs import summary

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "vulnerabilities.md",
}
SHIM = "assets/iframe-worker.js"
NOTEBOOKS = ROOT / "docs" / "notebooks"
SEARCH: dict[str, dict[str, Any]] = {
    "results.md": {
        "exclude": True
    },  # 60,000 words of single experiments, which would bury all else
    **{page: {"boost": 3} for page in ("own-data.md", "using-the-result.md", "evaluation.md")},
    **{page: {"boost": 0.3} for page in ("real-data.md", "clusters.md")},
    **{
        page: {"boost": 1e-4}
        for page in ("json.md", "architecture.md", "promises.md", "changelog.md")
    },
}
"""Which pages the search leaves out, and which come first or last; a word in a title counts
1000."""
FOLDED = "Cost"
"""The section of a method's page from which on sections are closed until the reader opens them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the methods' pages in the navigation, by kind, under the names before a colon in their
    titles.
    """
    listed = next(entry for entry in config.nav or [] if "Methods" in entry)["Methods"]
    for sort, methods in SORTS.items():
        names = sorted(map(page_of, methods))
        titles = (
            (ROOT / "docs" / name).read_text(encoding="utf-8").partition("\n")[0] for name in names
        )
        kind = sort.partition(":")[0]
        pages = [
            {title.removeprefix("# ").partition(":")[0]: name}
            for title, name in zip(titles, names, strict=True)
        ]
        listed.append({kind[0].upper() + kind[1:]: pages})
    return config


def page_of(method: type[Method]) -> str:
    """Return the path of a method's page."""
    return f"methods/{method.__module__.rsplit('.', 1)[1]}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are in the repository's root."""
    for name, path in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, path, content=_linked(text, "")))
    files.append(File.generated(config, "assets/leaderboard.csv", content=_as_csv()))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = shown(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the pages made of these files; add all settings to a method's
    page.
    """
    dull = {"boost": 0.001} if page.file.src_uri.startswith("reference/") else {}
    page.meta["search"] = SEARCH.get(page.file.src_uri, dull)
    markdown = PROMISE.sub("", markdown)
    if page.file.src_uri == "promises.md":
        markdown = markdown.replace("PROMISES", promises())
    if page.file.src_uri == "leaderboard.md":
        told = f"{len({row[:2] for row in board()})} tasks, {len(board())} settings"
        markdown = markdown.replace("LEADERBOARD", leaderboard()).replace("COUNTED", told)
    own = [m for m in METHODS if page.file.src_uri == page_of(m)]
    for method in own:
        markdown = markdown.replace(
            f"\n## {FOLDED}\n", f"\n{facts(method)}\n## {FOLDED}\n", 1
        ) + settings(method)
    markdown = re.sub(
        r"^SIGNATURE ekiden\.(\w+)$",
        lambda m: signature(getattr(ekiden, m[1])),
        markdown,
        flags=re.M,
    )
    markdown = re.sub(
        r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown
    )  # to the pages made of notebooks
    return _linked(markdown, "../" * (page.file.src_uri.count("/") + 1))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Close the later sections of a method's page, link the pages that docstrings name, and keep
    flags on one line.
    """
    html = re.sub(r"<code>(--[^<]{1,30})</code>", r'<code class="flag">\1</code>', html)
    if page.file.src_uri.startswith("reference/"):
        return re.sub(r"docs/([\w-]+)\.md", r'<a href="../\1.html">docs/\1.md</a>', html)
    return folded(html) if page.file.src_uri.startswith("methods/") else html


TAG = r"(?:<[^<>]*>|\s)*"
"""What may stand between the parts of an annotation in HTML."""
RANGE = re.compile(
    TAG.join(
        [
            r"<span[^>]*>Annotated</span>",
            r"\[",
            r"(\w+)",
            ",",
            "Range",
            r"\(",
            rf"((?:[\w=.,-]|{TAG})*?)",
            r"\)",
            r"\]",
        ]
    )
)
NAMED = re.compile(
    r'<span (?:title="ekiden\.(?:core\.base\.checks|commands)\.|class="n">)(\w+)(?:">\w+)?</span>'
)


def spoken(html: str) -> str:
    """Return a page of the reference with words for ranges and their names, such as
    `CountOrZero`.
    """

    def bounded(found: re.Match[str]) -> str:
        bounds = re.findall(r"(\w+)=([\d.e-]+)", re.sub(r"<[^>]*>|\s", "", found[2]))
        limits = Range(
            **{name: float(value) if "." in value else int(value) for name, value in bounds}
        )
        return words(Annotated[{"int": int, "float": float}[found[1]], limits])

    def named(found: re.Match[str]) -> str:
        if found[1] == "Folder":
            return "str | PathLike"
        kind = getattr(checks, found[1], None)
        return words(kind) if get_origin(kind) is Annotated else found[0]

    def told(part: re.Match[str]) -> str:
        return NAMED.sub(named, RANGE.sub(bounded, part[0]))

    return re.sub(
        r'<div class="doc-signature.*?</div>|<code><span title=.*?</code>',
        told,
        html,
        flags=re.DOTALL,
    )


def folded(html: str) -> str:
    """Return a page whose sections are closed, from `FOLDED` on."""
    start = html.find(f'<h2 id="{FOLDED.lower()}"')
    if start < 0:
        return html
    sections = re.findall(r"(<h2 .*?</h2>)(.*?)(?=<h2 |\Z)", html[start:], re.DOTALL)
    return html[:start] + "".join(
        f'<details class="section"><summary>{heading}</summary>{text}</details>'
        for heading, text in sections
    )


def shown(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page in Markdown, and the pictures that its cells drew by their
    names.
    """
    lines, pictures = [], {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        lines.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                lines.append(f"![Drawn by the cell above]({name})")
            elif "text/html" in data:
                table = re.sub(
                    r"<style.*?</style>|\n\s*", "", "".join(data["text/html"]), flags=re.DOTALL
                )
                lines.append(re.sub(r' (?:border|style|class)="[^"]*"', "", table))
            elif said := "".join(output.get("text", "") or data.get("text/plain", "")):
                lines.append(f"```text\n{said.rstrip()}\n```")
    title, *rest = lines
    link = f'<a href="{notebook.name}" download>Download this notebook</a>'
    return "\n\n".join([title, link, *rest, ""]), pictures


def facts(method: type[Method]) -> str:
    """Return the table at the top of a method's page, in Markdown."""
    traits = method.traits
    ends = {
        "all models": "all clients' models, which answer together",
        "personal": "one model for each client",
    }
    end = ends_with(method)
    rows = {
        "in Python": f"`ekiden.{method.__name__}`",
        "moves": f"{moves(method)} model sizes with default settings and ten clients",
        "ends with": ends.get(end, end),
        "a silo that does not answer": (
            "`--absent skip` goes on without it"
            if traits.skips
            else "the run stops until it is back"
        ),
    }
    return "\n".join(
        [
            f"| command line | `ekiden run {method.title()}` |",
            "| --- | --- |",
            *(f"| {name} | {told} |" for name, told in rows.items()),
            "",
        ]
    )


def _linked(text: str, up: str) -> str:
    """The text with links to files of the root, which is `up` from its own folder, as links to
    their pages.
    """
    for name, path in ROOT_PAGES.items():
        text = text.replace(f"]({up}{name}", f"]({up.removesuffix('../')}{path}")
    return text


PROMISE = re.compile(r"[ \t]*\n?[ \t]*<!--\s+tests:\s+([\w, \n]+?)\s*-->")


def promises() -> str:
    """Return the promises of all pages with the names of their tests, in Markdown.

    Raises:
        ValueError: a test is gone.
    """
    known = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    lines = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        found = [] if page.name == "promises.md" else list(PROMISE.finditer(text))
        lines += [f"\n## {text.splitlines()[0].removeprefix('# ')}\n"] if found else []
        for match in found:
            names = [name.strip() for name in match[1].split(",")]
            if gone := [name for name in names if name not in known]:
                raise ValueError(f"{page}: there is no test {', '.join(gone)}")
            lines.append(
                f"- {_sentence(PROMISE.sub('', text[: match.start()]))}: "
                f"{', '.join(f'`{name}`' for name in names)}"
            )
    return "\n".join(lines)


def _sentence(before: str) -> str:
    """Return the last sentence of a text, or the last row of a table, without its marks."""
    part = re.split(r"\n\s*\n|\n *- |\n\||(?<=\.) |(?<=\.)\n", before.rstrip())[-1]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(part.split()))
    return plain.strip("|-* .").replace("|", ";").replace("**", "")


BOARD = (
    "data",
    "skew",
    "method",
    "settings",
    "network",
    "bytes",
    "metric",
    "mean",
    "std",
    "seeds",
    "record",
)


@cache
def board() -> tuple[tuple[Any, ...], ...]:
    """Return a row for each setting of the runs in the repository's records; see `BOARD`."""
    groups = defaultdict(dict)
    for file in sorted((ROOT / "experiments/records").glob("*.jsonl")):
        for run in records.read(file).runs.values():
            config, plan, metric = run.config, run.config["plan"], summary.headline(run)
            recipe = config["recipe"]
            value = summary.value_of(run, metric.name)
            if plan.get("tune") or value is None:
                continue
            key = (
                config["dataset"],
                f"{plan['partition']}, {len(config['clients'])} clients".removeprefix("auto, "),
                recipe["method"],
                summary.label(config),
                config.get("network") or recipe["model"],
                metric,
                file.name,
            )
            groups[key][recipe["seed"]] = metric.scale * value, run.last["bytes"]
    rows = []
    for (*task, method, told, model, metric, name), runs in groups.items():
        values, moved = zip(*runs.values(), strict=True)
        std = stdev(values) if len(values) > 1 else None
        rows.append(
            (*task, method, told, model, mean(moved), metric, mean(values), std, len(values), name)
        )
    data, tasks = Counter(row[0] for row in rows), Counter(row[:2] for row in rows)

    def place(row: tuple[Any, ...]) -> tuple[Any, ...]:
        worth = row[7] if row[6].higher else -row[7]
        return -data[row[0]], row[0], -tasks[row[:2]], row[1], row[6].name, -worth

    return tuple(sorted(rows, key=place))


def _as_csv() -> str:
    out = io.StringIO()
    csv.writer(out).writerows(
        [BOARD, *((*row[:6], f"{row[6].name}{row[6].unit}", *row[7:]) for row in board())]
    )
    return out.getvalue()


def leaderboard() -> str:
    """Return the leaderboard as HTML; assets/leaderboard.js filters and sorts it."""
    pages = {method.title(): page_of(method).replace(".md", ".html") for method in METHODS}
    lines, skews = [], {}
    for data, skew, method, told, model, moved, metric, value, std, seeds, name in board():
        task = f"{skew}: {metric.name}{metric.unit}"
        skews.setdefault((data, task))
        spread = f"{value:.1f}" if std is None else f"{value:.1f} ± {std:.1f}"
        title = f'<a href="{pages[method]}">{method}</a>' if method in pages else escape(method)
        how = f"{escape(told)}; network {escape(model)}; {counted(seeds, 'seed')}; {name.removesuffix('.jsonl')}"
        about = f'data-data="{data}" data-skew="{escape(task)}" data-method="{method}" data-value="{value}"'
        lines.append(
            f'<tr {about} data-higher="{metric.higher:d}"><td '
            f'data-key="{method}">{title}<details><summary>settings'
            f'</summary>{how}</details></td><td data-key="{value}">{spread}</td>'
            f'<td data-key="{moved}">{summary.size(moved)}</td></tr>'
        )
    choice = "".join(
        f"<option>{data}</option>" for data in dict.fromkeys(data for data, _ in skews)
    )
    options = "".join(f'<option data-data="{data}">{escape(task)}</option>' for data, task in skews)
    head = "".join(f"<th>{name}</th>" for name in ("method", "value", "bytes"))
    return (
        '<div id="leaderboard" data-search-exclude><p><label>Data <select '
        f'id="data">{choice}</select></label> '
        f'<label>Skew <select id="skew">{options}</select></label> '
        '<label><input type="checkbox" id="all"> all settings, not only the best of each '
        "method</label></p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        '<script src="assets/leaderboard.js" defer></script>'
    )


def signature(function: Callable[..., Any]) -> str:
    """Return how a function is called, one argument a line, without types."""
    lines, named = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD:  # there are no others: they only give a better message
            continue
        lines += ["    *,"] if one.kind is one.KEYWORD_ONLY and not named else []
        named = one.kind is one.KEYWORD_ONLY
        called = inspect.signature(one.default).parameters if callable(one.default) else ()
        default = (
            f"lambda {', '.join(called)}".strip() + ": None"
            if callable(one.default)
            else repr(one.default)
        )
        lines.append(
            f"    {one.name}," if one.default is one.empty else f"    {one.name}={default},"
        )
    return "\n".join([f"ekiden.{function.__name__}(", *lines, ")"])


def settings(method: type[Method]) -> str:
    """Return a section with all hyperparameters of a method as a table, in Markdown."""
    hints, told = hints_of(method), {flag.field: flag for flag in flags(method())}
    rows = [
        f"| `{f.name}` | {told[f.name].told.rpartition(' (default: ')[0] or told[f.name].told} "
        f"| `{getattr(method(), f.name)!r}` | {words(hints[f.name])} |"
        for f in fields(method)
    ]
    made = f"In Python `ekiden.{method.__name__}`; on the command line `ekiden run {method.title()}`, each name a flag."
    head = "| name | meaning | default | values |\n| --- | --- | --- | --- |"
    return (
        "\n".join(["", "", "## All hyperparameters", "", made, "", head, *rows, ""]) if rows else ""
    )


def words(hint: Any) -> str:
    """Return an annotation in words: which values a hyperparameter may have."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = " and ".join(str(mark) for mark in args[1:] if isinstance(mark, Range))
        return ", ".join(filter(None, (words(args[0]), limits)))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return f"several: {words(args[0])}"
    if type(None) in args:
        return f"none, or {words(args[0])}"
    return {int: "whole number", float: "number", bool: "on or off", str: "text"}.get(hint, "text")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script that search needs in a page opened as a file from the site itself, not from a
    network.
    """
    return spoken(output).replace(
        "https://unpkg.com/iframe-worker/shim", get_relative_url(SHIM, page.url)
    )
