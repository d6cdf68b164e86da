"""FedGram on components: the seed's images, patches, features, basis, rounded sums, and the head.

No code of the method computes here: images and patches are made one after the other, mirror images
are made and read, regions are added up position by position, and matrices of whole numbers are
multiplied as Python's integers. Random numbers come from the same generators (NumPy's Philox, and
PyTorch's for the places of patches).
"""

from collections.abc import Iterator, Sequence
from math import ceil, erf, exp, log2, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import ekiden
from ekiden import FedGram, Hardware
from ekiden.core.base.sums import pack
from ekiden.core.models.split import as_split
from ekiden.core.training.gram import Rounded, Sums
from ekiden.methods.exact.blocks import components, patches
from ekiden.methods.exact.fedgram import Handoff

Vector = NDArray[np.float64]
Single = NDArray[np.float32]
Whole = NDArray[np.int64]

SIDE, CHANNELS, CLASSES = 16, 3, 3
R, BITS, SAMPLES = 12, 11, 150
IMAGES, DRAWN = 90, 40
EACH = 3  # filters of each size
SIZES = (5, 8)
POOL = 3


def forget() -> None:
    """Nothing that was made of more or fewer images is used again."""
    components._kept.cache_clear()
    patches._images_of_seed.cache_clear()
    patches._filters_of_seed.cache_clear()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(components, "IMAGES", IMAGES)
    monkeypatch.setattr(components, "FILTERS", EACH * len(SIZES))
    monkeypatch.setattr(patches, "_IMAGES", DRAWN)
    forget()
    yield
    forget()


def cosine(turn: int) -> int:
    """4096·cos(2π·turn/32), rounded."""
    quarter = [4096, 4017, 3784, 3406, 2896, 2276, 1567, 799, 0]
    turn = min(turn % 32, -turn % 32)
    return quarter[turn] if turn <= 8 else -quarter[16 - turn]


def turned(turn: int, x: Whole, y: Whole) -> tuple[Whole, Whole]:
    c, s = cosine(turn), cosine(turn - 8)
    return (x * c + y * s) // 4096, (y * c - x * s) // 4096


class Draws:
    """The random numbers of one image, one after the other."""

    def __init__(self, raw: Iterator[int]) -> None:
        self.raw = raw

    def below(self, bound: int) -> int:
        return (int(next(self.raw)) >> 32) * bound >> 32

    def many(self, bound: int, count: int) -> list[int]:
        return [self.below(bound) for _ in range(count)]

    def normal(self) -> int:
        return sum(self.many(256, 4)) - 510

    def colour(self, spread: int, hue: int) -> list[int]:
        together = self.normal()
        own = [self.normal() for _ in range(CHANNELS)]
        return [(together + part * hue // 100) * spread // 148 for part in own]


def one_image(draws: Draws, odd: bool, side: int) -> Whole:
    """(C, side, side): a ground, shapes on it, texture; lengths and levels in sixteenths."""
    size = 16 * side
    white = draws.below(2) == 0 and odd
    base = 40 + draws.below(176)
    hue = 0 if draws.below(5) < 2 and odd else 35
    ground = [255 if white else base + part for part in draws.colour(45, hue)]
    other = draws.below(256)
    base = other if odd else base
    few, many = 1 + draws.below(6), 4 + draws.below(19)
    slope = 0 * draws.normal() if odd else draws.normal() * 10 // 148
    direction = draws.below(32)
    centres = [size // 2 + draws.normal() * (size * 3 // 10) // 148 for _ in range(44)]
    turns = draws.many(32, 22)
    lengths = [164, 197, 236, 282, 338, 405, 485, 581, 696, 834, 999, 1197, 1434, 1718]
    halves = [lengths[i] * size // 4096 + 4 for i in draws.many(14, 22)]
    ratios = [614, 778, 985, 1247, 1579, 2000, 2533, 3207, 4061]
    widths = [h * ratios[i] // 4096 + 4 for h, i in zip(halves, draws.many(9, 22), strict=True)]
    kinds, soft = draws.many(3, 22), draws.many(22, 22)
    outlined = [odd and i < 3 for i in draws.many(5, 22)]
    strokes = [size * (2 + i) // 256 + 8 for i in draws.many(7, 22)]
    shades = [draws.normal() * 16 // 148 for _ in range(22)]
    colours = [[base + part for part in draws.colour(50, hue)] for _ in range(22)]
    weights = ((5, 5, 6, 6, 7), (2, 3, 5, 8, 12), (1, 2, 4, 8, 16))[draws.below(3)]
    strength = 0 * draws.normal() if odd else abs(draws.normal())
    y, x = np.indices((side, side)) * 16 + 8
    middle = size // 2
    along = turned(direction, x - middle, y - middle)[0]
    image = np.array(ground)[:, None, None] * 16 + slope * along // side
    for k in range(few if odd else many):
        across, down = turned(turns[k], x - centres[2 * k], y - centres[2 * k + 1])
        half, width = halves[k], widths[k]
        if kinds[k] == 0:
            far = (abs(across) * 256 // half) ** 2 + (abs(down) * 256 // width) ** 2
            inside = (256 - np.floor(np.sqrt(np.minimum(far, 2**50))).astype(int)) * width // 256
        elif kinds[k] == 1:
            inside = np.minimum(half - abs(across), width - abs(down))
        else:
            inside = np.minimum(down + width, half - down - abs(across) * 6 // 5)
        if outlined[k]:
            inside = strokes[k] - abs(inside)
        cover = np.clip(128 + inside * (11 + soft[k]), 0, 256)
        for channel, level in enumerate(colours[k]):
            wanted = level * 16 + shades[k] * across * 16 // half
            image[channel] += (wanted - image[channel]) * cover // 256
    texture = np.zeros((side, side), int)
    for step, weight in zip((1, 2, 4, 8, 16), weights, strict=True):
        wide = side // step + 2
        grid = np.array(draws.many(256, wide**2)).reshape(wide, wide) - 128
        for i, j in np.ndindex(side, side):
            a, b, c, d = i // step, i % step, j // step, j % step
            upper = grid[a, c : c + 2] * (step - b) + grid[a + 1, c : c + 2] * b
            texture[i, j] += int(upper @ (step - d, d)) // step**2 * weight
    painted: Whole = np.clip((image + texture * strength * 160 // 148_000) // 16, 0, 255)
    return painted


def seed_images(count: int, side: int, seed: int) -> Whole:
    cells = sum((side // step + 2) ** 2 for step in (1, 2, 4, 8, 16))
    each = 64 + 14 * CHANNELS + 22 * (24 + 4 * CHANNELS) + 2 * cells
    raw = np.random.Philox(key=seed).random_raw(count * each).reshape(count, each)
    return np.stack([one_image(Draws(iter(row)), i % 2 == 1, side) for i, row in enumerate(raw)])


def filters_of(
    images: Whole, size: int, draw: torch.Generator
) -> tuple[list[Whole], list[np.float32]]:
    """q (C, p, p) of `EACH` patches, and s with q = s·f, of whitened filters f."""
    positions = images.shape[2] - size + 1
    places = torch.randint(len(images) * positions**2, (20_000,), generator=draw).tolist()
    torch.randn(EACH, CHANNELS * size**2, generator=draw, dtype=torch.float64)
    cut = []
    for place in places:
        image, y, x = place // positions**2, place // positions % positions, place % positions
        cut.append(images[image, :, y : y + size, x : x + size].ravel())
    pixels = np.array(cut).astype(float)
    d = pixels.shape[1]
    centred = pixels - pixels.mean(1, keepdims=True)
    normal = centred / np.sqrt(centred.var(1, keepdims=True) + 10)
    values, vectors = np.linalg.eigh(normal.T @ normal / len(normal))
    white = vectors @ np.diag((np.maximum(values, 0) + 0.1) ** -0.5) @ vectors.T
    found, gains = [], []
    for v in normal[centred.var(1) > 10][:EACH]:
        f = v @ white
        f = f / np.linalg.norm(f) @ white
        f -= f.mean()
        s = min(127 / abs(f).max(), (32_896 - d) / abs(f).sum())
        q = np.rint(s * f)
        step = np.sign(q.sum())
        error = np.where(abs(q - step) > 127, -1, (q - s * f) * step)
        q[np.argsort(-error, kind="stable")[: int(abs(q.sum()))]] -= step
        found.append(q.astype(np.int64).reshape(CHANNELS, size, size))
        gains.append(np.float32(s))
    return found, gains


def counted(positions: int) -> Whole:
    """(3, positions) how much each position counts in a region, in quarters."""
    weights = np.zeros((POOL, positions), int)
    for region, i in np.ndindex(weights.shape):
        far = POOL * (2 * i + 1) - positions * (2 * region + 1)
        beyond = (region == 0 and far < 0) or (region == POOL - 1 and far > 0)
        near = max(2 * positions - (0 if beyond else abs(far)), 0)
        weights[region, i] = (4 * near + positions) // (2 * positions)
    return weights


class Features:
    """D = 18 features of each filter."""

    def __init__(self, seed: int) -> None:
        images, draw = seed_images(DRAWN, 32, seed), torch.Generator().manual_seed(seed)
        self.filters = [filters_of(images, size, draw) for size in SIZES]

    def __call__(self, image: Whole) -> Single:
        """(D,) whole numbers of an image (C, side, side)."""
        return np.concatenate(
            [self.of(image, *bank, size) for bank, size in zip(self.filters, SIZES, strict=True)]
        )

    def of(
        self, image: Whole, filters: Sequence[Whole], gains: Sequence[np.float32], size: int
    ) -> Single:
        d, positions = CHANNELS * size**2, image.shape[1] - size + 1
        weights = counted(positions)
        area = np.outer(weights.sum(1), weights.sum(1))
        unit = 2.0 ** min(0, 24 - ceil(log2(2 * 127 * d * area.max())))
        usual = exp(-1 / 8) / sqrt(2 * pi) - (1 - erf(0.5 / sqrt(2))) / 4
        found = []
        for q, gain in zip(filters, gains, strict=True):
            threshold = np.rint(gain * np.float32(0.5 * unit))
            sums = np.zeros((2, POOL, POOL))
            for face in (image, image[:, :, ::-1]):
                v = np.zeros((positions, positions), np.float32)
                for i, j in np.ndindex(v.shape):
                    x = face[:, i : i + size, j : j + size]
                    spread = 256 * (d * (x**2).sum() - x.sum() ** 2 + 10 * d**2)
                    contrast = np.float32(16 * d / int(sqrt(spread)) * unit)
                    v[i, j] = np.rint(np.float32((q * x).sum()) * contrast)
                for sign in (0, 1):
                    above = np.maximum((-1) ** sign * v - threshold, 0)
                    sums[sign] += weights @ above @ weights.T
            average = gain * np.float32(usual * unit * 2) * area.astype(np.float32)
            scale = np.sqrt(np.maximum(average, 1).astype(float)).astype(np.float32) * np.float32(2)
            # PyTorch divides a number by a tensor so.
            factor = np.float32(127) * (np.float32(1) / scale)
            level = np.sqrt(sums).astype(np.float32) * factor
            found.append(np.minimum(np.rint(level), 127).ravel())
        return np.concatenate(found)


def times(a: Vector, b: Vector) -> Vector:
    """A product of matrices of whole numbers; none of its sums needs rounding."""
    exact = a.astype(int).astype(object) @ b.astype(int).astype(object)
    assert max(abs(exact).ravel()) < 2**53
    found: Vector = exact.astype(float)
    return found


def shortened(matrix: Vector) -> tuple[Vector, Vector]:
    """Columns of 20 bits, and the powers of two that they count in."""
    powers = np.array([2.0 ** (int(np.frexp(top)[1]) - 20) for top in abs(matrix).max(0)])
    return np.floor(matrix / powers), powers


def inverse_root(gram: Vector) -> Vector:
    """L⁻¹ of G = LLᵀ, turned round and in 20 bits; by rows, because that decides the rounding."""
    size = np.sqrt(np.diag(gram))
    work = gram / np.outer(size, size)
    np.fill_diagonal(work, 1 + 1e-9)
    r = len(work)
    inverse = np.eye(r)
    for k in range(r):
        pivot = sqrt(work[k, k])
        column = [work[i, k] / pivot for i in range(r)]
        inverse[k] /= pivot
        for i in range(k + 1, r):
            inverse[i] = inverse[i] - column[i] * inverse[k]
            for j in range(k + 1, r):
                work[i, j] = work[i, j] - column[i] * column[j]
    return shortened((inverse / size).T)[0]


def basis(features: Features, seed: int) -> tuple[Whole, Whole, Whole]:
    """V (D, r), c and k: h = ⌊(f·V - c)·k/2^20⌉."""
    f = np.stack([features(image) for image in seed_images(IMAGES, SIDE, seed)]).astype(float)
    n, d = f.shape
    total = f.sum(0)
    covariance = times(f.T, f) / n - np.outer(total, total) / n**2
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1))
    whole = np.rint(covariance / np.outer(deviation, deviation) * 2**20)
    raw = np.random.Philox(key=seed).random_raw(d * R)
    space = np.array([(int(word) >> 55) - 256 for word in raw], float).reshape(d, R)
    for _ in range(4):
        image = shortened(times(whole, space))[0]
        space = shortened(times(image, inverse_root(times(image.T, image))))[0]
    image, powers = shortened(times(whole, space))
    root = inverse_root(times(space.T, image) * powers)
    white = shortened(times(space, root))[0] / deviation[:, None]
    v = np.rint(white / abs(white).max(0) * 127)
    centre = np.floor(times(v.T, total[:, None])[:, 0] / n)
    spread = np.floor(times(np.rint(covariance * 2**10), v) / 2**12)
    variance = (
        np.array([times(a[None], b[:, None]).item() for a, b in zip(spread.T, v.T, strict=True)])
        * 4
    )
    factor = np.rint(32 * 2**20 / np.sqrt(np.maximum(variance, 1)))
    return v.astype(int), centre.astype(int), factor.astype(int)


def pictures() -> tuple[Whole, Whole]:
    """Stripes of three widths, with noise."""
    random = np.random.default_rng(3)
    y = np.arange(SAMPLES) % CLASSES
    stripes = np.array([np.arange(SIDE) // (1 + c) % 2 for c in range(CLASSES)])[y]
    x = stripes[:, None, None] * 60 + random.integers(0, 190, (SAMPLES, CHANNELS, SIDE, SIDE))
    return x.clip(0, 255), y


def regression(h: Whole, y: Whole, sums: Vector, noise: float) -> tuple[Vector, Vector]:
    """Weights (r, K) and biases of ridge regression on standardised h, λ by cross-validation."""
    n, mean, sigma = len(y), h.mean(0), h.std(0)
    scatter = (sums - n * np.outer(mean, mean)) / np.outer(sigma, sigma)
    shares = np.bincount(y, minlength=CLASSES) / n
    targets = np.eye(CLASSES)[y] - shares
    cross = ((h - mean) / sigma).T @ targets
    s = noise * (1 / sigma**2).mean()
    found = {}
    for power in range(-24, 5):
        penalty = n * 10 ** (power / 4)
        inverse = np.linalg.inv(scatter + penalty * np.eye(R))
        w = inverse @ cross
        rest = (targets**2).sum() - 2 * (w * cross).sum() + (w * (scatter @ w)).sum()
        rest += 2 * s**2 * (np.trace(inverse) * (w**2).sum() + np.trace(w.T @ inverse @ w))
        freedom = 1 + np.trace(scatter @ inverse)
        if freedom <= n / 2:
            found[max(rest, 0) / (1 - freedom / n) ** 2] = w
    w = found[min(found)] / sigma[:, None]
    return w, shares - mean @ w


def test_sums_have_the_bits_of_the_rewrite_and_the_head_its_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = pictures()
    totals: list[Handoff] = []
    solved = FedGram.solved

    def kept(self: FedGram, network: Any, given: Handoff, task: Any) -> Any:
        totals.append(given)
        return solved(self, network, given, task)

    monkeypatch.setattr(FedGram, "solved", kept)
    cuts = [slice(0, 70), slice(70, 100), slice(100, None)]
    parts = [(torch.from_numpy(x[cut]).byte(), torch.from_numpy(y[cut])) for cut in cuts]
    silos = ekiden.federate(parts, test=parts[0], val_fraction=0.0)
    method = FedGram(features="components", width=R, bits=BITS, samples=SAMPLES)
    result = ekiden.run(method, silos, hardware=Hardware(threads=1), seed=6, quiet=True)
    network = as_split(result.model)

    seed = network.features.seed
    assert isinstance(seed, int)
    features = Features(seed)
    v, c, k = basis(features, seed)
    f = np.stack([features(image) for image in x]).astype(int)
    h = np.clip(np.rint((f @ v - c) * k / 2**20), -127, 127).astype(int)
    unit = -(-SAMPLES * 4 * 32**2 // 2 ** (BITS - 1))
    rounded = sum((h[cut].T @ h[cut] + unit // 2) // unit for cut in cuts)
    above = np.triu_indices(R, 1)
    sums = totals[0].sums
    assert isinstance(sums, Sums)
    assert isinstance(sums.gram, Rounded)
    assert sums.gram.unit == unit
    counts = torch.from_numpy(rounded[above] % 2**BITS)
    assert torch.equal(sums.gram.products, pack(counts, BITS))
    assert sums.gram.squares.tolist() == (h**2).sum(0).tolist()
    assert sums.classes.tolist() == [h[y == label].sum(0).tolist() for label in range(CLASSES)]

    gram = rounded * float(unit)
    np.fill_diagonal(gram, (h**2).sum(0))
    w, bias = regression(h, y, gram, unit * sqrt(len(cuts) / 12))
    scores = h @ w + bias
    with torch.no_grad():
        found = network.head(torch.from_numpy(h).float()).double().numpy()
    scores, found = (s - s.mean(1, keepdims=True) for s in (scores, found))
    temperature = (found * scores).sum() / (scores**2).sum()
    np.testing.assert_allclose(found / temperature, scores, atol=1e-6)
