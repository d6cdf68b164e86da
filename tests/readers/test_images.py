"""Pictures that are stored in different ways and look the same give the same tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import ekiden
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import load
from ekiden.readers import cache
from ekiden.readers.kinds import Images
from tests.readers.pictures import Pixels, encoded, few, pixels, read, stack, tensor, tiff

sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
seeds = st.integers(0, 2**16)


# Orientation


def test_sizes_are_those_of_upright_pictures(tmp_path: Path) -> None:
    for k in range(10):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        kind = ("png", "tiff", "webp", "jpeg")[k % 4]
        file = tmp_path / "ab"[k % 2] / f"{k}.{kind}"
        file.write_bytes(encoded(Image.fromarray(pixels(k, 4, 6)), kind.upper(), k % 8 + 1))
    assert load(str(tmp_path)).shape == (3, 4, 6)


def test_a_cache_of_another_reading_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(10):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[k % 2] / f"{k}.png").write_bytes(
            encoded(Image.fromarray(pixels(k, 4, 6)), "PNG", 3)
        )
    first = load(str(tmp_path))
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    monkeypatch.setattr("ekiden.readers.raster._UPRIGHT", {})
    assert not torch.equal(load(str(tmp_path)).train.x, first.train.x)


# Values of more than 8 bits


def test_measurements_need_a_window_and_not_a_number_is_black() -> None:
    values = np.array([[-5.0, 0.0], [np.nan, 10.0]], np.float32)
    data = tiff(values, "<", kind=3)
    with pytest.raises(
        UserError, match=r"its pixels go from -5 to 10: say which values .* pixel_window LOW HIGH"
    ):
        read(data)
    with pytest.warns(
        DataWarning, match="1 of 1 image in the images given have pixels that are not a number"
    ):
        assert read(data, window=(0, 10)).flatten().tolist() == [0, 0, 0, 255]
    with pytest.raises(UserError, match="its pixels are not numbers"):
        read(tiff(values * np.nan, "<", kind=3), window=(0, 10))
    for signed in (np.array([[-1, 5]], np.int16), np.array([[0, 1 << 20]], np.int32)):
        with pytest.raises(UserError, match="say which values become black and white"):
            read(tiff(signed, "<", kind=2))


def test_each_silo_must_use_its_range(tmp_path: Path) -> None:
    for silo, most in (("north", 65535), ("south", 4095)):
        (tmp_path / silo / "a").mkdir(parents=True)
        for k in range(5):
            ramp = np.linspace(0, most, 16).reshape(4, 4).astype(np.uint16)
            Image.fromarray(ramp).save(tmp_path / silo / "a" / f"{k}.png")
    with pytest.raises(
        UserError, match=r"south have 16 bits and values up to 4095 only.* pixel_window=\[0, 4095\]"
    ):
        ekiden.data.join([str(tmp_path / "north"), str(tmp_path / "south")])
    rows = [
        {"image": f"{silo}/a/{k}.png", "label": k % 2, "site": silo}
        for silo in ("north", "south")
        for k in range(5)
    ]
    pandas.DataFrame(rows).to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(
        UserError, match=r"group south of .*all.csv have 16 bits and values up to 4095 only"
    ):
        load(str(tmp_path / "all.csv"), image_column="image", group_column="site")


def test_a_grey_silo_and_a_deep_one_are_named(tmp_path: Path) -> None:
    forms: dict[str, Callable[[Pixels], NDArray[Any]]] = {
        "colour": lambda x: x,
        "grey": lambda x: x[:, :, 0],
        "deep": lambda x: x[:, :, 0].astype(np.uint16) * 257,
    }
    for place, (silo, form) in enumerate(forms.items()):
        (tmp_path / silo / "a").mkdir(parents=True)
        for k in range(5):
            shown = pixels(100 * place + k, 4, 4)
            Image.fromarray(form(shown)).save(tmp_path / silo / "a" / f"{k}.png")
    with pytest.warns(DataWarning) as seen:
        data = ekiden.data.join([str(tmp_path / silo) for silo in forms])
    first, second, _ = (str(one.message) for one in seen)
    assert "colour are in colour, those in " in first
    assert "grey and 1 other grey: check" in first
    assert "deep of 16 bits: check" in second  # the third: all are of one class
    assert data.shape == (3, 4, 4)
    with pytest.warns(DataWarning, match="16 bits"):
        assert ekiden.data.join([str(tmp_path / silo) for silo in forms], colour="grey").shape == (
            1,
            4,
            4,
        )


# Grey and colour


@few
@given(seeds, sides)
def test_channels_are_a_choice(seed: int, side: tuple[int, int]) -> None:
    shown, grey = pixels(seed, *side), pixels(seed + 1, *side, 1)
    colour_file, grey_file = encoded(Image.fromarray(shown)), encoded(Image.fromarray(grey))
    assert torch.equal(read(grey_file, colour_file)[0], tensor(grey).expand(3, -1, -1))
    assert torch.equal(read(grey_file, colour="rgb")[0], tensor(grey).expand(3, -1, -1))
    luminance = (
        tensor(shown)
        .double()
        .mul(torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None])
        .sum(0)
    )
    assert (read(colour_file, colour="grey")[0, 0] - luminance).abs().max() <= 0.51
    assert torch.equal(Images().encode([grey_file], (3, *side))[0], tensor(grey).expand(3, -1, -1))
    stored_as_colour = encoded(Image.fromarray(np.repeat(grey[:, :, None], 3, axis=2)))
    assert torch.equal(Images().encode([stored_as_colour], (1, *side))[0], tensor(grey))
    if (shown != shown[:, :, :1]).any():
        with pytest.raises(
            UserError, match="it is in colour, but the model was trained on grey images"
        ):
            Images().encode([colour_file], (1, *side))


# Pages


def test_tables_name_pages(tmp_path: Path) -> None:
    (tmp_path / "film.tif").write_bytes(stack("TIFF", [0, 100, 200]))
    rows = [{"image": f"film.tif#{k % 3}", "label": "abc"[k % 3]} for k in range(15)]
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    paths = [{"bytes": None, "path": row["image"]} for row in rows]
    table = pa.table({"image": paths, "label": [row["label"] for row in rows]})
    pq.write_table(table, tmp_path / "b.parquet")
    ways: list[tuple[str, dict[str, Any]]] = [
        ("a.csv", {"image_column": "image"}),
        ("b.parquet", {}),
    ]
    for name, how in ways:
        data = load(str(tmp_path / name), **how)
        assert {
            (int(x.max()), int(y)) for x, y in zip(data.train.x, data.train.y, strict=True)
        } == {
            (0, 0),
            (100, 1),
            (200, 2),
        }
    first = load(str(tmp_path / "b.parquet")).train.x
    (tmp_path / "film.tif").write_bytes(
        stack("TIFF", [10, 110, 210])
    )  # the cache follows the file that is named
    assert not torch.equal(load(str(tmp_path / "b.parquet")).train.x, first)


def test_the_line_about_pages_is_said_once_for_a_data_set_and_again_when_it_is_cached(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(10):
        (tmp_path / "scans" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        data = (
            stack("TIFF", [0, 100 * (k % 2), 255])
            if k < 8
            else encoded(Image.new("RGB", (6, 6)), "TIFF")
        )
        (tmp_path / "scans" / "ab"[k % 2] / f"{k}.tif").write_bytes(data)
    for _ in range(2):
        with pytest.warns(DataWarning) as seen:
            load(str(tmp_path / "scans"))
        assert [line for one in seen if "images in" in (line := str(one.message))] == [
            f"8 of 10 images in {tmp_path / 'scans'} have several pages, frames or slices (up to "
            "3); the middle one is "
            "read (number 1 of 3, counted from 0): name another after #, as in FILE#0"
        ]
    monkeypatch.chdir(tmp_path)
    code, said = command(
        "run", "fedavg", "--data", "scans", "--clients", "2", "--partition", "iid", "--rounds", "1"
    )
    assert code == 0, said
    assert said.count("ekiden: 8 of 10 images in") == 1
    code, said = command("predict", "runs/fedavg-scans-seed0", "scans")
    assert code == 0, said
    assert said.count("ekiden: 8 of 10 images in the files given have several pages") == 1
    named = Path("scans") / "a" / "0.tif#2"
    code, said = command("predict", "runs/fedavg-scans-seed0", str(named))
    assert code == 0, said
    assert f'"{named}",' in said
    assert "pages" not in said


# Broken files


def test_evaluation_and_prediction_on_other_files_read_as_training_did(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of colour images of 8 x 8 measures grey ones of another size, dark 16-bit ones, and
    turned ones."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    forms: dict[str, Callable[[Image.Image, int], bytes]] = {
        "train": lambda image, k: encoded(image, "PNG"),
        "turned": lambda image, k: encoded(
            image.resize((16, 16), Image.Resampling.NEAREST), "TIFF", k % 8 + 1
        ),
        "grey": lambda image, k: encoded(
            image.convert("L").resize((24, 24), Image.Resampling.NEAREST), "PNG"
        ),
    }
    for name, form in forms.items():
        for k in range(40):
            shown = draw.integers(0, 100, (8, 8, 3), dtype=np.uint8)
            shown[: 4 if k % 2 else 8, :, :] += 20 * (k % 2)
            shown[:4] += 150 * (k % 2)
            file = (
                tmp_path
                / name
                / ("plain", "sky")[k % 2]
                / f"{k}.{'tif' if name == 'turned' else 'png'}"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(form(Image.fromarray(shown), k))
    code, said = command(
        "run", "fedseq", "--data", "train", "--clients", "2", "--partition", "iid", "--epochs", "10"
    )
    assert code == 0, said
    run = "runs/fedseq-train-seed0"
    for name in ("turned", "grey"):
        code, said = command("predict", run, name, "-o", f"{name}.csv")
        assert code == 0, said
        answers = pandas.read_csv(f"{name}.csv")
        assert (answers.prediction == answers.file.str.split("/").str[-2]).mean() > 0.9
        code, said = command("evaluate", run, "--data", name)
        assert code == 0, said
        assert "on 40 of 40 rows" in said
    dark = Image.fromarray(
        np.full((8, 8), 3000, np.uint16)
    )  # alone, it would be refused in training
    (tmp_path / "dark.png").write_bytes(encoded(dark, "PNG"))
    code, said = command("predict", run, "dark.png")
    assert code == 0, said


def test_links_to_folders_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    for k in range(10):
        file = tmp_path / "store" / f"{k}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels(k, 4, 4)).save(file)
    for name in ("cat", "dog"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).symlink_to(tmp_path / "store", target_is_directory=True)
    (tmp_path / "store" / "again").symlink_to(tmp_path / "data", target_is_directory=True)
    made = load(str(tmp_path / "data"))
    assert len(made.train) + len(made.test) == 20
    assert made.classes == ("cat", "dog")


pytestmark = pytest.mark.usefixtures("no_data")
N, SHAPE = 6, (8, 6, 5)
AFFINE = np.diag([2.0, 2, 3, 1])


def listed(folder: Path, image: str, mask: str) -> str:
    table = {
        "image": [image.format(k) for k in range(N)],
        "mask": [mask.format(k) for k in range(N)],
    }
    pandas.DataFrame(table).to_csv(folder / "t.csv", index=False)
    return str(folder / "t.csv")


def volumes(
    folder: Path, change: Callable[[Any, Any], tuple[Any, Any]] = lambda mask, at: (mask, at)
) -> None:
    """Write volumes and their masks, which are 1 where a voxel is above 127; every other mask is
    changed."""
    nibabel = pytest.importorskip("nibabel")
    for k in range(N):
        voxels = np.random.default_rng(k).integers(0, 255, SHAPE).astype(np.float32)
        mask, at = (voxels > 127).astype(np.uint8), AFFINE.copy()
        if k % 2:
            mask, at = change(mask, at)
        nibabel.save(nibabel.Nifti1Image(voxels, AFFINE), folder / f"i{k}.nii")
        nibabel.save(nibabel.Nifti1Image(mask, at), folder / f"m{k}.nii")


def turned(mask: Any, at: Any) -> tuple[Any, Any]:
    """Return the same mask with its first axis mirrored and its axes in another order, as its
    affine says."""
    mirror = np.eye(4)
    mirror[0, 0], mirror[0, 3] = -1, SHAPE[0] - 1
    order = np.eye(4)[[1, 0, 2, 3]]
    return np.ascontiguousarray(mask[::-1].swapaxes(0, 1)), at @ mirror @ order


def moved(mask: Any, at: Any) -> tuple[Any, Any]:
    at[0, 3] += 4
    return mask, at


@pytest.mark.filterwarnings("ignore:.*the middle one is read")
@pytest.mark.parametrize("number", ["", "#1"])
@pytest.mark.parametrize(
    "change", [lambda mask, at: (mask, at), lambda mask, at: (mask.astype(float), at), turned]
)
def test_a_volume_and_its_mask_are_turned_alike(tmp_path: Path, number: str, change: Any) -> None:
    volumes(tmp_path, change)
    path = listed(tmp_path, f"i{{}}.nii{number}", "m{}.nii")
    data = load(path, label_column="mask")
    assert (data.task.kind, data.classes, data.shape) == ("segmentation", ("0", "1"), (1, 6, 8))
    assert ((data.train.x[:, 0] > 127) == (data.train.y == 1)).all()


@pytest.mark.parametrize(
    ("change", "mask", "line"),
    [
        (moved, "m{}.nii", "up to 4 mm apart: bring both to one grid"),
        (
            lambda mask, at: (mask[:, :, :4], at),
            "m{}.nii",
            "it has 8 x 6 x 4 voxels, its image 8 x 6 x 5",
        ),
        (lambda mask, at: (mask / 2, at), "m{}.nii", "its pixels are not whole numbers"),
        (lambda mask, at: (mask * np.nan, at), "m{}.nii", "its pixels are not whole numbers"),
        (turned, "m{}.nii#2", "it names slice 2, which its image i0.nii does not"),
        (lambda mask, at: (mask * 255, at), "m{}.nii", "have the labels 0, 1, 255 only"),
    ],
)
def test_a_mask_that_does_not_lie_on_its_volume_is_refused(
    tmp_path: Path, change: Any, mask: str, line: str
) -> None:
    volumes(tmp_path, change)
    with pytest.raises(UserError) as error:
        load(listed(tmp_path, "i{}.nii", mask), label_column="mask")
    assert line in str(error.value)


def pictures(folder: Path, mode: str = "L", suffix: str = "png", limit: int = 127) -> str:
    for k in range(N):
        pixels = np.random.default_rng(k).integers(0, 255, (8, 6), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"i{k}.png")
        mask = Image.fromarray((pixels > limit).astype(np.uint8))
        if mode == "P":
            mask.putpalette([0, 0, 0, 255, 0, 0] + [0] * 762)
        (mask if mode in "LP" else mask.convert(mode)).save(folder / f"m{k}.{suffix}")
    return listed(folder, "i{}.png", f"m{{}}.{suffix}")


@pytest.mark.parametrize("mode", ["L", "P"])
def test_masks_are_grey_values_or_numbers_of_a_palette(tmp_path: Path, mode: str) -> None:
    data = load(pictures(tmp_path, mode), label_column="mask")
    assert ((data.train.x[:, 0] > 127) == (data.train.y == 1)).all()


@pytest.mark.parametrize(
    ("mode", "suffix", "form"), [("RGB", "png", "PNG of mode RGB"), ("L", "jpg", "JPEG of mode L")]
)
def test_masks_with_colours_and_lossy_ones_are_refused(
    tmp_path: Path, mode: str, suffix: str, form: str
) -> None:
    with pytest.raises(
        UserError, match=f"the mask of .*i0.png: it is {form}: give numbers of classes"
    ):
        load(pictures(tmp_path, mode, suffix), label_column="mask")


def test_images_that_are_their_own_masks_are_refused(tmp_path: Path) -> None:
    names = [f"i{k}.jpg" for k in range(8)]
    for k, name in enumerate(names):
        pixels = np.random.default_rng(k).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    table = tmp_path / "t.csv"
    pandas.DataFrame({"image": names, "label": names}).to_csv(table, index=False)
    with pytest.raises(UserError, match=r"names i0\.jpg as an image and as its mask"):
        ekiden.load(table)


def test_masks_are_read_again_when_they_change(tmp_path: Path) -> None:
    before = load(pictures(tmp_path), label_column="mask").train.y.sum()
    assert load(pictures(tmp_path, limit=50), label_column="mask").train.y.sum() > before


@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_masks_come_to_the_size_of_their_images(tmp_path: Path, fit: Any) -> None:
    for k in range(N):  # squares, of which some are cropped; images and masks of two sizes
        side = 4 << k % 2
        squares = (
            np.random.default_rng(k)
            .integers(0, 2, (4, 4 if fit == "stretch" else 6))
            .repeat(side, 0)
        )
        image = Image.fromarray((255 * squares.repeat(side, 1)).astype(np.uint8))
        image.save(tmp_path / f"i{k}.png")
        image.point(lambda value: value // 255).save(tmp_path / f"m{k}.png")
    path = listed(tmp_path, "i{}.png", "m{}.png")
    data = load(path, label_column="mask", size=4, fit=fit)
    assert data.train.y.shape[1:] == (4, 4)
    assert ((data.train.x[:, 0] > 127) == (data.train.y == 1)).all()
    assert torch.equal(load(path, label_column="mask", like=data).train.y, data.train.y)
    with pytest.raises(UserError, match=r"masks of .* differ in size \(.*\): give one size"):
        load(path, label_column="mask")
    rows = pandas.read_csv(path).assign(site=["A", "B"] * (N // 2))
    rows.to_csv(path, index=False)
    small = load(path, label_column="mask", group_column="site", without=["B"])
    assert small.train.y.shape[1:] == small.train.x.shape[2:]


def test_a_model_learns_from_masks_of_files(tmp_path: Path) -> None:
    data = ekiden.split(load(pictures(tmp_path), label_column="mask"), "iid", 2, val_fraction=0)
    result = ekiden.run(ekiden.FedSeq(epochs=1), data, "unet")
    assert result.model(data.dataset.test.x.float()).shape[1:] == (2, 8, 6)
