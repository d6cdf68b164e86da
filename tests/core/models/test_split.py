"""What is trained: parts by name, adapters of low rank, and why one of their factors stays as it
is."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from ekiden import Training, UserError, run
from ekiden.core.models import catalogue
from ekiden.core.models.catalogue import build
from ekiden.core.models.split import (
    Adapters,
    SplitNetwork,
    Widened,
    blocks,
    freeze,
    parse_part,
    widen,
)
from ekiden.core.training import frozen
from ekiden.core.training.network import Network, fresh
from ekiden.core.training.weights import mean
from ekiden.data import FederatedData
from ekiden.lab.conformance.small_runs import Tiny

pytestmark = pytest.mark.skipif(
    not find_spec("peft"), reason="needs the extra hf: pip install 'ekiden[hf]'"
)


def wide() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return SplitNetwork(
            nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU()), nn.Linear(8, 3)
        )


@pytest.mark.parametrize("text", ["", "heads", "last", "last:0", "last:x", "lora:r=0", "lora:rank=3", "lora:alpha=nan",
                                  "lora:r=8,factors=a"])  # fmt: skip
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="train "):
        parse_part(text)


def test_words() -> None:
    assert parse_part("all") == "all"
    assert parse_part("last:2") == 2
    assert parse_part("lora") == Adapters(8, 16.0, (), False)
    assert parse_part("lora:r=4,targets=query+value,factors=both") == Adapters(
        4, 8.0, ("query", "value"), True
    )


@pytest.mark.parametrize(
    ("name", "shape", "count"), [("lenet", (3, 32, 32), 4), ("resnet18", (3, 32, 32), 9)]
)
def test_blocks_are_children_with_parameters_and_norms_belong_to_what_they_follow(
    name: str, shape: tuple[int, ...], count: int
) -> None:
    network: Any = build(name, shape, 10)
    assert len(blocks(network.features)) == count


@pytest.mark.parametrize(
    ("part", "error"), [("last:3", "2 blocks"), ("lora:targets=query", "'query'")]
)
def test_parts_that_a_network_does_not_have_are_refused(part: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        freeze(wide(), parse_part(part))


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(UserError, match="`head`"):
        freeze(nn.Sequential(nn.Linear(4, 3)), "head")


@pytest.mark.slow
def test_adapters_begin_without_a_difference_and_only_the_second_factors_travel() -> None:
    plain, module = wide(), frozen.fix(freeze(wide(), parse_part("lora:r=2")))
    x = torch.randn(5, 4)
    assert torch.equal(module(x), plain(x))
    assert len(Network(module).params) == 2 * 12 + 2 * 8 + 8 * 3 + 3
    again: Any = fresh(module, 9)
    assert torch.equal(again.features(x), plain.features(x))


def outer(network: Network, params: torch.Tensor) -> torch.Tensor:
    """The features with these values, at given inputs: they are linear in the adapters before the
    first ReLU."""
    network.params.copy_(params)
    with torch.no_grad():
        return network.module.features[0](torch.eye(4))  # type: ignore[no-any-return,operator,index]


def trained(part: str) -> tuple[Network, list[torch.Tensor]]:
    """A network, and the values of two clients that moved away from it in different ways."""
    torch.manual_seed(0)
    network = Network(frozen.fix(freeze(wide(), parse_part(part))))
    return network, [network.params + 0.5 * torch.randn(len(network.params)) for _ in range(2)]


def test_the_mean_of_second_factors_is_the_mean_of_products_and_that_of_both_factors_is_not() -> (
    None
):
    """In numbers: the naive average is wrong by a third of the adapters' effect, ours only by
    rounding."""
    off = {}
    for part in ("lora:r=2", "lora:r=2,factors=both"):
        network, clients = trained(part)
        start = network.weights()
        zero = outer(network, start.params)
        products = [outer(network, p) - zero for p in clients]
        averaged = outer(network, mean([start.with_params(p) for p in clients]).params) - zero
        exact = torch.stack(products).mean(0)
        off[part] = float((averaged - exact).norm() / exact.norm())
    assert off["lora:r=2"] < 1e-5
    assert off["lora:r=2,factors=both"] > 0.3


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        pytest.param("fedseq", True, marks=pytest.mark.slow),
        pytest.param("regmean", True, marks=pytest.mark.slow),
        ("fedavg", False),
        ("fedelmy", False),
    ],
)
def test_both_factors_are_trained_only_where_nothing_is_averaged(
    method: str, allowed: bool, few: FederatedData
) -> None:
    def go() -> None:
        run(
            method,
            few,
            wide(),
            train="lora:r=2,factors=both",
            training=Training(batch_size=16),
            stop_after=1,
        )

    if allowed:
        go()
    else:
        with pytest.raises(UserError, match="mean of products"):
            go()


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
        (lambda: catalogue.build("cnn_ma_echo", (3, 16, 16), 3), (3, 16, 16)),
        (lambda: catalogue.build("cnn_ua_pdfl", (3, 8, 8), 3), (3, 8, 8)),
        (lambda: catalogue.build("resnet18", (1, 8, 8), 3), (1, 8, 8)),
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
    grown = widen(catalogue.build("lenet", (3, 32, 32), 10), 1)
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
