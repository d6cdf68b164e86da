"""Corrupted samples: shapes, exact moves of pixels, areas, frequencies."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ekiden.methods.one_shot import fedov
from ekiden.methods.one_shot.fedov import (
    blur,
    crop,
    cut,
    destroy,
    erase,
    overwrite,
    rotate,
    swap_halves,
    turn,
)

OPERATIONS = (crop, blur, erase, cut, rotate)


def images(n: int = 6, channels: int = 3, height: int = 8, width: int = 10) -> Tensor:
    """Every pixel with a value of its own, none of them 0."""
    return 1 + torch.arange(n * channels * height * width, dtype=torch.float32).view(
        n, channels, height, width
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (4, 12), (28, 28), (33, 32)])
def test_shape_stays_and_every_image_changes(
    operation: Callable[[Tensor], Tensor], size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = torch.rand(20, 3, *size)
    before = x.clone()
    result = operation(x)
    assert result.shape == x.shape
    assert torch.equal(x, before), "the samples themselves stay"
    assert all(not torch.equal(a, b) for a, b in zip(result, x, strict=True))
    assert float(result.min()) >= -1e-6
    assert float(result.max()) <= 1 + 1e-6


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("size", [(8, 10), (7, 9)])
def test_swapping_halves_twice_is_nothing(axis: int, size: tuple[int, int]) -> None:
    x = images(height=size[0], width=size[1])
    once = swap_halves(x, axis)
    assert not torch.equal(once, x)
    assert torch.equal(swap_halves(once, axis), x)
    half = size[axis - 2] // 2
    assert torch.equal(once.narrow(axis, 0, half), x.narrow(axis, size[axis - 2] - half, half))


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (10, 6)])
def test_turning_on_is_nothing_and_one_turn_is_that_of_torch(
    turns: int, size: tuple[int, int]
) -> None:
    x = images(height=size[0], width=size[1])
    start, side = torch.tensor([0, 1, 2, 0, 1, 2]), min(size) // 2
    once = turn(x, start, torch.full((6,), turns))
    assert torch.equal(turn(once, start, torch.full((6,), 4 - turns)), x)
    for i, p in enumerate(start.tolist()):
        for columns in (slice(0, side), slice(size[1] - side, size[1])):
            block = x[i, :, p : p + side, columns]
            assert torch.equal(once[i, :, p : p + side, columns], block.rot90(turns, (1, 2)))
        rest = torch.ones(size[0], dtype=torch.bool)
        rest[p : p + side] = False
        assert torch.equal(once[i][:, rest], x[i][:, rest])


@pytest.mark.parametrize("axis", [2, 3])
def test_a_band_is_overwritten_by_one_that_starts_elsewhere(axis: int) -> None:
    torch.manual_seed(1)
    x = torch.arange(9.0).expand(200, 1, 9, 9)
    x = x.transpose(2, 3) if axis == 2 else x
    lines = overwrite(x, axis).movedim(axis, -1)[:, 0, 0]
    moved = lines - torch.arange(9.0)
    for row in moved:
        shifts = set(row[row != 0].tolist())
        assert len(shifts) == 1
        assert abs(shifts.pop()) >= 2  # half of a band of 4
        assert int((row != 0).sum()) == 4


def test_erased_area() -> None:
    torch.manual_seed(2)
    share = (erase(torch.ones(500, 1, 28, 28)) == 0).float().mean((1, 2, 3))
    assert 0.30 < float(share.min()) < 0.36
    assert 0.47 < float(share.max()) < 0.53
    assert float(share.mean()) == pytest.approx(0.415, abs=0.01)


def test_cropped_area() -> None:
    torch.manual_seed(3)
    x = torch.stack(torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij"))[
        None
    ].repeat(500, 1, 1, 1)
    result = crop(x)
    high, wide = ((result[:, i].amax((1, 2)) - result[:, i].amin((1, 2))) / 27 for i in (0, 1))
    area = high * wide  # half a pixel is missing at each side
    assert 0.05 < float(area.min()) < 0.12
    assert 0.27 < float(area.max()) < 0.36
    assert float((high / wide).max()) < 1.4


def test_blur_is_nearly_a_box_and_keeps_what_is_even() -> None:
    torch.manual_seed(4)
    torch.testing.assert_close(
        blur(torch.full((50, 2, 12, 12), 0.7)), torch.full((50, 2, 12, 12), 0.7)
    )
    point = torch.zeros(300, 1, 21, 21)
    point[:, :, 10, 10] = 1
    spread = blur(point)
    torch.testing.assert_close(spread.sum((1, 2, 3)), torch.ones(300))
    sides = {(int((s.sum(1) > 0).sum()), int((s.sum(0) > 0).sum())) for s in spread[:, 0]}
    assert sides <= {p for a in (3, 5, 7, 9) for b in (1, 3, 5) for p in ((a, b), (b, a))}
    assert len(sides) > 15
    level = spread.flatten(1).max(1).values * (spread.flatten(1) > 0).sum(1)
    assert float(level.max()) < 1.2  # a box of the same size has 1


def test_operations_have_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, operation in enumerate(OPERATIONS):
        monkeypatch.setattr(fedov, operation.__name__, lambda x, i=i: torch.full_like(x, i))
    torch.manual_seed(5)
    seen = destroy(torch.zeros(7000, 1, 4, 4))[:, 0, 0, 0].long().bincount(minlength=5)
    assert (seen - 1000 * torch.tensor([1, 1, 1, 2, 2])).abs().max() < 150


@pytest.mark.parametrize("shape", [(5,), (1, 3, 8), (2, 6), ()])
def test_other_samples_get_their_numbers_in_another_order(shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    x = torch.rand(30, *shape)
    result = destroy(x)
    assert result.shape == x.shape
    torch.testing.assert_close(result.view(30, -1).sort(1).values, x.view(30, -1).sort(1).values)


def test_the_same_seed_gives_the_same_outliers() -> None:
    x = images(40)
    torch.manual_seed(7)
    first = destroy(x)
    torch.manual_seed(7)
    assert torch.equal(destroy(x), first)


def test_autocast_does_not_touch_pixels() -> None:
    x = images(40)
    torch.manual_seed(7)
    expected = destroy(x)
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(destroy(x), expected)


@pytest.mark.parametrize("operation", [*OPERATIONS, destroy])
def test_the_layout_in_memory_does_not_matter(operation: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(30, 3, 8, 8, generator=torch.Generator().manual_seed(8))
    torch.manual_seed(9)
    expected = operation(x)
    torch.manual_seed(9)
    torch.testing.assert_close(operation(x.contiguous(memory_format=torch.channels_last)), expected)
