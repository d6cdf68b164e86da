"""Each "x ± y" on a page is in a record of the repository, printed by a paper, or said to come from
runs that were not kept."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from ekiden.lab.tables import ledger
from ekiden.lab.tables.sweep import opened

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
RECORDS = EXPERIMENTS / "records"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
MARK = "not kept"
_VALUE = re.compile(r"(?<![\w.])([+-]?\d+(?:\.\d+)?)\**\s*±\s*(\d+(?:\.\d+)?)")
Value = tuple[str, str]


def values(text: str) -> list[Value]:
    return [(middle.lstrip("+"), spread) for middle, spread in _VALUE.findall(text)]


@cache
def records() -> list[str]:
    """The files of records."""
    return [file.read_text(encoding="utf-8") for file in RECORDS.glob("*.jsonl")]


def perplexities() -> Iterable[list[float]]:
    """What the seeds of a cell have for each group of texts, which the tables do not show."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for text in records():
        for run in map(json.loads, text.splitlines()[1:]) if '"perplexity"' in text else ():
            for group, metrics in run["result"].get("groups", {}).get("client", {}).items():
                found[run["run"].partition("--seed")[0], group].append(metrics["perplexity"])
    return found.values()


def known() -> tuple[frozenset[Value], frozenset[Value]]:
    """Values that follow from records, and printed values."""
    ours = set(values(ledger.page([opened(file) for file in sorted(RECORDS.glob("*.jsonl"))])))
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
        )  # the tables are rounded, too
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
        of_papers = re.search("printed|published", block, re.IGNORECASE)
        claimed = marks = False  # whether a value is marked, and whether one must be
        for part, about in parts(block):
            missing = [
                v
                for v in values(part)
                if not is_among(v, ours) and not (of_papers and v in printed)
            ]
            marked = MARK in about.lower()
            if missing and not marked:
                found.append(
                    f"line {line}: no record has "
                    + ", ".join(" ± ".join(value) for value in missing)
                )
            claimed = claimed or bool(marked and values(part))
            marks = marks or bool(missing)
        if claimed and not marks:
            found.append(f"line {line}: all that is marked has a record")
    return found


def test_pages_have_evidence() -> None:
    ours, printed = known()
    found = {page: faults(page.read_text(encoding="utf-8"), ours, printed) for page in PAGES}
    assert {str(page.relative_to(ROOT)): lines for page, lines in found.items() if lines} == {}


def test_the_page_names_what_ran_on_a_gpu() -> None:
    on_gpu = []
    for file in sorted(RECORDS.glob("*.jsonl")):
        runs = [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()[1:]]
        cards = [
            r["environment"]["gpu"] for r in runs if r["config"]["hardware"]["device"] != "cpu"
        ]
        assert set(cards) <= {"NVIDIA H200"}, file
        if cards:
            on_gpu.append((file.stem, len(cards), len(runs)))
    (told,) = re.findall(
        r"one NVIDIA H200: (.*?)\. ", (ROOT / "docs/experiments.md").read_text("utf-8"), re.DOTALL
    )
    listed = re.findall(r"`([\w-]+)`\s+\((\d+)\s+of\s+(\d+)", told)
    assert [(name, int(some), int(of)) for name, some, of in listed] == on_gpu


def test_faults_are_found() -> None:
    ours, printed = frozenset({("51.23", "1.06"), ("2.00", "0.50")}), frozenset({("80.3", "1.2")})
    right = """
FedA has 51.2 ± 1.1, and
FedB 40.0±2.0 (not kept).

| | ours | printed |
|---|---|---|
| FedA | **51.23** ± 1.06 | 80.3 ± 1.2 |
| FedB (not kept) | 40.0 ± 2.0 | 80.3 ± 1.2 |
| FedB minus FedA | -2.0 ± 0.5 | |

| | one (not kept) | two |
|---|---|---|
| FedA | 7 ± 1 | 51.2 ± 1.1 |

```sh
99 ± 1
```
"""
    assert not faults(right, ours, printed)
    changes = [
        ("1.06", "1.16"),
        (" (not kept) | 40", " | 40"),
        ("2.0 (not kept)", "2.0"),
        ("printed", "theirs"),
    ]
    changes += [("-2.0 ± 0.5", "-2.1 ± 0.5"), ("one (not", "one (a"), ("7 ± 1", "51.2 ± 1.1")]
    for old, new in changes:
        assert right.count(old) == 1
        assert len(faults(right.replace(old, new), ours, printed)) == 1, old
