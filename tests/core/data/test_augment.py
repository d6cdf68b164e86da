"""Augmentation against image-by-image loops that share nothing with it but the draws."""

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.nn import functional as F

from ekiden import UserError
from ekiden.core.base.settings import Hardware, Training
from ekiden.core.data.augment import Augment, normalise
from ekiden.core.training.feed import Feed
from ekiden.data import Dataset, Samples, Subset
from ekiden.readers.kinds import of_tensor


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def draws(n: int, seed: int = 0) -> list[list[float]]:
    """What one call draws: [row, column, flip, angle] of each image, uniform in [0, 1)."""
    values: list[list[float]] = torch.rand(4, n, generator=seeded(seed)).T.tolist()
    return values


def images(
    n: int = 16, c: int = 3, h: int = 12, w: int = 9, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """Pixels are never 0, so black ones can only come from outside."""
    return torch.randint(1, 256, (n, c, h, w), generator=seeded(99)).to(dtype)


def cropped(image: Tensor, row: float, column: float, crop: int) -> Tensor:
    height, width = image.shape[1:]
    padded = F.pad(image, (crop, crop, crop, crop))
    top, left = int(row * (2 * crop + 1)), int(column * (2 * crop + 1))
    return padded[:, top : top + height, left : left + width]


def flipped(image: Tensor, draw: float) -> Tensor:
    return image.flip(2) if draw < 0.5 else image


def rotated(image: Tensor, draw: float, rotation: float) -> tuple[Tensor, Tensor]:
    """The image turned counter-clockwise in float64, and which pixels are too near to a tie to be
    certain."""
    angle = math.radians((2 * draw - 1) * rotation)
    _, height, width = image.shape
    out, doubtful = torch.zeros_like(image), torch.zeros(height, width, dtype=torch.bool)
    for row in range(height):
        for column in range(width):
            right, up = column - (width - 1) / 2, (height - 1) / 2 - row
            # the source lies clockwise of the output
            source_right = math.cos(angle) * right + math.sin(angle) * up
            source_up = math.cos(angle) * up - math.sin(angle) * right
            i, j = (height - 1) / 2 - source_up, (width - 1) / 2 + source_right
            doubtful[row, column] = any(abs(v - math.floor(v) - 0.5) < 1e-4 for v in (i, j))
            if 0 <= round(i) < height and 0 <= round(j) < width:
                out[:, row, column] = image[:, round(i), round(j)]
    return out, doubtful


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_crop_is_padding_and_slicing(dtype: torch.dtype) -> None:
    x = images(dtype=dtype)
    out = Augment(crop=3)(x, seeded())
    expected = torch.stack(
        [cropped(image, d[0], d[1], 3) for image, d in zip(x, draws(len(x)), strict=True)]
    )
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert (
        len({tuple(int(u * 7) for u in d[:2]) for d in draws(len(x))}) > 5
    )  # many offsets were met


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("width", [1, 8, 9])
def test_flip_mirrors_left_and_right(dtype: torch.dtype, width: int) -> None:
    x = images(w=width, dtype=dtype)
    out = Augment(flip=True)(x, seeded())
    expected = torch.stack(
        [flipped(image, d[2]) for image, d in zip(x, draws(len(x)), strict=True)]
    )
    assert torch.equal(out, expected)


@settings(max_examples=25, deadline=None)
@given(
    crop=st.integers(0, 12),
    flip=st.booleans(),
    rotation=st.sampled_from([0.0, 15.0, 20.0, 90.0, 180.0]),
    height=st.integers(1, 10),
    width=st.integers(1, 10),
    channels=st.integers(1, 4),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
    seed=st.integers(0, 2**32),
)
def test_all_together_are_crop_then_flip_then_rotation(
    crop: int,
    flip: bool,
    rotation: float,
    height: int,
    width: int,
    channels: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = images(4, channels, height, width, dtype)
    out = Augment(crop, flip, rotation)(x, seeded(seed))
    for image, result, (row, column, mirror, turn) in zip(x, out, draws(4, seed), strict=True):
        expected = cropped(image, row, column, crop)
        expected = flipped(expected, mirror) if flip else expected
        if rotation:
            expected, doubtful = rotated(expected, turn, rotation)
            expected = torch.where(doubtful, result, expected)
        assert torch.equal(result, expected)


def test_rotation_alone_on_a_square() -> None:
    x = images(4, 3, 32, 32)
    out, turned = Augment(rotation=15)(x, seeded(3)), 0
    for image, result, d in zip(x, out, draws(4, 3), strict=True):
        expected, doubtful = rotated(image, d[3], 15)
        assert doubtful.sum() < 5
        assert torch.equal(result[:, ~doubtful], expected[:, ~doubtful])
        if abs(2 * d[3] - 1) > 0.2:  # more than 3 degrees
            assert not torch.equal(result, image)
            turned += 1
    assert turned > 0


@settings(max_examples=20, deadline=None)
@given(
    crop=st.integers(0, 4),
    flip=st.booleans(),
    rotation=st.sampled_from([0.0, 30.0]),
    height=st.integers(2, 8),
    seed=st.integers(0, 2**32),
)
def test_pixels_are_copies_or_black(
    crop: int, flip: bool, rotation: float, height: int, seed: int
) -> None:
    """Also shows that all channels of an image move together."""
    place = torch.arange(1, height * 7 + 1).view(1, 1, height, 7).expand(5, 2, -1, -1)
    out = Augment(crop, flip, rotation)(
        place.float() * torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), seeded(seed)
    )
    assert out.shape == place.shape
    assert torch.equal(out[:, 1], 2 * out[:, 0])
    assert set(out[:, 0].flatten().tolist()) <= {0.0, *range(1, height * 7 + 1)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_nothing_on_is_identity_and_draws_nothing(dtype: torch.dtype) -> None:
    x = images(dtype=dtype)
    before = torch.get_rng_state()
    assert Augment()(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_input_is_left_alone() -> None:
    x = images()
    kept = x.clone()
    Augment(4, True, 20)(x, seeded())
    assert torch.equal(x, kept)


def test_default_generator_is_torchs() -> None:
    x, augment = images(), Augment(2, True, 20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first, second = augment(x), augment(x)
    assert torch.equal(first, augment(x, seeded(5)))
    assert not torch.equal(first, second)


def test_one_seed_gives_the_same_at_any_number_of_threads() -> None:
    x, augment = images(64, 3, 32, 32), Augment(4, True, 15)
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2):
            torch.set_num_threads(n)
            outs.append(augment(x, seeded(8)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], augment(x, seeded(9)))


def test_draws_of_one_do_not_depend_on_the_others() -> None:
    x = images(64, 1, 1, 2)  # nothing turns visibly at zero degrees
    flips = Augment(flip=True)(x, seeded(4))[:, 0, 0, 0] != x[:, 0, 0, 0]
    with_rotation = Augment(flip=True, rotation=1e-3)(x, seeded(4))[:, 0, 0, 0] != x[:, 0, 0, 0]
    assert torch.equal(flips, with_rotation)


def test_every_image_has_its_own_draws_with_the_right_frequencies() -> None:
    """One image, 4,000 times; 5 standard deviations on each side."""
    n, crop = 4000, 1
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8).expand(n, 1, 3, 3)
    centre = Augment(crop=crop)(x, seeded(1))[:, 0, 1, 1]
    counts = torch.bincount(centre.long(), minlength=10)[1:]
    assert counts.sum() == n
    assert bool(((counts - n / 9).abs() < 5 * math.sqrt(n * 8 / 81)).all())
    mirrored = (Augment(flip=True)(x, seeded(1))[:, 0, 0, 0] == 3).sum()
    assert abs(int(mirrored) - n / 2) < 5 * math.sqrt(n / 4)


def test_angles_fill_the_range_and_no_more() -> None:
    """A white dot far from the centre shows the angle."""
    n, size = 2000, 201
    x = torch.zeros(1, 1, size, size, dtype=torch.uint8)
    x[0, 0, 99:102, 199:] = 255  # to the right of the centre
    angles = []
    generator = seeded(2)
    for _ in range(20):
        out = Augment(rotation=30)(x.expand(n // 100, -1, -1, -1), generator)
        for image in out[:, 0]:
            rows, columns = image.nonzero().double().mean(0).tolist()
            angles.append(math.degrees(math.atan2(100 - rows, columns - 100)))
    assert -30.5 < min(angles) < -28
    assert 28 < max(angles) < 30.5


def test_empty_batch() -> None:
    assert Augment(2, True, 10)(images()[:0]).shape == (0, 3, 12, 9)


def test_any_memory_format() -> None:
    x, augment = images(), Augment(2, True, 10)
    strided = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(augment(strided, seeded()), augment(x, seeded()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"crop": -1}, "crop -1 is out of range: it must be 0 or more"),
        (
            {"rotation": -5.0},
            r"rotation -5\.0 is out of range: it must be 0 or more and at most 180",
        ),
        ({"rotation": 181.0}, r"rotation 181\.0 is out of range"),
        ({"rotation": math.nan}, "rotation nan is out of range"),
        ({"rotation": math.inf}, "rotation inf is out of range"),
    ],
)
def test_refuses_senseless_fields(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augment(**fields)  # type: ignore[arg-type]


def test_refuses_features() -> None:
    with pytest.raises(UserError, match=r"\(64,\): switch augmentation off"):
        Augment(flip=True)(torch.zeros(5, 64))


def test_is_a_value() -> None:
    assert Augment(4, True) == Augment(4, True, 0.0)
    with pytest.raises(FrozenInstanceError):
        Augment().crop = 3  # type: ignore[misc]


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.uint8, 255), (torch.float32, 1), (torch.float64, 1)]
)
@pytest.mark.parametrize(
    ("mean", "std"), [(MEAN, STD), ((0.5,), (0.25,)), ((0.0,), STD), (MEAN, (1.0,))]
)
def test_normalise_by_channel(
    dtype: torch.dtype, unit: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    x = images(dtype=dtype)
    kept = x.clone()
    out = normalise(x, mean, std)
    expected = torch.empty(x.shape, dtype=torch.float64)
    for channel in range(3):
        m, s = mean[channel % len(mean)], std[channel % len(std)]
        expected[:, channel] = (x[:, channel].double() / unit - m) / s
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=2e-6)
    assert torch.equal(x, kept)


def test_normalise_only_scales_bytes_where_mean_is_0_and_std_1() -> None:
    x = images()
    assert torch.equal(normalise(x, (0.0,), (1.0,)), x.float() / 255)
    features = torch.randn(5, 64, generator=seeded())
    assert normalise(features, (0.0,), (1.0,)) is features


def test_normalise_features() -> None:
    x = torch.randn(5, 2, generator=seeded())
    expected = (x - torch.tensor([1.0, -2.0])) / torch.tensor([0.5, 4.0])
    torch.testing.assert_close(normalise(x, (1.0, -2.0), (0.5, 4.0)), expected)


def test_normalise_refuses_to_divide_by_zero() -> None:
    with pytest.raises(UserError, match="std holds 0, and pixels are divided by it"):
        normalise(torch.zeros(5, 2), (0.0,), (1.0, 0.0))


def test_normalise_refuses_the_wrong_number_of_channels() -> None:
    with pytest.raises(
        UserError,
        match="mean has 3 values and std 1, but the images have 1 channel: give one value, or one for each",
    ):
        normalise(images(c=1), MEAN, (1.0,))


def test_training_says_how_samples_are_fed() -> None:
    samples = Samples(images(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    dataset = Dataset(
        "d",
        samples,
        samples,
        ("a",),
        mean=(0.5,),
        std=(0.5,),
        augment=Augment(flip=True),
        inputs=of_tensor(samples.x),
    )
    assert dataset.fed(Training()) == dataset
    plain = dataset.fed(Training(augment=False, mean=(0.1307,), std=(0.3081,)))
    assert (plain.mean, plain.std, plain.augment) == ((0.1307,), (0.3081,), Augment())
    rows, _ = Feed(plain, Hardware()).batch(
        Subset(samples, torch.arange(4)), slice(None), train=True
    )
    torch.testing.assert_close(rows, (samples.x.float() / 255 - 0.1307) / 0.3081)
    with pytest.raises(UserError, match=r"std .* is out of range"):
        Training(std=(0.0,))
