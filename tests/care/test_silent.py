"""What a hospital's data have in them and nobody sees: each gives one line, or is refused."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import ekiden
from ekiden.care.seen import rows_of_several
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.core.base.settings import Training
from ekiden.data import from_tensors, load
from tests.readers.conftest import png

pytestmark = pytest.mark.usefixtures("no_data")
Rows = dict[str, Any]


def rows(n: int = 60, seed: int = 0, **columns: Any) -> Rows:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "label": rng.integers(0, 2, n),
        **columns,
    }


def said(read: Any) -> str:
    """Return all that is said while data are read."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read()
    return "\n".join(str(one.message) for one in seen if issubclass(one.category, DataWarning))


@pytest.mark.parametrize(("flat", "varied"), [(0.0, np.arange(60) % 7), ("x", ["x", "y"] * 30)])
def test_a_column_with_one_value_at_one_silo_is_named(flat: Any, varied: Any) -> None:
    silos: list[Any] = [rows(seed=0, c=[flat] * 60), rows(seed=1, c=varied), rows(seed=2, c=varied)]
    value = "'x'" if flat == "x" else "0"
    assert f"column 'c' hardly varies at client-0 ({value}), but does at other silos" in said(
        lambda: ekiden.federate(silos)
    )
    assert not said(lambda: ekiden.federate(silos[1:]))


@pytest.mark.parametrize("share", [0.02, 0.025])
def test_a_count_that_is_rarely_above_0_is_no_doubt_about_the_silos_where_it_seldom_is(
    share: float,
) -> None:
    rng, n = np.random.default_rng(0), 600
    silos: list[Any] = [
        rows(n, k, c=np.where(rng.random(n) < share, rng.integers(1, 5, n), 0)) for k in range(4)
    ]
    assert not said(lambda: ekiden.federate(silos))
    silos[0]["c"], silos[1]["c"] = np.zeros(n), rng.integers(0, 3, n)
    silos[2]["c"] = silos[3]["c"] = silos[1]["c"]
    assert "'c' hardly varies at client-0" in said(lambda: ekiden.federate(silos))
    for silo in silos[1:]:
        silo["c"] = rng.normal(size=n)  # filled in with their mean
    assert "'c' hardly varies at client-0" in said(lambda: ekiden.federate(silos))


def test_rows_that_a_partition_deals_out_are_not_compared_as_those_of_silos() -> None:
    label = np.arange(200) % 2
    whole = rows(
        200,
        label=label,
        c=np.where(label, np.arange(200) % 7, 0),
        d=["x" if y else "y" for y in label],
    )
    source = ekiden.load(
        {**whole, "d": np.where(np.arange(200) % 9, whole["d"], "z")}, label_column="label"
    )
    assert "hardly varies" not in said(lambda: ekiden.split(source, "classes:1", 2))


@pytest.mark.parametrize(
    ("values", "told"), [(["L on R", "R on L"], False), ([1, 2], True), (["train", "x-test"], True)]
)
def test_a_column_called_fold_is_named_only_with_parts_or_numbers(values: Any, told: bool) -> None:
    assert (
        "which rows are for training" in said(lambda: ekiden.load(rows(Fold=values * 30)))
    ) == told


def test_categories_that_are_too_rare_to_be_reported_do_not_make_a_column_constant() -> None:
    rare = ["x"] * 55 + ["y"] * 5
    silos: list[Any] = [rows(seed=0, c=rare), rows(seed=1, c=["x", "y"] * 30)]
    assert not said(lambda: ekiden.federate(silos))


@pytest.mark.parametrize("form", ["bytes", "floats", "embeddings"])
def test_arrays_of_a_silo_in_another_range_are_named(form: str) -> None:
    rng, labels = np.random.default_rng(0), np.arange(40) % 2

    def held(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = (
            rng.normal(size=(40, 4)) * factor
            if form == "embeddings"
            else rng.random((40, 1, 4, 4)) * factor
        )
        return torch.from_numpy(
            x.astype(np.uint8 if form == "bytes" else np.float32)
        ), torch.from_numpy(labels)

    usual, odd = (250, 2.9) if form == "bytes" else (1, 20)
    line = said(lambda: ekiden.federate([held(usual), held(usual), held(odd)]))
    assert "the input of client-2 differs from other silos by a factor of about" in line
    assert "of client-1" not in line


def test_a_given_test_part_in_another_unit_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pandas.DataFrame(rows(h=rng.normal(170, 10, 60))).to_csv(tmp_path / "train.csv", index=False)
    pandas.DataFrame(rows(seed=1, h=rng.normal(1.7, 0.1, 60))).to_csv(
        tmp_path / "test.csv", index=False
    )
    line = said(lambda: load(tmp_path))
    assert (
        "column 'h' of the training part and the test part differs by a factor of about 100" in line
    )


def test_equal_rows_are_named_also_if_rows_occur_twice_within_a_silo() -> None:
    one = pandas.DataFrame(rows(seed=0))
    twice = pandas.concat([one, one[:10]])
    copied = pandas.concat([one[:20], pandas.DataFrame(rows(40, seed=2))])
    silos: list[Any] = [twice, pandas.DataFrame(rows(seed=1)), copied]
    assert "silos hold equal rows: client-0 and client-2 20 rows" in said(
        lambda: ekiden.federate(silos)
    )


@pytest.mark.parametrize("values", [3, 30])
def test_rows_that_are_equal_by_chance_are_not_called_copies(values: int) -> None:
    rng = np.random.default_rng(0)
    held = {f"s{k}": [str(v) for v in rng.integers(0, values, (300, 2)).tolist()] for k in range(4)}
    assert not [*rows_of_several(held)]
    lines = rows_of_several(held | {"s1": [*held["s1"], *held["s0"]]})
    assert "s0 and s1" in "".join(lines) or values == 3


def test_copies_that_the_held_out_part_would_share_are_counted() -> None:
    once = pandas.DataFrame(rows())
    assert "test rows equal a training row" in said(lambda: load(pandas.concat([once, once])))
    coarse = {"a": np.arange(80) % 3, "b": np.arange(80) // 2 % 2, "label": np.arange(80) % 2}
    assert not said(lambda: load(coarse))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([*np.linspace(1, 9, 40), 888.0], "holds 888 in 1 row, far"),
        ([*np.linspace(100, 140, 55), *[0.0] * 5], "holds 0 in 5 rows, far"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 88] * 6, "holds 88 in 6 rows, far"),
    ],
)
def test_numbers_that_are_no_measurements_are_noticed(values: list[float], line: str) -> None:
    table = rows(len(values), c=values)
    assert line in said(lambda: load(table))


@pytest.mark.parametrize(
    "cell", ["{k}±1", "{k}-", "{k}×10^3", "{k} kg|{k} lb", "[{k}, 1]", "７{k}"]
)
def test_numbers_with_other_signs_are_refused(cell: str) -> None:
    ways = cell.split("|")
    cells = [ways[k % len(ways)].format(k=k) for k in range(1, 61)]
    cells = ["７８"] * 60 if "７" in cell else cells
    with pytest.raises(UserError, match="column 'c' of the table holds"):
        load(rows(c=cells))


@pytest.mark.parametrize(
    ("labels", "marks"),
    [
        ([0, 1, 0, 1, -999] * 12, "'-999'"),
        ([0, 1, 0, 1, 9] * 12, "'9'"),
        (["yes", "no", "no", "unknown"] * 15, "'unknown'"),
    ],
)
def test_classes_that_mark_missing_values_are_named(labels: list[Any], marks: str) -> None:
    assert f"class {marks} of the table seems to mark missing values" in said(
        lambda: load(rows(label=labels))
    )
    assert not said(lambda: load(rows(label=np.arange(60) % 10)))


def test_a_subject_with_most_rows_is_named() -> None:
    who = np.where(np.arange(120) % 4, np.arange(120) // 3, 0)
    found = said(lambda: load(rows(120, who=who), subject_column="who"))
    assert "subject '0' of the table seems to mark missing values" in found
    assert not said(lambda: load(rows(120, who=np.arange(120) // 3), subject_column="who"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("b'a word {k}'", "are values as Python or JSON writes them"),
        ("['a', 'word {k}']", "are values as Python or JSON writes them"),
        ("a word\\u00e9 {k}", "hold escapes of a program"),
        ("a%20word {k}", "hold escapes of a program"),
        ("{k}", "are numbers without a word"),
        ("see [1], {k} % of 20 [text] are {{fine}} at C:\\new", ""),
    ],
)
def test_texts_that_a_program_wrote_are_named(text: str, line: str) -> None:
    found = said(
        lambda: load(
            {"text": [text.format(k=k) for k in range(40)], "label": [0, 1] * 20},
            text_column="text",
        )
    )
    assert line in found if line else not found


def test_a_subject_called_unknown_and_a_far_time_are_named() -> None:
    table = rows(who=[f"p{k % 9}" if k % 3 else "Unknown" for k in range(60)])
    assert "subject 'Unknown'" in said(lambda: load(table, subject_column="who"))
    days = [f"2024-01-{1 + k % 28:02}" for k in range(59)] + ["9999-12-31"]
    assert "holds 9999-12-31 in 1 row" in said(lambda: load(rows(when=days), time_column="when"))


def test_a_gap_that_is_the_label_is_named() -> None:
    labels = np.arange(60) % 2
    days = np.where(labels, np.random.default_rng(0).integers(1, 90, 60), np.nan)
    assert "the gaps of column 'days'" in said(lambda: load(rows(label=labels, days=days)))


def test_slices_of_one_file_without_a_subject_are_named(tmp_path: Path) -> None:
    from PIL import Image

    pages = [Image.fromarray(np.full((4, 4), 20 * k, dtype=np.uint8)) for k in range(5)]
    names = []
    for k in range(8):
        pages[0].save(tmp_path / f"{k}.tif", save_all=True, append_images=pages[1:])
        names += [f"{k}.tif#{page}" for page in range(5)]
    table = {"image": names, "label": ["p", "q"] * 20, "who": [name[0] for name in names]}
    pandas.DataFrame(table).to_csv(tmp_path / "t.csv", index=False)
    assert "40 images of" in (line := said(lambda: load(tmp_path / "t.csv")))
    assert "are parts of only 8 files, such as 0.tif" in line
    assert "are parts" not in said(lambda: load(tmp_path / "t.csv", subject_column="who"))


def test_files_in_class_folders_that_are_not_read_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k in range(12):
        file = tmp_path / "ab"[k % 2] / f"{k}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(png(rng.integers(0, 256, (4, 4), dtype=np.uint8)))
    assert not said(lambda: load(tmp_path))
    (tmp_path / "a" / "x.heic").write_bytes(b"ftypheic")
    (tmp_path / "a" / ".DS_Store").write_bytes(b"")
    assert "1 file below" in (line := said(lambda: load(tmp_path)))
    assert "not read as images (.heic)" in line


def test_dark_images_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = [png(rng.integers(0, 16, (4, 4), dtype=np.uint8)) for _ in range(20)]
    assert "use values up to 15 of 255" in said(
        lambda: load({"image": pixels, "label": [0, 1] * 10})
    )


@pytest.mark.parametrize(
    ("shape", "high", "line"),
    [
        ((40, 60, 2), 1, "which is read as 60 channels with 2 values in time"),
        ((40, 784), 255, "floats of train go up to 255"),
        ((40, 8, 12), 255, "floats of train go up to 255"),
        ((40, 1, 8, 8), 65535, "networks learn from values around 1"),
    ],
)
def test_arrays_that_are_stored_otherwise_are_noticed(
    shape: tuple[int, ...], high: int, line: str
) -> None:
    x = np.random.default_rng(0).integers(0, high + 1, shape).astype(np.float32)
    x.flat[0], x.flat[1] = 0, high
    assert line in said(lambda: from_tensors((x, np.arange(40) % 2)))


def test_arrays_of_a_file_that_nothing_uses_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2, patient=np.arange(40) // 4)
    assert "a.npz holds patient, which nothing uses" in said(lambda: load(tmp_path / "a.npz"))
    assert not said(lambda: load(tmp_path / "a.npz", subject_column="patient"))


def test_masks_with_gaps_are_refused() -> None:
    x = torch.randn(20, 3, 8, 8)
    with pytest.raises(
        UserError, match="have the labels 0, 255 only: number classes from 0 without gaps"
    ):
        from_tensors((x, torch.randint(0, 2, (20, 8, 8)) * 255))


@pytest.mark.parametrize("last", [nn.Sigmoid, nn.ReLU, nn.Tanh])
def test_a_network_that_bounds_its_answers_is_refused_where_it_matters(
    last: type[nn.Module],
) -> None:
    x, training = torch.randn(40, 4), Training(max_steps=1)
    numbers = ekiden.federate([(x, torch.randn(40)), (x + 1, torch.randn(40))])
    with pytest.raises(UserError, match="so it cannot give all numbers"):
        ekiden.run("fedavg", numbers, nn.Sequential(nn.Linear(4, 1), last()), training=training)
    if last is nn.Sigmoid:
        classes = ekiden.federate([(x, torch.arange(40) % 2), (x + 1, torch.arange(40) % 2)])
        with pytest.raises(UserError, match="ends in a sigmoid, but training applies the softmax"):
            ekiden.run("fedavg", classes, nn.Sequential(nn.Linear(4, 2), last()), training=training)
