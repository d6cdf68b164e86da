"""What looks wrong in data is said in one line: ids among features, small silos, and samples that
are twice."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.care.seen import fingerprints
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import Samples, from_tensors
from ekiden.readers.kinds.tables import Table

Rows = dict[str, Any]


def visits(patients: int = 30, each: int = 10, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients), each)
    return {
        "patient": who,
        "v": rng.normal(size=len(who)),
        "label": [["p", "q"][k // 3 % 2] for k in who],
        "ward": [f"w{k % 3}" for k in who],
    }


def _said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if issubclass(w.category, DataWarning)]


def lines(rows: Any, **columns: Any) -> list[str]:
    """Load rows, and return what was said about them."""
    return _said(lambda: ekiden.load(rows, **columns))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("patient", np.repeat(np.arange(30), 10)),
        ("patientId", [f"A{k // 10}" for k in range(300)]),
        ("MRN", np.repeat(np.arange(30), 10).astype(float)),
        ("stay_id", [f"s{k}" for k in range(300)]),
        ("record no", np.arange(300)),
        ("row", np.arange(300)),
        ("name", [f"Ms {k}" for k in range(300)]),
    ],
)
def test_a_column_that_looks_like_an_id_is_named_before_it_is_a_feature(
    name: str, values: Any
) -> None:
    rows = {name: values} | {k: v for k, v in visits().items() if k != "patient"}
    (line,) = lines(rows, group_column="ward")
    assert f"{name!r} (" in line
    assert f"drop_columns={name!r}" in line
    assert not lines(rows, group_column="ward", drop_columns=[name])
    assert not any(
        "looks like" in said for said in lines(rows, group_column="ward", subject_column=name)
    )
    assert not lines(rows, group_column="ward", feature_columns=["v", name])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("age", np.random.default_rng(0).permutation(300) * 7),
        ("dose", np.random.default_rng(1).normal(size=300)),
        ("idle", np.arange(300) % 50),
        ("person", ["a", "b", "c"] * 100),
        ("visit", np.arange(300) % 12),
        ("ID", np.random.default_rng(1).normal(size=300)),
        ("seen", pandas.date_range("2020-01-01", periods=300)),
    ],
)
def test_measurements_and_categories_are_not_taken_for_ids(name: str, values: Any) -> None:
    rows = {name: values} | {k: v for k, v in visits().items() if k != "patient"}
    assert not lines(rows, group_column="ward")


def test_many_small_groups_point_to_subject_column() -> None:
    (line,) = lines(visits(), group_column="patient", drop_columns=["ward"])
    assert "group_column patient makes 30 silos, half of them with 10 rows or fewer" in line
    assert "subject_column" in line
    assert not lines(visits(), group_column="ward", drop_columns=["patient"])


def files(folder: Path, train: Rows, test: Rows) -> str:
    pandas.DataFrame(train).to_csv(folder / "train.csv", index=False)
    pandas.DataFrame(test).to_csv(folder / "test.csv", index=False)
    return str(folder)


def test_subjects_and_times_of_a_given_test_part_are_compared(tmp_path: Path) -> None:
    train, test = visits(), visits(5, 4, seed=1)
    path = files(tmp_path, train, test)
    (line,) = lines(path, subject_column="patient", group_column="ward")
    assert line.startswith("20 of 20 test rows are about 5 subjects of training")
    test["patient"] = test["patient"] + 28
    (line,) = lines(files(tmp_path, train, test), subject_column="patient", group_column="ward")
    assert line.startswith("8 of 20 test rows are about 2 subjects")
    test["patient"] = test["patient"] + 2
    assert not lines(files(tmp_path, train, test), subject_column="patient", group_column="ward")
    early = lines(files(tmp_path, train, test), time_column="patient", group_column="ward")
    assert not early
    test["patient"] = test["patient"] - 2
    (line,) = lines(files(tmp_path, train, test), time_column="patient", group_column="ward")
    assert line.startswith("8 of 20 test rows are not later than the last training row")


def test_subjects_of_tensors_and_of_a_common_test_set_are_compared() -> None:
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    silo = Samples(x, y, subject=torch.arange(40) // 4)
    test = Samples(torch.randn(6, 3), y[:6], subject=torch.tensor([9, 9, 10, 11, 12, 13]))
    with pytest.warns(DataWarning, match="2 of 6 test rows are about 1 subject of training"):
        from_tensors(silo, test)
    with pytest.warns(DataWarning, match="2 of 6 test rows are about 1 subject of training"):
        ekiden.federate([silo, Samples(x + 1, y, subject=20 + torch.arange(40) // 4)], test)
    with pytest.raises(UserError, match="subject"):
        ekiden.federate([silo, (x, y)])


def test_rows_that_are_in_training_and_in_a_given_test_part_are_counted(tmp_path: Path) -> None:
    train, test = visits(), visits(5, 4, seed=1)
    for name in ("ward", "v"):
        test[name][:7] = train[name][40:47]
    path = files(tmp_path, train, test)
    labels, equal = lines(path, drop_columns=["patient"])
    assert "there with several labels ('p', 'q')" in labels
    assert equal.startswith("7 of 20 test rows equal a training row")
    coarse = {**train, "v": np.arange(300) % 4}, {**test, "v": np.arange(20) % 4}
    assert not lines(files(tmp_path, *coarse), drop_columns=["patient"])


def test_rows_that_several_silos_hold_are_counted() -> None:
    one, two, three = (
        pandas.DataFrame(visits(6, 10, seed=k)).drop(columns="patient") for k in range(3)
    )
    two.loc[:4, "v"] = one.loc[10:14, "v"].to_numpy()
    two.loc[:4, "ward"] = one.loc[10:14, "ward"].to_numpy()
    silos = [one, two[["ward", "label", "v"]], three]  # the order of columns does not matter
    with pytest.warns(
        DataWarning, match="silos hold equal rows: client-0 and client-1 5 rows of 60 and 60. A row"
    ):
        ekiden.federate(silos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.federate([one, three])


def test_fingerprints_depend_on_the_salt_and_on_names_not_on_codes() -> None:
    import torch

    one = Table(("a", "b"), ("c",), vocabularies=(("x", "y"),))
    other = Table(("b", "a"), ("c",), vocabularies=(("w", "x", "y"),))
    x = torch.tensor([[1.5, float("nan"), 2.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([[float("nan"), 1.5, 3.0], [1.0, -0.0, 2.0]], dtype=torch.float64)
    assert fingerprints(x, one, b"salt") == fingerprints(y, other, b"salt")
    assert not set(fingerprints(x, one, b"salt")) & set(fingerprints(x, one, b"other"))


def test_a_ward_only_in_the_test_file_is_refused_and_one_without_test_rows_is_not(
    tmp_path: Path,
) -> None:
    def rows(wards: str, n: int) -> Rows:
        both = [(w, ord(w) + k, "pq"[k % 2]) for w in wards for k in range(n)]
        return dict(zip(("ward", "v", "label"), map(list, zip(*both, strict=True)), strict=True))

    data = ekiden.load(
        files(tmp_path, rows("ns", 40), rows("n", 12) | {"v": list(range(100, 112))}),
        group_column="ward",
    )
    assert [len(c.test) for c in ekiden.split(data, "natural").clients] == [12, 0]
    both = files(tmp_path, rows("ns", 40), rows("nsx", 12) | {"v": list(range(100, 136))})
    data = ekiden.load(both, group_column="ward")
    with pytest.raises(
        UserError, match=r"12 test rows of .* are of groups that training does not have \(x\)"
    ):
        ekiden.split(data, "natural")


def lines_of(seen: Any) -> str:
    return " ".join(str(one.message) for one in seen if one.category is DataWarning)


@pytest.mark.parametrize(
    ("label", "copy"),
    [
        (["no", "yes"] * 30, [1, 0] * 30),
        (["no", "yes"] * 30, ["alive", "dead"] * 30),
        (["a", "b", "c"] * 20, [3.5, 1.5, 2.5] * 20),
        ([0.5 * k for k in range(60)], [3 - 7.0 * k for k in range(60)]),
        ([float(k * k) / 3 for k in range(60)], [0.1 * k for k in range(60)]),
    ],
)
def test_a_copy_of_the_label_is_named(label: list[Any], copy: list[Any], tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    table = pandas.DataFrame(
        {"age": draw.normal(50, 9, 60), "twin": copy, "sex": ["f", "m", "f"] * 20, "label": label}
    )
    with pytest.warns(DataWarning) as seen:
        ekiden.load(table)
    assert (
        "column 'twin' of own data is the same as the label 'label', or a one-to-one function"
        in lines_of(seen)
    )
    assert "drop_columns" in lines_of(seen)
    assert "'age'" not in lines_of(seen)
    with pytest.warns(DataWarning, match=r"column 'twin' of own data is the same as the label"):
        ekiden.federate([table, table.sample(frac=1, random_state=0)])
    table.to_csv(tmp_path / "t.csv", index=False)
    for _ in range(2):  # also of the data set that is kept
        with pytest.warns(DataWarning, match=r"column 'twin' of .*t.csv is the same as the label"):
            ekiden.load(str(tmp_path / "t.csv"))


def test_a_gap_and_an_array_can_be_copies_of_the_label() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 80)
    x = np.stack([draw.normal(size=80), y * 2.0 + 1], axis=1).astype(np.float32)
    with pytest.warns(
        DataWarning, match=r"value 1 of the inputs of own data is the same as the label"
    ):
        from_tensors((x, y))
    gone = pandas.DataFrame(
        {"age": x[:, 0], "left": np.where(y, 5.0, np.nan), "label": np.where(y, "a", "b")}
    )
    with pytest.warns(DataWarning, match=r"column 'left' of own data is the same"):
        ekiden.load(gone)


def test_features_that_only_go_with_the_label_are_not_copies() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 3, 200)
    near = y.astype(float)
    near[7] = (near[7] + 1) % 3
    coarse = np.minimum(y, 1).astype(float)  # two classes share a value
    fine = y + draw.integers(0, 2, 200) / 10  # a class has two values
    table = pandas.DataFrame(
        {"near": near, "coarse": coarse, "fine": fine, "age": draw.normal(size=200), "label": y}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        ekiden.load(table)
        few = pandas.DataFrame(
            {"twin": [1.0, 2.0] * 5, "age": draw.normal(size=10), "label": ["a", "b"] * 5}
        )
        ekiden.load(few, min_count=1)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("several", [False, True])
def test_a_column_that_counts_rows_is_named(start: int, several: bool) -> None:
    draw = np.random.default_rng(0)
    counts = [draw.permutation(np.arange(start, start + 40)) for _ in range(2)]

    def said(change: Callable[[Any], Any]) -> list[str]:
        silos: list[Any] = [
            {"n": change(n), "v": draw.normal(size=40), "label": ["p", "q"] * 20} for n in counts
        ]
        return _said(lambda: ekiden.federate(silos) if several else ekiden.load(silos[0]))

    (line,) = said(lambda n: n)
    assert "column 'n' " in line
    assert "counts rows" in line
    assert "drop_columns='n'" in line
    assert not said(lambda n: n + 2)
    assert not said(lambda n: n * 2)


@pytest.mark.parametrize("majority", [0.5, 0.9])
def test_a_feature_that_nearly_tells_the_label_is_named(majority: float) -> None:
    draw = np.random.default_rng(0)
    y = (draw.random(2000) > majority).astype(int)
    wrong = y.copy()
    wrong[:3] = 1 - wrong[:3]  # 0.15 % of the rows
    often = np.where(np.arange(2000) % 50 == 0, 1 - y, y)
    rows = {
        "outcome": [f"o{k}" for k in wrong],
        "often": often,
        "v": draw.normal(size=2000),
        "label": y,
    }
    (line,) = lines(rows)
    assert line.startswith("column 'outcome' (99.8")
    assert "tells the label 'label' in nearly all" in line
    rare, other = (np.isin(np.arange(2000), ones).astype(int) for ones in (range(8), range(6, 14)))
    assert not lines(
        {"v": rows["v"], "w": other, "label": rare}
    )  # hardly better than the commonest class


def test_a_number_that_is_nearly_the_target_is_named() -> None:
    draw = np.random.default_rng(0)
    y = draw.normal(size=1000)
    (line,) = lines(
        {"a": np.where(np.arange(1000) < 3, 0, y), "b": y + draw.normal(size=1000), "label": y}
    )
    assert line.startswith("column 'a' (99.75 %)")


@pytest.mark.parametrize(
    ("rare", "common", "named"),
    [
        ("benigm", "benign", True),
        ("tumour", "tumor", True),
        ("normals", "normal", True),
        ("atypical", "typical", False),
        ("grade_a", "grade_b", False),
        ("stage1", "stage2", False),
        ("cat", "car", False),
        ("stage-II", "stage-I", False),
    ],
)
def test_classes_that_differ_by_one_letter_are_named(rare: str, common: str, named: bool) -> None:
    v = np.random.default_rng(0).normal(size=200)
    labels = [rare if k % 10 == 0 else common if k % 2 else "other" for k in range(200)]
    said = lines({"v": v, "label": labels})
    assert [f"class {rare!r} is nearly {common!r}" in line for line in said] == [True] * named
    assert not lines({"v": v, "label": [[rare, common][k % 2] for k in range(200)]})


def test_patients_in_names_of_files_are_a_hint(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 4, 4), dtype=np.uint8)

    def said(name: str) -> list[str]:
        folder = tmp_path / name.partition("{")[0]
        for k, image in enumerate(pixels):
            file = folder / "ab"[k % 2] / f"{name.format(k // 4, k)}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
        return lines(folder)

    (line,) = said("patient{}_{}")
    assert "48 images of" in line
    assert "12 ways, such as patient0:" in line
    assert "subject_column" in line
    assert not said("img_{1}")
    assert not said("x{1}")
