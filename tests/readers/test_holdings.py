"""What paths, folders and samples in Python hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Training
from ekiden.data import from_tensors, load
from ekiden.readers import holdings
from tests.readers.conftest import png
from tests.readers.told import N, pictures, rows, said

Rows = dict[str, Any]


pytestmark = pytest.mark.usefixtures("no_data")


def images(folder: Path, *parts: str, classes: str = "ab") -> Path:
    """Write different images, below each part of a data set."""
    rng = np.random.default_rng(0)
    for part in parts or ("",):
        for name in classes:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for k in range(4):
                pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{k}.png")
    return folder


def test_owners_that_share_a_client_or_are_divided_anew_are_named() -> None:
    owned = load(rows(4 * N, w=["n", "e", "s", "w"] * N), group_column="w")
    line = said(lambda: ekiden.split(owned, "natural", 3))
    assert line.startswith("3 clients share 4 natural owners: client-0 holds the rows of ")
    assert line.count("client-") == 3
    assert "iid mixes the rows of 4 natural owners (e, n, s, w):" in said(
        lambda: ekiden.split(owned, "iid", 3)
    )
    assert not said(lambda: ekiden.split(owned, "natural"))


def test_parts_of_folders_are_found_in_any_case_and_others_named(tmp_path: Path) -> None:
    dataset = load(images(tmp_path / "x", "Train", "Test"))
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (8, 8, ("a", "b"))
    with pytest.raises(
        UserError, match=r"the folders testing, training of .* call the training part train"
    ):
        load(images(tmp_path / "z", "training", "testing"))


def test_folders_that_programs_leave_are_not_read(tmp_path: Path) -> None:
    images(tmp_path, "", "__MACOSX")
    assert len(load(tmp_path).train) + len(load(tmp_path).test) == 8


def test_labels_of_bytes_are_names() -> None:
    x, y = np.random.default_rng(0).normal(size=(N, 4)), np.array([b"a", b"b"] * (N // 2))
    assert ekiden.federate([(x, y), (x + 1, y)]).dataset.classes == ("a", "b")


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        (
            torch.eye(N).to_sparse(),
            torch.arange(N) % 2,
            "holds a sparse tensor: give tensor.to_dense",
        ),
        (np.ma.masked_less(np.eye(N), 0.5), np.arange(N) % 2, "holds masked values"),
        (
            np.eye(N),
            np.array(["2024-01-01"] * N, dtype="datetime64[D]"),
            "as labels: give integers, numbers or names",
        ),
    ],
)
def test_arrays_that_are_not_plain_are_refused(x: Any, y: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ekiden.federate([(x, y), (x, y)])


def test_sparse_matrices_and_numbers_as_names_of_silos_are_refused() -> None:
    scipy = pytest.importorskip("scipy.sparse")
    x, y = scipy.csr_matrix(np.eye(N)), np.arange(N) % 2
    with pytest.raises(UserError, match="must be tensors"):
        ekiden.federate([(x, y), (x, y)])
    with pytest.raises(UserError, match="names of silos are texts, not 1: write it as '1'"):
        ekiden.federate(dict[Any, Any]({1: rows(N), 2: rows(N, 1)}))


def test_tensors_that_need_gradients_are_read() -> None:
    x = torch.randn(N, 4, requires_grad=True)
    assert not ekiden.federate(
        [(x, torch.arange(N) % 2), (x + 1, torch.arange(N) % 2)]
    ).dataset.train.x.requires_grad


def test_files_beside_those_of_silos_are_named(tmp_path: Path) -> None:
    for k in range(2):
        pandas.DataFrame(rows(N, k)).to_csv(tmp_path / f"s{k}.csv", index=False)
    (tmp_path / "~$s0.csv").write_bytes(b"lock")
    (tmp_path / "s2.xlsx").write_bytes(b"PK")
    assert "1 file in" in (line := said(lambda: ekiden.data.join([str(tmp_path)])))
    assert "not read as a silo: s2.xlsx" in line


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


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64"])
def test_labels_of_any_whole_numbers_are_classes(kind: str) -> None:
    y = (np.arange(20) % 2).astype(kind)
    data = from_tensors((np.zeros((20, 3), np.float32), y))
    assert data.classes == ("0", "1")
    rows = np.stack([y, y], axis=1)
    assert from_tensors((np.zeros((20, 3), np.float32), rows)).task.kind == "multi-label"


def test_an_array_without_a_name_is_no_subject(tmp_path: Path) -> None:
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    arrays: dict[str, Any] = {"x": x, "y": y, "": np.arange(20) // 5}
    np.savez(tmp_path / "a.npz", **arrays)
    assert load(tmp_path / "a.npz").train.subject is None


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


def test_samples_that_differ_each_time_they_are_read_are_named() -> None:
    class Noisy:
        noise = 1.0

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            torch.manual_seed(index)
            x = torch.randn(4)
            torch.seed()
            return x + self.noise * torch.rand(()), index % 2

    noisy = Noisy()
    assert "samples of train differ each time they are read" in said(lambda: from_tensors(noisy))
    noisy.noise = 0.0
    assert not said(lambda: from_tensors(noisy))


Y = torch.arange(40) % 2


PAIRS = TensorDataset(torch.randn(40, 4), Y)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def mask(*shape: int, classes: int = 2) -> Any:
    return torch.randint(0, classes, (20, *shape))


def table(n: int = 60, **columns: Any) -> Any:
    rng = np.random.default_rng(len(columns))
    return {
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "label": ["p", "q"] * (n // 2),
        **columns,
    }


def texts(of: Callable[[int], str], n: int = 40, **columns: Any) -> Any:
    return {"text": [of(k) for k in range(n)], "label": ["p", "q"] * (n // 2), **columns}


def signals(change: Callable[[Any], Any] = lambda x: x, high: float = 90.0) -> Any:
    return change(torch.stack([torch.randn(40, 30), high + torch.randn(40, 30)], 1)), Y


def zeroed(x: Any) -> Any:
    x[:, 1] = 0
    return x


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            lambda: from_tensors((pictures(), mask(3, 3))),
            "images of train have 6 x 6 pixels, their masks 3 x 3",
        ),
        (
            lambda: from_tensors((pictures(width=8), mask(8, 6))),
            "have 8 x 6 pixels, their masks 6 x 8: give both one",
        ),
        (
            lambda: from_tensors((pictures(), mask(6, 6, 3))),
            r"masks of images need whole numbers of shape \(n, H, W\)",
        ),
        (
            lambda: from_tensors((pictures(), mask(6, 6).float())),
            "masks of images need whole numbers",
        ),
        (
            lambda: from_tensors((torch.randn(40, 4), Y[:, None])),
            r"one class a sample: give y\[:, 0\]",
        ),
        (
            lambda: from_tensors(DataLoader(PAIRS)),  # type: ignore[arg-type]
            "train must be tensors .x, y. or a map-style dataset of pairs",
        ),
        (
            lambda: load({"x": torch.randn(40, 4), "y": Y}),
            r"'x' of the table is an array, not a column: give arrays as a pair, \(inputs, labels\)",
        ),
        (
            lambda: from_tensors(TensorDataset(PAIRS[:][0])),
            "pairs .*, not samples of type tuple",
        ),
        (
            lambda: from_tensors([{"x": 1, "y": 0}] * 9),
            "pairs .*, not samples of type dict",
        ),
        (
            lambda: load(pa.table({"s": [["x"]] * 40, "label": ["p", "q"] * 20})),
            "give lists of numbers, all of one shape",
        ),
        (
            lambda: load(
                pa.table(
                    {
                        "s": [[1.0, k / k if k else None] for k in range(40)],
                        "label": ["p", "q"] * 20,
                    }
                )
            ),
            "column 's' of the table has NaN or infinity in row 0",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(read: Callable[[], Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        read()


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            lambda: ekiden.federate([signals(lambda x: x.flip(1)), signals(), signals()]),
            "channel 0 of the input of client-0 differs from other silos (",
        ),
        (
            lambda: ekiden.federate([signals(zeroed, 0), signals(high=0), signals(high=0)]),
            "channel 1 of the input hardly varies at client-0 (0), but does at other silos",
        ),
        (
            lambda: ekiden.federate([(255 * torch.rand(40, 1, 4, 4), Y) for _ in range(2)]),
            "floats of silo client-0, silo client-1 go up to",
        ),
        (
            lambda: load(texts(lambda k: f"{'w ' * 300}{k}"), text_column="text"),
            "texts of the table have 256 tokens",
        ),
        (
            lambda: load(texts(lambda k: f"w {k}", age=[1] * 40), text_column="text"),
            "no model of texts gets (age)",
        ),
    ],
)
def test_what_is_probably_not_meant_is_said(read: Callable[[], Any], line: str) -> None:
    assert line in said(read)


def test_masks_of_pairs_may_be_pictures_with_a_palette() -> None:
    made = []
    for x, y in zip(pictures(), mask(6, 6, classes=3).to(torch.uint8).numpy(), strict=True):
        picture = Image.fromarray(y, "P")
        picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        made.append((Image.fromarray(x.permute(1, 2, 0).numpy()), picture))
    data = from_tensors(made)
    assert data.outputs == 3
    assert data.train.y.shape == (16, 6, 6)


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (torch.rand(20, 4, 8, 8).mul(255).byte(), ""),
        (torch.rand(20, 3, 32, 3), "if the channels come last, move them"),
        (torch.rand(20, 3, 32, 3).mul(255).byte(), "if the channels come last, move them"),
    ],
)
def test_arrays_that_are_not_what_they_seem_are_named(x: torch.Tensor, line: str) -> None:
    found = said(lambda: from_tensors((x, Y[:20])))
    assert line in found if line else not found


def test_numbers_of_classes_are_names_in_any_order_of_these() -> None:
    def silo(names: list[str], seed: int) -> Any:
        """Return what Hugging Face makes of a column of ClassLabel."""
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 2, 60)
        label = (codes == names.index("f")) ^ (rng.random(60) < 0.2)
        told = json.dumps({"info": {"features": {"sex": {"names": names}}}})
        return pa.table(
            {"a": rng.normal(size=60), "sex": codes, "label": label}
        ).replace_schema_metadata({"huggingface": told})

    data = ekiden.federate([silo(["f", "m"], 0), silo(["m", "f"], 1)]).dataset
    assert data.inputs.vocabularies == (("f", "m"),)  # type: ignore[attr-defined]
    assert load(silo(["f", "m"], 0), group_column="sex").groups == ("f", "m")


def test_complex_numbers_of_a_file_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.ones((4, 2, 16), dtype=np.complex64), y=np.arange(4) % 2)
    with pytest.raises(UserError, match=r"not an array of numbers .*give real and imaginary parts"):
        load(str(tmp_path / "t.npz"))


def test_a_name_too_long_for_a_file_is_a_name(tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text("age,died\n61,yes\n54,no\n")
    given = [f"{'ü' * 130}={tmp_path / 'north.csv'}", f"south={tmp_path / 'south.csv'}"]
    assert [*holdings.named_silos(given)] == ["ü" * 130, "south"]
