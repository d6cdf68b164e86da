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

from ekiden.base.errors import UserError
from ekiden.data import federate, from_tensors, load
from tests.data.conftest import noise, png, write_folder

pytestmark = pytest.mark.usefixtures("no_data")
N = 40


def column(bad: Any, at: int) -> list[Any]:
    return [bad if k == at else float(k) for k in range(N)]


def frame(bad: Any, at: int) -> dict[str, Any]:
    return {"v": column(bad, at), "label": ["pq"[k % 2] for k in range(N)]}


@pytest.mark.parametrize("at", [0, 7, 23, N - 1])
@pytest.mark.parametrize("source", ["pandas", "polars", "csv", "text", "images", "npz", "tensors", "federated tensors"])
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
                words = {name: [str(v) for v in values] for name, values in frame("bad", at).items()}
                return federate([pandas.DataFrame(words), pandas.DataFrame(frame(1.5, at))])
            case "images":
                encoded = [b"junk" if k == at else png(p) for k, p in enumerate(noise(N))]
                pq.write_table(pa.table({"image": encoded, "label": labels}), tmp_path / "a.parquet")
                return load(str(tmp_path / "a.parquet"))
            case "npz":
                np.savez(tmp_path / "a.npz", x=numbers, y=labels)
                return load(str(tmp_path / "a.npz"))
            case "tensors":
                return from_tensors((torch.from_numpy(numbers), torch.from_numpy(labels)))
        return federate([(numbers, labels), (np.ones((N, 1)), labels)])

    with pytest.raises(UserError, match=rf"row {at} \(counted from 0, without the header\)") as caught:
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
    data = load({"v": np.arange(100.0), "label": [f"c{k % 10}" for k in range(100)], "group": writers})
    assert data.test.group is not None
    assert torch.bincount(data.test.group).tolist() == [2] * 10
