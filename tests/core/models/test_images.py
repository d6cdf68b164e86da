"""Networks for images: pooling against PyTorch's, scattering against its formula, and one for
segmentations that learns, and whose export answers the same."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, federate, load_model, run
from ekiden.core.models import catalogue, images
from ekiden.core.models.images import MaxPool, Scattering, dead_leaves
from ekiden.core.tasks import Segmentation
from ekiden.methods import FedAvg
from ekiden.runs.exporting import export


def discs(n: int, seed: int, side: int = 14) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (n, 1, side, side) with a bright and a dark disc, and the class of each
    pixel."""
    draw = torch.Generator().manual_seed(seed)
    grid = torch.arange(side, dtype=torch.float32)
    x, y = torch.full((n, side, side), 120.0), torch.zeros(n, side, side, dtype=torch.int64)
    for label, change in ((1, 70.0), (2, -70.0)):
        middle = torch.rand(n, 2, generator=draw) * (side - 8) + 4
        inside = (grid[:, None] - middle[:, :1, None]) ** 2 + (
            grid[None] - middle[:, 1:, None]
        ) ** 2 < 12
        x[inside], y[inside] = 120 + change, label
    noise = torch.randn(n, side, side, generator=draw) * 20
    return (x + noise).clamp(0, 255).byte()[:, None], y


@pytest.fixture(scope="module")
def silos() -> FederatedData:
    return federate([discs(24, 1), discs(24, 2)], test=discs(20, 3), mean=(0.5,), std=(0.25,))


@pytest.mark.slow
def test_without_a_choice_a_segmentation_is_learned_by_the_u_net(
    silos: FederatedData, tmp_path: Path
) -> None:
    assert isinstance(silos.dataset.task, Segmentation)
    training = Training(lr=1e-2, batch_size=4)
    result = run(
        FedAvg(rounds=3, epochs=3),
        silos,
        training=training,
        hardware=Hardware(threads=1),
        folder=tmp_path / "run",
    )
    assert result.score > 0.8  # mean intersection over union; all background has 0.3
    model = load_model(tmp_path / "run")
    x, y = discs(10, 4)
    assert (model(x).argmax(1) == y).float().mean() > 0.95
    export(tmp_path / "run", "pt2", tmp_path / "model.pt2")


@pytest.mark.parametrize("shape", [(3, 6, 28, 28), (2, 16, 11, 9), (1, 1, 2, 2), (5, 7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_equals_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1)[::7] = 0  # ties
    if len(shape) == 4:
        x = x.to(memory_format=layout)
    expected = nn.MaxPool2d(2)(x)
    assert torch.equal(MaxPool()(x), expected)
    assert MaxPool()(x).stride() == expected.stride()

    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for pool, inputs in ((MaxPool(), ours), (nn.MaxPool2d(2), theirs)):
        out = pool(inputs)
        assert torch.equal(out, expected)
        out.square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_propagates_nan() -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 1, 0] = torch.nan
    assert torch.equal(MaxPool()(x).isnan(), torch.tensor([[[[True, False]]]]))


SMALL = (1, 16, 16)


def test_a_wavelet_is_a_wave_under_a_gaussian_without_its_mean() -> None:
    sigma, frequency, turn, side = 1.6, 0.375 * math.pi, 3 * math.pi / 8, 24
    wide = 2 * sigma  # across
    found = torch.fft.ifft2(images._wavelets((side, side), sigma, frequency)[3])
    places = torch.arange(-3 * side // 2, 3 * side // 2, dtype=torch.float64)
    y, x = places[:, None], places
    along, across = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    still = torch.exp(-(along**2) / (2 * sigma**2) - across**2 / (2 * wide**2)) / (
        2 * math.pi * sigma * wide
    )
    wave = still * torch.exp(1j * frequency * along)
    wave -= wave.sum() / still.sum() * still
    periodic = wave.view(3, side, 3, side).sum((0, 2)).roll((-side // 2, -side // 2), (0, 1))
    torch.testing.assert_close(found, periodic, atol=1e-9, rtol=0)
    assert abs(complex(found.sum())) < 1e-12


def test_maps_are_averages_of_moduli() -> None:
    """First order, by by convolution with a wavelet in space."""
    x = dead_leaves(3, SMALL)
    side = SMALL[1] + 8
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect").double()
    kernel = torch.fft.ifft2(images._wavelets((side, side), 0.8, 0.75 * math.pi)[0])
    moved = torch.stack(
        [padded[:, 0].roll((a, b), (1, 2)) for a in range(side) for b in range(side)], -1
    )
    modulus = (moved.to(kernel.dtype) @ kernel.flatten()).abs()
    low = images._average(side, 1).double()
    expected = low @ modulus @ low.T
    fine = images._bank((side, side))[0][0].double()
    found = low @ torch.fft.ifft2(torch.fft.fft2(padded[:, 0]) * fine).abs() @ low.T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_features_of_an_image_do_not_depend_on_others() -> None:
    network = Scattering((1, 17, 30)).requires_grad_(False)
    x = dead_leaves(5, (1, 17, 30))
    together = network(x)
    assert together.shape == (5, network.width)
    assert network.width == 81 * 16
    torch.testing.assert_close(together[2:3], network(x[2:3]), atol=1e-4, rtol=1e-4)
    assert float((together[2] - together[3]).norm()) > 1


def test_dead_leaves_are_white_but_for_what_was_added() -> None:
    network = Scattering(SMALL)
    assert network.width == 81 * 16
    with torch.no_grad():
        white = (
            network(dead_leaves(images._IMAGES, SMALL)).view(-1, 16, 81).double().transpose(0, 1)
        )
        assert float(white.mean(1).abs().max()) < 1e-3
        covariance, whiten = white.mT @ white / white.shape[1], network.whiten.double()
        back = torch.linalg.inv(whiten)
        variances = (back.mT @ covariance @ back).diagonal(dim1=1, dim2=2)
        added = images._REST * variances.mean(1)[:, None, None] * (whiten.mT @ whiten)
    torch.testing.assert_close(
        covariance + added, torch.eye(81).double().expand(16, 81, 81), atol=1e-3, rtol=0
    )


def test_the_network_is_the_same_at_all_silos_whatever_the_seed() -> None:
    first, other = (catalogue.build("scattering", SMALL, 4) for _ in range(2))
    pairs = zip(first.named_parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for (name, one), two in pairs if name.startswith("features."))
    assert any(name.startswith("features.") for name, _ in first.named_parameters())
    with pytest.raises(UserError, match="scattering needs images of at least 16x16 pixels"):
        catalogue.build("scattering", (1, 8, 8), 4)


def test_whitening_has_the_same_bits_on_a_processor_that_rounds_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processors give other last bits of a transform, so silos had other values of the same
    network."""
    monkeypatch.setattr(images, "_IMAGES", 40)
    modulus, draw = images._modulus, torch.Generator().manual_seed(0)

    def other(z: torch.Tensor) -> torch.Tensor:
        found = modulus(z)
        return found * (
            1 + torch.finfo(found.dtype).eps * (torch.rand(found.shape, generator=draw) - 0.5)
        )

    here = images._whitening.__wrapped__((1, 16, 16), 2)
    monkeypatch.setattr(images, "_modulus", other)
    there = images._whitening.__wrapped__((1, 16, 16), 2)
    assert [t.numpy().tobytes() for t in here] == [t.numpy().tobytes() for t in there]
