"""Promises that cannot be kept are refused, and what is told is told in full."""

from typing import Any

import pytest
import torch

from ekiden import DP, Training, UserError
from ekiden.core.data.samples import FederatedData
from ekiden.core.training.private.promise import check_honest, planned, spent_epsilon
from ekiden.methods import METHODS, FedAvg, FedGram, FedSeq
from ekiden.methods.exact.closing import with_lap
from ekiden.runs.recipe import Recipe
from tests.core.training.private.small import SEEDED, run


def test_the_folder_says_what_each_client_told(few: FederatedData) -> None:
    told = run(few).config["privacy"]
    assert told["epsilon"] == max(one["epsilon"] for one in told["clients"].values())
    assert 7.9 < told["epsilon"] <= told["promised"] == 8
    assert set(told["clients"]) == {client.name for client in few.clients}
    steps = {one["steps"] for one in told["clients"].values()}
    rounds = run(few, method=FedAvg(rounds=4, epochs=3)).config["privacy"]["clients"]
    assert {one["steps"] for one in rounds.values()} == {4 * step for step in steps}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_methods_that_no_guarantee_fits_are_refused(kind: Any) -> None:
    if kind().fits() is not None:
        assert Recipe(kind(), dp="epsilon=8").training.select != "best"
        return
    reason = "would show more" if kind.traits.releases else "is not supported with dp"
    with pytest.raises(UserError, match=reason):
        Recipe(kind(), dp="epsilon=8")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("epsilon=8,more=1", "unknown setting .more."),
        ("epsilon=much", "is not a list of settings"),
        ("delta=1e-5", "there is no epsilon"),
        ("epsilon=-1", "must be greater than 0"),
        ("epsilon=nan", "epsilon nan"),
        ("epsilon=8,clip=0", "clip 0 is out of range"),
        ("epsilon=8,delta=0.05", "lets whole samples of .* go out"),
    ],
)
def test_promises_that_cannot_be_are_refused(text: str, reason: str, few: FederatedData) -> None:
    with pytest.raises(UserError, match=reason):
        run(few, text)


def test_sam_is_refused() -> None:
    with pytest.raises(UserError, match="sam takes two"):
        Recipe(FedSeq(), training=Training(optimizer="sam"), dp="epsilon=8")


def test_a_subject_at_two_silos_is_refused() -> None:
    from ekiden.core.data.samples import ClientData, Subset
    from ekiden.core.engine.setup import check_subjects
    from ekiden.data import Samples

    samples = Samples(
        torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), subject=torch.tensor([0, 1, 1, 2])
    )
    none = Subset(samples, torch.arange(0))

    def client(name: str, rows: list[int]) -> ClientData:
        return ClientData(name, Subset(samples, torch.tensor(rows)), none, none)

    check_subjects([client("a", [0]), client("b", [1, 2, 3])])
    with pytest.raises(UserError, match="at a and b"):
        check_subjects([client("a", [0, 1]), client("b", [2, 3])])


def test_a_delta_that_admits_whole_samples_is_refused() -> None:
    with pytest.raises(UserError, match="give a delta far below"):
        planned(DP(8.0, 1e-3), (1,), Training(), 1000)


def test_an_epsilon_is_never_told_smaller_than_it_is() -> None:
    """What was spent is rounded up; what is asked for is kept exactly, also in a run's settings."""
    told = {7.994: "8", 7.9951: "8", 8.0: "8", 1.1: "1.1", 0.70001: "0.701", 123.4: "124"}
    assert {epsilon: spent_epsilon(epsilon) for epsilon in told} == told
    for epsilon in (2.9999996, 3.00000049, 0.1, 8.0, 1e-5):
        assert DP.parse(str(DP(epsilon))) == DP(epsilon)
    assert str(DP(8.0)) == "epsilon=8,delta=1e-05,clip=1"


def test_noise_is_not_shared_by_more_silos_than_there_are() -> None:
    check_honest(DP(1.0, honest=3), "abc")
    with pytest.raises(UserError, match="honest=4 needs so many silos, and there are 3"):
        check_honest(DP(1.0, honest=4), "abc")


@pytest.mark.parametrize(
    ("method", "dp", "reason"),
    [
        (FedGram(width=8), "epsilon=1", "dictionary auto would show more: give dictionary seed"),
        (FedGram(**SEEDED, head="lda"), "epsilon=1", "head lda would show more"),
        (FedGram(**SEEDED, personal=True), "epsilon=1", "personal would show more"),
        (FedGram(dictionary="seed", bits=16, samples=99), "epsilon=1", "bits 16 would show more"),
        (FedGram(dictionary="seed"), "epsilon=1", "dp needs samples"),
        (FedAvg(), "epsilon=1,honest=2", "shares the noise of sums, fedavg has none"),
        (FedGram(**SEEDED), "epsilon=1,honest=0", "honest"),
        (FedGram(**SEEDED), "epsilon=1,honest=1.5", "it must be a whole number"),
        (with_lap(FedSeq()), "epsilon=1", "is not supported with dp"),
    ],
)
def test_what_would_show_more_than_one_noisy_sum_is_refused(
    method: Any, dp: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        Recipe(method, dp=dp)
