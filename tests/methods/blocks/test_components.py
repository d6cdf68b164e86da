"""Public components: nearly white on seed images, exact for any samples, and nobody's choice."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ekiden
from ekiden import FedGram, UserError
from ekiden.core.base import files
from ekiden.methods.exact.blocks import components
from ekiden.methods.exact.blocks.components import UNIT, Components, basis_of
from ekiden.methods.exact.blocks.seed_images import seed_images as paint

SHAPE = (3, 16, 16)
# Silos of one class have stripes in one direction.
pytestmark = pytest.mark.filterwarnings(
    "ignore:images of client-:ekiden.core.base.errors.DataWarning"
)


seed_images = cache(paint)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A basis in a second instead of a minute, of images that are painted once."""
    monkeypatch.setattr(components, "seed_images", seed_images)
    monkeypatch.setattr(components, "IMAGES", 600)
    monkeypatch.setattr(components, "FILTERS", 10)
    monkeypatch.setattr(components, "UNITS", 100)
    components._kept.cache_clear()


def made(width: int = 40, seed: int = 0) -> Components:
    torch.manual_seed(seed)
    features = Components(SHAPE, width, mirror=True)
    features.fix()
    return features


def test_on_seed_images_components_are_white() -> None:
    features = made()
    images = torch.from_numpy(seed_images(components.IMAGES, *SHAPE[:2], 0))
    covariance = np.cov(features(images).numpy().T) / UNIT**2
    assert np.abs(np.diag(covariance) - 1).max() < 0.05, "some are cut off at four deviations"
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 0.1


def test_they_span_the_space_of_the_first_eigenvectors() -> None:
    features, width = made(), 40
    images = torch.from_numpy(seed_images(components.IMAGES, *SHAPE[:2], 0))
    phi = features.body(images).double().numpy()
    z = (phi - phi.mean(0)) / np.maximum(phi.std(0), 1)
    values, vectors = np.linalg.eigh(z.T @ z / len(z))
    own = features.get_buffer("projection").double().numpy() * np.maximum(phi.std(0), 1)[:, None]
    basis, _ = np.linalg.qr(own)
    held = np.trace(basis.T @ (z.T @ z / len(z)) @ basis)
    assert held > 0.98 * values[-width:].sum()
    assert held <= values[-width:].sum() * (1 + 1e-9)
    assert vectors.shape[0] == len(own)


def test_components_are_whole_numbers_of_plain_arithmetic() -> None:
    features = made()
    draw = torch.Generator().manual_seed(2)
    x = torch.randint(256, (7, *SHAPE), generator=draw, dtype=torch.uint8)
    phi = features.body(x).long().numpy()
    v, c, k = (t.long().numpy() for t in features._basis())
    fine = (phi @ v - c) * k
    wanted = np.clip(np.rint(fine / 2**20), -127, 127)
    assert np.array_equal(features(x).numpy(), wanted)


def test_a_basis_comes_from_the_cache_and_a_damaged_file_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path))
    first = made()._basis()
    (file,) = files.cache_folder().glob("components-*.safetensors")
    for damage in (False, True):
        components._kept.cache_clear()
        if damage:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        again = made()._basis()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.projection, made(seed=1)._basis().projection)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Vertical against horizontal stripes, with noise."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 2
    stripes = (torch.arange(16) // 2 % 2).float() * 120
    lines = torch.where(y[:, None, None] == 0, stripes[None, :], stripes[:, None])
    x = lines[:, None] + 60 + 40 * torch.randn(240, *SHAPE, generator=draw)
    return x.clamp(0, 255).to(torch.uint8), y


def cut(*, skewed: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three silos: of few classes each, or of very unequal sizes."""
    x, y = pictures()
    rows = y.argsort(stable=True) if skewed else torch.arange(len(y))
    sizes = [80, 80, 80] if skewed else [5, 35, 200]
    return [(x[part], y[part]) for part in torch.split(rows, sizes)]


def weights(
    method: FedGram, parts: list[tuple[torch.Tensor, torch.Tensor]], **options: Any
) -> torch.Tensor:
    silos = ekiden.federate(parts, test=pictures(), val_fraction=0.0)
    result = ekiden.run(method, silos, quiet=True, **options)
    assert result.accuracy > 0.95
    assert result.weights is not None
    # A hop: sums of products, of classes and counts, and how pixels were scaled.
    d = method.width
    products = 2 * d * (d + 1)
    if method.samples:
        products = -(-11 * d * (d - 1) // 16) + 4 * d + 24
    hops = 3 if method.topology == "star" else 2
    assert result.bytes == hops * (products + 4 * 2 * d + 8 * 2 + 8 * 3)
    return result.weights.params


def test_exact_sums_are_those_of_pooled_data_for_any_skew() -> None:
    method = FedGram(features="components", width=24)
    pooled = ekiden.federate([pictures()], test=pictures(), val_fraction=0.0)
    expected = ekiden.run(method, pooled, quiet=True).weights
    assert expected is not None
    for skewed in (True, False):
        assert torch.equal(weights(method, cut(skewed=skewed)), expected.params)


def test_rounded_sums_have_the_same_bits_in_any_order_and_shape() -> None:
    method = FedGram(features="components", width=24, samples=240)
    parts = cut(skewed=False)
    expected = weights(method, parts)
    assert torch.equal(weights(replace(method, order="reversed"), parts), expected)
    assert torch.equal(weights(replace(method, topology="star"), parts), expected)
    assert torch.equal(weights(method, [parts[i] for i in (2, 0, 1)]), expected)


def test_sums_that_may_wrap_are_noticed() -> None:
    """Half of the images are faint ramps, half nothing but noise: far from what the seed draws."""
    y = torch.arange(240) % 2
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(2, (240, *SHAPE), generator=draw) * 255
    level = torch.arange(240)[:, None, None, None] // 2 + torch.arange(16)
    x = torch.where(y[:, None, None, None] == 0, level, noise).byte()
    parts = [(x[:90], y[:90]), (x[90:], y[90:])]
    silos = ekiden.federate(parts, test=pictures(), val_fraction=0.0)
    with pytest.raises(UserError, match="do not fit into 11 bits"):
        ekiden.run(FedGram(features="components", width=24, samples=240), silos, quiet=True)


def vectors(d: int, width: int) -> Components:
    torch.manual_seed(0)
    features = Components((d,), width, mirror=False)
    features.fix()
    return features


def test_components_of_vectors_are_whole_numbers_of_plain_arithmetic() -> None:
    features = vectors(5, 20)
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(1))
    u = np.clip(np.rint(x.double().numpy() * 127 / 4), -127, 127)
    r, b = (features.body.get_buffer(name).numpy() for name in ("matrix", "bias"))
    units = np.rint(np.maximum(u @ r.T + 127 * b, 0) / (2 * np.sqrt((r**2).sum(1))))
    phi = np.concatenate([u, np.minimum(units, 127)], 1).astype(int)
    v, c, k = (t.long().numpy() for t in features._basis())
    wanted = np.clip(np.rint((phi @ v - c) * k / 2**20), -64, 64)
    assert np.array_equal(features(x).numpy(), wanted)
    drawn = features(features.samples()).numpy()
    assert np.abs(drawn.std(0) / UNIT - 1).max() < 0.3, "some are cut off at two deviations"


def test_one_lap_over_a_table_learns_what_is_not_linear_and_never_wraps() -> None:
    """Copies of one column vary most together; answers depend on a product of two others."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 6, generator=draw)
    x[:, 3:] = x[:, :1]
    y = (x[:, 0] * x[:, 1] > 0).long()
    parts = [(x[:300], y[:300]), (x[300:900], y[300:900])]
    silos = ekiden.federate(parts, test=(x[900:], y[900:]), val_fraction=0.0)
    method = FedGram(features="components", width=60, samples=900)
    one = ekiden.run(method, silos, quiet=True)
    assert one.accuracy > 0.8
    assert one.bytes == -(-11 * 60 * 59 // 16) + 4 * 60 + 24 + 4 * 2 * 60 + 8 * 2
    signals = [(rows.view(-1, 2, 3), labels) for rows, labels in parts]
    measured = (x[900:].view(-1, 2, 3), y[900:])
    as_signals = ekiden.federate(signals, test=measured, val_fraction=0.0)
    other = ekiden.run(replace(method, order="reversed"), silos, quiet=True)
    assert one.weights is not None
    assert other.weights is not None
    assert torch.equal(one.weights.params, other.weights.params)
    assert ekiden.run(method, as_signals, quiet=True).accuracy > 0.8


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a process of its own makes the basis in full
    components._kept.cache_clear()
    method = FedGram(features="components", width=24, samples=240)
    expected = weights(method, cut(skewed=True))
    assert torch.equal(weights(method, cut(skewed=True), processes=True, workers=2), expected)


def test_wrong_samples_and_options_are_one_line() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1001, generator=draw)
    silos = [(x[:20], torch.arange(20) % 2), (x[20:], torch.arange(20) % 2)]
    with pytest.raises(UserError, match="and for vectors and signals of at most 1000 numbers"):
        ekiden.run(FedGram(features="components", width=4), silos, quiet=True)
    with pytest.raises(UserError, match="leave out dictionary first"):
        FedGram(features="components", dictionary="first")
    with pytest.raises(UserError, match="1000 components at most, not 1001"):
        Components(SHAPE, 1001, mirror=True)


def test_basis_of_few_images_has_no_missing_numbers() -> None:
    """More components than there are directions: the rest is rounding, not NaN."""
    features = made()
    found = basis_of(features.body, features.samples()[:30], 60, 5)
    assert (found.projection.abs().amax(0) == 127).all(), "each column uses all bits"
    assert (found.factor > 0).all()
