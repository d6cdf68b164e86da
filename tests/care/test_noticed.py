"""What no line told when other people's bug reports were played: each is named now, or refused in
one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.care.seen import rows_of_several
from ekiden.care.units import compare_units
from ekiden.core.base.errors import UserError
from ekiden.data import load
from ekiden.readers.cells import garbled
from ekiden.readers.moments import ColumnMoments
from tests.care.test_silent import rows as drawn
from tests.care.test_silent import said

pytestmark = pytest.mark.usefixtures("no_data")
Table: TypeAlias = Any  # columns by their names
N = 40


def rows(count: int = N, seed: int = 0, **columns: Any) -> Table:
    return drawn(count, seed, **columns)


def silos(*parts: Table, **how: Any) -> str:
    """Return what is said while these rows of silos are read."""
    tables: Table = {f"s{k}": rows(N, k, **part) for k, part in enumerate(parts)}
    return said(lambda: ekiden.federate(tables, **how))


def cells(folder: Path, text: str, **how: Any) -> str:
    """Return what is said while a text file is read, or the error."""
    (folder / "t.csv").write_bytes(text.encode())
    try:
        return said(lambda: load(folder / "t.csv", **how))
    except UserError as error:
        return str(error)


def table(cell: Callable[[int], object], header: str = "c,v,label") -> str:
    values = np.random.default_rng(0).normal(size=N)
    return (
        "\n".join([header, *(f"{cell(k)},{v},{'pq'[k % 2]}" for k, v in enumerate(values))]) + "\n"
    )


def images(folder: Path, *parts: str, classes: str = "ab") -> Path:
    """Write different images, below each part of a data set."""
    rng = np.random.default_rng(0)
    for part in parts or ("",):
        for name in classes:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for k in range(4):
                pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{k}.png")
    return folder


# What silos report


def test_a_column_that_is_empty_at_one_silo_is_named_with_it() -> None:
    empty: Table = {"c": [None] * N, "d": [None] * N}
    filled: Table = {"c": np.arange(N) % 7, "d": ["x", "y"] * (N // 2)}
    line = (
        "column 'c' has no values, or too few, at s1; column 'd' has no values, or too few, at s1"
    )
    assert line in silos(filled, empty)
    together = pandas.concat(
        [pandas.DataFrame(rows(N, k, w=f"s{k}", **p)) for k, p in enumerate((filled, empty))]
    )
    assert line in said(lambda: ekiden.split(load(together, group_column="w"), "natural"))
    assert "no values" not in silos(filled, filled)


def test_a_column_that_is_empty_in_the_test_part_is_named(tmp_path: Path) -> None:
    for part, cell in (("train", 1.5), ("test", None)):
        values = np.random.default_rng(0).normal(size=N) if cell else [None] * N
        pandas.DataFrame(rows(N, len(part), c=values)).to_csv(tmp_path / f"{part}.csv", index=False)
    assert "column 'c' has no values, or too few, at the test part" in said(lambda: load(tmp_path))


def test_codes_that_begin_at_0_and_at_1_are_named() -> None:
    zero, one = {"sex": np.arange(N) % 2}, {"sex": 1 + np.arange(N) // 2 % 2}
    assert "column 'sex' is 0 or 1 at s0, s2, but 1 or 2 at s1: use the same codes" in silos(
        zero, one, zero
    )
    assert "codes" not in silos(zero, {"sex": np.arange(N) // 3 % 2})
    assert "codes" not in silos(zero, {"sex": np.linspace(0.1, 1.9, N)})


def test_categories_that_no_other_silo_has_are_named() -> None:
    short, long = {"sex": ["m", "f"] * (N // 2)}, {"sex": ["male", "female"] * (N // 2)}
    assert (
        "silo s0 shares no category of column 'sex' with others (it has 'f', 'm'; others"
        in silos(short, long)
    )
    assert "shares no" not in silos(short, short)


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
    ("mean", "factor", "shown"), [(75, 2.2046, "2.2"), (170, 1 / 2.54, "2.5"), (50, 12, "12")]
)
def test_small_factors_are_named_if_values_are_far_from_zero(
    mean: float, factor: float, shown: str
) -> None:
    rng = np.random.default_rng(0)
    values = {
        f"s{k}": rng.normal(mean, mean / 8, 400) * (factor if k == 1 else 1) for k in range(3)
    }
    with pytest.warns(
        UserWarning, match=f"of s1 differs from other silos by a factor of about {shown} "
    ):
        compare_units(
            {silo: {"column 'w'": ColumnMoments.of(v, "w")} for silo, v in values.items()}
        )


def test_few_equal_rows_are_named_only_if_they_are_hardly_chance() -> None:
    rng = np.random.default_rng(0)

    def coarse() -> Table:
        return {
            "age": rng.integers(30, 80, N),
            "v": rng.normal(5, 2, N).round(1),
            "label": ["p", "q"] * (N // 2),
        }

    parts: list[Table] = [coarse() for _ in range(4)]
    parts[1]["age"][0], parts[1]["v"][0] = parts[0]["age"][0], parts[0]["v"][0]
    assert "equal rows" not in said(lambda: ekiden.federate(parts))
    for part in parts:
        part["dose"] = rng.normal(size=N)
    parts[1]["dose"][0] = parts[0]["dose"][0]
    assert "client-0 and client-1 1 row of 40 and 40" in said(lambda: ekiden.federate(parts))
    held = {"a": ["1", "2", *map(str, range(10, 40))], "b": ["1", *map(str, range(50, 80))]}
    assert "Few may be equal by chance" in "".join(rows_of_several(held))


# Who holds what


def test_owners_that_share_a_client_or_are_divided_anew_are_named() -> None:
    owned = load(rows(4 * N, w=["n", "e", "s", "w"] * N), group_column="w")
    line = said(lambda: ekiden.split(owned, "natural", 3))
    assert line.startswith("3 clients share 4 natural owners: client-0 holds the rows of ")
    assert line.count("client-") == 3
    assert "iid mixes the rows of 4 natural owners (e, n, s, w):" in said(
        lambda: ekiden.split(owned, "iid", 3)
    )
    assert not said(lambda: ekiden.split(owned, "natural"))


def test_one_class_is_said_when_data_are_read(tmp_path: Path) -> None:
    assert "are 'a': a model learns nothing from one class" in said(
        lambda: load(images(tmp_path, classes="a"))
    )
    x = torch.randn(N, 4)
    assert "are '0': a model learns" in said(
        lambda: ekiden.federate([(x + k, torch.zeros(N).long()) for k in (0, 1)])
    )


@pytest.mark.parametrize(
    "names", [{"split": ["train", "test"]}, {"part": ["Train", "val"]}, {"fold": [0, 1]}]
)
def test_a_column_that_names_the_parts_is_no_feature_in_silence(names: Table) -> None:
    ((name, values),) = names.items()
    assert f"column {name!r} of the table seems to say which rows are" in said(
        lambda: load(rows(N, **{name: values * (N // 2)}))
    )


def test_samples_with_two_labels_are_counted() -> None:
    once = pandas.DataFrame(rows(N))
    again = once[:3].assign(label=1 - once["label"][:3])
    assert "3 samples of the table are there with several labels" in said(
        lambda: load(pandas.concat([once, again]))
    )


def test_empty_texts_are_counted_and_a_silo_without_words_is_named() -> None:
    texts = {"n": ["", None] * 20, "s": [f"word {k}" for k in range(40)]}
    parts: Table = {silo: {"text": text, "label": ["p", "q"] * 20} for silo, text in texts.items()}
    line = said(lambda: ekiden.federate(parts, text_column="text"))
    assert (
        "40 of 80 samples of all silos hold nothing (no word, no value, or one value only), among "
        "them all at n:" in line
    )


# Files


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            table(lambda k: ("NA", "DE", "FR")[k % 3]),
            "holds NA in 14 rows among codes of two letters",
        ),
        (
            table(lambda k: ("1-Mar", "TP53")[k % 2]),
            "holds dates without a year among names ('1-Mar' in row 0",
        ),
        (
            table(lambda k: ("KÃ¶ln", "Ulm")[k % 2]),
            "holds 'KÃ¶ln', which is 'Köln' read in another encoding",
        ),
        (
            table(lambda k: ("#VALUE!", "x")[k % 2]),
            "holds an error of a spreadsheet ('#VALUE!' in row 0",
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
        (
            table(lambda k: k) + "12,1.5,Total\n",
            "class 'Total' of {file} seems to mark missing values or a row of tot",
        ),
        (table(lambda k: f'"=""0{k}"""'), "holds a formula of a spreadsheet ('=\"00\"' in row 0"),
        (table(lambda k: f"'{k}"), "holds a number behind an apostrophe"),
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
            "holds numbers with a unit ('0 mg' in row 0",
        ),
        ("v,label\n1,NA\n2,p\n", "is missing (column 'label', which holds 'NA')"),
    ],
)
def test_what_text_files_hold_is_noticed(text: str, line: str, tmp_path: Path) -> None:
    assert line.format(file=tmp_path / "t.csv") in cells(tmp_path, text)


def test_names_of_columns_and_spellings_in_another_encoding_are_found() -> None:
    assert garbled("KÃ¶ln") == "Köln"
    assert garbled("Größe".encode().decode("latin-1")) == "Größe"
    assert not any(map(garbled, ("Köln", "Ulm", "Ärzte", "β", "München")))
    with pytest.raises(
        UserError, match=r"'KÃ¶ln' \(s1\) and 'Köln' \(s0\): names that differ in case, blanks"
    ):
        silos({"c": ["Köln", "Ulm"] * 20}, {"c": ["KÃ¶ln", "Ulm"] * 20})
    with pytest.raises(
        UserError,
        match="rename 'Age' to 'age' if it is that in the same unit, because all silos need",
    ):
        silos({"age": np.arange(N)}, {"Age": np.arange(N)})


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


def test_parts_of_folders_are_found_in_any_case_and_others_named(tmp_path: Path) -> None:
    dataset = load(images(tmp_path / "x", "Train", "Test"))
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (8, 8, ("a", "b"))
    assert "val is not read: validation samples are taken" in said(
        lambda: load(images(tmp_path / "y", "train", "val"))
    )
    with pytest.raises(
        UserError, match=r"the folders testing, training of .* call the training part train"
    ):
        load(images(tmp_path / "z", "training", "testing"))


def test_folders_that_programs_leave_are_not_read(tmp_path: Path) -> None:
    images(tmp_path, "", "__MACOSX")
    assert len(load(tmp_path).train) + len(load(tmp_path).test) == 8


# Arrays and names in Python


def test_labels_of_bytes_are_names() -> None:
    x, y = np.random.default_rng(0).normal(size=(N, 4)), np.array([b"a", b"b"] * (N // 2))
    assert ekiden.federate([(x, y), (x + 1, y)]).dataset.classes == ("a", "b")


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        (
            torch.eye(N).to_sparse(),
            torch.arange(N) % 2,
            "holds a sparse tensor: give tensor.to_dense",
        ),
        (np.ma.masked_less(np.eye(N), 0.5), np.arange(N) % 2, "holds masked values"),
        (
            np.eye(N),
            np.array(["2024-01-01"] * N, dtype="datetime64[D]"),
            "as labels: give integers, numbers or names",
        ),
    ],
)
def test_arrays_that_are_not_plain_are_refused(x: Any, y: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ekiden.federate([(x, y), (x, y)])


def test_sparse_matrices_and_numbers_as_names_of_silos_are_refused() -> None:
    scipy = pytest.importorskip("scipy.sparse")
    x, y = scipy.csr_matrix(np.eye(N)), np.arange(N) % 2
    with pytest.raises(UserError, match="must be tensors"):
        ekiden.federate([(x, y), (x, y)])
    with pytest.raises(UserError, match="names of silos are texts, not 1: write it as '1'"):
        ekiden.federate(dict[Any, Any]({1: rows(N), 2: rows(N, 1)}))


# Between machines, and with a schema


def test_subjects_that_each_silo_numbers_are_named() -> None:
    who = {"who": np.arange(N) // 2}
    line = "20 of 20 subjects of s0 are also at s1, and count as the same"
    assert line in silos(who, who, subject_column="who")
    assert "subjects of" not in silos(who, {"who": 100 + np.arange(N) // 2}, subject_column="who")


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


# More tables


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            {"sbp": np.where(np.arange(N) % 3 == 0, 0, 120 + np.arange(N) % 17)},
            "holds 0 in 14 rows, far from",
        ),
        ({"label": ["z", *["p", "q"] * 19, "p"]}, "class 'z' of the table has one sample"),
        (
            {"A": np.arange(N) ** 2},
            "column 'A' and 'a' of the table may be one that is there twice",
        ),
        (
            {"b.1": np.arange(N) ** 2},
            "column 'b' and 'b.1' of the table may be one that is there twice",
        ),
        ({"label": [0, 1, 1, -100] * 10}, "class '-100' of the table seems to mark missing values"),
    ],
)
def test_columns_that_are_not_what_they_seem_are_noticed(columns: Table, line: str) -> None:
    assert line in said(lambda: load(rows(N, **columns)))


def test_categories_of_numbers_that_mark_missing_values_are_named() -> None:
    stage = ["1", "2", "3", "999"] * 10
    line = said(lambda: load(rows(N, stage=stage), categorical_columns="stage"))
    assert "category of column 'stage' '999' of the table seems to mark missing values" in line


@pytest.mark.parametrize(
    ("table", "how", "line"),
    [
        (rows(N, bp=[f"{100 + k}/{60 + k}" for k in range(N)]), {}, "holds two numbers"),
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


@pytest.mark.parametrize("how", [{"drop_columns": "patients"}, {"missing": "patients=-1"}])
def test_columns_that_are_not_there_are_said_if_another_is_nearly_called_so(how: Any) -> None:
    line = "has no column 'patients', which is named to leave it out or its marks: did you mean 'patient'?"
    assert line in said(lambda: load(rows(N, patient=np.arange(N)), **how))
    assert line not in said(lambda: load(rows(N, age=np.arange(N)), **how))


def test_a_label_that_no_sample_has_is_named() -> None:
    table = rows(N, cough=np.arange(N) % 2, fever=[0] * N)
    del table["label"]
    assert "the label 'fever' of the table is the same in all rows" in said(
        lambda: load(table, label_column=["cough", "fever"])
    )


def test_frames_with_arrays_in_cells_are_read() -> None:
    table = pandas.DataFrame(
        {"x": list(np.random.default_rng(0).normal(size=(N, 3))), "label": ["p", "q"] * (N // 2)}
    )
    assert load(table).shape == (3,)


def test_tensors_that_need_gradients_are_read() -> None:
    x = torch.randn(N, 4, requires_grad=True)
    assert not ekiden.federate(
        [(x, torch.arange(N) % 2), (x + 1, torch.arange(N) % 2)]
    ).dataset.train.x.requires_grad


def test_a_table_in_another_unit_than_training_is_named() -> None:
    dataset = ekiden.federate([rows(N, k, h=170 + np.arange(N) % 9) for k in (0, 1)]).dataset
    for values, line in (
        (1.7, "has the median 1.7, and training 17"),
        (np.nan, "has no value: all rows count as"),
    ):
        assert line in said(lambda v=values: dataset.inputs.encode(rows(N, h=np.full(N, v))))
    assert not said(lambda: dataset.inputs.encode(rows(N, h=170 + np.arange(N) % 9)))


def test_files_beside_those_of_silos_are_named(tmp_path: Path) -> None:
    for k in range(2):
        pandas.DataFrame(rows(N, k)).to_csv(tmp_path / f"s{k}.csv", index=False)
    (tmp_path / "~$s0.csv").write_bytes(b"lock")
    (tmp_path / "s2.xlsx").write_bytes(b"PK")
    assert "1 file in" in (line := said(lambda: ekiden.data.join([str(tmp_path)])))
    assert "not read as a silo: s2.xlsx" in line


@pytest.mark.parametrize(
    ("name", "hint"), [("agee", "did you mean 'age'?"), ("weight", "it has age, y")]
)
def test_a_column_to_leave_out_that_is_not_there(name: str, hint: str, tmp_path: Path) -> None:
    """Another silo may have it, so nothing is refused."""
    text = "age,y\n" + "".join(f"{k / 7:.4f},{k % 2}\n" for k in range(N))
    assert f"has no column {name!r}, which is named to leave it out or its marks: {hint}" in cells(
        tmp_path, text, label_column="y", drop_columns=name
    )
