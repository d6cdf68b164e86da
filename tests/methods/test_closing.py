"""The closing lap: ridge regression in numpy, bytes by hand, as robust as the methods, and what it
refuses."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, load_model, run
from ekiden.cli.app import main
from ekiden.core.base import outside
from ekiden.core.engine.drive import outline
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.engine.worker import Setup
from ekiden.core.tasks import Classification
from ekiden.core.training.gram import WIDE
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny, files, same, watched
from ekiden.lab.tables.sweep import flat
from ekiden.methods import (
    METHODS,
    Average,
    Centralized,
    Ensemble,
    FedAvg,
    FedDyn,
    FedELMYParallel,
    FedGram,
    FedOV,
    FedPer,
    FedSeq,
    FedTasuki,
    Local,
    MAEcho,
    MetaFed,
    method_named,
    name_of,
)
from ekiden.methods.exact.closing import Scales, Totals, refitted, settled, whole, with_lap
from ekiden.runs.plan import Plan, from_json, plan_of
from ekiden.runs.recipe import Recipe, recipe_of
from ekiden.runs.result import Result
from ekiden.runs.summary import label

SHAPES = [
    pytest.param(FedSeq(epochs=2), id="chain"),
    pytest.param(FedTasuki(epochs=2), id="chain with counts"),
    pytest.param(Average(epochs=2), id="star"),
    pytest.param(FedAvg(rounds=2, epochs=1), id="rounds"),
    pytest.param(FedDyn(rounds=2, epochs=1), id="rounds with private states"),
]


def go(method: Method, data: FederatedData, model: Any = Tiny, **options: Any) -> Result:
    training = Training(lr=0.01, batch_size=16)
    return run(
        method, data, model, training=training, hardware=Hardware(threads=1), seed=3, **options
    )


def features_of(result: Result, x: Tensor) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return result.model.features(x).double().numpy()  # type: ignore[operator,no-any-return]


def training_data(data: FederatedData, first: int = 0) -> tuple[Tensor, Tensor]:
    rows = torch.cat([c.train.rows for c in data.clients[first:]])
    return data.dataset.train.x[rows], data.dataset.train.y[rows]


def ridge(h: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows (K, D + 1) of ridge regression on standardised features, λ/n by GCV with the hat matrix
    written out."""
    n, mean, std = len(h), h.mean(0), h.std(0)
    z = np.divide(h - mean, std, out=np.zeros_like(h), where=std > 0)
    labels = np.eye(3)[y]
    centred, scores = labels - labels.mean(0), []
    for power in range(-24, 5):
        share = 10 ** (power / 4)
        hat = z @ np.linalg.inv(z.T @ z + share * n * np.eye(z.shape[1])) @ z.T + 1 / n
        scores.append((n * ((labels - hat @ labels) ** 2).sum() / (n - np.trace(hat)) ** 2, share))
    share = min(scores)[1]
    weight = np.linalg.solve(z.T @ z + share * n * np.eye(z.shape[1]), z.T @ centred).T
    weight = np.divide(weight, std, out=np.zeros_like(weight), where=std > 0)
    return np.concatenate([weight, (labels.mean(0) - weight @ mean)[:, None]], 1)


@pytest.mark.parametrize("method", SHAPES)
def test_the_head_is_ridge_regression_and_the_rest_as_before(
    method: Method, blobs: FederatedData
) -> None:
    before, after = go(method, blobs), go(with_lap(method), blobs)
    assert before.weights is not None
    assert after.weights is not None
    body = slice(
        0, len(before.weights.params) - 27
    )  # the head has 3·8 + 3 parameters, the last ones
    assert torch.equal(after.weights.params[body], before.weights.params[body])
    assert torch.equal(after.weights.buffers, before.weights.buffers)
    assert torch.equal(after.weights.counters, before.weights.counters)
    x, y = training_data(blobs)
    wanted = ridge(features_of(before, x), y.numpy())
    head = after.model.head
    found = torch.cat([head.weight, head.bias[:, None]], 1).detach().double().numpy()  # type: ignore[union-attr,index,list-item]
    # Both are scores up to the temperature, which divides all of them.
    factor = (found * wanted).sum() / (wanted**2).sum()
    assert factor > 1
    assert np.abs(found - factor * wanted).max() < 2e-3 * np.abs(factor * wanted).max()
    assert [row["step"] for row in after.metrics] == list(range(1, with_lap(method).steps(4) + 1))
    row = after.metrics[method.steps(4) - 1]
    assert row["accuracy"] == before.accuracy, "what the method gave is measured, too"
    assert row["backward"] == after.metrics[-1]["backward"]
    assert row["forward"] + len(x) == after.metrics[-1]["forward"]


def test_the_softmax_gives_probabilities(blobs: FederatedData) -> None:
    """No other temperature of the training data's scores is much better."""
    result = go(with_lap(FedSeq(epochs=2)), blobs)
    x, y = training_data(blobs)
    with torch.no_grad():
        logits = result.model(x)
    losses = [float(nn.functional.cross_entropy(logits * 2 ** (k / 2), y)) for k in range(-4, 5)]
    assert losses[4] < min(losses) + 0.02


S = 4 * 8 * 9 + 8 * 3 * 8 + 8 * 3 + 8 * 8  # Gram matrix, class sums, counts; centres and gains


def model_bytes() -> Size:
    return Size.of(Network(Tiny()), (4,))


def test_bytes_of_a_chain_by_hand(blobs: FederatedData) -> None:
    """The last client has the model; it goes to three others, and the sums return to where they
    began."""
    method, m = with_lap(FedSeq(epochs=1)), model_bytes()
    result = go(method, blobs)
    lap = [(row.step, row.source, row.target, row.bytes) for row in result.ledger[3:]]
    last, others = "client-3", ["client-0", "client-1", "client-2"]
    wanted = []
    for i, client in enumerate(others):
        wanted += [(5 + i, last, client, m), (5 + i, [last, *others][i], client, S)]
    assert lap == [*wanted, (8, "client-2", last, S)]
    assert result.bytes == 3 * m + 3 * m + 4 * S == method.moved(result.state, 4, m)
    assert method.cost(4, m) == result.bytes + m


def test_bytes_of_a_star_by_hand(blobs: FederatedData) -> None:
    """The server has the model; it goes to all four, and the sums from one to the next and to the
    server."""
    method, m = with_lap(Average(epochs=1)), model_bytes()
    result = go(method, blobs)
    names = [f"client-{i}" for i in range(4)]
    lap = [(row.source, row.target, row.bytes) for row in result.ledger[4:]]
    assert sorted(lap) == sorted(
        [("server", k, m) for k in names]
        + [(k, after, S) for k, after in zip(names, [*names[1:], "server"], strict=True)]
    )
    assert (
        result.bytes
        == 4 * m + 4 * m + 4 * S
        == method.moved(result.state, 4, m)
        == method.cost(4, m)
    )


def test_of_one_client_nothing_moves(blobs: FederatedData) -> None:
    """The yardstick with all data in one place."""
    method = with_lap(Centralized(epochs=1))
    result = go(method, blobs)
    assert result.bytes == 0 == method.moved(result.state, 1, model_bytes())
    assert method.steps(1) == len(result.metrics) == 3


@pytest.mark.parametrize("method", SHAPES)
def test_resumes_after_every_step_bit_for_bit(
    method: Method, blobs: FederatedData, tmp_path: Path
) -> None:
    lap = with_lap(method)
    go(lap, blobs, folder=tmp_path / "whole")
    for _ in range(lap.steps(4)):
        go(lap, blobs, folder=tmp_path / "each", stop_after=1)
    assert files(tmp_path / "each") == files(tmp_path / "whole")


@pytest.mark.parametrize(
    "method",
    [SHAPES[1], *(pytest.param(*s.values, id=s.id, marks=pytest.mark.slow) for s in SHAPES[2:4])],
)
def test_same_bits_in_other_processes(method: Method, blobs: FederatedData) -> None:
    here, there = (
        go(with_lap(method), blobs),
        go(with_lap(method), blobs, processes=True, workers=2),
    )
    assert same(here.weights, there.weights)
    assert (here.metrics, here.ledger) == (there.metrics, there.ledger)


def test_every_pass_is_counted(blobs: FederatedData) -> None:
    with watched() as seen:
        go(with_lap(FedSeq(epochs=1)), blobs, evaluate_every=100)
    assert all(passes.reported == passes.measured for passes in seen.passes)
    assert sum(passes.task == "lap_add" for passes in seen.passes) == 4


def test_its_outline_is_what_happens_in_a_chain(blobs: FederatedData) -> None:
    method = with_lap(FedTasuki(epochs=1))
    found = outline(Setup(method, Tiny, blobs.dataset, seed=3), [c.name for c in blobs.clients])
    assert found is not None
    moved = [(row.step, row.source, row.target) for row in go(method, blobs).ledger]
    assert [(row.step, row.source, row.target) for row in found.transfers] == moved
    assert {name for name, *_ in [r.key.split("-")[2:] for r in found.result]} == {"lap_close"}


def test_who_is_away_in_the_lap_is_left_out(blobs: FederatedData) -> None:
    method = FedSeq(epochs=1)
    result = go(
        with_lap(method), blobs, absent=lambda step, client: step == 5 and client == "client-0"
    )
    x, y = training_data(blobs, 1)
    wanted = ridge(features_of(result, x), y.numpy())
    found = result.model.head.weight.detach().double().numpy()  # type: ignore[union-attr,operator]
    assert np.corrcoef(found.flatten(), wanted[:, :-1].flatten())[0, 1] > 0.9999
    assert [(row.step, row.source) for row in result.ledger if row.missing] == [(5, "client-0")]


def test_a_chain_does_not_end_without_its_lap(blobs: FederatedData, tmp_path: Path) -> None:
    """The client that has the model must be there when the lap begins and when it ends."""
    lap = with_lap(FedSeq(epochs=1))
    for gone in ({4, 5, 6, 7}, {8}):
        folder = tmp_path / str(len(gone))
        with pytest.raises(ClientMissing, match="client-3 did not answer"):
            go(lap, blobs, absent=lambda step, client, gone=gone: step in gone, folder=folder)
    assert same(go(lap, blobs, folder=folder).weights, go(lap, blobs).weights)


def test_a_star_does_not_end_without_its_lap(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="no client answered in the closing lap"):
        go(with_lap(FedAvg(rounds=1, epochs=1)), blobs, absent=lambda step, client: step > 0)
    lap = with_lap(Average(epochs=1))  # which needs everybody
    with pytest.raises(ClientMissing, match="client-2 did not answer"):
        go(lap, blobs, absent=lambda step, client: (step, client) == (3, "client-2"))


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (FedGram(), "makes another"),
        (FedOV(), "joins the clients' models"),
        (Ensemble(), "joins the clients' models"),
        (Local(), "gives personal ones"),
        (FedPer(), "gives personal ones"),
        (MetaFed(), "gives personal ones"),
        (FedELMYParallel(), "gives personal ones"),
        (MAEcho(decentralised=True), "gives personal ones"),
        (with_lap(FedSeq()), "already"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_methods_without_one_model_of_their_network_are_refused(method: Method, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        with_lap(method)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_every_method_has_a_lap_or_says_why_not(kind: type[Method]) -> None:
    method = kind()
    fits = method.one_model and not (
        method.traits.joins_models or method.changes_network or method.traits.extra_outputs
    )
    if fits and kind.own_network is Method.own_network:
        assert with_lap(method).steps(4) == method.steps(4) + 5
    else:
        with pytest.raises(UserError, match="leave it out"):
            with_lap(method)


class Net(nn.Module):
    """A network with some head."""

    def __init__(self, head: nn.Module, after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.features, self.head, self.after = nn.Linear(4, 5), head, after

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.after(self.head(self.features(x)))


def test_networks_without_a_linear_head_are_refused(blobs: FederatedData) -> None:
    lap = with_lap(FedSeq(epochs=1))
    two = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    for net in (Net(two), Net(nn.Linear(5, 3, bias=False)), Net(nn.Linear(5, 3), lambda x: x * 2)):
        with pytest.raises(UserError, match="ends with `head`, one linear layer"):
            go(lap, blobs, net)
    with pytest.raises(UserError, match="which part of it is the classifier"):
        go(lap, blobs, nn.Sequential(nn.Linear(4, 3)))
    assert go(lap, blobs, Net(nn.Linear(5, 3))).weights is not None


def test_scales_reach_far_and_are_finer_than_a_hundredth() -> None:
    """By hand: deviations 1 and 0; 32 mean deviations of 1/2 reach 32767 if the own deviation is
    smaller."""
    scales = settled(torch.tensor([[1.0, 5], [3, 5]]))
    assert scales.centre.tolist() == [2, 5]
    assert scales.gain.tolist() == pytest.approx([WIDE / 32, WIDE / 16])
    assert whole(torch.tensor([[3.0, 5.001], [1e9, -1e9]]), scales).tolist() == [
        [1024, 2],
        [WIDE, -WIDE],
    ]
    with pytest.raises(UserError, match="not finite"):
        settled(torch.tensor([[1.0], [float("nan")]]))


def test_foreign_scales_are_refused(blobs: FederatedData) -> None:
    network = Network(Tiny())
    good = Scales(torch.zeros(8), torch.ones(8))
    for bad in (
        Scales(torch.zeros(7), torch.ones(7)),
        good._replace(gain=torch.ones(8).double()),
        good._replace(gain=torch.zeros(8)),
        good._replace(centre=torch.full((8,), float("inf"))),
    ):
        with pytest.raises(UserError, match="the scales received"):
            refitted(network.weights(), network.layout, Totals(bad, None), Classification())  # type: ignore[arg-type]


def test_a_plan_knows_the_lap() -> None:
    made = plan_of("fedseq+lap", {"epochs": 3})
    plain = replace(made, recipe=replace(made.recipe, method=FedSeq(epochs=3)))
    assert made == Plan(Recipe(with_lap(FedSeq(epochs=3))), hardware=made.hardware)
    assert made != plain
    assert from_json(json.loads(json.dumps(made.to_json()))) == made
    assert flat(made) == flat(plain) | {"method": "fedseq+lap"}


@pytest.mark.parametrize("name", ["fedavg+lap", "FedAvg+Lap"])
def test_the_lap_is_part_of_the_name(name: str) -> None:
    kind = method_named(name)
    assert (kind.title(), name_of(kind)) == ("fedavg+lap", "fedavg+lap")
    assert method_named(name) is kind is type(with_lap(FedAvg()))
    assert kind() == with_lap(FedAvg()) != FedAvg()
    assert repr(with_lap(FedAvg(rounds=7))).startswith("FedAvg+lap(rounds=7, ")
    assert pickle.loads(pickle.dumps(with_lap(FedAvg(rounds=7)))) == with_lap(FedAvg(rounds=7))
    recipe = Recipe(with_lap(FedAvg(rounds=7)))
    assert recipe_of(recipe.to_json()) == recipe
    assert kind.traits == replace(FedAvg.traits, weighs=False)


@pytest.mark.parametrize("name", ["fedavg+lap+lap", "fedavg+laps", "+lap"])
def test_other_names_are_refused_in_a_line(name: str) -> None:
    with pytest.raises(UserError) as refused:
        method_named(name)
    assert "\n" not in str(refused.value)


def test_a_method_of_the_users_own_has_a_lap(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from ekiden.methods import FedSeq\n\nclass Mine(FedSeq):\n    pass\n")
    outside.trust(f"{file}:Mine+lap")
    kind = method_named(f"{file}:Mine+lap")
    assert (name_of(kind), kind.title()) == (f"{file}:Mine+lap", "mine+lap")
    assert kind().steps(4) == FedSeq().steps(4) + 5


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def ekiden(*args: str) -> str:
        monkeypatch.setattr("sys.argv", ["ekiden", *args])
        main()
        return capsys.readouterr().out

    folder = tmp_path / "fedseq-lap-digits-seed0"
    flags = (
        "--epochs",
        "1",
        "--clients",
        "2",
        "--model",
        "mlp",
        "--batch-size",
        "64",
        "--threads",
        "1",
    )
    ekiden("run", "fedseq+lap", "--out", str(tmp_path), *flags)
    ekiden("run", "fedseq", "--out", str(tmp_path / "plain"), *flags)
    config = json.loads((folder / "config.json").read_text())
    assert (config["recipe"]["method"], config["steps"]) == ("fedseq+lap", 5)
    assert label(config).startswith("fedseq+lap (")
    shown = ekiden("show", str(folder))
    assert "fedseq+lap (" in shown
    assert "; finished" in shown or "finished" in shown.split("stopped")[0]
    both = ekiden("compare", str(folder), str(tmp_path / "plain" / "fedseq-digits-seed0"))
    assert both.count("fedseq+lap (") == 1
    said = json.loads(ekiden("evaluate", str(folder), "--json"))
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert said["accuracy"] == last["accuracy"]
    assert load_model(folder).network.head.weight.shape[0] == 10  # type: ignore[union-attr,index]
    with pytest.raises(SystemExit):
        ekiden("run", "local+lap", *flags)
    assert (
        capsys.readouterr().err
        == "ekiden: +lap needs a global model, local gives personal ones: leave it out\n"
    )


def test_a_folder_without_the_lap_is_another_run(blobs: FederatedData, tmp_path: Path) -> None:
    go(FedSeq(epochs=1), blobs, folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"method, steps differ"):
        go(with_lap(FedSeq(epochs=1)), blobs, folder=tmp_path / "run")


def test_the_model_file_says_it(blobs: FederatedData, tmp_path: Path) -> None:
    result = go(with_lap(FedAvg(rounds=1, epochs=1)), blobs, folder=tmp_path / "run")
    assert isinstance(result.weights, Weights)
    loaded = load_model(tmp_path / "run", network=Tiny)
    x = blobs.dataset.test.x[:5]
    assert torch.equal(loaded(x), result.model(x))
