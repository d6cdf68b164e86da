"""Rules that tolerate arbitrary models: exact numbers, and an attack on each."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import DivergenceWarning, FederatedData, Hardware, Training, UserError, federate, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Method, on_client
from ekiden.core.engine.setup import builder
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import MOON, Average, FedAvg, FedProx
from ekiden.methods.blocks.combining import Rule, clipped, combine
from ekiden.methods.blocks.rounds import Reply
from ekiden.runs import summary
from tests.methods.toys import weights

FIVE = [weights(0.0, 0), weights(1.0, 0), weights(2.0, 1), weights(3.0, 4), weights(1000.0, -1000)]
ROBUST: list[Rule] = ["median", "trimmed-mean", "krum", "geometric-median"]


def combined(rule: Rule, faulty: int = 1, models: list[Weights] = FIVE) -> list[float]:
    values: list[float] = combine(models, [1.0] * len(models), rule, faulty).params.tolist()
    return values


def test_by_hand() -> None:
    assert combined("median") == [2, 0]
    assert combined("median", models=FIVE[:4]) == [1.5, 0.5]
    assert combined("trimmed-mean") == [
        2,
        pytest.approx(1 / 3),
    ]  # (1 + 2 + 3) / 3 and (0 + 0 + 1) / 3
    # Squared distances to the 5 - 1 - 2 = 2 nearest others: 1 + 5, 1 + 2, 2 + 5, 10 + 20, and two
    # large ones.
    assert combined("krum") == [1, 0]


def test_the_geometric_median_is_where_the_pulls_cancel() -> None:
    # Unit vectors towards three corners of an equilateral triangle cancel in its centre (Fermat's
    # point).
    triangle = [weights(0.0, 0), weights(2.0, 0), weights(1.0, 3**0.5)]
    assert combined("geometric-median", models=triangle) == pytest.approx([1, 1 / 3**0.5], abs=1e-4)
    # On a line it is the median; the point itself where a model has more than half of the weight.
    assert combined(
        "geometric-median", models=[weights(0.0), weights(1.0), weights(50.0)]
    ) == pytest.approx([1], abs=1e-3)
    heavy = combine([weights(0.0, 0), weights(4.0, 3)], [3, 1], "geometric-median")
    assert heavy.params.tolist() == pytest.approx([0, 0], abs=1e-3)


def test_running_statistics_are_combined_too_and_counters_are_the_largest() -> None:
    models = [
        Weights(torch.tensor([v]), torch.tensor([10 * v]), torch.tensor([int(v)]))
        for v in (1.0, 2.0, 9.0)
    ]
    found = combine(models, [1, 1, 1], "median")
    assert (found.params.item(), found.buffers.item(), found.counters.item()) == (2, 20, 9)


def test_a_step_is_shortened_on_its_way() -> None:
    start, far = weights(1.0, 1), weights(4.0, 5)
    assert clipped(far, start, 2.5).params.tolist() == [2.5, 3]
    assert clipped(far, start, 5) is far
    assert clipped(far, start, 0) is far


@pytest.mark.parametrize("rule", ROBUST)
def test_equal_models_are_that_model(rule: Rule) -> None:
    assert combined(rule, models=[weights(0.1, -3)] * 5) == pytest.approx([0.1, -3], rel=1e-6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedAvg(combine="krum"), "counts every client once"),
        (FedAvg(combine="krum", weighting="uniform"), "needs 5 models, there are 4"),
        (
            FedProx(combine="trimmed-mean", weighting="uniform", faulty=2),
            "needs 5 models, there are 4",
        ),
        (MOON(combine="median"), "counts every client once"),
        (Average(combine="median", weighting="samples"), "counts every client once"),
        (Average(combine="krum"), "needs 5 models, there are 4"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    method: Method, says: str, blobs: FederatedData
) -> None:
    with pytest.raises(UserError, match=says):
        run(method, blobs, Tiny)


@pytest.mark.parametrize(
    "changes",
    [
        {"combine": "median", "combine_heads": "class-wise"},
        {"clip_update": 1.0, "init": "different"},
    ],
)
def test_average_refuses_what_does_not_go_together(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"combine_heads='mean'|common initial model"):
        Average(**changes)


@dataclass(frozen=True)
class Poisoned(FedAvg):
    """FedAvg with a client that sends -100 times what it trained."""

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Reply:
        """As FedAvg, except for client-3."""
        reply = Reply(client.fit(model, epochs=self.epochs), 1.0)
        return (
            reply._replace(model=reply.model.with_params(-100 * reply.model.params))
            if client.name == "client-3"
            else reply
        )


@pytest.fixture(scope="module")
def ten() -> FederatedData:
    """Ten silos of 40 points each in three Gaussian classes."""
    draw = torch.Generator().manual_seed(1)
    centres = 2.5 * torch.eye(3, 4)

    def points(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(3, (n,), generator=draw)
        return centres[y] + torch.randn(n, 4, generator=draw), y

    return federate([points(40) for _ in range(10)], test=points(300))


def accuracy(method: Method, data: FederatedData) -> float:
    training = Training(lr=0.03, batch_size=16, select="last")
    return run(method, data, Tiny, training=training, hardware=Hardware(threads=1), seed=1).accuracy


@dataclass(frozen=True)
class Fixed(FedAvg):
    """FedAvg whose clients send the given model with its first parameter 0, 1, 2, 3 or 1000
    larger."""

    @on_client
    def train(self, client: Client, model: Weights, round: int) -> Reply:
        """As given."""
        step = torch.zeros_like(model.params)
        step[0] = (0.0, 1.0, 2.0, 3.0, 1000.0)[int(client.name[-1])]
        return Reply(model.with_params(torch.zeros_like(step) + step), 1.0)


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({}, None),
        ({"combine": "median"}, {"distance from the result": [2, 1, 0, 1, 998]}),
        ({"combine": "trimmed-mean"}, {"distance from the result": [2, 1, 0, 1, 998]}),
        # Squares of the distances to the 2 nearest others: 1 + 4, 1 + 1, 1 + 1, 1 + 4; of equals
        # the first is chosen.
        (
            {"combine": "krum"},
            {"distance from the result": [1, 0, 1, 2, 999], "chosen": [None, 1, None, None, None]},
        ),
    ],
    ids=lambda value: value.get("combine", "") if isinstance(value, dict) else "",
)
def test_each_client_that_a_rule_leaves_aside_is_named(
    fields: dict[str, Any],
    notes: dict[str, list[float | None]] | None,
    ten: FederatedData,
    caplog: Any,
) -> None:
    five = FederatedData(ten.dataset, ten.clients[:5])
    with caplog.at_level("INFO", logger="ekiden"):
        result = run(Fixed(rounds=1, weighting="uniform", **fields), five, Tiny)
    if notes is None:
        assert "notes" not in result.metrics[0]
        return
    expected = {
        n: {f"client-{i}": v for i, v in enumerate(vs) if v is not None} for n, vs in notes.items()
    }
    assert result.metrics[0]["notes"] == {
        n: pytest.approx(vs, abs=1e-4) for n, vs in expected.items()
    }
    assert "step 1: distance from the result 99" in caplog.text
    assert "(client-4)" in caplog.text


@pytest.mark.parametrize("method", [FedAvg, FedProx, MOON, Average], ids=lambda kind: kind.title())
def test_each_client_whose_step_is_clipped_is_named(method: Any, ten: FederatedData) -> None:
    """With the length of its step, that is, the distance of its model from the first one."""
    few = {"rounds": 1} if method is not Average else {}
    training = Training(lr=0.03, batch_size=16, select="last")

    def go(data: FederatedData, **fields: Any) -> Any:
        return run(
            method(epochs=1, **few, **fields),
            data,
            Tiny,
            training=training,
            seed=1,
            hardware=Hardware(threads=1),
        )

    start = Network(builder(Tiny, ten, 1, Average())()).weights().params
    three = FederatedData(ten.dataset, ten.clients[:3])
    lengths = {}
    for client in three.clients:
        alone = go(FederatedData(ten.dataset, (client,)))
        lengths[client.name] = float((alone.weights.params - start).norm())
    limit = sorted(lengths.values())[1]  # of three, one is longer
    noted = go(three, clip_update=limit * 1.0001).metrics[0]["notes"]
    longest = max(lengths, key=lambda name: lengths[name])
    assert noted == {
        "length of clipped steps": {longest: pytest.approx(lengths[longest], rel=1e-5)}
    }
    assert go(three, clip_update=1000).metrics[0]["notes"] == {"length of clipped steps": {}}


@pytest.mark.slow
def test_notes_are_the_same_after_a_resume_and_in_other_processes(
    ten: FederatedData, tmp_path: Path
) -> None:
    method = FedAvg(
        rounds=3, epochs=1, weighting="uniform", combine="geometric-median", clip_update=0.2
    )

    def go(name: str, **more: Any) -> bytes:
        training = Training(lr=0.03, batch_size=16, select="last")
        run(
            method,
            ten,
            Tiny,
            training=training,
            hardware=Hardware(threads=1),
            folder=tmp_path / name,
            **more,
        )
        return (tmp_path / name / "metrics.jsonl").read_bytes()

    whole = go("whole")
    assert whole.count(b'"notes":{"length of clipped steps":{"client-') == 3
    go("run", stop_after=1)
    assert go("run") == whole
    assert go("processes", workers=2) == whole
    found = summary.summarise(tmp_path / "run")
    first, *_ = shown = summary.notes(found).splitlines()
    assert len(shown) == 3
    assert re.fullmatch(
        r"step 1: length of clipped steps [\d.]+ \(client-\d\),.*; distance from the result [\d.]+ "
        r"\(client-\d\).*",
        first,
    )
    row = summary.table([found]).to_pylist()[0]
    noted = json.loads(whole.splitlines()[0])["notes"]["distance from the result"]
    assert {name: row[f"distance from the result {name}"] for name in noted} == noted


@pytest.mark.slow
def test_one_of_ten_ruins_the_mean_and_no_other_rule(ten: FederatedData) -> None:
    settings = FedAvg(rounds=3, epochs=5, weighting="uniform")
    honest = accuracy(settings, ten)
    assert honest > 0.85
    attacked = Poisoned(**vars(settings))
    with pytest.warns(DivergenceWarning):
        assert accuracy(attacked, ten) < 0.6
    for rule in ROBUST:
        assert accuracy(replace(attacked, combine=rule), ten) > honest - 0.05, rule
    assert accuracy(replace(attacked, clip_update=0.5), ten) > honest - 0.15
