"""Each "x ± y" on a page is in a record of the repository, printed by a paper, or said to come from
runs that were not kept."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import mean, stdev

from ekiden.lab.tables.sweep import opened
from ekiden.lab.tables.verdicts import collect, contrasts

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
RECORDS = EXPERIMENTS / "records"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
MARK = "not kept"
_VALUE = re.compile(r"(?<![\w.])([+-]?\d+(?:\.\d+)?)\**\s*±\s*(\d+(?:\.\d+)?)")
Value = tuple[str, str]
"""A middle and a spread, as a page says them."""
Exact = tuple[float, float]


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


def exact() -> Iterator[Exact]:
    """What follows from records, unrounded: cells, paired differences, and what the notes say."""
    for file in RECORDS.glob("*.jsonl"):
        sweep = opened(file)
        results = collect(sweep)
        for result in results:
            if result.runs and result.std is not None:
                yield result.mean, result.std
            for middle, spread in values(result.cell.note):
                yield float(middle), float(spread)
        for middle, spread in values(sweep.experiment.note):
            yield float(middle), float(spread)
        for contrast in contrasts(sweep.experiment, results):
            for gap in chain.from_iterable(task.each for task in contrast.tasks):
                if gap and gap.error is not None:
                    yield gap.mean, gap.error
    for of in perplexities():
        if len(of) > 1:
            yield mean(of), stdev(of)


def known() -> tuple[frozenset[Exact], frozenset[Exact]]:
    """Values that follow from records, and printed values."""
    printed = {
        (float(middle), float(spread))
        for file in EXPERIMENTS.glob("*.toml")
        for middle, spread in values(file.read_text(encoding="utf-8"))
    }
    return frozenset(exact()), frozenset(printed)


def is_among(value: Value, ours: frozenset[Exact]) -> bool:
    """Whether a value is one of `ours`, rounded as on the page; a difference may be told the other
    way round."""
    (middle, middle_off), (spread, spread_off) = map(near, value)
    return any(
        abs(abs(m) - middle) <= middle_off and abs(s - spread) <= spread_off for m, s in ours
    )


def near(text: str) -> tuple[float, float]:
    """A number without its sign, and how far from it what it was rounded from can be."""
    decimals = len(text.partition(".")[2])
    return abs(float(text)), 0.5 * 10**-decimals + 1e-9


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


def faults(page: str, ours: frozenset[Exact], printed: frozenset[Exact]) -> list[str]:
    """What a page says without evidence, and marks where there is nothing to mark."""
    found = []
    for line, block in blocks(page):
        of_papers = re.search("printed|published", block, re.IGNORECASE)
        claimed = marks = False  # whether a value is marked, and whether one must be
        for part, about in parts(block):
            missing = [
                v
                for v in values(part)
                if not is_among(v, ours) and not (of_papers and is_among(v, printed))
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
    ours = frozenset({(51.234, 1.0551), (-2.004, 0.5)})
    printed = frozenset({(80.32, 1.2)})
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
    changes += [
        ("-2.0 ± 0.5", "-2.1 ± 0.5"),
        ("51.2 ± 1.1 |", "51.2 ± 1.0 |"),
        ("one (not", "one (a"),
        ("7 ± 1", "51.2 ± 1.1"),
    ]
    for old, new in changes:
        assert right.count(old) == 1
        assert len(faults(right.replace(old, new), ours, printed)) == 1, old
