"""Patch features against plain loops, to the last integer, and the same bits however they are
computed; dictionaries of patches."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from math import isqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden import UserError
from ekiden.core.data.augment import normalise
from ekiden.methods.exact.blocks import patches
from ekiden.methods.exact.blocks.patches import (
    Dictionary,
    Patches,
    Pooling,
    from_images,
)
from ekiden.readers.sources import NAMED


def images(n: int, *shape: int, seed: int = 0) -> Tensor:
    """All kinds of bytes: noise, a dark image, a flat one."""
    x = torch.randint(
        256, (n, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    x[1] = x[1] // 50
    x[2] = 7
    return x


def dictionary(shape: tuple[int, ...], count: int, size: int, seed: int = 0) -> Dictionary:
    return from_images(images(20, *shape, seed=9), count, torch.Generator().manual_seed(seed), size)


def features(
    shape: tuple[int, ...], made: list[Dictionary], how: Pooling = patches.USUAL_POOLING
) -> Patches:
    """Features with these filters."""
    module = Patches(shape, [(len(q), q.shape[-1]) for q, _ in made], how)
    module.take(made)
    return module


def measure_scale(module: Patches, x: Tensor) -> None:
    module.scale.copy_(module.sums(x).amax(0).clamp(min=1))


def responses(image: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Rounded responses at each position of one image (C, H, W) to one filter (C, p, p)."""
    size = q.shape[-1]
    rows, columns = image.shape[1] - size + 1, image.shape[2] - size + 1
    out = np.empty((rows, columns), np.float32)
    for y, x in itertools.product(range(rows), range(columns)):
        patch = image[:, y : y + size, x : x + size].astype(np.int64)
        product = int((patch * q.astype(np.int64)).sum())
        d = patch.size
        inverse = 16 * d / isqrt(256 * int(d * (patch**2).sum() - patch.sum() ** 2 + 10 * d * d))
        assert abs(inverse * np.sqrt(patch.var() + 10) - 1) < 0.01
        out[y, x] = np.rint(np.float32(product) * np.float32(inverse))
    return out


def within(positions: int, pool: int) -> np.ndarray:
    """(pool, positions) 1 where a position lies in the region, in whole or in part."""
    out = np.zeros((pool, positions))
    for i in range(pool):
        out[i, int(np.floor(i * positions / pool)) : int(np.ceil((i + 1) * positions / pool))] = 1
    return out


def nearby(positions: int, pool: int) -> np.ndarray:
    """(pool, positions) quarters, 4 at the region's centre and 0 at its neighbours'; the outermost
    stay 4 beyond it."""
    out = np.zeros((pool, positions))
    for i, k in itertools.product(range(pool), range(positions)):
        far = Fraction(2 * k + 1, 2) - Fraction((2 * i + 1) * positions, 2 * pool)
        outside = (i == 0 and far < 0) or (i == pool - 1 and far > 0)
        near = 4 * max(1 - abs(far) * pool / positions, Fraction(0))
        out[i, k] = 4 if outside else (near + Fraction(1, 2)).__floor__()
    return out


def by_loops(
    x: Tensor,
    dictionaries: list[Dictionary],
    pool: int,
    mirror: bool,
    threshold: float,
    root: bool,
    count: Callable[[int, int], np.ndarray] = within,
) -> np.ndarray:
    """(n, D) sums, feature by feature as the documentation says, on the mirrored image instead of
    the algebra."""
    rows = []
    for image in x.numpy():
        row: list[float] = []
        for filters, gain in dictionaries:
            for q, s in zip(filters.numpy(), gain.numpy(), strict=True):
                t = np.rint(np.float32(s) * np.float32(threshold))
                faces = [image, image[:, :, ::-1]] if mirror else [image]
                maps = [responses(face, q) for face in faces]
                height, width = maps[0].shape
                for sign, i, j in itertools.product((1, -1), range(pool), range(pool)):
                    weights = np.outer(count(height, pool)[i], count(width, pool)[j])
                    total = sum(
                        float(w * max(sign * v - t, 0))
                        for m in maps
                        for v, w in zip(m.flat, weights.flat, strict=True)
                    )
                    row.append(float(np.sqrt(np.float32(total))) if root else total)
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize(
    ("mirror", "bilinear"),
    [
        (False, False),
        (True, True),
        *(pytest.param(m, not m, marks=pytest.mark.slow) for m in (False, True)),
    ],
)
@pytest.mark.parametrize(
    ("shape", "sizes", "pool", "threshold", "root"),
    [
        ((3, 9, 8), (4,), 2, 0.25, False),
        ((3, 6, 7), (3, 5), 2, 0.5, True),
        ((1, 7, 8), (2,), 3, 0.0, False),
        ((2, 7, 7), (7,), 1, 0.25, False),
    ],
)
def test_features_are_those_of_plain_loops(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    pool: int,
    threshold: float,
    root: bool,
    mirror: bool,
    bilinear: bool,
) -> None:
    made = [dictionary(shape, 5, size) for size in sizes]
    module = features(shape, made, Pooling(pool, mirror, threshold, root, bilinear))
    x = images(11, *shape)
    wanted = by_loops(x, made, pool, mirror, threshold, root, nearby if bilinear else within)
    assert wanted.any(1).sum() == 10  # all but the flat image
    assert np.array_equal(module.sums(x).numpy(), wanted)

    measure_scale(module, x[:6])
    scale = np.maximum(wanted[:6].max(0), 1).astype(np.float32)
    assert np.array_equal(module.scale.numpy(), scale)
    levels = np.minimum(np.rint(wanted.astype(np.float32) * (np.float32(127) / scale)), 127)
    out = module(x)
    assert np.array_equal(out.numpy(), levels)
    assert out.shape == (11, module.width)
    assert out.dtype == torch.float32
    assert out[:6].amax() == 127
    assert out.amax() == 127


def test_bilinear_weights_by_hand() -> None:
    """Of 4 positions centres are at 0.5 and 2.5: halfway between them a position counts half in
    both."""
    assert nearby(5, 2).tolist() == [[4, 4, 2, 0, 0], [0, 0, 2, 4, 4]]
    module = features((1, 6, 6), [dictionary((1, 6, 6), 1, 2)], Pooling(bilinear=True))
    (bank,) = module._banks()
    assert bank.rows.tolist() == [[4, 4, 2, 0, 0], [0, 0, 2, 4, 4]]
    assert bank.area.tolist() == [[100, 100], [100, 100]]


def test_a_response_by_hand() -> None:
    """One patch of 2x2 pixels 0 0 / 0 40 has σ² = 300; q·x = 2·40 and 80/√310 = 4.54 is rounded to
    5."""
    q = torch.tensor([[[[-1, 0], [-1, 2]]]], dtype=torch.int8)
    x = torch.tensor([[[[0, 0], [0, 40]]]], dtype=torch.uint8)
    dictionary = Dictionary(q, torch.tensor([8.0]))
    module = features((1, 2, 2), [dictionary], Pooling(1, mirror=False, threshold=0.25, root=False))
    assert module.sums(x).tolist() == [[3.0, 0.0]]  # 5 - 8·0.25
    mirrored = features((1, 2, 2), [dictionary], Pooling(1, threshold=0.25, root=False))
    assert mirrored.sums(x).tolist() == [
        [3.0, 0.0]
    ]  # -40/√310 = -2.27, whose size is no more than 2
    assert mirrored.sums(255 - x).tolist() == [[0.0, 3.0]]


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("shape", [pytest.param((3, 32, 32), marks=pytest.mark.slow), (1, 14, 13)])
def test_bits_do_not_depend_on_batches_blocks_or_threads(
    shape: tuple[int, ...], bilinear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = features(
        shape, [dictionary(shape, 10, 6), dictionary(shape, 3, 5)], Pooling(bilinear=bilinear)
    )
    x = images(21, *shape)
    whole = module.sums(x)
    assert torch.equal(torch.cat([module.sums(part) for part in torch.split(x, 1)]), whole)
    assert torch.equal(torch.cat([module.sums(part) for part in torch.split(x, 7)]), whole)
    assert torch.equal(module.sums(x.flip(0)), whole.flip(0))
    monkeypatch.setattr(patches, "_BLOCK", 3)
    monkeypatch.setattr(patches, "_CHUNK", 5000)
    assert torch.equal(module.sums(x), whole)
    assert torch.equal(module.sums(x.contiguous(memory_format=torch.channels_last)), whole)
    torch.set_num_threads(2)
    assert torch.equal(module.sums(x), whole)


def test_bits_are_those_of_double_precision() -> None:
    """Every sum fits float32: the largest products that filters and bytes can have change
    nothing."""
    shape = (3, 32, 32)
    q = torch.zeros(2, 3, 6, 6, dtype=torch.int8)
    q[0, :, :3], q[0, :, 3:] = 127, -127
    q[1, :, :, ::2], q[1, :, :, 1::2] = 127, -127
    x = torch.zeros(3, *shape, dtype=torch.uint8)
    x[0, :, ::2], x[1, :, :, ::2] = 255, 255
    x[2] = images(3, *shape)[0]
    made = [Dictionary(q, torch.ones(2))]
    assert np.array_equal(
        features(shape, made, Pooling(threshold=0.25, root=False)).sums(x).numpy(),
        by_loops(x, made, 2, True, 0.25, False),
    )


def test_roots_are_rounded_right() -> None:
    """Float32 roots differ between libraries by one in the last place; roots in double precision,
    rounded, do not."""
    whole = torch.arange(0, 2**24, 7)
    whole = torch.cat([whole, whole[1:].float().sqrt().round().square().long()])
    assert np.array_equal(
        whole.double().sqrt_().float().numpy(), np.sqrt(whole.numpy().astype(np.float32))
    )


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 64, 48)])
def test_no_sum_of_bilinear_pooling_can_be_rounded(shape: tuple[int, ...]) -> None:
    """Even of the largest responses that filters of int8 can have, of an image and its mirror
    image."""
    (bank,) = features(shape, [dictionary(shape, 2, 6)], Pooling(bilinear=True))._banks()
    assert 2 * 127 * shape[0] * 36 * bank.unit * float(bank.area.max()) <= 2**24


def test_large_images_are_counted_in_coarser_units() -> None:
    assert patches._unit(108, 14 * 14) == 1
    assert patches._unit(108, 110 * 110) == 2.0**-5
    for depth, positions in itertools.product((4, 75, 108, 1000), (1, 196, 3481, 10**6)):
        assert 127 * depth * patches._unit(depth, positions) * 2 * positions <= 2**24


@pytest.mark.parametrize("name", sorted(NAMED))
def test_all_bytes_come_back_from_normalised_inputs(name: str) -> None:
    spec = NAMED[name]
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    module = Patches((3, 16, 16), [(1, 6)])
    module.scale_by(spec.mean, spec.std)
    assert torch.equal(module.bytes(normalise(every, spec.mean, spec.std)), every.float())
    assert torch.equal(module.bytes(every), every.float())


@pytest.mark.parametrize(
    ("mean", "std"), [((0.5,), (0.5,)), ((0.13066047,), (0.30810780,)), ((0.0,), (1.0,))]
)
def test_all_bytes_come_back_with_one_mean(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    module = Patches((1, 16, 16), [(1, 6)])
    module.scale_by(mean, std)
    assert torch.equal(module.bytes(normalise(every, mean, std)), every.float())


def test_features_of_normalised_inputs_are_those_of_bytes() -> None:
    shape, mean, std = (3, 12, 12), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    module = features(shape, [dictionary(shape, 5, 6)])
    module.scale_by(mean, std)
    x = images(9, *shape)
    measure_scale(module, x)
    assert torch.equal(module(normalise(x, mean, std)), module(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(normalise(x, mean, std)), module(x))


def test_a_mirror_image_has_the_same_features_on_the_other_side() -> None:
    """Averaging makes an image and its mirror image equal."""
    shape = (3, 13, 14)
    x = images(5, *shape)
    module = features(shape, [dictionary(shape, 5, 6)], Pooling(root=False))
    assert torch.equal(module.sums(x), module.sums(x.flip(3)))
    plain = features(shape, [dictionary(shape, 5, 6)], Pooling(mirror=False, root=False))
    assert not torch.equal(plain.sums(x), plain.sums(x.flip(3)))
    assert torch.equal(plain.sums(x) + plain.sums(x.flip(3)), module.sums(x))


def test_values_are_buffers_that_travel() -> None:
    shape = (3, 12, 12)
    made = [dictionary(shape, 5, 6), dictionary(shape, 2, 4)]
    module = features(shape, made)
    measure_scale(module, images(9, *shape))
    empty = Patches(shape, [(5, 6), (2, 4)])
    assert torch.equal(empty(images(4, *shape)), torch.zeros(4, 56))
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty(images(4, *shape)), module(images(4, *shape)))
    assert not list(module.parameters())
    assert all(b.dtype == torch.float32 for b in module.buffers())
    assert module(images(3, *shape)[:0]).shape == (0, 56)


def test_width() -> None:
    assert Patches((3, 12, 12), [(5, 6)], Pooling(3)).width == 90


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        ((20,), 6, "need images"),
        ((3, 6, 12), 6, "do not fit images of 6x12"),
        ((3, 12, 12), 1, "out of range: choose a size from 2 to 74"),
        ((3, 90, 90), 75, "out of range: choose a size from 2 to 74"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], size: int, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        Patches(shape, [(2, size)])
    assert "\n" not in str(caught.value)


def test_rounded_products_are_refused() -> None:
    module = features((3, 12, 12), [dictionary((3, 12, 12), 5, 6)])
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(UserError, match="highest"):
            module(images(3, 3, 12, 12))
    finally:
        torch.set_float32_matmul_precision("highest")


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
