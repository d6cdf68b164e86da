"""FedDyn: exact numbers with inexact and exact local minima, and its reduction to FedAvg."""

import pytest
import torch

from ekiden import FederatedData, run
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedDyn
from ekiden.methods.rounds.feddyn import Dynamic
from tests.methods.rounds import play, quadratic
from tests.methods.test_fedavg import SETTINGS, same


def test_memory_is_the_mean_of_all_clients_under_partial_participation() -> None:
    toys = [quadratic(1 + 0.5 * i, 2 - i) for i in range(5)]
    for s in play(FedDyn(rounds=20, epochs=3, alpha=0.5, participation=0.4), toys):
        assert isinstance(s, Dynamic)
        own = [0.0 if t.state is None else float(t.state) for t in toys]
        assert s.h is not None
        assert float(s.h) == pytest.approx(sum(own) / 5, abs=1e-12)


def test_without_alpha_it_is_uniform_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a, b = (
        run(method, blobs, Tiny, **SETTINGS).weights
        for method in (
            FedDyn(rounds=3, epochs=2, alpha=0),
            FedAvg(rounds=3, epochs=2, weighting="uniform"),
        )
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
