"""The pages on silos agree with the tests, methods, messages and limits that there are."""

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from ekiden.methods import METHODS, between_machines
from ekiden.silos.silo.levels import Level, needed
from ekiden.silos.silo.silo_file import Limits
from ekiden.silos.trust.custody import Hop
from ekiden.silos.trust.parcel import Hello
from ekiden.silos.trust.sample_terms import SampleTerms

ROOT = Path(__file__).parents[3]
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8") + SECURITY


def test_every_test_that_the_page_names_is_there_once() -> None:
    """Of two with one name nobody knows which attacks the claim."""
    named = {
        name
        for told in re.findall(r"<!-- tests:([^>]+) -->", PAGE)
        for name in re.findall(r"test_\w+", told)
    }
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    there = Counter(re.findall(r"def (test_\w+)\(", code))
    assert len(named) > 80
    assert {name: there[name] for name in named if there[name] != 1} == {}


SAMPLES = {
    "dataset": "the name of its data file or folder",
    "shape": "shape",
    "classes": "classes and what labels mean",
    "mean": "scaling",
    "std": "scaling",
    "augment": "augmentation",
    "inputs": "columns, categories",
    "task": "what labels mean",
    "schema": "schema",
}
HELLO = {
    "version": "the version of Ekiden",
    "holds": "",
    "samples": "numbers of training, validation and test samples",
    "signature": "",
    "sealing": "its key of the run",
    "proof": "",
    "counts": "the class counts of all silos in `agreed.json`",
    "features": "of how many features it gives exact sums",
}
"""what a greeting tells, and the words of the page for it"""
HOP = {
    **dict.fromkeys(("run", "terms", "client", "step", "call", "task"), ""),  # what was asked
    "samples": "the numbers of samples",
    **dict.fromkeys(
        ("arguments", "taken", "given", "size", "model"), "digests and sizes of values"
    ),
    **dict.fromkeys(("forward", "backward"), "counted compute"),
    "data": "a keyed fingerprint of all samples",
}
"""the same of what a silo signs with each task"""


@pytest.mark.parametrize(
    ("kind", "words", "row"),
    [
        (Hello, HELLO, "| a run greets the silo |"),
        (SampleTerms, SAMPLES, "| a run greets the silo |"),
        (Hop, HOP, "| each task |"),
    ],
)
def test_the_page_names_all_that_a_silo_says_of_itself_and_signs(
    kind: type, words: dict[str, str], row: str
) -> None:
    (said,) = [line for line in SECURITY.splitlines() if line.startswith(row)]
    assert {field.name for field in fields(kind)} == words.keys()
    assert [word for word in words.values() if word not in said] == []


def test_the_table_of_what_leaves_is_made_from_the_declarations() -> None:
    """Of each method as `ekiden run --on flower` runs it."""
    levels: dict[str, list[str]] = {level: [] for level in get_args(Level)}
    for kind in METHODS:
        if not kind.traits.pools_data:
            levels[needed(between_machines(kind), Limits().min_active)].append(kind.__name__)
    for level, names in levels.items():
        told = "all others" if level == "models" else ", ".join(sorted(names, key=str.lower))
        assert f'| `"{level}"` | {told} |' in SECURITY
