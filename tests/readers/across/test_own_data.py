"""A user's own files, frames and arrays: what works, and the one line that says what is wrong."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.core.models import build
from ekiden.core.tasks import Classification, LanguageModelling, MultiLabel, Regression
from ekiden.data import ClientData, Dataset, FederatedData, Subset, federate, join, load, split
from ekiden.methods import FedAvg
from ekiden.readers.kinds import Arrays, Images, Table, Tokens, from_json

pytestmark = pytest.mark.usefixtures("no_data")
Rows = dict[str, list[Any]]


def patients(n: int = 60, seed: int = 0) -> Rows:
    """A table with numbers, a gap, categories, groups, and labels of every kind."""
    rng = np.random.default_rng(seed)
    age = rng.normal(60, 10, n)
    sex = rng.choice(["female", "male"], n)
    dose: list[float | None] = list(rng.normal(5, 1, n))
    dose[:: max(n // 12, 1)] = [None] * len(dose[:: max(n // 12, 1)])
    return {
        "age": age.tolist(),
        "sex": sex.tolist(),
        "dose": dose,
        "ward": [["north", "south", "east"][k % 3] for k in range(n)],
        "died": np.where(age + 5 * (sex == "male") > 62, "yes", "no").tolist(),
        "days": (1000 - 10 * age).round(1).tolist(),
        "cough": (age > 60).astype(int).tolist(),
        "fever": (age > 65).astype(int).tolist(),
    }


def csv(path: Path, rows: Rows, delimiter: str = ",") -> str:
    """Write a table as text; an empty cell for None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, index=False, sep=delimiter)
    return str(path)


def parquet(path: Path, rows: Mapping[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), path)
    return str(path)


LABELS = ("died", "days", "cough", "fever")


def others(*labels: str) -> list[str]:
    """Columns that hold labels of other things."""
    return [name for name in LABELS if name not in labels]


def clinic(rows: Rows, **more: Any) -> FederatedData:
    """Divided by ward, to predict who dies."""
    made = load(rows, label_column="died", group_column="ward", drop_columns=others("died"), **more)
    return split(made, "natural")


# Tables


def test_a_table_is_scaled_by_what_the_clients_tell() -> None:
    data = clinic(patients(), min_count=2)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert (table.numeric, table.categorical, table.gaps) == (("age", "dose"), ("sex",), ("dose",))
    assert table.vocabularies == (("female", "male"),)
    assert [client.name for client in data.clients] == ["east", "north", "south"]
    rows = torch.cat([client.train.x for client in data.clients])
    assert rows.dtype == torch.float32
    assert rows.shape[1] == 4  # age, dose, whether dose is missing, sex
    assert rows[:, 0].mean().abs() < 1e-5
    assert (rows[:, 0].std(correction=0) - 1).abs() < 1e-5
    assert set(rows[:, 3].tolist()) == {1.0, 2.0}
    missing = rows[:, 2] == 1
    assert 0 < missing.sum() < len(rows)
    assert (rows[missing, 1] == 0).all()  # the mean
    assert torch.equal(data.dataset.train.x[data.clients[0].train.rows], data.clients[0].train.x)


def test_the_scale_is_that_of_pooled_training_rows_and_nothing_else() -> None:
    rows = patients()
    raw = load(
        rows, label_column="died", group_column="ward", drop_columns=others("died"), min_count=1
    )
    before = raw.train.x.clone()
    data = split(raw, "natural", val_fraction=0.0)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.centre[0] == pytest.approx(float(before[:, 0].mean()))
    assert table.scale[0] == pytest.approx(float(before[:, 0].std(correction=0)))


def test_a_rare_category_and_a_rare_gap_are_not_told_of() -> None:
    rows = patients(90)
    rows["sex"][4] = "Ada Lovelace"
    rows["dose"] = [5.0 + k % 7 for k in range(90)]
    rows["dose"][5] = None
    data = clinic(rows, min_count=5)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.vocabularies == (("female", "male"),)
    assert table.gaps == ()
    assert "Ada" not in json.dumps(table.to_json())
    assert 0.0 in torch.cat(
        [data.dataset.train.x[:, -1], data.dataset.test.x[:, -1]]
    )  # the code of all others


def test_sums_are_what_is_told_and_add_up() -> None:
    from ekiden.readers.moments import ColumnSums, told_by
    from ekiden.readers.scaling import agree

    raw = load(
        patients(),
        label_column="died",
        group_column="ward",
        drop_columns=others("died"),
        min_count=2,
    )
    whole = split(raw, "iid", 1, val_fraction=0.0)
    parts = split(raw, "natural", val_fraction=0.0)
    assert isinstance(raw.inputs, Table)
    # Clients of a data set that is not scaled yet.
    unscaled = [Subset(raw.train, client.train.rows) for client in parts.clients]
    told = [told_by(ClientData(str(k), s, s, s), raw) for k, s in enumerate(unscaled)]
    assert sum(t.moments["age"].count for t in told) == len(raw.train)
    again = [ColumnSums.from_json(t.to_json(), "here") for t in told]
    assert again == told
    one = whole.dataset.inputs
    assert isinstance(one, Table)
    assert agree(raw.inputs, told).centre == pytest.approx(one.centre)
    assert agree(raw.inputs, told).scale == pytest.approx(one.scale)


@pytest.mark.filterwarnings("ignore:.* categories that the model does not know")
def test_inputs_are_plain_values_and_encode_new_rows(tmp_path: Path) -> None:
    rows = patients()
    data = clinic(rows, min_count=2)
    table = from_json(json.loads(json.dumps(data.dataset.inputs.to_json())))
    assert table == data.dataset.inputs
    given = {
        "sex": ["male", "other"],
        "age": [60.0, None],
        "dose": [5.0, None],
    }  # columns in another order
    x = table.encode(given)
    assert isinstance(table, Table)
    assert x[0, 0] == pytest.approx((60 - table.centre[0]) / table.scale[0], abs=1e-6)
    assert x[1].tolist() == [0, 0, 1, 0]
    assert torch.equal(table.encode(parquet(tmp_path / "new.parquet", given)), x)
    with pytest.raises(UserError, match="has no column 'dose', which"):
        table.encode({"age": [1.0], "sex": ["male"]})
    with pytest.raises(
        UserError,
        match=r"column 'age' .* holds text \('old' in row 0 .*\), but numbers are expected",
    ):
        table.encode(given | {"age": ["old", "60"]})


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


@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_targets_are_standardised_by_what_clients_tell() -> None:
    data = load(
        patients(),
        label_column="days",
        group_column="ward",
        drop_columns=others("days"),
        min_count=2,
    )
    silos = split(data, "natural", val_fraction=0.0)
    task = silos.dataset.task
    assert isinstance(task, Regression)
    assert task.mean[0] == pytest.approx(float(silos.dataset.train.y.double().mean()))
    assert task.std[0] == pytest.approx(float(silos.dataset.train.y.double().std(correction=0)))


@pytest.mark.parametrize(("model", "width"), [("table_mlp", 64), ("table_transformer", 32)])
def test_networks_for_tables_learn(model: str, width: int) -> None:
    silos = clinic(patients(240), min_count=2)
    training = ekiden.Training(lr=1e-2, batch_size=32)
    result = ekiden.run(FedAvg(rounds=3, epochs=5), silos, model, training=training)
    assert result.accuracy > 0.8  # the larger class has 0.5 to 0.6
    assert result.model.get_submodule("head").in_features == width


def test_columns_of_numbers_can_be_categories_and_dates_are_numbers() -> None:
    rows = patients(60) | {"zip": [k % 2 for k in range(60)]}
    rows["seen"] = pandas.date_range("2020-01-01", periods=60).to_pydatetime().tolist()
    data = clinic(rows, categorical_columns="zip", min_count=2)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.categorical == ("sex", "zip")
    assert table.vocabularies[1] == ("0", "1")
    assert table.numeric == ("age", "dose", "seen")
    assert table.centre[2] == pytest.approx(18262 + 29.5, abs=5)  # days since 1970


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


# Texts


def sentences(n: int = 60) -> Rows:
    good, bad = (
        ("a fine and happy film", "I love it"),
        ("a dull, sad film", "I hate it, really, and would not see it"),
    )
    return {
        "text": [
            (good if k % 2 else bad)[k // 2 % 2] + f" again {k}" * (1 + k % 5) for k in range(n)
        ],
        "label": ["good" if k % 2 else "bad" for k in range(n)],
        "site": [f"site {k % 3}" for k in range(n)],
    }


@pytest.mark.parametrize("model", ["auto", "text_transformer"])
def test_texts_are_learned(model: str) -> None:
    data = split(load(sentences(120), text_column="text", group_column="site"), "natural")
    assert isinstance(data.dataset.inputs, Tokens)
    assert data.dataset.train.x.dtype == torch.int64
    training = ekiden.Training(lr=5e-3, batch_size=16)
    result = ekiden.run(FedAvg(rounds=2, epochs=4), data, model, training=training)
    assert result.accuracy > 0.9


def test_batches_of_texts_are_of_similar_length_and_trimmed() -> None:
    from ekiden.core.base.settings import Hardware
    from ekiden.core.training.feed import Feed
    from ekiden.core.training.fit import shuffled

    rows = sentences(64)
    rows["text"] = ["word " * (1 + k) for k in range(64)]
    data = load(rows, text_column="text", drop_columns="site")
    silo = split(data, "iid", 1, val_fraction=0.0).clients[0].train
    feed = Feed(data, Hardware())
    lengths = feed.lengths(silo)
    assert lengths is not None
    torch.manual_seed(0)
    widths = []
    for batch in shuffled(len(silo), 8, lengths):
        x, y = feed.batch(silo, batch, train=True)
        assert x.shape[1] == int(lengths[batch].max())
        assert len(y) == len(x)
        widths.append(x.shape[1] - int(lengths[batch].min()))
    assert max(widths) < 20  # at random, about 45
    seen = torch.cat(list(shuffled(len(silo), 8, lengths)))
    assert sorted(seen.tolist()) == list(range(len(silo)))


def test_words_need_no_agreement_and_padding_says_nothing() -> None:
    tokens = Tokens()
    one, two = (
        tokens.encode(["A fine film."]),
        tokens.encode(["A fine film.", "so much more than that, is it not?"]),
    )
    assert one.shape[1] == 4
    assert torch.equal(two[0, :4], one[0])
    assert tokens.lengths(two).tolist() == [4, 10]
    torch.manual_seed(0)
    for name in ("text_mean", "text_transformer"):
        network = build(name, (10,), 2, tokens).eval()
        torch.testing.assert_close(network(two)[:1], network(one))
        assert torch.isfinite(network(torch.zeros(1, 3, dtype=torch.int64))).all()  # an empty text


def test_a_models_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "film": 2, "fine": 3}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    data = load(sentences(), text_column="text", drop_columns="site", tokenizer=str(tmp_path))
    tokens = data.inputs
    assert isinstance(tokens, Tokens)
    assert (tokens.vocabulary, tokens.pad) == (4, 0)
    assert set(data.train.x.flatten().tolist()) <= {0, 1, 2, 3}
    assert tokens.encode(["fine film"]).tolist() == [[3, 2]]
    made.add_tokens(["more"])
    made.save(str(tmp_path / "other.json"))
    other = replace(tokens, tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="holds another tokenizer"):
        other.encode(["fine"])


def test_texts_without_labels_are_for_language_modelling() -> None:
    rows = {"text": sentences()["text"], "site": sentences()["site"]}
    data = load(rows, text_column="text", group_column="site", task="language-modelling")
    assert isinstance(data.task, LanguageModelling)
    assert isinstance(data.inputs, Tokens)
    assert data.task.vocabulary == data.inputs.vocabulary
    assert ((data.train.y == -100) == (data.train.x == 0)).all()


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


def test_images_named_by_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows: Rows = {"file": [], "kind": [], "scanner": []}
    for k in range(20):
        Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / f"{k}.png")
        rows["file"].append(f"{k}.png")
        rows["kind"].append("ab"[k % 2])
        rows["scanner"].append(f"s{k % 4 // 2}")
    path = csv(tmp_path / "list.csv", rows)
    data = load(path, image_column="file", label_column="kind", group_column="scanner")
    assert data.shape == (1, 6, 6)
    assert data.groups == ("s0", "s1")
    Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / "0.png")
    changed = load(path, image_column="file", label_column="kind", group_column="scanner")
    assert not torch.equal(
        data.train.x.sum() + data.test.x.sum(), changed.train.x.sum() + changed.test.x.sum()
    )


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


def bad(rows: Rows, **changes: Any) -> Rows:
    """With some columns changed; None removes one."""
    return {k: v for k, v in (rows | changes).items() if v is not None}


def half(rows: Rows) -> Rows:
    return {k: v[: len(v) // 2] for k, v in rows.items()}


P = {k: v for k, v in patients().items() if k in ("age", "sex", "dose", "died")}
DIED = {"label_column": "died"}
MISTAKES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("a label column that is not there", P, {"label_column": "dead"}, "unknown column of .* 'dead': did you mean 'died'"),
    ("no label column", P, {}, r"has no column 'label': say which one holds the labels .* it has: age, sex, dose, died"),
    ("a group column that is not there", P, DIED | {"group_column": "ward"}, "unknown column of .* 'ward'"),
    ("a missing label", bad(P, died=[None, *P["died"][1:]]), DIED, r"the label in row 0 .* of .* is missing \(column 'died'\)"),  # noqa: E501
    ("one class", bad(P, died=["yes"] * 60), DIED, "all labels in .* are 'yes': classification needs two"),
    ("an infinite number", bad(P, age=[float("inf")] * 60), DIED, "column 'age' of .* is infinite in row 0"),
    ("a column without values", bad(P, age=[None] * 60), DIED, "column 'age' of .* has no value at all: .*drop_columns"),
    ("a label among the features", P, DIED | {"feature_columns": ["age", "died"]}, "'died' cannot be a feature and have another meaning"),  # noqa: E501
    ("no feature left", P, DIED | {"drop_columns": ["age", "sex", "dose"]}, "has no column left to learn from"),
    ("names as categories", bad(P, sex=[f"person {k // 5}" for k in range(60)]), DIED, "'sex' has no text that enough rows"),
    ("lists as a feature", bad(P, age=[[1, 2]] * 60) | {"b": [[1.0]] * 60}, DIED, "'age' .* holds list.*neither numbers nor"),  # noqa: E501
    ("many whole numbers as labels", bad(P, died=list(range(60))), DIED, "60 different whole numbers: use task"),
    ("text for a regression", P, DIED | {"task": "regression"}, "'died' .* holds text .*regression needs numbers"),
    ("fractions for classes", bad(P, died=[0.5] * 60), DIED | {"task": "classification"}, "is 0.5, not a class"),
    ("2 in a multi-label", bad(P, cough=[2] * 60, fever=[0] * 60), {"label_column": ("cough", "fever"),
     "drop_columns": "died", "task": "multi-label"}, "multi-label needs a row of 0 and 1"),
    ("text among several labels", P, {"label_column": ("sex", "age")}, "'sex' .* holds names: with several"),
    ("an unknown task", P, DIED | {"task": "regression2"}, "unknown task 'regression2': did you mean 'regression'"),
    ("an option that is not there", P, {"labels": "died"}, "unknown option 'labels'"),
    ("numbers as texts", P, DIED | {"text_column": "age"}, "'age' of .* holds double, not texts"),
    ("a tokenizer that is not there", P, DIED | {"text_column": "sex", "tokenizer": "bert"}, "there is no tokenizer 'bert'"),
    ("text and images", P, DIED | {"text_column": "sex", "image_column": "age"}, "give one of image_column"),
    ("an image column of numbers", P, DIED | {"image_column": "age"}, "'age' of .* holds double: images must be"),
    ("images that are not there", P, DIED | {"image_column": "sex"}, "row 0 .* of .* names the image .*which is not a file"),
    ("arrays of unlike length", bad(P, age=[[1.0] * (1 + k % 2) for k in range(60)]), DIED, "has 2 values, row 0 has 1 in row 1"),  # noqa: E501
    ("no lists in the array column", P, DIED | {"array_column": "age"}, "'age' of .* holds double, not lists of numbers"),
    ("too few rows", {k: v[:1] for k, v in P.items()}, DIED | {"task": "classification"}, "all labels|too few"),
    ("--size for a table", P, DIED | {"size": 32}, "size is the side of images, but the data are a table"),
    ("a window of one value", P, DIED | {"pixel_window": (1.0,)}, "pixel_window needs two values, low and high"),
    ("min-count 0", P, DIED | {"min_count": 0}, "min_count 0 is out of range"),
    ("a group without a value", bad(P, ward=[None, *["a"] * 59]), DIED | {"group_column": "ward"}, "'ward' .* has no value in row 0"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "options", "line"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes_in_a_table(
    rows: Rows, options: dict[str, Any], line: str, tmp_path: Path, command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same line from Python and on the command line; nothing is written."""
    monkeypatch.chdir(tmp_path)
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(UserError, match=line):
        split(load(path, **options), "iid", 2)
    if "labels" in options:
        return
    flags: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple | list) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    code, said = command(
        "run",
        "fedavg",
        "--rounds",
        "1",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--data",
        path,
        *flags,
    )
    assert code == 2
    assert said.startswith("ekiden: ")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


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


def test_a_category_that_training_never_saw_is_one_of_the_others() -> None:
    rows = patients(60)
    data = clinic(rows, min_count=2)
    assert isinstance(data.dataset.inputs, Table)
    with pytest.warns(
        ekiden.DataWarning, match=r"does not know \(column 'sex': 'unheard of' in 1 of 1 rows\)"
    ):
        encoded = data.dataset.inputs.encode({"age": [50], "sex": ["unheard of"], "dose": [1]})
    assert encoded[0, -1] == 0


def test_networks_that_do_not_read_such_samples_say_so() -> None:
    table, texts = (
        clinic(patients(), min_count=2),
        split(load(sentences(), text_column="text", drop_columns="site"), "iid", 2),
    )
    with pytest.raises(
        UserError, match=r"mlp reads numbers, but these samples are a table: .*table_mlp, table_tr"
    ):
        ekiden.run("fedavg", table, "mlp")
    with pytest.raises(
        UserError, match=r"table_mlp reads .*, but these samples are texts: .*text_mean"
    ):
        ekiden.run("fedavg", texts, "table_mlp")
    with pytest.raises(UserError, match="lenet reads numbers, but these samples are texts"):
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
