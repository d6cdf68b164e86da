"""Features that are whole numbers: against plain arithmetic, exact whatever the batch, settled by one for all."""

import copy
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from ekiden.errors import UserError
from ekiden.models.whole import FrozenNetwork, RandomReLU, Scaling, WholeFeatures

PLAIN: tuple[Scaling, torch.Generator] = (((0.0,), (1.0,)), torch.Generator())


def units(inputs: int, width: int, *, direct: bool = False, seed: int = 0) -> RandomReLU:
    torch.manual_seed(seed)
    return RandomReLU(inputs, width, direct=direct)


def points(n: int = 50, inputs: int = 6) -> Tensor:
    return 3 + 2 * torch.randn(n, inputs, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("direct", [False, True])
def test_random_units_are_what_they_say(direct: bool) -> None:
    features, x = units(6, 30, direct=direct), points()
    features.settle(x, *PLAIN)
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
        for w, b, g, h in zip(linear.weight.tolist(), linear.bias.tolist(), gain, found, strict=True):
            z = sum(int(a) * int(c) for a, c in zip(w, u, strict=True)) + int(b)
            assert h == min(127, round(float(torch.tensor(float(max(z, 0))) * g)))
    assert float(out.max()) == 127


def test_the_first_client_standardises() -> None:
    features = units(6, 12)
    x = points(2000)
    x[:, 3] = 4.0  # a number that never changes is cut off gently elsewhere
    features.settle(x, *PLAIN)
    centre, scale, _ = features.tell()
    assert torch.allclose(centre, x.mean(0), atol=1e-5)
    others = torch.tensor([0, 1, 2, 4, 5])
    assert torch.allclose(scale[others], 127 / 4 / x.std(0, correction=0)[others], rtol=1e-4)
    assert float(scale[3]) == pytest.approx(127 / 4 / float(x.double().std(0, correction=0).mean()), rel=1e-4)


@pytest.mark.parametrize("inputs", [3, 64, 784, 3072])
def test_no_product_can_be_rounded(inputs: int) -> None:
    """The largest sum that inputs from -127 to 127 can give is below 2^24."""
    linear = cast(nn.Linear, units(inputs, 40).linear)
    assert torch.equal(linear.weight, linear.weight.round())
    assert float((linear.weight.abs().sum(1) * 127 + linear.bias.abs()).max()) < 2**24
    assert float(linear.weight.abs().max()) > 20, "fine enough"


def test_the_same_bits_in_any_batch() -> None:
    features, x = units(20, 64), points(200, 20)
    features.settle(x, *PLAIN)
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
    features.settle(x, *PLAIN)
    hidden = backbone()(x).detach()
    expected = units(8, 20, direct=True)
    expected.load_state_dict(features.units.state_dict())
    assert torch.equal(features(x), expected(hidden))
    plain = FrozenNetwork(backbone(), 8, 8)
    plain.settle(x, *PLAIN)
    assert torch.equal(plain(x), features(x)[:, :8])
    assert not any(p.requires_grad for p in features.parameters())


@pytest.mark.parametrize("kind", ["units", "network"])
def test_what_is_settled_travels(kind: str) -> None:
    def build() -> WholeFeatures:
        return units(6, 30) if kind == "units" else FrozenNetwork(backbone(), 6 + 2, 30)

    one = build()
    other, x = copy.deepcopy(one), points()
    one.settle(x, *PLAIN)
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
    with pytest.raises(UserError, match=r"at most 100000 numbers, these have 100001"):
        RandomReLU(100_001, 2)
