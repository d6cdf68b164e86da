"""The cache of decoded data sets."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from ekiden.core.base import files
from ekiden.core.base.errors import UserError
from ekiden.data import Dataset, load
from ekiden.readers.kinds import images
from tests.readers.conftest import noise, png, write, write_folder, write_images

pytestmark = pytest.mark.usefixtures("no_data")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache" / "deep"))
    return tmp_path / "cache" / "deep"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever images are decoded."""
    calls: list[int] = []
    real = images.decode

    def counting(*args: Any, **options: Any) -> list[torch.Tensor]:
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(images, "decode", counting)
    return calls


def same(a: Dataset, b: Dataset) -> bool:
    for part, other in (a.train, b.train), (a.test, b.test):
        for mine, its in zip(vars(part).values(), vars(other).values(), strict=True):
            if not (torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its):
                return False
    return (a.name, a.classes, a.domains) == (b.name, b.classes, b.domains)


def test_written_once_and_used_again(tmp_path: Path, folder: Path, decoded: list[int]) -> None:
    write_folder(tmp_path / "own pets", {"photo/cat": 6, "art/cat": 6})
    first = load(str(tmp_path / "own pets"))
    files = list(folder.iterdir())
    assert [f.name.startswith("own_pets-") and f.suffix == ".safetensors" for f in files] == [True]
    again = load(str(tmp_path / "own pets"))
    assert same(first, again)
    assert again.domains == ("art", "photo")
    assert decoded == [1]


def test_images_beside_a_table_are_part_of_its_contents(
    tmp_path: Path, folder: Path, decoded: list[int]
) -> None:
    pictures = [png(p) for p in noise(5)]
    (tmp_path / "e.png").write_bytes(pictures[4])
    rows: list[dict[str, object]] = [{"bytes": p, "path": "p"} for p in pictures[:4]]
    rows.append({"bytes": None, "path": "e.png"})
    path = write(tmp_path / "a.parquet", {"image": rows, "label": [0, 1, 0, 1, 0]})
    first = load(str(path))
    assert same(load(str(path)), first)
    assert decoded == [1]
    (tmp_path / "e.png").write_bytes(png(noise(1, seed=9)[0]))
    assert not same(load(str(path)), first)
    assert decoded == [1, 1]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_images_in_the_usual_column_are_part_of_the_contents(
    tmp_path: Path, folder: Path, name: str
) -> None:
    """No flag names the column: a cache made before a picture changed is not used."""
    table = pandas.DataFrame({"image": [f"{k}.png" for k in range(10)], "label": [0, 1] * 5})
    table.to_csv(tmp_path / name, index=False) if name == "a.csv" else table.to_parquet(
        tmp_path / name
    )
    for seed in range(2):
        for k, pixels in enumerate(noise(10, seed=seed)):
            (tmp_path / f"{k}.png").write_bytes(png(pixels))
        found = load(tmp_path / name)
        shown = {tuple(x.flatten().tolist()) for x in found.train.x}
        assert shown <= {
            tuple(torch.from_numpy(p).permute(2, 0, 1).flatten().tolist())
            for p in noise(10, seed=seed)
        }


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"junk" * 100,
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        lambda b: b.replace(b"ekiden", b"kidene", 1),
    ],
    ids=["short", "half", "empty", "junk", "one bit", "header"],
)
def test_a_damaged_file_is_rebuilt(
    tmp_path: Path, folder: Path, decoded: list[int], damage: Callable[[bytes], bytes]
) -> None:
    path = write_images(tmp_path / "a.parquet")
    first = load(str(path))
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.unlink()  # the tensors of `first` are mapped from it
    file.write_bytes(damage(good))
    assert same(load(str(path)), first)
    assert decoded == [1, 1]
    assert file.read_bytes() == good
    load(str(path))
    assert decoded == [1, 1]


def test_the_name_follows_contents_and_size(
    tmp_path: Path, folder: Path, decoded: list[int]
) -> None:
    path = write_images(tmp_path / "a.parquet")
    first = load(str(path))
    load(str(path), size=2)
    assert len(list(folder.iterdir())) == 2
    time = path.stat().st_mtime_ns
    write_images(path, seed=1)
    os.utime(path, ns=(time, time))  # the date tells nothing
    assert not torch.equal(load(str(path)).train.x, first.train.x)
    assert len(decoded) == 3
    moved = path.rename(tmp_path / "b.parquet")
    load(str(moved))
    assert len(list(folder.iterdir())) == 4


def test_a_moved_image_is_another_data_set(tmp_path: Path, decoded: list[int]) -> None:
    write_folder(tmp_path, {"cat": 5, "dog": 5})
    assert int((load(str(tmp_path)).train.y == 0).sum()) == 4
    (tmp_path / "cat" / "004.png").rename(
        tmp_path / "dog" / "-first.png"
    )  # the same files in the same order
    assert int((load(str(tmp_path)).train.y == 0).sum()) == 3
    assert len(decoded) == 2


def test_a_test_part_that_appears_counts(tmp_path: Path, decoded: list[int]) -> None:
    path = write_images(tmp_path / "train.parquet", 20)
    assert len(load(str(path)).test) == 4
    write_images(tmp_path / "test.parquet", 7)
    assert len(load(str(path)).test) == 7
    assert len(decoded) == 2


def test_nothing_is_left_behind(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(load(str(write_images(tmp_path / "a.parquet"))).train) == 8
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "file" / "cache"))
    assert len(load(str(write_images(tmp_path / "a.parquet"))).train) == 8


def test_errors_are_not_cached(tmp_path: Path, folder: Path) -> None:
    path = write(
        tmp_path / "a.parquet", {"image": [png(noise(1)[0]), b"junk"] * 5, "label": [0] * 10}
    )
    for _ in range(2):
        with pytest.raises(UserError, match="cannot be decoded"):
            load(str(path))
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_large_set_stays_on_the_disk(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    write_folder(tmp_path / "pets", {"cat": 20, "dog": 20})
    small = load(str(tmp_path / "pets"))
    assert files.place(small.train.x) is None
    for file in folder.iterdir():
        file.unlink()
    monkeypatch.setattr(files, "LARGE", 100)
    for _ in range(2):  # decoded, then from the cache
        large = load(str(tmp_path / "pets"))
        at = files.place(large.train.x)
        assert at is not None
        assert at.path.parent == folder
        assert same(small, large)
        again = pickle.loads(
            pickle.dumps(large.train)
        )  # as to a worker process: the place travels, not the images
        assert torch.equal(again.x, small.train.x)
        assert len(pickle.dumps(large.train)) < len(pickle.dumps(small.train))
    assert len(list(folder.iterdir())) == 1  # nothing else is left
    file = next(folder.iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    assert same(small, load(str(tmp_path / "pets")))  # made again


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from ekiden.core.base import files
from ekiden.readers import cache
from ekiden.readers.kinds import of_tensor
from ekiden.readers.undecoded import Raw
from ekiden.core.data.samples import Dataset, Samples
import ekiden
from ekiden.methods import FedSeq
n, side = int(sys.argv[1]), 256
class Pictures(list):  # each is made when it is decoded
    def __len__(self): return n
    def __getitem__(self, k):
        from PIL import Image
        return Image.fromarray(np.full((side, side, 3), k % 251, dtype=np.uint8))
def build():
    from ekiden.readers.kinds.images import decode
    from ekiden.readers.kinds import Images
    train = Raw("made", Pictures(), np.zeros(n, dtype=np.int64), kind=Images)
    test = Raw("made", [Pictures()[0]], np.zeros(1, dtype=np.int64), kind=Images)
    x = decode([[train], [test]], Images())
    y = torch.arange(n) % 2
    return Dataset("big", Samples(x[0], y), Samples(x[1], y[:1]), ("a", "b"), inputs=of_tensor(x[0]))
def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3
before = own()
for _ in range(2):
    dataset = cache.cached("big", "0" * 8, build)
    silos = ekiden.split(dataset, "iid", 2, val_fraction=0.0)
    net = torch.nn.Sequential(torch.nn.AvgPool2d(64), torch.nn.Flatten(), torch.nn.Linear(48, 2))
    ekiden.run(FedSeq(epochs=1), silos, net, training=ekiden.Training(batch_size=16, select="last"))
print(dataset.train.x.nbytes / 1e6, own() - before)
"""


@pytest.mark.slow
def test_training_on_a_large_set_takes_little_memory(tmp_path: Path) -> None:
    """Memory that belongs to the process itself does not grow with the set: 275 and 826 MB."""
    import subprocess
    import sys

    taken = []
    for n in (1400, 4200):
        environment = os.environ | {"EKIDEN_CACHE": str(tmp_path / str(n)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", MEMORY, str(n)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        taken.append(list(map(float, done.stdout.split())))
    (small, little), (large, much) = taken
    assert large - small > 500  # MB
    assert much - little < 100
