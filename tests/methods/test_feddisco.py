"""FedDisco: exact weights, and the cases in which it is FedAvg."""

from math import log

import pytest
import torch

from ekiden import FederatedData, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedDisco
from ekiden.methods.rounds.feddisco import Measure, disco_weights, discrepancy, normalised_distances
from tests.methods.test_fedavg import SETTINGS

COUNTS = [torch.tensor(c) for c in ((50, 50), (90, 10), (10, 40))]
N = [100, 100, 50]


def weights(measure: Measure, a: float = 0.5, b: float = 0.1) -> list[float]:
    return disco_weights(
        N, normalised_distances([discrepancy(c, measure) for c in COUNTS], measure), a, b
    )


def test_l2() -> None:
    assert [discrepancy(c, "l2") for c in COUNTS] == pytest.approx(
        [0, 0.56568542, 0.42426407], abs=1e-8
    )
    assert weights("l2") == pytest.approx([0.62109853, 0.26975214, 0.10914933], abs=1e-8)


def test_l1_and_cosine() -> None:
    assert [discrepancy(c, "l1") for c in COUNTS] == pytest.approx([0, 0.8, 0.6], abs=1e-12)
    assert discrepancy(COUNTS[1], "cosine") == pytest.approx(
        1 - 0.5 / (0.82 * 0.5) ** 0.5, abs=1e-12
    )


def test_one_class_only() -> None:
    one = torch.tensor([7] + [0] * 9)
    assert (
        discrepancy(one, "kl")
        == pytest.approx(log(10), abs=1e-8)
        == pytest.approx(2.30258509, abs=1e-8)
    )
    assert disco_weights([5, 5], [0.5, 0.5], 2, 0) == [0.5, 0.5], (
        "all raw weights -½: numbers of samples"
    )


def test_numbers_of_samples_and_clipping() -> None:
    assert weights("kl", 0, 0) == pytest.approx([0.4, 0.4, 0.2])
    assert weights("kl", 2, 0) == [1, 0, 0]


def test_without_a_and_b_it_is_fedavg(blobs: FederatedData) -> None:
    a, b = (
        run(m, blobs, Tiny, **SETTINGS).weights
        for m in (FedDisco(rounds=1, epochs=2, a=0, b=0), FedAvg(rounds=1, epochs=2))
    )
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-5, atol=1e-6)
