"""Each "x ± y" on a page is in a record of the repository, printed by a paper, or said to have no
record."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
EXPERIMENTS = ROOT / "experiments"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {RESULTS})
MARK = "no record"
_VALUE = re.compile(r"(?<![\w.])([+-]?\d+(?:\.\d+)?)\**\s*±\s*(\d+(?:\.\d+)?)")
Value = tuple[str, str]


def values(text: str) -> list[Value]:
    return [(middle.lstrip("+"), spread) for middle, spread in _VALUE.findall(text)]


def sections(page: str) -> dict[tuple[str, str], str]:
    """The sections of the page of results, by experiment file and budget."""
    found = {}
    for section in re.split(r"(?m)^## ", page)[1:]:
        command = re.search(r"ekiden sweep experiments/(\S+)\.toml(?: --budget (\S+))?", section)
        assert command
        found[command[1], command[2] or "paper"] = section
    return found


@cache
def records() -> list[str]:
    """The files of records."""
    return [file.read_text(encoding="utf-8") for file in (EXPERIMENTS / "records").glob("*.jsonl")]


def recorded() -> set[tuple[str, str]]:
    """Experiment files and budgets of which the repository has records."""
    heads = [json.loads(text.partition("\n")[0]) for text in records()]
    return {(Path(head["file"]).stem, head["budget"]) for head in heads}


def perplexities() -> Iterable[list[float]]:
    """What the seeds of a cell have for each group of texts, which the page of results does not
    show."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for text in records():
        for run in map(json.loads, text.splitlines()[1:]) if '"perplexity"' in text else ():
            for group, metrics in run["result"].get("groups", {}).get("client", {}).items():
                found[run["run"].partition("--seed")[0], group].append(metrics["perplexity"])
    return found.values()


@cache
def known() -> tuple[frozenset[Value], frozenset[Value]]:
    """Values that follow from records, and printed values."""
    kept = sections(RESULTS.read_text(encoding="utf-8"))
    ours = {value for key in recorded() & kept.keys() for value in values(kept[key])}
    ours |= {(f"{mean(of):.2f}", f"{stdev(of):.2f}") for of in perplexities() if len(of) > 1}
    printed = {
        value
        for file in EXPERIMENTS.glob("*.toml")
        for value in values(file.read_text(encoding="utf-8"))
    }
    return frozenset(ours), frozenset(printed)


def is_among(value: Value, exact: frozenset[Value]) -> bool:
    """Whether a value, rounded as on the page, is one of `exact`; a difference may be told the
    other way round."""
    near = []
    for text in value:
        decimals = len(text.partition(".")[2])
        near.append(
            (abs(float(text)), 0.5 * 10**-decimals + 0.00501)
        )  # the page of results is rounded, too
    (middle, middle_off), (spread, spread_off) = near
    return any(
        abs(abs(float(m)) - middle) <= middle_off and abs(float(s) - spread) <= spread_off
        for m, s in exact
    )


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and tables with the numbers of their lines; blocks of code are checked
    elsewhere."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", lambda code: "\n" * code[0].count("\n"), page)
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=[-*] ))", text):
        yield line, block
        line += block.count("\n")


def parts(block: str) -> Iterator[tuple[str, str]]:
    """A paragraph, or the cells of a table, each with the text that may hold its mark."""
    head, *rows = (row.split("|")[1:-1] for row in block.split("\n"))
    if not block.startswith("|"):
        yield block, block
        return
    for row in rows:
        for cell, column in zip(row, head, strict=False):
            yield cell, " ".join((cell, column, row[0], head[0]))


def faults(page: str, ours: frozenset[Value], printed: frozenset[Value]) -> list[str]:
    """What a page says without evidence, and marks where there is nothing to mark."""
    found = []
    for line, block in blocks(page):
        of_papers, marks = re.search("printed|published", block, re.IGNORECASE), False
        for part, about in parts(block):
            missing = [
                v
                for v in values(part)
                if not is_among(v, ours) and not (of_papers and v in printed)
            ]
            if missing and MARK not in about.lower():
                found.append(
                    f"line {line}: no record of "
                    + ", ".join(" ± ".join(value) for value in missing)
                )
            marks = marks or bool(missing)
        if MARK in block.lower() and values(block) and not marks:
            found.append(f"line {line}: all that is marked has a record")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_evidence(page: Path) -> None:
    assert not faults(page.read_text(encoding="utf-8"), *known())


def test_results_without_records_say_so() -> None:
    kept = sections(RESULTS.read_text(encoding="utf-8"))
    assert {key for key, text in kept.items() if MARK in text.lower()} == kept.keys() - recorded()


def test_faults_are_found() -> None:
    ours, printed = frozenset({("51.23", "1.06"), ("2.00", "0.50")}), frozenset({("80.3", "1.2")})
    right = """
FedA has 51.2 ± 1.1, and
FedB 40.0±2.0 (no record).

| | ours | printed |
|---|---|---|
| FedA | **51.23** ± 1.06 | 80.3 ± 1.2 |
| FedB (no record) | 40.0 ± 2.0 | 80.3 ± 1.2 |
| FedB minus FedA | -2.0 ± 0.5 | |

| | one (no record) | two |
|---|---|---|
| FedA | 7 ± 1 | 51.2 ± 1.1 |

```sh
99 ± 1
```
"""
    assert not faults(right, ours, printed)
    changes = [
        ("1.06", "1.16"),
        (" (no record) | 40", " | 40"),
        ("2.0 (no record)", "2.0"),
        ("printed", "theirs"),
    ]
    changes += [("-2.0 ± 0.5", "-2.1 ± 0.5"), ("one (no", "one (a"), ("7 ± 1", "51.2 ± 1.1")]
    for old, new in changes:
        assert right.count(old) == 1
        assert len(faults(right.replace(old, new), ours, printed)) == 1, old
