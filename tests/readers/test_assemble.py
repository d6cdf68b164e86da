"""What holds for every source: a table, images, arrays, tensors, frames."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.core.data.augment import Augment
from ekiden.core.data.samples import Dataset
from ekiden.data import FederatedData, Samples, federate, from_tensors, load, split
from tests.readers.conftest import noise, png, write, write_folder

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


def features(n: int = 50, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(n) % classes


class Items(TorchDataset[tuple[Any, Any]]):
    def __init__(self, items: Sequence[tuple[Any, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.items[index]


def rows(fed: FederatedData) -> list[list[int]]:
    return [sorted(c.train.rows.tolist() + c.val.rows.tolist()) for c in fed.clients]


def test_what_is_given_is_what_is_held() -> None:
    (x, y), test = features(), features(10, seed=1)
    dataset = from_tensors(
        (x, y), test, classes="abcde", mean=(0.1,), std=(2.0,), augment=Augment(flip=True)
    )
    assert torch.equal(dataset.train.x, x)
    assert torch.equal(dataset.train.y, y)
    assert torch.equal(dataset.test.x, test[0])
    assert dataset.shape == (3,)
    assert (dataset.classes, dataset.mean, dataset.std) == (tuple("abcde"), (0.1,), (2.0,))
    assert dataset.augment == Augment(flip=True)


def test_without_a_test_set_a_fifth_of_each_class_is_held_out() -> None:
    dataset = from_tensors(features())
    assert dataset.classes == tuple("01234")
    assert torch.bincount(dataset.train.y).tolist() == [8] * 5
    assert torch.bincount(dataset.test.y).tolist() == [2] * 5
    every = torch.cat([dataset.train.x, dataset.test.x])
    assert sorted(every.tolist()) == sorted(features()[0].tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x.numpy(), y.numpy()),
        lambda x, y: (x.double(), y.to(torch.uint8)),
        TensorDataset,
        lambda x, y: Items(list(zip(x, y.tolist(), strict=True))),
        lambda x, y: Items(list(zip(x.numpy(), y, strict=True))),
        lambda x, y: list(zip(x.tolist(), y.numpy(), strict=True)),
        Samples,
    ],
    ids=["arrays", "other types", "TensorDataset", "torch", "numpy items", "list", "Samples"],
)
def test_many_forms_of_the_same_data(make: Callable[[Tensor, Tensor], Any]) -> None:
    x, y = features()
    dataset = from_tensors(make(x, y), (x, y))
    torch.testing.assert_close(dataset.train.x, x, check_dtype=True)
    assert torch.equal(dataset.train.y, y)


def test_images() -> None:
    pixels = torch.randint(0, 256, (10, 3, 4, 5), dtype=torch.uint8)
    y = torch.zeros(10, dtype=torch.int64)
    assert torch.equal(from_tensors((pixels, y), (pixels, y)).train.x, pixels)
    assert from_tensors((pixels[:, 0], y)).shape == (1, 4, 5)
    assert from_tensors((pixels.float() / 255, y)).train.x.dtype == torch.float32
    items = [(Image.fromarray(p.permute(1, 2, 0).numpy()), 0) for p in pixels]
    assert torch.equal(from_tensors(items, (pixels, y)).train.x, pixels)
    grey = [(Image.fromarray(p[0].numpy()), 0) for p in pixels]
    assert torch.equal(from_tensors(grey, (pixels[:, :1], y)).train.x, pixels[:, :1])


def test_each_silo_holds_what_it_is_given() -> None:
    silos = [features(20 + 10 * i, seed=i) for i in range(3)]
    fed = federate(silos, features(30, seed=9), names=["a", "b", "c"], seed=4)
    assert [c.name for c in fed.clients] == ["a", "b", "c"]
    assert [(len(c.train), len(c.val)) for c in fed.clients] == [(18, 2), (27, 3), (36, 4)]
    assert rows(fed) == [list(range(20)), list(range(20, 50)), list(range(50, 90))]
    for (x, y), held in zip(silos, rows(fed), strict=True):
        assert torch.equal(fed.dataset.train.x[held], x)
        assert torch.equal(fed.dataset.train.y[held], y)
    test_rows = [c.test.rows.tolist() for c in fed.clients]
    assert sorted(r for rows in test_rows for r in rows) == list(range(30))
    assert [len(r) for r in test_rows] == [5, 10, 15]  # 6 of each class by 4 : 6 : 8 are 1, 2 and 3


def test_the_seed_shuffles_and_the_share_is_a_choice() -> None:
    silos = [features(40, seed=i) for i in range(2)]
    one, same, other = (federate(silos, seed=s, val_fraction=0.5) for s in (0, 0, 1))
    assert torch.equal(one.clients[0].val.rows, same.clients[0].val.rows)
    assert not torch.equal(one.clients[0].val.rows, other.clients[0].val.rows)
    assert len(one.clients[0].val) == len(one.clients[0].train) == 16


def test_each_silo_may_bring_its_test_set_or_keep_a_fifth() -> None:
    silos = [features(20, seed=i) for i in range(2)]
    own = federate(silos, tests=[features(5, seed=8), features(10, seed=9)])
    assert [c.test.rows.tolist() for c in own.clients] == [list(range(5)), list(range(5, 15))]
    assert torch.equal(own.clients[1].test.x, features(10, seed=9)[0])
    fifth = federate(silos)
    assert [len(c.test) for c in fifth.clients] == [4, 4]
    assert [len(c.train) + len(c.val) for c in fifth.clients] == [16, 16]
    for client, (x, _) in zip(fifth.clients, silos, strict=True):
        mine = torch.cat([client.train.x, client.val.x, client.test.x])
        assert sorted(mine.tolist()) == sorted(x.tolist())


def spoiled(value: float) -> tuple[Tensor, Tensor]:
    x, y = features()
    x[3, 1] = value
    return x, y


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_tensors(spoiled(float("nan"))), "train has NaN or infinity in row 3"),
        (lambda: from_tensors(features(), spoiled(float("inf"))), "test has NaN or infinity in row 3"),
        (lambda: from_tensors((torch.empty(0, 3), torch.empty(0).long())), r"shape \(0, 3\): it must be .* at least 1"),
        (lambda: from_tensors([]), r"train has shape \(0,\)"),
        (lambda: from_tensors((torch.zeros(3), torch.zeros(3).long())), r"train has shape \(3,\)"),
        (lambda: from_tensors((torch.zeros(3, 2).long(), torch.zeros(3).long())), "int64 x .* uint8 images"),
        (lambda: from_tensors((torch.zeros(3, 2), torch.zeros(3))), "float32 y .* must hold 3 integers"),
        (lambda: from_tensors((torch.zeros(3, 2), torch.zeros(4).long())), r"3 samples and 4 labels: it must hold 3"),
        (lambda: from_tensors((torch.zeros(3, 2), torch.eye(3).long())), r"y of shape \(3, 3\)"),
        (lambda: from_tensors((torch.zeros(3, 2), torch.tensor([0, -1, 0]))), "label -1"),
        (lambda: from_tensors(features(), classes=("a", "b")), "label 4 has no name among the 2 classes"),
        (lambda: from_tensors(features(), (torch.zeros(5, 4), torch.zeros(5).long())), r"float32 of shape \(4,\)"),
        (lambda: from_tensors(features(3, 3)), "train has only 3 samples, too few to hold out"),
        (lambda: from_tensors([{"x": 1, "y": 2}] * 3), "must be tensors"),
        (lambda: from_tensors([(torch.zeros(2), "cat"), (torch.zeros(2), 1)]), "y integers, names or masks"),
        (lambda: from_tensors(5), "must be tensors"),  # type: ignore[arg-type]
        (lambda: from_tensors([(torch.zeros(2), 0), (torch.zeros(3), 0)]), r"differ in shape \(\(2,\), \(3,\)\)"),
        (lambda: federate([]), "the list of silos is empty"),
        (lambda: federate([features()], features(), tests=[features()]), "tests one for each: give one of them"),
        (lambda: federate([features()], tests=[]), "0 tests for 1 silos"),
        (lambda: federate([features()], names=["a", "b"]), "2 names for 1 silos"),
        (lambda: federate([features()] * 2, names=["a", "a"]), "two silos have the same name"),
        (lambda: federate([features(), spoiled(float("nan"))]), "silo client-1 has NaN"),
        (lambda: federate([features(), (torch.zeros(9, 2), torch.zeros(9).long())]), r"client-1 are float32 .* \(2,\)"),
        (lambda: federate([features()], val_fraction=-0.1), "val_fraction"),
    ],
)  # fmt: skip
def test_errors_are_one_line_for_the_user(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_numpy_input_is_not_changed() -> None:
    x, y = np.zeros((10, 2), np.float32), np.arange(10) % 2
    dataset = from_tensors((x, y))
    dataset.train.x.add_(1)
    assert not x.any()


def images_of(*shades: int) -> Tensor:
    return torch.stack([torch.full((1, 2, 2), shade, dtype=torch.uint8) for shade in shades])


def by_class(fed: FederatedData) -> dict[str, set[int]]:
    """Return which shades have which class, over all clients."""
    held = fed.dataset.train
    return {
        name: set(held.x[held.y == k].flatten().tolist())
        for k, name in enumerate(fed.dataset.classes)
    }


CATS_DOGS = (images_of(1, 2, 1, 2), np.array(["dog", "cat", "dog", "cat"]))
BIRDS_CATS = (images_of(3, 2, 3, 2), np.array(["bird", "cat", "bird", "cat"]))
TEST = (images_of(1, 2, 3), np.array(["dog", "cat", "bird"]))


def test_names_mean_the_same_in_all_silos() -> None:
    fed = federate([CATS_DOGS, BIRDS_CATS], TEST)
    assert fed.dataset.classes == ("bird", "cat", "dog")
    assert by_class(fed) == {"bird": {3}, "cat": {2}, "dog": {1}}
    assert fed.dataset.test.y.tolist() == [2, 1, 0]
    pairs = Items([(x, str(y)) for x, y in zip(*BIRDS_CATS, strict=True)])
    assert by_class(federate([CATS_DOGS, pairs], TEST)) == by_class(fed)
    assert federate(
        [CATS_DOGS, BIRDS_CATS], TEST, classes=("dog", "cat", "bird")
    ).dataset.test.y.tolist() == [0, 1, 2]


def test_samples_of_separately_loaded_files_keep_their_names(tmp_path: Path) -> None:
    for silo, names in ("one", ("cat", "dog")), ("two", ("bird", "cat")):
        write(
            tmp_path / f"{silo}.parquet",
            {"image": [png(p) for p in noise(6)], "label": list(names) * 3},
        )
    one, two = (load(str(tmp_path / f"{silo}.parquet")) for silo in ("one", "two"))
    assert set(one.train.y.tolist()) == set(two.train.y.tolist()) == {0, 1}  # each by its own names
    fed = federate([one.train, two.train], tests=[one.test, two.test])
    assert fed.dataset.classes == ("bird", "cat", "dog")
    first, second = (set(torch.cat([c.train.y, c.val.y]).tolist()) for c in fed.clients)
    assert (first, second) == ({1, 2}, {0, 1})


def test_equal_names_keep_their_order() -> None:
    part = Samples(images_of(1, 2, 3), torch.tensor([0, 1, 2]), classes=("plane", "car", "bird"))
    fed = federate([part, part], tests=[part, part])
    assert fed.dataset.classes == ("plane", "car", "bird")
    assert by_class(fed) == {"plane": {1}, "car": {2}, "bird": {3}}


def test_numerals_are_names_where_others_are() -> None:
    one = Samples(images_of(5, 6), torch.tensor([0, 1]), classes=("0", "1"))
    two = Samples(images_of(5, 7), torch.tensor([0, 1]), classes=("0", "7"))
    fed = federate([one, two], tests=[one, two])
    assert fed.dataset.classes == ("0", "1", "7")
    assert by_class(fed) == {"0": {5}, "1": {6}, "7": {7}}


def test_names_and_numbers_do_not_mix() -> None:
    numbers = (images_of(1, 2), torch.tensor([0, 1]))
    with pytest.raises(
        UserError,
        match=r"silo client-0 are names, but those of silo client-1 are numbers of unknown",
    ):
        federate([CATS_DOGS, numbers], TEST)
    with pytest.warns(DataWarning, match="1 of 3 test rows are of classes without a training row"):
        fed = federate(
            [CATS_DOGS, numbers], TEST, classes=("dog", "cat", "bird")
        )  # now a number is a place in it
    assert by_class(fed) == {"dog": {1}, "cat": {2}, "bird": set()}
    with pytest.raises(
        UserError, match=r"label 'bird' in row 0 .* of silo client-1 is not among .*: cat, dog"
    ):
        federate([CATS_DOGS, BIRDS_CATS], CATS_DOGS, classes=("cat", "dog"))


def test_labels_with_gaps_need_names() -> None:
    x, y = torch.randn(12, 3), torch.tensor([0, 1, 7] * 4)
    for call in (lambda: from_tensors((x, y)), lambda: federate([(x, y)])):
        with pytest.raises(
            UserError, match=r"no sample has label 2, 3, 4, 5, 6, but row 2 .* has label 7: number"
        ):
            call()
    names = [f"class {k}" for k in range(8)]
    assert from_tensors((x, y), classes=names).classes == tuple(names)


def test_a_class_that_one_silo_lacks_is_no_gap() -> None:
    silos = [(torch.randn(10, 3), torch.tensor(pair * 5)) for pair in ([0, 1], [0, 2], [3, 0])]
    assert federate(silos).dataset.classes == ("0", "1", "2", "3")
    with pytest.warns(DataWarning, match="1 of 4 test rows are of classes without a training row"):
        only_tested = federate(silos[:2], (torch.randn(4, 3), torch.arange(4)))
    assert only_tested.dataset.classes == ("0", "1", "2", "3")


def test_a_named_set_may_lack_classes() -> None:
    part = Samples(torch.randn(4, 3), torch.tensor([0, 1, 5, 5]), classes=tuple("0123456789"))
    assert len(federate([part], tests=[part]).dataset.classes) == 10


def test_arrays_of_no_numbers_are_one_line() -> None:
    """Objects, rows of different lengths, and text, as inputs or labels."""
    x, y = np.zeros((8, 2), dtype=np.float32), np.arange(8) % 2
    ragged = np.empty(8, dtype=object)
    ragged[:] = [np.zeros(k + 1) for k in range(8)]
    objects = "silo client-0 holds values that are not numbers: give numbers"
    for given, line in (
        ((x.astype(object), y), objects),
        ((ragged, y), objects),
        (
            (x.astype(str), y),
            "silo client-0 holds <U32 as inputs: give numbers, or a frame of texts",
        ),
        ((x, np.array(["a", 1] * 4, dtype=object)), objects),
    ):
        with pytest.raises(UserError, match=line):
            federate([given, given])


def test_parts_of_a_data_set_are_refused_with_the_way_that_keeps_its_scaling() -> None:
    client = split(load("digits"), "iid", 2).clients[0]
    parts: tuple[Any, ...] = (client, client.train)
    for part in parts:
        with pytest.raises(UserError, match=r"neither scaling nor augmentation.*data.subset"):
            federate([part])
