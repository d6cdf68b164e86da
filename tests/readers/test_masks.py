"""Files of masks that a table names next to their images: NIfTI volumes turned alike, and PNG
files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.data import load
from tests.readers.told import said

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


@pytest.mark.parametrize(
    ("mask", "orientation", "line"),
    [
        ("m{k}.png", 0, ""),
        ("m{other}.png", 0, "8 masks of .* have the number of another"),
        ("m{k}.png", 6, "8 images of"),
    ],
)
def test_masks_that_may_be_those_of_other_pictures_are_named(
    tmp_path: Path, mask: str, orientation: int, line: str
) -> None:
    exif, rows = Image.Exif(), []
    exif[274] = orientation
    for k in range(8):
        Image.fromarray(np.random.default_rng(k).integers(0, 256, (8, 8), np.uint8)).save(
            tmp_path / f"i{k}.jpg", exif=exif
        )
        Image.fromarray(np.eye(8, dtype=np.uint8)).save(tmp_path / f"m{k}.png")
        rows.append((f"i{k}.jpg", mask.format(k=k, other=(k + 1) % 8)))
    table = tmp_path / "t.csv"
    pandas.DataFrame(rows, columns=["image", "label"]).to_csv(table, index=False)
    found = said(lambda: ekiden.load(table))
    assert re.search(line, found) if line else not found
    pandas.DataFrame([(i, i) for i, _ in rows], columns=["image", "label"]).to_csv(
        table, index=False
    )
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


def test_a_model_learns_from_masks_of_files(tmp_path: Path) -> None:
    data = ekiden.split(load(pictures(tmp_path), label_column="mask"), "iid", 2, val_fraction=0)
    result = ekiden.run(ekiden.FedSeq(epochs=1), data, "unet")
    assert result.model(data.dataset.test.x.float()).shape[1:] == (2, 8, 6)
