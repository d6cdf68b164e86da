"""What the cells of a table mean, however they are stored."""

import re
import string
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import Dataset, FederatedData, federate, load, split
from ekiden.readers import frames
from ekiden.readers.cells import Cells, Writing, warn_of_marks
from ekiden.readers.kinds import Table
from tests.fuzz import examples
from tests.readers.one_column import column, read, refuses

pytestmark = pytest.mark.usefixtures("no_data")


def text(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8")
    return str(path)


def in_csv(folder: Path, cells: list[str], delimiter: str = ",", **options: Any) -> Dataset:
    rows = [f'"{cell}"{delimiter}{"ab"[k % 2]}' for k, cell in enumerate(cells)]
    return load(text(folder / "t.csv", "\n".join([f"v{delimiter}label", *rows]) + "\n"), **options)


# One frame, stored in every way

WORDS = st.text(string.ascii_letters + "éß水 ", min_size=1, max_size=6).filter(
    lambda s: s.strip() not in ("", "NA", "nan")
)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "float": st.one_of(
        st.none(), st.floats(-1e6, 1e6, allow_nan=False).map(lambda v: float(f"{v:.6g}"))
    ),
    "small": st.floats(1e-13, 1e-11),
    "int": st.one_of(st.none(), st.integers(-1000, 1000)),
    "truth": st.booleans(),
    "day": st.one_of(
        st.none(),
        st.dates(pandas.Timestamp("1930-01-01").date(), pandas.Timestamp("2060-01-01").date()),
    ),
    "stamp": st.datetimes(pandas.Timestamp("1930-01-01"), pandas.Timestamp("2060-01-01")),
    "name": st.one_of(
        st.none(), st.sampled_from(["north", "south, east", 'say "no"', "öst", "two\nlines"])
    ),
    "code": st.sampled_from(["0123", "123", "0007"]),
}


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[Any]]:
    n = draw(st.integers(24, 30))
    chosen = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4, unique=True))
    rows = {name: draw(st.lists(COLUMNS[name], min_size=n, max_size=n)) for name in chosen}
    for name, values in rows.items():  # at least one value
        values[0] = (
            values[0]
            if values[0] is not None
            else draw(COLUMNS[name].filter(lambda v: v is not None))
        )
        if name in ("int", "name"):
            values[1] = {"int": 7, "name": "north"}[name]
    return rows | {
        "group": [("01", "1", "x")[k % 3] for k in range(n)],
        "label": [("yes", "no")[k % 2] for k in range(n)],
    }


def stored(rows: dict[str, list[Any]], folder: Path) -> dict[str, Any]:
    """The same table in all ways."""
    import datasets

    table = pa.table({name: pa.array(values) for name, values in rows.items()})
    frame = table.to_pandas()
    nullable = table.to_pandas(types_mapper=pandas.ArrowDtype)
    coded = frame.assign(group=frame["group"].astype("category").cat.add_categories(["unused"]))
    frame.to_csv(folder / "a.csv", index=False)
    frame.to_csv(folder / "b.tsv", index=False, sep="\t", encoding="utf-8-sig")
    frame.to_csv(folder / "c.csv", index=False, sep=";")
    pq.write_table(table, folder / "d.parquet")
    frame.to_parquet(folder / "e.parquet")
    pyarrow.feather.write_feather(table, str(folder / "f.feather"))
    pyarrow.feather.write_feather(table, str(folder / "g.arrow"))
    return {
        "Arrow": table,
        "CSV": folder / "a.csv",
        "TSV with a byte order mark": folder / "b.tsv",
        "semicolons": folder / "c.csv",
        "Parquet": folder / "d.parquet",
        "pandas's Parquet": folder / "e.parquet",
        "Feather": folder / "f.feather",
        "Arrow file": folder / "g.arrow",
        "pandas": frame,
        "pandas with Arrow types": nullable,
        "pandas with categories": coded,
        "polars": polars.from_arrow(table),
        "Hugging Face": datasets.Dataset(table),
        "columns": dict(rows),
    }


@pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
@settings(
    deadline=None,
    max_examples=examples(6),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tables())
def test_one_table_stored_in_every_way_is_the_same_data_set(
    tmp_path: Path, rows: dict[str, list[Any]]
) -> None:
    found: dict[str, FederatedData] = {}
    ways = stored(rows, tmp_path)
    files = {source.suffix for source in ways.values() if isinstance(source, Path)}
    assert files == {*frames.SUFFIXES}, "each format has a case"
    for how, source in ways.items():
        made = load(source, group_column="group", label_column="label", min_count=1)
        found[how] = split(made, "natural", val_fraction=0.0)
    first = found["Arrow"]
    assert [client.name for client in first.clients] == ["01", "1", "x"]
    for how, data in found.items():
        assert data.dataset.inputs == first.dataset.inputs, how
        assert (data.dataset.classes, data.dataset.groups) == (
            first.dataset.classes,
            first.dataset.groups,
        ), how
        for one, other in (
            (data.dataset.train, first.dataset.train),
            (data.dataset.test, first.dataset.test),
        ):
            assert torch.equal(one.x, other.x), how
            assert torch.equal(one.y, other.y), how


PLACES = st.integers(0, 29)


@settings(deadline=None, max_examples=examples(5))
@given(PLACES, st.sampled_from(["n.d.", "<5", "see note", "12 mg", "\u2014"]), st.integers(1, 3))
def test_an_odd_word_anywhere_in_numbers_is_refused_with_its_row(
    place: int, word: str, times: int
) -> None:
    odd = sorted((place + 7 * k) % 30 for k in range(times))
    cells = [word if k in odd else str(1 + 0.5 * k) for k in range(30)]
    refuses(rf"column 'v' .*{re.escape(repr(word))} in row {odd[0]} ", lambda: column(cells))
    assert np.isnan(read(column(cells, missing=word))).sum() == times


@settings(
    deadline=None,
    max_examples=examples(5),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(PLACES, st.sampled_from([",", "."]))
def test_one_number_anywhere_decides_on_the_decimal_sign(
    tmp_path: Path, place: int, sign: str
) -> None:
    other = "." if sign == "," else ","
    cells = [
        f"1{sign}5" if k == place else f"{k + 1}{other}500" for k in range(30)
    ]  # 2.500 may have thousands
    numbers = sorted(1.5 if k == place else (k + 1) * 1000.0 + 500 for k in range(30))
    assert read(in_csv(tmp_path, cells, ";")) == pytest.approx(numbers)


@pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
@settings(deadline=None, max_examples=examples(5))
@given(st.permutations(["01", "1", "001", "10"]))
@pytest.mark.parametrize(
    "role", ["label_column", "group_column", "domain_column", "subject_column", "v"]
)
def test_codes_in_every_role_are_the_names_that_are_written(role: str, codes: list[str]) -> None:
    rows = {
        "v": [0.1 * k for k in range(80)],
        "label": ["ab"[k % 2] for k in range(80)],
        "code": codes * 20,
    }
    if role == "label_column":
        rows.pop("label")
    option: dict[str, Any] = {"categorical_columns": "code"} if role == "v" else {role: "code"}
    data = load(rows, **option)
    known = {
        "label_column": data.classes,
        "group_column": data.groups,
        "domain_column": data.domains,
    }
    if role == "subject_column":
        assert data.train.subject is not None
        assert data.test.subject is not None
        assert len({*data.train.subject.tolist(), *data.test.subject.tolist()}) == 4
    else:
        found = Table.of(data.inputs).vocabularies[0] if role == "v" else known[role]
        assert sorted(found) == sorted(codes)


@settings(deadline=None, max_examples=examples(5))
@given(
    st.sets(PLACES, min_size=1, max_size=4),
    st.sampled_from([-999.0, 9999.0, -99.0, 99999.0]),
    st.integers(0, 9),
)
def test_a_number_far_from_the_others_is_named_wherever_it_is(
    places: set[int], mark: float, seed: int
) -> None:
    values = np.random.default_rng(seed).uniform(1, 90, size=30)
    values[[*places]] = mark
    with pytest.warns(DataWarning, match=rf"'v' .* holds {mark:g} in {len(places)} row"):
        column(values.tolist())


def test_decimals_and_times_with_zones_are_those_of_floats_and_utc() -> None:
    from decimal import Decimal

    days = pandas.date_range("2024-01-01", periods=30, freq="7h", tz="Europe/Berlin")
    numbers = [k / 4 for k in range(30)]
    label = [("a", "b")[k % 2] for k in range(30)]
    plain = load(
        {
            "d": days.tz_convert("UTC").tz_localize(None).to_pydatetime().tolist(),
            "v": numbers,
            "label": label,
        }
    )
    zoned = load(
        pa.table(
            {"d": pa.array(days), "v": pa.array([Decimal(str(v)) for v in numbers]), "label": label}
        )
    )
    frame = polars.DataFrame({"d": days, "v": numbers, "label": label}).with_columns(
        polars.col("v").cast(polars.Decimal(10, 2)), polars.col("label").cast(polars.Categorical)
    )
    texts = load({"d": [str(d) for d in days], "v": numbers, "label": label})
    for other in (zoned, load(frame), texts):
        assert torch.equal(other.train.x, plain.train.x)
        assert other.classes == plain.classes


# Numbers with odd words


def test_a_few_odd_words_in_a_column_of_numbers_are_refused_with_their_rows() -> None:
    cells: list[Any] = [f"{k / 7:.2f}" for k in range(60)]
    cells[3], cells[17], cells[18] = "n.d.", "<5", "n.d."
    line = r"column 'v' of the table holds numbers, but also text \('n.d.' in row 3 .* and 1 more, '<5' in row 17 .*\): "
    refuses(
        line + r".*missing=\['n.d.', '<5'\], or .* categorical_columns='v'", lambda: column(cells)
    )
    data = split(column(cells, missing=("n.d.", "<5"), min_count=1), "iid", 2)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert (table.numeric, table.gaps, table.missing) == (("v",), ("v",), ("<5", "n.d."))
    assert table.encode({"v": ["<5", "1.0"]})[0].tolist() == [
        0,
        1,
    ]  # the trained model knows the marks
    refuses(
        r"column 'v' .* holds text \('>9' in row 1 .*numbers are expected",
        lambda: table.encode({"v": ["1", ">9"]}),
    )


def test_odd_words_at_every_silo_are_refused() -> None:
    def part(seed: int) -> pandas.DataFrame:
        rng = np.random.default_rng(seed)
        cells = [str(v) for v in rng.normal(5, 2, 60).round(1)]
        cells[3 + seed] = "n.d."
        return pandas.DataFrame({"crp": cells, "label": ["ab"[k % 2] for k in range(60)]})

    refuses(
        "column 'crp' of silo client-0 .*'n.d.' in row 3",
        lambda: federate([part(k) for k in range(3)]),
    )


def test_many_numbers_among_many_words_are_refused_and_few_codes_are_categories() -> None:
    refuses(
        "holds numbers, but also text",
        lambda: column([f"{k}.5" for k in range(20)] + ["n.d."] * 40),
    )
    stages = ["T1", "T2", "T3a", "4"] * 10
    assert column(stages).inputs == Table((), ("v",), vocabularies=(("4", "T1", "T2", "T3a"),))
    assert column(["1", "2", "X"] * 10, categorical_columns="v").inputs.categorical == ("v",)  # type: ignore[attr-defined]


def test_columns_of_several_types_are_refused() -> None:
    cells = [1.5 * k for k in range(5)] + ["n.d."] + [2.0] * 20
    refuses(r"'n.d.' .*values of one type, as by frame.astype\(str\)", lambda: column(cells))
    frame = pandas.DataFrame({"v": cells, "label": ["ab"[k % 2] for k in range(26)]})
    refuses("column v .*values of one type", lambda: load(frame))
    assert read(load(frame.astype(str), missing="n.d."))[1] == 1.5


@pytest.mark.parametrize(
    "cell",
    ["45%", "€ 45", "45 EUR", "$1,234.50", "<5", "(45)", "45 mg", "12:30", "5 days 01:00"],
)
def test_numbers_with_other_signs_are_refused(cell: str) -> None:
    cells = [cell.replace("5", str(k % 10) + str(k)) for k in range(30)]
    refuses(
        "column 'v' of the table holds .*: (write plain numbers|correct it)", lambda: column(cells)
    )


@pytest.mark.parametrize("form", ["1,{:02},345", "{}_000"])
def test_numbers_in_other_groups_are_refused(form: str) -> None:
    refuses(
        "holds text that begins as numbers",
        lambda: column([form.format(k + 10) for k in range(30)]),
    )


def test_infinite_numbers_are_refused_with_their_row(tmp_path: Path) -> None:
    for cell in ("inf", "-Infinity"):
        refuses(
            "column 'v' .* is infinite in row 7",
            lambda: in_csv(tmp_path, [*"1234567", cell, *"12345678"]),  # noqa: B023
        )
    refuses("is infinite in row 7", lambda: column([1.0] * 7 + [float("inf")] + [2.0] * 9))


# The decimal sign


@pytest.mark.parametrize(
    ("cells", "delimiter", "numbers"),
    [
        (["1,5", "2", "1.234,25"], ";", [1.5, 2, 1234.25]),
        (["1,5", "2", "1.234"], ";", [1.5, 2, 1234]),
        (["1.5", "2", "1,234"], ",", [1.5, 2, 1234]),
        (["1.5e3", "2", "-1,234.5"], ",", [-1234.5, 2, 1500]),
        (["1 234,5", "2", "12\u00a0345,5"], ";", [2, 1234.5, 12345.5]),
        (["1'234.5", "2", "\u22123.5"], ",", [-3.5, 2, 1234.5]),
        (["0.125", "0.250", "0.375"], ";", [0.125, 0.25, 0.375]),
        (["1e5", "2E-3", "+.5"], ",", [0.002, 0.5, 1e5]),
    ],
)
def test_the_decimal_sign_follows_from_all_numbers(
    cells: list[str], delimiter: str, numbers: list[float], tmp_path: Path
) -> None:
    assert read(in_csv(tmp_path, cells * 10, delimiter))[::10] == pytest.approx(numbers)


def test_another_column_decides_and_contradictions_are_refused(tmp_path: Path) -> None:
    rows = [f"1.{k:03};{k},5;{'ab'[k % 2]}" for k in range(100, 140)]
    assert read(load(text(tmp_path / "a.csv", "v;w;label\n" + "\n".join(rows))))[0] == 1100
    rows = [f"{k}.5;{k},5;{'ab'[k % 2]}" for k in range(40)]
    path = text(tmp_path / "b.csv", "v;w;label\n" + "\n".join(rows))
    refuses(
        "writes numbers with a point .column 'v': '0.5' in row 0.* and with a comma .column 'w'",
        lambda: load(path),
    )


@pytest.mark.parametrize(("delimiter", "cell"), [(",", "1,234"), (";", "1.234"), (";", "1,234")])
def test_thousands_or_decimals_are_asked_for(delimiter: str, cell: str, tmp_path: Path) -> None:
    cells = [cell, cell.replace("1", "2"), cell.replace("4", "5")] * 10
    refuses(
        f"'{cell}' in row 0 .*may have decimals or thousands: .* decimal='point' or "
        "decimal='comma'",
        lambda: in_csv(tmp_path, cells, delimiter),
    )
    names = {".": "point", ",": "comma"}
    assert read(in_csv(tmp_path, cells, delimiter, decimal=names[cell[1]]))[0] == 1.234
    assert (
        read(in_csv(tmp_path, cells, delimiter, decimal=names["," if cell[1] == "." else "."]))[0]
        == 1234
    )


# Codes, truth values, large numbers


def test_codes_with_leading_zeros_stay_apart(tmp_path: Path) -> None:
    with pytest.warns(DataWarning, match=r"holds numbers with leading zeros \('01' in row 0"):
        table = in_csv(tmp_path, ["01", "1", "10"] * 10).inputs
    assert isinstance(table, Table)
    assert table.vocabularies == (("01", "1", "10"),)
    rows = "".join(f"{('01', '1')[k % 2]},{('07', '7')[k % 2]},{k}\n" for k in range(40))
    data = load(text(tmp_path / "b.csv", "hospital,label,v\n" + rows), group_column="hospital")
    assert (data.groups, data.classes) == (("01", "1"), ("07", "7"))


@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_one_code_is_the_same_stored_as_a_number_a_float_or_text() -> None:
    ways = [[1, 2, 1] * 10, [1.0, 2.0, 1.0] * 10, ["1", "2", "1"] * 10, ["1.0", "2.0", "1.0"] * 10]
    for cells in ways:
        frame = pandas.DataFrame({"v": cells, "w": cells, "label": cells, "g": cells})
        data = load(
            frame,
            group_column="g",
            categorical_columns=["v"],
            drop_columns="w",
            label_column="label",
        )
        assert isinstance(data.inputs, Table)
        assert (data.inputs.vocabularies, data.groups, data.classes) == (
            (("1", "2"),),
            ("1", "2"),
            ("1", "2"),
        )
    parts = [pandas.DataFrame({"v": cells, "label": ["a", "b", "b"] * 10}) for cells in ways]
    table = federate(parts, categorical_columns="v", min_count=1).dataset.inputs
    assert isinstance(table, Table)
    assert table.vocabularies == (("1", "2"),)


@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_codes_above_2_to_53_keep_their_digits_as_text() -> None:
    codes = [2**53 + 1, 2**53 + 2, 2**53] * 10
    frame = pandas.DataFrame({"v": codes, "g": codes, "w": range(30), "label": codes})
    made = load(frame, group_column="g", categorical_columns="v")
    assert made.groups == made.classes == tuple(map(str, sorted(set(codes))))
    with pytest.warns(
        DataWarning,
        match="column 'v' of the table holds whole numbers above 2.53, which lose digits",
    ):
        load(frame.drop(columns="g"))


def test_truth_values_are_spelled_alike(tmp_path: Path) -> None:
    assert read(in_csv(tmp_path, ["True", "true", "FALSE", "1"] * 8))[::8] == [0, 1, 1, 1]
    for cells in (["True", "FALSE"], ["true", "0"], [True, False]):
        rows = {"v": range(40), "label": cells * 20}
        assert load({name: list(values) for name, values in rows.items()}).classes == (
            "false",
            "true",
        )


# Sentinels


@pytest.mark.parametrize(
    ("mark", "others", "noticed"),
    [
        (-999, [36.6 + k / 10 for k in range(30)], True),
        (9999, [float(k) for k in range(30)], True),
        (-1, [20.0 + k for k in range(30)], True),
        (999.9, [k / 3 for k in range(30)], True),
        (1e30, [k / 3 for k in range(30)], True),
        (-1, [float(k) for k in range(30)], False),  # next to 0
        (99, [float(k) for k in range(70, 98)], False),
        (-1, [k / 10 - 1.5 for k in range(30)], False),
    ],
)
def test_numbers_that_mark_missing_values_are_noticed(
    mark: float, others: list[float], noticed: bool, recwarn: pytest.WarningsRecorder
) -> None:
    column([*others, mark, mark])
    lines = [str(w.message) for w in recwarn if issubclass(w.category, DataWarning)]
    recwarn.clear()
    if noticed:
        (line,) = lines
        assert line.startswith(
            f"column 'v' of the table holds {mark:.15g} in 2 rows, far from its other values ("
        )
        assert line.endswith(f"missing='{mark:.15g}'")
        data = split(
            column([*others, mark, mark], missing=f"{mark:.15g}", min_count=1), "iid", 1
        ).dataset
        assert isinstance(data.inputs, Table)
        assert data.inputs.gaps == ("v",)
    else:
        assert lines == []


# Headers, rows, encodings


def test_a_column_without_a_name_is_refused(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"v": np.arange(40) / 3, "label": ["ab"[k % 2] for k in range(40)]})
    frame.to_csv(tmp_path / "a.csv")
    refuses(
        r"column 0 of .*a.csv .* has no name: .*frame.to_csv.index=False",
        lambda: load(tmp_path / "a.csv"),
    )
    refuses(
        r"column 0 of .*c.csv .counted from 0. has no name",
        lambda: load(text(tmp_path / "c.csv", ",label\n" + "5,a\n9,b\n" * 9)),
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            "v,label\n1,a\n2\n",
            "has 1 cell in row 1 .*its header names 2 columns: .*correct the row",
        ),
        ("v,v,label\n" + "1,2,a\n3,4,b\n" * 9, "has two columns called 'v'"),
        ("v, v,label\n" + "1,2,a\n3,4,b\n" * 9, "has two columns called 'v'"),
        ("v,w,label\n" + "1,,a\n3,,b\n" * 9, "column 'w' of .* has no value at all"),
    ],
)
def test_broken_text_files_are_refused_in_one_line(content: str, line: str, tmp_path: Path) -> None:
    refuses(line, lambda: load(text(tmp_path / "a.csv", content)))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    table = "v,label\n" + "1,größer\n2,kleiner\n" * 9
    for encoding, line in (("latin-1", "not written in UTF-8"), ("utf-16", "is written in UTF-16")):
        (tmp_path / "a.csv").write_bytes(table.encode(encoding))
        refuses(line, lambda: load(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_bytes(
        b"sep=;\r\n" + table.replace(",", ";").replace("\n", "\r\n").encode()
    )
    assert load(tmp_path / "a.csv").classes == ("größer", "kleiner")


def test_composed_and_decomposed_letters_are_one_name() -> None:
    assert load({"v": list(range(40)), "label": ["é", "e\u0301", "x", "y"] * 10}).classes == (
        "x",
        "y",
        "é",
    )


def test_counts_of_none_are_counts_and_pressures_of_none_are_gaps() -> None:
    visits = np.repeat(np.arange(6.0), [122, 90, 60, 30, 10, 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_marks(visits, "visits")
    pressures = np.concatenate([np.zeros(6), np.arange(60.0, 200.0)])
    with pytest.warns(DataWarning, match="holds 0 in 6 rows, far from its other values"):
        warn_of_marks(pressures, "pressures")


def _read(values: Any) -> list[Any]:
    table = pa.table({"when": pa.array(values)})
    found = Cells(table, "a.csv", Writing(), ["when"]).time("when")
    assert found is not None
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "values",
    [
        ["2024-01-31", "2023-12-01"],
        ["2024-01-31 10:30:00", "2023-12-01 00:00:00"],
        ["2024-01-31T10:30:00Z", "2023-12-01T00:00:00Z"],
        np.array(["2024-01-31", "2023-12-01"], dtype="datetime64[ns]"),
        pa.array([19753, 19692], type=pa.date32()),
        pa.array(["2024", "2023"]).cast(pa.int64()),
        [2.5, -1.0],
    ],
)
def test_dates_and_numbers_keep_their_order(values: Any) -> None:
    later, earlier = _read(values)
    assert later > earlier


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            ["2024-01-31", "31.01.2024"],
            r"dates, but also text|text \('31.01.2024' in row 1.*\), but dates are expected",
        ),
        (
            ["2024-01-31", "soon"],
            r"text \('soon' in row 1.*\), but dates are expected",
        ),
        (["2024-01-31", None], "no value in row 1"),
        ([1.0, float("nan")], "no value in row 1"),
    ],
)
def test_what_is_not_a_time_is_refused_with_its_row(values: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        _read(values)
