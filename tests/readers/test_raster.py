"""Pictures as they are shown: upright, opaque, of one page; huge and cut ones are refused."""

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.readers import raster
from ekiden.readers.kinds import Images
from tests.readers.pictures import Pixels, dicom, encoded, few, pixels, read, stack, tensor, tiff
from tests.readers.told import pictures, said

sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
seeds = st.integers(0, 2**16)
pytestmark = pytest.mark.usefixtures("no_data")


def test_a_huge_picture_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of 13,000 x 13,000 took a minute. A PNG that names an orientation was decoded to find
    it."""
    file, exif = tmp_path / "a.png", Image.Exif()
    exif[0x0112] = 6
    Image.new("1", (9_000, 9_000)).save(file, exif=exif)
    assert file.stat().st_size < 50_000
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match="9000 x 9000 pixels, 67108864 are read at most"):
        Images().encode([file])
    for open_file in (raster.look, raster.load, raster.mask):
        with pytest.raises(UserError, match="9000 x 9000 pixels"):
            open_file(file)


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


def test_other_colour_spaces() -> None:
    flat = Image.new("RGB", (4, 4), (200, 100, 50))
    for data in (
        encoded(flat.convert("CMYK"), "TIFF"),
        encoded(flat.convert("YCbCr"), "TIFF", compression="jpeg"),
    ):
        assert (read(data)[0].int() - tensor(np.array(flat)).int()).abs().max() <= 3
    cmyk = encoded(flat.convert("CMYK"), "JPEG", quality=100)
    assert (read(cmyk)[0].int() - tensor(np.array(flat)).int()).abs().max() <= 3


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


def test_images_that_another_library_allows_to_be_cut_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    cut = encoded(Image.fromarray(pictures(1, 64, 64)[0].permute(1, 2, 0).numpy()), "JPEG")[:1500]
    assert "missing parts of damaged images are read as grey" in said(
        lambda: Images().encode([cut])
    )
