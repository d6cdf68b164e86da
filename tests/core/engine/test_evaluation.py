"""Measuring: personal models on all test data or on their own, after averaging and after
training; and what a run says about a result so bad that training must have diverged."""

import warnings
from dataclasses import replace
from math import inf, isnan, log, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ekiden import DivergenceWarning, FederatedData, Hardware, Training, UserError, federate, run
from ekiden.core.engine.evaluation import EvaluateOn, consensus, diverged, divergence, of_imbalanced
from ekiden.core.engine.evaluation import TestSet as Measure
from ekiden.core.engine.method import Method
from ekiden.core.tasks import Classification, Scores
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import CriticalFL, DFedAvgM, DisPFL, FedAvg, FedGram, FedPer, FedSeq, Local
from ekiden.runs.plan import Plan, from_json
from ekiden.runs.recipe import Recipe
from tests.methods.toys import weights

SETTINGS: dict[str, Any] = {
    "training": Training(optimizer="sgd", lr=0.05, batch_size=16, select="last"),
    "hardware": Hardware(threads=1),
    "seed": 5,
}
AVERAGING: list[Method] = [
    FedPer(rounds=1, epochs=2),
    DFedAvgM(rounds=1, epochs=2, heavy_ball=False),
    CriticalFL(rounds=1, epochs=2, peers=2),
    FedAvg(rounds=1, epochs=2),
]


def last(
    method: Method, data: FederatedData, evaluate_on: EvaluateOn = "own", **changes: Any
) -> dict[str, Any]:
    return dict(run(method, data, Tiny, evaluate_on=evaluate_on, **SETTINGS | changes).metrics[-1])


@pytest.mark.parametrize("method", AVERAGING, ids=lambda m: m.title())
def test_after_training_a_first_round_is_that_of_local(
    method: Method, blobs: FederatedData
) -> None:
    alone, row = last(Local(rounds=1, epochs=2), blobs), last(method, blobs)
    assert alone["client_mean_trained"] == alone["client_mean"]
    assert row["client_mean_trained"] == alone["client_mean"]
    assert row["client_mean"] != row["client_mean_trained"], "averaging changes the models"


def test_where_a_round_ends_with_training_both_are_the_same(blobs: FederatedData) -> None:
    row = last(DisPFL(rounds=2, epochs=1, topology="complete"), blobs)
    # since Python 3.12 `sum` loses nothing, while torch's mean does
    assert row["client_mean_trained"] == pytest.approx(row["client_mean"], rel=1e-15)


def test_own_data_alone_give_the_same_clients_and_change_nothing_else(blobs: FederatedData) -> None:
    method = FedPer(rounds=2, epochs=1, topology="ring")
    every, own = (run(method, blobs, Tiny, evaluate_on=m, **SETTINGS) for m in ("all", "own"))
    a, b = every.metrics[-1], own.metrics[-1]
    same = (
        "clients",
        "client_mean",
        "client_std",
        "client_worst",
        "client_decile",
        "consensus",
        "bytes",
        "forward",
    )
    assert {k: a[k] for k in same} == {k: b[k] for k in same}
    assert every.ledger == own.ledger
    for one, other in zip(every.personal, own.personal, strict=True):
        assert torch.equal(one.params, other.params)
    assert set(b) - set(a) == {"client_mean_trained"}


def test_accuracy_of_own_data_counts_each_sample_once(blobs: FederatedData) -> None:
    row, sizes = last(Local(rounds=1, epochs=2), blobs), [len(c.test) for c in blobs.clients]
    right = sum(share * n for share, n in zip(row["clients"], sizes, strict=True))
    assert row["accuracy"] == pytest.approx(right / sum(sizes))


def test_only_those_who_trained_in_the_step_are_measured(blobs: FederatedData) -> None:
    """The last hop of FedSeq trains the model that it ends with, at one client."""
    row = last(FedSeq(epochs=2), blobs)
    assert row["client_mean_trained"] in row["clients"]


def test_a_client_without_test_data_is_left_out(blobs: FederatedData) -> None:
    first, *others = blobs.clients
    nothing = replace(first, test=replace(first.test, rows=first.test.rows[:0]))
    row = last(Local(rounds=1, epochs=2), replace(blobs, clients=(nothing, *others)))
    known = [share for share in row["clients"] if share is not None]
    assert len(known) == 3
    assert row["client_mean_trained"] == row["client_mean"] == pytest.approx(sum(known) / 3)


def test_the_same_after_a_resume_and_in_processes(blobs: FederatedData, tmp_path: Path) -> None:
    method = FedPer(rounds=3, epochs=1, topology="ring")
    whole = run(method, blobs, Tiny, evaluate_on="own", **SETTINGS).metrics
    run(method, blobs, Tiny, evaluate_on="own", folder=tmp_path / "run", stop_after=2, **SETTINGS)
    assert (
        run(method, blobs, Tiny, evaluate_on="own", folder=tmp_path / "run", **SETTINGS).metrics
        == whole
    )
    assert run(method, blobs, Tiny, evaluate_on="own", processes=True, **SETTINGS).metrics == whole
    with pytest.raises(UserError, match="evaluate_on"):
        run(method, blobs, Tiny, folder=tmp_path / "run", **SETTINGS)


def test_a_plan_keeps_it() -> None:
    own = Plan(Recipe(Local(), evaluate_on="own"))
    assert from_json(own.to_json()) == own


def test_refuses_an_unknown_one(blobs: FederatedData) -> None:
    with pytest.raises(
        UserError, match="evaluate_on 'none' is unknown: it must be one of all, own"
    ):
        last(Local(), blobs, evaluate_on="none")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="evaluate_on 'none' is unknown"):
        Plan(Recipe(Local(), evaluate_on="none"))  # type: ignore[arg-type]


def test_clients_measured_at_once_have_the_values_of_each_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    y, logits = torch.randint(3, (40,), generator=draw), torch.randn(40, 3, generator=draw)
    task = Classification()
    loss = task.loss(logits, y)
    loss[35] = float("nan")
    scores = Scores(task, 3, y, task.answers(logits, full=False), loss)
    rows = [
        torch.arange(10),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([3, 3, 12]),
        torch.arange(30, 40),
    ]
    of_clients = cast(Any, Measure)._by_client
    own, losses = of_clients(SimpleNamespace(task=task), [(scores, one) for one in rows])
    for k in (0, 2, 3):
        assert own[k] == scores.score(rows[k])
    assert losses[0] == pytest.approx(scores.mean_loss(rows[0]))
    assert losses[2] == pytest.approx(scores.mean_loss(rows[2]))
    assert isnan(own[1])
    assert isnan(losses[1])
    assert losses[3] == inf


def test_far_above_guessing_is_ten_times_its_loss() -> None:
    guess = log(40)
    assert not diverged([9.9 * guess, 9.9 * guess], log(40), personal=False)
    assert diverged([10.1 * guess, 10.1 * guess], log(40), personal=False)
    assert not diverged(
        [1e9, 9.9 * guess], log(40), personal=False
    )  # it has forgotten one client, or never learned it
    assert not diverged([nan, 9.9 * guess], log(40), personal=False)
    assert diverged([nan, 10.1 * guess], log(40), personal=False)
    assert not diverged([nan], log(40), personal=False)
    assert diverged(
        [1e9, 0.1], log(40), personal=True
    )  # each model is measured where it was trained
    assert not diverged([15 * guess, 0.1, 0.1], log(40), personal=True)
    assert not diverged([-log(1e-12)], log(2), personal=False)  # an ensemble whose votes all miss
    assert diverged([30.1], log(2), personal=False)
    assert not diverged([2.0], log(1), personal=False)  # where there is nothing to guess


def test_the_line_says_what_to_do() -> None:
    line = divergence({"loss": 1.23e29, "diverged": True}, log(10), 1e6)
    assert line == (
        "training diverged: the loss is 1.23e+29, that of guessing 2.30 (ln 10); "
        "lower lr (now 1e+06), or scale the inputs"
    )
    assert divergence({"loss": 50.0}, log(10), 1e6) == ""
    noisy = Recipe(FedGram(dictionary="seed", width=20), dp="epsilon=2,delta=1e-4,clip=1")
    assert divergence({"loss": 80.0, "diverged": True}, log(10), noisy.step_size) == (
        "noise hides the sums: the loss is 80, that of guessing 2.30 (ln 10); "
        "train on more samples, or give a larger epsilon or a smaller --width"
    )
    assert replace(noisy, dp="").step_size == noisy.training.lr


@pytest.mark.parametrize("method", [FedSeq(epochs=3), Local(epochs=3)], ids=lambda m: m.title())
def test_a_run_that_diverged_warns(method: FedSeq | Local, blobs: FederatedData) -> None:
    with pytest.warns(
        DivergenceWarning, match=r"training diverged: .* guessing 1.10 \(ln 3\); lower lr \(now 1e"
    ):
        result = run(method, blobs, plain(), training=Training(lr=1e6))
    assert result.diverged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = run(method, blobs, plain(), training=Training(lr=1e-2))
    assert not good.diverged
    assert "diverged" not in good.metrics[-1]


class Silent(nn.Module):
    """Trains, and gives no finite output when it is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out if self.training else out * nan


def test_answers_that_are_not_finite_are_divergence(blobs: FederatedData) -> None:
    with pytest.warns(
        DivergenceWarning, match="training diverged: the loss is nan, that of guessing"
    ):
        assert run(FedSeq(epochs=1), blobs, Silent(), training=Training(lr=1e-3)).diverged


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_forgetting_and_overfitting_are_no_divergence() -> None:
    """Two silos without a common class: the model is surely wrong at the first, and right at the
    second."""
    draw = torch.Generator().manual_seed(0)
    silos = [(100 * torch.randn(60, 4, generator=draw), torch.full((60,), k)) for k in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    forgot = run(
        FedSeq(epochs=150), federate(silos), model, training=Training(lr=0.1, select="last")
    )
    assert forgot.metrics[-1]["loss"] > 30, (
        "the union of the test data alone would look like divergence"
    )
    assert not forgot.diverged
    noise = [
        (torch.randn(40, 4, generator=draw), torch.randint(3, (40,), generator=draw))
        for _ in range(2)
    ]
    overfit = run(
        FedSeq(epochs=100), federate(noise), Tiny(), training=Training(lr=0.01, select="last")
    )
    assert overfit.metrics[-1]["loss"] > log(3)
    assert not overfit.diverged


def test_consensus_is_the_mean_squared_distance_from_the_mean() -> None:
    assert consensus([weights(0.0, 0.0), weights(2.0, 4.0)]) == pytest.approx(5)
    assert consensus([weights(1.0, 7.0)] * 3) == 0


def test_accuracy_of_rare_events_is_not_success() -> None:
    row = {
        "majority": 0.965,
        "metrics": {"accuracy": 0.965, "auroc": 0.5, "average_precision": 0.035},
        "confusion": [[965, 0], [35, 0]],
    }
    line = of_imbalanced(row, Classification(), ("no", "yes"))
    wanted = "auroc 50.00 %, average_precision 3.50 %, sensitivity 0.00 %, never answers 'yes'"
    assert line == wanted
    assert not of_imbalanced(row | {"majority": 0.7}, Classification(), ("no", "yes"))
