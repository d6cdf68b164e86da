"""Dictionaries of patches: integers that sum to zero, the same for a seed, from any split of the
images."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden import UserError
from ekiden.methods.exact.blocks.patches import (
    Dictionary,
    from_images,
)


def photos(n: int = 30, channels: int = 3, side: int = 12, seed: int = 0) -> Tensor:
    """Smooth noise: neighbouring pixels and channels are alike, as in photos."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(n, channels, side + 2, side + 2, generator=generator)
    smooth = torch.nn.functional.avg_pool2d(noise + noise.mean(1, keepdim=True), 3, 1)
    return (smooth - smooth.min()).div(smooth.max() - smooth.min()).mul(255).round().to(torch.uint8)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(dictionary: Dictionary, shape: tuple[int, ...]) -> None:
    filters, gain = dictionary
    assert filters.dtype == torch.int8
    assert filters.shape == shape
    assert gain.shape == shape[:1]
    assert gain.dtype == torch.float32
    assert (filters.long().sum((1, 2, 3)) == 0).all()
    assert (filters != -128).all()
    assert (filters.long().abs().amax((1, 2, 3)) > 100).all()  # the range is used
    assert gain.isfinite().all()
    assert (gain > 0).all()


def normalised(images: Tensor, size: int, step: int) -> np.ndarray:
    """All patches at each `step` pixels minus their means, over the root of variance + 10."""
    found = []
    for image in images.numpy().astype(np.float64):
        for y in range(0, image.shape[1] - size + 1, step):
            for x in range(0, image.shape[2] - size + 1, step):
                patch = image[:, y : y + size, x : x + size].ravel()
                found.append((patch - patch.mean()) / np.sqrt(patch.var() + 10))
    return np.array(found)


@pytest.mark.parametrize(("channels", "size"), [(3, 6), (1, 6), (3, 5), (1, 2), (3, 12)])
def test_filters_are_bytes_that_sum_to_zero(channels: int, size: int) -> None:
    check(from_images(photos(channels=channels), 10, seeded(), size), (10, channels, size, size))


def test_filters_are_whitened_patches() -> None:
    images = photos(4, 2, 5)
    filters, gain = from_images(images, 6, seeded(), 4)
    patches = normalised(images, 4, 1)  # all 16; the sample has each about as often
    places = torch.randint(16, (20_000,), generator=seeded()).numpy()
    values, vectors = np.linalg.eigh(patches[places].T @ patches[places] / 20_000)
    whitening = vectors @ np.diag((values.clip(0) + 0.1) ** -0.5) @ vectors.T
    for q, s, place in zip(filters.numpy(), gain.numpy(), places, strict=False):
        white = whitening @ patches[place]
        wanted = whitening @ (white / np.linalg.norm(white))
        wanted -= wanted.mean()
        assert (
            np.abs(q.ravel() / s - wanted).max() < 1.01 / s
        )  # rounded, or moved by one so that the sum is zero
        assert np.abs(np.abs(q).max() - 127) <= 1


def test_the_seed_decides() -> None:
    images = photos()
    a, b, c = (from_images(images, 8, seeded(s)) for s in (0, 0, 1))
    assert torch.equal(a.filters, b.filters)
    assert torch.equal(a.gain, b.gain)
    assert not torch.equal(a.filters, c.filters)


def test_large_filters_keep_sums_exact() -> None:
    flat = torch.randint(256, (3, 3, 14, 14), generator=seeded(), dtype=torch.uint8)
    filters, _ = from_images(flat, 4, seeded(), 14)  # 588 numbers each
    assert 30_000 < int(filters.long().abs().sum((1, 2, 3)).max()) < 2**23 / 255


def test_more_filters_than_patches() -> None:
    """Only one patch exists: it is drawn again and again."""
    check(from_images(photos(1, 3, 6), 50, seeded()), (50, 3, 6, 6))
    check(from_images(photos(1, 3, 6), 21_000, seeded(), 2), (21_000, 3, 2, 2))


def test_flat_images_give_random_directions() -> None:
    flat = torch.full((5, 3, 8, 8), 200, dtype=torch.uint8)
    flat[0, 0, 0, 0] = 100  # one patch in five has something in it
    few, none = from_images(flat, 5, seeded()), from_images(torch.zeros_like(flat), 5, seeded())
    for dictionary in (few, none):
        check(dictionary, (5, 3, 6, 6))
    assert len({tuple(q) for q in none.filters.flatten(1).tolist()}) == 5


def test_wrong_images_are_refused_in_one_line() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: from_images(photos().float(), 4, seeded()), "images as bytes"),
        (lambda: from_images(photos()[0], 4, seeded()), "images as bytes"),
        (
            lambda: from_images(photos(side=5), 4, seeded()),
            "images of 5x5 pixels are smaller than patches of 6x6",
        ),
        (lambda: from_images(photos(), 4, seeded(), 1), "out of range: choose a size from 2 to 74"),
        (lambda: from_images(photos()[:0], 4, seeded()), "no images"),
    ]
    for wrong, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            wrong()
        assert "\n" not in str(caught.value)


def test_filters_from_images_give_patches_away_and_those_of_other_images_do_not() -> None:
    """What the page says: the moments of other images undo the whitening."""
    images, others = photos(60), photos(60, seed=1)
    patches = torch.from_numpy(normalised(others, 6, 3))
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    undo = vectors @ torch.diag(values + 0.1) @ vectors.T
    windows = (
        images.unfold(2, 6, 1).unfold(3, 6, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 108).double()
    )
    windows -= windows.mean(1, keepdim=True)

    def nearest(dictionary: Dictionary) -> Tensor:
        found = dictionary.filters.flatten(1).double() @ undo
        return torch.nn.functional.normalize(found) @ torch.nn.functional.normalize(windows).T

    given = nearest(from_images(images, 20, seeded())).amax(1)
    assert given.min() > 0.85
    assert given.mean() > 0.9
    assert nearest(from_images(others, 20, seeded())).amax() < 0.8
