"""The pages on silos agree with the tests, methods, messages and limits that there are."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware
from ekiden.core.engine.drive import outline
from ekiden.core.engine.method import Method
from ekiden.methods import METHODS
from ekiden.runs.recipe import Recipe
from ekiden.silos.silo.silo_file import Limits
from ekiden.silos.trust.agreement import no_samples
from ekiden.silos.trust.custody import Hop
from ekiden.silos.trust.parcel import Hello
from tests.silos.test_silo import TERMS

ROOT = Path(__file__).parents[2]
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
    assert len(named) > 200
    assert {name: there[name] for name in named if there[name] != 1} == {}


HELLO = {
    "name": "its name",
    "version": "the version of Ekiden",
    "dataset": "the name of its data file or folder",
    "shape": "shape",
    "classes": "classes and what labels mean",
    "mean": "scaling",
    "std": "scaling",
    "augment": "augmentation",
    "samples": "numbers of training, validation and test samples",
    "inputs": "columns, categories",
    "evaluations": "how many more models it measures",
    "signature": "",
    "sealing": "its key of the run",
    "proof": "",
    "task": "what labels mean",
    "schema": "schema",
    "counts": "the class counts of all silos in `agreed.json`",
    "features": "of how many features it gives exact sums",
}
"""what a greeting tells, and the words of the page for it"""
HOP = {
    **dict.fromkeys(
        ("run", "terms", "method", "client", "step", "call", "task", "format"), ""
    ),  # what was asked
    **dict.fromkeys(("samples", "validation", "test"), "the numbers of samples"),
    **dict.fromkeys(
        ("arguments", "taken", "given", "size", "model"), "digests and sizes of values"
    ),
    **dict.fromkeys(("forward", "backward"), "counted compute"),
    "data": "a keyed fingerprint of all samples",
}
"""the same of what a silo signs with each task"""


@pytest.mark.parametrize(
    ("kind", "words", "row"),
    [(Hello, HELLO, "| a run greets the silo |"), (Hop, HOP, "| each task |")],
)
def test_the_page_names_all_that_a_silo_says_of_itself_and_signs(
    kind: type, words: dict[str, str], row: str
) -> None:
    (said,) = [line for line in SECURITY.splitlines() if line.startswith(row)]
    assert {field.name for field in fields(kind)} == words.keys()
    assert [word for word in words.values() if word not in said] == []


def variants(kind: type[Method]) -> Iterator[Method]:
    """The method with its defaults, and with the settings that lead models or sums past the
    server."""
    own = {field.name for field in fields(kind)}
    for settings in ({}, {"topology": "chain"}, {"server": False}, {"decentralised": True}):
        if settings.keys() <= own:
            with suppress(UserError):
                yield kind(**settings)


def test_the_page_names_the_methods_whose_server_reads_nothing() -> None:
    """Silos know beforehand what such a method asks for, and refuse all else."""

    def is_known(method: Method) -> bool:
        recipe = Recipe(method, model="lenet")
        terms = replace(TERMS, recipe=recipe, shape=(1, 28, 28))
        clients = [f"client-{i}" for i in range(8)]
        return outline(terms.setup(no_samples(terms), Hardware(threads=1)), clients) is not None

    said = SECURITY.partition("the server reads nothing during the run:")[2].partition("<!--")[0]
    said = said.replace("-", "").replace("FedELMY in parallel", "FedELMYParallel")
    named = {kind.__name__ for kind in METHODS if re.search(rf"\b{kind.__name__}\b", said)}
    known = {
        k.__name__ for k in METHODS if not k.traits.pools_data and any(map(is_known, variants(k)))
    }
    assert named == known


def test_the_page_names_every_limit_with_its_default() -> None:
    section = SECURITY[SECURITY.index("### Limits of a silo") :]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for name, value in vars(Limits()).items():
        assert f"`{name}`" in section, name
        said = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        if isinstance(value, tuple) or value is None or not said:
            continue
        shown = f"{value // 10**9} GB" if value >= 10**9 else f"{value:,}"

        assert (f"`{str(value).lower()}`" if isinstance(value, bool) else shown) in said[0], name
    assert len(rows) >= 10
