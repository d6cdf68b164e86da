"""Sums of a silo's columns that say nothing about its rows: a scale from the bounds of the study's
schema."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from ekiden.cli.silos import SumsOptions
from ekiden.cli.silos import sums as write_sums
from ekiden.core.base.errors import UserError
from ekiden.readers.kinds import Table
from ekiden.readers.scaling import agree_on
from ekiden.silos.silo import bounds
from ekiden.silos.silo.silo_file import SiloFile, read

pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
Row = tuple[object, ...]
SCHEMA = """
label_column = "died"
[columns.age]
kind = "number"
least = 18
most = 110
[columns.seen]
kind = "date"
least = "2024-01-01"
most = "2024-12-31"
required = true
[columns.sex]
kind = "category"
categories = ["f", "m"]
[columns.died]
kind = "category"
categories = ["no", "yes"]
"""


def patients(count: int, seed: int = 0) -> list[Row]:
    draw = np.random.default_rng(seed)
    ages = draw.normal(60, 12, count).clip(18, 110)
    gone = draw.random(count) < 0.1
    return [
        (
            "" if lost else f"{age:.1f}",
            f"2024-{k % 12 + 1:02d}-15",
            "fm"[k % 2],
            ("yes", "no")[k % 3 > 0],
        )
        for k, (age, lost) in enumerate(zip(ages, gone, strict=True))
    ]


def silo(
    folder: Path, rows: Sequence[Row], more: str = "", schema: str = SCHEMA, name: str = "a"
) -> SiloFile:
    """The file of a silo that trains on all of these rows."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for part, held in (("train", rows), ("test", rows[:20])):
        with open(folder / "data" / f"{part}.csv", "w", newline="") as out:
            csv.writer(out).writerows([("age", "seen", "sex", "died"), *held])
    (folder / "study.toml").write_text(schema)
    file = folder / "silo.toml"
    file.write_text(
        f'name = "{name}"\n[data]\npath = "data"\nschema = "study.toml"\nval_fraction = 0.0\n{more}'
    )
    return read(file)


def test_silos_with_other_rows_tell_the_same(tmp_path: Path) -> None:
    """Nobody who reads the sums can tell which of them has whom, or how many; told often, too."""
    rare = [("", "2024-06-15", "m", "no")] * 41
    first, other = silo(tmp_path / "0", patients(60)), silo(tmp_path / "1", rare)
    assert bounds.sums(first).to_json() == bounds.sums(other).to_json()
    assert not (first.folder / "told.jsonl").exists()
    exact = [held.sums() for held in (first, other)]
    assert exact[0].to_json() != exact[1].to_json()


def test_silos_agree_on_a_scale_from_bounds(tmp_path: Path) -> None:
    told = []
    for k, name in enumerate("ab"):
        file = silo(tmp_path / name, patients(60, k), name=name)
        write_sums(SumsOptions(file.path, bounds=True))
        told.append(tmp_path / name / f"{name}-sums.json")
    found = agree_on(told)
    (tmp_path / "agreed.json").write_text(json.dumps(found.to_json()))
    table = found.table
    assert isinstance(table, Table)
    scale = dict(zip(table.numeric, zip(table.centre, table.scale, strict=True), strict=True))
    assert scale["age"] == pytest.approx((64, (110 - 18) / sqrt(12)))
    assert table.gaps == ("age",)
    assert table.vocabularies == (("", "f", "m"),)
    assert {*found.classes} == {"no", "yes"}
    held = silo(tmp_path / "a", patients(60), 'agreed = "../agreed.json"')
    loaded, client = held.load()
    assert loaded.shape == (2 + 1 + 1,)
    assert float(client.train.x[:, :2].abs().max()) <= sqrt(3) + 0.01


def test_exact_sums_beside_a_limit_on_epsilon_are_said_to_be_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = silo(tmp_path, patients(60), "\n[limits]\nepsilon = 5")
    write_sums(SumsOptions(file.path))
    assert "limits.epsilon does not cover these sums: --bounds" in capsys.readouterr().out
    write_sums(SumsOptions(file.path, bounds=True))
    assert "--bounds" not in capsys.readouterr().out
    with pytest.raises(UserError, match="leave out times or bounds"):
        write_sums(SumsOptions(file.path, bounds=True, times=(1.0,)))


@pytest.mark.parametrize(
    ("schema", "lacking"),
    [
        (SCHEMA.replace("most = 110", ""), "age"),
        (SCHEMA.replace('categories = ["f", "m"]', ""), "sex"),
        (SCHEMA.replace('categories = ["no", "yes"]', ""), "label"),
    ],
)
def test_a_column_without_bounds_is_named(tmp_path: Path, schema: str, lacking: str) -> None:
    with pytest.raises(UserError, match=f"or categories, of {lacking} in the schema"):
        bounds.sums(silo(tmp_path, patients(60), schema=schema))
    held = silo(tmp_path, patients(60))
    with pytest.raises(UserError, match=r"name it by data\.schema"):
        bounds.sums(replace(held, data=replace(held.data, schema="")))
