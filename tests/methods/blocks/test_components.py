"""Public components: nearly white on seed images, exact for any samples, and nobody's choice."""

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


@pytest.mark.parametrize("more", [{}, {"bits": 11, "samples": 240}], ids=["exact", "rounded"])
def test_one_lap_learns_and_its_bits_do_not_depend_on_order_and_division(
    more: dict[str, Any],
) -> None:
    x, y = pictures()
    method = FedGram(features="components", width=24, **more)
    cuts = [(x[:100], y[:100]), (x[100:], y[100:])]
    silos = ekiden.federate(cuts, test=(x, y), val_fraction=0.0)
    one = ekiden.run(method, silos, quiet=True)
    assert one.accuracy > 0.95
    other = ekiden.federate(cuts[::-1], test=(x, y), val_fraction=0.0)
    two = ekiden.run(method, other, quiet=True)
    assert one.weights is not None
    assert two.weights is not None
    assert torch.equal(one.weights.params, two.weights.params)
    # One hop: sums of products, of classes and counts, and how pixels were scaled.
    d = 24
    products = -(-11 * d * (d - 1) // 16) + 4 * d + 24 if more else 2 * d * (d + 1)
    assert one.bytes == products + 4 * 2 * d + 8 * 2 + 8 * 3


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
