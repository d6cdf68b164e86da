"""DFedSAM: exact numbers of sharpness-aware steps, and several gossip steps."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.data.samples import Subset
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import State
from ekiden.core.training import fit as fitting
from ekiden.core.training.feed import Feed
from ekiden.core.training.fit import Bench, Forward
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DFedAvgM, DFedSAM
from tests.methods.toys import Silo, rounds, two_quadratics, weights


def zeros(n: int) -> State:
    return State(model=None, personal=(weights(0.0),) * n)


def test_radius_zero_is_plain_descent() -> None:
    (one,) = rounds(DFedSAM(epochs=2, radius=0.0), two_quadratics(), zeros(2))
    assert [w for (w,) in one] == pytest.approx([-0.085] * 2)


def bowl() -> Silo:
    """½(3u² + 2v²), u and v in different tensors."""
    return Silo(2, lambda w: 0.5 * (3 * w[0] ** 2 + 2 * w[1] ** 2), heads=1)


def test_one_norm_over_all_parameters() -> None:
    one = DFedSAM(epochs=1, radius=0.1).train(cast(Client, bowl()), weights(1.0, 2.0), 0)
    assert one.params.tolist() == pytest.approx([0.682, 1.584])
    plain = DFedSAM(epochs=1, radius=0.0).train(cast(Client, bowl()), weights(1.0, 2.0), 0)
    assert plain.params.tolist() == pytest.approx([0.7, 1.6])


def test_no_perturbation_where_there_is_no_gradient() -> None:
    assert DFedSAM(epochs=1, radius=0.1).train(
        cast(Client, bowl()), weights(0.0, 0.0), 0
    ).params.tolist() == [0, 0]


class Masked(nn.Module):
    """Remembers the dropout of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(self.weight, 0.5, training=self.training)
        self.seen.append(kept.detach() > 0)
        return kept


def test_both_passes_drop_the_same_units(blobs: FederatedData) -> None:
    module, training = Masked(), Training(optimizer="sam", select="last", batch_size=20)
    bench = Bench(Network(module), Feed(blobs.dataset, Hardware()), training, Hardware())
    train = Subset(blobs.dataset.train, torch.arange(40))

    def objective(forward: Forward, x: Tensor, y: Tensor) -> Tensor:
        return forward(x).pow(2).sum()

    fitting.fit(bench, bench.network.weights(), train, train, epochs=1, seed=1, objective=objective)
    first, again, second, _ = module.seen
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.05, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    }


def test_radius_zero_is_dfedavgm_without_momentum(blobs: FederatedData) -> None:
    # One network without dropout: two passes and one draw differently.
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    ours = run(DFedSAM(rounds=2, epochs=2, radius=0.0, topology="ring"), blobs, build, **settings())
    plain = run(
        DFedAvgM(rounds=2, epochs=2, theta=0.0, topology="ring"), blobs, build, **settings()
    )
    for a, b in zip(ours.personal, plain.personal, strict=True):
        torch.testing.assert_close(a.params, b.params)
    assert ours.metrics[-1]["backward"] == 2 * plain.metrics[-1]["backward"]


def test_more_gossip_steps_agree_more_and_cost_more(blobs: FederatedData) -> None:
    one, three = (
        run(DFedSAM(epochs=2, topology="ring", gossip_steps=q), blobs, Tiny, **settings())
        for q in (1, 3)
    )
    ratio = three.metrics[-1]["consensus"] / one.metrics[-1]["consensus"]
    assert ratio == pytest.approx(
        (1 / 9) ** 2, rel=1e-3
    )  # every mode of the ring of 4 has |λ| = 1/3
    assert three.bytes == 3 * one.bytes
