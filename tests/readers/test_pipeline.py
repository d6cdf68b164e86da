"""What holds for every source: a table, images, arrays, tensors, frames."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Dataset
from ekiden.data import federate, from_tensors, load
from tests.readers.conftest import noise, png, write_folder

pytestmark = pytest.mark.usefixtures("no_data")
N = 40


def column(bad: Any, at: int) -> list[Any]:
    return [bad if k == at else float(k) for k in range(N)]


def frame(bad: Any, at: int) -> dict[str, Any]:
    return {"v": column(bad, at), "label": ["pq"[k % 2] for k in range(N)]}


@pytest.mark.parametrize("at", [0, 7, 23, N - 1])
@pytest.mark.parametrize(
    "source", ["pandas", "polars", "csv", "text", "images", "npz", "tensors", "federated tensors"]
)
def test_a_bad_record_is_named_by_its_own_row(source: str, at: int, tmp_path: Path) -> None:
    """Also if it is held out, or if rows before it are."""
    infinite = frame(float("inf"), at)
    numbers = np.array(column(float("nan"), at))[:, None]
    labels = np.arange(N) % 2

    def read() -> Any:
        match source:
            case "pandas":
                return load(pandas.DataFrame(infinite))
            case "polars":
                return federate([polars.DataFrame(infinite), polars.DataFrame(frame(1.5, at))])
            case "csv":
                pandas.DataFrame(infinite).to_csv(tmp_path / "a.csv", index=False)
                return load(str(tmp_path / "a.csv"))
            case "text":
                words = {
                    name: [str(v) for v in values] for name, values in frame("bad", at).items()
                }
                return federate([pandas.DataFrame(words), pandas.DataFrame(frame(1.5, at))])
            case "images":
                encoded = [b"junk" if k == at else png(p) for k, p in enumerate(noise(N))]
                pq.write_table(
                    pa.table({"image": encoded, "label": labels}), tmp_path / "a.parquet"
                )
                return load(str(tmp_path / "a.parquet"))
            case "npz":
                np.savez(tmp_path / "a.npz", x=numbers, y=labels)
                return load(str(tmp_path / "a.npz"))
            case "tensors":
                return from_tensors((torch.from_numpy(numbers), torch.from_numpy(labels)))
        return federate([(numbers, labels), (np.ones((N, 1)), labels)])

    with pytest.raises(
        UserError, match=rf"row {at} \(counted from 0, without the header\)"
    ) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"cat": 8, "dog": 8})
    (root / "dog" / "005.png").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"the image in .*pets/dog/005\.png cannot be decoded"):
        load(str(root))


def test_labels_and_groups_both_keep_their_shares() -> None:
    """A fifth of each class within each group, whatever the samples are."""
    group, label = np.arange(120) % 3, np.arange(120) // 3 % 2
    table = load({"v": np.arange(120.0), "label": label, "group": group})
    pictures = load({"image": [png(p) for p in noise(120)], "label": label, "group": group})
    for data in (table, pictures):
        assert data.test.group is not None
        assert torch.bincount(data.test.group * 2 + data.test.y).tolist() == [4] * 6
    assert torch.equal(table.test.y, pictures.test.y)


def test_groups_with_a_row_of_each_class_still_give_a_fifth() -> None:
    writers = np.repeat(np.arange(10), 10)
    data = load(
        {"v": np.arange(100.0), "label": [f"c{k % 10}" for k in range(100)], "group": writers}
    )
    assert data.test.group is not None
    assert torch.bincount(data.test.group).tolist() == [2] * 10


SOURCES = ["frame", "polars", "csv", "npz", "tensors", "pairs"]


def given(source: str, x: Any, y: list[Any], folder: Path) -> Any:
    """The same numbers (n, 2) and labels, in another form."""
    columns = {"a": x[:, 0], "b": x[:, 1], "label": y}
    match source:
        case "frame":
            return pandas.DataFrame(columns)
        case "polars":
            return polars.DataFrame(columns)
        case "csv":
            file = folder / f"{len(list(folder.iterdir()))}.csv"
            pandas.DataFrame(columns).to_csv(file, index=False)
            return str(file)
        case "npz":
            file = folder / f"{len(list(folder.iterdir()))}.npz"
            np.savez(file, x=x, y=np.array(y))
            return str(file)
        case "tensors":
            return x, np.array(y)
    return list(zip(x, y, strict=True))


def silos_of(source: str, labels: list[list[Any]], folder: Path, **more: Any) -> Dataset:
    """A federation in which each silo has its own labels."""
    x = [
        np.random.default_rng(k).normal(size=(len(y), 2)).astype(np.float32)
        for k, y in enumerate(labels)
    ]
    held = [given(source, rows, y, folder) for rows, y in zip(x, labels, strict=True)]
    return federate(held, val_fraction=0.0, **more).dataset


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_has_the_same_classes_and_the_same_part_held_out(
    source: str, tmp_path: Path
) -> None:
    names = silos_of(source, [["cat", "dog"] * 20, ["dog", "eel"] * 20], tmp_path)
    assert names.classes == ("cat", "dog", "eel")
    assert torch.bincount(names.test.y).tolist() == [4, 8, 4]
    numbers = silos_of(source, [[0, 1] * 20, [1, 2] * 20], tmp_path, spelling="keep")
    assert numbers.classes == ("0", "1", "2")
    assert (
        numbers.groups == ("client-0", "client-1")
        if source not in ("csv", "npz")
        else len(numbers.groups) == 2
    )
    assert torch.equal(numbers.test.y, names.test.y)
    reference = silos_of("tensors", [[0, 1] * 20, [1, 2] * 20], tmp_path, spelling="keep")
    for part in ("y", "group"):
        assert torch.equal(getattr(numbers.train, part), getattr(reference.train, part))
        assert torch.equal(getattr(numbers.test, part), getattr(reference.test, part))


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_takes_a_common_test_set_and_names_of_classes(
    source: str, tmp_path: Path
) -> None:
    common = given(source, np.ones((6, 2), dtype=np.float32), ["a", "b", "c"] * 2, tmp_path)
    data = silos_of(
        source, [["a", "b"] * 10, ["b", "c"] * 10], tmp_path, test=common, classes=("c", "b", "a")
    )
    assert data.classes == ("c", "b", "a")
    assert data.test.y.tolist() == [2, 1, 0] * 2
    assert len(data.train) == 40
    with pytest.raises(UserError, match=r"label 'c' in row 1 .* is not among the classes: b, a"):
        silos_of(
            source, [["a", "b"] * 10, ["b", "c"] * 10], tmp_path, test=common, classes=("b", "a")
        )


@pytest.mark.parametrize("source", SOURCES)
def test_names_and_numbers_do_not_mix_in_any_source(source: str, tmp_path: Path) -> None:
    if source in ("frame", "polars", "csv", "npz"):  # there, whole numbers are names too
        assert silos_of(source, [["1", "a"] * 10, [1, 3] * 10], tmp_path).classes == ("1", "3", "a")
        return
    with pytest.raises(
        UserError, match="the labels of silo client-0 are names, but those of silo client-1"
    ):
        silos_of(source, [["cat", "dog"] * 10, [0, 1] * 10], tmp_path)


def test_one_frame_is_a_federation_of_one() -> None:
    fed = federate([pandas.DataFrame(frame(1.5, 0))], min_count=1)
    assert [client.name for client in fed.clients] == ["client-0"]
