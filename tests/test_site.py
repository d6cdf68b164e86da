"""What the site makes from the code and the records."""

import importlib.util
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from ekiden import run
from ekiden.core.base.checks import Count, Fraction
from ekiden.lab.tables import records
from ekiden.methods import METHODS, FedELMY, Local

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
            if row[:3] == ("pacs", f"{order}, 4 clients", "fedkrylov") and row[-1] == "krylov-small.jsonl"
        ]  # fmt: skip
        assert row[7:10] == (pytest.approx(mean(values)), pytest.approx(stdev(values)), 5)
        assert f"{mean(values):.1f} ± {stdev(values):.1f}" in hooks.leaderboard()


def test_each_promise_of_a_page_has_its_tests(
    hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = hooks.promises()
    assert (
        "refuses every request with the same id and different terms, even after the run has ended: "
        "`test_" in told
    )
    assert told.count("\n- ") > 100
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# A\n\nOne. Two holds. <!-- tests: test_two -->\n")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="there is no test test_two"):
        hooks.promises()
    (tmp_path / "tests" / "test_a.py").write_text("def test_two() -> None: ...\n")
    assert hooks.promises() == "\n## A\n\n- Two holds: `test_two`"


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
        "own.md",
        "own-method.md",
        "own-transport.md",
    }  # they show how you test your own
    assert {name: found for name, found in shown.items() if found and name not in own} == {}


def test_a_method_lists_its_hyperparameters_in_words(hooks: Any) -> None:
    table = hooks.settings(FedELMY)
    assert (
        "| `models` | S, models trained at each client | `5` | whole number, 1 or more |" in table
    )
    assert "`paper` or `released`" in table
    assert hooks.words(Fraction) == "number, above 0 and at most 1"
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
    assert hooks.spoken(annotated) == "<code>number, at least 0 and at most 180</code>"
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
def test_above_the_fold_a_page_says_what_when_how_and_one_table(hooks: Any, method: Any) -> None:
    page = ROOT / "docs/methods" / f"{method.__module__.rsplit('.', 1)[1]}.md"
    what, *sections = (
        page.read_text(encoding="utf-8").partition(f"\n## {hooks.FOLDED}\n")[0].split("\n## ")
    )
    assert [section.splitlines()[0] for section in sections] == ["When to use it", "Command"]
    assert len(what.split()) <= 140  # a screen
    assert len(sections[0].split()) <= 145
    assert not re.search(
        r"^\|", what + "".join(sections), re.MULTILINE
    )  # the one table is made from the code
    table = hooks.facts(method)
    assert f"`ekiden run {method.title()}`" in table
    assert re.search(r"\| moves \| [\d,.]+ model sizes", table)
