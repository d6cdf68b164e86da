"""Named sets and the user's own files."""

import json
import re
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import NAMED, Dataset, load, located
from tests.readers.conftest import noise, png, write, write_folder, write_images

pytestmark = pytest.mark.usefixtures("no_data")


def fails(name: object, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(str(name), **options)
    assert "\n" not in str(caught.value)


def chw(pixels: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


# Named sets


def test_digits_are_those_of_scikit_learn(digits: Dataset) -> None:
    from sklearn.datasets import load_digits

    assert digits.shape == (1, 8, 8)
    assert digits.classes == tuple("0123456789")
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    x = torch.cat([digits.train.x, digits.test.x]).flatten(1).double()
    assert x.max() == 255
    images = torch.from_numpy(load_digits().data)
    assert sorted((x * (16 / 255)).round().tolist()) == sorted(images.tolist())
    every = torch.bincount(torch.cat([digits.train.y, digits.test.y]))
    assert (torch.bincount(digits.test.y) - 0.2 * every).abs().max() < 1
    assert torch.equal(load("digits").train.x, digits.train.x)


def test_size_resizes_as_pillow_does(digits: Dataset) -> None:
    bigger = load("digits", size=12)
    assert bigger.shape == (1, 12, 12)
    expected = Image.fromarray(digits.train.x[3, 0].numpy()).resize(
        (12, 12), Image.Resampling.BILINEAR
    )
    assert np.array_equal(bigger.train.x[3, 0].numpy(), np.asarray(expected))


def test_unknown_names_and_bad_sizes() -> None:
    fails("cifar11", r"unknown data set 'cifar11': did you mean 'cifar10'\?")
    fails("", "unknown data set ''")
    fails(
        "no/such/place",
        "no file or folder 'no/such/place': give a folder of class folders, or a file .parquet, ",
    )
    fails("gone.parquet", "no file or folder 'gone.parquet'")
    fails("digits", "size is the side of the images in pixels, 1 or more; it is 0", size=0)


def test_a_path_with_a_slip_is_said_with_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "patients.csv").write_text("age,label\n1,a\n")
    fails(
        tmp_path / "patient.csv", "no file or folder .*patient.csv': did you mean '.*/patients.csv'"
    )
    fails("digits", "1 or more; it is '12'", size="12")


def test_a_folder_of_tables_is_no_folder_of_images(tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text("age,died\n1,yes\n2,no\n")
    fails(
        tmp_path,
        r"is a folder of tables .north.csv, \.\.\..: name one of them, or give the folder as silos",
    )
    fails(tmp_path, "is a folder of tables", label_column="died")


def test_folders_of_the_data_home_are_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EKIDEN_DATA", str(tmp_path))
    write_images(tmp_path / "hospital" / "train.parquet")
    write_images(tmp_path / "hospital" / "test.parquet", 4)
    write_folder(tmp_path / "animals", {"cat": 5, "dog": 5})
    write_images(tmp_path / "cifar10" / "train.parquet")
    assert (len(load("hospital").train), len(load("hospital").test), load("hospital").name) == (
        10,
        4,
        "hospital",
    )
    assert load("animals").classes == ("cat", "dog")
    assert load("cifar10").augment == NAMED["cifar10"].augment
    write_folder(tmp_path / "here" / "cat-or-dog", {"cow": 5, "pig": 5})
    for here, path in (
        ("here/cat-or-dog", "."),
        ("here", "./cat-or-dog"),
        ("here/cat-or-dog", "../cat-or-dog"),
    ):
        monkeypatch.chdir(tmp_path / here)
        assert load(path).classes == ("cow", "pig")
    fails("hospitals", r"did you mean 'hospital'\?")


@pytest.mark.parametrize(
    "name", sorted(n for n, spec in NAMED.items() if spec.hub is None and n != "digits")
)
def test_sets_without_a_hub_copy_say_which_files_to_provide(name: str) -> None:
    fails(
        name, f"set EKIDEN_DATA to a folder that holds {name}/train.parquet and {name}/test.parquet"
    )


class TestHub:
    """Tests cannot reach the hub: `load_dataset` is replaced."""

    def fake(self, monkeypatch: pytest.MonkeyPatch, parts: list[Any]) -> list[tuple[Any, ...]]:
        import datasets

        calls: list[tuple[Any, ...]] = []

        def load_dataset(path: str, name: str | None, split: list[str]) -> list[Any]:
            calls.append((path, name, split))
            return parts

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    def part(self, image: str, label: str, n: int = 6, **columns: object) -> Any:
        from datasets import ClassLabel, Features, Value
        from datasets import Dataset as Table
        from datasets import Image as HubImage

        features = Features({image: HubImage(), label: ClassLabel(names=["x", "y", "z"])})
        features.update({c: Value("string") for c in columns})
        values = {
            image: [{"bytes": png(p), "path": None} for p in noise(n)],
            label: [i % 3 for i in range(n)],
        }
        return Table.from_dict(values | columns, features=features)

    def test_columns_names_and_splits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.fake(
            monkeypatch, [self.part("img", "fine_label"), self.part("img", "fine_label", 3)]
        )
        dataset = load("cifar100")
        assert calls == [("uoft-cs/cifar100", None, ["train", "test"])]
        assert torch.equal(dataset.train.x, chw(noise(6)))
        assert dataset.train.y.tolist() == [0, 1, 2, 0, 1, 2]
        assert dataset.classes == ("x", "y", "z")
        assert len(dataset.test) == 3

    def test_a_configuration_and_another_test_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.fake(
            monkeypatch, [self.part("image", "label"), self.part("image", "label", 3)]
        )
        load("svhn")
        load("tiny_imagenet")
        assert calls == [
            ("ufldl-stanford/svhn", "cropped_digits", ["train", "test"]),
            ("zh-plus/tiny-imagenet", None, ["train", "valid"]),
        ]

    def test_domains_keep_the_order_of_the_papers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ["sketch", "photo", "cartoon", "art_painting"] * 30
        calls = self.fake(monkeypatch, [self.part("image", "label", 120, domain=names)])
        dataset = load("pacs")
        assert calls == [("flwrlabs/pacs", None, ["train"])]
        assert dataset.domains == ("photo", "art_painting", "cartoon", "sketch")
        assert dataset.shape == (3, 32, 32)
        assert dataset.test.domain is not None
        cells = torch.bincount(dataset.test.domain * 3 + dataset.test.y, minlength=12)
        assert cells.tolist() == [2] * 12

    def test_owners(self, monkeypatch: pytest.MonkeyPatch) -> None:
        owners = [f"f{i % 4}" for i in range(40)]
        self.fake(monkeypatch, [self.part("image", "character", 40, writer_id=owners)])
        dataset = load("femnist")
        assert dataset.train.group is not None
        assert dataset.test.group is not None
        assert torch.bincount(dataset.train.group).tolist() == [8] * 4
        assert torch.bincount(dataset.test.group).tolist() == [2] * 4

    def test_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def fail(*args: object, **options: object) -> None:
            raise ConnectionError("no route\nto host")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        fails(
            "mnist",
            r"cannot get 'ylecun/mnist' .*\(no route\): set EKIDEN_DATA .* mnist/train.parquet",
        )


# Parquet


def test_a_parquet_file_with_and_without_a_test_file(tmp_path: Path) -> None:
    path = write_images(tmp_path / "my_train.parquet", 20)
    alone = load(str(path))
    assert (len(alone.train), len(alone.test)) == (16, 4)
    assert torch.bincount(alone.test.y).tolist() == [2, 2]
    assert sorted(torch.cat([alone.train.x, alone.test.x]).flatten(1).tolist()) == sorted(
        chw(noise(20)).flatten(1).tolist()
    )
    write_images(tmp_path / "my_test.parquet", 6, seed=1)
    pair = load(str(path))
    assert torch.equal(pair.train.x, chw(noise(20)))
    assert torch.equal(pair.test.x, chw(noise(6, seed=1)))
    assert pair.classes == ("0", "1")
    assert (pair.mean, pair.std) == ((0.0,), (1.0,))


def test_structs_names_domains_and_groups(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.png").write_bytes(png(noise(1, seed=9)[0]))
    images: list[dict[str, object]] = [{"bytes": png(p), "path": "p"} for p in noise(5)]
    images.append({"bytes": None, "path": "elsewhere.png"})
    columns: dict[str, object] = {
        "image": images,
        "label": ["dog", "cat", "dog", "cat", "dog", "cat"],
        "domain": ["b", "b", "b", "a", "a", "a"],
        "group": [7, 7, 10, 10, 9, 9],
    }
    write(tmp_path / "train.parquet", columns)
    write(tmp_path / "test.parquet", columns)
    dataset = load(str(tmp_path))
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.y.tolist() == [1, 0, 1, 0, 1, 0]
    assert dataset.domains == ("a", "b")
    assert dataset.train.domain is not None
    assert dataset.train.domain.tolist() == [1, 1, 1, 0, 0, 0]
    assert dataset.train.group is not None
    assert dataset.train.group.tolist() == [0, 0, 2, 2, 1, 1]
    assert torch.equal(dataset.train.x[5:], chw(noise(1, seed=9)))


def test_names_from_the_schema(tmp_path: Path) -> None:
    columns: dict[str, object] = {
        "image": [png(p) for p in noise(4)], "label": [0, 1, 0, 1], "domain": ["u", "v", "v", "u"]
    }  # fmt: skip
    own = {"label_names": json.dumps(["a", "b", "c"]), "domain_names": json.dumps(["v", "u"])}
    features = {"label": {"names": ["p", "q"], "_type": "ClassLabel"}}
    for name, metadata in (
        ("own", own),
        ("hub", {"huggingface": json.dumps({"info": {"features": features}})}),
    ):
        write(tmp_path / name / "train.parquet", columns, metadata)
        write(tmp_path / name / "test.parquet", columns, metadata)
    assert load(str(tmp_path / "own")).classes == ("a", "b", "c")
    assert load(str(tmp_path / "own")).domains == ("v", "u")
    assert load(str(tmp_path / "hub")).classes == ("p", "q")


def test_domains_as_numbers_get_their_names(tmp_path: Path) -> None:
    columns: dict[str, object] = {
        "image": [png(p) for p in noise(9)],
        "label": [0] * 9,
        "domain": [1, 0, 1] * 3,
    }
    path = write(
        tmp_path / "a.parquet", columns, {"domain_names": json.dumps(["site B", "site A"])}
    )
    dataset = load(str(path))
    assert dataset.domains == ("site B", "site A")
    assert dataset.train.domain is not None
    assert dataset.test.domain is not None
    assert int(dataset.train.domain.sum() + dataset.test.domain.sum()) == 6


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"x"], "target": [0]}, r"no column 'label': say which .* it has: image, target"),
        ({"pixels": [b"x"] * 9, "label": [0, 1, 2] * 3}, r"row 0 .* of .*a\.parquet cannot be decoded"),
        ({"image": [b"x"], "label": [[0]]}, "column 'label' .* holds list.*: it must hold integers or names"),
        ({"image": [b"x", b"y"], "label": [0, None]}, "the label in row 1 .* is missing"),
        ({"image": ["x"], "label": [0]}, "row 0 .* of .* names the image 'x' .*, which is not a file in"),
        ({"image": [png(noise(1)[0])] * 2, "label": [0, -1]}, "label -1 in .*: labels must be integers from 0"),
        ({"image": [png(noise(1)[0])] * 2, "label": [0, 999]}, "no sample has label 1, 2, .* has label 999: number"),
        ({"image": [b"junk"] * 5, "label": [0] * 5}, r"image in row 0 .* of .*a\.parquet cannot be decoded"),
        ({"image": [b""] + [None] * 4, "label": [0] * 5}, r"row . .* of .* cannot be decoded"),
        ({"image": [png(noise(1)[0])], "label": [0]}, "has only 1 sample, too few to hold out a test part"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table(
    tmp_path: Path, columns: dict[str, object], message: str
) -> None:
    fails(write(tmp_path / "a.parquet", columns), message)


def test_labels_beyond_the_names(tmp_path: Path) -> None:
    columns: dict[str, object] = {"image": [png(p) for p in noise(2)], "label": [0, 2]}
    path = write(tmp_path / "a.parquet", columns, {"label_names": json.dumps(["a", "b"])})
    fails(path, r"label 2 in .* \(2 classes are named\)")
    columns["label"] = ["a", "c"]
    fails(
        write(path, columns, {"label_names": json.dumps(["a", "b"])}),
        "label 'c' in row . .* is not among the classes: a, b",
    )


def test_damaged_and_empty_files(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    fails(path, r"a\.parquet cannot be read as Parquet")
    (tmp_path / "b.parquet").write_bytes(b"")
    fails(tmp_path / "b.parquet", r"b\.parquet is empty: it needs a header and rows")
    import pyarrow as pa

    fails(
        write(
            tmp_path / "c.parquet",
            {"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())},
        ),
        "has no row: it needs at least one",
    )
    (tmp_path / "d.xlsx").write_text("x")
    fails(tmp_path / "d.xlsx", "is not a .parquet file, and none of .csv")


# Folders


def test_class_folders(tmp_path: Path) -> None:
    write_folder(tmp_path, {"dog": 5, "cat": 10})
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "dog" / ".hidden.png").write_bytes(b"not an image either")
    with pytest.warns(DataWarning, match=r"not read as images \(\.txt\)"):
        dataset = load(str(tmp_path))
    assert dataset.classes == ("cat", "dog")
    assert dataset.domains == ()
    assert torch.bincount(dataset.train.y).tolist() == [8, 4]
    assert torch.bincount(dataset.test.y).tolist() == [2, 1]
    cats = torch.cat([dataset.train.x[dataset.train.y == 0], dataset.test.x[dataset.test.y == 0]])
    assert sorted(cats.flatten(1).tolist()) == sorted(chw(noise(10, seed=1)).flatten(1).tolist())


def test_domain_folders_below_train_and_test(tmp_path: Path) -> None:
    names = ("photo/2", "photo/10", "art/2")
    write_folder(tmp_path / "train", dict.fromkeys(names, 3))
    write_folder(tmp_path / "test", dict.fromkeys(names, 1), seed=9)
    dataset = load(str(tmp_path))
    assert dataset.classes == ("2", "10")  # numbers by value
    assert dataset.domains == ("art", "photo")
    assert dataset.train.domain is not None
    assert list(zip(dataset.train.domain.tolist(), dataset.train.y.tolist(), strict=True))[::3] == [
        (0, 0),
        (1, 1),
        (1, 0),
    ]
    assert len(dataset.test) == 3
    assert dataset.name == str(tmp_path)


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    fails(tmp_path, "holds no image: it has no files")
    write_folder(tmp_path / "mixed", {"cat": 1, "photo/cat": 1})
    fails(tmp_path / "mixed", "found 2 images at 2 levels")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").write_bytes(png(noise(1)[0]))
    fails(tmp_path / "flat", "must hold images in class folders")
    write_folder(tmp_path / "bad", {"cat": 3})
    (tmp_path / "bad" / "cat" / "001.png").write_bytes(b"junk")
    fails(tmp_path / "bad", re.escape(str(Path("cat") / "001.png")) + " cannot be decoded")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 3})
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    fails(tmp_path, r"cannot read .*gone\.png \(No such file or directory\)")


def test_a_cut_off_image_is_an_error(tmp_path: Path) -> None:
    out = BytesIO()
    Image.fromarray(noise(1, (64, 64, 3))[0]).save(out, format="jpeg")
    write_folder(tmp_path, {"cat": 5})
    (tmp_path / "cat" / "zzz.jpg").write_bytes(out.getvalue()[:600])
    fails(tmp_path, r"zzz\.jpg cannot be decoded")


# Sizes and colours


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    images = [png(noise(1, shape)[0]) for shape in ((4, 6, 3), (5, 5, 3))] * 5
    path = write(tmp_path / "a.parquet", {"image": images, "label": [0] * 10})
    fails(path, r"differ in size \(6x4, 5x5\): give one size for all, as size=32")
    assert load(str(path), size=3).shape == (3, 3, 3)
    write_images(tmp_path / "b" / "train.parquet")
    write(tmp_path / "b" / "test.parquet", {"image": [png(noise(1, (5, 5, 3))[0])], "label": [0]})
    fails(tmp_path / "b", r"differ in size \(4x4, 5x5\)")


def test_images_need_not_be_square(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", {"image": [png(p) for p in noise(10, (4, 6, 3))], "label": [0] * 10}
    )
    assert load(str(path)).shape == (3, 4, 6)


def test_grey_becomes_colour_if_any_image_has_colour(tmp_path: Path) -> None:
    grey, colour = noise(600, (4, 4)), noise(1)
    write(tmp_path / "train.parquet", {"image": [png(p) for p in grey], "label": [0] * 600})
    write(tmp_path / "test.parquet", {"image": [png(grey[0])], "label": [0]})
    assert load(str(tmp_path)).shape == (1, 4, 4)
    write(tmp_path / "test.parquet", {"image": [png(p) for p in colour], "label": [0]})
    dataset = load(str(tmp_path))
    assert torch.equal(
        dataset.train.x, torch.from_numpy(np.stack(grey))[:, None].expand(-1, 3, -1, -1)
    )
    assert torch.equal(dataset.test.x, chw(colour))


def test_other_modes(tmp_path: Path) -> None:
    pixels = noise(1)[0]
    deep = BytesIO()
    Image.fromarray((noise(1, (4, 4))[0].astype(np.uint16) << 8) + 255).save(deep, format="png")

    def one(image: bytes) -> torch.Tensor:
        write(tmp_path / "train.parquet", {"image": [image], "label": [0]})
        write(tmp_path / "test.parquet", {"image": [image], "label": [0]})
        return load(str(tmp_path)).train.x

    opaque = np.full((4, 4, 1), 255, np.uint8)
    assert torch.equal(one(png(np.concatenate([pixels, opaque], axis=2))), chw([pixels]))
    assert torch.equal(
        one(deep.getvalue())[0, 0], torch.from_numpy(noise(1, (4, 4))[0])
    )  # upper bits kept
    assert set(one(png(noise(1, (4, 4))[0], "1")).flatten().tolist()) == {0, 255}
    assert one(png(noise(1, (4, 4))[0], "LA")).shape == (1, 1, 4, 4)
    assert set(one(png(np.full((4, 4), 7, np.uint8), "P")).flatten().tolist()) == {7}


# The rest


def test_an_empty_class_folder_is_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "pets", {"cat": 6, "dog": 6})
    assert load(str(tmp_path / "pets")).classes == ("cat", "dog")
    (tmp_path / "pets" / "bird").mkdir()
    fails(
        tmp_path / "pets",
        r"folder .*bird holds no image .*'bird' would be empty: put images there, or remove",
    )
    (tmp_path / "pets" / "bird" / "notes.txt").write_text("no image")
    fails(tmp_path / "pets", "bird holds no image")
    shutil.rmtree(tmp_path / "pets" / "bird")
    (tmp_path / "pets" / ".thumbnails").mkdir()
    assert load(str(tmp_path / "pets")).classes == ("cat", "dog")


def test_a_class_that_one_domain_or_part_lacks_is_no_empty_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "train", {"photo/cat": 4, "photo/dog": 4, "art/cat": 4})
    write_folder(tmp_path / "a" / "test", {"photo/cat": 4, "art/cat": 4})
    for lacking in ("train/art/dog", "test/photo/dog"):
        (tmp_path / "a" / lacking).mkdir()
    assert load(str(tmp_path / "a")).classes == ("cat", "dog")
    (tmp_path / "a" / "train" / "sketch" / "cat").mkdir(parents=True)
    fails(tmp_path / "a", "sketch holds no image .*'sketch' would be empty")


def test_numbers_with_gaps_need_names(tmp_path: Path) -> None:
    columns = {"image": [png(p) for p in noise(12)], "label": [0, 1, 7] * 4}
    fails(write(tmp_path / "a.parquet", columns), r"no sample has label 2, .* has label 7: number")
    named = {b"label_names": json.dumps([f"class {k}" for k in range(8)]).encode()}
    write(tmp_path / "b.parquet", columns, named)  # type: ignore[arg-type]
    assert len(load(str(tmp_path / "b.parquet")).classes) == 8


def test_only_paths_are_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "here" / "pets", {"cat": 2, "dog": 2})
    write_folder(tmp_path / "home" / "wards", {"a": 2, "b": 2})
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("EKIDEN_DATA", str(tmp_path / "home"))
    found = str(tmp_path / "here" / "pets")
    assert [located(name) for name in ("digits", "cifar10", "wards", "pets", "./pets", found)] == [
        "digits", "cifar10", "wards", found, found, found
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"without": ["Ulmm"]}, "unknown client 'Ulmm': did you mean 'Ulm'"),
        ({"without": "Ulm"}, "classes and without are lists of names, not 'Ulm'"),
        ({"without": 3}, "without 3 is of the wrong type"),
        ({"classes": "ab"}, "are lists of names, not 'ab'"),
        ({"like": 3}, "like 3 is of the wrong type: it must be of type Dataset or None"),
        ({"whole": "yes"}, "whole 'yes' is of the wrong type"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(given: dict[str, Any], line: str) -> None:
    table = pa.table({"site": ["Ulm", "Bonn"] * 5, "x": [*range(10)], "label": [0, 1] * 5})
    with pytest.raises(UserError, match=line):
        load(table, group_column="site", **given)


def test_owners_are_left_out_only_where_rows_have_some() -> None:
    table = pa.table({"x": [*range(10)], "label": [0, 1] * 5})
    with pytest.raises(UserError, match="unknown client 'Ulm'"):
        load(table, without=["Ulm"])
