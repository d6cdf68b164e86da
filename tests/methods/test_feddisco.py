"""FedDisco: exact weights, and the cases in which it is FedAvg."""

import itertools
from math import log

import pytest
import torch

from ekiden import FederatedData, run
from ekiden.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedDisco
from ekiden.methods.rounds.feddisco import Measure, disco_weights, discrepancy, normalised_distances
from tests.methods.test_fedavg import SETTINGS, same

COUNTS = [torch.tensor(c) for c in ((50, 50), (90, 10), (10, 40))]
N = [100, 100, 50]


def weights(measure: Measure, a: float = 0.5, b: float = 0.1) -> list[float]:
    return disco_weights(N, normalised_distances([discrepancy(c, measure) for c in COUNTS], measure), a, b)


def test_kl() -> None:
    kl = [discrepancy(c, "kl") for c in COUNTS]
    assert kl == pytest.approx([0, 0.36806421, 0.19274476], abs=1e-8)
    assert normalised_distances(kl, "kl") == pytest.approx([0, 0.65630942, 0.34369058], abs=1e-8)
    assert weights("kl") == pytest.approx([0.625, 0.21480661, 0.16019339], abs=1e-8)
    assert disco_weights(N, kl, 0.5, 0.1) == pytest.approx([0.49039054, 0.30989534, 0.19971412], abs=1e-8)


def test_l2() -> None:
    assert [discrepancy(c, "l2") for c in COUNTS] == pytest.approx([0, 0.56568542, 0.42426407], abs=1e-8)
    assert weights("l2") == pytest.approx([0.62109853, 0.26975214, 0.10914933], abs=1e-8)


def test_l1_and_cosine() -> None:
    assert [discrepancy(c, "l1") for c in COUNTS] == pytest.approx([0, 0.8, 0.6], abs=1e-12)
    assert discrepancy(COUNTS[1], "cosine") == pytest.approx(1 - 0.5 / (0.82 * 0.5) ** 0.5, abs=1e-12)


@pytest.mark.parametrize("measure", ["kl", "l1", "l2", "cosine"])
def test_sums_to_one_and_follows_the_clients(measure: Measure) -> None:
    p = weights(measure)
    assert sum(p) == pytest.approx(1)
    for order in itertools.permutations(range(3)):
        distances = normalised_distances([discrepancy(COUNTS[i], measure) for i in order], measure)
        assert disco_weights([N[i] for i in order], distances, 0.5, 0.1) == pytest.approx([p[i] for i in order])


def test_equal_distributions() -> None:
    d = normalised_distances([0.3, 0.3, 0.3], "kl")
    raw = [0.4 - 0.5 / 3 + 0.1, 0.4 - 0.5 / 3 + 0.1, 0.2 - 0.5 / 3 + 0.1]
    assert disco_weights(N, d, 0.5, 0.1) == pytest.approx([u / sum(raw) for u in raw])


def test_balanced_clients() -> None:
    assert normalised_distances([0.0, 0.0, 0.0], "kl") == [0, 0, 0]
    assert disco_weights(N, [0, 0, 0], 0.5, 0.1) == pytest.approx([0.5 / 1.3, 0.5 / 1.3, 0.3 / 1.3])


def test_one_class_only() -> None:
    one = torch.tensor([7] + [0] * 9)
    assert discrepancy(one, "kl") == pytest.approx(log(10), abs=1e-8) == pytest.approx(2.30258509, abs=1e-8)
    assert disco_weights([5, 5], [0.5, 0.5], 2, 0) == [0.5, 0.5], "all raw weights -½: numbers of samples"


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


def test_weights_change_the_average(blobs: FederatedData) -> None:
    a, b = (
        run(m, blobs, Tiny, **SETTINGS).weights
        for m in (FedDisco(rounds=1, epochs=2), FedDisco(rounds=1, epochs=2, a=0, b=0))
    )
    assert not same(a, b)
