"""Networks with more outputs than classes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ekiden import UserError
from ekiden.core import models
from ekiden.core.models.split import Widened, widen
from ekiden.lab.conformance.small_runs import Tiny


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Tiny, (4,)),
        (lambda: nn.Linear(4, 3), (4,)),
        (
            lambda: nn.Sequential(
                nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False), nn.Identity()
            ),
            (4,),
        ),
        (lambda: models.build("cnn_ma_echo", (3, 16, 16), 3), (3, 16, 16)),
        (lambda: models.build("cnn_ua_pdfl", (3, 8, 8), 3), (3, 8, 8)),
        (lambda: models.build("resnet18", (1, 8, 8), 3), (1, 8, 8)),
    ],
)
def test_old_outputs_stay(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = make().eval()
    x = torch.randn(6, *shape)
    expected = module(x)
    found = widen(module, 2).eval()(x)
    assert found.shape == (6, 5)
    torch.testing.assert_close(found[:, :3], expected)
    assert float(found[:, 3:].detach().std()) > 0


def test_lenet_grows_by_one_row() -> None:
    grown = widen(models.build("lenet", (3, 32, 32), 10), 1)
    assert sum(p.numel() for p in grown.parameters()) == 62_091


def test_the_same_values_at_every_call_and_no_trace_in_the_random_state() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    state = torch.get_rng_state()
    one, other, third = (
        Widened(lambda: module, 1, 5)(),
        Widened(lambda: module, 1, 5)(),
        Widened(lambda: module, 1, 6)(),
    )
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.weight, third.weight)  # type: ignore[arg-type]


def test_a_network_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(UserError, match=r"nn\.Linear"):
        widen(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), 1)
