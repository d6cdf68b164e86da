"""Features that are whole numbers: against plain arithmetic, exact for any batch, set by one client
for all."""

import copy
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError
from ekiden.core.data.augment import normalise
from ekiden.methods.exact.blocks.whole_features import (
    BlockAverages,
    FrozenNetwork,
    PatchFeatures,
    RandomReLU,
    Scaling,
    WholeFeatures,
)


def plain_scaling() -> tuple[Scaling, torch.Generator]:
    """Inputs that are pixels in [0, 1], and always the same draws."""
    return ((0.0,), (1.0,)), torch.Generator().manual_seed(0)


def units(inputs: int, width: int, *, direct: bool = False, seed: int = 0) -> RandomReLU:
    torch.manual_seed(seed)
    return RandomReLU(inputs, width, direct=direct)


def points(n: int = 50, inputs: int = 6) -> Tensor:
    return 3 + 2 * torch.randn(n, inputs, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("direct", [False, True])
def test_random_units_are_what_they_say(direct: bool) -> None:
    features, x = units(6, 30, direct=direct), points()
    features.settle(x, *plain_scaling())
    centre, scale, gain = features.tell()
    linear = cast(nn.Linear, features.linear)
    out = features(x)
    assert out.shape == (50, 30)
    for i in range(50):
        u = [min(127, max(-127, round(float((x[i, j] - centre[j]) * scale[j])))) for j in range(6)]
        found = [float(v) for v in out[i]]
        if direct:
            assert found[:6] == u
            found = found[6:]
        for w, b, g, h in zip(
            linear.weight.tolist(), linear.bias.tolist(), gain, found, strict=True
        ):
            z = sum(int(a) * int(c) for a, c in zip(w, u, strict=True)) + int(b)
            assert h == min(127, round(float(torch.tensor(float(max(z, 0))) * g)))
    assert float(out.max()) == 127


def test_the_first_client_standardises() -> None:
    features = units(6, 12)
    x = points(2000)
    x[:, 3] = 4.0  # a number that never changes is cut off gently elsewhere
    features.settle(x, *plain_scaling())
    centre, scale, _ = features.tell()
    assert torch.allclose(centre, x.mean(0), atol=1e-5)
    others = torch.tensor([0, 1, 2, 4, 5])
    assert torch.allclose(scale[others], 127 / 4 / x.std(0, correction=0)[others], rtol=1e-4)
    assert float(scale[3]) == pytest.approx(
        127 / 4 / float(x.double().std(0, correction=0).mean()), rel=1e-4
    )


@pytest.mark.parametrize("inputs", [3, 64, 784, 3072])
def test_no_product_can_be_rounded(inputs: int) -> None:
    """The largest sum that inputs from -127 to 127 can give is below 2^24."""
    linear = cast(nn.Linear, units(inputs, 40).linear)
    assert torch.equal(linear.weight, linear.weight.round())
    assert float((linear.weight.abs().sum(1) * 127 + linear.bias.abs()).max()) < 2**24
    assert float(linear.weight.abs().max()) > 20, "fine enough"


def test_the_same_bits_in_any_batch() -> None:
    features, x = units(20, 64), points(200, 20)
    features.settle(x, *plain_scaling())
    whole = features(x)
    assert torch.equal(torch.cat([features(part) for part in torch.split(x, 7)]), whole)
    order = torch.randperm(200)
    assert torch.equal(features(x[order]), whole[order])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(features(x), whole)


def backbone() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU())


def test_features_of_a_network_and_units_of_these() -> None:
    features, x = FrozenNetwork(backbone(), 8, 20), points()
    features.settle(x, *plain_scaling())
    hidden = backbone()(x).detach()
    expected = units(8, 20, direct=True)
    expected.load_state_dict(features.units.state_dict())
    assert torch.equal(features(x), expected(hidden))
    plain = FrozenNetwork(backbone(), 8, 8)
    plain.settle(x, *plain_scaling())
    assert torch.equal(plain(x), features(x)[:, :8])
    assert not any(p.requires_grad for p in features.parameters())


def test_averages_of_blocks_leave_out_the_last() -> None:
    """By hand: the first block ends where the next filters begin; the third is not computed."""
    first, second = nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 1, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
        second.weight.copy_(torch.tensor([2.0, 1.0]).view(1, 2, 1, 1))
    network = nn.Sequential(
        nn.Identity(), first, nn.ReLU(), second, nn.BatchNorm2d(1), nn.Conv2d(1, 5, 2)
    )
    averages = BlockAverages(network.eval())
    found = averages(torch.tensor([[[[3.0, -1.0], [0.0, 6.0]]]]))
    torch.testing.assert_close(found, torch.tensor([[2.25, 0.25, 4.75 / (1 + 1e-5) ** 0.5]]))
    for other in (nn.Sequential(first, nn.ReLU()), nn.ModuleList([first, second])):
        with pytest.raises(UserError, match="sequence of two blocks or more"):
            BlockAverages(other)


@pytest.mark.parametrize("kind", ["units", "network"])
def test_what_is_settled_travels(kind: str) -> None:
    def build() -> WholeFeatures:
        return units(6, 30) if kind == "units" else FrozenNetwork(backbone(), 6 + 2, 30)

    one = build()
    other, x = copy.deepcopy(one), points()
    one.settle(x, *plain_scaling())
    assert not torch.equal(other(x), one(x))
    other.adopt(one.tell())
    assert torch.equal(other(x), one(x))
    assert one.told_bytes() == sum(t.numel() * t.element_size() for t in one.tell())


def test_what_cannot_be_adopted_is_refused() -> None:
    features = units(6, 30)
    centre, scale, gain = features.tell()
    for told in ((centre, scale), (centre[1:], scale, gain), (centre.double(), scale, gain)):
        with pytest.raises(UserError, match="another kind"):
            features.adopt(told)
    with pytest.raises(UserError, match="not finite"):
        features.adopt((centre, scale, gain * float("nan")))
    with pytest.raises(UserError, match=r"at most 100000 numbers, but these have 100001"):
        RandomReLU(100_001, 2)


def images(n: int = 40, channels: int = 3, seed: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, channels, 12, 12), generator=draw, dtype=torch.uint8)


def patches(channels: int = 3, width: int = 50, sizes: tuple[int, ...] = (3, 5)) -> PatchFeatures:
    return PatchFeatures((channels, 12, 12), width, sizes)


@pytest.mark.parametrize(
    ("mean", "std"), [((0.0,), (1.0,)), ((0.49, 0.48, 0.45), (0.2, 0.25, 0.3))]
)
def test_patches_see_the_bytes_behind_normalised_images(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    x = images()
    plain, scaled = patches(), patches()
    plain.settle(normalise(x, (0.0,), (1.0,)), *plain_scaling())
    scaled.settle(normalise(x, mean, std), (mean, std), plain_scaling()[1])
    assert plain.width == 48, "6 filters, 3 of each size"
    assert [tuple(t.shape) for t in plain.tell()] == [
        (3 * 3 * (9 + 25),),
        (6,),
        (3, 1, 1),
        (3, 1, 1),
        (48,),
    ]
    assert plain.tell()[0].dtype == torch.int8
    out = scaled(normalise(x, mean, std))
    assert torch.equal(out, plain(normalise(x, (0.0,), (1.0,))))
    assert out.max() == 127
    other = patches()
    other.adopt(scaled.tell())
    assert torch.equal(other(normalise(x, mean, std)), out)
    assert other.told_bytes() == sum(t.numel() * t.element_size() for t in scaled.tell())


def test_patches_are_drawn_as_the_generator_says() -> None:
    x, made = images().float() / 255, [patches() for _ in range(3)]
    for features, seed in zip(made, (1, 1, 2), strict=True):
        features.settle(x, ((0.0,), (1.0,)), torch.Generator().manual_seed(seed))
    one, same, other = (features.tell()[0] for features in made)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_filters_that_would_not_be_exact_are_refused() -> None:
    features = patches()
    features.settle(images().float() / 255, *plain_scaling())
    filters, gain, mean, std, scale = features.tell()
    shifted = filters.clone()
    shifted[0] -= torch.sign(shifted[0])
    with pytest.raises(UserError, match="do not sum to zero"):
        features.adopt((shifted, gain, mean, std, scale))
    for told in ((filters, -gain, mean, std, scale), (filters, gain, mean, 0 * std, scale)):
        with pytest.raises(UserError, match="not positive"):
            features.adopt(told)
    wide = PatchFeatures((4, 12, 12), 8, (11,))
    loud = torch.full((4 * 121,), 127, dtype=torch.int8)
    loud[::2] = -127
    with pytest.raises(UserError, match="too large for exact sums"):
        wide.adopt((loud, torch.ones_like(wide.tell()[1]), *wide.tell()[2:]))


def test_normalised_images_have_the_features_of_the_bytes_behind_them() -> None:
    x, (scaling, draw) = images().float() / 255, plain_scaling()
    x[0, :, 0, 0], x[0, :, 0, 1] = 0, 1  # each channel has the darkest and the brightest byte
    settled, normalised = patches(), patches()
    state = draw.get_state()
    settled.settle(x, scaling, draw)
    draw.set_state(state)
    channels = x.shape[1]
    mean, std = (
        torch.linspace(*ends, channels).view(-1, 1, 1) for ends in ((0.4, 0.5), (0.2, 0.3))
    )
    normalised.settle((x - mean) / std, scaling, draw)
    assert torch.equal(normalised((x - mean) / std), settled(x))
    received = patches()
    received.adopt(normalised.tell())
    assert torch.equal(received((x - mean) / std), settled(x))


def test_a_constant_channel_is_no_division_by_zero() -> None:
    features, x = patches(), 3 * images().float() / 255
    x[:, 0] = 7
    features.settle(x, *plain_scaling())
    assert bool(features(x).isfinite().all())
