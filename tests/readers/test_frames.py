"""What is read of text files and frames, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.data import load
from ekiden.readers import frames
from tests.readers.conftest import png
from tests.readers.told import N, Table, cells, drawn, rows, said

Rows = dict[str, Any]


pytestmark = pytest.mark.usefixtures("no_data")


def silos(*parts: Table, **how: Any) -> str:
    """Return what is said while these rows of silos are read."""
    tables: Table = {f"s{k}": rows(N, k, **part) for k, part in enumerate(parts)}
    return said(lambda: ekiden.federate(tables, **how))


def table(cell: Callable[[int], object], header: str = "c,v,label") -> str:
    values = np.random.default_rng(0).normal(size=N)
    return (
        "\n".join([header, *(f"{cell(k)},{v},{'pq'[k % 2]}" for k, v in enumerate(values))]) + "\n"
    )


def test_rare_categories_are_counted_and_named_with_their_silo() -> None:
    common = {"drug": ["x", "y"] * (N // 2)}
    rare = {"drug": ["x", "rare", *["x", "y"] * (N // 2 - 1)]}
    assert "(column 'drug': 'rare' in 1 row of s1): all of them count as one" in silos(common, rare)
    assert "count as one" not in silos(common, common)


def test_categories_of_the_test_alone_are_named(tmp_path: Path) -> None:
    for part, names in (("train", "xy"), ("test", "xz")):
        values = [names[k % 2] for k in range(N)]
        pandas.DataFrame(rows(N, len(part), drug=values)).to_csv(
            tmp_path / f"{part}.csv", index=False
        )
    assert "column 'drug': 'z' in 20 rows of" in said(
        lambda: ekiden.split(load(tmp_path), "iid", 2)
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            table(lambda k: ("NA", "DE", "FR")[k % 3]),
            "holds NA in 14 rows among codes of two letters",
        ),
        (
            table(lambda k: ("#VALUE!", "x")[k % 2]),
            "holds a formula or an error of a spreadsheet ('#VALUE!' in row 0",
        ),
        (
            table(lambda k: ("K\ufffdln", "x")[k % 2]),
            "holds a character that was lost in another encoding",
        ),
        (
            table(lambda k: f"{k},{k}" if k == 7 else k),
            "{file} has 4 cells in row 7 (counted from 0, without the head",
        ),
        ("# by hand\n" + table(lambda k: k), "names 1 column: remove lines above the header"),
        (table(lambda k: f'"=""0{k}"""'), "text that begins as numbers do ('=\"00\"' in row 0"),
        (table(lambda k: f"'{k}"), "holds text that begins as numbers do"),
        (
            table(lambda k: f"{k % 9 + 1}.3.2024 25:00"),
            "holds dates in another form ('1.3.2024 25:00' in row 0",
        ),
        (
            table(lambda k: f"2024-03-{k % 9 + 1} 10:00 CET"),
            "holds dates in another form ('2024-03-1 10:0",
        ),
        (table(str) + "c,v,label\n", "{file} has its header again in row 40"),
        (
            "v,label\n" + "".join(f"{k}.5,{k} mg\n" for k in range(N)),
            "holds text that begins as numbers do ('0 mg' in row 0",
        ),
        ("v,label\n1,NA\n2,p\n", "is missing (column 'label', which holds 'NA')"),
    ],
)
def test_what_text_files_hold_is_noticed(text: str, line: str, tmp_path: Path) -> None:
    assert line.format(file=tmp_path / "t.csv") in cells(tmp_path, text)


def test_times_with_and_without_a_zone_are_refused_and_days_are_not() -> None:
    hours = pandas.date_range("2024-01-01 23:00", periods=N, freq="D")
    zoned = hours.tz_localize("Asia/Tokyo")
    with pytest.raises(UserError, match="holds dates, but that of silo s0 dates with a time zone"):
        silos({"t": zoned}, {"t": hours})
    assert not silos({"t": zoned}, {"t": zoned.tz_convert("UTC")})
    assert not silos({"t": hours.normalize().tz_localize("UTC")}, {"t": hours.normalize()})


def test_an_index_with_a_name_is_not_lost_in_silence(tmp_path: Path) -> None:
    frame = pandas.DataFrame(rows(N)).set_index(pandas.Index(range(N), name="patient"))
    assert "the index 'patient' of a frame is not read" in said(lambda: load(frame))
    frame.index = pandas.Index([f"p{k}" for k in range(N)])
    frame.to_parquet(tmp_path / "t.parquet")
    for source in (frame, tmp_path / "t.parquet"):
        assert "of a frame is not read" in said(lambda source=source: load(source))


def test_names_and_categories_are_the_same_in_every_file(tmp_path: Path) -> None:
    frame, other = (pandas.DataFrame(rows(N, k, größe=rows(N, 9 - k)["a"])) for k in (0, 1))
    frame, other = (
        one.assign(grade=pandas.Categorical(np.arange(N) % 3)) for one in (frame, other)
    )
    frame.to_parquet(tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").inputs.categorical == ("grade",)  # type: ignore[attr-defined]
    other = other.rename(columns={"größe": "gro\u0308ße\u00a0\u200b"})
    assert ekiden.federate([frame, other]).dataset.inputs.numeric[-1] == "größe"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="two columns called 'a'"):
        load(frame.assign(**{"a ": 1.5}))


def test_a_silo_without_values_in_a_column_takes_part_if_a_schema_says_what_it_holds(
    tmp_path: Path,
) -> None:
    schema = (
        'label_column = "label"\n[columns.label]\nkind = "category"\n[columns.v]\nkind = "number"\n'
    )
    (tmp_path / "s.toml").write_text(
        f'{schema}[columns.c]\nkind = "number"\n[columns.d]\nkind = "category"\n'
    )
    text = table(lambda k: ",").replace("c,v", "c,d,v")
    assert "column 'c' of" in (line := cells(tmp_path, text))
    assert (
        "has no value at all: leave it out with drop_columns='c' at all silos, or name a schema"
        in line
    )
    (tmp_path / "t.csv").write_text(text)
    dataset = load(tmp_path / "t.csv", schema=str(tmp_path / "s.toml"))
    assert (dataset.inputs.numeric, dataset.inputs.categorical) == (("v", "c"), ("d",))  # type: ignore[attr-defined]
    (tmp_path / "t.csv").write_text(text.replace("c,d,v", "C,d,v"))
    with pytest.raises(UserError, match="has no column 'c', which the schema names: rename 'C'"):
        load(tmp_path / "t.csv", schema=str(tmp_path / "s.toml"))


@pytest.mark.parametrize(
    ("table", "how", "line"),
    [
        (
            rows(N, bp=[f"{100 + k}/{60 + k}" for k in range(N)]),
            {},
            "holds text that begins as numbers do",
        ),
        (
            rows(N, x=np.arange(N) % 3, y=np.arange(N) % 2),
            {"label_column": ["x", "y"], "drop_columns": "label"},
            "are not all 0 and 1: use task='regression' for numbers to predict, or task='survival'",
        ),
    ],
)
def test_what_is_asked_of_tables_is_not_ignored(table: Table, how: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        load(table, **how)


def test_frames_with_arrays_in_cells_are_read() -> None:
    table = pandas.DataFrame(
        {"x": list(np.random.default_rng(0).normal(size=(N, 3))), "label": ["p", "q"] * (N // 2)}
    )
    assert load(table).shape == (3,)


def test_images_and_names_in_files_of_polars_are_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    rows = {"image": [*map(png, pixels)], "label": ["a", "b"] * 10}
    polars.DataFrame(rows).write_ipc(tmp_path / "t.arrow")
    assert "view" in str(pa.ipc.open_file(tmp_path / "t.arrow").schema)
    data = load(tmp_path / "t.arrow")
    assert data.classes == ("a", "b")
    assert {image.tobytes() for image in data.train.x.numpy()} < {
        image.tobytes() for image in pixels
    }


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([*np.linspace(1, 9, 40), 888.0], "holds 888 in 1 row, far"),
        ([*np.linspace(100, 140, 55), *[0.0] * 5], "holds 0 in 5 rows, far"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 88] * 6, "holds 88 in 6 rows, far"),
    ],
)
def test_numbers_that_are_no_measurements_are_noticed(values: list[float], line: str) -> None:
    table = drawn(len(values), c=values)
    assert line in said(lambda: load(table))


@pytest.mark.parametrize(
    "cell", ["{k}±1", "{k}-", "{k}×10^3", "{k} kg|{k} lb", "[{k}, 1]", "７{k}"]
)
def test_numbers_with_other_signs_are_refused(cell: str) -> None:
    ways = cell.split("|")
    cells = [ways[k % len(ways)].format(k=k) for k in range(1, 61)]
    cells = ["７８"] * 60 if "７" in cell else cells
    with pytest.raises(UserError, match="column 'c' of the table holds"):
        load(drawn(c=cells))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def table_unseen(n: int = 60, **columns: Any) -> Any:
    rng = np.random.default_rng(len(columns))
    return {
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "label": ["p", "q"] * (n // 2),
        **columns,
    }


def test_a_quotation_mark_that_swallows_rows_is_named(tmp_path: Path) -> None:
    lines = [f"{k},{'ok' if k % 3 else 'high'},{k % 2}" for k in range(40)]
    lines[5], lines[15] = '5,"ok,1', '15,ok",1'
    (tmp_path / "t.csv").write_text("\n".join(["a,note,label", *lines]))
    line = said(lambda: load(str(tmp_path / "t.csv")))
    assert "a cell of column 'note' of " in line
    assert (
        "holds 9 lines that look like rows ('6,high,0'): check for a quotation mark that is not "
        "closed" in line
    )
    (tmp_path / "t.csv").write_text(
        "\n".join(
            ["a,note,label", *(f'{k * k},"one\ntwo, three\nfour",{k % 2}' for k in range(40))]
        )
    )
    assert "quotation" not in said(lambda: load(str(tmp_path / "t.csv")))


@pytest.mark.parametrize(
    ("columns", "how", "line"),
    [
        (
            {"c": [f"{2022 + k % 3}-{1 + k % 12:02d}" for k in range(60)]},
            {},
            "text that begins as numbers do",
        ),
        (
            {"c": [9007199254740994.0 + 2 * (k // 2) for k in range(60)]},
            {"subject_column": "c"},
            "codes above 2.53",
        ),
    ],
)
def test_what_would_be_read_as_other_names_is_refused(columns: Any, how: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        load(table_unseen(**columns), **how)


def test_a_parquet_file_of_billions_of_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    """Missing values take almost no room in the file."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: pa.nulls(1_000_000, pa.float64()) for name in "xy"}), file)
    assert file.stat().st_size < 20_000
    monkeypatch.setattr(frames, "_MOST_VALUES", 1_999_999)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"says that it holds 2,000,000 values"):
        frames.arrow(file, "a")
    code, said = command("data", str(file), "--label-column", "y")
    assert (code, said.count("\n")) == (2, 1)


def test_a_parquet_file_that_memory_cannot_hold_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 20000000000 failed")

    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "a.parquet")
    monkeypatch.setattr(pq.ParquetFile, "read", full)
    with pytest.raises(UserError, match="needs more memory than its size allows"):
        frames.arrow(tmp_path / "a.parquet", "a")


@pytest.mark.parametrize("stored", [False, True])
def test_a_parquet_file_whose_strings_unpack_to_gigabytes_is_one_line(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kilobyte with one long string in each row, as text, or as categories."""
    monkeypatch.setattr(frames, "_ROOM", 1 << 28)
    file, rows = tmp_path / "a.parquet", 10_000
    once = pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array(["a" * (1 << 20)]))
    pq.write_table(pa.table({"x": once}), file, compression="zstd", store_schema=stored)
    assert file.stat().st_size < 3_000
    with pytest.raises(UserError, match=r"a\.parquet .*more memory than its size allows"):
        frames.arrow(file, "a")
