"""Public components: nearly white on seed images, exact for any samples, and nobody's choice."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import ekiden
from ekiden import FedGram, UserError
from ekiden.core.base import files
from ekiden.methods.exact.blocks import components
from ekiden.methods.exact.blocks.components import UNIT, Components, basis_of
from ekiden.methods.exact.blocks.seed_images import seed_images

SHAPE = (3, 16, 16)
# Silos of one class have stripes in one direction.
pytestmark = pytest.mark.filterwarnings(
    "ignore:images of client-:ekiden.core.base.errors.DataWarning"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A basis in a second instead of a minute."""
    monkeypatch.setattr(components, "IMAGES", 600)
    monkeypatch.setattr(components, "FILTERS", 10)
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
    phi = features.patches(images).double().numpy()
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
    phi = features.patches(x).long().numpy()
    v, c, k = (t.long().numpy() for t in features._basis())
    fine = (phi @ v - c) * k
    wanted = np.clip(np.rint(fine / 2**20), -127, 127)
    assert np.array_equal(features(x).numpy(), wanted)


def test_a_basis_comes_from_the_cache_and_a_damaged_file_is_made_again() -> None:
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


def cut(how: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three silos: of equal parts, of few classes each, or very unequal."""
    x, y = pictures()
    rows = y.argsort(stable=True) if how == "skewed" else torch.arange(len(y))
    sizes = [5, 35, 200] if how == "unequal" else [80, 80, 80]
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


@pytest.mark.parametrize("how", ["equal", "skewed", "unequal"])
def test_exact_sums_are_those_of_pooled_data_for_any_skew(how: str) -> None:
    method = FedGram(features="components", width=24)
    pooled = ekiden.federate([pictures()], test=pictures(), val_fraction=0.0)
    expected = ekiden.run(method, pooled, quiet=True).weights
    assert expected is not None
    assert torch.equal(weights(method, cut(how)), expected.params)


@pytest.mark.parametrize("how", ["equal", "skewed", "unequal"])
def test_rounded_sums_have_the_same_bits_in_any_order_and_shape(how: str) -> None:
    method = FedGram(features="components", width=24, samples=240)
    parts = cut(how)
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


def test_wrong_samples_and_options_are_one_line() -> None:
    silos = [(torch.randn(20, 4), torch.arange(20) % 2)] * 2
    with pytest.raises(UserError, match="for square images of 16 to 64 pixels"):
        ekiden.run(FedGram(features="components", width=4), silos, quiet=True)
    with pytest.raises(UserError, match="leave out dictionary first"):
        FedGram(features="components", dictionary="first")
    with pytest.raises(UserError, match="1000 components at most, not 1001"):
        Components(SHAPE, 1001, mirror=True)


def test_basis_of_few_images_has_no_missing_numbers() -> None:
    """More components than there are directions: the rest is rounding, not NaN."""
    features = made()
    found = basis_of(features.patches, 60, 5)
    assert all(bool(torch.isfinite(part.double()).all()) for part in found)
