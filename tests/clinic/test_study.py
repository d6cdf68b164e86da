"""Table one: against plain means and counts of the pooled rows, on one machine and from the files
of silos' sums."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ekiden.clinic import study
from ekiden.core.base.errors import UserError
from ekiden.data import federate
from ekiden.readers.moments import ColumnSums

COLUMNS: dict[str, list[Any]] = {
    "age": [61, 70, None, 55, 48, 80, 66, 59, None, 73, 64, 52],
    "sex": ["f", "m", "m", "f", "f", "m", "f", "f", "m", "", "m", "f"],
    "died": ["no", "yes", "no", "no", "yes", "no", "no", "yes", "no", "no", "yes", "no"],
}
CUTS = [slice(0, 5), slice(5, 12)]


@pytest.fixture
def silos(tmp_path: Path) -> list[str]:
    files = []
    for name, cut in zip("ab", CUTS, strict=True):
        lines = zip(*(values[cut] for values in COLUMNS.values()), strict=True)
        text = "\n".join(",".join("" if v is None else str(v) for v in line) for line in lines)
        (tmp_path / f"{name}.csv").write_text(f"{','.join(COLUMNS)}\n{text}\n")
        files.append(str(tmp_path / f"{name}.csv"))
    return files


pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")


def test_it_has_the_means_and_shares_of_all_rows(
    silos: list[str], command: Callable[..., tuple[int, str]]
) -> None:
    code, said = command(
        "data",
        "--silos",
        *silos,
        "--label-column",
        "died",
        "--min-count",
        "1",
        "--table-one",
        "--json",
    )
    assert not code, said
    found = {
        (line["column"], line["category"]): line["silos"]
        for line in json.loads(said[said.index("{") : said.rindex("}") + 1])["lines"]
    }
    ages = [
        np.array([float(v) for v in COLUMNS["age"][cut] if v is not None])
        for cut in (slice(None), *CUTS)
    ]
    for of, wanted in zip(found["age", ""].values(), ages, strict=True):
        assert of["count"] == len(wanted)
        assert of["mean"] == pytest.approx(wanted.mean(), rel=1e-5)
        assert of["deviation"] == pytest.approx(wanted.std(), rel=1e-5)
    assert [of["count"] for of in found["rows", ""].values()] == [12, 5, 7]
    assert [of["count"] for of in found["age", "missing"].values()] == [2, 1, 1]
    assert [of["count"] for of in found["sex", "m"].values()] == [5, 2, 3]
    each = [line for (column, _), line in found.items() if column == "sex"]
    assert [sum(line[name]["count"] for line in each) for name in ("all", "a", "b")] == [12, 5, 7]
    assert [of["count"] for of in found["label", "yes"].values()] == [4, 2, 2]
    assert found["label", "yes"]["all"]["share"] == pytest.approx(4 / 12)


def test_sums_of_silos_make_the_same_table(silos: list[str]) -> None:
    fed = federate(silos, val_fraction=0.0, label_column="died", min_count=1, tests=silos)
    told = [ColumnSums.from_json(one.to_json(), "a file") for one in study.cohort_sums(fed)]
    assert study.table_one(told) == study.table_one(study.cohort_sums(fed))
    with pytest.raises(UserError, match="different columns"):
        study.table_one([told[0], replace(told[1], categories={})])
    pair = (np.random.default_rng(0).random((12, 3)).astype(np.float32), np.arange(12) % 2)
    arrays = federate([pair], tests=[pair])
    with pytest.raises(UserError, match="table one is for tables, these samples are"):
        study.cohort_sums(arrays)


def test_the_coordinator_shows_it_from_files_of_sums(
    silos: list[str], tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    fed = federate(silos, val_fraction=0.0, label_column="died", min_count=1, tests=silos)
    for one in study.cohort_sums(fed):
        (tmp_path / f"{one.silo}.json").write_text(one.to_json())
    files = [str(tmp_path / f"{client.name}.json") for client in fed.clients]
    code, said = command(
        "federation", "agree", *files, "--out", str(tmp_path / "agreed.json"), "--table-one"
    )
    assert not code, said
    assert "label = yes" in said
    assert (tmp_path / "agreed.json").exists()
