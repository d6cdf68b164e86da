"""Pages of the site that are made from files elsewhere in the repository."""

import base64
import csv
import inspect
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from html import escape
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from torch import nn

import ekiden
from ekiden import data as datasets
from ekiden.cli.app import COMMANDS
from ekiden.cli.flags import flags
from ekiden.cli.run_options import RunOptions
from ekiden.commands import available
from ekiden.core.base import checks
from ekiden.core.base.checks import Range, hints_of
from ekiden.core.base.outside import summary_of
from ekiden.core.data.augment import Augment
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import of_method
from ekiden.core.models.catalogue import DEFAULTS, NETWORKS, Known, build
from ekiden.core.tasks import KINDS, Classification, Need
from ekiden.core.training.network import Network
from ekiden.lab.conformance import CHECKS, line
from ekiden.lab.tables import ledger, records, verdicts
from ekiden.lab.tables.sweep import Sweep, opened
from ekiden.methods import METHODS, SORTS, method_named
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
RECORDS = ROOT / "experiments" / "records"
TABLES = re.compile(r"^TABLES? (.+)$", re.MULTILINE)
"""A line of a page that is replaced by the results of these files of records."""
LINK = re.compile(r"https?://[^\s,;)]*[^\s,;).]")
CURVES = re.compile(r"^CURVES ([\w-]+)$", re.MULTILINE)
"""A line of a page that is replaced by this picture of learning curves."""
SEEDS = 3
"""With fewer a value is grey and stands below the others."""
FIRST = (
    "tutorials/index.md",
    "own-data.md",
    "using-the-result.md",
    "evaluation.md",
    "own.md",
    "which-method.md",
)
LAST = ("architecture.md", "changelog.md")
NUMBERS: frozenset[Need] = frozenset({"numbers", "continuous"})
CLIENTS, SHAPE, CLASSES = 10, (1, 8, 8), 10
"""The digits over ten clients, which `ekiden run` uses by default."""
PAPER = "Paper and code"
"""The section of a method's page that begins with the method's docstring."""
FOLDED = "Cost"
"""The section of a method's page from which on sections are closed until the reader opens them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the methods' pages in the navigation, by kind, under the names before a colon in their
    titles.
    """
    research = next(entry for entry in config.nav or [] if "Research" in entry)["Research"]
    listed = next(entry for entry in research if "Methods" in entry)["Methods"]
    for sort, places in SORTS.items():
        names = sorted(page_of(method_named(place.partition(":")[2])) for place in places)
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
    files.append(File.generated(config, "assets/leaderboard.csv", content=_as_csv(board())))
    files.append(File.generated(config, "assets/results.csv", content=_as_csv(cells())))
    files.append(File.generated(config, "assets/stop-words.js", content=stop_words(config)))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = shown(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def stop_words(config: MkDocsConfig) -> str:
    """Return the words that the theme's search leaves out of its index, as a script for
    `assets/search.js`.
    """
    found = [file for folder in config.theme.dirs for file in Path(folder).rglob("search.*.min.js")]
    listed = re.search(r"generateStopWordFilter\((\[[^]]*\])", found[0].read_text(encoding="utf-8"))
    assert listed, "the theme's search has another form"
    return f"const stopWords = new Set({listed[1]});\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the pages made of these files; add all settings to a method's
    page.
    """
    name = page.file.src_uri
    if name in FIRST:  # a word in a title counts 1000 times as much as one in the text
        page.meta["search"] = {"boost": 3}
    elif name in LAST or name.startswith(("reference/", "decisions/")):
        page.meta["search"] = {"boost": 0.001}
    markdown = PROMISE.sub("", markdown)
    if name == "leaderboard.md":
        told = f"{len({row.task for row in board()})} tasks, {len(board())} settings"
        markdown = markdown.replace("LEADERBOARD", leaderboard()).replace("COUNTED", told)
    marks = (
        ("CATALOGUE", catalogue),
        ("METRICS", metrics),
        ("TASKS", tasks),
        ("CONTRACT", contract),
        ("JSON", printed),
    )
    for mark, made in marks:
        if f"\n{mark}\n" in markdown:
            markdown = markdown.replace(f"\n{mark}\n", f"\n{made()}\n")
    markdown = TABLES.sub(lambda m: tables(*m[1].split()), markdown)
    markdown = CURVES.sub(lambda m: curves(m[1]), markdown)
    own = [m for m in METHODS if name == page_of(m)]
    for method in own:
        markdown = markdown.replace(f"\n## {FOLDED}\n", f"\n{facts(method)}\n## {FOLDED}\n", 1)
        markdown = opened_page(with_docstring(markdown, method), method) + settings(method)
    markdown = re.sub(
        r"^SIGNATURE ekiden\.(\w+)$",
        lambda m: signature(getattr(ekiden, m[1])),
        markdown,
        flags=re.M,
    )
    markdown = re.sub(
        r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown
    )  # to the pages made of notebooks
    return _linked(markdown, "../" * (name.count("/") + 1))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Close the later sections of a method's page, link the pages that docstrings name, and keep
    flags on one line.
    """
    html = re.sub(r"<code>(--[^<]{1,30})</code>", r'<code class="flag">\1</code>', html)
    if page.file.src_uri.startswith("reference/"):
        return re.sub(r"docs/([\w/-]+)\.md", r'<a href="../\1.html">docs/\1.md</a>', html)
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


def docstring(method: type[Method]) -> list[str]:
    """Return the paragraphs of a method's docstring, with links, one line each."""
    text = re.sub(r"docs/methods/\w+\.md", "this page", inspect.getdoc(method) or "")
    return [LINK.sub(r"<\g<0>>", " ".join(part.split())) for part in text.split("\n\n")]


def with_docstring(markdown: str, method: type[Method]) -> str:
    """Return a method's page whose section on paper and code begins with what the docstring says
    and the page's opening does not.
    """
    above = opening(markdown, method)
    told = "\n\n".join(part for part in docstring(method) if part not in above)
    head = f"\n## {PAPER}\n"
    before, _, after = markdown.partition(head)
    return f"{before}{head}\n{told}\n{after}"


def opening(markdown: str, method: type[Method]) -> list[str]:
    """Return what a method's page begins with: the docstring's first sentence, then the page's own
    text or, if it has none, what the docstring says between source and departures.
    """
    own = markdown.partition("\n## ")[0].partition("\n")[2].strip()
    what, _, *how = docstring(method)
    plain = takewhile(lambda part: not part.startswith("Departures"), how)
    return [what, own] if own else [what, *plain]


def opened_page(markdown: str, method: type[Method]) -> str:
    """Return a method's page with its opening."""
    title, _, _ = markdown.partition("\n")
    _, _, sections = markdown.partition("\n## ")
    return "\n\n".join([title, *opening(markdown, method), f"## {sections}"])


def curves(name: str) -> str:
    """Return a picture of learning curves and its caption, in Markdown."""
    return (
        f"![Learning curves on digits](../assets/curves-{name}.svg)\n\n"
        "*Digits, ten silos, Dirichlet 0.5, three seeds; nothing is tuned "
        "(`benchmarks/pictures.sh`, `make picture`).*"
    )


def facts(method: type[Method]) -> str:
    """Return the table at the top of a method's page, in Markdown."""
    traits = method.traits
    ends = {
        "all models": "all clients' models, which answer together",
        "personal": "one model for each client",
    }
    end = ends_with(method)
    source, *_ = re.split(r"(?<=>)", docstring(method)[1], maxsplit=1)
    rows = {
        "paper": source,
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


class Row(NamedTuple):
    """A setting of the leaderboard: means over its seeds."""

    data: str
    skew: str
    method: str
    settings: str
    network: str
    pretrained: bool
    bytes: float
    passes: float  # samples forward, plus twice the samples backward, in millions
    metric: str
    mean: float
    std: float | None  # none for one seed
    seeds: int
    record: str
    higher: bool  # whether higher values are better

    @property
    def task(self) -> tuple[str, str, str]:
        """What is compared with each other."""
        return self.data, self.skew, self.metric


@cache
def board() -> tuple[Row, ...]:
    """Return a row for each setting of the runs in the repository's records, the best of each task
    first.

    Runs that pool the data stand in every task with their partition.
    """
    groups: dict[tuple[Any, ...], dict[int, Any]] = defaultdict(dict)
    parted: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in sorted(RECORDS.glob("*.jsonl")):
        for run in records.read(file).runs.values():
            config, plan = run.config, run.config["plan"]
            recipe, metric = config["recipe"], summary.headline(run)
            if plan.get("tune") or summary.value_of(run, metric.name) is None:
                continue
            network = config.get("network") or recipe["model"]
            # accuracy on a client's own classes is not comparable with accuracy on all
            where = "" if recipe["evaluate_on"] == "all" else " on each client's own data"
            setting = recipe["method"], summary.label(config), network, metric, where, file.stem
            part = config["dataset"], plan["partition"]
            clients = 0 if recipe["method"] == "centralized" else len(config["clients"])
            if clients:
                parted[part].add(clients)
            groups[*part, clients, *setting][recipe["seed"]] = run
    trained = {*available()["pretrained"]}
    rows = []
    for key, runs in groups.items():
        data, partition, clients, method, told, network, metric, where, name = key
        values = [metric.scale * summary.value_of(run, metric.name) for run in runs.values()]
        last = [run.last for run in runs.values()]
        for number in [clients] if clients else parted[data, partition]:
            rows.append(
                Row(
                    data=data,
                    skew=f"{partition}, {number} clients".removeprefix("auto, "),
                    method=method,
                    settings=told,
                    network=network,
                    pretrained=network in trained or network.startswith("hf:"),
                    bytes=mean(row["bytes"] for row in last),
                    passes=mean(row["forward"] + 2 * row["backward"] for row in last) / 1e6,
                    metric=f"{metric.name}{metric.unit}{where}",
                    mean=mean(values),
                    std=stdev(values) if len(values) > 1 else None,
                    seeds=len(values),
                    record=name,
                    higher=metric.higher,
                )
            )
    sizes = Counter(row.data for row in rows), Counter(row.task for row in rows)

    def place(row: Row) -> tuple[Any, ...]:
        worth = row.mean if row.higher else -row.mean
        few = row.seeds < SEEDS
        return -sizes[0][row.data], row.data, -sizes[1][row.task], row.task, few, -worth

    return tuple(sorted(rows, key=place))


def cells() -> tuple[tuple[Any, ...], ...]:
    """Return every cell of the records' tables that was run, under a head."""
    found = [
        {"table": sweep.experiment.title, "command": sweep.command, **row}
        for sweep in map(swept, sorted(file.stem for file in RECORDS.glob("*.jsonl")))
        for row in verdicts.as_rows(sweep)
        if row["values"]
    ]
    for row in found:
        for many in ("seeds", "values", "left_out"):
            row[many] = " ".join(map(str, row[many]))
    return (*found[0],), *((*row.values(),) for row in found)


def _as_csv(rows: Sequence[tuple[Any, ...]]) -> str:
    out = io.StringIO()
    head = [rows[0]._fields] if isinstance(rows[0], Row) else []
    csv.writer(out).writerows([*head, *rows])
    return out.getvalue()


def leaderboard() -> str:
    """Return the leaderboard as HTML; assets/leaderboard.js filters and sorts it."""
    pages = {method.title(): page_of(method).replace(".md", ".html") for method in METHODS}
    tried = Counter((row.task, row.method, row.pretrained) for row in board())
    lines, skews = [], {}
    for row in board():
        task = f"{row.skew}: {row.metric}"
        skews.setdefault((row.data, task))
        spread = f"{row.mean:.1f}" if row.std is None else f"{row.mean:.1f} ± {row.std:.1f}"
        name = escape(row.method)
        title = f'<a href="{pages[row.method]}">{name}</a>' if row.method in pages else name
        about = {
            "data": row.data,
            "skew": escape(task),
            "method": name,
            "value": row.mean,
            "higher": f"{row.higher:d}",
            "pretrained": f"{row.pretrained:d}",
            "few": f"{row.seeds < SEEDS:d}",
        }
        data = " ".join(f'data-{key}="{value}"' for key, value in about.items())
        columns = (
            (name, f"{title}<details><summary>settings</summary>{escape(row.settings)}; "
             f"{row.record}</details>"),
            (row.mean, spread),
            (row.seeds, row.seeds),
            (row.bytes, summary.size(row.bytes)),
            (row.passes, f"{row.passes:,.3g}"),
            (escape(row.network), escape(row.network) + (" (pretrained)" if row.pretrained else "")),
            (tried[row.task, row.method, row.pretrained],) * 2,
        )  # fmt: skip
        made = "".join(f'<td data-key="{key}">{shown}</td>' for key, shown in columns)
        lines.append(f"<tr {data}>{made}</tr>")
    choice = "".join(
        f"<option>{data}</option>" for data in dict.fromkeys(data for data, _ in skews)
    )
    options = "".join(f'<option data-data="{data}">{escape(task)}</option>' for data, task in skews)
    titles = ("method", "value", "seeds", "bytes", "passes", "network", "of settings")
    head = "".join(f"<th>{name}</th>" for name in titles)
    return (
        '<div id="leaderboard" data-search-exclude><p><label>Data <select '
        f'id="data">{choice}</select></label> '
        f'<label>Skew <select id="skew">{options}</select></label> '
        '<label><input type="checkbox" id="pretrained"> pretrained networks</label> '
        '<label><input type="checkbox" id="all"> all settings</label></p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        '<script src="assets/leaderboard.js" defer></script>'
    )


@cache
def swept(name: str) -> Sweep:
    """Return the sweep of a file of records."""
    return opened(RECORDS / f"{name}.jsonl")


def tables(*names: str) -> str:
    """Return the results of these files of records as closed sections."""
    made = []
    for name in names:
        title, _, text = ledger.page([swept(name)]).removeprefix("## ").partition("\n")
        command = re.sub(r"^    (ekiden sweep .*)$", r"`\1`", text, count=1, flags=re.MULTILINE)
        inner = f"<summary>{escape(title)}</summary>\n{command}"
        made.append(f'<details class="table" markdown="1">\n{inner}\n</details>\n')
    return "\n".join(made)


def catalogue() -> str:
    """Return all methods, networks and data sets as tables in Markdown."""
    pages = {m: f"[{m.title()}](methods/{m.__module__.rsplit('.', 1)[1]}.md)" for m in METHODS}
    methods = ([link, summary_of(m), moves(m), ends_with(m)] for m, link in pages.items())
    networks = ([f"`{name}`", *_described(known)] for name, known in NETWORKS.items())
    sets = ([f"`{name}`", *_source(name)] for name in sorted(datasets.NAMED))
    parts = (
        "### Methods\n",
        _table(["name", "what it is", "moves", "ends with"], methods),
        "### Networks\n",
        _table(["name", "samples", "what it is"], networks),
        "### Data sets\n",
        _table(["name", "Hugging Face hub", "test part", "prepared", "network"], sets),
    )
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def moves(method: type[Method]) -> str:
    """Return the bytes of a run with defaults, in sizes of the network that the user chose."""

    def chosen() -> nn.Module:
        return build("mlp", SHAPE, CLASSES)

    made = of_method(chosen, method(), SHAPE, CLASSES, seed=0, task=Classification())
    bytes_moved = method().cost(CLIENTS, Size.of(Network(made()), SHAPE))
    models_moved = bytes_moved / Size.of(Network(chosen()), SHAPE)
    return f"{models_moved:,.0f}" if models_moved >= 100 else f"{models_moved:.2g}"


def ends_with(method: type[Method]) -> str:
    """Return what a run ends with: "one model", "all models" or "personal"."""
    if method.traits.joins_models:
        return "all models"
    return "one model" if method().one_model else "personal"


def _described(network: Known) -> tuple[str, str]:
    """Return which samples a network takes, and what it is."""
    task = ", segmentation" if network.pixels else ""
    return network.samples + task, summary_of(network.build)


def _steps(augment: Augment) -> Iterator[str]:
    """Say what is switched on."""
    if augment.crop:
        yield f"random crop, {augment.crop} pixels of padding"
    if augment.flip:
        yield "flip"
    if augment.rotation:
        yield f"rotation up to {augment.rotation:g}°"


def _source(name: str) -> list[str]:
    """Return where a named data set is, its test part, what is done to its images, and its
    network.
    """
    named = datasets.NAMED[name]
    hub = (
        f"[{named.hub}](https://huggingface.co/datasets/{named.hub})"
        if named.hub
        else "not there: give local files"
    )
    if name == "digits":  # it has one part and is in scikit-learn
        hub, named = "not needed: scikit-learn has them", replace(named, test=None)
    done = [f"{named.size}x{named.size} pixels" if named.size else "", *_steps(named.augment)]
    return [
        hub,
        "given" if named.test else "20 % held out",
        ", ".join(filter(None, done)) or "-",
        f"`{DEFAULTS[name]}`",
    ]


def metrics() -> str:
    """What each task measures."""
    lines = ["| task | headline | also measured |", "|---|---|---|"]
    for kind in KINDS.values():
        first, *others = (
            f"`{metric.name}`{'' if metric.higher else ' ↓'}" for metric in kind.metrics
        )
        lines.append(f"| {kind.kind} | {first} | {', '.join(others)} |")
    return "\n".join(lines)


def tasks() -> str:
    """Which methods, with their defaults, do which tasks."""
    lines = [
        "| method | " + " | ".join(KINDS) + " | tokens as inputs |",
        "|---|" + ":-:|" * (len(KINDS) + 1),
    ]
    for kind in METHODS:
        needs = kind().needs
        does = [needs <= task.offers | NUMBERS for task in KINDS.values()] + [
            "numbers" not in needs
        ]
        lines.append(
            f"| {kind.title()} | " + " | ".join("yes" if one else "–" for one in does) + " |"
        )
    return "\n".join(lines)


def contract() -> str:
    """Return the lines that every method keeps, as a list."""
    return "\n".join(f"- {line(check)}" for check in CHECKS)


def printed() -> str:
    """Return a table of what each command prints with `--json`, in Markdown."""
    rows = [
        f"| `ekiden {name}` | {_meaning(flag.told).removeprefix('print JSON').lstrip(':, ')} |"
        for name in COMMANDS
        for flag in flags(options_of(name))
        if flag.field == "json"
    ]
    return "\n".join(["| command | what it prints |", "| --- | --- |", *rows])


def options_of(name: str) -> type:
    """Return the dataclass whose fields are the flags of a command."""
    if name == "run":
        return RunOptions
    module, _, function = COMMANDS[name].partition(":")
    kind: type = get_type_hints(getattr(import_module(f"ekiden.{module}"), function))["options"]
    return kind


def signature(function: Callable[..., Any]) -> str:
    """Return how a function is called, one argument a line, without types."""
    lines, named = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD or one.name.startswith("_"):
            continue  # there are no others: they only give a better message
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
        f"| `{f.name}` | {_meaning(told[f.name].told)} "
        f"| `{getattr(method(), f.name)!r}` | {words(hints[f.name])} |"
        for f in fields(method)
    ]
    made = f"In Python `ekiden.{method.__name__}`; on the command line `ekiden run {method.title()}`, each name a flag."
    head = "| name | meaning | default | values |\n| --- | --- | --- | --- |"
    return (
        "\n".join(["", "", "## All hyperparameters", "", made, "", head, *rows, ""]) if rows else ""
    )


def _meaning(told: str) -> str:
    """Return a flag's help without its default, for a cell of a table."""
    return (told.rpartition(" (default: ")[0] or told).replace("|", "\\|")


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
