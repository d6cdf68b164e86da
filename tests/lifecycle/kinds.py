"""Small data of every kind, as files of three silos."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator
from PIL import Image

from tests.core.models import hf_folders
from tests.silos.fakes import NAMES

SILOS = NAMES
ROWS = 60
"""samples of each silo; every fifth is for the test"""
_SIDES = ((9, 9), (12, 8), (8, 14), (16, 16))


@dataclass(frozen=True)
class Kind:
    """A kind of data.

    Attributes:
        write: writes the data of one silo to a path, drawing from a generator.
        suffix: of a silo's file; "" for a folder.
        options: how the files are read: the names and values of `[data]` in a silo.toml.
        model: the network; {root} is the folder of the files.
        agreed: whether silos agree on the scaling before they start.
        metric: the headline metric.
        refused: what methods say that cannot train on such data, by method.
        columns: flags of `ekiden evaluate` that say what is in a file, which silos do not tell the
            coordinator.
        before: writes what all silos need next to their data, to the folder of the files.
        method: the method of its fast tests; with all others the tests are slow.
        export: where its fast test of predictions gets the run from, and what they are compared
            with.
    """

    write: Callable[[Path, Generator], None]
    suffix: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "auto"
    agreed: bool = False
    metric: str = "accuracy"
    refused: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()
    before: Callable[[Path], object] = lambda root: None
    method: str = "fedseq"
    export: tuple[str, str] = ("far", "python")

    def make(self, root: Path) -> list[Path]:
        """Write the files of all silos."""
        root.mkdir(parents=True, exist_ok=True)
        self.before(root)
        paths = [root / f"{name}{self.suffix}" for name in SILOS]
        for number, path in enumerate(paths):
            shutil.rmtree(path, ignore_errors=True)  # what another kind left there
            self.write(path, np.random.default_rng(number))
        return paths

    def network(self, root: Path) -> str:
        """The network, for files in `root`."""
        return self.model.replace("{root}", str(root))

    def flags(self, root: Path) -> list[str]:
        """How the files are read, for the command line."""
        words: list[str] = []
        for name, value in self.options.items():
            values = value if isinstance(value, list) else [value]
            words += [
                f"--{name.replace('_', '-')}",
                *(str(v).replace("{root}", str(root)) for v in values),
            ]
        return words

    def toml(self, path: Path, more: Mapping[str, Any]) -> str:
        """The `[data]` of a silo.toml."""
        values = {"path": path.name, **self.options, **more}
        lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        return "[data]\n" + lines.replace("{root}", str(path.parent))


def _csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")


def patients(path: Path, draw: Generator) -> dict[str, list[Any]]:
    """Rows with numbers, gaps, and categories that decide what is to be predicted."""
    age = draw.normal(55, 12, ROWS).round(1)
    dose = draw.normal(3e6, 4e5, ROWS).round()
    sex = draw.choice(["female", "male"], ROWS)
    site = draw.choice(["hand", "knee", ""], ROWS)
    risk = (age - 55) / 12 + (sex == "male") + (site == "knee") + draw.normal(0, 0.3, ROWS)
    gaps = draw.random(ROWS) < 0.2
    return {
        "age": ["" if gap else value for value, gap in zip(age, gaps, strict=True)],
        "dose": dose.tolist(),
        "sex": sex.tolist(),
        "site": site.tolist(),
        "risk": risk.round(3).tolist(),
    }


def table(path: Path, draw: Generator) -> None:
    """Classes."""
    rows = patients(path, draw)
    risk = rows.pop("risk")
    _csv(path, rows | {"died": ["yes" if r > 0.8 else "no" for r in risk]})


def regression(path: Path, draw: Generator) -> None:
    """A number to predict, far from 0 and in large units."""
    rows = patients(path, draw)
    risk = rows.pop("risk")
    _csv(path, rows | {"days": [round(5000 + 300 * r, 2) for r in risk]})


def survival(path: Path, draw: Generator) -> None:
    """A time, and whether it is that of the event."""
    rows = patients(path, draw)
    risk = np.array(rows.pop("risk"))
    due, last = draw.exponential(300 * np.exp(-risk)), draw.uniform(50, 900, ROWS)
    times = (np.minimum(due, last) + 1).round(1).tolist()
    _csv(path, rows | {"days": times, "died": (due <= last).astype(int).tolist()})


def labels(path: Path, draw: Generator) -> None:
    """Several labels a row."""
    rows = patients(path, draw)
    risk = rows.pop("risk")
    _csv(
        path, rows | {"cough": [int(r > 0.6) for r in risk], "fever": [int(r < 0.2) for r in risk]}
    )


def text(path: Path, draw: Generator) -> None:
    """Texts with a mood."""
    words = {"good": ["fine", "happy", "love"], "bad": ["dull", "sad", "hate"]}
    moods = draw.choice(list(words), ROWS)
    said = [
        " ".join(["a film", *draw.choice(words[mood], 2), *["again"] * int(draw.integers(4))])
        for mood in moods
    ]
    _csv(path, {"text": said, "mood": moods.tolist()})


def language(path: Path, draw: Generator) -> None:
    """Texts without labels."""
    _csv(path, {"text": ["one two three four " * int(draw.integers(1, 3)) for _ in range(ROWS)]})


def signals(path: Path, draw: Generator) -> None:
    """Two channels of 64 values; the frequency is the class."""
    y = draw.integers(0, 2, ROWS)
    time = np.arange(64) / 64
    wave = np.sin(2 * np.pi * (2 + 4 * y[:, None]) * time + draw.random((ROWS, 1)) * 6)
    x = np.stack([wave, -wave], 1) + draw.normal(0, 0.1, (ROWS, 2, 64))
    np.savez(path, x=x.astype(np.float32), y=y)


def embeddings(path: Path, draw: Generator) -> None:
    """A column of vectors."""
    y = draw.integers(0, 3, ROWS)
    x = draw.normal(0, 1, (ROWS, 6)) + 3 * np.eye(6)[y]
    pq.write_table(
        pa.table({"vector": x.round(4).tolist(), "kind": [f"kind {k}" for k in y]}), path
    )


def segmentation(path: Path, draw: Generator) -> None:
    """Colour images with a bright square, and which pixels it has."""
    y = np.zeros((ROWS, 16, 16), dtype=np.int64)
    for mask in y:
        top, left = draw.integers(0, 9, 2)
        mask[top : top + 7, left : left + 7] = 1
    x = draw.integers(0, 90, (ROWS, 3, 16, 16)) + 120 * y[:, None]
    np.savez(path, x=x.astype(np.uint8), y=y)


def _digits(draw: Generator) -> list[tuple[str, np.ndarray[Any, np.dtype[np.float64]]]]:
    """Class and grey values from 0 to 1 of images: a bar that stands or lies."""
    found = []
    for number in range(ROWS):
        height, width = _SIDES[number % len(_SIDES)]
        pixels = draw.random((height, width)) * 0.3
        upright = number % 2 == 0
        if upright:
            pixels[:, width // 2 - 1 : width // 2 + 1] = 1
        else:
            pixels[height // 2 - 1 : height // 2 + 1] = 1
        found.append(("upright" if upright else "flat", pixels))
    return found


def png(path: Path, draw: Generator) -> None:
    """Pictures of several sizes and modes, in class folders."""
    for number, (name, pixels) in enumerate(_digits(draw)):
        (path / name).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((255 * pixels).astype(np.uint8)).convert(
            ("L", "RGB", "P")[number % 3]
        )
        picture.save(path / name / f"{number:02}.png")


def dicom(path: Path, draw: Generator) -> None:
    """Slices in Hounsfield units, in class folders."""
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    for number, (name, pixels) in enumerate(_digits(draw)):
        (path / name).mkdir(parents=True, exist_ok=True)
        file, meta = path / name / f"{number:02}.dcm", FileMetaDataset()
        meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        made = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
        made.Rows, made.Columns = pixels.shape
        made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
        made.BitsAllocated = made.BitsStored = 16
        made.HighBit, made.PixelRepresentation = 15, 1
        made.RescaleSlope, made.RescaleIntercept = "1", "-1024"
        made.PixelData = (1024 + 400 * pixels).astype(np.int16).tobytes()
        made.save_as(file)


def nifti(path: Path, draw: Generator) -> None:
    """Volumes of three slices, in class folders."""
    import nibabel

    for number, (name, pixels) in enumerate(_digits(draw)):
        (path / name).mkdir(parents=True, exist_ok=True)
        volume = np.repeat((1000 * pixels).astype(np.int16)[:, :, None], 3, axis=2)
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path / name / f"{number:02}.nii.gz")


def _decoder(root: Path) -> None:
    """A causal language model that knows the words of `language`."""
    hf_folders.decoder(root / "pretrained" / "gpt", ["one", "two", "three", "four"])


_TABLE = {"min_count": 3}
_NO_VECTORS = "fedgram needs one vector of outputs for each sample"
KINDS: dict[str, Kind] = {
    "table": Kind(
        table,
        ".csv",
        _TABLE | {"label_column": "died"},
        agreed=True,
        columns=["--label-column", "died"],
        method="fedgram",
        export=("here", "onnx"),
    ),
    "regression": Kind(
        regression,
        ".csv",
        _TABLE | {"label_column": "days", "task": "regression"},
        agreed=True,
        metric="rmse",
        export=("far", "pt2"),
        method="fedavg",
        columns=["--label-column", "days"],
    ),
    "survival": Kind(
        survival,
        ".csv",
        _TABLE | {"label_column": ["days", "died"], "task": "survival"},
        agreed=True,
        metric="c_index",
        export=("here", "onnx"),
        method="fedavg",
        columns=["--label-column", "days", "died"],
        refused={"fedgram": _NO_VECTORS},
    ),
    "labels": Kind(
        labels,
        ".csv",
        _TABLE | {"label_column": ["cough", "fever"]},
        agreed=True,
        metric="auroc",
        export=("far", "pt2"),
        method="fedgram",
        columns=["--label-column", "cough", "fever"],
    ),
    "text": Kind(
        text,
        ".csv",
        {"text_column": "text", "label_column": "mood", "text_length": 12},
        refused={"fedgram": "fedgram makes or mixes inputs, which tokens do not allow"},
        columns=["--column", "text", "--label-column", "mood"],
        method="fedavg",
        export=("here", "onnx"),
    ),
    "signals": Kind(signals, ".npz"),
    "embeddings": Kind(
        embeddings,
        ".parquet",
        {"array_column": "vector", "label_column": "kind"},
        columns=["--column", "vector", "--label-column", "kind"],
        method="fedgram",
    ),
    "png": Kind(png, "", {"size": 12}, method="fedavg", export=("here", "onnx")),
    "dicom": Kind(dicom, "", {"size": 12, "pixel_window": [0.0, 400.0]}, export=("far", "pt2")),
    "nifti": Kind(nifti, "", {"size": 12, "pixel_window": [0.0, 1000.0]}, method="fedgram"),
    "segmentation": Kind(
        segmentation,
        ".npz",
        metric="miou",
        method="fedavg",
        refused={"fedgram": _NO_VECTORS},
    ),
    "language": Kind(
        language,
        ".csv",
        {
            "text_column": "text",
            "task": "language-modelling",
            "text_length": 12,
            "tokenizer": "{root}/pretrained/gpt",
        },
        model="hf:{root}/pretrained/gpt",
        metric="perplexity",
        columns=["--column", "text"],
        refused={"fedgram": _NO_VECTORS},
        before=_decoder,
    ),
}
