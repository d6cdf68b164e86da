"""How samples that are there twice, and patients in training and in the test, are named."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import Samples, from_tensors, load
from tests.care.rows import N, Rows, lines, rows, visits
from tests.readers.pictures import encoded
from tests.readers.told import drawn, said


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


pytestmark = pytest.mark.usefixtures("no_data")


def test_samples_with_two_labels_are_counted() -> None:
    once = pandas.DataFrame(rows(N))
    again = once[:3].assign(label=1 - once["label"][:3])
    assert "3 samples of the table are there with several labels" in said(
        lambda: load(pandas.concat([once, again]))
    )


def test_copies_that_the_held_out_part_would_share_are_counted() -> None:
    once = pandas.DataFrame(drawn())
    assert "test rows equal a training row" in said(lambda: load(pandas.concat([once, once])))
    coarse = {"a": np.arange(80) % 3, "b": np.arange(80) // 2 % 2, "label": np.arange(80) % 2}
    assert not said(lambda: load(coarse))


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


def waves(seed: int, n: int = 40) -> Any:
    rng = np.random.default_rng(seed)
    phase, speed = rng.uniform(0, 6, (n, 2, 1)), rng.uniform(0.08, 0.12, (n, 2, 1))
    return np.float32(np.sin(phase + speed * np.arange(100)) + rng.normal(0, 0.1, (n, 2, 100)))


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


def test_windows_of_signals_that_overlap_are_named() -> None:
    y, whole = np.arange(40) % 2, waves(0)
    assert not said(lambda: from_tensors((whole, y)))
    long = whole.transpose(1, 0, 2).reshape(2, -1)
    cut = np.stack([long[:, 50 * k : 50 * k + 100] for k in range(40)])
    line = "overlap with those that follow them, so parts of the test are in training"
    assert line in said(lambda: from_tensors((cut, y)))


def pictures(n: int = 20, height: int = 6, width: int = 6) -> Any:
    return torch.randint(0, 255, (n, 3, height, width), dtype=torch.uint8)


def test_coarse_rows_with_several_labels_are_no_doubt() -> None:
    rng = np.random.default_rng(0)
    coarse = {
        "a": rng.integers(0, 3, 300),
        "b": rng.choice(["x", "y"], 300),
        "label": rng.integers(0, 2, 300),
    }
    assert "with several labels" not in said(lambda: load(coarse))


def test_pictures_of_the_test_that_were_compressed_again_are_named() -> None:
    smooth = [
        Image.fromarray(pictures(1, 3, 3)[0].permute(1, 2, 0).numpy()).resize((24, 24))
        for _ in range(60)
    ]
    again = [Image.open(BytesIO(encoded(image, "JPEG", quality=95))) for image in smooth[:10]]
    x, copies = (
        torch.from_numpy(np.stack([*map(np.asarray, each)])).movedim(3, 1)
        for each in (smooth, again)
    )
    y = torch.arange(60) % 2
    line = said(lambda: from_tensors((x, y), (torch.cat([copies, 255 - x[:10]]), y[:20])))
    assert re.search(
        r"\d+ of 20 test images .* nearly a training image, as if it was compressed again", line
    )
    assert "compressed" not in said(lambda: from_tensors((x[:40], y[:40]), (x[40:], y[40:])))
