"""Sections of a ledger whose runs are gone, judged from their lines."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ekiden.tables import experiment, ledger, sweep
from ekiden.tables.experiment import Published
from ekiden.tables.ledger import Line
from ekiden.tables.verdicts import Comparison, names

ROOT = Path(__file__).parents[2]
FILE = """
title = "digits"
printed_seeds = 5
[[column]]
label = "digits"
[[row]]
label = "A | B"
method = "fedseq"
printed = ["50 ± 1"]
[[row]]
label = "new"
method = "fedseq"
printed = [20]
[[row]]
label = "other"
method = "fedseq"
differs = "other clothes"
printed = [30]
[[row]]
label = "votes"
method = "fedov"
"""
OLD = r"""# Results

Made by `ekiden results`; do not edit. Of an earlier version.

- `gone`: 3 training and 2 test images, BMP of 2 x 2 pixels;
  of somebody. 1 of the 2 test images equals a training image.

## digits

    ekiden sweep experiments/table.toml

A note.

| row | column | ours | seeds | sent | passes | printed | difference | verdict |
|---|---|---|---|---|---|---|---|---|
| A \| B | digits | 52.00 ± 1.00 | 0, 1, 2, 3, 4 | 1 B | 1.8 | 50.00 ± 1.00 | +2.00 | within 2 std |
| A | digits | 37.28 ± 15.57 | 0, 1, 2 | 1 B | 1.8 | 17.90 | +19.38 | within 2 std |
| B | digits | 96.47 ± 0.09 | 0, 1, 2 | 1 B | 1.8 | 96.79 | -0.32 | below |
| one | digits | 44.07 | 0 | 1 B | 1.8 | 22.65 | +21.42 | no spread known: one seed, none printed |
| small | digits | 44.07 ± 1.00 | 0, 1 | 1 B | 1.8 | 22.65 | +21.42 | not comparable: budget small (epochs 1 of 2) |
| new | digits | 20.00 ± 1.00 | 0, 1 | 1 B | 1.8 | - |  | not printed |
| other | digits | 40.00 ± 1.00 | 0, 1, 2 | 1 B | 1.8 | 30.00 | +10.00 | above |
| votes | digits | 40.00 ± 1.00 | 0, 1 | 1 B | 1.8 | - |  | not printed |

8 of 8 cells, 24 runs.

**A minus the others**

|  | B |
|---|---|
| digits | +1.00 ± 0.50 |
"""


def by_row(text: str) -> dict[str, Line]:
    return {line.row: line for line in ledger.lines_in(text)}


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without experiment files and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    return tmp_path


def test_kept_lines_are_judged_as_lines_are_today(alone: Path) -> None:
    page = ledger.page([], OLD)
    found = by_row(page)
    a = found["A | B"]
    assert (a.t, a.verdict, a.former) == ("+3.16 (2.31)", "above", "within 2 std")
    assert (found["A"].t, found["A"].verdict, found["A"].former) == ("+1.52 (4.30)", "consistent", "within 2 std")
    assert found["B"].verdict == "below or consistent: the rounded values do not tell"
    assert (found["one"].t, found["one"].verdict) == ("", "no spread known: one seed")
    assert found["small"].verdict == "not comparable: budget small (epochs 1 of 2)"
    assert (found["small"].t, found["small"].former) == ("", "")
    assert found["new"].verdict == "not printed"
    old = by_row(OLD)
    same = ("ours", "seeds", "sent", "passes", "printed", "difference")
    assert [[getattr(line, f) for f in same] for line in found.values()] == [
        [getattr(line, f) for f in same] for line in old.values()
    ], "numbers stay as they are"
    assert (
        "Other verdicts than by single runs: within 2 std → above: A | B / digits; below → below or consistent" in page
    )
    assert "For 2 of 4 values Welch's test changes the verdict by single runs (1 within 2 std → above, 1 below" in page
    assert "A note." in page
    table = "**A minus the others**\n\n|  | B |\n|---|---|\n| digits | +1.00 ± 0.50 |\n"
    assert f"8 of 8 cells, 24 runs.\n\n{table}" in page
    assert ledger.page([], page) == page, "once judged, it stays as it is"


@pytest.mark.parametrize("label", ["votes", "votes (N models)"])
def test_a_method_with_many_models_is_marked_once(label: str) -> None:
    table = experiment.parsed(FILE.replace('"votes"', f'"{label}"'), "table", "paper", "table.toml")
    assert names(table.cells[-1], table) == ("votes (N models)", "digits")


def test_kept_lines_take_the_printed_values_of_today(alone: Path) -> None:
    (alone / "experiments").mkdir()
    (alone / "experiments" / "table.toml").write_text(FILE)
    page = ledger.page([], OLD)
    found = by_row(page)
    assert (found["new"].printed, found["new"].difference) == ("20.00", "+0.00")
    assert (found["new"].verdict, found["other"].verdict) == ("consistent", "not comparable: other clothes")
    assert "votes (N models)" in found
    assert page.count("Printed values are means of 5 runs.\n\n| row | column |") == 1
    assert ledger.page([], page) == page
    (alone / "experiments" / "table.toml").unlink()
    assert by_row(ledger.page([], page)) == found, "the page keeps how many runs the printed values are means of"


def test_the_page_keeps_what_it_says_of_data_that_are_gone(alone: Path) -> None:
    wanted = (
        "- `gone`: 3 training and 2 test images, BMP of 2 x 2 pixels;\n  of somebody. 1 of the 2 test images equals"
    )
    assert wanted in ledger.page([], OLD)
    assert "**Data.**" not in ledger.page([], re.sub(r"(?s)- `gone`.*?image\.\n", "", OLD))


def test_one_printed_run() -> None:
    table = experiment.parsed(FILE.replace("= 5", "= 1"), "table", "paper", "table.toml")
    assert ledger.runs_line(table) == ["Printed values are means of 1 run.", ""]


@pytest.mark.parametrize(
    ("mean", "std", "printed"), [(41.3742, 0.1645, 28.46), (9.0946, 0.3351, 9.2), (96.4741, 0.0947, 96.79)]
)
def test_what_was_judged_from_runs_stays_without_them(mean: float, std: float, printed: float) -> None:
    exact = ledger.judgement(Comparison(mean, std, 3, Published(printed)), "")
    line = Line("A", "digits", f"{mean:.2f} ± {std:.2f}", "0, 1, 2", "1 B", "1.8", **exact)
    rounded = ledger.judgement(Comparison(round(mean, 2), round(std, 2), 3, Published(printed)), "")
    assert line.t != rounded["t"], "these values tell the difference"
    page = "\n".join(ledger.table([line]))
    assert ledger.judged_again(page) == page
    other = "\n".join(ledger.table([replace(line, t="+50.00 (4.30)")]))
    assert by_row(ledger.judged_again(other))["A"].t == rounded["t"], "a t that the values cannot have is not kept"


@pytest.mark.slow
def test_the_command_makes_the_committed_page_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)  # the page keeps its text about the data
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert ledger.page([], page) == page, "from the page alone"
    records = sorted((ROOT / "experiments" / "records").glob("*.jsonl"))
    sweeps = [sweep.opened(file.relative_to(ROOT)) for file in records]
    assert ledger.page(sweeps, page) == page, "ekiden results experiments/records/*.jsonl --write docs/results.md"
