"""The schema of a study: drafted from data, and every value that it does not allow is found with
its row."""

import json
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ekiden
from ekiden.clinic.study import drafted
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import Reading, load
from ekiden.readers.holdings import hold
from ekiden.readers.kinds import Table
from ekiden.readers.schema import Schema, SchemaError, parse, parsed, read
from tests.fuzz import examples
from tests.readers.conftest import write_folder

Command = Callable[..., tuple[int, str]]
pytestmark = [
    pytest.mark.usefixtures("no_data"),
    pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning"),
]

VISITS = """label_column = "died"
subject_column = "patient"
time_column = "seen"

[columns.patient]
kind = "id"

[columns.seen]
kind = "date"
least = 2020-01-01
most = 2023-12-31

[columns.age]
kind = "number"
unit = "years"
least = 18
most = 110
missing = [-1]
required = false

[columns.dose]
kind = "number"
required = true

[columns.born]
kind = "date"
most = "2005-12-31"

[columns.sex]
kind = "category"
categories = ["f", "m"]

[columns.code]
kind = "category"

[columns.died]
kind = "category"
categories = ["no", "yes"]
"""


def visits(rows: int = 40, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "patient": [f"p{k // 2}" for k in range(rows)],
            "seen": pd.date_range("2021-01-05", periods=rows).strftime("%Y-%m-%d"),
            "age": [str(n) for n in draw.integers(18, 111, rows)],
            "dose": [f"{x:.2f}" for x in draw.normal(0, 1, rows)],
            "born": pd.date_range("1950-01-05", periods=rows, freq="97D").strftime("%Y-%m-%d"),
            "sex": draw.choice(["f", "m"], rows),
            "code": [f"{k % 2:02}" for k in range(rows)],
            "died": draw.choice(["no", "yes"], rows),
        }
    )


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "study.toml"
    file.write_text(VISITS)
    return file


def found(data: Any, schema: Path) -> list[tuple[str, str, str]]:
    """Where, in which column and what the schema does not allow."""
    try:
        hold(data, Reading(schema=str(schema)).with_schema())
    except SchemaError as error:
        return [(v.where, v.column, v.what) for v in error.violations]
    return []


def test_the_schema_says_what_the_columns_mean(study: Path) -> None:
    table = visits()
    table["age"] = ["-1", *table["age"][1:]]
    table["dose"] = ["-1", *table["dose"][1:]]
    table["stay"] = 1.0
    with pytest.warns(
        DataWarning, match="has 1 column that the schema does not name and no model gets: stay"
    ):
        one = load(table, schema=study)
    assert isinstance(one.inputs, Table)
    assert one.inputs.numeric == ("age", "dose", "born")
    assert one.inputs.categorical == ("sex", "code")
    assert one.inputs.dates == ("born",)
    assert one.classes == ("no", "yes")
    assert one.train.subject is not None
    assert one.train.time is not None
    columns: dict[str, Any] = {
        "label_column": "died",
        "subject_column": "patient",
        "time_column": "seen",
    }
    columns |= {"missing": ["age=-1"], "categorical_columns": ["code"], "drop_columns": ["stay"]}
    other = load(table, **columns)
    assert sorted(one.inputs.numeric) == sorted(other.inputs.numeric)  # type: ignore[attr-defined]
    x = np.concatenate([one.train.x.numpy(), one.test.x.numpy()])
    assert np.isnan(x[:, 0]).sum() == 1  # -1 is a mark in age only
    assert not np.isnan(x[:, 1]).any()


CELLS = [
    (
        "age",
        "n.d.",
        "holds values that are not numbers",
        "'n.d.', the schema allows numbers 18 to 110 years",
    ),
    ("age", "250", "holds values out of range", "'250', the schema allows numbers 18 to 110 years"),
    ("dose", "low", "holds values that are not numbers", "'low', the schema allows numbers"),
    ("dose", "", "has no value", "has no value, the schema allows numbers in every row"),
    (
        "born",
        "soon",
        "holds values that are not dates",
        "'soon', the schema allows dates up to 2005-12-31",
    ),
    ("born", "2006-01-01", "holds values out of range", "'2006-01-01'"),
    (
        "seen",
        "2019-12-31",
        "holds values out of range",
        "'2019-12-31', the schema allows dates 2020-01-01 to 2023-12-31",
    ),
    ("seen", "", "has no value", "has no value"),
    ("patient", "", "has no value", "has no value, the schema allows ids in every row"),
    ("sex", "F", "holds categories that are not in the schema", "'F', the schema allows 'f', 'm'"),
    (
        "died",
        "maybe",
        "holds categories that are not in the schema",
        "'maybe', the schema allows 'no', 'yes'",
    ),
    ("died", "", "has no value", "has no value"),
]


@pytest.mark.parametrize(("column", "cell", "what", "line"), CELLS)
def test_each_kind_of_violation_is_found_with_its_row(
    column: str, cell: str, what: str, line: str, study: Path
) -> None:
    table = visits()
    table.loc[17, column] = cell or None
    with pytest.raises(SchemaError) as error:
        load(table, schema=study)
    wrong = [("row 17 (counted from 0, without the header) of the table", column, what)]
    assert [(v.where, v.column, v.what) for v in error.value.violations] == wrong
    # as polars and newer writers store text
    text = pa.Table.from_pandas(table, preserve_index=False)
    views = text.cast(pa.schema([(name, pa.string_view()) for name in text.column_names]))
    assert found(views, study) == wrong
    assert line in str(error.value)
    assert column in error.value.told
    assert what in error.value.told
    if cell:
        assert cell not in error.value.told


@given(
    broken=st.lists(
        st.tuples(st.integers(0, 39), st.sampled_from(CELLS)),
        unique_by=lambda p: (p[0], p[1][0]),
        max_size=8,
    )
)
@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_all_violations_are_found(
    broken: list[tuple[int, tuple[str, str, str, str]]], study: Path
) -> None:
    table = visits()
    for row, (column, cell, _, _) in broken:
        table.loc[row, column] = cell or None
    wanted = {
        (f"row {row} (counted from 0, without the header) of the table", c, what)
        for row, (c, _, what, _) in broken
    }
    assert set(found(table, study)) == wanted


def test_a_table_without_a_column_and_a_column_of_another_kind(study: Path) -> None:
    table = visits()
    table["age"] = table["born"]
    missing = ("the table", "sex", "is missing")
    table = table.drop(columns=["sex"])
    assert found(table, study) == [missing, ("the table", "age", "holds other than numbers")]
    table["age"] = pd.to_datetime(table["born"])
    assert found(table, study) == [missing, ("the table", "age", "holds dates")]


names = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=8
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Columns of every kind, with gaps."""
    rows = draw(st.integers(12, 30))
    each = {
        "floats": st.floats(-1e12, 1e12, allow_nan=False),
        "tiny": st.floats(-1e-9, 1e-9, allow_nan=False),
        "whole": st.integers(-(2**40), 2**40),
        "truth": st.booleans(),
        "dates": st.dates(pd.Timestamp("1900-01-02").date(), pd.Timestamp("2090-01-01").date()),
        "names": names,
        "few": st.sampled_from(["01", "1 ", "A", '"', "\\", "é\u0301", "#"]),
    }
    chosen = draw(st.lists(st.sampled_from([*each]), unique=True, min_size=1))
    found_: dict[str, list[Any]] = {}
    for name in chosen:
        values = each[name] if draw(st.booleans()) else st.one_of(st.none(), each[name])
        found_[draw(st.sampled_from([name, f"{name} [x]", f'{name}."é"']))] = draw(
            st.lists(values, min_size=rows, max_size=rows)
        )
    labels: list[list[Any]] = [
        ["a", "b"] * rows,
        [0, 1] * rows,
        [0.5 * k for k in range(2 * rows)],
        [True, False] * rows,
    ]
    found_["label"] = draw(st.sampled_from(labels))[:rows]
    return found_


@given(tables())
@settings(max_examples=examples(8), deadline=None)
def test_the_draft_of_any_table_accepts_that_table(table: dict[str, list[Any]]) -> None:
    try:
        before = hold(table, Reading())
    except UserError:
        return  # it cannot be read without a schema either
    if any(column.null_count == len(before.train) for column in before.train.images.columns):
        return  # it is left out of the draft
    text = drafted([before], Reading())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.toml"
        file.write_text(text, encoding="utf-8")
        assert parse(read(file).text()) == read(file)
        after = hold(table, Reading(schema=str(file)).with_schema())
    assert after.train.images.equals(before.train.images)
    assert np.array_equal(after.train.label, before.train.label)


def test_ranges_of_a_draft_are_rounded_and_small_groups_are_named() -> None:
    table = visits(60)
    table["age"] = [str(20 + k) for k in range(60)]
    table["rare"] = ["u"] * 55 + ["v"] * 5
    table["few"] = ["3.5"] * 9 + [None] * 51
    reading = Reading(label_column=("died",), subject_column="patient", time_column="seen")
    text = drafted([hold(table, reading)], reading)
    values = tomllib.loads(text)
    assert values["columns"]["age"] == {
        "kind": "number",
        "unit": "",
        "least": 20,
        "most": 80,
        "required": True,
    }
    assert values["columns"]["seen"]["most"] == "2021-12-31"
    assert values["columns"]["patient"] == {"kind": "id"}
    assert 'categories = ["u", "v"]  # few rows: "v"' in text
    assert "least" not in values["columns"]["few"]
    assert "3.5" not in text
    assert "p17" not in text
    assert "nothing was sent" in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("years", "years\nleast = 3"), "not valid TOML"),
        (
            ('kind = "id"', 'kind = "di"'),
            r"columns.patient.kind 'di' is unknown: it must be one of number",
        ),
        (("least = 18", 'least = "18"'), "least and most of a number must be numbers, not '18'"),
        (("least = 18", "least = 180"), "least 180.0 is above most 110.0"),
        (("2020-01-01", '"01.01.2020"'), "'01.01.2020' is not a date: write dates as 2024-01-31"),
        (('["f", "m"]', '["f", "f"]'), "the category 'f' is there twice"),
        (('"died"\nsub', '"dead"\nsub'), "unknown column 'dead': did you mean 'died'"),
        (("required = false", "needed = false"), "unknown entry in .columns.age. 'needed': "),
        (("time_column", "times_column"), "unknown entry 'times_column'"),
        (
            ('kind = "category"\n\n', 'kind = "image"\n\n[columns.more]\nkind = "text"\n\n'),
            "both hold samples",
        ),
    ],
)
def test_mistakes_in_a_schema(change: tuple[str, str], line: str, tmp_path: Path) -> None:
    text = VISITS.replace(*change, 1)
    assert text != VISITS
    (tmp_path / "study.toml").write_text(text if "TOML" not in line else text.replace('"', ""))
    with pytest.raises(UserError, match=line):
        read(tmp_path / "study.toml")


def test_flags_may_choose_among_the_columns_of_a_schema_and_may_not_contradict_it(
    study: Path,
) -> None:
    assert load(visits(), schema=study, drop_columns=["born", "code"]).inputs.numeric == (  # type: ignore[attr-defined]
        "age",
        "dose",
    )
    assert load(visits(), schema=study, feature_columns=["age", "sex"]).inputs.categorical == (  # type: ignore[attr-defined]
        "sex",
    )
    for options, line in (
        (
            {"label_column": "sex"},
            r"label_column=\['sex'\] and the schema .* differ: leave out label_column",
        ),
        ({"feature_columns": ["age", "ward"]}, r"feature_columns=\['age', 'ward'\] and the schema"),
        ({"task": "regression"}, "the schema's label is for classification, not for regression"),
        (
            {"classes": ["yes", "no"]},
            "the schema has the classes no, yes: leave out the list of classes",
        ),
    ):
        with pytest.raises(UserError, match=line):
            load(visits(), schema=study, **options)
    with pytest.raises(UserError, match=r"cannot read the schema .*none.toml"):
        load(visits(), schema="none.toml")
    with pytest.raises(UserError, match="digits has fixed columns"):
        load("digits", schema=study)
    with pytest.raises(UserError, match="has no columns"):
        ekiden.federate([(np.zeros((9, 2), np.float32), np.arange(9) % 2)], schema=study)


def test_a_schema_is_checked_again_when_it_changes(study: Path, tmp_path: Path) -> None:
    visits().to_csv(tmp_path / "v.csv", index=False)
    load(str(tmp_path / "v.csv"), schema=study)
    study.write_text(VISITS.replace("most = 110", "most = 19"))
    with pytest.raises(UserError, match="the schema allows numbers 18 to 19 years"):
        load(str(tmp_path / "v.csv"), schema=study)


def test_classes_of_folders_and_arrays(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 3, "dog": 3, "Cow": 1})
    schema = tmp_path / "s.toml"
    schema.write_text('[columns.label]\nkind = "category"\ncategories = ["dog", "cat", "hen"]\n')
    assert found(photos, schema) == [
        (str(photos / "Cow" / "000.png"), "label", "holds categories that are not in the schema")
    ]
    (photos / "Cow" / "000.png").rename(photos / "cat" / "more.png")
    (photos / "Cow").rmdir()
    assert load(str(photos), schema=schema).classes == ("dog", "cat", "hen")
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3), np.float32), y=np.array([0, 1, 2, 1]))
    schema.write_text('label_column = "y"\n[columns.y]\nkind = "category"\ncategories = [0, 1]\n')
    assert [v[0] for v in found(tmp_path / "a.npz", schema)] == [
        f"row 2 (counted from 0, without the header) of {tmp_path / 'a.npz'}"
    ]


def test_drafts_of_every_kind_of_data_accept_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"cat": 12, "dog": 12})
    pd.DataFrame({"note": ["well", "ill"] * 12, "mood": ["a", "b"] * 12}).to_csv(
        tmp_path / "n.csv", index=False
    )
    np.savez(
        tmp_path / "s.npz", x=np.random.default_rng(0).normal(size=(24, 2, 8)), y=np.arange(24) % 3
    )
    pd.DataFrame(
        {"vector": [[1.0, 2.0]] * 24, "cough": [0, 1] * 12, "fever": [1, 1] * 12}
    ).to_parquet(tmp_path / "e.parquet")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("photos", {}),
        ("n.csv", {"text_column": "note", "label_column": ("mood",)}),
        ("s.npz", {}),
        ("e.parquet", {"label_column": ("cough", "fever")}),
    ]
    for name, options in cases:
        reading = Reading(**options)
        (tmp_path / "s.toml").write_text(drafted([hold(tmp_path / name, reading)], reading))
        with_, without = (
            load(str(tmp_path / name), schema=tmp_path / "s.toml"),
            load(str(tmp_path / name), **options),
        )
        assert with_.train.x.equal(without.train.x), name
        assert with_.train.y.equal(without.train.y), name
        assert with_.task == without.task


def test_draft_check_and_run_from_the_command_line(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = visits(90)
    table["ward"] = np.repeat(["a", "b", "c"], 30)
    table.to_csv("v.csv", index=False)
    columns = (
        "--label-column",
        "died",
        "--subject-column",
        "patient",
        "--categorical-columns",
        "code",
    )
    code, said = command(
        "data", "v.csv", *columns, "--group-column", "ward", "--schema", "other.toml"
    )
    assert (code, Path("other.toml").exists()) == (2, False), "a mistyped name drafts nothing"
    assert "cannot read the schema other.toml" in said
    code, said = command(
        "data", "v.csv", *columns, "--group-column", "ward", "--draft-schema", "study.toml"
    )
    assert code == 0
    assert "wrote study.toml, a draft" in said
    code, said = command("data", "v.csv", *columns, "--draft-schema", "study.toml")
    assert code == 2
    assert "study.toml is there already" in said
    own = ("--group-column", "ward", "--schema", "study.toml")
    code, said = command("data", "v.csv", *own)
    assert code == 0, said
    assert "the data meet the schema study.toml" in said
    assert "3 clients" in " ".join(said.split())  # the title is wrapped
    run = ("run", "fedavg", "--rounds", "1", "--epochs", "1", "--partition", "natural")
    code, said = command(*run, "--data", "v.csv", *own)
    assert code == 0, said
    config = json.loads(Path("runs/fedavg-v-seed0/config.json").read_text())
    assert config["plan"]["reading"] == {
        "group_column": "ward",
        "schema": str(tmp_path / "study.toml"),
    }
    assert command("resume", "runs/fedavg-v-seed0")[0] == 0
    table.head(20).to_csv("new.csv", index=False)
    code, said = command("evaluate", "runs/fedavg-v-seed0", "--data", "new.csv")
    assert code == 0, said
    table.loc[[3, 50], "sex"] = "x"
    table.loc[4, "dose"] = "low"
    table.to_csv("bad.csv", index=False)
    code, said = command("data", "bad.csv", *own)
    assert code == 2
    lines = said.splitlines()
    assert lines[:3] == [
        f"row 4 (counted from 0, without the header) of {lines[0].split(' of ')[1].split(':')[0]}: "
        "column 'dose' holds "
        f"'low', the schema allows {lines[0].split('allows ')[1]}",
        "row 3 (counted from 0, without the header) of bad.csv: column 'sex' holds 'x', the schema "
        "allows 'f', 'm'",
        "row 50 (counted from 0, without the header) of bad.csv: column 'sex' holds 'x', the "
        "schema allows 'f', 'm'",
    ]
    assert "3 violations of the schema study.toml" in lines[-1]
    code, said = command(*run, "--data", "bad.csv", *own)
    assert code == 2
    assert said.count("\n") == 1
    assert "column 'dose' holds 'low'" in said
    assert "(and 2 more violations)" in said
    assert not Path("runs/fedavg-bad-seed0").exists()


def test_the_text_of_a_schema_has_no_remarks(study: Path) -> None:
    study.write_text(VISITS.replace('kind = "id"', 'kind = "id"  # as p17'))
    one = read(study)
    assert "p17" not in one.text()
    assert parse(one.text()) == one
    assert parsed({"columns": {"label": {"kind": "number"}}}) == Schema(
        {"label": replace(one.columns["dose"], required=False)}, ("label",)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(study).columns["age"].missing == ("-1",)


@pytest.mark.parametrize("data", ["digits", "mine.py:make"])
def test_only_files_have_a_schema(
    data: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def make() -> None: ...")
    code, said = command("data", data, "--draft-schema", "study.toml")
    assert code == 2
    assert f"{data} has no columns that a schema could describe" in said
    assert not (tmp_path / "study.toml").exists()


def test_a_column_of_labels_cannot_be_the_subject() -> None:
    with pytest.raises(
        UserError, match="column 'label' holds the labels: name others by subject_column"
    ):
        load({"dose": [0.5, 1.5] * 10, "label": ["a", "b"] * 10}, subject_column="label")
