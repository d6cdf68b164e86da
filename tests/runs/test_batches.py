"""Samples of files to predict, read in batches, as in training."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ekiden import load, load_model
from ekiden.runs.batches import SampleReader
from tests.runs.predicted import reported

Command = Callable[..., tuple[int, str]]


def test_tables_of_images_are_read_by_rows(
    run_on_digits: Path, tmp_path: Path, command: Command
) -> None:
    test = load("digits").test
    images = []
    for x in test.x[:, 0].numpy():
        buffer = io.BytesIO()
        Image.fromarray(x).save(buffer, "png")
        images.append(buffer.getvalue())
    pq.write_table(
        pa.table({"picture": images, "other": list(range(len(images)))}),
        tmp_path / "images.parquet",
    )
    np.save(tmp_path / "images.npy", test.x.numpy())
    answers = {}
    for name, flags in (("images.parquet", ["--column", "picture"]), ("images.npy", [])):
        code, printed = command("predict", str(run_on_digits), str(tmp_path / name), *flags)
        assert code == 0, printed
        answers[name] = pd.read_csv(io.StringIO(printed), dtype={"prediction": str})
    for found in answers.values():
        assert (found.prediction.astype(int) == test.y.numpy()).mean() == reported(run_on_digits)
        assert found.row.tolist() == list(range(len(test)))
    assert (answers["images.npy"].prediction == answers["images.parquet"].prediction).all()


def test_memory_does_not_grow_with_the_number_of_samples(
    run_on_digits: Path, tmp_path: Path
) -> None:
    model = load_model(run_on_digits)
    np.save(tmp_path / "many.npy", np.zeros((1000, *model.shape), np.uint8))
    sizes = [
        len(batch.x)
        for batch in SampleReader(model.inputs, model.shape, batch=64).read([tmp_path / "many.npy"])
    ]
    assert (max(sizes), sum(sizes)) == (64, 1000)


def test_texts_are_read_from_files_and_tables(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (["good", "fine", "nice"], ["bad", "poor", "awful"])
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 200)
    frame = pd.DataFrame(
        {"review": [" ".join(draw.choice(words[k], draw.integers(1, 6))) for k in labels]}
    )
    frame["label"] = np.array(["pos", "neg"])[labels]
    frame["shop"] = np.arange(200) % 2
    (tmp_path / "data").mkdir()
    frame[:150].to_parquet("data/train.parquet", index=False)
    frame[150:].to_parquet("data/test.parquet", index=False)
    flags = ["--text-column", "review", "--group-column", "shop", "--partition", "natural"]
    code, printed = command(
        "run", "fedavg", "--data", "data", *flags, "--rounds", "2", "--epochs", "3"
    )
    assert code == 0, printed
    run_folder = tmp_path / "runs" / "fedavg-data-seed0"
    code, printed = command(
        "predict", str(run_folder), "data/test.parquet", "-o", "table.parquet"
    )  # knows the column
    assert code == 0, printed
    table = pd.read_parquet("table.parquet")
    assert (table.prediction.to_numpy() == frame.label[150:].to_numpy()).mean() == reported(
        run_folder
    )
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(frame.review[150:]):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text)
    code, printed = command("predict", str(run_folder), "texts")
    assert code == 0, printed
    files = pd.read_csv(io.StringIO(printed))
    assert files.prediction.tolist() == table.prediction.tolist()
    (tmp_path / "texts" / "latin.txt").write_bytes("schön".encode("latin-1"))
    code, printed = command("predict", str(run_folder), "texts")
    assert (code, printed) == (
        2,
        "ekiden: texts/latin.txt cannot be used: it is not UTF-8 text: convert or remove it\n",
    )


def test_arrays_in_npz_and_safetensors_are_read_as_in_training(
    run_on_digits: Path, tmp_path: Path, command: Command
) -> None:
    from safetensors.numpy import save_file

    test = load("digits").test
    x = test.x.numpy()
    np.savez(tmp_path / "images.npz", x=x)
    np.savez(tmp_path / "flat.npz", pictures=x[:, 0], other=np.zeros(3))  # (n, H, W)
    save_file({"x": x}, tmp_path / "images.safetensors")
    for name, flags in (
        ("images.npz", []),
        ("flat.npz", ["--column", "pictures"]),
        ("images.safetensors", []),
    ):
        code, said = command("predict", str(run_on_digits), str(tmp_path / name), *flags)
        assert code == 0, said
        found = pd.read_csv(io.StringIO(said), dtype={"prediction": str})
        assert (found.prediction.astype(int) == test.y.numpy()).mean() == reported(run_on_digits)
    code, said = command("predict", str(run_on_digits), str(tmp_path / "flat.npz"))
    assert (code, said.count("\n")) == (2, 1)
    assert "flat.npz has no array 'x', only pictures, other: name one of these by --column" in said


def test_dicom_and_nifti_files_are_predicted(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    nibabel = pytest.importorskip("nibabel")
    pytest.importorskip("pydicom")
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    dark, bright = draw.integers(0, 400, (8, 8, 20)), draw.integers(600, 1000, (8, 8, 20))
    for name, volume in (("dark", dark), ("bright", bright)):
        nibabel.save(nibabel.Nifti1Image(volume.astype(np.int16), np.eye(4)), f"{name}.nii.gz")
    rows = [(f"{name}.nii.gz#{k}", name) for name in ("dark", "bright") for k in range(20)]
    pd.DataFrame(rows, columns=["file", "label"]).to_csv("slices.csv", index=False)
    flags = (
        "--image-column",
        "file",
        "--pixel-window",
        "0",
        "1000",
        "--clients",
        "2",
        "--partition",
        "iid",
    )
    code, said = command(
        "run", "fedseq", "--data", "slices.csv", *flags, "--model", "mlp", "--epochs", "20"
    )
    assert code == 0, said
    dicom(tmp_path / "scan.dcm", 200)
    dicom(tmp_path / "scan.DICOM", 800)
    given = ("scan.dcm", "scan.DICOM", "dark.nii.gz", "bright.nii.gz#19")
    code, said = command("predict", "runs/fedseq-slices-seed0", *given)
    assert code == 0, said
    *table, line = said.splitlines()
    assert line.startswith(
        "ekiden: 1 of 4 images in the files given have several pages, frames or slices (up to 20)"
    )
    found = pd.read_csv(io.StringIO("\n".join(table)))
    assert found.prediction.tolist() == ["dark", "bright", "dark", "bright"]
    code, said = command(
        "predict", "runs/fedseq-slices-seed0", "."
    )  # the folder's tables name images, too
    assert code == 2
    code, said = command("predict", "runs/fedseq-slices-seed0", "bright.nii.gz#20")
    assert (code, said.count("\n")) == (2, 1)
    assert "it has 20 slices, so there is no slice 20" in said


def dicom(path: Path, value: int) -> None:
    """Write an image of one value."""
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    made = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    made.Rows = made.Columns = 8
    made.SamplesPerPixel, made.BitsAllocated, made.BitsStored, made.HighBit = 1, 16, 12, 11
    made.PixelRepresentation, made.PhotometricInterpretation = 0, "MONOCHROME2"
    made.PixelData = np.full((8, 8), value, dtype=np.uint16).tobytes()
    made.save_as(path)
