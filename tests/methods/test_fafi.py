"""FAFI: its losses by hand, its network, bytes, one client, what is refused. A rewrite lies in
`tests/rewrites`."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import Hardware, Training, UserError, federate, run
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Size
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Classification
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FAFI
from ekiden.methods.blocks.combining import Trained
from ekiden.methods.one_shot.fafi import AlignedLoss, Prototypes, supervised_contrast

SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.1, batch_size=16),
    "hardware": Hardware(threads=1),
}


def network(prototypes: list[list[float]]) -> SplitNetwork:
    """Features are the inputs themselves."""
    head = Prototypes(2, len(prototypes))
    head.weight.data = torch.tensor(prototypes)
    return SplitNetwork(nn.Identity(), head)


def test_the_contrast_by_hand() -> None:
    """Samples 1 and 2 at right angles, both of class 0, and 3 = 1 of class 1, which has no other
    sample."""
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = supervised_contrast(z, torch.tensor([0, 0, 1]), 0.5)
    first, second = math.log(1 + math.exp(2)), math.log(2)
    assert float(found) == pytest.approx((first + second + 0) / 3)


def test_the_loss_by_hand() -> None:
    """One sample (3, 4) of class 0 with prototypes (1, 0) and (0, 2); its views are equal, so the
    contrast is 0."""
    loss = AlignedLoss(FAFI(jitter=0.0, nu=0.5))
    found = loss(network([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0]))
    proper = math.log(1 + math.exp(2 * 0.8 - 0.6))
    apart = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-4))) / 2
    assert float(found.detach()) == pytest.approx(2 * proper + 0.5 * apart, rel=1e-6)
    assert loss.further(7) == Work(7, 7)


def test_features_and_prototypes_are_averaged() -> None:
    """Features x with 3 samples and 5x with 1: their mean is 2x; the prototypes' mean is not
    weighted."""
    one, two = (SplitNetwork(nn.Linear(2, 2, bias=False), Prototypes(2, 2)) for _ in range(2))
    for part, factor in ((one, 1.0), (two, 5.0)):
        part.features.weight.data = factor * torch.eye(2)
        part.head.weight.data = factor * torch.eye(2)
    sent = [Trained(Network(part).weights(), torch.tensor([n])) for part, n in ((one, 3), (two, 1))]
    joined = Network(FAFI().result_network(one, 2))
    joined.load(FAFI().joined(cast(Fed, SimpleNamespace(network=lambda model: one)), sent))
    x = torch.tensor([[1.0, 2.0], [-4.0, 3.0]])
    with torch.no_grad():
        assert torch.equal(joined.module.features(x), 2 * x)  # type: ignore[operator]
        torch.testing.assert_close(joined.module(x), 3 * F.normalize(x))


def test_second_views() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8) + 1
    moved = {tuple(FAFI(jitter=0.0).view(image).flatten().tolist()) for _ in range(60)}
    assert len(moved) > 5, "shifts by up to one pixel in both directions"
    assert all(len(set(v) - {0.0}) >= 49 for v in moved)
    assert torch.equal(FAFI(jitter=0.0, shift=0.0).view(image), image)
    mirrored = {
        FAFI(jitter=0.0, shift=0.0, flip=True).view(image)[0, 0, 0, 0].item() for _ in range(20)
    }
    assert mirrored == {1.0, 8.0}
    noise = FAFI(jitter=0.5).view(torch.zeros(4000, 3))
    assert float(noise.std()) == pytest.approx(0.5, rel=0.05)


def test_it_learns_and_sends_prototypes_in_place_of_the_classifier() -> None:
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(120) % 3
    x = 2 * torch.eye(4)[y] + torch.randn(120, 4, generator=draw)
    held = list(zip(torch.tensor_split(x, 4), torch.tensor_split(y, 4), strict=True))
    result = run(FAFI(epochs=20), federate(held, test=(x, y), val_fraction=0.0), Tiny, **SETTINGS)
    own = Network(FAFI().own_network(Tiny(), (4,), 3, Classification()))
    model = 4 * (len(own.params) + len(own.buffers)) + 8 * len(own.counters)
    assert result.bytes == 4 * (model + 8) == FAFI().cost(4, Size.of(own))
    assert FAFI(weighting="uniform").cost(4, Size.of(own)) == 4 * model
    assert result.accuracy is not None
    assert result.accuracy > 0.6


class Unnamed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="`features` and `head`"):
        FAFI().own_network(Unnamed(), (4,), 3, Classification())
    with pytest.raises(UserError, match="begin with"):
        FAFI().own_network(SplitNetwork(nn.Identity(), nn.Identity()), (4,), 3, Classification())
    for wrong in ({"temperature": 0.0}, {"shift": 0.6}, {"jitter": -1.0}, {"weighting": "all"}):
        with pytest.raises(UserError):
            FAFI(**wrong)
