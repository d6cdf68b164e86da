"""FedDyn: exact numbers with inexact and exact local minima, and its reduction to FedAvg."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ekiden import FederatedData, UserError, run
from ekiden.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedDyn
from ekiden.methods.blocks.rounds import Proximal
from ekiden.methods.rounds.feddyn import Dynamic
from ekiden.training.weights import Weights
from tests.methods.rounds import Toy, play, quadratic, toy_q, values
from tests.methods.test_fedavg import SETTINGS, same


def row(s: Any, toys: list[Toy]) -> tuple[float, ...]:
    """λ_1, λ_2, h, mean, cloud."""
    assert isinstance(s, Dynamic)
    assert isinstance(s.cloud, Weights)
    assert s.h is not None
    return (*(float(t.state) for t in toys), float(s.h), values(iter([s]))[0], float(s.cloud.params))


def test_three_rounds_of_inexact_minima() -> None:
    toys = toy_q()
    assert [row(s, toys) for s in play(FedDyn(rounds=3, epochs=2, alpha=0.5), toys)] == [
        pytest.approx((-0.0925, 0.175, 0.04125, -0.0825, -0.165), abs=1e-12),
        pytest.approx((-0.19170625, 0.3058125, 0.057053125, -0.19660625, -0.3107125), abs=1e-12),
        pytest.approx((-0.29521433, 0.39967922, 0.05223245, -0.30107114, -0.40553603), abs=1e-8),
    ]


@dataclass
class Exact(Toy):
    """Jumps to the minimum of ½ a (w - b)² - λw + α/2 (w - w^r)²."""

    a: float = 1.0
    b: float = 1.0
    minima: list[float] = field(default_factory=list)

    def fit(self, model: Weights, *, epochs: int, penalty: Any = None, **how: Any) -> Weights:
        assert isinstance(penalty, Proximal)
        slope = 0 if penalty.slope is None else penalty.slope  # no memory before the first round
        top = self.a * self.b - slope + penalty.weight * penalty.centre
        self.minima.append(float(top / (self.a + penalty.weight)))
        return model.with_params(top / (self.a + penalty.weight))


def test_three_rounds_of_exact_minima() -> None:
    toys = [Exact(lambda w: w, a=1.0, b=1.0), Exact(lambda w: w, a=2.0, b=-1.0)]
    clouds = []
    for s in play(FedDyn(rounds=3, alpha=0.5, result="cloud"), toys):
        for toy in toys:  # λ_i is the gradient at the exact minimum w_i
            assert float(toy.state) == pytest.approx(toy.a * (toy.minima[-1] - toy.b), abs=1e-12)
        clouds.append(values(iter([s]))[0])
        if len(clouds) == 1:
            assert [float(t.state) for t in toys] == pytest.approx([-1 / 3, 2 / 5], abs=1e-12)
        if len(clouds) == 2:
            assert [float(t.state) for t in toys] == pytest.approx([-0.6, 2 / 3], abs=1e-12)
    assert clouds == pytest.approx([-2 / 15, -0.2, -0.24], abs=1e-12)
    assert toys[0].minima == pytest.approx([2 / 3, 0.4, 0.2], abs=1e-12)
    assert toys[1].minima == pytest.approx([-4 / 5, -2 / 3, -43 / 75], abs=1e-12)


def test_memory_is_the_mean_of_all_clients_under_partial_participation() -> None:
    toys = [quadratic(1 + 0.5 * i, 2 - i) for i in range(5)]
    for s in play(FedDyn(rounds=20, epochs=3, alpha=0.5, participation=0.4), toys):
        assert isinstance(s, Dynamic)
        own = [0.0 if t.state is None else float(t.state) for t in toys]
        assert s.h is not None
        assert float(s.h) == pytest.approx(sum(own) / 5, abs=1e-12)


def test_reaches_the_optimum() -> None:
    assert values(play(FedDyn(rounds=300, epochs=2, alpha=0.5), toy_q()))[-1] == pytest.approx(-1 / 3, abs=1e-9)


def test_without_alpha_it_is_uniform_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a, b = (
        run(method, blobs, Tiny, **SETTINGS).weights
        for method in (FedDyn(rounds=3, epochs=2, alpha=0), FedAvg(rounds=3, epochs=2, weighting="uniform"))
    )
    assert same(a, b)


def test_mean_and_cloud_are_two_models_of_one_run(blobs: FederatedData) -> None:
    middle, cloud = (
        run(FedDyn(rounds=2, epochs=1, alpha=0.1, result=result), blobs, Tiny, **SETTINGS)
        for result in ("mean", "cloud")
    )
    assert isinstance(middle.state, Dynamic)
    assert isinstance(middle.state.cloud, Weights)
    assert same(middle.state.cloud, cloud.weights)
    assert middle.weights is not None
    assert cloud.weights is not None
    assert not torch.equal(middle.weights.params, cloud.weights.params)


def test_refuses_a_negative_alpha() -> None:
    with pytest.raises(UserError, match="alpha"):
        FedDyn(alpha=-1)
