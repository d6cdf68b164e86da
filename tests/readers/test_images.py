"""Pictures that are stored in different ways and look the same give the same tensor."""

import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import ekiden
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import load
from ekiden.readers import cache
from ekiden.readers.kinds import Images
from tests.fuzz import examples
from tests.readers.pictures import Pixels, dicom, encoded

few = settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pixels(seed: int, height: int, width: int, channels: int = 3) -> Pixels:
    """(H, W, channels), or (H, W) for one."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def read(*files: Any, **how: Any) -> Tensor:
    return Images(**how).encode(files)


def tensor(shown: Pixels) -> Tensor:
    return torch.from_numpy(np.atleast_3d(shown)).permute(2, 0, 1)


sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
seeds = st.integers(0, 2**16)


# Orientation


@few
@given(
    seeds, sides, st.sampled_from(["PNG", "TIFF", "WEBP", "JPEG"]), st.integers(1, 8), st.booleans()
)
def test_a_turned_picture_is_read_upright(
    tmp_path: Path, seed: int, side: tuple[int, int], kind: str, orientation: int, as_file: bool
) -> None:
    shown = pixels(seed, *side)
    how = (
        {"lossless": True}
        if kind == "WEBP"
        else {"quality": 100, "subsampling": 0}
        if kind == "JPEG"
        else {}
    )
    data: Any = encoded(Image.fromarray(shown), kind, orientation, **how)
    if as_file:
        (tmp_path / "a.jpg").write_bytes(data)
        data = tmp_path / "a.jpg"
    x = read(data)[0]
    assert x.shape == (3, *side)
    if kind == "JPEG":  # each orientation is another JPEG: what is compared is where the pixels are
        assert (x.int() - tensor(shown).int()).abs().float().mean() < 8
    else:
        assert torch.equal(x, tensor(shown))


@pytest.mark.parametrize("orientation", [0, 9, 4711])
def test_an_orientation_without_a_meaning_and_a_damaged_exif_are_ignored(orientation: int) -> None:
    shown = pixels(0, 3, 5)
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert torch.equal(read(encoded(Image.fromarray(shown), exif=exif))[0], tensor(shown))
    assert torch.equal(
        read(encoded(Image.fromarray(shown), exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))[0],
        tensor(shown),
    )


def test_an_orientation_after_the_pixels_of_a_png_counts() -> None:
    shown = pixels(0, 3, 5)
    data = encoded(Image.fromarray(shown), "PNG", 6)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    late = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    assert torch.equal(read(late)[0], tensor(shown))


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


# Transparency, palettes, depth


def on_white(shown: NDArray[Any], alpha: NDArray[Any]) -> Pixels:
    """Return colours (H, W, C) on white, by alpha (H, W) from 0 to 255."""
    share = alpha.astype(np.float64)[:, :, None] / 255
    return np.rint(np.atleast_3d(shown) * share + 255 * (1 - share)).astype(np.uint8)


@few
@given(seeds, sides, st.sampled_from(["RGBA", "LA"]), st.sampled_from(["PNG", "WEBP", "TIFF"]))
def test_hidden_colours_are_not_read(
    seed: int, side: tuple[int, int], mode: str, kind: str
) -> None:
    kind = "PNG" if mode == "LA" else kind
    channels = 3 if mode == "RGBA" else 1
    shown, alpha = pixels(seed, *side, channels), pixels(seed + 1, *side, 1)
    alpha[: side[0] // 2] = 0
    how = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    images = []
    for hidden in (0, 200):
        colours = np.where(np.atleast_3d(alpha) == 0, np.uint8(hidden), np.atleast_3d(shown))
        stored = Image.fromarray(np.concatenate([colours, alpha[:, :, None]], axis=2))
        images.append(read(encoded(stored, kind, **how))[0])
    assert torch.equal(*images)
    wanted = tensor(on_white(shown, alpha)).int()
    assert (images[0].int() - wanted).abs().max() <= 1


@few
@given(seeds, sides, st.booleans())
def test_palettes_with_and_without_transparency(
    seed: int, side: tuple[int, int], grey: bool
) -> None:
    palette = (
        np.repeat(pixels(seed, 1, 16, 1).reshape(16, 1), 3, axis=1)
        if grey
        else pixels(seed, 1, 16)[0]
    )
    codes = pixels(seed + 1, *side, 1) % 16
    image = Image.fromarray(codes, "P")
    image.putpalette(palette.tobytes())
    shown = palette[codes] if not grey else palette[codes][:, :, 0]
    for kind in ("PNG", "GIF", "TIFF", "BMP"):
        assert torch.equal(read(encoded(image, kind))[0], tensor(shown)), kind
    alpha = np.full(16, 255, np.uint8)
    alpha[:4] = (0, 50, 100, 150)
    wanted = tensor(on_white(shown, alpha[codes])).int()
    assert (
        read(encoded(image, "PNG", transparency=alpha.tobytes()))[0].int() - wanted
    ).abs().max() <= 1
    only = tensor(np.where(np.atleast_3d(codes) == 2, np.uint8(255), np.atleast_3d(shown)))
    for kind in ("PNG", "GIF"):
        assert torch.equal(read(encoded(image, kind, transparency=2))[0], only), kind


@few
@given(seeds, sides)
def test_one_grey_picture_in_many_forms(tmp_path: Path, seed: int, side: tuple[int, int]) -> None:
    shown = pixels(seed, *side, 1)
    shown[0, 0] = 255
    image, deep = Image.fromarray(shown), shown.astype(np.uint16) * 257
    palette = image.convert("P")
    for code in range(256):
        assert palette.getpalette()[3 * code] == code  # type: ignore[index]
    forms: list[Any] = [encoded(image, kind) for kind in ("PNG", "TIFF", "BMP", "GIF", "PPM")]
    forms += [encoded(palette, "PNG"), encoded(image.convert("LA"), "PNG"), image, palette]
    forms += [encoded(Image.fromarray(deep), kind) for kind in ("PNG", "TIFF", "PPM")]
    forms += [
        encoded(Image.fromarray(deep.astype(">u2")), "TIFF"),
        Image.fromarray(deep.astype(">u2")),
    ]
    forms += [encoded(Image.fromarray(shown.astype(np.float32)), "TIFF")] * bool(shown.max() > 1)
    forms += [
        dicom(tmp_path / "a.dcm", shown, "MONOCHROME2"),
        dicom(tmp_path / "b", 255 - shown, "MONOCHROME1"),
    ]
    forms += [tiff(deep, order) for order in "<>"] + [tiff(65535 - deep, "<", white_is_zero=True)]
    forms += [encoded(image, "TIFF", tiffinfo={262: 0})]
    for form in forms:
        assert torch.equal(read(form)[0], tensor(shown))


def tiff(values: NDArray[Any], order: str, *, white_is_zero: bool = False, kind: int = 1) -> bytes:
    """Return a TIFF of one strip with these values (H, W), little-endian (<) or big-endian (>)."""
    data = values.astype(order + values.dtype.str[1:]).tobytes()
    height, width = values.shape
    bits = 8 * values.itemsize
    tags = {
        256: width,
        257: height,
        258: bits,
        259: 1,
        262: int(not white_is_zero),
        273: 8,
        277: 1,
        278: height,
    }
    tags |= {279: len(data), 339: kind}
    entries = b"".join(
        struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())
    )
    place = 8 + len(data)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", place)
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


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


def test_colours_of_16_bits_are_their_upper_8() -> None:
    shown = pixels(0, 3, 4)
    deep = deep_png(shown.astype(np.uint16) * 257)
    assert torch.equal(read(deep)[0], tensor(shown))
    with pytest.raises(UserError, match="values up to 7936 only"):
        read(deep_png(np.full((2, 2, 3), 31 * 257, np.uint16)))
    with pytest.raises(
        UserError, match=r"its colours have 16 bits, .* there is no window to apply"
    ):
        read(deep, window=(0, 4095))


def deep_png(values: NDArray[np.uint16]) -> bytes:
    """Return a PNG with 16 bits for each colour (H, W, 3), which Pillow cannot write."""
    height, width, _ = values.shape

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


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


def test_other_colour_spaces() -> None:
    flat = Image.new("RGB", (4, 4), (200, 100, 50))
    for data in (
        encoded(flat.convert("CMYK"), "TIFF"),
        encoded(flat.convert("YCbCr"), "TIFF", compression="jpeg"),
    ):
        assert (read(data)[0].int() - tensor(np.array(flat)).int()).abs().max() <= 3
    cmyk = encoded(flat.convert("CMYK"), "JPEG", quality=100)
    assert (read(cmyk)[0].int() - tensor(np.array(flat)).int()).abs().max() <= 3


# Pages


def stack(kind: str, grey: list[int], **how: Any) -> bytes:
    first, *rest = (Image.fromarray(np.full((6, 6, 3), value, np.uint8)) for value in grey)
    return encoded(first, kind, save_all=True, append_images=rest, **how)


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "WEBP", "PNG"])
def test_of_several_pages_the_middle_one_is_read_or_the_one_that_is_named(
    tmp_path: Path, kind: str
) -> None:
    values = [10, 90, 170, 250]
    data = stack(kind, values, **({"lossless": True} if kind == "WEBP" else {}))
    with pytest.warns(
        DataWarning, match=r"1 of 1 image .* \(up to 4\); the middle one is read \(number 2 of 4,"
    ):
        assert set(read(data).flatten().tolist()) == {170}
    file = tmp_path / "film"
    file.write_bytes(data)
    for page, value in enumerate(values):
        assert set(read(tmp_path / f"film#{page}").flatten().tolist()) == {value}
    with pytest.raises(
        UserError, match="film#4: it has 4 pages, so there is no page 4: count from 0"
    ):
        read(tmp_path / "film#4")
    with Image.open(file) as opened:
        with pytest.warns(DataWarning, match="several pages"):
            assert set(read(opened).flatten().tolist()) == {170}
        assert opened.tell() == 0
        opened.seek(3)
        assert set(read(opened).flatten().tolist()) == {250}


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


def test_a_name_with_a_number_sign_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.png#1").write_bytes(encoded(Image.fromarray(pixels(0, 3, 3))))
    assert torch.equal(read(tmp_path / "a.png#1")[0], tensor(pixels(0, 3, 3)))


def test_previews_are_no_pages(tmp_path: Path) -> None:
    photo, other = (Image.fromarray(pixels(k, 16, 16)) for k in (0, 1))
    data = encoded(photo, "MPO", save_all=True, append_images=[other], quality=95)
    assert torch.equal(read(data), read(encoded(photo, "JPEG", quality=95)))
    page = {254: 1}  # a smaller copy of another page
    pyramid = encoded(photo, "TIFF", save_all=True, append_images=[photo.resize((8, 8))] * 3)
    with pytest.warns(DataWarning, match="several pages"):
        assert read(pyramid).shape == (1, 3, 8, 8)
    marked = [photo, *(photo.resize((8, 8)) for _ in range(3))]
    for small in marked[1:]:
        small.encoderinfo = {"tiffinfo": page}
    assert read(encoded(marked[0], "TIFF", save_all=True, append_images=marked[1:])).shape == (
        1,
        3,
        16,
        16,
    )


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


@few
@given(seeds, st.sampled_from(["PNG", "JPEG", "TIFF", "GIF", "WEBP", "BMP"]), st.floats(0, 0.95))
def test_a_cut_file_is_named_in_one_line(
    tmp_path: Path, seed: int, kind: str, share: float
) -> None:
    data = encoded(Image.fromarray(pixels(seed, 32, 32)), kind)
    (tmp_path / "cut").write_bytes(data[: int(share * len(data))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of a damaged TIFF
        with pytest.raises(
            UserError, match=r"the image in .*cut cannot be decoded \(.*\): replace or remove it"
        ) as caught:
            read(tmp_path / "cut")
    assert "\n" not in str(caught.value)


def test_colour_profiles_change_nothing() -> None:
    from PIL import ImageCms

    shown = pixels(0, 4, 4)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert torch.equal(read(encoded(Image.fromarray(shown), icc_profile=profile))[0], tensor(shown))


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


def test_a_model_learns_from_masks_of_files(tmp_path: Path) -> None:
    data = ekiden.split(load(pictures(tmp_path), label_column="mask"), "iid", 2, val_fraction=0)
    result = ekiden.run(ekiden.FedSeq(epochs=1), data, "unet")
    assert result.model(data.dataset.test.x.float()).shape[1:] == (2, 8, 6)
