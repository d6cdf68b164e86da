"""What the site makes from the code and the records."""

import importlib.util
import json
import re
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden import run
from ekiden.core.base.checks import Count, Fraction
from ekiden.lab.tables import records, verdicts
from ekiden.methods import METHODS, FedELMY, FedTasuki, Local
from ekiden.runs.summary import spread

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks() -> Any:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_a_row_of_the_leaderboard_has_the_values_of_the_records(hooks: Any) -> None:
    runs = records.read(ROOT / "experiments/records/krylov-small.jsonl").runs.values()
    pacs = [
        run
        for run in runs
        if run.config["dataset"] == "pacs" and run.config["recipe"]["method"] == "fedkrylov"
    ]
    orders = {run.config["plan"]["partition"] for run in pacs}
    for order in orders:
        values = [
            100 * run.last["accuracy"] for run in pacs if run.config["plan"]["partition"] == order
        ]
        (row,) = [
            row for row in hooks.board()
            if row[:3] == ("pacs", f"{order}, 4 clients", "fedkrylov") and row.record == "krylov-small"
        ]  # fmt: skip
        assert (row.mean, row.std) == (pytest.approx(mean(values)), pytest.approx(stdev(values)))
        assert (row.seeds, row.pretrained, row.network) == (5, False, "lenet")
        assert f"{mean(values):.1f} ± {stdev(values):.1f}" in hooks.leaderboard()


@pytest.mark.slow
def test_the_leaderboard_is_fair(hooks: Any) -> None:
    board = hooks.board()
    for task in {row.task for row in board}:
        few = [row.seeds < hooks.SEEDS for row in board if row.task == task]
        assert few == sorted(few), "values of one or two seeds stand below the others"
    task = ("office_caltech10", "domains:amazon,caltech10,dslr,webcam, 4 clients", "accuracy %")
    assert {"centralized", "local", "fedavg"} <= {
        row.method for row in board if row.task == task and not row.pretrained
    }
    assert all(row.pretrained for row in board if row.network.startswith(("efficientnet", "hf:")))
    page = hooks.leaderboard()
    assert 'data-pretrained="1" data-few="1"' in page
    for title in ("seeds", "bytes", "passes", "network", "of settings"):
        assert f"<th>{title}</th>" in page


def test_accuracy_on_own_data_stands_apart(hooks: Any) -> None:
    own = {
        row.metric
        for row in hooks.board()
        if row.record == "small-networks" and row.method == "local"
    }
    assert own == {"accuracy % on each client's own data"}


def test_every_record_is_shown_on_a_page(hooks: Any) -> None:
    """Each table of the site is made from a record, and no record is left out."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    shown = [name for page in pages for line in hooks.TABLES.findall(page) for name in line.split()]
    assert sorted(shown) == sorted(file.stem for file in hooks.RECORDS.glob("*.jsonl"))


def test_every_cell_of_the_records_is_in_a_row_of_the_download(hooks: Any) -> None:
    head, *rows = hooks.cells()
    commands = {row[head.index("command")] for row in rows}
    assert commands == {hooks.swept(file.stem).command for file in hooks.RECORDS.glob("*.jsonl")}


def test_a_table_of_a_page_has_the_values_of_its_record(hooks: Any) -> None:
    page = hooks.tables("ua-pdfl-threshold", "fedcof-small")
    assert page.count("<details") == page.count("</details>") == 2
    for name in ("ua-pdfl-threshold", "fedcof-small"):
        for cell in verdicts.collect(hooks.swept(name)):
            assert not cell.runs or spread(cell.values) in page
    assert "`ekiden sweep experiments/fedcof-small.toml`" in page


def test_each_promise_of_a_page_has_its_tests(hooks: Any) -> None:
    known = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
    }
    named = {
        name.strip()
        for page in (ROOT / "docs").rglob("*.md")
        for match in hooks.PROMISE.finditer(page.read_text(encoding="utf-8"))
        for name in match[1].split(",")
    }
    assert len(named) > 50
    assert named - known == set()


def test_user_pages_name_no_tests(hooks: Any) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    shown = {
        p.name: re.findall(
            r"\btest_\w{6,}|\btests/", hooks.PROMISE.sub("", p.read_text(encoding="utf-8"))
        )
        for p in pages
    }
    own = {
        "architecture.md",
        "how-to-add.md",
        "own.md",
        "own-method.md",
        "own-transport.md",
    }  # they show how you test your own
    assert {name: found for name, found in shown.items() if found and name not in own} == {}


def test_tables_of_tasks_and_of_everything_are_made_from_the_code(hooks: Any) -> None:
    assert "| fedelmy | yes | yes | yes | yes | yes | yes | yes |" in hooks.tasks()
    assert "| regression | `rmse` ↓ |" in hooks.metrics()
    assert (
        "| `ekiden ps` | a list of runs: `run`, `name`, `state`, `since`, `reason` |"
        in hooks.printed()
    )
    catalogue = hooks.catalogue()
    for method in METHODS:
        assert f"| [{method.title()}](methods/" in catalogue
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    for mark in ("CATALOGUE", "METRICS", "TASKS", "LEADERBOARD", "CONTRACT", "JSON"):
        assert sum(f"\n{mark}\n" in page for page in pages) == 1, mark


def test_a_search_leaves_out_the_words_that_the_index_leaves_out(hooks: Any) -> None:
    material = pytest.importorskip("material")
    theme = SimpleNamespace(dirs=[str(Path(material.__file__).parent / "templates")])
    made = hooks.stop_words(SimpleNamespace(theme=theme))
    words = json.loads(made.removeprefix("const stopWords = new Set(").removesuffix(");\n"))
    assert {"a", "to", "what", "when", "does"} <= set(words)
    assert not {"silo", "client", "see", "away"} & set(words)
    scripts = [f"assets/{name}.js" for name in ("stop-words", "search")]
    assert ", ".join(scripts) in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_a_method_lists_its_hyperparameters_in_words(hooks: Any) -> None:
    table = hooks.settings(FedELMY)
    assert (
        "| `models` | S, models trained at each client | `5` | whole number, 1 or more |" in table
    )
    assert "`paper` or `released`" in table
    assert hooks.words(Fraction) == "number, greater than 0 and at most 1"
    assert hooks.words(Count | None).startswith("none, or whole number")
    assert "ekiden run local" in hooks.settings(Local)
    seed = '<code><span title="ekiden.core.base.checks.CountOrZero">CountOrZero</span></code>'
    assert hooks.spoken(seed) == "<code>whole number, 0 or more</code>"
    assert (
        hooks.spoken(
            base := '<code><span title="ekiden.core.base.checks.Checked">Checked</span></code>'
        )
        == base
    )
    angle = '<span title="ekiden.core.base.checks.Range">Range</span>(least=0, most=180)]</code>'
    annotated = f'<code><span title="typing.Annotated">Annotated</span>[<span title="float">float</span>, {angle}'
    assert hooks.spoken(annotated) == "<code>number, 0 or more and at most 180</code>"
    signature = '<div class="doc-signature highlight"><span class="n">lr</span>: <span class="n">Positive</span></div>'
    assert "</span>: number, greater than 0</div>" in hooks.spoken(signature)
    assert "on_step=lambda row: None," in hooks.signature(run)


def test_a_page_of_a_method_is_closed_from_the_costs_on(hooks: Any) -> None:
    html = '<h1 id="x">X</h1><h2 id="command">C</h2><p>c</p><h2 id="cost">Cost</h2>a<h2 id="results">R</h2><h3>b</h3>'
    above, closed = hooks.folded(html).split("<details", 1)
    assert above == '<h1 id="x">X</h1><h2 id="command">C</h2><p>c</p>'
    assert ("<details" + closed).count("<details") == 2
    assert '<summary><h2 id="results">R</h2></summary><h3>b</h3></details>' in closed
    assert hooks.folded("<h2 id='other'>O</h2>") == "<h2 id='other'>O</h2>"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_page_shows_its_docstring_once(hooks: Any, method: Any) -> None:
    after = "\n\n## Cost\n\nN bytes.\n\n## Paper and code\n\nTheirs is another.\n"
    for own in ("", "\n\nIt is fast."):
        page = hooks.opened_page(hooks.with_docstring(f"# X{own}{after}", method), method)
        assert page.startswith(f"# X\n\n{hooks.docstring(method)[0]}\n\n")
        for part in hooks.docstring(method):
            assert page.count(part) == 1
        assert page.count("\n## Paper and code\n") == 1
        assert own.strip() in page.partition("\n## Cost\n")[0]
        assert page.endswith("\n\nTheirs is another.\n")
        assert not re.search(r"(?<![<(])https://", page), "every address is a link"
    bare = hooks.with_docstring("# X\n", method)
    assert bare.count("Departures from the paper:") == 1
    assert re.search(r"\| paper \| .*\b(19|20)\d\d\b", hooks.facts(method))


def test_what_would_end_a_cell_of_a_table_is_escaped(hooks: Any) -> None:
    (row,) = re.findall(r"^\| `divergence` .*$", hooks.settings(FedTasuki), re.MULTILINE)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_above_the_fold_a_page_says_what_when_how_and_one_table(hooks: Any, method: Any) -> None:
    page = ROOT / "docs/methods" / f"{method.__module__.rsplit('.', 1)[1]}.md"
    made = hooks.opened_page(page.read_text(encoding="utf-8"), method)
    what, *sections = made.partition(f"\n## {hooks.FOLDED}\n")[0].split("\n## ")
    assert [section.splitlines()[0] for section in sections] == ["When to use it", "Command"]
    assert len(what.split()) <= 140  # a screen
    assert len(sections[0].split()) <= 145
    assert not re.search(
        r"^\|", what + "".join(sections), re.MULTILINE
    )  # the one table is made from the code
    table = hooks.facts(method)
    assert f"`ekiden run {method.title()}`" in table
    assert re.search(r"\| moves \| [\d,.]+ model sizes", table)
