"""A user's own files, frames and arrays: what works, and the one line that says what is wrong."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.core.tasks import Classification, MultiLabel, Regression
from ekiden.data import Dataset, federate, join, load, split
from ekiden.methods import FedAvg
from ekiden.readers.kinds import Arrays, Images, Table
from tests.readers.own_data import Rows, bad, clinic, csv, others, parquet, patients, sentences

pytestmark = pytest.mark.usefixtures("no_data")


# Tables


@pytest.mark.filterwarnings("ignore:.* the same as the label")
@pytest.mark.parametrize(
    ("labels", "task"),
    [(("died",), Classification), (("days",), Regression), (("cough", "fever"), MultiLabel)],
)
def test_the_task_is_what_the_labels_look_like(labels: tuple[str, ...], task: type[Any]) -> None:
    data = load(
        patients(),
        label_column=labels,
        group_column="ward",
        drop_columns=others(*labels),
        min_count=2,
    )
    silos = split(data, "natural")
    assert isinstance(silos.dataset.task, task)
    assert silos.dataset.classes == (labels if task is not Classification else ("no", "yes"))
    before = ekiden.run("fedavg", silos, stop_after=1).metrics[-1]["loss"]
    assert np.isfinite(before)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(tmp_path: Path, delimiter: str) -> None:
    path = csv(tmp_path / "a.csv", patients(), delimiter)
    data = load(path, label_column="died", drop_columns=["ward", *others("died")])
    assert isinstance(data.inputs, Table)
    assert data.inputs.numeric == ("age", "dose")


def test_decimal_commas_are_read(tmp_path: Path) -> None:
    text = "age;label\n" + "\n".join(f"{k},5;{'ab'[k % 2]}" for k in range(40))
    (tmp_path / "a.csv").write_text(text)
    assert 1.5 in load(str(tmp_path / "a.csv")).train.x[:, 0]


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame, pa.table, dict])
def test_frames_of_all_libraries(frame: Callable[[Rows], Any]) -> None:
    data = load(
        frame(patients()), label_column="died", group_column="ward", drop_columns=others("died")
    )
    assert data.shape == (3,)
    assert data.groups == ("east", "north", "south")


# Silos


def write_silos(
    folder: Path, suffix: str = ".csv", columns: Sequence[str] = ("age", "sex", "dose", "died")
) -> list[str]:
    paths = []
    for k, name in enumerate(("north", "south")):
        rows = {c: v for c, v in patients(40, seed=k).items() if c in columns}
        path = folder / f"{name}{suffix}"
        paths.append(csv(path, rows) if suffix == ".csv" else parquet(path, rows))
    return paths


def test_silos_as_files_a_folder_and_a_toml(tmp_path: Path) -> None:
    paths = write_silos(tmp_path / "silos")
    (tmp_path / "named.toml").write_text(
        '[silos]\n"ward 1" = "silos/north.csv"\nsouth = "silos/south.csv"\n'
    )
    for given, names in (
        (paths, ["north", "south"]),
        ([str(tmp_path / "silos")], ["north", "south"]),
        ([str(tmp_path / "named.toml")], ["ward_1", "south"]),
    ):
        data = split(join(given, label_column="died"), "natural", val_fraction=0.0)
        assert sorted(c.name for c in data.clients) == sorted(names)
        assert [len(c.train) + len(c.test) for c in data.clients] == [40, 40]
    silos = federate(paths, label_column="died")
    assert [c.name for c in silos.clients] == ["north", "south"]


def test_a_silo_may_have_its_own_test_part(tmp_path: Path) -> None:
    columns = ("age", "sex", "died")
    for k, (name, n) in enumerate((("north/train", 30), ("north/test", 7), ("south/train", 40))):
        csv(
            tmp_path / f"{name}.csv", {c: v for c, v in patients(n, seed=k).items() if c in columns}
        )
    north, south = split(
        join([str(tmp_path)], label_column="died"), "natural", val_fraction=0.0
    ).clients
    assert (len(north.train), len(north.test)) == (30, 7)
    assert (len(south.train), len(south.test)) == (32, 8)


def test_folders_of_images_as_silos(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for silo in ("left", "right"):
        for label in ("cat", "dog"):
            (tmp_path / silo / label).mkdir(parents=True)
            for k in range(6):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / silo / label / f"{k}.png")
    data = split(join([str(tmp_path)]), "natural")
    again = split(join([str(tmp_path)]), "natural")  # from the cache
    assert data.dataset.shape == (3, 8, 8)
    assert data.dataset.classes == ("cat", "dog")
    assert [c.name for c in data.clients] == [c.name for c in again.clients] == ["left", "right"]
    assert torch.equal(data.dataset.train.x, again.dataset.train.x)


# Arrays


def test_signals_and_embeddings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2, 32)).astype(np.float32)
    y = np.arange(60) % 2
    x[y == 1] += np.sin(np.arange(32)).astype(np.float32) * 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    (tmp_path / "pair").mkdir()
    np.save(tmp_path / "pair" / "x.npy", x)
    np.save(tmp_path / "pair" / "y.npy", y)
    from safetensors.numpy import save_file

    save_file({"x": x, "y": y, "site": y % 3}, tmp_path / "a.safetensors")
    flat = {"emb": [list(map(float, row)) for row in x[:, 0]], "label": y.tolist()}
    sources: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = [
        (str(tmp_path / "a.npz"), (2, 32), {}),
        (str(tmp_path / "pair"), (2, 32), {}),
        (str(tmp_path / "a.safetensors"), (2, 32), {"group_column": "site"}),
        (parquet(tmp_path / "a.parquet", flat), (32,), {}),
        (flat, (32,), {"array_column": "emb"}),
    ]
    for source, shape, more in sources:
        data = load(source, **more)
        assert data.shape == shape
        assert data.inputs == Arrays()
        assert (len(data.train), len(data.test)) == (48, 12)
    silos = split(load(str(tmp_path / "a.npz")), "iid", 2)
    result = ekiden.run(
        FedAvg(rounds=2, epochs=8), silos, training=ekiden.Training(lr=1e-2, batch_size=8)
    )
    assert result.accuracy > 0.9  # by cnn_signal
    assert Arrays().encode(str(tmp_path / "a.npz")).shape == (60, 2, 32)


# Images


def test_sizes_fits_and_windows(tmp_path: Path) -> None:
    for label, size in (("a", (20, 10)), ("b", (10, 30))):
        (tmp_path / "mixed" / label).mkdir(parents=True)
        for k in range(5):
            pixels = np.zeros((size[1], size[0]), dtype=np.uint8)
            pixels[:, : size[0] // 2] = 255
            Image.fromarray(pixels).save(tmp_path / "mixed" / label / f"{k}.png")
    with pytest.raises(
        UserError, match=r"differ in size \(20x10, 10x30\): give one size for all, as size=32"
    ):
        load(str(tmp_path / "mixed"))
    assert load(str(tmp_path / "mixed"), size=8).shape == (1, 8, 8)
    cropped = load(str(tmp_path / "mixed"), size=8, fit="crop")
    assert cropped.inputs == Images(8, "crop")
    image = cropped.train.x[cropped.train.y == 0][0, 0]
    assert image[:, 0].tolist() == [255] * 8
    assert image[:, -1].tolist() == [0] * 8
    encoded = Images(8, "crop").encode([tmp_path / "mixed" / "a" / "0.png"])
    assert torch.equal(encoded[0, 0], image)


def test_deep_images_keep_their_range(tmp_path: Path) -> None:
    for k in range(10):
        (tmp_path / "xy"[k % 2]).mkdir(exist_ok=True)
        ramp = np.linspace(0, 4095, 64).reshape(8, 8).astype(np.uint16)  # 12 bits in 16
        Image.fromarray(ramp).save(tmp_path / "xy"[k % 2] / f"{k}.{('png', 'tiff')[k % 2]}")
    with pytest.raises(
        UserError, match=r"16 bits and values up to 4095 only.* pixel_window=\[0, 4095\]"
    ):
        load(str(tmp_path))
    data = load(str(tmp_path), pixel_window=(0, 4095))
    assert (
        sorted(set(data.train.x[0].flatten().tolist()))
        == np.unique(np.rint(ramp * (255 / 4095))).astype(int).tolist()
    )
    assert load(str(tmp_path), pixel_window=(0, 100)).train.x[0].flatten()[2:].min() == 255


def test_own_images_are_augmented_at_the_size_of_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k in range(20):
        file = tmp_path / "photos" / ("cat", "dog")[k % 2] / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (30, 20, 3), dtype=np.uint8)).save(file)
    plain = load(str(tmp_path / "photos"), size=16)
    data = load(
        str(tmp_path / "photos"), size=16, augment_crop=2, augment_flip=True, augment_rotation=10
    )
    assert not plain.augment.active
    assert data.augment == ekiden.Augment(crop=2, flip=True, rotation=10.0)
    assert torch.equal(data.train.x, plain.train.x)  # samples stay as they are
    assert data.augment(data.train.x).shape == data.train.x.shape
    files = [str(tmp_path / "photos" / f"{name}.csv") for name in ("a", "b")]
    for start, path in zip((0, 10), files, strict=True):
        images = [f"{('cat', 'dog')[k % 2]}/{k}.png" for k in range(start, start + 10)]
        csv(Path(path), {"image": images, "label": ["x", "y"] * 5})
    silos = join(files, size=16, image_column="image", augment_flip=True)
    assert silos.augment == ekiden.Augment(flip=True)
    assert federate(
        files, image_column="image", augment_flip=True
    ).dataset.augment == ekiden.Augment(flip=True)
    assert load("digits", augment_flip=True).augment == ekiden.Augment(flip=True)


def test_augmentation_is_for_images() -> None:
    with pytest.raises(
        UserError, match=r"augment_flip .* are for images, but these samples have shape"
    ):
        load(patients(), label_column="died", drop_columns=others("died"), augment_flip=True)
    with pytest.raises(UserError, match="augment_rotation"):
        load("digits", augment_rotation=200)


def test_augmentation_is_a_setting_of_a_run(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = (
        "--clients",
        "2",
        "--partition",
        "iid",
        "--epochs",
        "1",
        "--augment-crop",
        "1",
        "--augment-flip",
    )
    code, said = command("run", "fedseq", *flags)
    assert code == 0, said
    code, said = command("run", "fedseq", *flags[:-3], "--out", "plain")
    assert code == 0, said
    augmented, plain = (Path(p) / "fedseq-digits-seed0" for p in ("runs", "plain"))
    config = json.loads((augmented / "config.json").read_text())
    assert config["plan"]["reading"] == {"augment_crop": 1, "augment_flip": True}
    assert (augmented / "model.safetensors").read_bytes() != (
        plain / "model.safetensors"
    ).read_bytes()
    code, said = command("evaluate", str(augmented))
    assert code == 0, said


def test_dicom_and_nifti_slices(tmp_path: Path) -> None:
    pydicom, nibabel = pytest.importorskip("pydicom"), pytest.importorskip("nibabel")
    volume = np.zeros((8, 8, 3), dtype=np.int16)
    volume[1:, :, 1], volume[1:, :, 2] = 500, 1000
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "scan.nii.gz")
    rows = {"file": ["scan.nii.gz#2", "scan.nii.gz"] * 5, "label": ["top", "middle"] * 5}
    path = csv(tmp_path / "slices.csv", rows)
    with pytest.raises(
        UserError, match=r"its pixels go from .*: say which values .* by pixel_window LOW HIGH"
    ):
        load(path, image_column="file")
    with pytest.warns(ekiden.DataWarning, match="5 of 10 images in .* the middle one is read"):
        data = load(path, image_column="file", pixel_window=(0, 1000))
    assert {int(x.max()) for x in data.train.x} == {128, 255}
    assert data.classes == ("middle", "top")
    with pytest.raises(UserError, match="it has 3 slices, so there is no slice 3"):
        Images().encode([tmp_path / "scan.nii.gz#3"])

    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    dicom = FileDataset(str(tmp_path / "a.dcm"), {}, file_meta=meta, preamble=b"\0" * 128)
    dicom.Rows = dicom.Columns = 4
    dicom.SamplesPerPixel, dicom.BitsAllocated, dicom.BitsStored, dicom.HighBit = 1, 16, 12, 11
    dicom.PixelRepresentation, dicom.PhotometricInterpretation = 0, "MONOCHROME2"
    dicom.RescaleSlope, dicom.RescaleIntercept = 1, -1000
    dicom.PixelData = np.full((4, 4), 1500, dtype=np.uint16).tobytes()
    dicom.save_as(tmp_path / "a.dcm")
    x = Images(window=(0, 1000)).encode([tmp_path / "a.dcm", (tmp_path / "a.dcm").read_bytes()])
    assert (x == 128).all()  # 1500 - 1000 of 1000, rounded


# In whole runs


def test_a_run_from_the_command_line_can_be_evaluated_and_resumed(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = csv(tmp_path / "a.csv", patients(90))
    drop = others("died")
    columns = [
        "--label-column",
        "died",
        "--group-column",
        "ward",
        "--min-count",
        "2",
        "--drop-columns",
        *drop,
    ]
    code, said = command(
        "run", "fedavg", "--rounds", "2", "--epochs", "1", "--data", path, *columns
    )
    assert code == 0, said
    run = tmp_path / "runs" / "fedavg-a-seed0"
    config = json.loads((run / "config.json").read_text())
    assert config["inputs"]["kind"] == "table"
    assert list(config["clients"]) == ["east", "north", "south"]
    assert config["plan"]["reading"]["group_column"] == "ward"
    (run / "state.safetensors").unlink()
    assert command("resume", str(run))[0] == 0
    code, said = command("evaluate", str(run))
    assert code == 0, said
    assert "east" in said
    code, said = command(
        "evaluate", str(run), "--data", csv(tmp_path / "b.csv", patients(50, seed=5))
    )
    assert code == 0, said
    assert "on 50 of 50 rows" in said


def test_silos_from_the_command_line(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_silos(tmp_path / "wards")
    code, said = command(
        "run", "fedseq", "--epochs", "1", "--silos", "wards", "--label-column", "died"
    )
    assert code == 0, said
    assert json.loads((tmp_path / "runs/fedseq-wards-seed0/config.json").read_text())[
        "clients"
    ].keys() == {
        "north",
        "south",
    }
    code, said = command(
        "data", "--silos", "wards", "--label-column", "died", "--draw", str(tmp_path / "a.png")
    )
    assert code == 0, said
    assert "north" in said


# What is wrong, in one line


def half(rows: Rows) -> Rows:
    return {k: v[: len(v) // 2] for k, v in rows.items()}


def broken(tmp_path: Path, name: str, content: bytes) -> str:
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


FILES: list[tuple[str, str, bytes, str]] = [
    ("an empty file", "a.csv", b"", "a.csv is empty: it needs a header and rows"),
    ("a header alone", "a.csv", b"age,label\n", "a.csv has no row: it needs"),
    ("a broken line", "a.csv", b"age,label\n1,a\n1,2,3\n", "a.csv has 3 cells in row 1 .*names 2 columns"),
    ("another encoding", "a.csv", "n\xe4me,label\n1,a\n".encode("latin-1") + b"1,a\n" * 9, "is not written in UTF-8 .byte 1."),  # noqa: E501
    ("not Parquet", "a.parquet", b"PAR1 no", "a.parquet cannot be read as Parquet"),
    ("a spreadsheet", "a.xlsx", b"PK", "a.xlsx is not a .parquet file, and none of .csv"),
    ("two columns of one name", "a.csv", b"age,age,label\n1,2,a\n", "has two columns called 'age'"),
    ("no numpy file", "a.npz", b"PK no", "a.npz cannot be read"),
    ("no safetensors", "a.safetensors", b"12345678no", "a.safetensors cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "line"), [f[1:] for f in FILES], ids=[f[0] for f in FILES]
)
def test_mistakes_in_a_file(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    with pytest.raises(UserError, match=line):
        load(broken(tmp_path, name, content))


def test_mistakes_in_arrays(tmp_path: Path) -> None:
    x, y = np.ones((20, 3), dtype=np.float32), np.arange(20) % 2

    def fails(line: str, **arrays: Any) -> None:
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(UserError, match=line):
            load(str(tmp_path / "a.npz"))

    fails("no array 'x' of samples .* it has z, y", z=x, y=y)
    fails("no array 'y' of labels .* it has x", x=x)
    fails("holds 20 samples and 10 values in 'y'", x=x, y=y[:10])
    fails("has NaN or infinity in row 3", x=np.where(np.arange(20)[:, None] == 3, np.nan, x), y=y)
    fails("it holds Python objects", x=np.array([{}, {}], dtype=object), y=y)
    (tmp_path / "c" / "cat").mkdir(parents=True)
    Image.new("L", (2, 2)).save(tmp_path / "c" / "cat" / "a.png")
    with pytest.raises(UserError, match="is a folder of images, which has no columns"):
        load(str(tmp_path / "c"), label_column="y")


def test_mistakes_among_silos(tmp_path: Path, command: Callable[..., tuple[int, str]]) -> None:
    north, south = write_silos(tmp_path / "a")
    rows = {k: v for k, v in patients(40).items() if k in ("age", "sex", "dose", "died")}

    def fails(line: str, *silos: str, **options: Any) -> None:
        with pytest.raises(UserError, match=line):
            split(join(silos, **({"label_column": "died"} | options)), "natural")

    fails("there is no file or folder '.*nort.csv'", str(tmp_path / "nort.csv"), south)
    fails("a federation needs two silos or more", north)
    fails("two silos are called 'a-north'", north, north)
    fails(
        "column 'dose', which .*north.csv has", north, csv(tmp_path / "b.csv", bad(rows, dose=None))
    )
    fails(
        "b.csv has the column 'extra', which .* does not have",
        north,
        csv(tmp_path / "b.csv", rows | {"extra": [1] * 40}),
    )
    fails(
        "'age' of .*b.csv holds text .'old' in row 0.*numbers",
        north,
        csv(tmp_path / "b.csv", bad(rows, age=["old"] * 40)),
    )
    fails("several silos and group_column both", north, south, group_column="sex")
    np.savez(tmp_path / "x.npz", x=np.ones((20, 2)), died=np.arange(20) % 2)
    fails("north.csv holds a table, .*x.npz arrays", north, str(tmp_path / "x.npz"))
    (tmp_path / "s.toml").write_text('[silos]\nnorth = "a/nowhere.csv"\nsouth = "a/south.csv"\n')
    fails("there is no file or folder .*nowhere.csv' for the silo north", str(tmp_path / "s.toml"))
    (tmp_path / "s.toml").write_text('silos = ["a"]')
    fails("must name the silos in one table", str(tmp_path / "s.toml"))
    (tmp_path / "empty").mkdir()
    fails("holds no folder and no file of a silo", str(tmp_path / "empty"))
    for flags, line in (
        (("--silos", north, south, "--partition", "iid"), "--silos says which silo holds what"),
        (("--silos", north, south, "--data", north), "--silos and --data both say where"),
        (("--silos",), "--silos needs a value"),
    ):
        code, said = command("run", "fedavg", *flags, "--label-column", "died")
        assert (code, line in said) == (2, True), said


def test_networks_that_do_not_read_such_samples_say_so() -> None:
    table, texts = (
        clinic(patients(), min_count=2),
        split(load(sentences(), text_column="text", drop_columns="site"), "iid", 2),
    )
    with pytest.raises(
        UserError, match=r"mlp needs numbers, but these samples are a table, .*table_mlp, table_tr"
    ):
        ekiden.run("fedavg", table, "mlp")
    with pytest.raises(
        UserError, match=r"table_mlp needs .*, but these samples are texts, .*text_mean"
    ):
        ekiden.run("fedavg", texts, "table_mlp")
    with pytest.raises(UserError, match=r"lenet needs images .*, but these samples are texts"):
        ekiden.run("fedavg", texts, "lenet")


def described(data: Dataset) -> tuple[object, ...]:
    return data.shape, data.classes, data.task


def test_data_sets_of_other_libraries() -> None:
    import datasets

    rows = sentences()
    table = datasets.Dataset.from_dict(rows)
    wanted = described(load(rows, text_column="text", group_column="site"))
    assert described(load(table, text_column="text", group_column="site")) == wanted
    assert (
        described(load(table.to_iterable_dataset(), text_column="text", group_column="site"))
        == wanted
    )

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for k in range(30):
                yield torch.full((4,), k + 1.0), k % 2

    stream: Any = Stream()
    silos = federate(
        [stream, torch.utils.data.TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)]
    )
    assert silos.dataset.shape == (4,)
    assert [len(c.train) + len(c.val) for c in silos.clients] == [24, 24]


@pytest.mark.slow
def test_runs_that_read_other_columns_are_not_the_same(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = csv(tmp_path / "a.csv", patients(90))
    for label in ("cough", "fever"):
        columns = (
            "--label-column",
            label,
            "--group-column",
            "ward",
            "--drop-columns",
            *others(label),
        )
        code, said = command("run", "fedseq", "--epochs", "1", "--data", path, *columns)
        assert code == 0, said
    code, said = command("report", *map(str, (tmp_path / "runs").iterdir()), "-o", "page")
    assert code == 0, said
    assert "left out" not in said
    code, said = command("compare", *map(str, (tmp_path / "runs").iterdir()))
    assert "a.csv, cough" in said
    assert "a.csv, fever" in said
