"""Measuring: personal models on all test data or on their own, after averaging and after
training."""

from dataclasses import replace
from math import inf, isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.evaluation import EvaluateOn
from ekiden.core.engine.evaluation import TestSet as Measure
from ekiden.core.engine.method import Method
from ekiden.core.tasks import Classification, Scores
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import CriticalFL, DFedAvgM, DisPFL, FedAvg, FedPer, FedSeq, Local
from ekiden.runs.plan import Plan, from_json
from ekiden.runs.recipe import Recipe

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
    assert row["client_mean_trained"] == row["client_mean"]


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
