"""Sums of a silo's columns with noise: what one row more moves, what two of them show, and what
they cost."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ekiden.cli.silos import SumsOptions
from ekiden.cli.silos import sums as write_sums
from ekiden.core.base.errors import UserError
from ekiden.core.training.private import DP, planned_sums
from ekiden.readers import schema as schemas
from ekiden.readers.kinds import Table
from ekiden.readers.scaling import agree_on
from ekiden.silos.silo import noisy_columns
from ekiden.silos.silo.budget import FILE
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
[columns.sex]
kind = "category"
categories = ["f", "m"]
[columns.died]
kind = "category"
categories = ["no", "yes"]
"""
DP3 = DP(epsilon=3, delta=1e-5)


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


def exact(file: SiloFile) -> list[float]:
    """All sums of a silo without noise, in the units of the noise."""
    schema = schemas.parsed(json.loads(file.schema))
    parts = [column.sums() for column in noisy_columns.columns_of(*file.unscaled(), schema)]
    return [float(x) for part in parts for x in part]


@pytest.mark.parametrize(
    "row",
    [
        ("110", "2024-12-31", "f", "yes"),
        ("18", "2024-01-01", "m", "no"),
        ("", "2024-06-30 23:00", "", "no"),
        ("64.3", "", "f", "no"),
    ],
)
def test_one_row_more_moves_the_sums_by_no_more_than_the_noise_was_made_for(
    tmp_path: Path, row: Row
) -> None:
    rows = patients(60)
    before, after = exact(silo(tmp_path / "0", rows)), exact(silo(tmp_path / "1", [*rows, row]))
    moved = math.dist(before, after) / noisy_columns._GRID
    assert 0 < moved <= math.sqrt(3 * 2 + 2)


def test_noise_hides_the_patient_that_the_difference_of_two_sums_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One patient more moves the sums by less than the noise in the mean, and files of the same
    rows differ."""
    keys = iter(range(100))
    monkeypatch.setattr("secrets.token_bytes", lambda n: next(keys).to_bytes(n))
    rows = patients(400)
    spread = planned_sums(DP3, 401, "a").noise * math.sqrt(8)
    found = [noisy_columns.sums(silo(tmp_path, rows), DP3) for _ in range(20)]
    men = np.array([one.categories["sex"]["m"] for one in found])
    assert 0.5 * spread < men.std() < 1.7 * spread
    assert spread > 1  # what a patient adds
    assert not (tmp_path / "a-silo" / "told.json").exists()


def test_silos_agree_on_a_scale_near_that_of_all_rows(tmp_path: Path) -> None:
    told, rows = [], []
    for k, name in enumerate("ab"):
        rows.append(patients(4000, k))
        file = silo(tmp_path / name, rows[-1], name=name)
        write_sums(SumsOptions(file.path, dp="epsilon=3,delta=1e-5"))
        told.append(tmp_path / name / f"{name}-sums.json")
    found = agree_on(told)
    (tmp_path / "agreed.json").write_text(json.dumps(found.to_json()))
    table = found.table
    ages = np.array([float(str(row[0])) for part in rows for row in part if row[0]])
    assert isinstance(table, Table)
    scale = dict(zip(table.numeric, zip(table.centre, table.scale, strict=True), strict=True))
    assert scale["age"] == pytest.approx((ages.mean(), ages.std()), rel=0.05)
    assert scale["age"] != (ages.mean(), ages.std())
    assert table.vocabularies == (("f", "m"),)
    assert found.classes == pytest.approx({"no": 5332, "yes": 2668}, abs=300)
    loaded, _ = silo(tmp_path / "a", rows[0], 'agreed = "../agreed.json"').load()
    assert loaded.shape == (2 + 1 + 1,)


def test_noisy_sums_are_charged_before_they_leave_and_end_with_the_budget(tmp_path: Path) -> None:
    file = silo(tmp_path, patients(200), "\n[limits]\nepsilon = 5\ndelta = 1e-3")
    noisy_columns.sums(file, DP3)
    line = json.loads((tmp_path / "a-silo" / FILE).read_text())
    assert (line["epsilon"], line["delta"], line["steps"]) == (3, 1e-5, 1)
    with pytest.raises(UserError, match="has promised epsilon 3 in 1 earlier runs and allows 5"):
        noisy_columns.sums(file, DP3)
    assert len((tmp_path / "a-silo" / FILE).read_text().splitlines()) == 1


def test_exact_sums_beside_a_limit_on_epsilon_are_said_to_be_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = silo(tmp_path, patients(60), "\n[limits]\nepsilon = 5")
    write_sums(SumsOptions(file.path))
    assert (
        "these sums have no noise, so limits.epsilon does not cover them" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("more", "schema", "dp", "wrong"),
    [
        (
            "",
            SCHEMA.replace("most = 110", ""),
            DP3,
            "give least and most, or categories, of age in the schema",
        ),
        ("", SCHEMA.replace('categories = ["f", "m"]', ""), DP3, "of sex in the schema"),
        ("", SCHEMA.replace('categories = ["no", "yes"]', ""), DP3, "of label in the schema"),
        ("fingerprints = 'a secret of the silos'", SCHEMA, DP3, "leave out data.fingerprints"),
        ("", SCHEMA, DP(epsilon=1, clip=2), "has epsilon and delta alone"),
        ("", SCHEMA, DP(epsilon=1, delta=0.05), "lets whole samples of a"),
    ],
)
def test_what_would_show_more_is_refused_before_anything_is_spent(
    tmp_path: Path, more: str, schema: str, dp: DP, wrong: str
) -> None:
    with pytest.raises(UserError, match=wrong):
        noisy_columns.sums(silo(tmp_path, patients(60), more, schema), dp)
    assert not (tmp_path / "a-silo" / FILE).exists()


def test_a_spread_that_noise_hides_is_as_large_as_the_noise() -> None:
    column = noisy_columns.NumberColumn("a", np.array([5.0] * 50), 0, 10)
    told = np.array([50.0, 3.0, -20.0])
    found = column.moments(told, 10, 12.0)
    assert found.mean == pytest.approx(5.3)
    assert found.deviation == pytest.approx(5 * math.sqrt(12 / 50))
    assert column.moments(np.array([9.0, 0, 0]), 10, 12.0).count == 0
